"""Write docs/configuration.md and the configuration's part of the chart's schema from the pydantic models; ``--check``
only tests that they are up to date."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from generated import write_or_check

from flexd.config.model import Config

TARGET = Path(__file__).parents[1] / "docs" / "configuration.md"
CHART_SCHEMA = Path(__file__).parents[1] / "helm" / "flexd" / "values.schema.json"
COMMAND = "python tools/gen_config_docs.py"
PREFIX = "config."
"""Of the definitions that are the configuration's, in the chart's schema."""

HEAD = f"""# Configuration

<!-- Written by `{COMMAND}` from flexd/config/: change the models, not this file. -->

The daemon reads one YAML file: `flexd run -c FILE`. `flexd check-config -c FILE` lists the faults of one (exit status
2), `flexd check-config -c FILE -o yaml` prints the effective configuration. Ready-to-run files are in `configs/`.

- A key that is not listed here is an error, and so is a key given twice.
- Relative paths start at the daemon's working directory. `host:port` of an IPv6 address is `[address]:port`.
- An environment variable `FLEXD__SECTION__KEY` overrides the file: `FLEXD__SERVER__PORT=9000` sets `server.port`. Its
  value is read as YAML (`null`, `[1, 2]`, `{{a: 1}}`), except that of a key whose name contains password, secret or
  token, which is text. List items have no variables of their own.
- Secrets belong in files: `control.secret_file` and `stream.source.client_option_files` name them. Nothing prints the
  value of a secret.
- PyYAML reads `1e6` as text: write `1000000` or `1.0e+6`.
"""


def render() -> str:
    """Return the whole page."""
    schema = Config.model_json_schema()
    parts = [HEAD, *_section("", schema, schema)]
    return "\n".join(parts).rstrip() + "\n"


def _section(path: str, node: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    """Return a heading, a table of the plain keys, then each sub-section."""
    title = f"`{path}`" if path else "Top level"
    required = set(node.get("required", []))
    lines = [f"## {title}", "", _text(node.get("description", "")), ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    below: list[str] = []
    for key, field in node["properties"].items():
        child = f"{path}.{key}" if path else key
        resolved = _resolve(field, schema)
        optional = [option for option in resolved.get("anyOf", ()) if "$ref" in option]
        if optional:
            kind = "section, or none"
            below += _section(child, _resolve(optional[0], schema), schema)
        elif "$ref" in (named := resolved.get("additionalProperties") or {}):
            kind = "sections by name"
            below += _section(f"{child}.NAME", _resolve(named, schema), schema)
        elif "properties" in resolved:
            kind = "section"
            below += _section(child, resolved, schema)
        elif "oneOf" in resolved:
            kind = "section"
            for tag, reference in resolved["discriminator"]["mapping"].items():
                below += _section(f"{child} (kind: {tag})", _resolve({"$ref": reference}, schema), schema)
        elif "properties" in (item := _resolve(resolved.get("items", {}), schema)):
            kind = "list of sections"
            below += _section(f"{child}[]", item, schema)
        else:
            kind = _type(resolved)
        meaning = _text(field.get("description") or resolved.get("description", ""))
        lines.append(f"| `{key}` | {kind} | {_default(field, key in required, kind)} | {meaning} |")
    return [*lines, "", *below]


def chart_schema() -> str:
    """Return the chart's schema with the daemon's whole configuration, so that helm refuses what the daemon would."""
    values = json.loads(CHART_SCHEMA.read_text(encoding="utf-8"))
    config = _plain(Config.model_json_schema(ref_template=f"#/definitions/{PREFIX}{{model}}"))
    own = {f"{PREFIX}{name}": made for name, made in config.pop("$defs").items()}
    for name, made in own.items():  # helm merges the user's source into the default one, and the chart leaves these out
        if name.endswith("SourceConfig"):
            made["properties"] = dict.fromkeys(("bootstrap_servers", "topic", "group_id"), True) | made["properties"]
    values["properties"]["config"] = {"description": f"Written by {COMMAND}.", **config}
    kept = {name: made for name, made in values["definitions"].items() if not name.startswith(PREFIX)}
    values["definitions"] = kept | own
    return json.dumps(values, indent=2) + "\n"


def _plain(schema: Any) -> Any:
    """Return a schema without what tells people of it, and with the words of JSON schema for bounds."""
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    left_out = ("title", "description", "default", "discriminator")
    bounds = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
    return {
        bounds.get(name, name): {key: _plain(each) for key, each in value.items()}
        if name == "properties"
        else _plain(value)
        for name, value in schema.items()
        if name not in left_out or isinstance(value, dict)
    }


def _resolve(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    reference = node.get("$ref")
    return schema["$defs"][reference.removeprefix("#/$defs/")] if reference else node


def _type(node: dict[str, Any]) -> str:
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(_type(option) for option in node["anyOf"]))
    if "const" in node:
        return f"`{node['const']}`"
    if "enum" in node:
        return " or ".join(f"`{value}`" for value in node["enum"])
    if node["type"] == "object":
        return f"mapping of text to {_type(node['additionalProperties'])}"
    if node["type"] == "array":
        return f"list of {_type(node['items'])}"
    names = {"string": "text", "integer": "integer", "number": "number", "boolean": "truth value", "null": "null"}
    name = "path" if node.get("format") == "path" else names[node["type"]]
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "ge": ">=", "gt": ">", "maximum": "<=", "le": "<="}
    limits = [f"{sign} {node[word]}" for word, sign in bounds.items() if word in node]
    if node.get("pattern"):
        limits.append(f"like `{node['pattern']}`".replace("|", "\\|"))
    return f"{name} {', '.join(limits)}".strip()


def _default(field: dict[str, Any], required: bool, kind: str) -> str:
    if required:
        return "required"
    if kind == "section":
        return "as below"
    return f"`{json.dumps(field['default'])}`" if "default" in field else "empty"


def _text(description: str) -> str:
    return " ".join(description.split()).replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, COMMAND, {TARGET: render(), CHART_SCHEMA: chart_schema()}))
