"""How small checkpoints become, by what is in them; with the time that one thread takes for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.checkpoints import (
    CONTENTS,
    Opener,
    expected_of,
    millrace,
    save_and_load,
    sizes_of,
    stock,
    trained,
)
from benchmarks.harness import Case, Measure, Options, Prepared

_CONTENTS = {
    **CONTENTS,
    "exp_avg": ("exp_avg",),
    "exp_avg_sq": ("exp_avg_sq",),
    "bf16 + Adam": ("bf16", "exp_avg", "exp_avg_sq"),
}


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    file, about = trained(options)
    yield Prepared(
        {"state": str(file)},
        expected=expected_of(file, _CONTENTS),
        notes=(f"{sizes_of(file, _CONTENTS)}. {about}", "One thread, files not synced, read back from the page cache."),
    )


case = Case(name="checkpoint_sizes", title="Sizes of checkpoints", prepare=prepare, baseline="stock plain", rounds=1)


def _sizes(measure: Measure, context: Mapping[str, Any], openers: tuple[Opener, Opener]) -> dict[str, str]:
    return save_and_load(measure, context, openers, _CONTENTS)


@case.contender("stock plain")
def stock_plain(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _sizes(measure, context, stock(1, sync_files=False))


@case.contender("stock ZStandard")
def stock_zstd(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _sizes(measure, context, stock(1, "zstd", sync_files=False))


@case.contender("stock with ZstdPlanes")
def stock_planes(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _sizes(measure, context, stock(1, "planes", sync_files=False))


@case.contender("Millrace")
def millrace_typed(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _sizes(measure, context, millrace(1, sync_files=False))


@case.contender("Millrace max")
def millrace_max(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _sizes(measure, context, millrace(1, "max", sync_files=False))
