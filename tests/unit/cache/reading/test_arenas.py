"""The memory that glibc keeps for the threads of a process that fetches."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the arenas are those of glibc")

_PROGRAM = """
import ctypes, os, sys, threading
os.cpu_count = lambda: 2
from millrace.cache.node import cache_node
from millrace.config import resolve

cache_node(resolve({"cache_dir": sys.argv[1], "min_free": 0}))
started = threading.Barrier(33)

def allocate():
    kept = [bytes(2000) for _ in range(100)]
    started.wait()

for _ in range(32):
    threading.Thread(target=allocate, daemon=True).start()
started.wait()
libc = ctypes.CDLL(None)
libc.fopen.restype, libc.fopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_char_p)
libc.malloc_info.argtypes = (ctypes.c_int, ctypes.c_void_p)
libc.fclose.argtypes = (ctypes.c_void_p,)
file = libc.fopen(sys.argv[2].encode(), b"w")
libc.malloc_info(0, file)
libc.fclose(file)
print(open(sys.argv[2]).read().count("<heap nr="))
"""


def arenas(directory: Path, **environment: str) -> int:
    """The arenas of a process, on what looks like two cores, that opens a cache and runs 32 threads that allocate memory."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", _PROGRAM, str(directory / "cache"), str(directory / "malloc")]
    done = subprocess.run(command, env={**inherited, **environment}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_open_cache_limits_arenas_to_one_per_core(tmp_path: Path) -> None:
    # Two, and one more where libraries had three before. Without the limit it is at least eight.
    assert arenas(tmp_path) <= 3


@pytest.mark.parametrize(("name", "value"), [("MALLOC_ARENA_MAX", "5"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=5")])
def test_limit_in_the_environment_is_kept(tmp_path: Path, name: str, value: str) -> None:
    assert arenas(tmp_path, **{name: value}) == 5
