"""``flexd stream inspect``: five shapes from files, and from an unknown topic to ``advise``'s answer."""

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from flexd.cli.client import ExitCode
from flexd.config.model import load_config
from flexd.stream.kafka.sink import KafkaSink
from tests.support import event_shapes


def written(shape: event_shapes.Shape, directory: Path) -> tuple[Path, list[Any]]:
    """Write the messages as a file; return it and what else ``inspect`` needs."""
    kind = shape.mapping["format"]
    packed = [base64.b64encode(each) for each in shape.messages] if kind != "json" else shape.messages
    file = directory / "events.txt"
    file.write_bytes(b"\n".join(packed) + b"\n")
    needed = {key: shape.mapping[key] for key in ("definition", "message") if key in shape.mapping}
    more = [part for key, value in needed.items() for part in (f"--{key}", value)]
    return file, more if kind == "json" else ["--format", kind, *more]


TABLES = {
    "impressions": {"item": "$.slots[*].candidates[*].item.id", "user": "$.user.id"},
    "baskets": {"sku": "$.lines[*].sku"},
    "views": "$.features[*].name",
    "clicks": {"ad": "$.ad", "session": "$.session"},
    "single_ids": {"item": "$.item"},
}
OTHERS = {
    "impressions": {
        "time": "$.ts", "time_unit": "milliseconds", "user": "$.user.id", "sample": "$.request_id",
        "where": '$.type == "impression"',
    },
    "baskets": {"time": "$.at", "user": "$.customer"},
    "views": {"time": "$.at_us", "time_unit": "microseconds", "user": "$.member", "rows": "$.features[*].ids[*]"},
    "clicks": {"time": '$["@timestamp"]', "time_unit": "iso8601", "user": "$.session"},
    "single_ids": {"time": "$.at"},
}  # fmt: skip


@pytest.mark.parametrize("name", event_shapes.MAKERS)
def test_the_mapping_of_each_shape_is_found_and_counts_all_of_it(name, flexd_command, tmp_path):
    shape = event_shapes.shape(name, tmp_path)
    file, more = written(shape, tmp_path)
    done = flexd_command("stream", "inspect", file, *more, "--out", tmp_path / "flexd.yaml", "-o", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    mapping = yaml.safe_load((tmp_path / "flexd.yaml").read_text())["stream"]["mapping"]
    assert mapping["table"] == TABLES[name]
    assert {key: mapping.get(key) for key in OTHERS[name]} == OTHERS[name]
    assert set(mapping) - set(OTHERS[name]) <= {"format", "definition", "message", "table", "ids"}
    config = load_config(tmp_path / "flexd.yaml")
    users = 0 if isinstance(TABLES[name], str) or len(TABLES[name]) == 1 or name == "impressions" else 1
    known = sum(user is not None for *_, user in shape.accesses)
    assert found["accesses"] == sum(len(rows) for _, rows, *_ in shape.accesses) + users * known
    assert found["findings"] == []
    assert all(table.rows >= 1024 for table in config.tables)


def test_messages_that_cannot_be_read_are_explained_by_offset_cause_and_remedy(flexd_command, tmp_path):
    lines = [json.dumps({"item_id": n, "ts": 1_780_000_000_000 + n}).encode() for n in range(30)]
    file = tmp_path / "events.jsonl"
    deep = b'{"item_id": 7, "a": ' + b"[" * 1020 + b"]" * 1020 + b"}"
    file.write_bytes(b"\n".join([*lines[:9], b"\xef\xbb\xbf" + lines[9], b'{"cut', deep, *lines[10:]]) + b"\n")
    done = flexd_command("stream", "inspect", file)
    assert done.returncode == 0, done.stderr
    at = sum(len(line) + 1 for line in lines[:9])
    words = " ".join(done.stdout.split())
    for text in (f"offset {at} of events.jsonl", "a byte-order mark", "UTF-8 without one", "bad_json"):
        assert text in words
    assert "time_unit: milliseconds" in done.stdout
    file.write_bytes(b"")
    done = flexd_command("stream", "inspect", file)
    assert (done.returncode, "no messages to inspect" in done.stderr) == (ExitCode.FAILED, True), done.stderr
    done = flexd_command("stream", "inspect", "clicks")
    assert (done.returncode, "--bootstrap-servers" in done.stderr) == (ExitCode.USAGE, True), done.stderr


def test_from_an_unknown_topic_to_the_answer_in_three_commands(flexd_command, tmp_path):
    """A shape that no other test has: a feed, with positions, flags, and the ids as text."""
    from tansu_broker import TansuBroker

    draw = random.Random(5)
    with TansuBroker(topics={"feed": 2}) as broker:
        sink = KafkaSink(broker.bootstrap_servers, "feed")
        for n in range(1500):
            shown = [{"pos": i, "video": {"videoId": f"v{int(draw.paretovariate(0.6)) % 4000}"}} for i in range(20)]
            event = {"event": "feed_view", "eventTime": f"2026-05-01T10:{n // 60 % 60:02}:{n % 60:02}Z", "ab": True,
                     "viewer": {"uid": draw.randrange(900)}, "payload": {"shown": shown}}  # fmt: skip
            sink.send(json.dumps(event if n % 7 else {"event": "ping", "eventTime": event["eventTime"]}).encode())
        sink.flush(30.0)
        sink.close()
        file = tmp_path / "flexd.yaml"
        servers = broker.bootstrap_servers
        done = flexd_command("stream", "inspect", "feed", "--bootstrap-servers", servers, "--out", file)
        assert done.returncode == 0, done.stderr
        done = flexd_command("doctor", "-c", file, "-o", "json")
        faults = [each for each in json.loads(done.stdout)["findings"] if each["level"] == "fault"]
        assert faults == [], faults
        small = ("--steps", 8, "--batch", 16, "--history", 4, "--nodes", 2, "--local-ranks", 2)
        done = flexd_command("advise", "--step-ms", 5, "-c", file, *small, "-o", "json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["accesses"] == "feed"
        simulated = flexd_command("simulate", "-c", file, *small, "-o", "json")
        assert simulated.returncode == 0, simulated.stderr
    mapping = load_config(file).stream.mapping
    assert mapping is not None
    assert mapping.table == {"video": "$.payload.shown[*].video.videoId", "uid": "$.viewer.uid"}
    assert (mapping.time, mapping.time_unit, mapping.where) == ("$.eventTime", "iso8601", '$.event == "feed_view"')
