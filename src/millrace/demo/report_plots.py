"""The plots of the report, as SVG elements. Needs matplotlib; nothing of it is kept between calls."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from millrace.demo.report_page import AMBER, BLUE, INK, LILAC, MUTED, RED, RULE, SLATE, TEAL, VIOLET
from millrace.demo.speech.log import EpochRecord, WorkerTimes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHARES = (
    ("compute_seconds", "training", TEAL),
    ("wait_seconds", "waiting for data", AMBER),
    ("evaluate_seconds", "evaluating", SLATE),
    ("stall_seconds", "standing still for a checkpoint", VIOLET),
)
"""Where a worker's time goes: the field of `WorkerTimes`, what people call it, its colour."""

_MOST_BARS = 240
"""More bars than that nobody can tell apart: the workers of an epoch share one then."""

Restarts = Mapping[int, str]


def mean_times(workers: Sequence[WorkerTimes]) -> dict[str, float]:
    """The seconds of each of `SHARES`, per worker."""
    return {name: sum(getattr(worker, name) for worker in workers) / max(1, len(workers)) for name, _, _ in SHARES}


def learning(epochs: Sequence[EpochRecord], restarts: Restarts) -> str:
    """Training loss and dev error rate by epoch."""
    numbers = [epoch.epoch for epoch in epochs]

    def draw(axes: Sequence[Axes]) -> None:
        axes[0].plot(numbers, [epoch.train_loss for epoch in epochs], color=TEAL, marker="o", markersize=3.5)
        _finish(axes[0], epochs, "training loss")
        errors = [float("nan") if epoch.dev_cer is None else 100 * epoch.dev_cer for epoch in epochs]
        axes[1].plot(numbers, errors, color=INK, marker="o", markersize=3.5)
        _finish(axes[1], epochs, "dev characters wrong, %")
        for panel in axes:
            _mark_restarts(panel, restarts, label=True)

    return _plot(draw, "Training loss and dev error rate by epoch", panels=2)


def sources(epochs: Sequence[EpochRecord], restarts: Restarts, *, nodes: bool) -> str:
    """Bytes read by epoch and by where they came from; `nodes` tells the own disk from other nodes'."""
    kinds = [("origin_bytes", "from the origin", AMBER)]
    if nodes:
        kinds += [("cache_bytes", "from the own disk", TEAL), ("peer_bytes", "from another node's", BLUE)]
    else:
        kinds += [("cache_bytes", "from the cache", TEAL)]

    def draw(axes: Sequence[Axes]) -> None:
        heights = [[getattr(epoch, name) / 1e6 for name, _, _ in kinds] for epoch in epochs]
        _stack(axes[0], [epoch.epoch for epoch in epochs], heights, kinds, width=0.7)
        _finish(axes[0], epochs, "MB read")
        _with_legend(axes[0], len(kinds))
        _mark_restarts(axes[0], restarts)

    return _plot(draw, "Megabytes read by epoch, by where they came from")


def times(epochs: Sequence[EpochRecord], restarts: Restarts) -> str:
    """Seconds by epoch and worker: a bar a worker, in groups by epoch."""
    alone = sum(len(epoch.workers) for epoch in epochs) > _MOST_BARS
    most = 1 if alone else max(len(epoch.workers) for epoch in epochs)
    step = (0.7 if most == 1 else 0.84) / most

    def draw(axes: Sequence[Axes]) -> None:
        places, heights = [], []
        for epoch in epochs:
            bars = [epoch.workers] if alone else [[worker] for worker in epoch.workers]
            for index, workers in enumerate(bars):
                places.append(epoch.epoch + (index - (len(bars) - 1) / 2) * step)
                heights.append(list(mean_times(workers).values()))
        _stack(axes[0], places, heights, SHARES, width=step * (1.0 if most == 1 else 0.9))
        _finish(axes[0], epochs, "seconds, the mean of all workers" if alone else "seconds")
        _with_legend(axes[0], len(SHARES))
        _mark_restarts(axes[0], restarts)

    return _plot(draw, "Seconds of each epoch and worker, by what they were spent on", width=11.6)


