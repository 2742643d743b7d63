"""docs/metrics.md has the families of the API's models, and the page of a daemon has no others."""

from __future__ import annotations

import re

import gen_metrics_docs
from prometheus_client.parser import text_string_to_metric_families

from flexd.server.app import Metrics
from tests.support.fake_daemon import FakeDaemon


def test_the_page_is_up_to_date():
    assert gen_metrics_docs.TARGET.read_text(encoding="utf-8") == gen_metrics_docs.render(), (
        f"run {gen_metrics_docs.COMMAND}"
    )


def test_every_family_of_a_daemon_is_documented_with_its_labels():
    text = gen_metrics_docs.render()
    page, _ = Metrics(FakeDaemon()).render()
    for family in text_string_to_metric_families(page.decode()):
        if family.name.startswith("flexd_"):
            assert re.search(rf"^\| `{family.name}", text, re.MULTILINE), family.name
    assert (
        "| `flexd_training_sent_bytes_total` | counter | `kind` (all_to_all, sync, migration), `link` (intra, inter) |"
        in text
    )
    assert "`flexd_build_info` | info | `training_job`, `version` |" in text
    assert "flexd_api_refused_requests_total" in text


def test_families_have_names_and_texts_of_their_own():
    found = gen_metrics_docs.families()
    assert len({family.name for family in found}) == len(found)
    for family in found:
        assert family.documentation.strip().endswith("."), family.name
        assert re.fullmatch(r"flexd(_[a-z0-9]+)+", family.name)
        assert not re.search(r"_(milliseconds|ms|kb|mb|percent)(_|$)", family.name)
