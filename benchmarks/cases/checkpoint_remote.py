"""Save and load one checkpoint over a link of 200 MB/s and 15 ms, as S3 objects.

Behind the emulated region stands an S3 server that keeps objects in memory (`benchmarks/memory_s3.py`), so that the link is
the limit: the real test server takes uploads more slowly than this link.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.blosc2_by_hand import blosc2_save_and_load
from benchmarks.checkpoints import Opener, expected_of, millrace, save_and_load, sizes_of, trained
from benchmarks.harness import Case, Measure, Options, Prepared
from benchmarks.memory_s3 import MemoryS3
from millrace.testing.region import EmulatedRegion


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    file, about = trained(options)
    with MemoryS3(options.scratch / "s3.log") as s3, EmulatedRegion(s3.endpoint_url) as region:

        def probe() -> dict[str, float]:
            seen = region.stats()
            return {"MB up": seen.bytes_up / 1e6, "MB down": seen.bytes_down / 1e6, "requests": seen.requests}

        yield Prepared(
            {"state": str(file), "place": "s3://bucket/run", "endpoint_url": region.endpoint_url},
            probe=probe,
            expected=expected_of(file),
            notes=(
                f"{sizes_of(file)}. {about}",
                "Storage: an S3 server that keeps objects in memory, behind an emulated link. It and the link take their "
                "time from the same cores, which is not counted as the contenders'. Stock is torch's FsspecWriter and "
                "FsspecReader over s3fs.",
                str(region.calibrate()),
            ),
        )


case = Case(
    name="checkpoint_remote",
    title="Saving and loading a checkpoint over 200 MB/s",
    prepare=prepare,
    baseline="stock plain, 2 threads",
)


def _s3_options(context: Mapping[str, Any]) -> dict[str, Any]:
    return {"key": "any", "secret": "any", "endpoint_url": context["endpoint_url"]}


def _fsspec_options(context: Mapping[str, Any]) -> dict[str, Any]:
    # Checksums in trailers are for TLS; this endpoint is plain HTTP.
    return {**_s3_options(context), "config_kwargs": {"request_checksum_calculation": "when_required"}}


def _run(measure: Measure, context: Mapping[str, Any], openers: tuple[Opener, Opener]) -> dict[str, str]:
    result = save_and_load(measure, context, openers)
    _empty(context)
    return result


def _empty(context: Mapping[str, Any]) -> None:
    """Leave the bucket empty: everyone writes to an empty place, and memory is for one contender's checkpoints."""
    import s3fs

    s3fs.S3FileSystem(**_fsspec_options(context)).rm(context["place"], recursive=True)


def _stock(measure: Measure, context: Mapping[str, Any], threads: int, *, compressed: bool) -> dict[str, str]:
    from torch.distributed.checkpoint._extension import ZStandard
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    options, extensions = _fsspec_options(context), [ZStandard()] if compressed else None
    openers = (
        lambda place: FsspecWriter(place, sync_files=False, thread_count=threads, _extensions=extensions, **options),
        lambda place: FsspecReader(place, **options),
    )
    return _run(measure, context, openers)


def _millrace(measure: Measure, context: Mapping[str, Any], threads: int, compression: str) -> dict[str, str]:
    return _run(measure, context, millrace(threads, compression, target_options=_s3_options(context)))


@case.contender("stock plain, 1 thread")
def stock_plain_1(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _stock(measure, context, 1, compressed=False)


@case.contender("Millrace, 1 thread", baseline="stock plain, 1 thread")
def millrace_1(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _millrace(measure, context, 1, "typed")


@case.contender("blosc2 by hand, 2 threads")
def blosc2_2(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    import s3fs

    # One client a thread would be no faster: s3fs runs all requests in one thread of its own.
    remote = s3fs.S3FileSystem(**_fsspec_options(context))
    result = blosc2_save_and_load(measure, context, 2, remote.pipe_file, remote.cat_file)
    _empty(context)
    return result


@case.contender("stock plain, 2 threads")
def stock_plain(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _stock(measure, context, 2, compressed=False)


@case.contender("stock ZStandard, 2 threads")
def stock_zstd(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _stock(measure, context, 2, compressed=True)


@case.contender("Millrace none, 2 threads")
def millrace_none(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _millrace(measure, context, 2, "none")


@case.contender("Millrace, 2 threads")
def millrace_typed(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _millrace(measure, context, 2, "typed")


@case.contender("Millrace adaptive, 2 threads")
def millrace_adaptive(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _millrace(measure, context, 2, "adaptive")


@case.contender("Millrace max, 2 threads")
def millrace_max(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _millrace(measure, context, 2, "max")
