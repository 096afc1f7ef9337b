"""What a terminal gets to see of a speech run when it has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.demo.speech.log import EpochRecord

if TYPE_CHECKING:
    from millrace.demo.speech.run import SpeechResult


def epoch_table(result: SpeechResult) -> str:
    """A line an epoch, with what it cost; restarts stand between the epochs. Times are means over the workers."""
    peers = any(epoch.peer_bytes for epoch in result.epochs)
    lines = [
        " epoch   loss  dev CER  seconds  waiting  standing   from origin    "
        + ("  own disk  other nodes" if peers else "from cache")
        + "   checkpoint (of raw)"
    ]
    notes = result.restart_notes()
    for epoch in result.epochs:
        if epoch.epoch in notes:
            lines.append(f"        --- {notes[epoch.epoch]} ---")
        lines.append(_epoch_line(epoch, peers=peers))
    return "\n".join(lines)


def exactness(result: SpeechResult) -> str:
    """Whether every epoch saw the same clips, in one line."""
    first, *others = result.epochs
    odd = [str(epoch.epoch) for epoch in others if epoch.clips_digest != first.clips_digest]
    if odd:
        return f"not every epoch saw the clips of the first: look at epoch {', '.join(odd)}"
    return f"{first.clips:,} clips an epoch" + (", the same ones in every epoch" if others else "")


def error_rates(result: SpeechResult) -> str:
    """The error rates on dev and test, in one line."""
    known = rate_text(result.metrics.get("test_cer_known_speakers"))
    held_out = rate_text(result.metrics.get("test_cer_held_out_speakers"))
    return (
        f"dev CER {rate_text(result.dev_cer)}; test CER {known} for speakers known from training, {held_out} for those "
        "who are not"
    )


def outputs(result: SpeechResult) -> str:
    """Where the run's outputs are, in one line."""
    return f"{result.settings.run_url}/  (model/, checkpoints/, training.jsonl, metrics.json, report.html)"


def summary(result: SpeechResult) -> str:
    """All of it, as the example scripts end."""
    return f"{epoch_table(result)}\n\n{error_rates(result)}\n{exactness(result)}\noutputs in {outputs(result)}"


def _epoch_line(epoch: EpochRecord, *, peers: bool) -> str:
    count = max(1, len(epoch.workers))
    waited = sum(worker.wait_seconds for worker in epoch.workers) / count
    stalled = sum(worker.stall_seconds for worker in epoch.workers) / count
    line = (
        f" {epoch.epoch:5d}  {epoch.train_loss:5.3f}  {rate_text(epoch.dev_cer):>7s}  {epoch.seconds:7.1f}  {waited:7.1f}"
        f"  {stalled:8.2f}  {megabytes(epoch.origin_bytes):>12s}  {megabytes(epoch.cache_bytes):>12s}"
    )
    if peers:
        line += f"  {megabytes(epoch.peer_bytes):>11s}"
    saved = epoch.checkpoint
    if saved is None:
        return f"{line}   never complete"
    share = saved.checkpoint_bytes / saved.raw_bytes if saved.raw_bytes else 1.0
    return f"{line}   {megabytes(saved.checkpoint_bytes)} ({share:.0%}, {saved.kind})"


def rate_text(value: float | None) -> str:
    """A share of 1 as percents, or a dash."""
    return "-" if value is None else f"{value:.1%}"


def megabytes(nbytes: int) -> str:
    """An amount of bytes in megabytes, unless there are next to none."""
    return f"{nbytes} B" if nbytes < 1000 else f"{nbytes / 1e6:.2f} MB"
