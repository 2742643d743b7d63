"""Types of the configuration: checked numbers, names, addresses and the base model of sections."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _no_truth_value(value: Any) -> Any:
    """Refuse truth values: YAML reads yes, no, on and off as such, and pydantic converts them to 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not a truth value")
    return value


Int = Annotated[int, BeforeValidator(_no_truth_value)]
Float = Annotated[float, BeforeValidator(_no_truth_value)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Seconds = Annotated[Float, Field(gt=0, le=86_400 * 365)]
Port = Annotated[Int, Field(ge=0, le=65_535)]


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach the name or address ``host``."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port`` or ``[v6]:port``. Raises ValueError, which names the allowed forms."""
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or (":" in bare and bare == host) or not (port.isascii() and port.isdigit()):
        raise ValueError("must be host:port or [IPv6 address]:port")
    if int(port) > 65_535:
        raise ValueError("the port must be 0 to 65535")
    return bare, int(port)


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, hide_input_in_errors=True
    )
