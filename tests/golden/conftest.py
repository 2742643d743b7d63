"""Client commands over a fake daemon, as the tests of the command line have them."""

from tests.cli.conftest import _fake, _served, daemon, flexd_command, url  # noqa: F401
