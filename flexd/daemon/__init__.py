"""The daemon process: build all parts from the configuration, start and stop them, handle signals and reloads.

The only package that knows stream, sketches, planner, control channel and API at once; only the command line and the
demo import it.
"""

from flexd.daemon.daemon import Daemon, run_daemon

__all__ = ["Daemon", "run_daemon"]
