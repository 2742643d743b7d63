"""A copy of flexd as its next version could be: a higher protocol version, other fields, a new kind of message.

Processes that start with the folder at the front of their import path run that version (``ROOT`` runs this one).
"""

import ast
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from flexd.control.protocol import handshake
from tests.support.repository import ROOT

VERSION = handshake.VERSION + 1
ADDED = "added_by_the_next_version"
NEW_KIND = "greeting"
REMOVED: Mapping[str, tuple[str, ...]] = {
    "Hello": ("address",),
    "HelloRefused": ("remedy",),
    "SentBytes": ("migration_inter_bytes",),
}
"""Optional fields, by class, that the next version neither sends nor reads."""

_MESSAGES = "flexd/control/protocol/messages.py"
_GREETING = f'b\'{{"kind":"{NEW_KIND}","to":["anyone",null],"job":7}}\''
_CLIENT_GREETS = f"""

_send_of_version_1 = ChannelClient.send


def _send_and_greet(self, message, body=b""):
    _send_of_version_1(self, message, body)
    _send_of_version_1(self, {_GREETING})


ChannelClient.send = _send_and_greet  # type: ignore[method-assign]
"""
_SERVER_GREETS = f"""

_send_of_version_1 = ChannelServer.send


def _send_and_greet(self, peers, message, body=b""):
    _send_of_version_1(self, peers, message, body)
    _send_of_version_1(self, peers, {_GREETING})


ChannelServer.send = _send_and_greet  # type: ignore[method-assign]
"""
_WITHOUT_REMOVED = f"""

_REMOVED = {dict(REMOVED)!r}
_fields_of_version_1, _json_of_version_1 = wire_fields, to_json


@cache
def wire_fields(cls: Any) -> Mapping[str, Any]:
    removed = _REMOVED.get(cls.__name__, ())
    return {{name: field for name, field in _fields_of_version_1(cls).items() if name not in removed}}


def to_json(value: Any) -> Any:
    found, removed = _json_of_version_1(value), _REMOVED.get(type(value).__name__, ())
    return {{name: part for name, part in found.items() if name not in removed}} if removed else found
"""


def write_second_tree(directory: Path) -> Path:
    """Write the next version's package to ``directory``/flexd and return ``directory``.

    Raises:
        AssertionError: this version does not have what the next one changes.
    """
    shutil.copytree(ROOT / "flexd", directory / "flexd", ignore=_unfinished)
    _replace(directory / "flexd/control/protocol/handshake.py", {
        f"\nVERSION = {handshake.VERSION}\n": f"\nVERSION = {VERSION}\n",
    })  # fmt: skip
    messages = directory / _MESSAGES
    _add_field(messages, _messages(messages), f"{ADDED}: tuple[int, ...] = (1, 2)")
    _append(directory / "flexd/control/protocol/wire.py", _WITHOUT_REMOVED)
    _append(directory / "flexd/control/agent/channel_client.py", _CLIENT_GREETS)
    _append(directory / "flexd/control/daemon/channel_server.py", _SERVER_GREETS)
    _add_field(directory / "flexd/control/protocol/report.py", ["StepReport"], f"{ADDED}: int = 5")
    _add_field(directory / "flexd/api/status.py", ["DaemonStatus"], f'{ADDED}: str = "of the status"')
    # The next format is read one version before it is written.
    _replace(directory / "flexd/core/tap_counts.py", {
        "OLDEST_FORMAT, NEWEST_FORMAT = 2, 2": "OLDEST_FORMAT, NEWEST_FORMAT = 2, 3",
        '"source_rank": counts.source_rank,': f'"source_rank": counts.source_rank, "{ADDED}": "of the counts",',
    })  # fmt: skip
    return directory


def _unfinished(directory: str, names: list[str]) -> list[str]:
    """Compiled files are copied, which saves the first start their compilation; those being written are left out."""
    compiled = Path(directory).name == "__pycache__"
    return [name for name in names if compiled and not name.endswith((".pyc", ".nbi", ".nbc"))]


def _messages(path: Path) -> list[str]:
    """Return the names of the classes with a ``kind``."""
    found = [
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and any(keyword.arg == "kind" for keyword in node.keywords)
    ]
    assert found, f"no message in {path}"
    return found


def _add_field(path: Path, classes: Iterable[str], field: str) -> None:
    """Add a field, with its default, after the last one of each class."""
    text = path.read_text()
    lines, ends = text.splitlines(), {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name in classes:
            ends[node.name] = max(
                item.end_lineno or 0 for item in node.body if isinstance(item, ast.AnnAssign | ast.Expr)
            )
    missing = set(classes) - ends.keys()
    assert not missing, f"{path} has no {missing}"
    for end in sorted(ends.values(), reverse=True):
        lines.insert(end, f"    {field}")
    path.write_text("\n".join(lines) + "\n")


def _append(path: Path, code: str) -> None:
    with path.open("a") as file:
        file.write(code)


def _replace(path: Path, changes: Mapping[str, str]) -> None:
    text = path.read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, f"{path} has {text.count(old)} of {old!r}"
        text = text.replace(old, new)
    path.write_text(text)
