"""Formatting of figures."""

import pytest

from flexd.core import units


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (units.size(0), "0 B"),
        (units.size(999), "999 B"),
        (units.size(1_500_000), "1.5 MB"),
        (units.size(None), "-"),
        (units.seconds(0.00123), "1.23 ms"),
        (units.seconds(2e-10), "0.2 ns"),
        (units.seconds(7.36e-12), "7.36 ps"),
        (units.seconds(-2e-9), "-2 ns"),
        (units.age(59.6), "1 min 0 s"),
        (units.age(90_000), "1 d 1 h"),
        (units.share(0.5), "50.00%"),
        (units.share(0.99999), "99.9990%"),
        (units.plural(1, "table"), "1 table"),
        (units.plural(0, "table"), "0 tables"),
    ],
)
def test_figures_are_formatted(shown, expected):
    assert shown == expected
