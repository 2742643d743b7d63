"""The picture of the packages is that of the packages there are."""

from __future__ import annotations

import gen_diagram


def test_the_picture_is_up_to_date() -> None:
    assert gen_diagram.TARGET.read_text(encoding="utf-8") == gen_diagram.draw(), f"run {gen_diagram.COMMAND}"
