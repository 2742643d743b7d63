"""Programs in processes forked from one that has imported torch and flexd, which saves each of them seconds."""

import atexit
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tools.bench.ranks import preloaded


class Forked:
    """``program(*arguments)`` in a process of its own, which ends as an interpreter does: hooks run.

    Args:
        directory: its working directory, where its output is too, as files that begin with ``name``.
        environment: variables that differ from this process's.
    """

    def __init__(
        self, program: Callable[..., object], *arguments: Any, directory: Path, name: str = "out", **environment: str
    ) -> None:
        self._files = directory / f"{name}.stdout", directory / f"{name}.stderr"
        for file in self._files:
            file.touch()
        self._process: BaseProcess = preloaded("tests.support.rank_preload").Process(
            target=_run, args=(program, arguments, directory, {**os.environ, **environment}, *self._files)
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def wait(self, seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Return its end. Raises AssertionError if it has not ended by then."""
        self._process.join(seconds)
        code = self._process.exitcode
        self.kill()
        out, error = (file.read_text() for file in self._files)
        assert code is not None, f"not within {seconds} s: {error}"
        return subprocess.CompletedProcess((), code, out, error)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10)


def flexd(*arguments: str) -> None:
    from flexd.cli.main import main

    sys.argv = ["flexd", *arguments]
    main()


def script(path: str) -> None:
    runpy.run_path(path, run_name="__main__")


def _run(
    program: Callable[..., object], arguments: Any, directory: Path, environment: dict[str, str], *files: Path
) -> None:
    for target, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), target)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    atexit._clear()
    code = 0
    try:
        program(*arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
