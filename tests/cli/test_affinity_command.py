"""``flexd affinity users``: all pages of one learning become one file."""

from __future__ import annotations

from pathlib import Path

from flexd.affinity import NodeMap
from flexd.api.plan import UserNodePage
from tests.support.fake_daemon import USERS


def test_all_pages_become_one_map(flexd_command, url, daemon, tmp_path: Path) -> None:
    out = tmp_path / "nodes.npz"
    done = flexd_command("affinity", "users", "-o", out, "--url", url)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"7 users in 2 nodes: {out}" in done.stdout
    assert "90.00% of those without affinity" in done.stdout
    assert [call[1] for call in daemon.calls] == [0, 3, 6]
    read = NodeMap.load(out)
    assert read.ids.tolist() == list(USERS)
    assert read.nodes_of.tolist() == [user % 2 for user in USERS]


def test_pages_of_two_learnings_are_not_mixed(flexd_command, url, daemon, tmp_path: Path, monkeypatch) -> None:
    whole, learnings = daemon.user_nodes, iter([1, 2, 2, 2, 2])

    def learnt_anew(offset: int, limit: int) -> UserNodePage:
        number = next(learnings, 0)
        page = whole(offset, limit)
        return page.model_copy(update={"learnt": number, "nodes_of": (number - 1,) * len(page.ids)})

    monkeypatch.setattr(daemon, "user_nodes", learnt_anew)
    out = tmp_path / "nodes.npz"
    assert flexd_command("affinity", "users", "-o", out, "--url", url).returncode == 0
    assert NodeMap.load(out).nodes_of.tolist() == [1] * len(USERS)
