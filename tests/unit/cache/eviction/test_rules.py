"""Pins, quotas, times to live and sizes: the rule of each object, and the file with the rules."""

from __future__ import annotations

import fcntl
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.clocks import Clock
from tests.support.waiting import in_other_thread

from millrace.cache.disk import RulesFile
from millrace.cache.eviction.retention import (
    NO_RULE,
    NO_RULES,
    AppliedRule,
    Rule,
    Rules,
    covers,
    decode,
    encode,
    prefixes_of,
)
from millrace.config import Amount
from millrace.errors import StorageError, UnsupportedFormatError
from millrace.events import Event
from millrace.runtime.directories import locked_directory

S3, OTHER = "s3+aws:us-east-1", "s3+http://other"
GB = Amount(nbytes=10**9)
TENTH = Amount(share=0.1)


@pytest.mark.parametrize(
    ("prefix", "key", "expected"),
    [
        ("b/train", "b/train", True),
        ("b/train", "b/train/x", True),
        ("b/train", "b/training", False),
        ("b/train", "b", False),
        ("", "b/x", True),
        ("/tmp", "/tmp/x", True),
        ("/tmp", "/tmpx", False),
    ],
)
def test_prefixes_end_at_slashes(prefix: str, key: str, expected: bool) -> None:
    assert covers(prefix, key) is expected
    assert (prefix in list(prefixes_of(key))) is expected


RULES = Rules(
    by_place={
        (S3, "b"): Rule(quota=GB, ttl_seconds=60.0),
        (S3, "b/train"): Rule(pinned=True),
        (S3, "b/train/small"): Rule(quota=TENTH),
        (OTHER, ""): Rule(ttl_seconds=5.0),
    }
)


@pytest.mark.parametrize(
    ("origin", "key", "expected"),
    [
        (S3, "b/x", AppliedRule(quota=GB, quota_place=(S3, "b"), ttl_seconds=60.0)),
        (S3, "b/train/x", AppliedRule(pinned=True, quota=GB, quota_place=(S3, "b"), ttl_seconds=60.0)),
        (
            S3,
            "b/train/small/x",
            AppliedRule(pinned=True, quota=TENTH, quota_place=(S3, "b/train/small"), ttl_seconds=60.0),
        ),
        (S3, "b/training/x", AppliedRule(quota=GB, quota_place=(S3, "b"), ttl_seconds=60.0)),
        (S3, "bb/x", NO_RULE),
        (OTHER, "b/train/x", AppliedRule(ttl_seconds=5.0)),
        ("file", "/b/train", NO_RULE),
    ],
)
def test_each_kind_of_rule_comes_from_its_longest_prefix(origin: str, key: str, expected: AppliedRule) -> None:
    assert RULES.rule_for(origin, key) == expected


def test_pin_of_a_prefix_applies_below_it_until_removed() -> None:
    rules = NO_RULES.with_pin((S3, "b/train")).with_pin((S3, "b/train/deep")).with_pin((S3, "b/val"))
    assert rules.rule_for(S3, "b/train/x").pinned
    without = rules.without_pins((S3, "b/train"))
    assert list(without.by_place) == [(S3, "b/val")]
    assert rules.without_pins((S3, "")) == NO_RULES
    assert rules.without_pins((OTHER, "")) == rules
    # A pin and a quota of one prefix are one rule; removing one keeps the other.
    both = NO_RULES.with_rule((S3, "b"), Rule(quota=GB)).with_pin((S3, "b"))
    assert both.at((S3, "b")) == Rule(pinned=True, quota=GB)
    assert both.without_pins((S3, "b")).at((S3, "b")) == Rule(quota=GB)


amounts = st.one_of(
    st.none(),
    st.integers(0, 2**60).map(lambda nbytes: Amount(nbytes=nbytes)),
    st.floats(0, 100).map(lambda percent: Amount(share=percent / 100)),
)
any_rules = st.builds(
    Rules,
    capacity=amounts,
    by_place=st.dictionaries(
        st.tuples(st.sampled_from([S3, OTHER]), st.text(max_size=8)),
        st.builds(
            Rule,
            pinned=st.booleans(),
            quota=amounts,
            ttl_seconds=st.none() | st.floats(0, 1e9, exclude_min=True),
        ),
        max_size=4,
    ),
)


@given(any_rules)
@settings(max_examples=50, deadline=None)
def test_written_rules_are_read_back(rules: Rules) -> None:
    # Shares are stored in percent and may lose the last bit, once.
    once = decode(encode(rules), source="x")
    assert decode(encode(once), source="x") == once
    assert once.by_place.keys() == rules.by_place.keys()
    for place, rule in rules.by_place.items():
        assert (once.at(place).pinned, once.at(place).ttl_seconds) == (rule.pinned, rule.ttl_seconds)
        if rule.quota is not None and rule.quota.nbytes is not None:
            assert once.at(place).quota == rule.quota


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b'{"rules": []}',
        b'{"version": 1}',
        b'{"version": 1, "capacity": true, "rules": []}',
        b'{"version": 1, "capacity": -1, "rules": []}',
        b'{"version": 1, "capacity": "900%", "rules": []}',
        b'{"version": 1, "capacity": null, "rules": [{"origin": "s3"}]}',
        b'{"version": 1, "capacity": null, "rules": [{"origin":"a","prefix":"","pinned":0,"quota":null,"ttl_seconds":-1}]}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_invalid_rules_file_raises_a_clear_error(content: bytes) -> None:
    with pytest.raises(StorageError, match=r"/d/rules\.json cannot be read"):
        decode(content, source="/d/rules.json")


