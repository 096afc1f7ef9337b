import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from millrace.cache.counters import NAMES, Counters, totals


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
    assert counters.totals()["origin_requests"] == 16 * 2000
    counters.close()


def test_a_killed_process_loses_nothing_that_it_counted(tmp_path: Path) -> None:
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


def test_every_name_has_its_place(tmp_path: Path) -> None:
    counters = Counters(tmp_path)
    for number, name in enumerate(NAMES):
        counters.add(name, number + 1)
    assert counters.totals() == {name: number + 1 for number, name in enumerate(NAMES)}
    assert totals(tmp_path / "none") == dict.fromkeys(NAMES, 0)
    counters.close()


def test_a_full_disk_takes_no_counters_and_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = Counters(tmp_path)
    before.add("cache_bytes", 5)
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    counters = Counters(tmp_path)
    counters.add("cache_bytes", 7)
    assert counters.totals()["cache_bytes"] == 12  # with its own, which nobody else sees
    assert before.totals()["cache_bytes"] == 5
    assert len(list(tmp_path.iterdir())) == 1  # nothing half-made is left
    counters.close()
    before.close()
