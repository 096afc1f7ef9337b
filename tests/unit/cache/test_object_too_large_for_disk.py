"""An object that the disk's file system cannot hold costs its own caching, not the disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import resource, signal, sys
import millrace

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
fs = millrace.filesystem("file", cache_dir=sys.argv[1], min_free=0)
fs.cat_file(sys.argv[2] + "/small")
resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, resource.RLIM_INFINITY))
large = fs.cat_file(sys.argv[2] + "/large")
assert large == open(sys.argv[2] + "/large", "rb").read()
before = fs.cache_counters()["origin_bytes"]
for _ in range(2):
    fs.cat_file(sys.argv[2] + "/medium")
print(fs.cache_counters()["origin_bytes"] - before)
"""


def test_object_larger_than_a_file_can_be_leaves_the_cache_in_use(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name, size in (("small", 1000), ("medium", 5_000_000), ("large", 40_000_000)):
        (data / name).write_bytes(name.encode() * (size // len(name)))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "cache"), str(data)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) == (data / "medium").stat().st_size
