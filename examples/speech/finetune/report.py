"""The report of a run: a table for the terminal, and one self-contained HTML page (matplotlib and Jinja)."""

from __future__ import annotations

import difflib
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

import millrace

from .log import Epoch, Result, WorkerTimes, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REPORT = "report.html"

INK, MUTED, RULE = "#1c2733", "#66727f", "#dfe4ea"
TEAL, AMBER, BLUE, RED = "#1f7a8c", "#e39b2d", "#7aa6c2", "#b8433a"
VIOLET, LILAC, SLATE = "#5c4d7d", "#a795cf", "#9db4c0"

TIMES = (
    ("compute", "training", TEAL),
    ("wait", "waiting for data", AMBER),
    ("evaluate", "evaluating", SLATE),
    ("blocked", "blocked by the save of a checkpoint", VIOLET),
)
"""Where a worker's time goes: the field of `WorkerTimes` without `_seconds`, its label, its colour."""

_MAX_BARS = 240
"""With more bars the workers of an epoch share one."""


# --- for the terminal ---------------------------------------------------------------------------------


def summary(result: Result) -> str:
    """The closing table and what it means. Times are means over the workers."""
    peers = any(epoch.peer_bytes for epoch in result.epochs)
    caches = "    own disk  other nodes" if peers else "  from cache"
    lines = [f" epoch   loss  dev CER  seconds  waiting  blocked   from origin{caches}   checkpoint (of raw)"]
    notes = result.restart_notes()
    for epoch in result.epochs:
        if epoch.epoch in notes:
            lines.append(f"        --- {notes[epoch.epoch]} ---")
        lines.append(_line(result, epoch, peers=peers))
    same = result.same_clips
    seen = f"{result.epochs[0].clips:,} clips per epoch, the same ones in every epoch"
    if not all(same):
        other = ", ".join(str(epoch.epoch) for epoch, equal in zip(result.epochs, same, strict=True) if not equal)
        seen = f"not every epoch saw the same clips as the first: epoch {other}"
    metrics = result.metrics
    return "\n".join(
        [
            *lines,
            "",
            f"dev CER {percent(result.epochs[-1].dev_cer)}; test CER {percent(metrics['test_cer_known_speakers'])} for "
            f"speakers of the training split, {percent(metrics['test_cer_held_out_speakers'])} for others",
            seen,
            f"outputs in {result.settings.run}/  (model/, checkpoints/, training.jsonl, metrics.json, {REPORT})",
        ]
    )


def _line(result: Result, epoch: Epoch, *, peers: bool) -> str:
    line = (
        f" {epoch.epoch:5d}  {epoch.train_loss:5.3f}  {percent(epoch.dev_cer):>7}  {epoch.seconds:7.1f}"
        f"  {epoch.mean_seconds('wait'):7.1f}  {epoch.mean_seconds('blocked'):7.2f}"
        f"  {megabytes(epoch.origin_bytes):>12}  {megabytes(epoch.cache_bytes):>10}"
    )
    if peers:
        line += f"  {megabytes(epoch.peer_bytes):>11}"
    saved = result.checkpoints.get(epoch.epoch)
    if saved is None:
        return f"{line}   none"
    return f"{line}   {megabytes(saved.stored_bytes)} ({saved.stored_bytes / saved.raw_bytes:.0%}, {saved.kind})"


def megabytes(nbytes: int) -> str:
    """An amount of bytes in megabytes; a small one in bytes."""
    return f"{nbytes} B" if nbytes < 1000 else f"{nbytes / 1e6:.2f} MB"


# --- the page -----------------------------------------------------------------------------------------


