"""Opening and reading what is cached: small files, large files, random reads, for both faces of the file system.

The origin is a real S3 server. Everything is read once beforehand, so it is warm in every contender; local files are in
the page cache. pyarrow's contenders are compared with `LocalFileSystem` and, for the reads, with `pa.memory_map`; fsspec's
with fsspec's own local file system. Each phase does the same in the same order; the figure to compare is CPU.
"""

from __future__ import annotations

import random
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.buckets import BUCKET, fill
from benchmarks.harness import Case, Measure, Options, Prepared
from millrace.cache.node import close_nodes
from millrace.testing.s3 import S3Server

_SMALL_BYTES = 26_000
_READ_BYTES = 64 << 10
_THREADS = 128
_REST_SECONDS = 3.0


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    small, large, large_bytes = (100, 2, 16 << 20) if options.quick else (2000, 4, 64 << 20)
    local = options.scratch / "local"
    local.mkdir()
    source = random.Random(0)
    for number in range(small):
        (local / f"small-{number:05}.jpg").write_bytes(source.randbytes(_SMALL_BYTES))
    for number in range(large):
        (local / f"large-{number}.bin").write_bytes(source.randbytes(large_bytes))
    with S3Server(options.scratch / "s3") as s3:
        fill(s3, [(file.name, file) for file in sorted(local.iterdir())])
        yield Prepared(
            {
                "options": s3.target_options,
                "local": str(local),
                "small": small,
                "large": large,
                "large_bytes": large_bytes,
                "passes": 1 if options.quick else 5,
                "opens": 200 if options.quick else 20_000,
                "reads": 1280 if options.quick else 51_200,
            },
            notes=(
                f"{small} files of {_SMALL_BYTES} bytes, {large} of {large_bytes >> 20} MiB; "
                f"reads of 64 KiB at random places, by one thread and by {_THREADS}; all warm.",
            ),
        )


case = Case(name="opens", title="Opening and reading what is cached", prepare=prepare, baseline="pyarrow, local files")

ReadWhole = Callable[[str], bytes]
OpenLarge = Callable[[str], Any]
ReadAt = Callable[[Any, int], Any]


