"""docs/configuration.md says what the models say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from flexd.config.model import Config

REPOSITORY = Path(__file__).parents[1]


def generator():
    spec = importlib.util.spec_from_file_location("gen_config_docs", REPOSITORY / "tools" / "gen_config_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date():
    module = generator()
    assert module.TARGET.read_text(encoding="utf-8") == module.render(), f"run {module.COMMAND}"


def test_every_key_is_described():
    schema = Config.model_json_schema()
    for name, section in {"Config": schema, **schema["$defs"]}.items():
        assert section.get("description"), name
        for key, field in section["properties"].items():
            described = field.get("description") or "$ref" in field
            assert described, f"{name}.{key} has no description"
