"""The page about a run: complete, self-contained, safe with any text."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from millrace.demo.report import marked, render_report
from millrace.demo.speech.log import EpochRecord
from millrace.demo.speech.run import SpeechResult
from millrace.demo.speech.settings import SpeechSettings

pytest.importorskip("matplotlib")


def result(epochs: int = 3, **changes: Any) -> SpeechResult:
    records = [
        EpochRecord(
            epoch=epoch, attempt=int(epoch > 1), train_loss=3 / epoch, dev_cer=0.9 / epoch, clips=416, steps=52,
            seconds=9.0, wait_seconds=1.0, compute_seconds=7.0, evaluate_seconds=0.5, checkpoint_seconds=0.5,
            checkpoint_bytes=7_800_000, raw_bytes=9_400_000, origin_bytes=2_240_000 if epoch == 1 else 0,
            cache_bytes=0 if epoch == 1 else 2_240_000, learning_rate=0.001,
        )
        for epoch in range(1, epochs + 1)
    ]  # fmt: skip
    events = [
        {"event": "start", "time": 1.0, "attempt": 0, "resumed_after": 0, "workers": 1, "parameters": 783_000},
        {"event": "start", "time": 20.0, "attempt": 1, "resumed_after": 1, "workers": 1, "parameters": 783_000},
    ]
    base = SpeechResult(
        settings=SpeechSettings(data_url="s3://demo/cv", run_url="s3://demo/run"),
        epochs=records,
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
    page = render_report(result())
    assert not re.search(r"<(script|link|img|iframe|object|embed|image)\b", page)
    assert not re.search(r"@import|url\(\s*['\"]?(?!#)", page)
    # Only the names of XML namespaces look like addresses.
    for match in re.finditer(r"(\S{0,16})https?://[^\s\"'<]+", page):
        assert match[1].startswith(("xmlns", "rdf:")), match[0]
    for target in re.findall(r"(?:href|src)=\"([^\"]*)\"", page):
        assert target.startswith("#")


def test_the_page_is_well_formed() -> None:
    balance = _Balance()
    balance.feed(render_report(result()))
    assert balance.open == []


def test_the_page_says_what_happened() -> None:
    page = render_report(result(), places={"this page": "s3://demo/run/report.html"})
    assert "worker killed on purpose in epoch 2; 8 s later resumed from the checkpoint of epoch 1" in page
    assert page.count("<svg") == 4
    assert "30.0%" in page
    assert "s3://demo/run/report.html" in page
    assert "83%" in page
    assert "0 bytes" in page


def test_a_run_without_a_kill_tells_of_none() -> None:
    quiet = result(1, kill=None, restarts=0, events=result().events[:1])
    assert "killed" not in render_report(quiet)


def test_a_kill_before_the_first_checkpoint_is_told_as_such() -> None:
    events = [result().events[0], {**result().events[1], "resumed_after": 0}]
    page = render_report(result(events=events, kill={"epoch": 1, "pid": 4, "time": 12.0}))
    assert "began from scratch: no checkpoint was there" in page
    assert "had the last checkpoint" not in page
    assert "worker killed on purpose in epoch 1; 8 s later from scratch: there was no checkpoint yet" in page


def test_an_epoch_without_a_dev_rate_is_shown() -> None:
    records = [replace(epoch, dev_cer=None) for epoch in result().epochs]
    assert "–" in render_report(result(epochs=3) if not records else replace(result(), epochs=records))


def test_the_same_run_gives_the_same_page() -> None:
    assert render_report(result()) == render_report(result())


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
