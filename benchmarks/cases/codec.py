"""The codec on one core, by kind of tensor: gigabytes of input per second of CPU, and size."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from benchmarks.checkpoints import trained, use_loops
from benchmarks.harness import Case, Measure, Options, Prepared

_KINDS = {"bf16": 2, "fp32": 4, "exp_avg": 4, "exp_avg_sq": 4}
_ROWS = "exp_avg_sq, heavy-tailed rows"
_PASSES = 5


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    file, about = trained(options)
    chunks = 4 if options.quick else 32
    yield Prepared(
        {"state": str(file), "chunks": chunks},
        notes=(
            f"Up to {chunks} chunks of 1 MiB of each kind, spread evenly over a really trained state. {about}",
            f"{_ROWS}: made up, rows of 1024 values whose scales vary by e^2, means of 20 squares.",
            f"GB/s of input by the CPU time of the one thread, median of {_PASSES} passes; decoded bytes are compared.",
            "zstd %: the share of zstd in the CPU time, trials on samples included; timed in passes of its own.",
        ),
    )


case = Case(name="codec", title="The codec on one core", prepare=prepare, baseline="zstd level 3")

# Encodes a chunk of elements of so many bytes, and decodes what it returned into memory.
Encode = Callable[[Any, int], Sequence[Any]]
Decode = Callable[[bytes, int, Any], None]


def _chunks(context: Mapping[str, Any]) -> Iterator[tuple[str, int, list[Any]]]:
    import numpy as np
    import torch

    whole, most = torch.load(context["state"], mmap=True), context["chunks"]
    for name, width in _KINDS.items():
        flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in whole[name].values()]).numpy()
        count = min(most, flat.size >> 20)
        starts = np.linspace(0, (flat.size >> 20) - 1, count).astype(int)
        yield name, width, [flat[start << 20 : (start + 1) << 20].copy() for start in starts]
    generator = np.random.default_rng(0)
    rows = generator.chisquare(20, (256 * most, 1024)) * np.exp(4 * generator.standard_normal((256 * most, 1)))
    yield _ROWS, 4, list(rows.astype(np.float32).view(np.uint8).reshape(most, -1))


def _run(measure: Measure, context: Mapping[str, Any], encode: Encode, decode: Decode) -> dict[str, str]:
    import numpy as np
    import xxhash

    digests = {}
    for name, width, chunks in _chunks(context):
        raw_bytes = sum(chunk.size for chunk in chunks)
        out = np.empty(1 << 20, dtype=np.uint8)
        stored = [b"".join(encode(chunk, width)) for chunk in chunks]

        def encode_one(chunk: Any, width: int = width) -> object:
            return encode(chunk, width)

        def decode_one(data: bytes, width: int = width, out: Any = out) -> None:
            decode(data, width, out)

        shares = _zstd_percent(encode_one, chunks), _zstd_percent(decode_one, stored)
        with measure(f"encode {name}") as figures:
            figures["GB/s"] = _speed(raw_bytes, encode_one, chunks)
            figures["size to raw"] = sum(map(len, stored)) / raw_bytes
            figures["zstd %"] = shares[0]
        with measure(f"decode {name}") as figures:
            figures["GB/s"] = _speed(raw_bytes, decode_one, stored)
            figures["zstd %"] = shares[1]
        whole = xxhash.xxh3_128()
        for data in stored:
            out.fill(7)
            decode(data, width, out)
            whole.update(out)
        digests[name] = whole.hexdigest()
    return digests


def _speed(raw_bytes: int, work: Callable[[Any], object], items: Sequence[Any]) -> float:
    seconds = []
    for _ in range(_PASSES):
        began = time.thread_time()
        for item in items:
            work(item)
        seconds.append(time.thread_time() - began)
    return raw_bytes / statistics.median(seconds) / 1e9


def _zstd_percent(work: Callable[[Any], object], items: Sequence[Any]) -> float:
    """The share of the calls of zstd in the CPU time of `work`."""
    from millrace.checkpoint.codec import zstd

    inside = 0.0

    def timed(call: Callable[..., bytes]) -> Callable[..., bytes]:
        def wrapper(*arguments: Any) -> bytes:
            nonlocal inside
            began = time.thread_time()
            result = call(*arguments)
            inside += time.thread_time() - began
            return result

        return wrapper

    with (
        mock.patch.object(zstd.Compressor, "compress", timed(zstd.Compressor.compress)),
        mock.patch.object(zstd, "decompress", timed(zstd.decompress)),
    ):
        began = time.thread_time()
        for _ in range(_PASSES):
            for item in items:
                work(item)
        return 100 * inside / (time.thread_time() - began)


@case.contender("memory copy")
def memory_copy(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    import numpy as np

    memory = np.empty(1 << 20, dtype=np.uint8)

    def encode(chunk: Any, width: int) -> list[Any]:
        np.copyto(memory, chunk)
        return [memory.data]

    def decode(data: bytes, width: int, out: Any) -> None:
        np.copyto(out, np.frombuffer(data, dtype=np.uint8))

    return _run(measure, context, encode, decode)


@case.contender("zstd level 3")
def zstd_level_3(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    import numpy as np

    from millrace.checkpoint.codec import zstd

    compressor = zstd.at_level(3)

    def decode(data: bytes, width: int, out: Any) -> None:
        out[:] = np.frombuffer(zstd.decompress(data, out.size), dtype=np.uint8)

    return _run(measure, context, lambda chunk, width: [compressor.compress(chunk.data)], decode)


def _millrace(measure: Measure, context: Mapping[str, Any], level: int, *, compiled: bool = False) -> dict[str, str]:
    from millrace.checkpoint.codec.chunks import Effort, Kind
    from millrace.checkpoint.codec.planes import PlaneCodec

    use_loops(compiled)
    codec, effort = PlaneCodec(), Effort(level)
    return _run(
        measure,
        context,
        lambda chunk, width: codec.encode(chunk.data, Kind(width, True), effort=effort),
        lambda data, width, out: codec.decode(data, Kind(width, True), out.data),
    )


@case.contender("Millrace")
def typed(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _millrace(measure, context, 1)


@case.contender("Millrace, compiled loops")
def compiled(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    """With the library numba, as in a process that has coded 4 GiB."""
    return _millrace(measure, context, 1, compiled=True)


@case.contender("Millrace max")
def most(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _millrace(measure, context, 2)
