"""The simple alternative to a checkpoint format: every tensor in blosc2 frames of up to 64 MiB, one file or object each.

No manifest, no checksums, no atomicity: the cost of compression alone, as written by hand in an afternoon.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import CONTENTS, digest, empty_page_cache, parts_of, raw_bytes, tensors_of
from benchmarks.harness import Measure

_FRAME_BYTES = 64 << 20

Write = Callable[[str, bytes], None]
Read = Callable[[str], bytes]


def write_file(path: str, data: bytes) -> None:
    """Write a file and have it synced."""
    with Path(path).open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_file(path: str) -> bytes:
    return Path(path).read_bytes()


def blosc2_save_and_load(
    measure: Measure,
    context: Mapping[str, Any],
    threads: int,
    write: Write = write_file,
    read: Read = read_file,
    *,
    again: bool = False,
) -> dict[str, str]:
    """As `save_and_load`: each content is compressed and written to `place` by so many threads, then read."""
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
    place = context.get("place") or context["scratch"]
    digests = {}
    for name, parts in CONTENTS.items():
        state = parts_of(context["state"], *parts)
        pieces = []
        for number, tensor in enumerate(tensors_of(state)):
            flat = tensor.reshape(-1).view(torch.uint8).numpy()
            for start in range(0, flat.size, _FRAME_BYTES):
                path = f"{place}/{name.replace(' ', '')}-{number}-{start}"
                pieces.append((path, flat[start : start + _FRAME_BYTES], tensor.itemsize))

        def save(piece: tuple[str, Any, int]) -> int:
            path, data, width = piece
            frame = blosc2.compress2(data, typesize=width, **options)
            write(path, frame)
            return len(frame)

        def load(piece: tuple[str, Any, int]) -> None:
            path, data, _ = piece
            blosc2.decompress2(read(path), dst=data, nthreads=1)

        with ThreadPoolExecutor(threads) as pool:
            with measure(f"save {name}" + (", new directory" if again else "")) as figures:
                stored = sum(pool.map(save, pieces))
                figures |= {"MB stored": stored / 1e6, "size to raw": stored / raw_bytes(state)}
                figures["raw GB"] = raw_bytes(state) / 1e9
            if again:
                list(pool.map(save, pieces))
                os.sync()
                with measure(f"save {name}, same directory") as figures:
                    list(pool.map(save, pieces))
                    figures["raw GB"] = raw_bytes(state) / 1e9
            for phase in [f"load {name}"] + ([f"load {name}, from the disk"] if again else []):
                if phase.endswith("disk"):
                    empty_page_cache(Path(place))
                for tensor in tensors_of(state):
                    tensor.fill_(7)
                with measure(phase) as figures:
                    figures["raw GB"] = raw_bytes(state) / 1e9
                    list(pool.map(load, pieces))
        digests[name] = digest(state)
    return digests
