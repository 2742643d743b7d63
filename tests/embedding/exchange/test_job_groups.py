"""Process groups of a job: each default group has its own, and none outlives the interpreter's modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest import mock

from flexd.embedding.exchange import job_groups
from tests.support.repository import ROOT, child_environment

PROGRAM = """
import atexit
seen = []
atexit.register(lambda: print("default is", seen[0]._present[0].default))  # runs after what is registered later
import torch.distributed as dist
from flexd.embedding.exchange import job_groups
seen.append(job_groups)

def begin():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return job_groups.JobGroups.current()

first = begin()
first.begin_use()
dist.destroy_process_group()
second = begin()
second.begin_use()
first.end_use(destroy=True)
print("same", first is second, "users", second._users, "kept", job_groups.JobGroups.current() is second)
"""


def test_groups_belong_to_their_default_group_and_are_released_at_exit() -> None:
    """The end of a collection of an earlier job counts there. A group that a module holds to the end is destroyed with
    the modules, and its threads abort the process."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
        env=child_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["same False users 1 kept True", "default is None"]


def test_the_end_of_a_process_waits_for_threads_of_gloo_that_run(tmp_path: Path) -> None:
    """One that frees a tensor while the interpreter ends aborts the process."""
    thread = tmp_path / "12" / "stat"
    thread.parent.mkdir()
    thread.write_text("12 (pt_gloo_runloop) R 1 2")
    assert job_groups._gloo_runs(tmp_path)
    for other in ("12 (pt_gloo_runloop) S 1 2", "12 (python) R 1 2", "12 (odd) name) R 1 2"):
        thread.write_text(other)
        assert not job_groups._gloo_runs(tmp_path)
    seen = [True, True, False]
    with (
        mock.patch.object(job_groups, "_gloo_runs", side_effect=lambda _: seen.pop(0)),
        mock.patch.object(job_groups, "_present", [job_groups.JobGroups()]),
    ):
        job_groups._release()
        assert seen == []
        with (
            mock.patch.object(job_groups, "_gloo_runs", return_value=True),
            mock.patch.object(job_groups, "_RELEASE_SECONDS", 0.01),
        ):
            job_groups._release()  # a thread that never rests does not keep the process
