"""One step of training as an update of bf16 weights: its size and its CPU time on one core, at two learning rates."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import trained
from benchmarks.fine_tuning import further_steps
from benchmarks.harness import ROOT, Case, Measure, Options, Prepared

_RATES = (1e-6, 2e-5)
_PASSES = 5
_CHUNK = 1 << 19  # elements


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    file, about = trained(options)
    chunks = 4 if options.quick else 24
    steps = _made(file, chunks)
    yield Prepared(
        {"steps": str(steps)},
        notes=(
            f"{about} Then AdamW continues, with its moments, on the source code of packages at a constant rate. The "
            f"fifth step, in fp32 and rounded to bf16: {chunks} chunks of 1 MiB, spread evenly over the weights.",
            f"GB/s of weights by the CPU time of the one thread, median of {_PASSES} passes; decoded values are compared.",
        ),
    )


case = Case(name="updates", title="Updates of weights in small steps", prepare=prepare, baseline="full")

# Encodes the new values of a chunk, given the old ones; and decodes them, given the old ones.
Encode = Callable[[Any, Any], Sequence[Any]]
Decode = Callable[[bytes, Any], Any]


def _made(file: Path, chunks: int) -> Path:
    """The file with old and new values by rate: arrays of `chunks` rows."""
    import numpy as np

    steps = ROOT / ".deps" / f"{file.stem}-updates-{chunks}.npz"
    if not steps.exists():
        pairs = {f"{rate:g}": further_steps(file, rate, before=4, chunks=chunks, elements=_CHUNK) for rate in _RATES}
        aside = steps.with_suffix(f".{os.getpid()}.npz")
        np.savez(
            aside,
            **{
                f"{rate} {name}": pair[number]
                for rate, pair in pairs.items()
                for number, name in enumerate(("old", "new"))
            },
        )
        aside.rename(steps)
    return steps


def _run(measure: Measure, context: Mapping[str, Any], encode: Encode, decode: Decode) -> dict[str, str]:
    import numpy as np
    import xxhash

    data, digests = np.load(context["steps"]), {}
    for rate in (f"{rate:g}" for rate in _RATES):
        old, new = data[f"{rate} old"], data[f"{rate} new"]
        stored = [b"".join(map(bytes, map(memoryview, encode(*pair)))) for pair in zip(old, new, strict=True)]
        with measure(f"encode at {rate}") as figures:
            figures["GB/s"] = _speed(new.nbytes, encode, old, new)
            figures["KB stored"] = sum(map(len, stored)) / 1e3
            figures["% of raw"] = 100 * sum(map(len, stored)) / new.nbytes
            figures["% of values changed"] = 100 * float((old != new).mean())
        with measure(f"decode at {rate}") as figures:
            figures["GB/s"] = _speed(new.nbytes, lambda before, part: decode(part, before), old, stored)
        whole = xxhash.xxh3_128()
        for before, part in zip(old, stored, strict=True):
            whole.update(np.ascontiguousarray(decode(part, before)))
        digests[rate] = whole.hexdigest()
    return digests


def _speed(raw_bytes: int, work: Callable[[Any, Any], object], olds: Sequence[Any], others: Sequence[Any]) -> float:
    seconds = []
    for _ in range(_PASSES):
        began = time.thread_time()
        for old, other in zip(olds, others, strict=True):
            work(old, other)
        seconds.append(time.thread_time() - began)
    return raw_bytes / statistics.median(seconds) / 1e9


def _millrace(measure: Measure, context: Mapping[str, Any], *, is_delta: bool) -> dict[str, str]:
    import numpy as np

    from millrace.checkpoint.codec.chunks import Kind
    from millrace.checkpoint.codec.planes import PlaneCodec

    codec, kind = PlaneCodec(), Kind(2, True)
    out = np.empty(_CHUNK, dtype=np.uint16)

    def decode(part: bytes, old: Any) -> Any:
        codec.decode(part, kind, out.view(np.uint8).data, old.data if is_delta else None)
        return out

    return _run(measure, context, lambda old, new: codec.encode(new.data, kind, old.data if is_delta else None), decode)


@case.contender("full")
def full(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _millrace(measure, context, is_delta=False)


@case.contender("Millrace")
def sparse(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _millrace(measure, context, is_delta=True)


def _xor(measure: Measure, context: Mapping[str, Any], level: int) -> dict[str, str]:
    import numpy as np

    from millrace.checkpoint.codec import zstd

    compressor = zstd.at_level(level)

    def decode(part: bytes, old: Any) -> Any:
        return np.frombuffer(zstd.decompress(part, old.nbytes), dtype=np.uint16) ^ old

    return _run(measure, context, lambda old, new: [compressor.compress((old ^ new).data)], decode)


@case.contender("XOR, zstd level 1")
def xor_1(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _xor(measure, context, 1)


@case.contender("XOR, zstd level 3")
def xor_3(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _xor(measure, context, 3)


@case.contender("distances and values, zstd level 3")
def lists(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    import struct

    import numpy as np

    from millrace.checkpoint.codec import zstd

    compressor = zstd.at_level(3)

    def encode(old: Any, new: Any) -> list[Any]:
        index = np.flatnonzero(old != new)
        distances = np.diff(index, prepend=-1).astype(np.uint32)
        return [struct.pack("<I", index.size), compressor.compress(distances.tobytes() + new[index].tobytes())]

    def decode(part: bytes, old: Any) -> Any:
        (count,) = struct.unpack_from("<I", part)
        data = zstd.decompress(part[4:], 6 * count)
        values = old.copy()
        index = np.cumsum(np.frombuffer(data, dtype=np.uint32, count=count).astype(np.int64)) - 1
        values[index] = np.frombuffer(data, dtype=np.uint16, offset=4 * count)
        return values

    return _run(measure, context, encode, decode)
