"""Known reading orders, and how a `Prefetch` follows a reader that is somewhere else.

Data sets and training code stay as they are: the order comes from the sampler that a DataLoader is given, or from the list
of files that Ray Data reads. Imports neither torch nor ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    from millrace.filesystem.managing import CacheManagement

T = TypeVar("T")


class PrefetchingSampler(Generic[T]):
    """A sampler, or batch sampler, for torch's `DataLoader` that has the files of the coming indices fetched ahead.

        sampler = PrefetchingSampler(RandomSampler(dataset), fs, path_of=lambda index: dataset.paths[index])
        loader = DataLoader(dataset, sampler=sampler, num_workers=8)

    It gives the same indices as `sampler`, which must be finite: each pass asks it for all of them at its beginning. The
    sampler runs in the process of the loop, whatever `num_workers` and start method; there the files are fetched into the
    node's cache, and the workers find them. The reader is taken to be where the sampler is, which is ahead of the workers by
    `num_workers * prefetch_factor` batches. `path_of` names the file of an index, or None for no file; it is called twice
    for each. `window` is that of `fs.prefetch`. The prefetch of a pass ends with the pass.
    """

    def __init__(
        self,
        sampler: Iterable[T],
        fs: CacheManagement,
        *,
        path_of: Callable[[Any], str | None],
        window: int | str = "1GB",
    ) -> None:
        self.sampler = sampler
        self._fs = fs
        self._path_of = path_of
        self._window = window

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        order = list(self.sampler)
        paths = without_repeats(path for item in order for path in self._paths_of(item))
        with self._fs.prefetch(paths, window=self._window, follow_opens=False) as prefetch:
            last: str | None = None
            for item in order:
                for path in self._paths_of(item):
                    if path != last:
                        prefetch.advance(path)
                        last = path
                yield item

    def set_epoch(self, epoch: int) -> None:
        """Hand the epoch on, as `DistributedSampler` wants it."""
        self.sampler.set_epoch(epoch)  # type: ignore[attr-defined]

    def _paths_of(self, item: Any) -> Iterator[str]:
        for index in item if isinstance(item, list | tuple) else (item,):
            path = self._path_of(index)
            if path is not None:
                yield path


def following(
    batches: Iterable[T],
    paths: Iterable[str],
    fs: CacheManagement,
    *,
    path_of: Callable[[T], str],
    window: int | str = "1GB",
) -> Iterator[T]:
    """Give `batches` on, and have their files fetched ahead of them, in the order `paths`.

    For readers in other processes of this node, such as Ray Data's tasks:

        paths = ray_file_order(sorted(fs.find("s3://bucket/train")), seed=7)
        ds = ray.data.read_parquet(paths, filesystem=fs, include_paths=True)
        for batch in following(ds.iter_batches(), paths, fs, path_of=lambda batch: batch["path"][-1]): ...

    `path_of` names a file that a batch came from. The tasks are ahead of the batches, so the window should hold what they
    read at a time, and more.
    """
    with fs.prefetch(paths, window=window, follow_opens=False) as prefetch:
        last: str | None = None
        for batch in batches:
            path = str(path_of(batch))
            if path != last:
                prefetch.advance(path)
                last = path
            yield batch


def ray_file_order(
    paths: Sequence[str], *, seed: int, execution: int = 0, reseed_after_execution: bool = True
) -> list[str]:
    """The order in which Ray Data's read tasks take `paths` with `shuffle=FileShuffleConfig(seed, reseed_after_execution)`.

    `paths` are in the order in which Ray lists them (sorted). `execution` counts how often the data set was read before. Ray
    hands them out in this order to as many tasks as run at a time; `shuffle="files"` without a seed cannot be foretold.
    """
    chosen = hash((seed, execution)) % (2**32) if reseed_after_execution else seed
    rows = [(path,) for path in paths]  # as Ray has them: numpy shuffles a list of rows by swapping
    np.random.default_rng(chosen).shuffle(rows)
    return [path for (path,) in rows]


def without_repeats(paths: Iterable[str]) -> Iterator[str]:
    """`paths` with each run of the same path as one: of many samples in one file the file counts once."""
    last: str | None = None
    for path in paths:
        if path != last:
            yield path
        last = path
