"""Save and load one checkpoint on the local disk: Millrace, what torch brings, and blosc2 by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.blosc2_by_hand import blosc2_save_and_load
from benchmarks.checkpoints import Opener, expected_of, millrace, save_and_load, sizes_of, stock, trained
from benchmarks.harness import Case, Measure, Options, Prepared


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    file, about = trained(options)
    yield Prepared(
        {"state": str(file)},
        expected=expected_of(file),
        notes=(
            f"{sizes_of(file)}. {about}",
            "All files are synced to the same disk before a save counts as done. A load finds them in the page cache, into "
            "which they are read before, or, 'from the disk', not; what it returns is compared bit for bit.",
            "Each content is saved to a new directory, then twice more to the same one; the last save is measured as well. "
            "In a virtual machine, memory that the host has not given yet costs up to 2 CPU-s per GB when the page cache "
            "uses it first, which favours small checkpoints in new directories.",
        ),
    )


case = Case(name="checkpoint", title="Saving and loading a checkpoint on the local disk", prepare=prepare)


def _run(measure: Measure, context: Mapping[str, Any], openers: tuple[Opener, Opener]) -> dict[str, str]:
    return save_and_load(measure, context, openers, again=True)


@case.contender("stock plain, 1 thread")
def stock_plain_1(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _run(measure, context, stock(1))


@case.contender("stock plain, 2 threads")
def stock_plain_2(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _run(measure, context, stock(2))


@case.contender("stock ZStandard, 1 thread", baseline="stock plain, 1 thread")
def stock_zstd_1(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _run(measure, context, stock(1, "zstd"))


@case.contender("stock ZStandard, 2 threads", baseline="stock plain, 2 threads")
def stock_zstd_2(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _run(measure, context, stock(2, "zstd"))


@case.contender("stock with ZstdPlanes, 1 thread", baseline="stock plain, 1 thread")
def stock_planes_1(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _run(measure, context, stock(1, "planes"))


@case.contender("stock with ZstdPlanes, 2 threads", baseline="stock plain, 2 threads")
def stock_planes_2(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _run(measure, context, stock(2, "planes"))


@case.contender("blosc2 by hand, 1 thread", baseline="stock plain, 1 thread")
def blosc2_1(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return blosc2_save_and_load(measure, context, 1, again=True)


@case.contender("blosc2 by hand, 2 threads", baseline="stock plain, 2 threads")
def blosc2_2(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return blosc2_save_and_load(measure, context, 2, again=True)


@case.contender("Millrace, 1 thread", baseline="stock plain, 1 thread")
def millrace_1(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _run(measure, context, millrace(1))


@case.contender("Millrace, 2 threads", baseline="stock plain, 2 threads")
def millrace_2(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _run(measure, context, millrace(2))


@case.contender("Millrace, compiled loops, 2 threads", baseline="stock plain, 2 threads")
def millrace_compiled(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    """With the library numba, as in a process that has coded 4 GiB."""
    return _run(measure, context, millrace(2, compiled=True))


@case.contender("Millrace max, 2 threads", baseline="stock plain, 2 threads")
def millrace_max(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _run(measure, context, millrace(2, "max"))


@case.contender("Millrace adaptive, 2 threads", baseline="stock plain, 2 threads")
def millrace_adaptive(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _run(measure, context, millrace(2, "adaptive"))


@case.contender("Millrace none, 2 threads", baseline="stock plain, 2 threads")
def millrace_none(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _run(measure, context, millrace(2, "none"))
