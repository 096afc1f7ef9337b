"""The page about a run: complete, self-contained, safe with any text."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from millrace.demo.report import render_report
from millrace.demo.report_page import marked
from millrace.demo.speech.log import CheckpointRecord, EpochRecord, WorkerTimes
from millrace.demo.speech.run import SpeechResult
from millrace.demo.speech.settings import SpeechSettings

pytest.importorskip("matplotlib")


def times(rank: int = 0, node: str = "10.0.0.1", **changes: Any) -> WorkerTimes:
    base = WorkerTimes(
        rank=rank, node=node, clips=208, steps=26, wait_seconds=1.0, compute_seconds=7.0, evaluate_seconds=0.5,
        stall_seconds=0.04,
    )  # fmt: skip
    return replace(base, **changes)


def record(epoch: int, **changes: Any) -> EpochRecord:
    base = EpochRecord(
        epoch=epoch, attempt=int(epoch > 1), train_loss=3 / epoch, dev_cer=0.9 / epoch, clips=416,
        clips_digest="00000000000000aa", steps=52, seconds=9.0, learning_rate=0.001,
        origin_bytes=2_240_000 if epoch == 1 else 0, cache_bytes=0 if epoch == 1 else 2_240_000, peer_bytes=0,
        workers=(times(),),
        checkpoint=CheckpointRecord(
            epoch=epoch, kind="full" if epoch == 1 else "delta", checkpoint_bytes=7_800_000, raw_bytes=9_400_000,
            seconds=0.5,
        ),
    )  # fmt: skip
    return replace(base, **changes)


def result(epochs: int = 3, **changes: Any) -> SpeechResult:
    events = [
        {"event": "start", "time": 1.0, "attempt": 0, "resumed_after": 0, "workers": 1, "parameters": 783_000},
        {"event": "start", "time": 20.0, "attempt": 1, "resumed_after": 1, "workers": 1, "parameters": 783_000},
    ]
    base = SpeechResult(
        settings=SpeechSettings(data_url="s3://demo/cv", run_url="s3://demo/run"),
        epochs=[record(epoch) for epoch in range(1, epochs + 1)],
        events=events,
        metrics={
            "test_cer_known_speakers": 0.031,
            "test_cer_held_out_speakers": None,
            "transcripts": [{"said": "das <korn>", "heard": "das korn & mehr", "known_speaker": False}],
        },
        restarts=1,
        kill={"epoch": 2, "pid": 4, "time": 12.0},
    )
    return replace(base, **changes)


def of_two_nodes() -> SpeechResult:
    """Two workers, the second of which was started again on another node; most of what was read lay on the own disk."""
    records = [
        record(
            epoch,
            cache_bytes=0 if epoch == 1 else 1_800_000,
            peer_bytes=0 if epoch == 1 else 440_000,
            workers=(times(), times(1, "10.0.0.2" if epoch == 1 else "f" * 56, wait_seconds=3.0)),
        )
        for epoch in (1, 2, 3)
    ]
    return replace(result(kill=None), epochs=records)


@functools.cache
def usual_page() -> str:
    return render_report(result())


def text_of(page: str) -> str:
    """What a reader sees of the page, with one space between words."""
    return " ".join(re.sub(r"<style>.*?</style>|<svg.*?</svg>|<[^>]*>", " ", page, flags=re.DOTALL).split())


class _Balance(HTMLParser):
    """Fails on a tag that is closed without having been opened, and gathers the open ones."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "link", "img", "br", "hr", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_loads_nothing() -> None:
    page = usual_page()
    assert not re.search(r"<(script|link|img|iframe|object|embed|image)\b", page)
    assert not re.search(r"@import|url\(\s*['\"]?(?!#)", page)
    # Only the names of XML namespaces look like addresses.
    for match in re.finditer(r"(\S{0,16})https?://[^\s\"'<]+", page):
        assert match[1].startswith(("xmlns", "rdf:")), match[0]
    for target in re.findall(r"(?:href|src)=\"([^\"]*)\"", page):
        assert target.startswith("#")


def test_the_page_is_well_formed() -> None:
    balance = _Balance()
    balance.feed(usual_page())
    assert balance.open == []


def test_the_page_says_what_happened() -> None:
    page = render_report(result(), places={"this page": "s3://demo/run/report.html"})
    text = text_of(page)
    assert "worker killed on purpose in epoch 2; 8 s later resumed from the checkpoint of epoch 1" in text
    assert page.count("<svg") == 4
    assert "30.0% characters wrong on the dev split" in text
    assert "s3://demo/run/report.html" in text
    assert "83% size of the checkpoints against their raw tensors" in text
    assert "0 bytes of the data set from the origin after epoch 1" in text
    assert "3 of 3 epochs saw the same 416 clips" in text
    assert "same 416 clips, each as often, over all workers and restarts (digest 00000000 )" in text


def test_where_the_time_went_is_told_by_worker() -> None:
    text = text_of(render_report(of_two_nodes()))
    assert "Of the time of 2 workers" in text
    # 21 s of training, 6 s of waiting, 1.5 s of evaluating and 0.12 s for checkpoints a worker.
    assert "training 73% , waiting for data 21% , evaluating 5% , standing still for a checkpoint under 1%" in text
    # The second worker went on elsewhere: a row for each place, an id as its beginning.
    assert "0 10.0.0.1 3 624 21 s 3.00 s 1.50 s 0.12 s" in text
    assert "1 10.0.0.2 1 208 7.00 s 3.00 s 0.50 s 0.04 s" in text
    assert "1 ffffffff 2 416 14 s 6.00 s 1.00 s 0.08 s" in text


