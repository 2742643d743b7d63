"""The daemon: wires stream, sketches, planner, control channel and API together and owns their life cycle."""

from flexd.daemon.service import Daemon, run_daemon

__all__ = ["Daemon", "run_daemon"]
