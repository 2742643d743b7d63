"""``doctor``, which checks the configuration, the machine, the stream and the daemon, and ``probe``, which measures a
cluster."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import Field

from flexd.api import routes
from flexd.api.status import DaemonStatus
from flexd.cli.client import DaemonAddress, DaemonClient, DaemonRefusedError, ExitCode, connect
from flexd.cli.options import ConfigOption, OutputOption, SocketOption, UrlOption, check_file
from flexd.cli.render import OutputFormat, flat, present
from flexd.core import units
from flexd.core.errors import ApiError, ConfigError
from flexd.core.model import HIDDEN, Model, Show

if TYPE_CHECKING:
    from flexd.config.model import Config
    from flexd.doctor import Finding
    from flexd.topology.cluster import Cluster, CollectiveCurve, CollectiveTimes, StepCosts
    from flexd.topology.probe import ProbeReport


def doctor(
    config: ConfigOption,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", min=1, max=300, help="Deadline of the broker, in seconds.")
    ] = 10.0,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Check configuration, machine, stream and daemon.

    Checks versions, disk, clock, secrets, ports, broker and messages too. Changes nothing and does not disturb a
    running daemon. Exit status 7 if there is a fault, 0 if there are only warnings.

    Example: flexd doctor -c configs/laptop.yaml
    """
    from flexd.doctor import DoctorReport, Level

    findings = examine(config, timeout, url, socket)
    found = Counter(each.level for each in findings)
    counts = {level: found[level] for level in Level}
    remedies = tuple(f"{each.check}: {each.remedy}" for each in findings if each.remedy)
    present(DoctorReport(findings=tuple(findings), counts=counts, messages=remedies), output)
    raise typer.Exit(ExitCode.FOUND if counts[Level.FAULT] else ExitCode.OK)


def examine(file: Path, timeout_seconds: float, url: str | None, socket: Path | None) -> list[Finding]:
    """Return all findings, in the order in which faults should be repaired.

    The address of the daemon is ``url`` or ``socket``, else that of the environment, else that of the file.
    """
    from flexd import doctor as checks
    from flexd.daemon.config_file import load_with_known_tables

    try:
        config = load_with_known_tables(file)
    except ConfigError as error:
        return [
            checks.fault("configuration", line, error.remedy or "docs/configuration.md lists every key")
            for line in error.message.splitlines()
        ]
    client = connect(url, socket, configured=configured_address(config))
    status, answers = _status(client)
    looks = {
        "versions": lambda: checks.versions(config),
        "secrets": lambda: checks.secrets(config),
        "certificates": lambda: checks.certificates(config),
        "disk": lambda: checks.disk(config),
        "clock": lambda: checks.clock(config),
        "ports": lambda: checks.ports(config, running=status is not None),
        "stream": lambda: checks.stream(config, timeout_seconds),
    }
    findings = [checks.ok("configuration", f"{file}: job {config.job}, {units.plural(len(config.tables), 'table')}")]
    for name, look in looks.items():
        findings += checks.run(name, look)
    return findings + answers + (checks.run("daemon", lambda: _running(client, status, config)) if status else [])


def configured_address(config: Config) -> DaemonAddress | None:
    """Return the address of a daemon with this configuration, as this machine reaches it; None if its port is free to
    vary."""
    from flexd.doctor import reachable

    server = config.server
    if server.unix_socket is not None:
        return DaemonAddress("http://flexd", server.unix_socket)
    if server.port == 0:
        return None
    scheme = "http" if server.tls.cert_file is None else "https"
    host = reachable(server.host)
    return DaemonAddress(f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}")


def _status(client: DaemonClient) -> tuple[DaemonStatus | None, list[Finding]]:
    from flexd import doctor as checks

    try:
        return client.send(routes.STATUS), []
    except DaemonRefusedError as error:
        return None, [checks.fault("daemon", error.message, error.remedy or "see its log")]
    except ApiError as error:
        return None, [checks.warning("daemon", error.message, error.remedy)]


