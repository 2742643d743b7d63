"""``flexd reload`` and the text of configurations."""

from __future__ import annotations

from flexd.api.config import KeyChange, ReloadReport
from flexd.cli.config_commands import reload_blocks


def test_a_secret_that_changes_is_named_without_its_value():
    change = KeyChange(key="stream.source.sasl_password", before="**", after="**")
    _, changes = reload_blocks(ReloadReport(file="f", applied=(change.key,), changes=(change,)))
    assert changes.rows == ((change.key, "(a secret)", "(another)", "at once"),)
