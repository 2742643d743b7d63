"""Encoding and decoding of access messages.

Raises:
    MissingExtraError: at import, if pyarrow is not installed or does not load with the numpy that is.
"""

from __future__ import annotations

from flexd.core.errors import MissingExtraError
from flexd.core.usage_warnings import USAGE_WARNINGS, UsageWarningKind

try:
    import pyarrow as _pyarrow  # noqa: F401
except ImportError as error:
    if "numpy" in str(error).lower():
        USAGE_WARNINGS.note(UsageWarningKind.NUMPY, f"access messages need pyarrow ({error}): install numpy 2")
    raise MissingExtraError(
        f"access messages need pyarrow ({error})",
        remedy="pip install 'flexd[publisher]' in a trainer's image, which brings numpy 2; with numpy 1 an older "
        "pyarrow (16), or count with flexd.Tap, which needs neither",
    ) from error
