"""The daemon: wires stream, sketches, planner, control channel and API together and owns their life cycle."""

from flexd.daemon.run import run_daemon
from flexd.daemon.service import Daemon

__all__ = ["Daemon", "run_daemon"]