def test_rules_of_later_version_raise() -> None:
    with pytest.raises(UnsupportedFormatError, match="version 7"):
        decode(b'{"version": 7}', source="rules.json")


# --- the file -----------------------------------------------------------------------------------------


def test_changed_rules_reach_another_process_within_a_second(tmp_path: Path) -> None:
    clock = Clock(0.0)
    reader = RulesFile(tmp_path, clock=clock)
    assert reader.current() == NO_RULES
    program = (
        "import sys, pathlib; from millrace.cache.disk import RulesFile\n"
        "RulesFile(pathlib.Path(sys.argv[1])).change(lambda rules: rules.with_pin(('s3+aws:us-east-1', 'b')))"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=300)
    assert reader.current() == NO_RULES  # the disk is not read every time
    clock.now = 1.0
    assert reader.current().rule_for(S3, "b/x").pinned
    (tmp_path / "rules.json").unlink()
    clock.now = 2.0
    assert reader.current() == NO_RULES


def test_rules_are_read_while_a_change_waits_for_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads of data use them. They waited 2 s for each change that waited for a stopped process."""
    waiting, proceed = threading.Event(), threading.Event()

    @contextmanager
    def locked(directory: Path, kind: int) -> Iterator[int]:
        assert kind == fcntl.LOCK_EX
        waiting.set()
        assert proceed.wait(300)
        with locked_directory(directory, kind) as descriptor:
            yield descriptor

    monkeypatch.setattr("millrace.cache.disk.locked_directory", locked)
    rules = RulesFile(tmp_path)
    change = threading.Thread(target=rules.change, args=(lambda old: old.with_pin((S3, "b")),))
    change.start()
    try:
        assert waiting.wait(300)
        assert in_other_thread(rules.current) == NO_RULES
    finally:
        proceed.set()
        change.join()
    assert rules.current().rule_for(S3, "b/x").pinned


def test_changes_of_many_threads_are_all_kept(tmp_path: Path) -> None:
    files = [RulesFile(tmp_path) for _ in range(4)]
    threads = [
        threading.Thread(target=files[n % 4].change, args=(lambda rules, n=n: rules.with_pin((S3, f"b/{n}")),))
        for n in range(24)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(files[0].current().by_place) == 24
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rules.json"]


def test_damaged_rules_file_keeps_last_rules_and_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(0.0)
    rules = RulesFile(tmp_path, clock=clock)
    rules.change(lambda old: old.with_pin((S3, "b")))
    (tmp_path / "rules.json").write_bytes(b"{")
    with caplog.at_level(logging.WARNING, logger="millrace"):
        for second in range(1, 4):
            clock.now = float(second)
            assert rules.current().rule_for(S3, "b/x").pinned
    assert len(caplog.records) == 1
    with pytest.raises(StorageError, match="mend or remove it"):
        rules.change(lambda old: old.with_pin((S3, "c")))
    assert (tmp_path / "rules.json").read_bytes() == b"{"


@pytest.mark.parametrize("left", [b"", bytes(100)])
def test_empty_rules_file_is_replaced_by_the_next_change(tmp_path: Path, left: bytes, events: list[Event]) -> None:
    rules = RulesFile(tmp_path)
    rules.change(lambda old: old.with_pin((S3, "b")))
    (tmp_path / "rules.json").write_bytes(left)
    other = RulesFile(tmp_path)
    assert other.current() == NO_RULES
    assert [event.name for event in events] == ["cache.rules.unreadable"]
    assert (
        rules.change(lambda old: old).rule_for(S3, "b/x").pinned
    )  # written again, since this process has them in memory
    (tmp_path / "rules.json").write_bytes(left)
    assert not other.change(lambda old: old.with_capacity(GB)).by_place
    assert RulesFile(tmp_path).current().capacity == GB


def test_rules_in_replaced_directory_are_reported_once(tmp_path: Path, events: list[Event]) -> None:
    (tmp_path / "store").mkdir()
    now = [0.0]
    rules = RulesFile(tmp_path / "store", clock=lambda: now[0])
    rules.change(lambda old: old.with_capacity(GB))
    (tmp_path / "store" / "rules.json").unlink()
    (tmp_path / "store").rmdir()
    (tmp_path / "store").write_bytes(b"")
    for _ in range(3):
        now[0] += 3600
        assert rules.current().capacity == GB
    assert [event.name for event in events] == ["cache.rules.unreadable"]
    assert str(tmp_path / "store") in events[0].detail


def test_edit_without_change_writes_nothing(tmp_path: Path) -> None:
    rules = RulesFile(tmp_path)
    rules.change(lambda old: old)
    assert not (tmp_path / "rules.json").exists()
    rules.change(lambda old: old.with_capacity(GB))
    before = (tmp_path / "rules.json").stat().st_mtime_ns
    rules.change(lambda old: old.with_capacity(GB))
    assert (tmp_path / "rules.json").stat().st_mtime_ns == before
    assert json.loads((tmp_path / "rules.json").read_bytes())["version"] == 1
