"""Reads in threads that outlive the main thread, and in functions that run at the exit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = {
    "thread": """
import sys, threading, time
import millrace
fs = millrace.filesystem("file", cache_dir=sys.argv[1], min_free=0)
def read():
    threading.main_thread().join()
    for name in ("small", "large"):
        assert fs.cat_file(f"{sys.argv[2]}/{name}") == open(f"{sys.argv[2]}/{name}", "rb").read()
    print("read", flush=True)
threading.Thread(target=read).start()
""",
    "exit": """
import atexit, sys
import millrace
fs = millrace.filesystem("file", cache_dir=sys.argv[1], min_free=0)
def read():
    for name in ("small", "large"):
        assert fs.cat_file(f"{sys.argv[2]}/{name}") == open(f"{sys.argv[2]}/{name}", "rb").read()
    print("read", flush=True)
atexit.register(read)
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_uncached_read_after_the_main_thread_succeeds(name: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "small").write_bytes(b"a" * 1000)
    (data / "large").write_bytes(b"b" * 20_000_000)
    command = [sys.executable, "-c", PROGRAMS[name], str(tmp_path / "cache"), str(data)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.returncode) == ("read\n", 0), ended.stderr
