"""A channel server in a process of its own, which reports the memory that its connections take.

Usage: python -m tests.support.channel_process OPTIONS_JSON; it prints its port. Each line on standard input is a
command: ``drain`` receives from now on, ``send N`` sends N bodies of 1 MiB to every peer, ``report`` prints
(most bytes traced since the start, counters) as JSON; the end of the input ends it.
"""

import dataclasses
import json
import sys
import threading
import tracemalloc

from flexd.control.daemon.channel_events import ChannelOptions, Opened, Received
from flexd.control.daemon.channel_server import ChannelServer
from flexd.control.protocol.wire import MAX_BODY_BYTES
from tests.support.channel import CREDENTIALS


def main() -> None:
    server = ChannelServer(ChannelOptions(**json.loads(sys.argv[1])), CREDENTIALS)
    peers: list[int] = []
    drains = threading.Event()

    def coordinate() -> None:
        drains.wait()
        while True:
            for event in server.unread.receive(16, 1.0):
                if isinstance(event, Opened):
                    peers.append(event.peer)
                elif isinstance(event, Received) and event.message == b"ping":
                    server.send([event.peer], b"pong")

    threading.Thread(target=coordinate, daemon=True).start()
    tracemalloc.start()
    server.start()
    print(server.port, flush=True)
    for line in sys.stdin:
        command, *numbers = line.split()
        if command == "drain":
            drains.set()
        elif command == "send":
            for _ in range(int(numbers[0])):
                # Each body is another one, so that none is shared with the next.
                server.send(list(peers), b"body", bytes(MAX_BODY_BYTES))
        else:
            print(json.dumps([tracemalloc.get_traced_memory()[1], dataclasses.asdict(server.counters())]), flush=True)
    server.stop(5)


if __name__ == "__main__":
    main()
