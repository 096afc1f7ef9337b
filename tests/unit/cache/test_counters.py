import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from millrace.cache.counters import NAMES, NO_MEASURES, Counters, Measures, totals, without_dip


def test_threads_lose_no_count(tmp_path: Path) -> None:
    counters = Counters(tmp_path)

    def work() -> None:
        for _ in range(2000):
            counters.add("cache_bytes", 3)
            counters.add("origin_requests")

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals(tmp_path)["cache_bytes"] == 16 * 2000 * 3
    assert counters.measures().counters["origin_requests"] == 16 * 2000
    counters.close()


def test_counts_of_killed_process_are_kept(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib; from millrace.cache.counters import Counters;"
        "c = Counters(pathlib.Path(sys.argv[1])); c.add('origin_bytes', 7); print('counted', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "counted\n"
        assert totals(tmp_path)["origin_bytes"] == 7  # while it lives
        process.send_signal(signal.SIGKILL)
    for _ in range(2):  # folded by the first, once
        counters = Counters(tmp_path)
        counters.add("origin_bytes")
        counters.close()
    assert totals(tmp_path)["origin_bytes"] == 9
    assert len(os.listdir(tmp_path)) <= 2  # the folded sums, and the last process's own


def test_counter_names_have_distinct_places(tmp_path: Path) -> None:
    counters = Counters(tmp_path)
    for number, name in enumerate(NAMES):
        counters.add(name, number + 1)
    assert counters.measures().counters == {name: number + 1 for number, name in enumerate(NAMES)}
    assert totals(tmp_path / "none") == dict.fromkeys(NAMES, 0)
    counters.close()


def test_histogram_is_the_sum_over_live_and_ended_processes(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from millrace.cache.counters import Counters;"
        "c = Counters(pathlib.Path(sys.argv[1])); c.observe('disk_seconds', 0.002); c.observe('save_bytes', 5e9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    for _ in range(2):  # of an ended process that is not folded yet, and of one that is
        counters = Counters(tmp_path)
        counters.observe("disk_seconds", 0.0001)  # a bound is inside of its bucket
        counters.observe("disk_seconds", 60.0)
        found = counters.measures().histograms
        counters.close()
    assert found["disk_seconds"].counts == (2, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2)
    assert found["disk_seconds"].sum == pytest.approx(120.0022)
    assert sum(found["save_bytes"].counts) == 1
    assert found["save_bytes"].sum == 5e9
    assert sum(found["peer_seconds"].counts) == 0


def test_sum_of_durations_of_a_thousand_years_is_not_damage(tmp_path: Path) -> None:
    counters = Counters(tmp_path)
    counters.observe("origin_seconds", 3e10)
    assert counters.measures().histograms["origin_seconds"].sum == 3e10
    counters.close()


def test_bytes_from_disk_do_not_decrease_between_two_additions() -> None:
    def measures(**counters: int) -> Measures:
        return NO_MEASURES._replace(counters={**NO_MEASURES.counters, **counters})

    before = measures(cache_bytes=100, mapped_bytes=60, native_opens=3)
    between = without_dip(before, measures(cache_bytes=100, mapped_bytes=90, native_opens=4))
    assert between == measures(cache_bytes=130, mapped_bytes=90, native_opens=4)
    later = measures(cache_bytes=150, mapped_bytes=90, native_opens=4)
    assert without_dip(between, later) == later
    assert without_dip(later, measures(cache_bytes=1)) == measures(cache_bytes=1)  # reset


def test_live_value_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib; from millrace.cache.counters import Counters;"
        "c = Counters(pathlib.Path(sys.argv[1])); c.set_live('upload_backlog_bytes', 7); c.add('origin_bytes', 3);"
        "print('set', flush=True); time.sleep(60)"
    )
    counters = Counters(tmp_path)
    counters.set_live("upload_backlog_bytes", 5)
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "set\n"
        assert counters.measures().live == {"upload_backlog_bytes": 12}
        process.send_signal(signal.SIGKILL)
    assert counters.measures().live == {"upload_backlog_bytes": 5}
    assert counters.measures().counters["origin_bytes"] == 3
    other = Counters(tmp_path)  # folds the file of the killed process
    assert other.measures().live == {"upload_backlog_bytes": 5}
    other.close()
    counters.close()


def test_full_disk_takes_no_counters_and_fails_no_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = Counters(tmp_path)
    before.add("cache_bytes", 5)
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    counters = Counters(tmp_path)
    counters.add("cache_bytes", 7)
    assert counters.measures().counters["cache_bytes"] == 12  # with its own counts, which no other process reads
    assert before.measures().counters["cache_bytes"] == 5
    assert len(list(tmp_path.iterdir())) == 1  # nothing half-made is left
    assert caplog.messages[0].startswith(f"{tmp_path}: ")
    assert caplog.messages[0].endswith(": No space left on device")
    assert "Errno" not in caplog.text
    counters.close()
    before.close()


@pytest.mark.parametrize("damage", ["longer", "shorter", "noise", "number too high", "folder", "fifo"])
@pytest.mark.parametrize("name", ["retired", "1-0123456789ab"])
def test_counters_file_that_was_damaged_fails_no_process(
    tmp_path: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        counters = Counters(tmp_path)
        counters.add("origin_bytes", 7)
        counters.close()
    path = tmp_path / name
    data = path.read_bytes() if path.exists() else bytes(4096)
    path.unlink(missing_ok=True)
    match damage:
        case "longer":
            path.write_bytes(data + b"x")
        case "shorter":
            path.write_bytes(data[:100])
        case "noise":
            path.write_bytes(os.urandom(4096))
        case "number too high":
            path.write_bytes(b"\xff" * 8 + data[8:])
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
    kept = 14 if damage == "longer" or name != "retired" else 7
    assert totals(tmp_path)["origin_bytes"] == kept
    for _ in range(2):
        counters = Counters(tmp_path)
        assert counters.measures().counters["origin_bytes"] == kept
        counters.close()
    lost = damage != "longer" or name != "retired"
    assert sum(record.message.startswith(f"{path} is recreated") for record in caplog.records) == lost
    assert ("lost: the counts" in caplog.text) == (lost and not (name != "retired" and damage in ("folder", "fifo")))
