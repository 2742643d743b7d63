"""The examples on two ranks, with the command of their first line: losses with and without flexd are equal, RecBole's
own trainer included."""

import difflib
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from flexd.daemon.config_file import with_known_tables
from flexd.demo.processes import free_ports
from flexd.demo.runner import PRESET
from flexd.topology.cluster import Collective
from flexd.topology.files import load_cluster, load_preset, scale_model
from tests.support import forked
from tests.support.flexd_processes import RunningDaemon, saved_sketches
from tests.support.forked import Forked
from tests.support.repository import ROOT

SCALE = 5_000
"""Factor of examples/rehearsal_cluster.yaml: its latencies are divided by it."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLES = ROOT / "examples"
STEPS = 21
Losses = dict[int, float]


END_SECONDS, KILL_SECONDS = 400.0, 40.0


def finished(command: list[str], environment: dict[str, str], seconds: float = END_SECONDS) -> str:
    """Return what a command prints. At the deadline it is ended with all its processes: torchrun, whose ranks have
    sessions of their own, ends them at SIGTERM and kills them after 30 s."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=seconds)
    except BaseException:  # the deadline of the test too
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILL_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    assert process.returncode == 0, errors[-3000:]
    return output


_ABORTED = "terminate called without an active exception"


def torchrun(name: str, *options: str, **environment: str) -> Losses:
    try:
        return _torchrun(name, *options, **environment)
    except AssertionError as error:  # torch sometimes aborts a rank that has nothing of flexd
        if "_before" not in name or _ABORTED not in str(error):
            raise
        return _torchrun(name, *options, **environment)


def _torchrun(name: str, *options: str, **environment: str) -> Losses:
    port = free_ports(1)[0]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("FLEXD_")}
    output = finished(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port),
            str(EXAMPLES / name), *(options or ("--steps", str(STEPS))),
        ],
        {**clean, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip
    lines = [line.split() for line in output.splitlines() if line.startswith("step ")]
    return {int(line[1]): float(line[3]) for line in lines}


@pytest.fixture(scope="module")
def before() -> Losses:
    losses = torchrun("sasrec_before.py")
    assert list(losses) == [0, 10, 20]
    assert losses[20] < losses[0] - 0.05, "training must reduce the loss"
    return losses


@pytest.mark.long
def test_losses_with_flexd_equal_those_without_and_the_daemon_counts_look_ups(before: Losses, tmp_path: Path) -> None:
    settings = yaml.safe_load((EXAMPLES / "sasrec.yaml").read_text())
    config = {name: settings[name] for name in ("job", "stream", "sketch")}
    with RunningDaemon(tmp_path, config) as daemon:
        address = f"127.0.0.1:{daemon.config.control.listen_port}"
        assert torchrun("sasrec.py", FLEXD_CONTROL=address) == pytest.approx(before, abs=2e-4)
        daemon.process.stop()
        known = with_known_tables(daemon.config)
        assert [table.name for table in known.tables] == ["items"], "taken from the ranks"
        assert saved_sketches(known).samples > 0, "look-ups were counted"


@pytest.mark.long
def test_losses_with_torchrec_types_equal_those_without_flexd(before: Losses) -> None:
    pytest.importorskip("torchrec")
    assert torchrun("torchrec_sasrec.py") == pytest.approx(before, abs=2e-4)


@pytest.mark.long
def test_a_torchrec_trainer_moves_to_flexd_and_back_with_equal_losses(tmp_path: Path) -> None:
    pytest.importorskip("fbgemm_gpu")
    options = {at: ("--first", str(at), "--steps", "20") for at in (0, 20, 40)}
    start, moved = str(tmp_path / "start"), str(tmp_path / "moved")
    assert list(torchrun("dlrm_before.py", *options[0], "--save", start)) == [0, 10]
    stayed = torchrun("dlrm_before.py", "--first", "20", "--steps", "40", "--load", start)
    assert list(stayed) == [20, 30, 40, 50]
    losses = torchrun("dlrm.py", *options[20], "--load", start, "--save", moved)
    losses |= torchrun("dlrm_before.py", *options[40], "--load", moved)
    assert losses == pytest.approx(stayed, abs=3e-6)


@pytest.mark.long
def test_a_table_larger_than_memory_trains(tmp_path: Path) -> None:
    done = Forked(forked.script, str(EXAMPLES / "larger_than_memory.py"), directory=tmp_path).wait()
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(line.split()[3]) for line in done.stdout.splitlines()]
    assert losses[0] == pytest.approx(1.0, abs=1e-3), "rows begin near zero"
    assert losses[1] == pytest.approx(1.0, abs=1e-3), "the second batch has other rows"
    assert 0 < losses[4] < losses[2] < 0.95, "the first batch comes again, trained"


