"""Pages that tools write agree with the configuration models, with the families of metrics and with the packages."""

import re
from collections.abc import Callable
from typing import Any

import gen_config_docs
import gen_diagram
import gen_metrics_docs
import pytest

from flexd.config.model import Config


@pytest.mark.parametrize(
    ("page", "render"),
    [
        (gen_config_docs, gen_config_docs.render),
        (gen_metrics_docs, gen_metrics_docs.render),
        (gen_diagram, gen_diagram.draw),
    ],
    ids=["configuration", "metrics", "picture"],
)
def test_a_generated_page_is_up_to_date(page: Any, render: Callable[[], str]) -> None:
    assert page.TARGET.read_text(encoding="utf-8") == render(), f"run {page.COMMAND}"


def test_families_have_names_and_texts_of_their_own():
    found = gen_metrics_docs.families()
    assert len({family.name for family in found}) == len(found)
    for family in found:
        assert family.documentation.strip().endswith("."), family.name
        assert re.fullmatch(r"flexd(_[a-z0-9]+)+", family.name)
        assert not re.search(r"_(milliseconds|ms|kb|mb|percent)(_|$)", family.name)


def test_every_key_is_described():
    schema = Config.model_json_schema()
    for name, section in {"Config": schema, **schema["$defs"]}.items():
        assert section.get("description"), name
        for key, field in section["properties"].items():
            assert field.get("description") or "$ref" in field, f"{name}.{key} has no description"
