"""docs/configuration.md agrees with the configuration models."""

from __future__ import annotations

import gen_config_docs

from flexd.config.model import Config


def test_the_page_is_up_to_date():
    assert gen_config_docs.TARGET.read_text(encoding="utf-8") == gen_config_docs.render(), (
        f"run {gen_config_docs.COMMAND}"
    )


def test_every_key_is_described():
    schema = Config.model_json_schema()
    for name, section in {"Config": schema, **schema["$defs"]}.items():
        assert section.get("description"), name
        for key, field in section["properties"].items():
            described = field.get("description") or "$ref" in field
            assert described, f"{name}.{key} has no description"
