"""The records of a run of examples/speech, its closing table, and its page."""

from __future__ import annotations

import html
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import millrace
from finetune.log import Checkpoint, Epoch, Result, TrainingLog, WorkerTimes, epochs_of, line_of, read_events
from finetune.options import Settings
from finetune.report import marked, render, summary


def times(rank: int = 0, node: str = "10.0.0.1", **changes: Any) -> WorkerTimes:
    base = WorkerTimes(
        rank=rank, node=node, clips=208, steps=26, wait_seconds=1.0, compute_seconds=7.0, evaluate_seconds=0.5,
        blocked_seconds=0.04,
    )  # fmt: skip
    return replace(base, **changes)


def record(epoch: int, **changes: Any) -> Epoch:
    base = Epoch(
        epoch=epoch, attempt=int(epoch > 1), train_loss=3 / epoch, dev_cer=0.9 / epoch, clips=416, clips_digest="00aa",
        origin_bytes=2_240_000 if epoch == 1 else 0, cache_bytes=0 if epoch == 1 else 2_240_000, peer_bytes=0,
        workers=(times(),),
    )  # fmt: skip
    return replace(base, **changes)


def start(attempt: int, after: int, seconds: float) -> dict[str, Any]:
    return {
        "event": "start", "attempt": attempt, "resumed_after": after, "time": seconds, "workers": 1,
        "parameters": 783_000, "device": "NVIDIA <H200>", "precision": "bfloat16",
    }  # fmt: skip


KILL = {"event": "kill", "attempt": 0, "epoch": 2, "pid": 4, "time": 12.0}


def result(**changes: Any) -> Result:
    saved = {
        epoch: Checkpoint(kind="full" if epoch == 1 else "delta", stored_bytes=7_800_000, raw_bytes=9_400_000)
        for epoch in (1, 2, 3)
    }
    base = Result(
        settings=Settings(data="s3://demo/cv", run="s3://demo/run"),
        epochs=[record(epoch) for epoch in (1, 2, 3)],
        events=[start(0, 0, 1.0), KILL, start(1, 1, 20.0)],
        metrics={
            "test_cer_known_speakers": 0.031,
            "test_cer_held_out_speakers": None,
            "transcripts": [{"said": "das <korn>", "heard": "das korn & mehr", "known_speaker": False}],
        },
        checkpoints=saved,
    )
    return replace(base, **changes)


def of_two_nodes() -> Result:
    """Two workers; the second restarted on another node. Most bytes came from the reading node's own disk."""
    return result(
        epochs=[
            record(
                epoch,
                cache_bytes=0 if epoch == 1 else 1_800_000,
                peer_bytes=0 if epoch == 1 else 440_000,
                workers=(times(), times(1, "10.0.0.2" if epoch == 1 else "10.0.0.3", wait_seconds=3.0)),
            )
            for epoch in (1, 2, 3)
        ]
    )


def text_of(page: str) -> str:
    """The visible text of the page, with one space between words."""
    return html.unescape(
        " ".join(re.sub(r"<style>.*?</style>|<svg.*?</svg>|<[^>]*>", " ", page, flags=re.DOTALL).split())
    )


# --- the log ------------------------------------------------------------------------------------------


def test_log_continues_after_a_restart(tmp_path: Path) -> None:
    fs = millrace.filesystem("file", cache_dir=str(tmp_path / "c"), consistency="always", members="none", min_free=0)
    run = str(tmp_path / "run")
    first = TrainingLog(fs, run)
    first.add("start", resumed_after=0)
    first.add("epoch", **{**asdict(record(1)), "attempt": 0})
    second = TrainingLog(fs, run)
    second.add("start", resumed_after=1)
    second.add("epoch", **asdict(record(2)))
    events = read_events(fs, run)
    assert [(event["event"], event["attempt"]) for event in events] == [
        ("start", 0), ("epoch", 0), ("start", 1), ("epoch", 1),
    ]  # fmt: skip
    assert epochs_of(events) == [record(1), record(2)]


def test_last_record_of_a_repeated_epoch_counts() -> None:
    events = [{"event": "epoch", **asdict(record(1, train_loss=loss))} for loss in (2.0, 1.0)]
    assert [epoch.train_loss for epoch in epochs_of(events)] == [1.0]


def test_each_event_has_at_most_one_line() -> None:
    lines = [line_of(event) for event in (start(0, 0, 1.0), {"event": "epoch", **asdict(record(1))}, KILL)]
    assert lines == [
        "training 0.78 M parameters on 1 worker(s)",
        "epoch   1  loss  3.000  dev CER  90.0%    8.5 s    2.24 MB from origin    0.00 MB from cache",
        "         killed training process 4 on purpose in epoch 2",
    ]
    assert line_of(start(1, 4, 1.0)) == "         resumed from the checkpoint of epoch 4"
    assert line_of(start(1, 0, 1.0)) == "         began again: there was no checkpoint"
    assert line_of({"event": "warning", "text": "take care"}) == "         take care"
    assert line_of({"event": "end"}) is None


def test_report_has_the_cause_of_each_restart() -> None:
    assert result().recovery_seconds == 8.0
    killed = "worker killed on purpose in epoch 2; 8 s later resumed from the checkpoint of epoch 1"
    assert result().restart_notes() == {2: killed}
    lost = "the training restarted: began again: there was no checkpoint"
    assert result(events=[start(0, 0, 1.0), start(1, 0, 9.0)]).restart_notes() == {1: lost}
    twice = result(events=[*result().events, start(2, 1, 30.0)])
    assert twice.restart_notes() == {2: f"{killed}; the training restarted: resumed from the checkpoint of epoch 1"}
    assert (result().restarts, twice.restarts) == (1, 2)


