"""Fuzz the readers of untrusted bytes with atheris (coverage-guided) for a bounded time.

    python tools/fuzz.py decode|snapshot [--seconds 60] [--corpus DIR]

``decode`` may raise CodecError and ``snapshot`` SnapshotError; any other exception is a finding, which
atheris prints and whose input it writes beside the corpus. The corpus starts with valid messages of every encoding.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["flexd.stream", "flexd.sketch.snapshot"]):
    import numpy as np

    from flexd.core.errors import CodecError, SnapshotError
    from flexd.sketch import snapshot
    from flexd.stream import codec
    from flexd.stream.types import AccessBatch

MAX_BYTES = 2**16


def _decode(data: bytes) -> None:
    try:
        batches = codec.decode(data, MAX_BYTES)
    except CodecError as error:
        if error.reason not in codec.REASONS:
            raise RuntimeError(f"unknown reason {error.reason}") from error
        return
    for batch in batches:
        assert batch.rows.ndim == 1
        assert batch.source_rank >= 0
    if batches:
        # Encoding what was read, and reading that, gives the same.
        again = codec.decode(codec.encode_arrow(batches), 4 * MAX_BYTES)
        assert list(map(_fields, again)) == list(map(_fields, batches))


def _fields(batch: AccessBatch) -> tuple[object, ...]:
    lengths = None if batch.sequence_lengths is None else batch.sequence_lengths.tolist()
    return batch.table, batch.rows.tolist(), batch.source_rank, batch.event_time_seconds, lengths


def _read_snapshot(data: bytes) -> None:
    _SCRATCH.write_bytes(data)
    try:
        snapshot.read(_SCRATCH)
    except SnapshotError:
        return


_SCRATCH = Path(tempfile.gettempdir()) / f"flexd-fuzz-{os.getpid()}.flexd"


def _seeds(target: str) -> list[bytes]:
    rows = np.arange(40, dtype=np.int64)
    lengths = np.array([15, 25], dtype=np.int32)
    batches = [
        AccessBatch("items", rows, 3, 1.7e9, lengths),
        AccessBatch("users", rows[:7].astype(np.int32), 0, 1.7e9),
    ]
    if target == "decode":
        line = b'{"table":"items","rows":[7,8],"source_rank":0,"event_time":1.5,"sequence_lengths":[1,1],"step":3}\n'
        return [codec.encode_arrow(batches), codec.encode_arrow(batches[:1]), line, 2 * line]
    with tempfile.TemporaryDirectory() as directory:
        store = snapshot.SnapshotStore(Path(directory), 1)
        arrays = {"a": rows, "b": lengths.astype(np.uint32), "c": np.empty(0)}
        return [store.save({"positions": {"p": 5}}, arrays).read_bytes(), store.save({}, {}).read_bytes()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=("decode", "snapshot"))
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path, default=None, help="kept between runs; default: a temporary one")
    options = parser.parse_args()
    corpus = options.corpus or Path(tempfile.mkdtemp(prefix="flexd-fuzz-"))
    corpus.mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate(_seeds(options.target)):
        (corpus / f"seed-{options.target}-{i}").write_bytes(seed)
    arguments = [
        sys.argv[0], str(corpus), f"-max_total_time={options.seconds}", f"-max_len={MAX_BYTES}", "-timeout=10",
        "-rss_limit_mb=4096", f"-artifact_prefix={corpus}/finding-", "-print_final_stats=1",
    ]  # fmt: skip
    atheris.Setup(arguments, _decode if options.target == "decode" else _read_snapshot)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