def test_the_share_of_local_reads_is_told_where_there_are_nodes() -> None:
    text = text_of(render_report(of_two_nodes()))
    assert "80% of what was read after epoch 1 lay on the reading node's own disk" in text
    assert "other nodes" in text
    alone = text_of(usual_page())
    assert "own disk" not in alone
    assert "other nodes" not in alone


def test_nothing_is_said_of_bytes_that_nobody_counted() -> None:
    silent = [replace(epoch, origin_bytes=0, cache_bytes=0) for epoch in result().epochs]
    page = render_report(replace(result(), epochs=silent))
    assert "counts no bytes" in page
    assert "after epoch 1" not in page
    assert page.count("<svg") == 3


def test_an_epoch_that_saw_other_clips_is_not_hidden() -> None:
    records = [record(1), record(2, clips=414, clips_digest="00000000000000ab"), record(3)]
    warned = [*result().events, {"event": "warning", "time": 30.0, "text": "epoch 2 saw <414> clips"}]
    page = render_report(replace(result(), epochs=records, events=warned))
    text = text_of(page)
    assert "2 of 3 epochs saw the same 416 clips" in text
    assert "Not every epoch saw the clips of the first (416): epoch 2 (414)." in text
    assert "each as often" not in text
    assert '<td class="odd">414</td>' in page
    assert '<p class="warning">epoch 2 saw &lt;414&gt; clips</p>' in page


def test_checkpoints_are_told_by_kind_and_by_what_they_cost() -> None:
    text = text_of(usual_page())
    assert "The training stood still for 0.12 s in all; compression and upload took 1.50 s, beside it." in text
    assert "7.80 full" in text
    assert text.count("7.80 delta") == 2
    assert "Never complete" not in text


def test_a_checkpoint_that_never_became_complete_is_told() -> None:
    text = text_of(render_report(replace(result(), epochs=[record(1), record(2, checkpoint=None)])))
    assert "Never complete: epoch 2." in text
    none = text_of(render_report(replace(result(), epochs=[record(1, checkpoint=None)])))
    assert "None became complete." in none
    assert "raw tensors" not in none


def test_what_was_run_is_told_as_the_workers_know_it() -> None:
    start = {**result().events[0], "model": "Whisper <small>", "device": "NVIDIA H200", "precision": "bf16"}
    elastic = replace(result().settings, num_workers=5, min_workers=2)
    text = text_of(render_report(result(events=[start], kill=None, restarts=0, settings=elastic)))
    assert "model Whisper &lt;small&gt;" in text
    assert "device NVIDIA H200, bf16" in text
    assert "training workers 2 to 5 × 1 thread" in text


def test_many_workers_and_epochs_are_drawn_together() -> None:
    crowd = tuple(times(rank) for rank in range(32))
    few = render_report(replace(result(), epochs=[record(epoch, workers=crowd) for epoch in range(1, 8)]))
    many = render_report(replace(result(), epochs=[record(epoch, workers=crowd) for epoch in range(1, 41)]))
    assert "Of the time of 32 workers" in text_of(many)
    assert len(many) < 2 * len(few)


def test_a_run_without_a_kill_tells_of_none() -> None:
    quiet = result(1, kill=None, restarts=0, events=result().events[:1])
    assert "killed" not in render_report(quiet)


def test_a_restart_that_nobody_wanted_is_told() -> None:
    text = text_of(render_report(of_two_nodes()))
    assert "It was started again once on the way." in text
    assert "the training was started again, resumed from the checkpoint of epoch 1" in text
    late = [*result().events[:1], {**result().events[1], "resumed_after": 3}]
    assert "resumed from the checkpoint of epoch 3" in text_of(render_report(result(events=late, kill=None)))


def test_a_kill_before_the_first_checkpoint_is_told_as_such() -> None:
    events = [result().events[0], {**result().events[1], "resumed_after": 0}]
    page = render_report(result(events=events, kill={"epoch": 1, "pid": 4, "time": 12.0}))
    assert "began from scratch: no checkpoint was there" in page
    assert "had the last checkpoint" not in page
    assert "worker killed on purpose in epoch 1; 8 s later from scratch: there was no checkpoint yet" in page


def test_an_epoch_without_a_dev_rate_is_shown() -> None:
    records = [record(epoch, dev_cer=None) for epoch in (1, 2, 3)]
    assert "– characters wrong on the dev split" in text_of(render_report(replace(result(), epochs=records)))


def test_the_same_run_gives_the_same_page() -> None:
    assert render_report(result()) == usual_page()


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
def test_differences_are_marked(said: str, heard: str, left: str, right: str) -> None:
    assert marked(said, heard) == (left, right)


def test_the_page_shows_no_secret_of_an_address() -> None:
    usual = result()
    settings = replace(usual.settings, data_url="s3://key:secret@demo/cv?token=secret")
    page = render_report(replace(usual, settings=settings))
    assert "s3://demo/cv" in page
    assert "secret" not in page
