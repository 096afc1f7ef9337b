"""A process with limited address space: the index uses the space that is available."""

import subprocess
import sys
from pathlib import Path

import pytest

_READER = """
import resource, sys
from pathlib import Path
from millrace.cache.node import cache_node
from millrace.config import resolve
from tests.support.computed import ComputedOrigin

limit, directory = int(sys.argv[1]) << 30, sys.argv[2]
if limit:
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
origin = ComputedOrigin({f"b/{name}": 5_000_000 for name in "ab"})
node = cache_node(resolve({"cache_dir": directory, "min_free": 0, "capacity": "1GB"}, environ={}, file={}))
for name in "ab":
    info = origin.head(f"b/{name}")
    reader = node.open_reader(origin, info)
    assert bytes(reader.read(0, info.size)) == bytes(origin.expected(info.key, 0, info.size))
    reader.close()
print(sum(used for _, used, _ in node.disks()), origin.bytes_read)
"""


def read(gigabytes: int, cache: Path) -> str:
    command = [sys.executable, "-c", _READER, str(gigabytes), str(cache)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout.strip()


@pytest.mark.parametrize("gigabytes", [8, 70])
def test_cache_with_limited_address_space_reads_the_origin_once(tmp_path: Path, gigabytes: int) -> None:
    assert read(gigabytes, tmp_path) == "10000000 10000000"
    assert read(0, tmp_path) == "10000000 0"  # next to others that map more, or less
    assert read(gigabytes, tmp_path) == "10000000 0"
