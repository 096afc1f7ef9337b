"""Save and load one checkpoint on the local disk: Millrace beside what torch brings, and beside blosc2 by hand."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import (
    WEIGHTS_AND_ADAM,
    digest,
    millrace,
    parts_of,
    raw_bytes,
    save_and_load,
    stock,
    tensors_of,
    trained,
)
from benchmarks.harness import Case, Measure, Options, Prepared


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    file, about = trained(options)
    state = parts_of(file, *WEIGHTS_AND_ADAM)
    yield Prepared(
        {"state": str(file)},
        expected=digest(state),
        notes=(
            f"{raw_bytes(state) / 1e6:.0f} MB in {len(tensors_of(state))} tensors: bf16 weights, fp32 Adam moments. {about}",
            "All files are synced to the same disk before a save counts as done; a load finds them in the page cache, "
            "and what it gives is compared bit for bit.",
        ),
    )


case = Case(name="checkpoint", title="Saving and loading a checkpoint on the local disk", prepare=prepare)


@case.contender("stock plain, 1 thread")
def stock_plain_1(measure: Measure, context: Mapping[str, Any]) -> str:
    return save_and_load(measure, context, stock(1))


@case.contender("stock plain, 2 threads")
def stock_plain_2(measure: Measure, context: Mapping[str, Any]) -> str:
    return save_and_load(measure, context, stock(2))


@case.contender("stock ZStandard, 1 thread", baseline="stock plain, 1 thread")
def stock_zstd_1(measure: Measure, context: Mapping[str, Any]) -> str:
    return save_and_load(measure, context, stock(1, "zstd"))


@case.contender("stock ZStandard, 2 threads", baseline="stock plain, 2 threads")
def stock_zstd_2(measure: Measure, context: Mapping[str, Any]) -> str:
    return save_and_load(measure, context, stock(2, "zstd"))


@case.contender("stock with ZstdPlanes, 1 thread", baseline="stock plain, 1 thread")
def stock_planes_1(measure: Measure, context: Mapping[str, Any]) -> str:
    return save_and_load(measure, context, stock(1, "planes"))


@case.contender("stock with ZstdPlanes, 2 threads", baseline="stock plain, 2 threads")
def stock_planes_2(measure: Measure, context: Mapping[str, Any]) -> str:
    return save_and_load(measure, context, stock(2, "planes"))


@case.contender("blosc2 by hand, 2 threads", baseline="stock plain, 2 threads")
def blosc2_2(measure: Measure, context: Mapping[str, Any]) -> str:
    return _blosc2(measure, context, 2)


@case.contender("Millrace, 1 thread", baseline="stock plain, 1 thread")
def millrace_1(measure: Measure, context: Mapping[str, Any]) -> str:
    return save_and_load(measure, context, millrace(1))


@case.contender("Millrace, 2 threads", baseline="stock plain, 2 threads")
def millrace_2(measure: Measure, context: Mapping[str, Any]) -> str:
    return save_and_load(measure, context, millrace(2))


@case.contender("Millrace max, 2 threads", baseline="stock plain, 2 threads")
def millrace_max(measure: Measure, context: Mapping[str, Any]) -> str:
    return save_and_load(measure, context, millrace(2, "max"))


@case.contender("Millrace adaptive, 2 threads", baseline="stock plain, 2 threads")
def millrace_adaptive(measure: Measure, context: Mapping[str, Any]) -> str:
    return save_and_load(measure, context, millrace(2, "adaptive"))


@case.contender("Millrace none, 2 threads", baseline="stock plain, 2 threads")
def millrace_none(measure: Measure, context: Mapping[str, Any]) -> str:
    return save_and_load(measure, context, millrace(2, "none"))


def _blosc2(measure: Measure, context: Mapping[str, Any], threads: int) -> str:
    """The simple alternative: a frame for every 64 MiB of a tensor in one file each, threads over frames, no checksums."""
    import blosc2
    import torch

    blosc2.set_releasegil(True)
    options: dict[str, Any] = {
        "codec": blosc2.Codec.ZSTD,
        "clevel": 1,
        "filters": [blosc2.Filter.SHUFFLE],
        "filters_meta": [0],
        "splitmode": blosc2.SplitMode.ALWAYS_SPLIT,
        "blocksize": 256 << 10,
        "nthreads": 1,
    }
    frame_bytes = 64 << 20
    state, folder = parts_of(context["state"], *WEIGHTS_AND_ADAM), Path(context["scratch"])
    pieces = []
    for number, tensor in enumerate(tensors_of(state)):
        flat = tensor.reshape(-1).view(torch.uint8).numpy()
        for start in range(0, flat.size, frame_bytes):
            pieces.append((folder / f"{number}-{start}", flat[start : start + frame_bytes], tensor.itemsize))

    def save(piece: tuple[Path, Any, int]) -> None:
        path, data, width = piece
        with path.open("wb") as file:
            file.write(blosc2.compress2(data, typesize=width, **options))
            file.flush()
            os.fsync(file.fileno())

    def load(piece: tuple[Path, Any, int]) -> None:
        blosc2.decompress2(piece[0].read_bytes(), dst=piece[1], nthreads=1)

    with ThreadPoolExecutor(threads) as pool:
        with measure("save") as figures:
            list(pool.map(save, pieces))
            stored = sum(path.stat().st_size for path, _, _ in pieces)
            figures |= {"MB stored": stored / 1e6, "size to raw": stored / raw_bytes(state)}
        for tensor in tensors_of(state):
            tensor.fill_(7)
        with measure("load"):
            list(pool.map(load, pieces))
    return digest(state)
