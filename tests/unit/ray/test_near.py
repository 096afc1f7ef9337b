"""Reads near the data, without a cluster: the distribution of files and options, and sums over nodes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import millrace
from millrace.cache.counters import NAMES
from millrace.errors import DeniedError, UsageError
from millrace.filesystem import MillraceFileSystem
from millrace.filesystem.listing import describe_many
from millrace.origin import ListingPage, ObjectInfo
from millrace.ray import cluster_counters, homes, near, read_near
from millrace.ray.counters import Sums
from millrace.ray.near import NodeShare, grouped, share_out


def test_import_loads_neither_ray_nor_torch() -> None:
    program = "import sys, millrace.ray; sys.exit('ray' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# --- sharing out ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "costs", "shares"),
    [
        (10, [1, 1], [5, 5]),
        (10, [3, 1], [7, 3]),
        (7, [1, 1, 1], [3, 2, 2]),
        (2, [5, 1, 1], [1, 1, 1]),
        (0, [1], [1]),
        (100, [1, 10**15], [1, 99]),
    ],
)
def test_share_out_follows_the_costs(total: int, costs: list[int], shares: list[int]) -> None:
    assert share_out(total, costs) == shares


def _info(key: str, size: int = 1) -> ObjectInfo:
    return ObjectInfo(key, size, '"1"', 1.7e9)


def test_grouped_files_keep_their_order() -> None:
    files: list[tuple[str, ObjectInfo | None]] = [
        ("s3://b/4", _info("b/4", 10)),
        ("s3://b/1", _info("b/1", 20)),
        ("s3://b/x", None),
        ("s3://b/3", _info("b/3", 30)),
        ("s3://b/2", _info("b/2", 40)),
    ]
    owners = {"b/1": "node-b", "b/2": "node-a", "b/4": "node-b"}
    assert grouped(files, lambda info: owners.get(info.key)) == [
        NodeShare(None, ["s3://b/x", "s3://b/3"], 30),
        NodeShare("node-a", ["s3://b/2"], 40),
        NodeShare("node-b", ["s3://b/4", "s3://b/1"], 30),
    ]


def test_read_near_without_a_cluster_is_the_plain_read(tmp_path: Path) -> None:
    fs = millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), members="none")

    def read(paths: Any, **options: Any) -> Any:
        return paths, options

    assert read_near(read, "/data", filesystem=fs, shuffle="files") == ("/data", {"filesystem": fs, "shuffle": "files"})
    assert read_near(read, ["/a"], filesystem=fs, then=lambda found: found[0]) == ["/a"]
    assert homes(fs, ["/a", "/b"]) == [None, None]
    with pytest.raises(UsageError, match="scheduling_strategy"):
        read_near(read, "/data", filesystem=fs, ray_remote_args={"scheduling_strategy": "SPREAD"})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray
def test_settings_of_ray_are_restored_after_two_near_reads_at_once(tmp_path: Path) -> None:
    from ray.data import DataContext
    from ray.data.datasource import file_based_datasource

    def settings() -> tuple[object, ...]:
        threshold = file_based_datasource.FILE_SIZE_FETCH_PARALLELIZATION_THRESHOLD
        return threshold, getattr(DataContext.get_current(), "use_datasource_v2", None)

    fs = millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), members="none")
    before = settings()
    second_began, first_ended = threading.Event(), threading.Event()

    def read_second() -> None:
        with near._settings.of(fs):
            second_began.set()
            assert first_ended.wait(120)

    second = threading.Thread(target=read_second)
    with near._settings.of(fs):
        second.start()
        assert second_began.wait(120)
    first_ended.set()
    second.join()
    assert settings() == before


def test_read_near_with_another_file_system_is_the_plain_read() -> None:
    from pyarrow.fs import LocalFileSystem

    plain = LocalFileSystem()
    assert read_near(lambda paths, filesystem: (paths, filesystem), "/data", filesystem=plain) == ("/data", plain)
    assert homes(plain, ["/a"]) == [None]
    with pytest.raises(UsageError, match="own file systems"):
        cluster_counters(plain)


# --- sums -------------------------------------------------------------------------------------------


def _counts(read: int, at_start: int = 0) -> dict[str, dict[str, int]]:
    zero = dict.fromkeys(NAMES, 0)
    return {"now": {**zero, "cache_bytes": read}, "at_start": {**zero, "cache_bytes": at_start}}


def test_counter_sums_with_lost_or_restarted_nodes_never_decrease() -> None:
    sums = Sums()

    def add_up(**reported: dict[str, dict[str, int]]) -> int:
        return sums.add(reported)["cache_bytes"]

    first = add_up(a=_counts(100, at_start=90), b=_counts(50))
    assert add_up(a=_counts(110, at_start=90), b=_counts(70)) - first == 30
    # A silent or lost node counts with its last figures.
    assert add_up(a=_counts(111, at_start=90)) - first == 31
    assert add_up() - first == 31
    # It is back, restarted on its disk: its counts include those before the restart.
    assert add_up(a=_counts(111, at_start=90), b=_counts(75, at_start=73)) - first == 36
    # Another comes with a disk that was used before.
    assert add_up(a=_counts(111), b=_counts(75), c=_counts(1007, at_start=1000)) - first == 43
    # One has lost its disk, and counts from nothing.
    assert add_up(a=_counts(4)) - first == 47
    assert add_up(a=_counts(5)) - first == 48


def test_cluster_counters_without_a_cluster_are_the_own_ones(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 1000)
    fs = millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), members="none", min_free=0)
    before = cluster_counters(fs)
    fs.cat_file(str(tmp_path / "file"))
    assert cluster_counters(fs)["origin_bytes"] - before["origin_bytes"] == 1000


_READER = """
import sys, millrace
fs = millrace.filesystem("file", cache_dir=sys.argv[1], members="none", min_free=0)
for line in sys.stdin:
    for _ in range(int(line)):
        fs.open_input_file(sys.argv[2]).read()
    print("read", flush=True)
