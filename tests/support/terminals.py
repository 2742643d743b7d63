"""Commands on a terminal."""

from collections.abc import Callable

import pexpect

Terminal = Callable[..., pexpect.spawn]


def ended(process: pexpect.spawn) -> tuple[str, int]:
    """Return the rest of the output and the exit status."""
    process.expect(pexpect.EOF)
    process.close()
    return process.before.replace("\r\n", "\n"), process.exitstatus