def diff(before: str, after: str) -> list[str]:
    sides = [(EXAMPLES / name).read_text().splitlines() for name in (before, after)]
    return list(difflib.unified_diff(*sides, f"examples/{before}", f"examples/{after}", lineterm="", n=1))


@pytest.mark.parametrize(
    ("before", "after", "lines", "page", "shown_as"),
    [
        ("sasrec_before.py", "sasrec.py", 25, "integrating.md", 1),
        ("dlrm_before.py", "dlrm.py", 15, "integrating.md", 2),
        ("recbole_before.py", "recbole_sasrec.py", 30, "frameworks.md", 1),
    ],
)
def test_the_difference_is_a_few_lines_and_the_docs_show_it(
    before: str, after: str, lines: int, page: str, shown_as: int
) -> None:
    shown = diff(before, after)
    changed = [line for line in shown if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert len(changed) < lines, "\n".join(changed)
    block = (ROOT / "docs" / page).read_text().split("```diff\n")[shown_as].split("```")[0]
    assert block == "\n".join(shown) + "\n", f"docs/{page} shows another difference"


def test_the_rehearsal_has_the_cluster_of_the_demo() -> None:
    rehearsal = load_cluster(EXAMPLES / "rehearsal_cluster.yaml")
    demos = scale_model(load_preset(PRESET), SCALE)
    assert rehearsal.exposed == demos.exposed
    for link, other in ((rehearsal.intra_node, demos.intra_node), (rehearsal.inter_node, demos.inter_node)):
        assert link.wire_bytes_per_second == other.wire_bytes_per_second
        for collective in Collective:
            curve, expected = link.curve(collective), other.curve(collective)
            assert curve.points == expected.points
            assert curve.latency_seconds == pytest.approx(expected.latency_seconds, rel=1e-9)
    settings = yaml.safe_load((EXAMPLES / "sasrec.yaml").read_text())
    assert ROOT / settings["topology"]["file"] == EXAMPLES / "rehearsal_cluster.yaml"


def printed(*command: str, python: str = sys.executable) -> list[float]:
    """Return the figures that a script prints. Lines of two ranks may be in one."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    output = finished([python, *command], environment)
    return [float(number) for number in re.findall(r"\d+\.\d{10}", output)]


@pytest.mark.long
@pytest.mark.parametrize("learner", ["adam", "sgd"])
@pytest.mark.parametrize("loss", ["BPR", "CE"])
def test_two_ranks_have_the_losses_and_metrics_of_plain_recbole(loss: str, learner: str) -> None:
    pytest.importorskip("recbole")
    options = ("--loss", loss, "--learner", learner)
    plain = printed("examples/recbole_before.py", *options)
    assert len(plain) == 3 + 2, "losses of three epochs and two metrics"
    assert plain[2] < 0.8 * plain[0], "training must reduce the loss"
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_ports(1)[0]))
    of_ranks = printed(*launch, "examples/recbole_sasrec.py", *options)
    assert sorted(of_ranks) == pytest.approx(sorted(plain * 2), abs=1e-9, rel=0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "checkpoint"), [("lightning_trainer.py", "epoch=1.ckpt"), ("transformers_trainer.py", "checkpoint-16")]
)
def test_a_framework_of_two_ranks_has_the_losses_of_one_process_and_resumes_on_one_or_two(
    script: str, checkpoint: str, tmp_path: Path
) -> None:
    """Validation after each epoch, with clipping and accumulation; each epoch is saved in the framework's own way."""
    python = ROOT / ".venv-frameworks" / "bin" / "python"
    if not python.exists():
        pytest.skip("make frameworks")

    def losses(ranks: int, name: str, *options: str) -> list[float]:
        launch = ("-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_ports(1)[0]))
        command = (f"examples/{script}", "--directory", str(tmp_path / name), *options)
        return printed(*(launch if ranks > 1 else ()), *command, python=str(python))

    plain = losses(1, "plain", "--plain")
    assert len(plain) == 3
    assert plain[2] < plain[0] - 0.3, "training must reduce the loss"
    assert losses(2, "first", "--epochs", "2") == pytest.approx(plain[:2], abs=1e-9, rel=0)
    saved = str(tmp_path / "first" / checkpoint)
    for ranks in (1, 2):
        assert losses(ranks, f"of {ranks}", "--resume", saved) == pytest.approx(plain[2:], abs=1e-9, rel=0)