"""


@pytest.mark.slow
def test_cluster_counters_settled_include_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.cache.counters.SETTLE_SECONDS", 300.0)  # the machine may stop the reader for a while
    (tmp_path / "file").write_bytes(b"x" * 1000)
    cache = str(tmp_path / "cache")
    fs = millrace.filesystem("file", cache_dir=cache, members="none", min_free=0)
    command = [sys.executable, "-c", _READER, cache, str(tmp_path / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:

        def read(times: int) -> None:
            assert reader.stdin is not None
            assert reader.stdout is not None
            print(times, file=reader.stdin, flush=True)
            assert reader.stdout.readline() == "read\n"

        read(2)
        counts = cluster_counters(fs, settled=True)
        for times in (1, 200, 30):
            before = counts
            read(times)
            counts = cluster_counters(fs, settled=True)
            assert counts["native_opens"] - before["native_opens"] == times
            assert counts["cache_bytes"] - before["cache_bytes"] == times * 1000

        # The wait for a stopped process ends; its reads are counted after it continues.
        read(5)
        reader.send_signal(signal.SIGSTOP)
        with monkeypatch.context() as patched:
            patched.setattr("millrace.cache.counters.SETTLE_SECONDS", 0.1)
            stopped = cluster_counters(fs, settled=True)["cache_bytes"]
        assert 0 <= stopped - counts["cache_bytes"] <= 5000
        reader.send_signal(signal.SIGCONT)
        assert cluster_counters(fs, settled=True)["cache_bytes"] - counts["cache_bytes"] == 5000

        # One that was killed is not waited for at all.
        reader.kill()
        reader.wait(300)
        monkeypatch.setattr("millrace.cache.counters.SETTLE_SECONDS", 1e6)
        assert cluster_counters(fs, settled=True)["cache_bytes"] - counts["cache_bytes"] == 5000


# --- descriptions -----------------------------------------------------------------------------------


class _Bucket:
    """Lists keys that it has, a thousand a request, and counts the requests. Describes nothing alone."""

    identity = "counted"
    head_is_local = False

    def __init__(self, keys: list[str]) -> None:
        self.keys = sorted(keys)
        self.requests = 0
        self.error: Exception | None = None

    def is_immutable(self, key: str) -> bool:
        return False

    def list_pages(self, prefix: str, *, after: str = "", settled: object = None) -> Iterator[ListingPage]:
        left = [key for key in self.keys if key.startswith(f"{prefix.rstrip('/')}/") and key > after]
        for start in range(0, max(len(left), 1), 1000):
            self.requests += 1
            if self.error is not None:
                raise self.error
            page = [_info(key, len(key)) for key in left[start : start + 1000]]
            yield ListingPage(page, start + 1000 >= len(left))


def _over(bucket: _Bucket, tmp_path: Path, **options: Any) -> MillraceFileSystem:
    fs = millrace.filesystem(
        "s3",
        target_options={"endpoint_url": "http://127.0.0.1:1", "key": "a", "secret": "b"},
        cache_dir=str(tmp_path / "cache"),
        members="none",
        min_free=0,
        **options,
    )
    fs._origin = bucket  # type: ignore[assignment]
    return fs


def test_describe_many_uses_one_request_and_then_none(tmp_path: Path) -> None:
    keys = [f"b/clips/{number:05}.mp3" for number in range(3500)]
    bucket = _Bucket(keys)
    fs = _over(bucket, tmp_path)
    found = describe_many(fs, [*keys, "b/clips/none.mp3", "b/clips", "b"])
    assert found == {key: _info(key, len(key)) for key in keys}
    asked = bucket.requests
    assert asked <= 6
    assert describe_many(fs, keys[1000:2000]) == {key: found[key] for key in keys[1000:2000]}
    assert bucket.requests == asked


@pytest.mark.parametrize("consistency", ["immutable", "always"])
def test_describe_many_skips_unwanted_keys(tmp_path: Path, consistency: str) -> None:
    bucket = _Bucket([f"b/clips/{number:06}.mp3" for number in range(50_000)])
    wanted = [f"b/clips/{number:06}.mp3" for number in (0, 9, 10, 17_019, 17_020, 49_999)]
    assert list(describe_many(_over(bucket, tmp_path, consistency=consistency), wanted)) == wanted
    assert bucket.requests <= 2 * 4


def test_describe_many_with_common_prefixes_finds_all(tmp_path: Path) -> None:
    # More keys precede the wanted one than a request lists.
    keys = [f"b/clips/x{number:05}" for number in range(2500)] + ["b/clips/y"]
    bucket = _Bucket([*keys, "b/clips/x~"])
    assert list(describe_many(_over(bucket, tmp_path), ["b/clips/x~"])) == ["b/clips/x~"]


def test_describe_many_without_list_access_finds_nothing(tmp_path: Path) -> None:
    bucket = _Bucket(["b/clips/1"])
    fs = _over(bucket, tmp_path)
    bucket.error = DeniedError("no", next_step="ask")
    assert describe_many(fs, ["b/clips/1"]) == {}
