"""What jobs read of which prefixes: sums over processes, a bounded number of rows, and damage."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import millrace
from millrace.cache.attribution import OTHERS, ROWS, Attribution, JobAndPrefix, Reads, job_of
from millrace.cache.eviction.usage import Read, Tally, UsageLog
from millrace.store.records import Entry, ObjectName

pytestmark = pytest.mark.usefixtures("no_maintenance")


def tally(key: str, *, hits: int = 0, hit_bytes: int = 0, misses: int = 0, miss_bytes: int = 0) -> Tally:
    name = ObjectName("s3", key, "version").pack()
    return Tally(b"unit", 0, 10, name, hits=hits, hit_bytes=hit_bytes, misses=misses, miss_bytes=miss_bytes)


def test_reads_are_summed_by_job_and_prefix(tmp_path: Path) -> None:
    first, second = Attribution(tmp_path / "file", job="one"), Attribution(tmp_path / "file", job="two")
    first.add([tally("bucket/a/b/c/x", hits=2, hit_bytes=20), tally("bucket/a/b/d/y", misses=1, miss_bytes=5)])
    second.add([tally("bucket/a/b/x", hits=1, hit_bytes=7)])
    first.add([tally("bucket/z", hits=1, hit_bytes=1)])
    expected = {
        JobAndPrefix("one", "s3://bucket/a/b"): Reads(2, 20, 1, 5),
        JobAndPrefix("two", "s3://bucket/a/b"): Reads(1, 7, 0, 0),
        JobAndPrefix("one", "s3://bucket"): Reads(1, 1, 0, 0),
    }
    assert first.totals() == second.totals() == expected
    first.close()
    first.close()
    second.close()
    again = Attribution(tmp_path / "file", job="")
    assert again.totals() == expected
    again.close()


def test_more_parts_than_rows_are_added_up(tmp_path: Path) -> None:
    attribution = Attribution(tmp_path / "file", job="job")
    for _ in range(2):
        attribution.add([tally(f"bucket/{number}/x", hits=1, hit_bytes=3) for number in range(ROWS + 10)])
    found = attribution.totals()
    assert len(found) == ROWS + 1
    assert found[OTHERS] == Reads(20, 60, 0, 0)
    assert found[JobAndPrefix("job", "s3://bucket/0")] == Reads(2, 6, 0, 0)
    attribution.close()


def test_reads_of_concurrent_processes_and_threads_are_all_counted(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from millrace.cache.attribution import Attribution\n"
        "from tests.unit.cache.test_attribution import tally\n"
        "a = Attribution(Path(sys.argv[1]), job='job')\n"
        "for _ in range(300): a.add([tally('bucket/a/x', hits=1, hit_bytes=2)])\n"
        "while a._pending: a.add([])\n"
    )
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", code, str(tmp_path / "file")]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    processes = [subprocess.Popen(command, cwd=root, env={**os.environ, "PYTHONPATH": path}) for _ in range(2)]
    attribution = Attribution(tmp_path / "file", job="job")

    def work() -> None:
        for _ in range(300):
            attribution.add([tally("bucket/a/x", hits=1, hit_bytes=2)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.wait(300) for process in processes] == [0, 0]
    attribution.add([])
    assert attribution.totals() == {JobAndPrefix("job", "s3://bucket/a"): Reads(1800, 3600, 0, 0)}
    attribution.close()


@pytest.mark.parametrize("damage", ["noise", "shorter", "row", "number", "folder", "fifo"])
def test_damaged_file_is_repaired_with_one_log_line(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    before = Attribution(path, job="job")
    before.add([tally("bucket/b/x", hits=1, hit_bytes=5)])
    before.close()
    data = path.read_bytes()
    if damage in ("folder", "fifo"):
        path.unlink()
        path.mkdir() if damage == "folder" else os.mkfifo(path)
    else:
        row = data.index(b"job\ns3://bucket/b")
        path.write_bytes(
            {
                "noise": os.urandom(200_000),
                "shorter": data[: row + 2],
                "row": data[:row] + b"J" + data[row + 1 :],
                "number": data[: row - 8] + b"\xff" * 8 + data[row:],
            }[damage]
        )
    for number in (1, 2):
        attribution = Attribution(path, job="job")
        attribution.add([tally("bucket/a/x", hits=1, hit_bytes=2)])
        assert attribution.totals() == {JobAndPrefix("job", "s3://bucket/a"): Reads(number, 2 * number, 0, 0)}
        attribution.close()
    (record,) = caplog.records
    assert record.message.startswith(f"{path} is re")
    assert record.message.endswith("lost: the reads of each job by prefix")


def test_link_in_place_of_the_file_ends_the_attribution_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "other").write_bytes(b"precious")
    (tmp_path / "file").symlink_to(tmp_path / "other")
    attribution = Attribution(tmp_path / "file", job="job")
    attribution.add([tally("bucket/a/x", hits=1, hit_bytes=2)])
    assert attribution.totals() == {}
    attribution.close()
    assert (tmp_path / "other").read_bytes() == b"precious"
    assert "reads are not attributed" in caplog.text


def test_long_and_odd_names_are_cut_and_escaped(tmp_path: Path) -> None:
    attribution = Attribution(tmp_path / "file", job="job\nof mine")
    for _ in range(2):
        attribution.add([tally(f"bucket/{'ä' * 400}/x", hits=1), tally("bucket/a\nb/x?a/key/of", hits=1)])
    found = attribution.totals()
    assert {part.job for part in found} == {"job\\nof mine"}
    assert {reads.cached_reads for reads in found.values()} == {2}
    assert JobAndPrefix("job\\nof mine", "s3://bucket/a\\nb") in found
    attribution.close()


def test_hits_that_were_served_to_other_nodes_are_not_attributed(tmp_path: Path) -> None:
    log, attribution = UsageLog(), Attribution(tmp_path / "file", job="job")
    names = [ObjectName("s3", f"bucket/{number}/x", "version").pack() for number in (1, 2)]
    entries = [Entry(bytes([place]) * 16, 1, 100, 100, 1, packed_name=name) for place, name in enumerate(names)]
    log.note(Read(entries[0], 7, hit=True, kept=True))
    for entry in entries:
        log.note(Read(entry, 50, hit=True, kept=True, served=True))
    attribution.add(log.drain())
    assert attribution.totals() == {JobAndPrefix("job", "s3://bucket/1"): Reads(1, 7, 0, 0)}
    attribution.close()


def test_job_is_named_by_the_environment() -> None:
    assert job_of({}) == ""
    assert job_of({"RAY_JOB_ID": "01000000"}) == "01000000"
    assert job_of({"RAY_JOB_ID": "01000000", "MILLRACE_JOB": "train"}) == "train"


def test_reads_of_a_file_system_are_attributed(
    make: Callable[..., millrace.MillraceFileSystem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_JOB", "train")
    folder = tmp_path / "data" / "set"
    folder.mkdir(parents=True)
    (folder / "file").write_bytes(b"x" * 1000)
    fs = make()
    for _ in range(3):
        fs.cat_file(str(folder / "file"))
    (disk,) = fs.node.open_disks
    disk.write_down_uses()
    ((part, reads),) = disk.attribution.totals().items()
    assert part.job == "train"
    assert f"file://{folder}".startswith(part.prefix)
    assert part.prefix.startswith("file:///")
    assert (reads.fetched_reads, reads.fetched_bytes) == (1, 1000)
    assert reads.cached_bytes == 1000 * reads.cached_reads > 0


_READ_AND_END = """
import os, sys, millrace
fs = millrace.filesystem("file", cache_dir=sys.argv[1], min_free=0)
for _ in range(3):
    fs.cat_file(sys.argv[2])
if not os.fork():
    sys.exit()  # has none of its parent's uses
os.wait()
"""


def test_reads_of_a_process_that_ends_at_once_are_counted_and_attributed(
    make: Callable[..., millrace.MillraceFileSystem], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 3_000_000)
    fs = make()
    (cache_dir,) = fs.node.options.cache_dirs
    environment = {**os.environ, "MILLRACE_JOB": "short"}
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _READ_AND_END, str(cache_dir), str(file)], env=environment, check=True
    )
    counted = fs.cache_counters()
    (disk,) = fs.node.open_disks
    [reads] = [reads for part, reads in disk.attribution.totals().items() if part.job == "short"]
    assert reads == Reads(2, 6_000_000, 1, 3_000_000)
    assert counted["cache_bytes"] == 6_000_000
