"""One self-contained HTML page about a speech run: no script, no font, no image from anywhere else."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from millrace._version import __version__
from millrace.demo import report_page as page
from millrace.demo import report_plots as plots
from millrace.demo.speech.card import public_url
from millrace.demo.speech.log import CheckpointRecord, EpochRecord, WorkerTimes

if TYPE_CHECKING:
    from millrace.demo.speech.run import SpeechResult

_NODE_CHARACTERS = 22
"""Longer names of nodes are ids, whose beginning will do. The longest address in digits that is usual has 15."""


def render_report(result: SpeechResult, *, places: Mapping[str, str] | None = None) -> str:
    """The page as text. `places` are more lines for the table of where everything lies (what: URL).

    Needs matplotlib. The result must have at least one epoch.
    """
    epochs = result.epochs
    restarts = result.restart_notes()
    sections = [
        page.pair(
            page.section(
                "What it learned",
                "Loss on the training split, and characters wrong on the dev split, whose sentences are new to it.",
                plots.learning(epochs, restarts),
            ),
            page.section("Where the clips came from", *_sources(epochs, restarts)),
        ),
        page.section("Where the time went", _time_note(epochs), plots.times(epochs, restarts) + _worker_table(epochs)),
        page.pair(
            page.section("Checkpoints", _checkpoint_note(epochs), plots.checkpoints(epochs, restarts)),
            page.section("How it was run", "", page.pairs(_configuration(result))),
        ),
        page.section("Every epoch", _exactness(epochs), _epoch_table(epochs, restarts)),
        page.section(
            "What it hears",
            "Sentences of the test split, none of which is in the training split. Marked: what was "
            "<del>missed</del> and what was <ins>made up</ins>.",
            _transcripts(result.metrics),
        ),
        page.section("Where everything lies", "", page.pairs(_places(result, places or {}))),
    ]
    body = (
        "<header><h1>Speech in, checkpoints out</h1><p>A German speech-to-text model, trained with Ray from object "
        "storage: the clips come in through the Millrace cache, a compressed checkpoint goes out after every epoch."
        f"{_restart_sentence(result)}</p></header>\n"
        f"{_warnings(result.events)}{page.tiles(_tiles(result))}\n"
        + "\n".join(sections)
        + f"\n<footer>Millrace {html.escape(__version__)}</footer>"
    )
    return page.page("Millrace: speech in, checkpoints out", body)


# --- the head of the page -----------------------------------------------------------------------------


def _restart_sentence(result: SpeechResult) -> str:
    start = result.start_after_kill
    if result.kill is None or start is None:
        others = max(0, result.restarts)
        return "" if not others else f" It was started again {'once' if others == 1 else f'{others} times'} on the way."
    how = (
        "had the last checkpoint and went on"
        if start["resumed_after"]
        else "began from scratch: no checkpoint was there"
    )
    return (
        f" In epoch {result.kill['epoch']} a training process was killed on purpose; "
        f"{result.recovery_seconds:.0f} seconds later a new one {how}."
    )


def _warnings(events: Sequence[Mapping[str, Any]]) -> str:
    lines = [html.escape(str(event.get("text", ""))) for event in events if event["event"] == "warning"]
    return f'<p class="warning">{"<br>".join(lines)}</p>\n' if lines else ""


def _tiles(result: SpeechResult) -> list[tuple[str, str]]:
    epochs, metrics = result.epochs, result.metrics
    tiles = [
        (_percent(result.dev_cer), "characters wrong on the dev split"),
        (_percent(metrics.get("test_cer_known_speakers")), "on the test split, voices known from training"),
        (_percent(metrics.get("test_cer_held_out_speakers")), "on the test split, voices never heard"),
    ]
    later = epochs[1:]
    if later and any(epoch.local_share is not None for epoch in epochs):
        tiles.append((_megabytes(_origin_bytes(later)), "of the data set from the origin after epoch 1"))
    if (share := _local_share(later)) is not None and _of_many_nodes(epochs):
        tiles.append((f"{share:.0%}", "of what was read after epoch 1 lay on the reading node's own disk"))
    if (stored := stored_share(epochs)) is not None:
        tiles.append((f"{stored:.0%}", "size of the checkpoints against their raw tensors"))
    if len(epochs) > 1:
        same = sum(epoch.clips_digest == epochs[0].clips_digest for epoch in epochs)
        tiles.append((f"{same} of {len(epochs)}", f"epochs saw the same {epochs[0].clips:,} clips"))
    tiles.append((_duration(sum(epoch.seconds for epoch in epochs)), f"for {_plural(len(epochs), 'epoch')}"))
    return tiles


# --- where the bytes came from, and where the time went -----------------------------------------------


def _sources(epochs: Sequence[EpochRecord], restarts: Mapping[int, str]) -> tuple[str, str]:
    """The note and the plot."""
    if all(epoch.local_share is None for epoch in epochs):
        return "The file system of this run counts no bytes.", ""
    note = "Every epoch reads the whole data set again."
    if later := epochs[1:]:
        note += f" From the second epoch on, {_megabytes(_origin_bytes(later))} came from the origin"
        share = _local_share(later)
        local = share is not None and _of_many_nodes(epochs)
        note += f", and {share:.0%} lay on the disk of the node that read it." if local else "."
    return note, plots.sources(epochs, restarts, nodes=_of_many_nodes(epochs))


def _time_note(epochs: Sequence[EpochRecord]) -> str:
    workers = [worker for epoch in epochs for worker in epoch.workers]
    spent = plots.mean_times(workers)
    total = sum(spent.values()) or 1.0
    parts = ", ".join(
        f'<span class="dot" style="background:{colour}"></span>{label} <b>{_share(spent[name] / total)}</b>'
        for name, label, colour in plots.SHARES
    )
    most = max(len(epoch.workers) for epoch in epochs)
    whose = "the worker's time" if most == 1 else f"the time of {most} workers, whose bars stand beside each other"
    return f"Of {whose}: {parts}."


def _worker_table(epochs: Sequence[EpochRecord]) -> str:
    """A row a worker, over all epochs; one that was started again on another node has a row for each."""
    found: dict[tuple[int, str], list[WorkerTimes]] = {}
    for epoch in epochs:
        for worker in epoch.workers:
            found.setdefault((worker.rank, worker.node), []).append(worker)
    heads = ("worker", "node", "epochs", "clips", "", *(label.split()[0] for _, label, _ in plots.SHARES))
    rows = []
    for (rank, node), times in sorted(found.items()):
        spent = {name: sum(getattr(one, name) for one in times) for name, _, _ in plots.SHARES}
        rows.append(
            page.row(
                (
                    str(rank),
                    f"<code>{html.escape(node if len(node) <= _NODE_CHARACTERS else node[:8])}</code>",
                    str(len(times)),
                    f"{sum(one.clips for one in times):,}",
                    page.share_bar((spent[name], colour) for name, _, colour in plots.SHARES),
                    *(_seconds(spent[name]) for name, _, _ in plots.SHARES),
                )
            )
        )
    return page.table(heads, rows, kind="workers")


def _checkpoint_note(epochs: Sequence[EpochRecord]) -> str:
    done = [epoch.checkpoint for epoch in epochs if epoch.checkpoint is not None]
    share = stored_share(epochs)
    if not done or share is None:
        return "None became complete."
    stalled = sum(max((worker.stall_seconds for worker in epoch.workers), default=0.0) for epoch in epochs)
    note = (
        f"Model and optimizer, lossless: {share:.0%} of the raw tensors. The training stood still for "
        f"<b>{_seconds(stalled)}</b> in all; compression and upload took {_seconds(sum(one.seconds for one in done))}, "
        "beside it."
    )
    lost = [str(epoch.epoch) for epoch in epochs if epoch.checkpoint is None]
    return note + (f" Never complete: epoch {', '.join(lost)}." if lost else "")


# --- tables -------------------------------------------------------------------------------------------


def _exactness(epochs: Sequence[EpochRecord]) -> str:
    first = epochs[0]
    if len(epochs) == 1:
        return ""
    odd = [epoch for epoch in epochs if epoch.clips_digest != first.clips_digest]
    if not odd:
        return (
            f"Every epoch saw the same {first.clips:,} clips, each as often, over all workers and restarts "
            f"(digest <code>{html.escape(first.clips_digest[:8])}</code>)."
        )
    told = ", ".join(f"epoch {epoch.epoch} ({epoch.clips:,})" for epoch in odd)
    return f"<b>Not every epoch saw the clips of the first ({first.clips:,}):</b> {told}."


def _epoch_table(epochs: Sequence[EpochRecord], restarts: Mapping[int, str]) -> str:
    many = _of_many_nodes(epochs)
    heads = [
        "epoch", "loss", "dev CER", "clips", "seconds", "training", "waiting", "evaluating", "standing still",
        "MB from origin", *(("own disk", "other nodes") if many else ("cache",)), "MB of the checkpoint",
    ]  # fmt: skip
    rows = []
    for epoch in epochs:
        if epoch.epoch in restarts:
            rows.append(page.note_row(restarts[epoch.epoch], len(heads)))
        spent = plots.mean_times(epoch.workers)
        clips = f"{epoch.clips:,}"
        read = (epoch.origin_bytes, epoch.cache_bytes, *((epoch.peer_bytes,) if many else ()))
        cells = (
            str(epoch.epoch), f"{epoch.train_loss:.3f}", _percent(epoch.dev_cer),
            clips if epoch.clips_digest == epochs[0].clips_digest else f'<td class="odd">{clips}</td>',
            f"{epoch.seconds:.1f}", f"{spent['compute_seconds']:.1f}", f"{spent['wait_seconds']:.1f}",
            f"{spent['evaluate_seconds']:.1f}", f"{spent['stall_seconds']:.2f}",
            *(f"{count / 1e6:.2f}" if count else "0" for count in read), _checkpoint_cell(epoch.checkpoint),
        )  # fmt: skip
        rows.append(page.row(cells))
    last = epochs[-1].epoch
    rows += [page.note_row(note, len(heads)) for epoch, note in restarts.items() if epoch > last]
    return page.table(heads, rows, kind="epochs")


def _checkpoint_cell(saved: CheckpointRecord | None) -> str:
    if saved is None:
        return "–"
    return f'{saved.checkpoint_bytes / 1e6:.2f} <span class="tag">{html.escape(saved.kind)}</span>'


def _transcripts(metrics: Mapping[str, Any]) -> str:
    rows = []
    for line in metrics.get("transcripts", ()):
        said, heard = page.marked(line["said"], line["heard"])
        voice = "known voice" if line["known_speaker"] else "new voice"
        rows.append(page.row((said, heard, f'<span class="tag">{voice}</span>')))
    return page.table(("said", "heard", ""), rows, kind="text")


def _places(result: SpeechResult, places: Mapping[str, str]) -> list[tuple[str, str]]:
    run = result.settings.run_url.rstrip("/")
    return [
        ("data set", public_url(result.settings.data_url)),
        ("checkpoints", f"{run}/checkpoints/"),
        ("final model", f"{run}/model/"),
        ("training log", f"{run}/training.jsonl"),
        ("metrics", f"{run}/metrics.json"),
        *places.items(),
    ]


def _configuration(result: SpeechResult) -> list[tuple[str, str]]:
    settings = result.settings
    start: Mapping[str, Any] = next((event for event in reversed(result.events) if event["event"] == "start"), {})
    small = f"small {settings.family}, {_plural(settings.layers, 'layer')} of {settings.hidden_size}, from scratch"
    device = str(start.get("device") or ("gpu" if settings.use_gpu else "cpu"))
    device = device.upper() if device in ("cpu", "gpu") else device
    workers = f"{settings.num_workers}"
    if settings.min_workers is not None and settings.min_workers != settings.num_workers:
        workers = f"{settings.min_workers} to {settings.num_workers}"
    return [
        ("model", str(start.get("model") or settings.model or small)),
        ("parameters", f"{start.get('parameters', 0):,}"),
        ("training workers", f"{workers} × {_plural(settings.threads_per_worker, 'thread')}"),
        ("device", f"{device}, {start.get('precision') or settings.precision}"),
        ("batch", f"{settings.batch_size} clips a worker"),
        ("optimizer", f"AdamW, peak rate {settings.learning_rate:g}, weight decay {settings.weight_decay:g}"),
        ("seed", str(settings.seed)),
    ]


# --- figures ------------------------------------------------------------------------------------------


def stored_share(epochs: Sequence[EpochRecord]) -> float | None:
    """What the complete checkpoints take in storage as a share of their tensors; None where there is none."""
    done = [epoch.checkpoint for epoch in epochs if epoch.checkpoint is not None]
    raw = sum(one.raw_bytes for one in done)
    return sum(one.checkpoint_bytes for one in done) / raw if raw else None


def _of_many_nodes(epochs: Sequence[EpochRecord]) -> bool:
    return any(epoch.peer_bytes for epoch in epochs)


def _origin_bytes(epochs: Sequence[EpochRecord]) -> int:
    return sum(epoch.origin_bytes for epoch in epochs)


def _local_share(epochs: Sequence[EpochRecord]) -> float | None:
    total = sum(epoch.origin_bytes + epoch.cache_bytes + epoch.peer_bytes for epoch in epochs)
    return sum(epoch.cache_bytes for epoch in epochs) / total if total else None


def _megabytes(count: float) -> str:
    if count == 0:
        return "0 bytes"
    return f"{count / 1e6:.2f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"


def _percent(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:.1%}"


def _share(share: float) -> str:
    return "under 1%" if 0 < share < 0.01 else f"{share:.0%}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else _duration(seconds)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02} h" if hours else f"{rest // 60}:{rest % 60:02} min"


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
