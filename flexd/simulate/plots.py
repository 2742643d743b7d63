"""Plots of a simulation. matplotlib is in the ``plot`` extra."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.errors import ConfigError
from flexd.simulate.byte_counter import ALL_TO_ALL_PARTS, INTER, SYNC_PARTS, StepPart
from flexd.simulate.simulation import Simulation, StrategyRun
from flexd.simulate.strategies import FLEXSHARD, ORACLE, REPLANNED, ROW_WISE, STATIC, TWO_HOP
from flexd.simulate.summary import compared_steps, effect

Float64Array = npt.NDArray[np.float64]

_SIZE = (8.0, 4.2)
_DPI = 110
_MAX_RANKS_SHOWN = 64
# Okabe and Ito's palette, which colour-blind readers can tell apart; black and white stand for the reference.
_COLOURS = {
    STATIC.name: "#E69F00",
    REPLANNED.name: "#0072B2",
    ORACLE.name: "#009E73",
    "all_to_all": "#D55E00",
    "sync": "#56B4E9",
    "migration": "#CC79A7",
}
_DIRECT = (ROW_WISE.name, FLEXSHARD.name)


@dataclass(frozen=True)
class Theme:
    """Colours of paper and ink."""

    name: str
    paper: str
    ink: str
    grid: str


LIGHT = Theme("light", "#ffffff", "#1b1b1b", "#d9d9d9")
DARK = Theme("dark", "#161a1e", "#e6e6e6", "#3a4047")


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("pictures need matplotlib", remedy="pip install 'flexd[plot]'") from error
    return Figure


@contextmanager
def _themed(theme: Theme) -> Iterator[None]:
    import matplotlib as mpl

    ink = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor"), theme.ink
    )
    paper = dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), theme.paper)
    other = {
        "grid.color": theme.grid, "legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False,
        "font.size": 9, "axes.titlesize": 10.5, "axes.titlelocation": "left", "axes.axisbelow": True,
        "svg.fonttype": "none", "svg.hashsalt": "flexd", "figure.constrained_layout.use": True,
    }  # fmt: skip
    settings: dict[Any, Any] = ink | paper | other
    with mpl.rc_context(settings):
        yield


def plots_of(simulation: Simulation) -> dict[str, Callable[[Any, Theme], None]]:
    """By file name: draws onto an empty figure."""
    drawn: dict[str, Callable[[Any, Theme], None]] = {"traffic": lambda figure, _: _traffic(simulation, figure)}
    if all(strategy.name in simulation.runs for strategy in (TWO_HOP, STATIC, REPLANNED, ORACLE)):
        drawn["over-time"] = lambda figure, theme: _over_time(simulation, figure, theme)
        drawn["balance"] = lambda figure, theme: _balance(simulation, figure, theme)
    if simulation.budget_sweep and TWO_HOP.name in simulation.runs:
        drawn["budget"] = lambda figure, _: _budget(simulation, figure)
    return drawn


def render(simulation: Simulation, theme: Theme, kind: str) -> dict[str, bytes]:
    """Every picture as ``png`` or ``svg``. Raises ConfigError without matplotlib."""
    figure_class = _figure_class()
    made = {}
    with _themed(theme):
        for name, draw in plots_of(simulation).items():
            figure = figure_class(figsize=_SIZE, dpi=_DPI)
            draw(figure, theme)
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else {"Software": None})
            made[name] = buffer.getvalue()
    return made


def write_plots(simulation: Simulation, directory: Path) -> list[Path]:
    """One PNG each. Raises ConfigError without matplotlib, or if the directory cannot be written."""
    pictures = render(simulation, LIGHT, "png")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures.items():
            (directory / f"{name}.png").write_bytes(picture)
    except OSError as error:
        raise ConfigError(f"--plots {directory}: {error}", remedy="give a directory that can be written") from error
    return [directory / f"{name}.png" for name in pictures]


def _scaled(largest: float, units: tuple[tuple[float, str], ...]) -> tuple[float, str]:
    return next(((scale, unit) for scale, unit in units if largest >= scale), units[-1])


def _bytes_unit(largest: float) -> tuple[float, str]:
    return _scaled(largest, ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")))


def _seconds_unit(largest: float) -> tuple[float, str]:
    return _scaled(largest, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")))


def _traffic(simulation: Simulation, figure: Any) -> None:
    """Draw all strategies, and beside them enlarged those with dedup."""
    names = list(simulation.runs)
    fine = [name for name in names if name not in _DIRECT]
    panels = [names, fine] if len(fine) < len(names) else [names]
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, shown in zip(axes, panels, strict=True):
        _traffic_bars(simulation, shown, axis)
    axes[0].set_title("Inter-node traffic by strategy")
    if len(panels) == 2:
        axes[1].set_title("... with dedup, enlarged")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)


def _traffic_bars(simulation: Simulation, names: list[str], axis: Any) -> None:
    steps = compared_steps(simulation.steps)
    kinds = {"all_to_all": ALL_TO_ALL_PARTS, "sync": SYNC_PARTS, "migration": (StepPart.MIGRATION,)}
    words = {
        "all_to_all": "all-to-all: the step waits for it", "sync": "replica synchronisation", "migration": "migration"
    }  # fmt: skip
    values = {
        kind: np.array([simulation.runs[name].job_bytes(parts, INTER)[steps].mean() for name in names])
        for kind, parts in kinds.items()
    }
    scale, unit = _bytes_unit(float(sum(values.values()).max()))  # type: ignore[union-attr]
    left = np.zeros(len(names))
    places = np.arange(len(names))[::-1]
    for kind, value in values.items():
        axis.barh(places, value / scale, left=left / scale, color=_COLOURS[kind], label=words[kind], height=0.7)
        left = left + value
    axis.set_yticks(places, [simulation.runs[name].strategy.title for name in names])
    axis.set_xlabel(f"{unit} a step, whole job")
    axis.grid(axis="x")


def _smooth(values: Float64Array, window: int) -> Float64Array:
    """Centred mean over up to ``window`` steps."""
    total = np.cumsum(np.insert(values, 0, 0.0))
    at = np.arange(len(values))
    starts, ends = np.maximum(at - window // 2, 0), np.minimum(at + window // 2 + 1, len(values))
    smooth: Float64Array = (total[ends] - total[starts]) / (ends - starts)
    return smooth


def _over_time(simulation: Simulation, figure: Any, theme: Theme) -> None:
    axis = figure.subplots()
    window = max(1, simulation.steps // 25)
    shown = [simulation.runs[s.name] for s in (TWO_HOP, STATIC, REPLANNED, ORACLE)]
    scale, unit = _seconds_unit(float(max(run.exposed_seconds.mean() for run in shown)))
    for run in shown:
        name = run.strategy.name
        axis.plot(
            _smooth(run.exposed_seconds, window) / scale,
            color=_COLOURS.get(name, theme.ink),
            linestyle="--" if name == ORACLE.name else "-",
            linewidth=1.7,
            label=run.strategy.title,
        )
    replanned = simulation.runs[REPLANNED.name]
    axis.plot(
        replanned.plan_steps, np.full(len(replanned.plan_steps), 0.02), "|", transform=axis.get_xaxis_transform(),
        color=_COLOURS[REPLANNED.name], markersize=7, label="rows migrate",
    )  # fmt: skip
    axis.set_xlabel("training step")
    axis.set_ylabel(f"exposed communication, {unit} a step")
    steps = compared_steps(simulation.steps)
    home = float(simulation.runs[TWO_HOP.name].exposed_seconds[steps].mean())
    once, again = (
        effect(home - float(simulation.runs[s.name].exposed_seconds[steps].mean()), home, "exposed time")
        for s in (STATIC, REPLANNED)
    )
    axis.set_title(f"{simulation.accesses_name}, last quarter: re-planning {again},\none plan {once}")
    axis.grid(visible=True)
    figure.legend(loc="outside lower center", ncols=3)


def _budget(simulation: Simulation, figure: Any) -> None:
    steps = compared_steps(simulation.steps)
    home = simulation.runs[TWO_HOP.name]
    runs = sorted(simulation.budget_sweep, key=lambda run: run.replica_fraction)
    budgets = np.array([run.replica_fraction for run in runs]) * 100

    def saved(value: Callable[[StrategyRun], Any]) -> Float64Array:
        whole = float(value(home)[steps].mean())
        return np.array([100 * (1 - float(value(run)[steps].mean()) / whole) for run in runs])

    critical = (*ALL_TO_ALL_PARTS, StepPart.MIGRATION)
    axis = figure.subplots()
    for label, values, colour, marker in (
        ("bytes the step waits for", saved(lambda c: c.job_bytes(critical, INTER)), _COLOURS["all_to_all"], "s"),
        ("exposed time", saved(lambda c: c.exposed_seconds), _COLOURS[REPLANNED.name], "o"),
    ):
        axis.plot(budgets, values, marker=marker, color=colour, linewidth=1.7, label=label)
    axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))
    axis.set_xlabel("replica slots of a rank, % of all rows")
    axis.set_ylabel("saved against the two-hop chain, % (below 0: costs more)")
    axis.set_title(f"{simulation.accesses_name}: what memory for replicas buys")
    axis.grid(visible=True)
    figure.legend(loc="outside lower center", ncols=2)


def _balance(simulation: Simulation, figure: Any, theme: Theme) -> None:
    axis = figure.subplots()
    steps = compared_steps(simulation.steps)
    world = simulation.layout.world_size
    shown = [simulation.runs[s.name] for s in (TWO_HOP, STATIC, REPLANNED)]
    by_rank = [run.sent[steps, :, :, INTER].sum(axis=2).mean(axis=0) for run in shown]
    scale, unit = _bytes_unit(float(max(values.max() for values in by_rank)))
    ranks = np.arange(world)
    for place, (run, values) in enumerate(zip(shown, by_rank, strict=True)):
        colour = _COLOURS.get(run.strategy.name, theme.ink)
        if world <= _MAX_RANKS_SHOWN:
            axis.bar(ranks + (place - 1) * 0.27, values / scale, width=0.25, color=colour, label=run.strategy.title)
        else:
            axis.plot(ranks, np.sort(values)[::-1] / scale, color=colour, label=run.strategy.title)
    axis.set_ylim(bottom=0)
    if world <= 16:
        axis.set_xticks(ranks)
    axis.set_xlabel("rank" if world <= _MAX_RANKS_SHOWN else "rank, by what it sends")
    axis.set_ylabel(f"sent to other nodes, {unit} a step")
    busiest = (
        max(float(values.max() / values.mean()) for values in by_rank if values.any())
        if any(values.any() for values in by_rank)
        else 1.0
    )
    axis.set_title(f"Balance: no rank sends more than {busiest:.2f} times the mean of its strategy")
    axis.grid(axis="y")
    figure.legend(loc="outside lower center", ncols=3)
