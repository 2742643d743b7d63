"""``flexd reload`` and the text of configurations."""

from __future__ import annotations

from flexd.api.config import KeyChange, ReloadReport
from flexd.cli.config_commands import flat, reload_blocks


def test_a_secret_that_changes_is_named_without_its_value():
    change = KeyChange(key="stream.source.sasl_password", before="**", after="**")
    _, changes = reload_blocks(ReloadReport(file="f", applied=(change.key,), changes=(change,)))
    assert changes.rows == ((change.key, "(a secret)", "(another)", "at once"),)


def test_values_are_written_as_the_file_has_them():
    assert flat({"a": {"b": [True, None, 1.5, "x"]}, "c": {}}) == {
        "a.b[0]": "true", "a.b[1]": "null", "a.b[2]": "1.5", "a.b[3]": "x", "c": "{}",
    }  # fmt: skip