def render(result: Result, places: Mapping[str, str]) -> str:
    """The page as text: no scripts, and nothing loaded from elsewhere. `places` are more lines for the last table."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(mb=lambda nbytes: f"{nbytes / 1e6:.2f}" if nbytes else "0", megabytes=megabytes)
    environment.filters.update(percent=percent, duration=duration)
    epochs, settings = result.epochs, result.settings
    workers = [worker for epoch in epochs for worker in epoch.workers]
    start = next(event for event in reversed(result.events) if event["event"] == "start")
    run = settings.run
    return environment.get_template("report.html.j2").render(
        result=result,
        epochs=epochs,
        later=epochs[1:],
        notes=result.restart_notes(),
        kinds=TIMES,
        shares={name: _part(workers, name) for name, _, _ in TIMES},
        workers=_by_worker(workers),
        worker_share=lambda times, name: _part(times, name),
        of_many_nodes=any(epoch.peer_bytes for epoch in epochs),
        own_disk_share=_own_disk_share(epochs[1:]),
        stored_share=_stored_share(result),
        blocked_seconds=sum(max(worker.blocked_seconds for worker in epoch.workers) for epoch in epochs),
        warnings=[event["text"] for event in result.events if event["event"] == "warning"],
        transcripts=[(*marked(line["said"], line["heard"]), line) for line in result.metrics["transcripts"]],
        configuration={
            "model": settings.model or f"small {settings.family}, {settings.layers} layers of {settings.hidden_size}",
            "parameters": f"{start['parameters']:,}",
            "training workers": f"{start['workers']}, {settings.cpus} CPU thread(s) each",
            "device": f"{start['device']}, {start['precision']}",
            "batch": f"{settings.batch_size} clips per worker",
            "optimizer": f"AdamW, peak rate {settings.learning_rate:g}, weight decay {settings.weight_decay:g}",
            "seed": settings.seed,
        },
        places={
            "data set": settings.data,
            "checkpoints": f"{run}/checkpoints/",
            "final model": f"{run}/model/",
            "training log": f"{run}/training.jsonl",
            "metrics": f"{run}/metrics.json",
            **places,
        },
        plots={
            plot.__name__: _labelled(plot(result), plot.__doc__) for plot in (learning, sources, times, checkpoints)
        },
        version=millrace.__version__,
    )


def _labelled(svg: str, label: str | None) -> Markup:
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{escape(label or "")}"', 1))


def _part(workers: Sequence[WorkerTimes], name: str) -> float:
    """The share of all time that went into one thing."""
    total = sum(worker.seconds for worker in workers) or 1.0
    return float(sum(getattr(worker, f"{name}_seconds") for worker in workers) / total)


def _by_worker(workers: Sequence[WorkerTimes]) -> dict[tuple[int, str], list[WorkerTimes]]:
    """The epochs of each worker; one that restarted on another node counts twice."""
    found: dict[tuple[int, str], list[WorkerTimes]] = {}
    for worker in sorted(workers, key=lambda worker: (worker.rank, worker.node)):
        found.setdefault((worker.rank, worker.node), []).append(worker)
    return found


def _own_disk_share(epochs: Sequence[Epoch]) -> float:
    """The share of the bytes that the node which read them had on its own disk."""
    own = sum(epoch.cache_bytes for epoch in epochs)
    return own / (sum(epoch.origin_bytes + epoch.peer_bytes for epoch in epochs) + own or 1)


def _stored_share(result: Result) -> float | None:
    """The size of the checkpoints compared with their tensors."""
    raw = sum(saved.raw_bytes for saved in result.checkpoints.values())
    return sum(saved.stored_bytes for saved in result.checkpoints.values()) / raw if raw else None


def duration(seconds: float) -> str:
    """A time for people."""
    if seconds < 120:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02} h" if hours else f"{rest // 60}:{rest % 60:02} min"


def marked(said: str, heard: str) -> tuple[Markup, Markup]:
    """Both texts as HTML: `<del>` marks what only the first has, `<ins>` what only the second has."""
    left, right = Markup(), Markup()
    for kind, a, b, c, d in difflib.SequenceMatcher(None, said, heard, autojunk=False).get_opcodes():
        left += escape(said[a:b]) if kind == "equal" or a == b else Markup("<del>{}</del>").format(said[a:b])
        right += escape(heard[c:d]) if kind == "equal" or c == d else Markup("<ins>{}</ins>").format(heard[c:d])
    return left, right


# --- the plots, as SVG elements -----------------------------------------------------------------------


def learning(result: Result) -> str:
    """Training loss and dev error rate by epoch."""

    def draw(axes: Sequence[Axes]) -> None:
        numbers = [epoch.epoch for epoch in result.epochs]
        axes[0].plot(numbers, [epoch.train_loss for epoch in result.epochs], color=TEAL, marker="o", markersize=3.5)
        errors = [float("nan") if epoch.dev_cer is None else 100 * epoch.dev_cer for epoch in result.epochs]
        axes[1].plot(numbers, errors, color=INK, marker="o", markersize=3.5)
        for panel, title in zip(axes, ("training loss", "dev characters wrong, %"), strict=True):
            _finish(panel, result, title)
            for epoch in result.restart_notes():
                panel.annotate(
                    "restart", (epoch - 0.5, 0.97), xycoords=("data", "axes fraction"), xytext=(4, 0),
                    textcoords="offset points", color=RED, fontsize=8, va="top",
                )  # fmt: skip

    return _svg(draw, panels=2)


def sources(result: Result) -> str:
    """Megabytes read by epoch, by where they came from."""
    kinds = [("origin_bytes", "from the origin", AMBER), ("cache_bytes", "from the cache", TEAL)]
    if any(epoch.peer_bytes for epoch in result.epochs):
        kinds[1:] = [("cache_bytes", "from the own disk", TEAL), ("peer_bytes", "from another node's", BLUE)]

    def draw(axes: Sequence[Axes]) -> None:
        heights = [[getattr(epoch, name) / 1e6 for name, _, _ in kinds] for epoch in result.epochs]
        _stack(axes[0], [epoch.epoch for epoch in result.epochs], heights, kinds, width=0.7)
        _finish(axes[0], result, "MB read", legend=len(kinds))

    return _svg(draw)


def times(result: Result) -> str:
    """Seconds of each epoch: one bar per worker, grouped by epoch."""
    merged = sum(len(epoch.workers) for epoch in result.epochs) > _MAX_BARS
    most = 1 if merged else max(len(epoch.workers) for epoch in result.epochs)
    step = (0.7 if most == 1 else 0.84) / most

    def draw(axes: Sequence[Axes]) -> None:
        positions, heights = [], []
        for epoch in result.epochs:
            bars = 1 if merged else len(epoch.workers)
            for index in range(bars):
                positions.append(epoch.epoch + (index - (bars - 1) / 2) * step)
                heights.append(
                    [epoch.mean_seconds(name) for name, _, _ in TIMES]
                    if merged
                    else [getattr(epoch.workers[index], f"{name}_seconds") for name, _, _ in TIMES]
                )
        _stack(axes[0], positions, heights, TIMES, width=step * (1.0 if most == 1 else 0.9))
        _finish(axes[0], result, "seconds, mean of all workers" if merged else "seconds", legend=len(TIMES))

    return _svg(draw, width=11.6)


def checkpoints(result: Result) -> str:
    """The size of each checkpoint and of its raw tensors."""

    def draw(axes: Sequence[Axes]) -> None:
        panel, saved = axes[0], result.checkpoints
        panel.bar(
            list(saved), [one.raw_bytes / 1e6 for one in saved.values()], width=0.7, color=RULE, label="raw tensors"
        )
        kinds = sorted({one.kind for one in saved.values()}, reverse=True)
        for kind in kinds:
            stored = {epoch: one.stored_bytes / 1e6 for epoch, one in saved.items() if one.kind == kind}
            colour = LILAC if kind == "delta" else VIOLET
            panel.bar(list(stored), list(stored.values()), width=0.7, color=colour, label=f"stored, {kind}")
        _finish(panel, result, "MB per checkpoint", legend=1 + len(kinds))

    return _svg(draw)


def _svg(draw: Callable[[Sequence[Axes]], None], *, panels: int = 1, width: float = 5.6) -> str:
    """An SVG element with what `draw` puts on its axes."""
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {
        "font.size": 9, "axes.edgecolor": RULE, "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED,
        "text.color": INK, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y",
        "grid.color": "#eef1f4", "axes.axisbelow": True, "legend.frameon": False, "legend.fontsize": 8.5,
        "svg.hashsalt": "millrace",
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, 2.9), layout="constrained")
        draw(list(figure.subplots(1, panels, squeeze=False)[0]))
        text = io.StringIO()
        figure.savefig(
            text, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    svg = text.getvalue()
    return svg[svg.index("<svg") :]  # without the declarations of a file


def _stack(
    axes: Axes,
    positions: Sequence[float],
    heights: Sequence[Sequence[float]],
    kinds: Sequence[tuple[str, str, str]],
    *,
    width: float,
) -> None:
    """Stacked bars: one part for each of `kinds` (name, label, colour)."""
    base = [0.0] * len(positions)
    for index, (_, label, colour) in enumerate(kinds):
        parts = [float(height[index]) for height in heights]
        axes.bar(positions, parts, width=width, bottom=base, color=colour, label=label)
        base = [below + part for below, part in zip(base, parts, strict=True)]


def _finish(axes: Axes, result: Result, title: str, *, legend: int = 0) -> None:
    """Title, limits, restart lines, and a legend of so many columns above the bars."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("epoch")
    axes.set_title(title, loc="left", fontsize=9, color=MUTED)
    axes.set_xlim(result.epochs[0].epoch - 0.6, result.epochs[-1].epoch + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_ylim(bottom=0)
    axes.tick_params(length=0)
    if legend:
        axes.set_ylim(top=(axes.get_ylim()[1] or 1) * 1.22)
        axes.legend(
            loc="upper left", ncols=legend, columnspacing=1, handlelength=1, handletextpad=0.4, borderaxespad=0.1
        )
    for epoch in result.restart_notes():
        axes.axvline(epoch - 0.5, ymax=0.83 if legend else 1.0, color=RED, linewidth=1, linestyle=(0, (3, 3)))