def _running(client: DaemonClient, status: DaemonStatus, config: Config) -> Iterator[Finding]:
    from flexd.doctor import daemon as daemon_findings

    running, file = flat(client.send(routes.CONFIG).config), flat(config.document())
    differing = [key for key in {**file, **running} if file.get(key) != running.get(key)]
    yield from daemon_findings(status, differing)


# Of --budget-seconds, for what a step takes beside its links.
_STEPS_SHARE = 0.2


def probe(
    out: Annotated[Path, typer.Option("--out", metavar="FILE.yaml", dir_okay=False, help="Topology file to write.")],
    name: Annotated[str, typer.Option("--name", help="Of the cluster in the file.")] = "probed",
    max_bytes: Annotated[
        int, typer.Option("--max-bytes", help="Largest message: bytes a rank sends in one collective.")
    ] = 64 * 2**20,
    min_bytes: Annotated[int, typer.Option("--min-bytes", help="Smallest message.")] = 1024,
    budget_seconds: Annotated[
        float, typer.Option("--budget-seconds", help="About how long to measure; large sizes are left out beyond it.")
    ] = 60.0,
    timeout_seconds: Annotated[float, typer.Option("--timeout-seconds", help="Longest wait for another rank.")] = 60.0,
    backend: Annotated[
        Literal["auto", "gloo", "nccl"],
        typer.Option("--backend", help="auto: nccl where every local rank has a GPU, else gloo."),
    ] = "auto",
    local_ranks: Annotated[
        int | None, typer.Option("--local-ranks", help="Ranks in each node. Default: LOCAL_WORLD_SIZE of torchrun.")
    ] = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Measure the links of this job; run it on every rank.

    Times all-to-all, all-reduce and all-gather inside and between nodes, and steps of small tables for what they take
    beside the links, and writes a topology file.

    Example: torchrun --nproc-per-node=8 --no-python flexd probe --out cluster.yaml
    """
    from flexd.topology.files import write_cluster
    from flexd.topology.probe import ProbeOptions

    options = ProbeOptions(min_bytes=min_bytes, max_bytes=max_bytes, budget_seconds=budget_seconds * (1 - _STEPS_SHARE))
    if not 0 < timeout_seconds <= 3600:
        raise ConfigError(f"--timeout-seconds {timeout_seconds}", remedy="give seconds above 0, at most 3600")
    missing = [key for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if key not in os.environ]
    if missing:
        raise ConfigError(
            f"probe: {missing[0]} is not set: this process is no rank of a job",
            remedy="launch it with torchrun --nproc-per-node=8 --no-python flexd probe --out cluster.yaml",
        )
    if os.environ["RANK"] == "0":
        check_file("--out", out)
    step_seconds = min(budget_seconds * _STEPS_SHARE, 60.0)
    report, costs = _run(options, step_seconds, timeout_seconds, backend, local_ranks)
    if os.environ["RANK"] != "0":
        return
    cluster = replace(report.cluster(name), step_costs=costs)
    write_cluster(cluster, out)
    present(_measured_cluster(cluster, report, out), output)


def _run(
    options: Any, step_seconds: float, timeout_seconds: float, backend: str, local_ranks: int | None
) -> tuple[ProbeReport, StepCosts]:
    """Join the process group that torchrun describes, and measure."""
    import torch
    import torch.distributed as dist

    from flexd.core.errors import TopologyError
    from flexd.core.placement import RankLayout
    from flexd.embedding.exchange.process_groups import layout_from_environment
    from flexd.embedding.step_probe import measure_step_costs
    from flexd.topology.probe import ProbeGroups
    from flexd.topology.probe import probe as measure_links

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    wanted = backend
    if backend == "auto":
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
        wanted = "nccl" if gpus >= local_size else "gloo"
    if wanted == "nccl" and torch.cuda.device_count() <= local_rank:
        raise ConfigError(
            f"--backend nccl: local rank {local_rank} has no GPU ({torch.cuda.device_count()} visible)",
            remedy="launch one rank for each GPU, or --backend gloo",
        )
    device = torch.device("cpu")
    if wanted == "nccl":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_seconds)
    try:
        dist.init_process_group(wanted, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise TopologyError(
            f"probe: no process group: {str(error).splitlines()[0]}",
            remedy="check that all ranks run and reach MASTER_ADDR; gloo's interface is GLOO_SOCKET_IFNAME",
        ) from error
    if local_ranks is not None:
        world_size = dist.get_world_size()
        if local_ranks < 1 or world_size % local_ranks:
            raise ConfigError(f"--local-ranks {local_ranks} does not divide {world_size} ranks", remedy="a divisor")
        layout = RankLayout(world_size // local_ranks, local_ranks)
    else:
        layout = layout_from_environment()
    report = measure_links(ProbeGroups.create(layout, device, timeout), options)
    costs = measure_step_costs(layout, device, step_seconds)
    dist.destroy_process_group()
    return report, costs


class SizeTimes(Model):
    """Times of one message size."""

    message_bytes: float
    median_seconds: float
    spread: float
    repetitions: int
    fitted_seconds: float


class MeasuredCollective(Model):
    """One collective over the groups of a class of links: nodes, rails, or all ranks.

    Attributes:
        ranks: of a group.
        points: of the fitted curve: message bytes, bytes per second.
        seconds, bytes_per_second: of the largest message.
        spread: largest distance of the quartiles over the median.
    """

    link: str
    collective: str
    ranks: int
    latency_seconds: float
    largest_bytes: Annotated[float, Show("largest")]
    seconds: float
    bytes_per_second: Annotated[float, Show("bandwidth")]
    spread: Annotated[float, Show(unit="{:.0%}".format)]
    points: Annotated[tuple[tuple[float, float], ...], HIDDEN]
    sizes: Annotated[tuple[SizeTimes, ...], HIDDEN]


class MeasuredCluster(Model):
    """A topology file and what it was measured from; ``seconds`` is how long that took."""

    file: str
    name: str
    source: str
    seconds: Annotated[float, Show("took")]
    wire_bytes_per_second: dict[str, float]
    step_costs: Annotated[dict[str, float] | None, Show("a step beside its links")]
    measured: tuple[MeasuredCollective, ...]
    messages: Annotated[tuple[str, ...], Show("use it"), Field(exclude=True)]


def _measured_cluster(cluster: Cluster, report: ProbeReport, out: Path) -> MeasuredCluster:
    links = {"intra_node": cluster.intra_node, "inter_node": cluster.inter_node}
    return MeasuredCluster(
        file=str(out),
        name=cluster.name,
        source=cluster.source,
        seconds=report.seconds,
        wire_bytes_per_second={name: link.wire_bytes_per_second for name, link in links.items()},
        step_costs=None if cluster.step_costs is None else asdict(cluster.step_costs),
        measured=tuple(_measured(cluster, report)),
        messages=(f"topology: {{file: {out}}}",),
    )


def _measured(cluster: Cluster, report: ProbeReport) -> Iterator[MeasuredCollective]:
    layout = report.layout
    for (link, collective), times in report.times.items():
        ranks = layout.local_ranks if link == "intra_node" else layout.nodes
        yield _collective(link.value, collective.value, ranks, cluster.curve(link, collective), times)
    if report.world is not None and cluster.world is not None:
        yield _collective("world", "all_to_all", layout.world_size, cluster.world.all_to_all, report.world)


def _collective(
    link: str, collective: str, ranks: int, curve: CollectiveCurve, times: CollectiveTimes
) -> MeasuredCollective:
    largest = float(times.message_bytes[-1])
    return MeasuredCollective(
        link=link,
        collective=collective,
        ranks=ranks,
        latency_seconds=curve.latency_seconds,
        largest_bytes=largest,
        seconds=float(times.medians[-1]),
        bytes_per_second=curve.bandwidth(largest),
        spread=float(times.spread.max()),
        points=curve.points,
        sizes=tuple(
            SizeTimes(
                message_bytes=size, median_seconds=median, spread=spread, repetitions=len(samples),
                fitted_seconds=curve.seconds(size),
            )
            for size, median, spread, samples in zip(
                times.message_bytes.tolist(), times.medians.tolist(), times.spread.tolist(), times.seconds, strict=True
            )
        ),
    )  # fmt: skip
