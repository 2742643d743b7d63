"""The base of the configuration's sections, checked types, YAML and environment variables, and faults by key path."""

import difflib
import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo

from flexd.core.errors import ConfigError


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


def _each_named_once(value: list[Any]) -> list[Any]:
    twice = sorted(name for name, times in Counter(each.name for each in value).items() if times > 1)
    if twice:
        raise ValueError(f"each needs its own name; named twice: {', '.join(twice)}")
    return value


UniqueNames = AfterValidator(_each_named_once)


def needs_key(key: str, problem: str, *, both: bool = False) -> AfterValidator:
    """Return the check that a value is given only beside the earlier ``key`` of its section.

    Args:
        problem: says what to do.
        both: the key needs the value too.
    """

    def check(value: Any, info: ValidationInfo) -> Any:
        given, other = bool(value), info.data.get(key) is not None
        if (both or given) and given != other:
            raise ValueError(problem)
        return value

    return AfterValidator(check)


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


ENV_PREFIX = "FLEXD__"
MAX_CONFIG_BYTES = 16 * 2**20
# Includes options of other Kafka clients (``ssl.key.pem``): their values stay hidden when given by mistake.
_SECRET = re.compile(
    r"password|passphrase|secret|token|credential|jaas|oauthbearer[._]config|api[._]?key|[._]pem$", re.IGNORECASE
)
_REDACTED = "(not shown)"


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that is given twice, which plain YAML loaders hide."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str | int | float | bool):
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} is given twice", key_node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """Read one YAML mapping.

    Raises:
        ConfigError: unreadable, too large, no valid YAML (with line and column), a key given twice, or no mapping.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
        if len(raw) > MAX_CONFIG_BYTES:
            raise ConfigError(
                f"{path}: is larger than {MAX_CONFIG_BYTES} bytes", remedy="check that it is the right file"
            )
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", remedy="give a readable UTF-8 YAML file") from error
    data = _parse_yaml(text, f"{path}: no valid YAML", "correct the file")
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: the top level must be a mapping, got {type(data).__name__}", remedy="write `key: value` lines"
        )
    return data


def _parse_yaml(text: str, problem: str, remedy: str) -> Any:
    try:
        # A SafeLoader: it builds plain values only.
        return yaml.load(text, Loader=_UniqueKeyLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{problem}{where}: {getattr(error, 'problem', None) or error}", remedy=remedy) from error


def overlay_environment(data: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Set ``a.b`` of ``data`` from ``FLEXD__A__B=value``; values are parsed as YAML, those of secrets are text.

    Returns the merged mapping (``data`` is unchanged) and the variable that set each key path.

    Raises:
        ConfigError: a variable names no key, reaches into something that is no section, or its value is no YAML.
    """
    merged: dict[str, Any] = dict(data)
    origins: dict[str, str] = {}
    for variable in sorted(environ):
        if not variable.startswith(ENV_PREFIX):
            continue
        path = variable.removeprefix(ENV_PREFIX).lower().split("__")
        if not all(path):
            raise ConfigError(f"environment variable {variable}: names no key", remedy="name it FLEXD__SECTION__KEY")
        node = merged
        for key in path[:-1]:
            child = node.get(key)
            if child is not None and not isinstance(child, dict):
                raise ConfigError(
                    f"environment variable {variable}: {key!r} is not a section", remedy="name it FLEXD__SECTION__KEY"
                )
            node[key] = dict(child or {})
            node = node[key]
        text, is_text = environ[variable], _is_secret(path[-1])
        problem = f"environment variable {variable}: no valid YAML value"
        node[path[-1]] = text if is_text else _parse_yaml(text, problem, "quote the value")
        origins[".".join(path)] = variable
    return merged, origins


def describe_faults(error: ValidationError, model: type[BaseModel], origins: Mapping[str, str]) -> list[str]:
    """Return one line a fault, ``key.path: allowed values (got value)``, without the values of secrets."""
    lines = []
    for fault in error.errors(include_url=False):
        parts = _strip_union_tags(fault["loc"])
        path = _dotted(parts)
        context = fault.get("ctx", {})
        if fault["type"] == "missing":
            text = "is required"
        elif fault["type"] == "extra_forbidden":
            text = _unknown_key(parts, _sibling_keys(fault["loc"], model))
        elif fault["type"] in ("union_tag_invalid", "union_tag_not_found"):
            discriminator = str(context.get("discriminator", "'kind'")).strip("'")
            path = f"{path}.{discriminator}"
            allowed = context.get("expected_tags", "'file_log', 'kafka', 'file', 'synthetic', 'tap'").replace("'", "")
            given = context.get("tag")
            text = f"must be one of {allowed}" + (f" (got {given!r})" if given is not None else " (it is missing)")
        else:
            text = f"{fault['msg'].removeprefix('Value error, ')} (got {_shown(path, fault['input'])})"
        variable = next(
            (v for key, v in origins.items() if f"{path}.".startswith(f"{key}.") or key.startswith(f"{path}.")), None
        )
        lines.append(f"{path}: {text}" + (f" [set by {variable}]" if variable else ""))
    return lines


def _is_secret(key: str) -> bool:
    """Return True if a key's value is a secret itself, not the path of a file with one."""
    return _SECRET.search(key) is not None and not key.endswith(("_file", "_files"))


def redacted(value: Any, key: str = "") -> Any:
    """Return the nested value without the values of secret keys; paths of secret files stay."""
    if key.endswith("_files"):
        return value
    if isinstance(value, Mapping):
        return {name: redacted(item, str(name)) for name, item in value.items()}
    if isinstance(value, list):
        return [redacted(item, key) for item in value]
    return _REDACTED if _is_secret(key) and value is not None else value


def _dotted(parts: Iterable[int | str]) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in parts).lstrip(".") or "(top level)"


def _strip_union_tags(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Remove the discriminator that pydantic inserts into the path, since the file has no such key."""
    if location[:2] == ("stream", "source") and len(location) > 2:
        return location[:2] + location[3:]
    return location


def _sibling_keys(location: tuple[int | str, ...], model: type[BaseModel]) -> list[str]:
    schema = model.model_json_schema()
    node: dict[str, Any] = schema
    for part in location[:-1]:
        node = _resolved(node, schema)
        if "oneOf" in node:
            node = {"$ref": node["discriminator"]["mapping"].get(part, "")}
        elif isinstance(part, int):
            node = node.get("items", {})
        else:
            node = node.get("properties", {}).get(part, {})
    return list(_resolved(node, schema).get("properties", {}))


def _resolved(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    name = str(node.get("$ref", "")).removeprefix("#/$defs/")
    return schema["$defs"].get(name, {}) if name else node


def _unknown_key(parts: tuple[int | str, ...], allowed: list[str]) -> str:
    close = difflib.get_close_matches(str(parts[-1]), allowed, n=1)
    if close:
        return f"is not a known key; did you mean {close[0]!r}?"
    return f"is not a known key; known here: {', '.join(allowed)}" if allowed else "is not a known key"


def _shown(path: str, value: Any) -> str:
    if _is_secret(path.rpartition(".")[2]) and not isinstance(value, dict | list):
        return _REDACTED
    if isinstance(value, dict):
        return f"a mapping with {len(value)} keys"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