def checkpoints(epochs: Sequence[EpochRecord], restarts: Restarts) -> str:
    """Size of every complete checkpoint beside its raw tensors, by kind."""
    done = [epoch.checkpoint for epoch in epochs if epoch.checkpoint is not None]

    def draw(axes: Sequence[Axes]) -> None:
        panel = axes[0]
        numbers = [one.epoch for one in done]
        panel.bar(numbers, [one.raw_bytes / 1e6 for one in done], width=0.7, color=RULE, label="raw tensors")
        kinds = sorted({one.kind for one in done}, reverse=True)
        for kind in kinds:
            some = [one for one in done if one.kind == kind]
            stored = [one.checkpoint_bytes / 1e6 for one in some]
            colour = LILAC if kind == "delta" else VIOLET
            panel.bar([one.epoch for one in some], stored, width=0.7, color=colour, label=f"stored, {kind}")
        _finish(panel, epochs, "MB a checkpoint")
        _with_legend(panel, 1 + len(kinds))
        _mark_restarts(panel, restarts)

    return _plot(draw, "Megabytes of every checkpoint, raw and stored")


# --- what they share ----------------------------------------------------------------------------------


def _plot(draw: Callable[[Sequence[Axes]], None], label: str, *, panels: int = 1, width: float = 5.6) -> str:
    """An SVG element with what `draw` puts on its axes."""
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {
        "font.size": 9, "axes.edgecolor": RULE, "axes.labelcolor": MUTED, "xtick.color": MUTED,
        "ytick.color": MUTED, "text.color": INK, "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "axes.grid.axis": "y", "grid.color": "#eef1f4", "axes.axisbelow": True,
        "legend.frameon": False, "legend.fontsize": 8.5, "svg.hashsalt": "millrace",
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, 2.9), layout="constrained")
        axes = figure.subplots(1, panels, squeeze=False)[0]
        draw(list(axes))
        text = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    svg = text.getvalue()
    # The page needs the element alone, without the declarations that stand before it in a file.
    return f'<svg role="img" aria-label="{html.escape(label)}"' + svg[svg.index("<svg") + len("<svg") :]


def _stack(
    axes: Axes,
    places: Sequence[float],
    heights: Sequence[Sequence[float]],
    kinds: Sequence[tuple[str, str, str]],
    *,
    width: float,
) -> None:
    """Bars at `places`, each of as many parts as there are `kinds` (name, label, colour)."""
    base = [0.0] * len(places)
    for index, (_, label, colour) in enumerate(kinds):
        parts = [float(height[index]) for height in heights]
        axes.bar(places, parts, width=width, bottom=base, color=colour, label=label)
        base = [below + part for below, part in zip(base, parts, strict=True)]


def _mark_restarts(axes: Axes, restarts: Restarts, *, label: bool = False) -> None:
    for epoch in restarts:
        # Where there is a legend above the bars, the line ends below it.
        axes.axvline(epoch - 0.5, ymax=1.0 if label else 0.83, color=RED, linewidth=1, linestyle=(0, (3, 3)))
        if label:
            axes.annotate(
                "restart", (epoch - 0.5, 0.97), xycoords=("data", "axes fraction"), xytext=(4, 0),
                textcoords="offset points", color=RED, fontsize=8, va="top",
            )  # fmt: skip


def _finish(axes: Axes, epochs: Sequence[EpochRecord], ylabel: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("epoch")
    axes.set_title(ylabel, loc="left", fontsize=9, color=MUTED)
    axes.set_xlim(epochs[0].epoch - 0.6, epochs[-1].epoch + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_ylim(bottom=0)
    axes.tick_params(length=0)


def _with_legend(axes: Axes, columns: int) -> None:
    """The legend above the bars, in room that is made for it."""
    axes.set_ylim(top=(axes.get_ylim()[1] or 1) * 1.22)
    axes.legend(loc="upper left", ncols=columns, columnspacing=1, handlelength=1, handletextpad=0.4, borderaxespad=0.1)
