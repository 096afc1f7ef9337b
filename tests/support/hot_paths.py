"""The four hot paths of `docs/architecture`: the trace of each page, and the writer of its list of functions.

`python -m tests.support.hot_paths` updates the lists of all pages, from real runs against a real S3 server.
"""

from __future__ import annotations

import itertools
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.local_cluster import LocalCluster
from tests.support.tracing import Trace, threads_traced, traced

import millrace
from millrace.cluster.listings import metadata_id
from millrace.cluster.membership import View
from millrace.cluster.placement import Placement
from millrace.testing.s3 import S3Server

PAGES = Path(__file__).parents[2] / "docs" / "architecture"
_BEGIN, _END = "<!-- traced -->", "<!-- end -->"
_ENTRY = re.compile(r"^\d+\. `([\w/]+\.py)`: (.+)$", re.M)
_NBYTES = 9 << 20

MAY_RUN = frozenset({"config.py", "runtime/maintenance.py"})
"""Files that run only if enough time has passed since the last read. Twice a second a reader checks whether its node has
changed. Heartbeats end when no lock was taken for some time, and then begin again with the next lock.
"""


@dataclass(frozen=True)
class HotPath:
    """A page, the most files that its path may pass through, and a context manager that yields the call to trace."""

    page: str
    most_files: int
    prepared: Callable[[Path, S3Server], Any]


def _bucket(s3: S3Server) -> str:
    name = f"hot-{next(_numbers)}"
    s3.create_bucket(name)
    return name


def _count() -> Iterator[int]:
    number = 0
    while True:
        yield (number := number + 1)


_numbers = _count()


@contextmanager
def _reads(folder: Path, s3: S3Server, *, warm: bool) -> Iterator[Callable[[], None]]:
    bucket = _bucket(s3)
    fs = millrace.filesystem("s3", target_options=s3.target_options, cache_dir=str(folder / "cache"), min_free=0)
    for name in ("first", "traced"):
        fs.pipe_file(f"{bucket}/{name}", name.encode() * _NBYTES)

    def read(name: str) -> None:
        with fs.open_input_file(f"{bucket}/{name}") as file:
            assert file.read_at(len(name), 0) == name.encode()

    def read_all(name: str) -> None:
        with fs.open_input_file(f"{bucket}/{name}") as file:
            file.read()

    read_all("first")  # the store and the connection are open
    if warm:
        for _ in range(2):
            read_all("traced")
            read("traced")
    yield lambda: read("traced")


@contextmanager
def _reads_from_a_peer(folder: Path, s3: S3Server) -> Iterator[Callable[[], None]]:
    with LocalCluster(folder / "cluster", 2, target_options=s3.target_options) as cluster:
        # Listings stay fresh on a slow machine.
        other, mine = (
            millrace.filesystem("s3", **cluster.arguments(node, consistency="1h")) for node in reversed(cluster.nodes)
        )
        members = Placement(View.of(cluster.member(node) for node in cluster.nodes))
        identity = mine.as_origin().identity
        while True:  # a bucket whose metadata this node requests from S3 itself
            bucket = _bucket(s3)
            if members.order(metadata_id(identity, bucket))[0].id == cluster.nodes[0].address:
                break
        names = [f"object-{number}" for number in range(100)]
        for name in names:
            other.pipe_file(f"{bucket}/{name}", name.encode() * 1000)
            other.cat_file(f"{bucket}/{name}")
        unread = iter(names)
        # Until this node has its peers, a connection, and a listing of the bucket.
        for number in itertools.count(1):
            mine.cat_file(f"{bucket}/{next(unread)}")
            if number >= 10 and mine.cache_counters()["peer_bytes"]:
                break

        def read() -> None:
            name = next(unread)
            assert mine.cat_file(f"{bucket}/{name}", 0, 4) == name[:4].encode()

        yield read


@contextmanager
def _saves(folder: Path, _: S3Server) -> Iterator[Callable[[], None]]:
    import torch
    import torch.distributed.checkpoint as dcp

    from millrace.checkpoint import CheckpointWriter
    from millrace.checkpoint.codec import splitting

    state = {"weights": torch.randn(300, 300)}
    dcp.save(state, storage_writer=CheckpointWriter(str(folder / "first")))
    writer = CheckpointWriter(str(folder / "traced"))
    # As in a process that has not coded enough for the compiled loops, whatever this one has coded before.
    with patch.object(splitting, "loops", splitting.Loops()):
        yield lambda: dcp.save(state, storage_writer=writer) and None


HOT_PATHS = (
    HotPath("warm-read", 5, lambda folder, s3: _reads(folder, s3, warm=True)),
    HotPath("cold-read", 25, lambda folder, s3: _reads(folder, s3, warm=False)),
    HotPath("peer-read", 35, _reads_from_a_peer),
    HotPath("save", 20, _saves),
)


def trace_of(path: HotPath, folder: Path, s3: S3Server) -> Trace:
    """Prepare and run one hot path. For a read from a peer, the first read with a request to a peer."""
    with threads_traced(), path.prepared(folder, s3) as call:
        trace = traced(call)
        while path.page == "peer-read" and "cluster/dataplane/client.py" not in trace.files:
            trace = traced(call)
        return trace


def listed(page: str) -> dict[str, list[str]]:
    """The functions that a page lists, by file."""
    text = (PAGES / f"{page}.md").read_text()
    return {file: re.findall(r"`([\w.<>]+)`", names) for file, names in _ENTRY.findall(text)}


def write(page: str, trace: Trace) -> None:
    """Update the list of a page."""
    functions: dict[str, list[str]] = {}
    for file, function in trace.calls:
        functions.setdefault(file, []).append(function)
    lines = [
        f"{number}. `{file}`: " + ", ".join(f"`{name}`" for name in names)
        for number, (file, names) in enumerate(functions.items(), 1)
    ]
    target = PAGES / f"{page}.md"
    text = target.read_text()
    begin, end = text.index(_BEGIN) + len(_BEGIN), text.index(_END)
    target.write_text(text[:begin] + "\n" + "\n".join(lines) + "\n" + text[end:])


def main() -> None:
    """Update all lists."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        s3 = opened.enter_context(S3Server(Path(folder, "s3")))
        for path in HOT_PATHS:
            trace = trace_of(path, Path(folder, path.page), s3)
            write(path.page, trace)
            print(f"{path.page}: {len(trace.files)} files of at most {path.most_files}", file=sys.stderr)


if __name__ == "__main__":
    main()
