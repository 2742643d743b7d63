"""A daemon builds all API models before threads use them."""

from __future__ import annotations

import subprocess
import sys

from tests.support.repository import child_environment


def test_an_app_has_built_them_all() -> None:
    code = (
        "from tests.support.fake_daemon import FakeDaemon\n"
        "from flexd.server.app import create_app\n"
        "from flexd.server.metrics import Metrics\n"
        "from flexd.api.base import Model\n"
        "def below(model):\n"
        "    return [model] + [each for made in model.__subclasses__() for each in below(made)]\n"
        "waiting = sum(not model.__pydantic_complete__ for model in below(Model)[1:])\n"
        "daemon = FakeDaemon()\n"
        "create_app(daemon, Metrics(daemon))\n"
        "print(waiting > 0, [model.__name__ for model in below(Model)[1:] if not model.__pydantic_complete__])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False,
        env=child_environment(),
    )  # fmt: skip
    assert done.stdout.split("\n")[0] == "True []", done.stderr
