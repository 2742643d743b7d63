"""Profile of a stream without a daemon, or of what a running daemon has counted; neither disturbs the daemon."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from flexd.config.model import Config
from flexd.config.sections import KafkaSourceConfig, TapSourceConfig
from flexd.control.protocol.handshake import new_token
from flexd.core.errors import ConfigError, SnapshotError, StreamError
from flexd.daemon import state_directory
from flexd.daemon.config_file import make_decoder, make_source, sketch_settings
from flexd.sketch import restore
from flexd.sketch.coaccess import CoAccess
from flexd.sketch.id_stream import IdsSeen
from flexd.sketch.ingestor import Ingestor
from flexd.sketch.profile import Profile
from flexd.sketch.snapshot import SnapshotStore

CLOSE_SECONDS = 20.0
SAMPLE_BYTES = 2**26
"""Memory for samples of rows that occur together, where the configuration states none."""
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class StreamRead:
    """Counts of a source that was read.

    Attributes:
        coaccess: training samples with the rows that occur together; None: a tap sends none.
        ids: of the tables of unbounded ids, by name; a tap counts the rows that they have.
    """

    profile: Profile
    coaccess: CoAccess | None
    ids: Mapping[str, IdsSeen]


def read_source(config: Config, seconds: float) -> StreamRead:
    """Return what is counted of the configured source.

    Of a stream it is what ``read_sample`` reads in ``seconds``, of a tap what the job's daemon had counted at its
    newest snapshot.

    Raises:
        ConfigError: a file of options cannot be read.
        StreamError: nothing could be read in that time, or the snapshot has no accesses.
        SnapshotError: the source is a tap, and ``state.dir`` has no usable snapshot.
    """
    if not isinstance(config.stream.source, TapSourceConfig):
        if not config.sketch.coaccess_memory_bytes:
            sampling = config.sketch.model_copy(update={"coaccess_memory_bytes": SAMPLE_BYTES})
            config = config.model_copy(update={"sketch": sampling})
        return read_sample(config, seconds)
    directory = state_directory.directory_of(config) / "snapshots"
    counted = restore.find_newest(
        SnapshotStore(directory, 1, read_only=True), config.keyspace().tables, sketch_settings(config),
        past_unusable=True,
    )  # fmt: skip
    if counted.path is None:
        raise SnapshotError(
            f"{directory}: {'; '.join(counted.problems) or 'there is no snapshot'}",
            remedy="wait for state.snapshot_interval_seconds, or compare with `flexd state show`",
        )
    if not counted.sketches.samples:
        raise StreamError(f"{counted.path}: no access was counted yet", remedy="wait until the ranks' taps have sent")
    return StreamRead(counted.sketches.profile(), None, {})


def read_sample(config: Config, seconds: float) -> StreamRead:
    """Read the configured source for so long, or to its present end if that comes first.

    A topic is read in a consumer group of its own, so that no partition is taken from a daemon, and nothing is
    committed or saved.

    Raises:
        ConfigError: the source is a tap, which only the job's daemon receives, or a file of options cannot be read.
        StreamError: nothing could be read in that time.
    """
    source = config.stream.source
    if isinstance(source, TapSourceConfig):
        raise ConfigError(
            "stream.source.kind tap: only the daemon of a running job receives its counts",
            remedy="read what that daemon has counted (read_source)",
        )
    if isinstance(source, KafkaSourceConfig):
        apart = source.model_copy(update={"group_id": f"{source.group_id}-advise-{new_token()}"})
        config = config.model_copy(update={"stream": config.stream.model_copy(update={"source": apart})})
    ingestor = Ingestor(
        make_source(config), config.keyspace().tables, sketch_settings(config), None,
        poll_seconds=config.stream.poll_seconds, max_message_bytes=config.stream.max_message_bytes,
        decoder=make_decoder(config), unbounded=config.unbounded(),
    )  # fmt: skip
    ingestor.start()
    try:
        deadline = time.monotonic() + seconds
        # ``idle_seconds`` is above 0 only when the stream has been read to its end.
        while time.monotonic() < deadline and not (ingestor.sketches.samples and ingestor.idle_seconds):
            time.sleep(_LOOK_SECONDS)
        problems = ingestor.problems()
        read = StreamRead(ingestor.profile(), ingestor.sketches.coaccess(), ingestor.ids_seen())
    finally:
        ingestor.stop(CLOSE_SECONDS)
    if not read.profile.samples:
        raise StreamError(
            f"no access was read in {seconds:g} s: "
            + ("; ".join(text for _, text in problems) or "the stream has no messages"),
            remedy="check stream.source, or read for longer",
        )
    return read
