"""Calls to a stopped daemon wait, but the process that makes them continues."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import Store

from flexd.control.protocol.store_client import StoreClient
from flexd.core.errors import ControlError
from tests.support.stopped import state_of, stop

SERVER = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""
CALLS: dict[str, Callable[[StoreClient], object]] = {
    "get": lambda client: client.get("key"),
    "check": lambda client: client.check("key"),
    "queue_push": lambda client: client.queue_push("queue", "text"),
    "delete_key": lambda client: client.delete_key("other key"),
}


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    process.kill()
    process.wait(10)


def test_every_call_of_a_rank_is_in_the_list() -> None:
    named = {name for name, _ in inspect.getmembers(StoreClient, inspect.isfunction) if not name.startswith("_")}
    assert named - {"call", "close"} == set(CALLS)


def test_no_call_to_a_stopped_daemon_keeps_this_process_from_running(
    server: tuple[subprocess.Popen[str], int],
) -> None:
    process, port = server
    clients = {name: StoreClient("127.0.0.1", port, "job", timeout_seconds=12.0) for name in CALLS}
    for client in clients.values():
        client.call(lambda store: store.set("key", "value"))
    # A call that holds the GIL stops this thread too, so another process resumes the daemon.
    resumer = subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {process.pid}"])
    stop(process.pid)

    def make(name: str) -> None:
        with contextlib.suppress(ControlError):
            CALLS[name](clients[name])

    callers = [threading.Thread(target=make, args=(name,)) for name in CALLS]
    for caller in callers:
        caller.start()
        caller.join(0.1)
    state = state_of(process.pid)
    waiting = {name for name, caller in zip(CALLS, callers, strict=True) if caller.is_alive()}
    os.kill(process.pid, signal.SIGCONT)
    resumer.kill()
    resumer.wait(10)
    assert state == "T", "this thread has waited for the daemon"
    assert waiting >= {"get", "check"}
    for caller in callers:
        caller.join(30)
        assert not caller.is_alive()
    for client in clients.values():
        client.close()


def test_a_call_past_its_deadline_is_an_error(server: tuple[subprocess.Popen[str], int]) -> None:
    process, port = server
    client = StoreClient("127.0.0.1", port, "job", timeout_seconds=1.0)
    client.call(lambda store: store.set("key", "value"))
    stop(process.pid)

    def check(store: Store) -> bool:
        return bool(store.check(["key"]))

    with pytest.raises(ControlError, match="does not answer"):
        client.call(check)
    os.kill(process.pid, signal.SIGCONT)
