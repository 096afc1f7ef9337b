"""One self-contained HTML page about a speech run: no script, no font, no image from anywhere else."""

from __future__ import annotations

import difflib
import html
import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from millrace._version import __version__
from millrace.demo.speech.log import EpochRecord
from millrace.demo.speech.run import SpeechResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _MUTED, _RULE = "#1c2733", "#66727f", "#dfe4ea"
_CACHE, _ORIGIN, _RED = "#1f7a8c", "#e39b2d", "#b8433a"
_SHARES = (
    ("compute_seconds", "training", "#1f7a8c"),
    ("wait_seconds", "waiting for data", "#e39b2d"),
    ("evaluate_seconds", "evaluating", "#9db4c0"),
    ("checkpoint_seconds", "checkpoint", "#5c4d7d"),
)

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f7f9; color: #1c2733;
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 64px; }
header p { color: #66727f; margin: 4px 0 0; max-width: 46em; }
h1 { font-size: 28px; line-height: 1.2; margin: 0; letter-spacing: -.01em; }
h2 { font-size: 17px; margin: 0 0 2px; }
.note { color: #66727f; font-size: 13.5px; margin: 0 0 10px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px; margin: 26px 0; }
.tile, section { background: #fff; border: 1px solid #dfe4ea; border-radius: 10px; }
.tile { padding: 14px 16px; }
.tile b { display: block; font-size: 25px; line-height: 1.2; font-weight: 650; font-variant-numeric: tabular-nums; }
.tile span { color: #66727f; font-size: 13px; line-height: 1.35; display: block; margin-top: 2px; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(430px, 1fr)); gap: 16px; }
section { padding: 18px 20px; margin-bottom: 16px; min-width: 0; }
.pair section { margin-bottom: 0; } .pair { margin-bottom: 16px; }
svg { width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 6px 10px; border-bottom: 1px solid #eef1f4; white-space: nowrap; }
th { color: #66727f; font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child, .text th, .text td { text-align: left; }
.text td { white-space: normal; }
.plain td:first-child { white-space: nowrap; width: 1%; padding-right: 18px; }
tr.restart td { background: #fbf0ef; color: #b8433a; text-align: left; font-size: 13px; }
del { color: #b8433a; text-decoration: line-through; text-decoration-thickness: 1px; background: #fbf0ef; }
ins { color: #b8433a; text-decoration: none; background: #fbf0ef; border-bottom: 2px solid #b8433a; }
.tag { font-size: 12px; color: #66727f; white-space: nowrap; }
code { font: 13px ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
footer { color: #66727f; font-size: 13px; margin-top: 20px; }
@media print { body { background: #fff; } section, .tile { break-inside: avoid; } }
"""


def render_report(result: SpeechResult, *, places: Mapping[str, str] | None = None) -> str:
    """The page as text. `places` are more lines for the table of where everything lies (what: URL).

    Needs matplotlib. The result must have at least one epoch.
    """
    epochs = result.epochs
    restarts = result.restart_notes()
    later = sum(epoch.origin_bytes for epoch in epochs[1:])
    sections = [
        _pair(
            _section(
                "What it learned",
                "Loss on the training split, and characters wrong on the dev split, whose sentences are new to it.",
                _plot(lambda axes: _draw_learning(axes, epochs, restarts), panels=2),
            ),
            _section(
                "Where the clips came from",
                f"Every epoch reads the whole data set again. From the second epoch on, {_megabytes(later)} came from "
                "the origin.",
                _plot(lambda axes: _draw_sources(axes[0], epochs, restarts)),
            ),
        ),
        _pair(
            _section(
                "Where the time went",
                "Seconds of each epoch in the first training process.",
                _plot(lambda axes: _draw_time(axes[0], epochs, restarts)),
            ),
            _section(
                "Checkpoints",
                f"Model and optimizer, lossless. Stored: {_stored_share(epochs):.0%} of the raw tensors.",
                _plot(lambda axes: _draw_checkpoints(axes[0], epochs, restarts)),
            ),
        ),
        _section("Every epoch", "", _epoch_table(result, restarts)),
        _section(
            "What it hears",
            "Sentences of the test split, none of which is in the training split. Marked: what was "
            "<del>missed</del> and what was <ins>made up</ins>.",
            _transcripts(result.metrics),
        ),
        _pair(
            _section("Where everything lies", "", _rows(_places(result, places or {}))),
            _section("How it was run", "", _rows(_configuration(result))),
        ),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Millrace: speech in, checkpoints out</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        "<header><h1>Speech in, checkpoints out</h1><p>A German speech-to-text model, trained with Ray from object "
        "storage: the clips come in through the Millrace cache, a compressed checkpoint goes out after every epoch."
        f"{_restart_sentence(result)}</p></header>\n"
        f"{_tiles(result)}\n" + "\n".join(sections) + f"\n<footer>Millrace {html.escape(__version__)}</footer>\n"
        "</main>\n</body>\n</html>\n"
    )


# --- text -------------------------------------------------------------------------------------------


def _megabytes(count: float) -> str:
    return "0 bytes" if count == 0 else f"{count / 1e6:.2f} MB"


def _percent(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:.1%}"


def _stored_share(epochs: Sequence[EpochRecord]) -> float:
    return sum(epoch.checkpoint_bytes for epoch in epochs) / max(1, sum(epoch.raw_bytes for epoch in epochs))


def _restart_sentence(result: SpeechResult) -> str:
    start = result.start_after_kill
    if result.kill is None or start is None:
        return ""
    how = (
        "had the last checkpoint and went on"
        if start["resumed_after"]
        else "began from scratch: no checkpoint was there"
    )
    return (
        f" In epoch {result.kill['epoch']} a training process was killed on purpose; "
        f"{result.recovery_seconds:.0f} seconds later a new one {how}."
    )


def _tiles(result: SpeechResult) -> str:
    epochs, metrics = result.epochs, result.metrics
    later = sum(epoch.origin_bytes for epoch in epochs[1:])
    tiles = [
        (_percent(result.dev_cer), "characters wrong on the dev split"),
        (_percent(metrics.get("test_cer_known_speakers")), "on the test split, voices known from training"),
        (_percent(metrics.get("test_cer_held_out_speakers")), "on the test split, voices never heard"),
        (_megabytes(later), "of the data set from the origin after epoch 1"),
        (f"{_stored_share(epochs):.0%}", "size of a checkpoint against its raw tensors"),
        (f"{sum(epoch.seconds for epoch in epochs):.0f} s", f"for {len(epochs)} epochs"),
    ]
    cells = "".join(f"<div class=tile><b>{value}</b><span>{label}</span></div>" for value, label in tiles)
    return f'<div class="tiles">{cells}</div>'


def _section(title: str, note: str, body: str) -> str:
    note = f'<p class="note">{note}</p>' if note else ""
    return f"<section><h2>{title}</h2>{note}{body}</section>"


def _pair(*sections: str) -> str:
    return f'<div class="pair">{"".join(sections)}</div>'


def _epoch_table(result: SpeechResult, restarts: Mapping[int, str]) -> str:
    heads = (
        "epoch", "loss", "dev CER", "clips", "seconds", "training", "waiting", "evaluating", "saving",
        "from origin", "from cache", "checkpoint",
    )  # fmt: skip
    rows = []
    for epoch in result.epochs:
        if epoch.epoch in restarts:
            rows.append(
                f'<tr class="restart"><td colspan="{len(heads)}">{html.escape(restarts[epoch.epoch])}</td></tr>'
            )
        cells = (
            str(epoch.epoch), f"{epoch.train_loss:.3f}", _percent(epoch.dev_cer), f"{epoch.clips:,}",
            f"{epoch.seconds:.1f}", f"{epoch.compute_seconds:.1f}", f"{epoch.wait_seconds:.1f}",
            f"{epoch.evaluate_seconds:.1f}", f"{epoch.checkpoint_seconds:.2f}", _megabytes(epoch.origin_bytes),
            _megabytes(epoch.cache_bytes), _megabytes(epoch.checkpoint_bytes),
        )  # fmt: skip
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _transcripts(metrics: Mapping[str, Any]) -> str:
    rows = []
    for line in metrics.get("transcripts", ()):
        said, heard = marked(line["said"], line["heard"])
        voice = "known voice" if line["known_speaker"] else "new voice"
        rows.append(f'<tr><td>{said}</td><td>{heard}</td><td><span class="tag">{voice}</span></td></tr>')
    head = "<tr><th>said</th><th>heard</th><th></th></tr>"
    return f'<div class="wide text"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'


def marked(said: str, heard: str) -> tuple[str, str]:
    """Both texts as HTML, with what only the first has in `<del>` and what only the second has in `<ins>`."""
    left, right = [], []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, said, heard, autojunk=False).get_opcodes():
        one, other = html.escape(said[a:b]), html.escape(heard[c:d])
        left.append(one if kind == "equal" or not one else f"<del>{one}</del>")
        right.append(other if kind == "equal" or not other else f"<ins>{other}</ins>")
    return "".join(left), "".join(right)


def _rows(rows: Sequence[tuple[str, str]]) -> str:
    body = "".join(
        f"<tr><td>{html.escape(name)}</td><td><code>{html.escape(value)}</code></td></tr>" for name, value in rows
    )
    return f'<div class="text plain"><table><tbody>{body}</tbody></table></div>'


def _places(result: SpeechResult, places: Mapping[str, str]) -> list[tuple[str, str]]:
    run = result.settings.run_url
    return [
        ("data set", result.settings.data_url),
        ("checkpoints", f"{run}/checkpoints/"),
        ("final model", f"{run}/model/"),
        ("training log", f"{run}/training.jsonl"),
        ("metrics", f"{run}/metrics.json"),
        *places.items(),
    ]


def _configuration(result: SpeechResult) -> list[tuple[str, str]]:
    settings = result.settings
    start = next((event for event in result.events if event["event"] == "start"), {})
    model = settings.model or (f"Wav2Vec2-BERT, {settings.layers} layers of {settings.hidden_size}, from scratch")
    return [
        ("model", model),
        ("parameters", f"{start.get('parameters', 0):,}"),
        ("training workers", f"{settings.num_workers} × {settings.threads_per_worker} thread(s)"),
        ("device", "GPU" if settings.use_gpu else "CPU"),
        ("batch", f"{settings.batch_size} clips a worker"),
        ("optimizer", f"AdamW, peak rate {settings.learning_rate:g}, weight decay {settings.weight_decay:g}"),
        ("seed", str(settings.seed)),
    ]


# --- plots ------------------------------------------------------------------------------------------


def _plot(draw: Callable[[Sequence[Axes]], None], *, panels: int = 1) -> str:
    """An SVG element with what `draw` puts on its axes."""
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {
        "font.size": 9, "axes.edgecolor": _RULE, "axes.labelcolor": _MUTED, "xtick.color": _MUTED,
        "ytick.color": _MUTED, "text.color": _INK, "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "axes.grid.axis": "y", "grid.color": "#eef1f4", "axes.axisbelow": True,
        "legend.frameon": False, "legend.fontsize": 8.5, "svg.hashsalt": "millrace",
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(5.6, 2.9), layout="constrained")
        axes = figure.subplots(1, panels, squeeze=False)[0]
        draw(list(axes))
        text = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    svg = text.getvalue()
    # The page needs the element alone, without the declarations that stand before it in a file.
    return svg[svg.index("<svg") :]


def _mark_restarts(axes: Axes, restarts: Mapping[int, str], *, label: bool = False) -> None:
    for epoch in restarts:
        # Where there is a legend above the bars, the line ends below it.
        axes.axvline(epoch - 0.5, ymax=1.0 if label else 0.83, color=_RED, linewidth=1, linestyle=(0, (3, 3)))
        if label:
            axes.annotate(
                "restart", (epoch - 0.5, 0.97), xycoords=("data", "axes fraction"), xytext=(4, 0),
                textcoords="offset points", color=_RED, fontsize=8, va="top",
            )  # fmt: skip


def _finish(axes: Axes, epochs: Sequence[EpochRecord], ylabel: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("epoch")
    axes.set_title(ylabel, loc="left", fontsize=9, color=_MUTED)
    axes.set_xlim(epochs[0].epoch - 0.6, epochs[-1].epoch + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_ylim(bottom=0)
    axes.tick_params(length=0)


def _draw_learning(axes: Sequence[Axes], epochs: Sequence[EpochRecord], restarts: Mapping[int, str]) -> None:
    numbers = [epoch.epoch for epoch in epochs]
    axes[0].plot(numbers, [epoch.train_loss for epoch in epochs], color=_CACHE, marker="o", markersize=3.5)
    _finish(axes[0], epochs, "training loss")
    errors = [float("nan") if epoch.dev_cer is None else 100 * epoch.dev_cer for epoch in epochs]
    axes[1].plot(numbers, errors, color=_INK, marker="o", markersize=3.5)
    _finish(axes[1], epochs, "dev characters wrong, %")
    for panel in axes:
        _mark_restarts(panel, restarts, label=True)


def _draw_sources(axes: Axes, epochs: Sequence[EpochRecord], restarts: Mapping[int, str]) -> None:
    numbers = [epoch.epoch for epoch in epochs]
    origin = [epoch.origin_bytes / 1e6 for epoch in epochs]
    cache = [epoch.cache_bytes / 1e6 for epoch in epochs]
    axes.bar(numbers, origin, width=0.7, color=_ORIGIN, label="from the origin")
    axes.bar(numbers, cache, width=0.7, bottom=origin, color=_CACHE, label="from the cache")
    _finish(axes, epochs, "MB read")
    _with_legend(axes, 2)
    _mark_restarts(axes, restarts)


def _draw_time(axes: Axes, epochs: Sequence[EpochRecord], restarts: Mapping[int, str]) -> None:
    numbers = [epoch.epoch for epoch in epochs]
    base = [0.0] * len(epochs)
    for name, label, colour in _SHARES:
        heights = [float(getattr(epoch, name)) for epoch in epochs]
        axes.bar(numbers, heights, width=0.7, bottom=base, color=colour, label=label)
        base = [below + height for below, height in zip(base, heights, strict=True)]
    _finish(axes, epochs, "seconds")
    _with_legend(axes, 4)
    _mark_restarts(axes, restarts)


def _draw_checkpoints(axes: Axes, epochs: Sequence[EpochRecord], restarts: Mapping[int, str]) -> None:
    numbers = [epoch.epoch for epoch in epochs]
    axes.bar(numbers, [epoch.raw_bytes / 1e6 for epoch in epochs], width=0.7, color=_RULE, label="raw tensors")
    stored = [epoch.checkpoint_bytes / 1e6 for epoch in epochs]
    axes.bar(numbers, stored, width=0.7, color="#5c4d7d", label="stored")
    _finish(axes, epochs, "MB a checkpoint")
    _with_legend(axes, 2)
    _mark_restarts(axes, restarts)


def _with_legend(axes: Axes, columns: int) -> None:
    """The legend above the bars, in room that is made for it."""
    axes.set_ylim(top=(axes.get_ylim()[1] or 1) * 1.22)
    axes.legend(loc="upper left", ncols=columns, columnspacing=1, handlelength=1, handletextpad=0.4, borderaxespad=0.1)