# --- the closing table --------------------------------------------------------------------------------


def test_table_has_a_line_for_each_epoch_and_restart() -> None:
    heads, first, note, second, *rest = summary(result()).splitlines()
    assert " ".join(first.split()) == "1 3.000 90.0% 8.5 1.0 0.04 2.24 MB 0 B 7.80 MB (83%, full)"
    assert note.strip().startswith("--- worker killed on purpose in epoch 2")
    assert "0.04           0 B     2.24 MB   7.80 MB (83%, delta)" in second
    assert heads.index("from cache") + len("from cache") == first.index("0 B") + len("0 B")
    assert "416 clips per epoch, the same ones in every epoch" in rest
    assert "dev CER 30.0%; test CER 3.1% for speakers of the training split, - for others" in rest


def test_table_marks_epochs_with_other_clips_or_without_checkpoint() -> None:
    odd = [record(1), record(2, clips_digest="00ab"), record(3)]
    text = summary(result(epochs=odd, checkpoints={}))
    assert "not every epoch saw the same clips as the first: epoch 2" in text
    assert "2.24 MB   none" in text


def test_table_of_several_nodes_has_their_bytes() -> None:
    heads, *lines = summary(of_two_nodes()).splitlines()
    assert "own disk  other nodes" in heads
    assert heads.index("other nodes") + len("other nodes") == lines[-6].index("0.44 MB") + len("0.44 MB")


# --- the page -----------------------------------------------------------------------------------------


class _Balance(HTMLParser):
    """Fails on a tag that is closed without having been opened, and collects the open ones."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_report_page_is_well_formed_and_loads_nothing() -> None:
    page = render(result(), {})
    balance = _Balance()
    balance.feed(page)
    assert balance.open == []
    assert not re.search(r"<(script|link|img|iframe|object|embed|image)\b", page)
    assert not re.search(r"@import|url\(\s*['\"]?(?!#)", page)
    for match in re.finditer(r"(?:href|src)=\"([^\"]*)\"", page):
        assert match[1].startswith("#")


def test_report_page_has_the_figures_and_plots_of_the_run() -> None:
    page = render(result(), {"this page": "s3://demo/run/report.html"})
    text = text_of(page)
    assert page.count('<svg role="img" aria-label="') == 4
    assert "8 seconds later a new one continued from the last checkpoint" in text
    assert "worker killed on purpose in epoch 2; 8 s later resumed from the checkpoint of epoch 1" in text
    assert "30.0% characters wrong on the dev split" in text
    assert "0 B of the data set from the origin after epoch 1" in text
    assert "83% size of the checkpoints compared with their raw tensors" in text
    assert "3 of 3 epochs saw the same 416 clips" in text
    assert "7.80 full" in text
    assert text.count("7.80 delta") == 2
    assert "s3://demo/run/report.html" in text
    assert "other nodes" not in text


def test_report_page_escapes_external_text() -> None:
    page = render(result(events=[*result().events, {"event": "warning", "text": "epoch 2 saw <414> clips"}]), {})
    assert "epoch 2 saw &lt;414&gt; clips" in page
    assert "NVIDIA &lt;H200&gt;" in page
    assert "das <del>&lt;</del>korn" in page


def test_report_page_of_several_workers_has_a_row_for_each_place() -> None:
    text = text_of(render(of_two_nodes(), {}))
    assert (
        "training 73.4% , waiting for data 21.0% , evaluating 5.2% , blocked by the save of a checkpoint 0.4% ." in text
    )
    assert "0 10.0.0.1 3 624 21 s 3.00 s 1.50 s 0.12 s" in text
    assert "1 10.0.0.2 1 208 7.00 s 3.00 s 0.50 s 0.04 s" in text
    assert "1 10.0.0.3 2 416 14 s 6.00 s 1.00 s 0.08 s" in text
    assert "80.4% of the bytes read after epoch 1 came from the reading node's own disk" in text


def test_report_page_marks_an_epoch_with_other_clips() -> None:
    page = render(result(epochs=[record(1), record(2, clips=414, clips_digest="00ab"), record(3)]), {})
    assert "2 of 3 epochs saw the same 416 clips" in text_of(page)
    assert "Not every epoch saw the same clips as the first." in text_of(page)
    assert '<td class="odd">414</td>' in page


def test_report_page_of_many_workers_draws_one_bar_per_epoch() -> None:
    crowd = tuple(times(rank) for rank in range(32))
    few = render(result(epochs=[record(epoch, workers=crowd) for epoch in range(1, 8)]), {})
    many = render(result(epochs=[record(epoch, workers=crowd) for epoch in range(1, 41)]), {})
    assert len(many) < 2 * len(few)


def test_report_page_without_checkpoints_or_restarts_omits_them() -> None:
    quiet = result(events=result().events[:1], checkpoints={}, epochs=[record(1, dev_cer=None)])
    text = text_of(render(quiet, {}))
    assert "None became complete." in text
    assert "killed" not in text
    assert "- characters wrong on the dev split" in text


@pytest.mark.parametrize(
    ("said", "heard", "left", "right"),
    [
        ("brot", "brot", "brot", "brot"),
        ("brot", "rot", "<del>b</del>rot", "rot"),
        ("rot", "brot", "rot", "<ins>b</ins>rot"),
        ("a<b", "a", "a<del>&lt;b</del>", "a"),
        ("", "", "", ""),
    ],
)
def test_differences_of_a_transcript_are_marked(said: str, heard: str, left: str, right: str) -> None:
    assert marked(said, heard) == (left, right)
