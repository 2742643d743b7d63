"""Client commands over a fake daemon, as the tests of the command line have them."""

from tests.cli.conftest import daemon, fake, flexd_command, served_daemon, server, url  # noqa: F401
