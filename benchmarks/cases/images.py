"""Epochs over many small images through Ray Data: with the cache, without it, and from the local disk."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import Case, Options, Prepared
from benchmarks.ray_epochs import LOCAL, add_contenders, behind_the_region

_SIDE = 176  # pixels; noise at this size is a JPEG of some 27 KB


def write_images(folder: Path, count: int) -> int:
    """Write JPEGs of noise (a hundred different ones, again and again); returns their bytes."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    encoded = []
    for _ in range(100):
        buffer = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (_SIDE, _SIDE, 3), dtype=np.uint8)).save(buffer, "JPEG", quality=90)
        encoded.append(buffer.getvalue())
    for number in range(count):
        (folder / f"{number:06}.jpg").write_bytes(encoded[number % len(encoded)])
    return sum(len(encoded[number % len(encoded)]) for number in range(count))


def read_pixels(path: str, filesystem: Any) -> list[int]:
    """One epoch: the number of images, and the sum of one pixel of each."""
    import ray.data

    images = total = 0
    for batch in ray.data.read_images(path, filesystem=filesystem).iter_batches(batch_format="numpy", batch_size=256):
        images += len(batch["image"])
        total += int(batch["image"][:, 0, 0, 0].sum())
    return [images, total]


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    count = 1_000 if options.quick else 20_000
    local = options.scratch / "train"
    local.mkdir()
    size = write_images(local, count)
    with behind_the_region(
        options,
        local,
        epochs=2 if options.quick else 3,
        expected=_expected(local),
        object_store_bytes=1 << 30,
        note=f"{count} JPEGs, {size / 1e6:.0f} MB",
    ) as prepared:
        yield prepared


def _expected(folder: Path) -> list[int]:
    """What every epoch must find, read without Ray."""
    import numpy as np
    from PIL import Image

    files = sorted(folder.iterdir())
    first = [int(np.asarray(Image.open(file))[0, 0, 0]) for file in files[:100]]
    return [len(files), sum(first[number % 100] for number in range(len(files)))]


case = Case(name="images", title="Epochs over small images through Ray Data", prepare=prepare, baseline=LOCAL, rounds=1)
add_contenders(case, read_pixels)
