"""Bearer tokens: sender and scope of a request. Tokens themselves are not kept, only their digests."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass

from flexd.config.server import ApiScope, TokenConfig
from flexd.core.errors import ConfigError
from flexd.core.secrets import KeyFile

_DIGEST = re.compile(rb"sha256:([0-9a-fA-F]{64})")


@dataclass(frozen=True)
class Caller:
    """The sender of a request. ``scope`` "admin" may also change."""

    name: str
    scope: ApiScope


class Tokens:
    """The configured tokens; a changed file takes effect within ``secrets.RELOAD_SECONDS``. Thread-safe.

    Raises:
        ConfigError: a file cannot be read or holds no token, or two names have the same one.
    """

    def __init__(self, configured: Sequence[TokenConfig]) -> None:
        self._files = [
            (Caller(token.name, token.scope), KeyFile(token.file, f"server.tokens[{at}].file"))
            for at, token in enumerate(configured)
        ]
        seen: dict[bytes, str] = {}
        for at, (caller, file) in enumerate(self._files):
            for digest in _digests(file):
                if digest in seen:
                    raise ConfigError(
                        f"server.tokens[{at}].file: {caller.name!r} has the token of {seen[digest]!r}",
                        remedy="give each name a token of its own",
                    )
                seen[digest] = caller.name

    def __bool__(self) -> bool:
        return bool(self._files)

    def owner(self, token: str) -> Caller | None:
        """Return the owner of a token. The time does not depend on which token matches, or whether one does."""
        # Restore the bytes as they were sent: headers are decoded as Latin-1.
        given = hashlib.sha256(token.encode("latin-1")).digest()
        found = None
        for caller, file in self._files:
            for digest in _digests(file):
                if hmac.compare_digest(given, digest):
                    found = caller
        return found


def _digests(file: KeyFile) -> list[bytes]:
    digests = []
    for key in file.keys():  # noqa: SIM118
        match = _DIGEST.fullmatch(key)
        digests.append(bytes.fromhex(match[1].decode()) if match else hashlib.sha256(key).digest())
    return digests