def _run(
    measure: Measure,
    context: Mapping[str, Any],
    base: str,
    *,
    read_whole: ReadWhole,
    open_large: OpenLarge,
    open_for_reads: OpenLarge,
    read_at: ReadAt,
    alternatives: Mapping[str, ReadWhole] | None = None,
    forget: Callable[[], object] | None = None,
    list_all: Callable[[], object] = lambda: None,
) -> list[int]:
    small = [f"{base}/small-{number:05}.jpg" for number in range(context["small"])]
    large = [f"{base}/large-{number}.bin" for number in range(context["large"])]
    checks = [zlib.crc32(b"".join(read_whole(path) for path in small))]
    for path in large:  # fills the caches, and opens once more
        for start in range(0, context["large_bytes"], 8 << 20):
            file = open_for_reads(path)
            for offset in range(start, min(start + (8 << 20), context["large_bytes"]), _READ_BYTES):
                read_at(file, offset)
        open_large(path)
    for read in (read_whole, read_whole, *(alternatives or {}).values()):
        for path in small:
            read(path)
    total = 0
    for name, read in {"small files": read_whole, **(alternatives or {})}.items():
        total = 0
        with measure(name) as figures:
            for _ in range(context["passes"]):
                for path in small:
                    total += len(read(path))
            figures["opens"] = context["passes"] * len(small)
    checks.append(total)
    if forget is not None:
        random.Random(1).shuffle(small)
        for name, before in {"never listed": lambda: None, "listed": list_all}.items():
            before()
            forget()
            with measure(f"small files, first open of a process, {name}") as figures:
                for path in small:
                    read_whole(path)
                figures["opens"] = len(small)
    with measure("large files, open") as figures:
        for number in range(context["opens"]):
            open_large(large[number % len(large)])
        figures["opens"] = context["opens"]
    with measure(f"large files, open, {_THREADS} threads") as figures:
        _together(lambda number: [open_large(large[number % len(large)]) for _ in range(context["opens"] // _THREADS)])
        figures["opens"] = context["opens"]
    with measure("64 KiB reads") as figures:
        checks.append(_random_reads(context, large, open_for_reads, read_at, seed=0, count=context["reads"]))
        figures["reads"] = context["reads"]
    with measure(f"64 KiB reads, {_THREADS} threads") as figures:
        checks.append(_in_threads(context, large, open_for_reads, read_at))
        figures["reads"] = context["reads"]
    return checks


def _random_reads(
    context: Mapping[str, Any], paths: list[str], open_file: OpenLarge, read_at: ReadAt, *, seed: int, count: int
) -> int:
    """Read at random places of every file in turn; the sum of the first bytes and the lengths."""
    places = random.Random(seed)
    files = [open_file(path) for path in paths]
    total = 0
    for number in range(count):
        data = read_at(files[number % len(files)], places.randrange(context["large_bytes"] - _READ_BYTES))
        total += data[0] % 256 + len(data)
    return total


def _in_threads(context: Mapping[str, Any], paths: list[str], open_file: OpenLarge, read_at: ReadAt) -> int:
    """The same reads by many threads, each with files of its own."""
    sums = [0] * _THREADS

    def work(number: int) -> None:
        sums[number] = _random_reads(
            context, paths, open_file, read_at, seed=number, count=context["reads"] // _THREADS
        )

    _together(work)
    return sum(sums)


def _together(work: Callable[[int], object]) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _arrow_read(file: Any, position: int) -> Any:
    file.seek(position)
    return file.read_buffer(_READ_BYTES)


def _python_read(file: Any, position: int) -> bytes:
    file.seek(position)
    data: bytes = file.read(_READ_BYTES)
    return data


@case.contender("pyarrow, local files")
def arrow_local(measure: Measure, context: Mapping[str, Any]) -> list[int]:
    import pyarrow as pa
    import pyarrow.fs

    local = pyarrow.fs.LocalFileSystem()
    return _run(
        measure,
        context,
        context["local"],
        read_whole=lambda path: bytes(local.open_input_stream(path).read()),
        open_large=local.open_input_file,
        open_for_reads=pa.memory_map,
        read_at=_arrow_read,
        forget=lambda: None,
    )


@case.contender("Millrace, pyarrow's face")
def arrow_cached(measure: Measure, context: Mapping[str, Any]) -> list[int]:
    from pyarrow.fs import FileSelector

    import millrace

    fs = millrace.filesystem("s3", target_options=context["options"], cache_dir=f"{context['scratch']}/cache")
    result = _run(
        measure,
        context,
        BUCKET,
        read_whole=lambda path: bytes(fs.open_input_stream(path).read()),
        open_large=fs.open_input_file,
        open_for_reads=fs.open_input_file,
        read_at=_arrow_read,
        forget=lambda: _forget(fs, f"{BUCKET}/large-0.bin"),
        list_all=lambda: fs.get_file_info(FileSelector(BUCKET, recursive=True)),
    )
    _look_up(measure, context, fs)
    return result


def _forget(fs: Any, path: str) -> None:
    """Leave this process as one that has just started: nothing is open, mapped, verified or remembered but one file.

    And as one that comes a moment later: what was filled is sealed when it has been at rest for two seconds.
    """
    time.sleep(_REST_SECONDS)
    close_nodes()
    fs.open_input_file(path).close()


def _look_up(measure: Measure, context: Mapping[str, Any], fs: Any) -> None:
    """The index by itself: the record of one object of many."""
    entries = fs.node.entries()
    index = fs.node._disks[0].store.index
    with measure("index look-up") as figures:
        for number in range(context["opens"]):
            index.get(entries[number % len(entries)].object_id)
        figures["look-ups"] = context["opens"]


def _fsspec(measure: Measure, context: Mapping[str, Any], base: str, fs: Any) -> list[int]:
    def read_whole(path: str) -> bytes:
        with fs.open(path, "rb") as file:
            data: bytes = file.read()
            return data

    return _run(
        measure,
        context,
        base,
        read_whole=read_whole,
        open_large=lambda path: fs.open(path, "rb").close(),
        open_for_reads=lambda path: fs.open(path, "rb"),
        read_at=_python_read,
        alternatives={"small files, cat_file": fs.cat_file},
    )


@case.contender("fsspec, local files", baseline="fsspec, local files")
def fsspec_local(measure: Measure, context: Mapping[str, Any]) -> list[int]:
    import fsspec

    return _fsspec(measure, context, context["local"], fsspec.filesystem("file"))


@case.contender("Millrace, fsspec's face", baseline="fsspec, local files")
def fsspec_cached(measure: Measure, context: Mapping[str, Any]) -> list[int]:
    import millrace

    fs = millrace.filesystem("s3", target_options=context["options"], cache_dir=f"{context['scratch']}/cache")
    return _fsspec(measure, context, BUCKET, fs)


@case.contender("fsspec filecache over s3fs", baseline="fsspec, local files")
def filecache(measure: Measure, context: Mapping[str, Any]) -> list[int]:
    return _fsspec_cache(measure, context, "filecache")


@case.contender("fsspec blockcache over s3fs", baseline="fsspec, local files")
def blockcache(measure: Measure, context: Mapping[str, Any]) -> list[int]:
    return _fsspec_cache(measure, context, "blockcache")


def _fsspec_cache(measure: Measure, context: Mapping[str, Any], protocol: str) -> list[int]:
    import fsspec

    fs = fsspec.filesystem(
        protocol,
        target_protocol="s3",
        target_options=dict(context["options"]),
        cache_storage=f"{context['scratch']}/cache",
    )
    return _fsspec(measure, context, BUCKET, fs)
