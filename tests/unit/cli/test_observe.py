"""`millrace status`, `stats` and `--watch`: rates, hit ratios, and hidden zeros."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.interrupts import InterruptedWhenDeleted

import millrace
from millrace.cli import main
from millrace.cli.rates import Rates, rate_lines, rates, rates_of_all, total_lines
from millrace.cli.stats import reading, table_lines
from millrace.cli.status import counters_by_node
from millrace.cli.watch import repeat
from millrace.errors import PeerSilentError

NONE = {"cache_bytes": 0, "origin_bytes": 0, "peer_bytes": 0, "corrupt_blocks": 0}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    (tmp_path / "x").write_bytes(b"12345")
    fs = millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0)
    for _ in range(4):
        fs.cat_file(f"{tmp_path}/x")
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("before", "now", "seconds", "expected"),
    [
        ({}, {}, 2.0, Rates(per_second={}, hit_ratio=None)),
        ({"origin_bytes": 10}, {"origin_bytes": 10}, 2.0, Rates(per_second={"origin_bytes": 0}, hit_ratio=None)),
        ({"cache_bytes": 10}, {"cache_bytes": 40}, 2.0, Rates(per_second={"cache_bytes": 15}, hit_ratio=1.0)),
        (
            {"cache_bytes": 0, "origin_bytes": 5},
            {"cache_bytes": 30, "origin_bytes": 15},
            10.0,
            Rates(per_second={"cache_bytes": 3, "origin_bytes": 1}, hit_ratio=0.75),
        ),
        ({"cache_bytes": 50}, {"cache_bytes": 20}, 1.0, Rates(per_second={"cache_bytes": 20}, hit_ratio=1.0)),  # reset
        ({}, {"cache_bytes": 20}, 0.0, Rates(per_second={"cache_bytes": 0}, hit_ratio=1.0)),
    ],
)
def test_rates_of_two_looks_are_the_growth_per_second(
    before: dict[str, int], now: dict[str, int], seconds: float, expected: Rates
) -> None:
    assert rates(before, now, seconds) == expected


def test_rates_of_all_nodes_omit_a_node_that_stopped_or_started_to_respond() -> None:
    before = {"a": {"cache_bytes": 100}, "b": {"cache_bytes": 1000}}
    now = {"a": {"cache_bytes": 140}, "c": {"cache_bytes": 5000}}
    assert rates_of_all(before, now, 2.0) == Rates(per_second={"cache_bytes": 20}, hit_ratio=1.0)
    both = {"a": {"cache_bytes": 140}, "b": {"cache_bytes": 60}}  # b restarted
    assert rates_of_all(before, both, 2.0) == Rates(per_second={"cache_bytes": 50}, hit_ratio=1.0)
    assert rates_of_all(before, {}, 2.0) == Rates(per_second={}, hit_ratio=None)


def test_counters_by_node_omit_nodes_that_do_not_respond() -> None:
    silent = {"member_id": "b", "answers": False, "error": "refused"}
    answering = {"member_id": "a", "answers": True, "counters": {"cache_bytes": 1}}
    state = {"cluster": {"nodes": [answering, silent], "counters": {}}, "counters": {"cache_bytes": 7}}
    assert counters_by_node(state) == {"a": {"cache_bytes": 1}}
    assert counters_by_node({"counters": {"cache_bytes": 7}}) == {"": {"cache_bytes": 7}}


@pytest.mark.parametrize("as_json", [False, True])
def test_watch_with_an_error_in_a_later_round_shows_it_and_continues(
    capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    states: list[dict[str, int] | Exception] = [{"n": 1}, PeerSilentError("a:1: refused"), {"n": 2}]

    def read() -> dict[str, int]:
        state = states.pop(0)
        if isinstance(state, Exception):
            raise state
        return state

    repeat(read, lambda state: [str(state["n"])], interval=0.0, as_json=as_json, count=3)
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    if as_json:
        documents = [json.loads(line) for line in lines]
        assert [document.get("n") for document in documents] == [1, None, 2]
        assert documents[1]["error"].startswith("a:1: refused")
    else:
        assert (lines[0], lines[2]) == ("1", "2")
        assert lines[1].startswith("a:1: refused")


def test_watch_with_an_error_in_the_first_round_ends_with_it() -> None:
    def read() -> None:
        raise PeerSilentError("a:1: refused")

    with pytest.raises(PeerSilentError):
        repeat(read, lambda state: [], interval=0.0, as_json=False, count=2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_watch_after_a_discarded_ctrl_c_ends() -> None:
    reads = 0

    def read() -> None:
        nonlocal reads
        reads += 1
        thing = InterruptedWhenDeleted()
        del thing

    repeat(read, lambda state: [], interval=0.0, as_json=False, count=3)
    assert reads == 1


def test_watch_interval_that_is_not_a_number_is_refused(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    arguments = ["stats", "--cache-dir", str(cache), "--interval", "nan", "--count", "1"]
    assert main(arguments) != 0
    assert "'nan' is not a number" in capsys.readouterr().err


def test_lines_of_counters_begin_with_the_hit_ratio_and_omit_zeros() -> None:
    assert total_lines({**NONE, "cache_bytes": 1234}) == ["cache bytes                         1,234"]
    assert rate_lines(Rates(per_second={**NONE}, hit_ratio=None)) == ["no reads now"]
    lines = rate_lines(Rates(per_second={**NONE, "cache_bytes": 2e9, "origin_bytes": 1e6}, hit_ratio=0.5))
    assert [" ".join(line.split()) for line in lines] == [
        "hit ratio now 50.0%",
        "from the cache 2.00 GB/s",
        "from the origin 1.00 MB/s",
    ]


def test_status_shows_the_hit_ratio_first_and_no_zero_totals(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    assert main(["status", "--cache-dir", str(cache)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("hit ratio ")
    totals = [line for line in lines if line.startswith(("origin bytes", "corrupt blocks"))]
    assert [line.split() for line in totals] == [["origin", "bytes", "5"]]


def test_stats_of_a_machine_without_a_cluster_end_after_count(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    arguments = ["stats", "--cache-dir", str(cache), "--interval", "0.1", "--count", "2"]
    assert main([*arguments, "--json"]) == 0
    states = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [state["schema_version"] for state in states] == [1, 1]
    (node,) = states[0]["nodes"]
    assert (node["address"], node["counters"]["origin_bytes"]) == ("this machine", 5)
    assert main(arguments) == 0
    assert capsys.readouterr().out.count("this machine") == 2


def test_stats_of_several_nodes_omit_one_that_did_not_respond_twice() -> None:
    before = {"a:1": NONE, "b:1": NONE, "c:1": NONE}
    state = reading(before, {"a:1": {**NONE, "cache_bytes": 10}, "b:1": {**NONE, "origin_bytes": 30}}, seconds=10.0)
    assert [node["address"] for node in state["nodes"]] == ["a:1", "b:1"]
    lines = [line.split() for line in table_lines(state)]
    assert lines == [
        ["node", "hits", "hits,", "total", "cache/s", "origin/s"],
        ["a:1", "100.0%", "100.0%", "1", "B", "0", "B"],
        ["b:1", "0.0%", "0.0%", "0", "B", "3", "B"],
        ["all", "1", "B", "3", "B"],
    ]
    assert table_lines({"nodes": []}) == ["no node responds"]


@pytest.mark.parametrize("as_json", [False, True])
def test_watched_status_continues_until_ctrl_c(cache: Path, as_json: bool) -> None:
    arguments = ["status", "--watch", "--interval", "0.1", "--cache-dir", str(cache), *(["--json"] if as_json else [])]
    process = subprocess.Popen([sys.executable, "-m", "millrace.cli", *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if as_json:
        states: list[Any] = [json.loads(process.stdout.readline()) for _ in range(3)]
        assert all(state["counters"]["origin_bytes"] == 5 for state in states)
        assert ["rates" in state for state in states] == [False, True, True]
    else:
        seen = 0
        while seen < 3:
            seen += process.stdout.readline().startswith("hit ratio")
    process.send_signal(signal.SIGINT)
    process.stdout.read()
    process.stdout.close()
    assert process.wait(300) == 0
