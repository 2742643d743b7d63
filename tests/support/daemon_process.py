"""A daemon of the control channel in a process of its own: pushes one target after the other, without end.

Usage: python -m tests.support.daemon_process PORT DIRECTORY FIRST_SEED ROWS_PER_CHUNK TIMEOUT_SECONDS
Prints the port it listens on, then a line for every event, and after each target the channel's counters.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

from flexd.control.daemon.coordinator import Coordinator
from flexd.control.daemon.coordinator_types import ControlOptions
from flexd.control.daemon.journal import PlacementJournal
from flexd.control.daemon.migration_record import MigrationState
from flexd.control.daemon.pusher import ChunkLimits
from tests.support.ranks_in_threads import SECRET, TABLES, migrate, target


def main(port: int, directory: Path, seed: int, rows: int, timeout_seconds: float) -> None:
    def print_event(name: str, fields: object) -> None:
        # One write a line: events come from several threads.
        os.write(1, (json.dumps([name, fields], default=str) + "\n").encode())

    options = ControlOptions(
        "job", listen_port=port, secret=SECRET, timeout_seconds=timeout_seconds, chunks=ChunkLimits(2)
    )
    coordinator = Coordinator(options, TABLES, PlacementJournal(directory), on_event=print_event)
    coordinator.listen()
    print(coordinator.port, flush=True)
    coordinator.start()
    while True:
        wanted = target(seed)
        migration = migrate(coordinator, f"p{seed}", wanted, rows)
        while migration.wait(1) is not MigrationState.COMMITTED:
            if migration.done:
                break
        else:
            seed += 1
        print_event("channel", dataclasses.asdict(coordinator.channel_counters()))
        time.sleep(0.05)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
