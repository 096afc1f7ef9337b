"""How small checkpoints become, by what is in them; with the time that one thread takes for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.checkpoints import (
    WEIGHTS_AND_ADAM,
    Opener,
    digest,
    folder_bytes,
    millrace,
    parts_of,
    raw_bytes,
    stock,
    tensors_of,
    trained,
    warm_up,
)
from benchmarks.harness import Case, Measure, Options, Prepared

_PARTS = {"bf16": ("bf16",), "fp32": ("fp32",), "exp_avg": ("exp_avg",), "exp_avg_sq": ("exp_avg_sq",)}
_PARTS["weights and Adam"] = WEIGHTS_AND_ADAM


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    file, about = trained(options)
    expected = {name: digest(parts_of(file, *parts)) for name, parts in _PARTS.items()}
    yield Prepared(
        {"state": str(file)},
        expected=expected,
        notes=(about, "One thread, files not synced, read back from the page cache."),
    )


case = Case(name="checkpoint_sizes", title="Sizes of checkpoints", prepare=prepare, baseline="stock plain", rounds=1)


def _sizes(measure: Measure, context: Mapping[str, Any], openers: tuple[Opener, Opener]) -> dict[str, str]:
    import torch.distributed.checkpoint as dcp

    warm_up(openers, f"{context['scratch']}/warm-up")
    digests = {}
    for name, parts in _PARTS.items():
        state, place = parts_of(context["state"], *parts), f"{context['scratch']}/{name}"
        with measure(f"save {name}") as figures:
            dcp.save(state, storage_writer=openers[0](place), no_dist=True)
            figures["size to raw"] = folder_bytes(place) / raw_bytes(state)
        for tensor in tensors_of(state):
            tensor.fill_(7)
        with measure(f"load {name}"):
            dcp.load(state, storage_reader=openers[1](place), no_dist=True)
        digests[name] = digest(state)
    return digests


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
