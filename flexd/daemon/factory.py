"""Create the daemon's parts from its configuration."""

from __future__ import annotations

from flexd.config.model import Config
from flexd.config.sections import FileLogSourceConfig, KafkaSourceConfig, TapSourceConfig
from flexd.control.daemon.epoch_manager import ControlOptions
from flexd.control.daemon.pusher import ChunkLimits
from flexd.control.protocol.network import TlsContext, TlsFiles
from flexd.core.secrets import KeyFile
from flexd.sketch.table_sketch import SketchSettings
from flexd.stream.offsets_in_work import OffsetsInWork
from flexd.stream.types import Source
from flexd.topology.cluster import Cluster
from flexd.topology.files import load_cluster, load_preset

DEFAULT_PRESET = "azure-a100-200g"


def make_source(config: Config, work: OffsetsInWork | None = None) -> Source:
    """Return the stream source. Does not contact a broker yet.

    Args:
        work: records what the source reads.

    Raises:
        ConfigError: a client option file cannot be read.
        StreamError: the options are not usable together.
    """
    source = config.stream.source
    if isinstance(source, FileLogSourceConfig):
        from flexd.stream.file_log.log import FileLogSource

        return FileLogSource(source.path)
    if isinstance(source, KafkaSourceConfig):
        from flexd.stream.kafka.source import KafkaSource

        return KafkaSource(source, job=config.job, work=work)
    if isinstance(source, TapSourceConfig):
        from flexd.stream.tap_source import TapSource

        return TapSource()
    from flexd.stream.synthetic import SyntheticSource

    return SyntheticSource([(table.name, table.rows) for table in config.tables], source)


def make_cluster(config: Config) -> Cluster:
    """Return the cluster description of ``topology``.

    Raises:
        TopologyError: the preset is not known, or the file cannot be read or is malformed.
    """
    topology = config.topology
    if topology.file is not None:
        return load_cluster(topology.file)
    return load_preset(topology.preset or DEFAULT_PRESET)


def sketch_settings(config: Config) -> SketchSettings:
    sketch, source = config.sketch, config.stream.source
    return SketchSettings(
        memory_bytes=sketch.memory_bytes,
        half_life_seconds=sketch.half_life_seconds,
        max_future_seconds=sketch.max_future_seconds,
        max_hot_rows=sketch.max_hot_rows,
        coaccess_memory_bytes=sketch.coaccess_memory_bytes,
        share=source.share if isinstance(source, KafkaSourceConfig) else 1.0,
    )


def control_options(config: Config) -> ControlOptions:
    """Return the control channel's options.

    Raises:
        ConfigError: the secret file or a certificate file cannot be read, or does not hold what it should.
    """
    control = config.control
    secret_file, given, tls = control.secret_file, control.tls, None
    if given.cert_file is not None and given.key_file is not None and given.ca_file is not None:
        tls = TlsFiles(given.cert_file, given.key_file, given.ca_file)
        # An error before anything is started.
        TlsContext(tls, server_side=True)
    secret = None if secret_file is None else KeyFile(secret_file, "control.secret_file")
    return ControlOptions(
        job=config.job,
        listen_host=control.listen_host,
        listen_port=control.listen_port,
        secret=secret,
        tls=tls,
        timeout_seconds=control.timeout_seconds,
        chunks=ChunkLimits(rows=control.chunk_rows, bytes=control.chunk_bytes),
    )
