"""Process groups of a job: each default group has its own, and none outlives the interpreter's modules."""

from __future__ import annotations

import subprocess
import sys

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
