"""Save and load one checkpoint over a link of 200 MB/s and 15 ms, as S3 objects.

Behind the emulated region stands an S3 server that keeps objects in memory (`benchmarks/memory_s3.py`), so that the link is
the limit: the real test server takes uploads more slowly than this link.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.checkpoints import (
    WEIGHTS_AND_ADAM,
    Opener,
    digest,
    millrace,
    parts_of,
    raw_bytes,
    save_and_load,
    tensors_of,
    trained,
)
from benchmarks.harness import Case, Measure, Options, Prepared
from benchmarks.memory_s3 import MemoryS3
from millrace.testing.region import EmulatedRegion


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    file, about = trained(options)
    state = parts_of(file, *WEIGHTS_AND_ADAM)
    with MemoryS3(options.scratch / "s3.log") as s3, EmulatedRegion(s3.endpoint_url) as region:

        def probe() -> dict[str, float]:
            seen = region.stats()
            return {"MB up": seen.bytes_up / 1e6, "MB down": seen.bytes_down / 1e6, "requests": seen.requests}

        yield Prepared(
            {"state": str(file), "place": "s3://bucket/run", "endpoint_url": region.endpoint_url},
            probe=probe,
            expected=digest(state),
            notes=(
                f"{raw_bytes(state) / 1e6:.0f} MB in {len(tensors_of(state))} tensors: bf16 weights, fp32 Adam moments. "
                f"{about}",
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


def _run(measure: Measure, context: Mapping[str, Any], openers: tuple[Opener, Opener]) -> str:
    """Save and load, and leave the bucket empty: everyone writes to an empty place, and memory is for one checkpoint."""
    import s3fs

    result = save_and_load(measure, context, openers)
    s3fs.S3FileSystem(**_fsspec_options(context)).rm(context["place"], recursive=True)
    return result


def _stock(measure: Measure, context: Mapping[str, Any], *, compressed: bool) -> str:
    from torch.distributed.checkpoint._extension import ZStandard
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    options, extensions = _fsspec_options(context), [ZStandard()] if compressed else None
    openers = (
        lambda place: FsspecWriter(place, sync_files=False, thread_count=2, _extensions=extensions, **options),
        lambda place: FsspecReader(place, **options),
    )
    return _run(measure, context, openers)


def _millrace(measure: Measure, context: Mapping[str, Any], compression: str) -> str:
    return _run(measure, context, millrace(2, compression, target_options=_s3_options(context)))


@case.contender("stock plain, 2 threads")
def stock_plain(measure: Measure, context: Mapping[str, Any]) -> str:
    return _stock(measure, context, compressed=False)


@case.contender("stock ZStandard, 2 threads")
def stock_zstd(measure: Measure, context: Mapping[str, Any]) -> str:
    return _stock(measure, context, compressed=True)


@case.contender("Millrace none, 2 threads")
def millrace_none(measure: Measure, context: Mapping[str, Any]) -> str:
    return _millrace(measure, context, "none")


@case.contender("Millrace, 2 threads")
def millrace_typed(measure: Measure, context: Mapping[str, Any]) -> str:
    return _millrace(measure, context, "typed")


@case.contender("Millrace adaptive, 2 threads")
def millrace_adaptive(measure: Measure, context: Mapping[str, Any]) -> str:
    return _millrace(measure, context, "adaptive")


@case.contender("Millrace max, 2 threads")
def millrace_max(measure: Measure, context: Mapping[str, Any]) -> str:
    return _millrace(measure, context, "max")
