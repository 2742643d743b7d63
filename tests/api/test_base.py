"""The base classes of the models."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from flexd.api.base import TIERS, CommandRequest
from flexd.core.model import FiniteOrNone, Model
from flexd.core.placement import Tier


class Part(Model):
    name: str
    ratio: FiniteOrNone = None
    size: int = 7


def test_an_attribute_that_was_renamed_is_no_silent_default() -> None:
    with pytest.raises(AttributeError, match="size"):
        Part.from_object(SimpleNamespace(name="a", ratio=0.5))


@pytest.mark.parametrize("unknown", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_cannot_express_are_null(unknown: float) -> None:
    assert json.loads(Part(name="a", ratio=unknown).model_dump_json())["ratio"] is None


def test_a_reader_ignores_fields_of_a_newer_daemon_and_a_daemon_refuses_unknown_fields_of_a_command() -> None:
    assert Part.model_validate({"name": "a", "newer": 1}) == Part(name="a")
    with pytest.raises(ValidationError, match="newer"):
        CommandRequest.model_validate({"newer": 1})


def test_tiers_are_in_the_order_of_their_numbers() -> None:
    assert tuple(tier.name for tier in sorted(Tier)) == TIERS
