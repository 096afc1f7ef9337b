"""Known reading orders, for a `Prefetch` that follows a reader in another process.

Data sets and training code do not change: the order comes from the sampler of a DataLoader, or from the list of files that
Ray Data reads. Imports neither torch nor ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    from millrace.filesystem.managing import CacheManagement
    from millrace.filesystem.prefetching import Prefetch

T = TypeVar("T")


class PrefetchingSampler(Generic[T]):
    """A sampler, or batch sampler, for torch's `DataLoader` that prefetches the files of the coming indices.

        sampler = PrefetchingSampler(RandomSampler(dataset), fs, path_of=lambda index: dataset.paths[index])
        loader = DataLoader(dataset, sampler=sampler, num_workers=8)

    It yields the same indices as `sampler`, which must be finite: each pass reads all of them at its start. The sampler runs
    in the process of the loop, with any `num_workers` and start method; it fetches the files into the node's cache, where
    the workers find them. The position of the sampler counts as that of the reader; it is ahead of the workers by
    `num_workers * prefetch_factor` batches. `path_of` returns the file of an index, or None for no file; it is called twice
    per index. `window` is that of `fs.prefetch`. The prefetch of a pass ends with the pass.
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
        yield from _advancing(order, self._paths_of, self._fs.prefetch(paths, window=self._window, follow_opens=False))

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the sampler, for a `DistributedSampler`."""
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
    """Yield `batches`, and prefetch their files in the order of `paths`.

    For readers in other processes of this node, such as Ray Data's tasks:

        paths = ray_file_order(sorted(fs.find("s3://bucket/train")), seed=7)
        ds = ray.data.read_parquet(paths, filesystem=fs, include_paths=True)
        for batch in following(ds.iter_batches(), paths, fs, path_of=lambda batch: batch["path"][-1]): ...

    `path_of` returns a file of the batch. The tasks are ahead of the batches, so the window should be larger than the bytes
    that they read at the same time.
    """
    prefetch = fs.prefetch(paths, window=window, follow_opens=False)
    yield from _advancing(batches, lambda batch: (str(path_of(batch)),), prefetch)


def _advancing(items: Iterable[T], paths_of: Callable[[T], Iterable[str]], prefetch: Prefetch) -> Iterator[T]:
    """Yield `items`, and advance `prefetch` to the paths of each before it."""
    with prefetch:
        last: str | None = None
        for item in items:
            for path in paths_of(item):
                if path != last:
                    prefetch.advance(path)
                    last = path
            yield item


def ray_file_order(
    paths: Sequence[str], *, seed: int, execution: int = 0, reseed_after_execution: bool = True
) -> list[str]:
    """The order in which Ray Data's read tasks take `paths` with `shuffle=FileShuffleConfig(seed, reseed_after_execution)`.

    `paths` are in the order in which Ray lists them (sorted). `execution` is the number of earlier reads of the data set.
    Ray assigns them in this order to its tasks; the order of `shuffle="files"` without a seed is unpredictable.
    """
    chosen = hash((seed, execution)) % (2**32) if reseed_after_execution else seed
    rows = [(path,) for path in paths]  # like Ray: numpy shuffles a list of rows by swapping
    np.random.default_rng(chosen).shuffle(rows)
    return [path for (path,) in rows]


def without_repeats(paths: Iterable[str]) -> Iterator[str]:
    """`paths` without consecutive repeats, for files with many samples."""
    last: str | None = None
    for path in paths:
        if path != last:
            yield path
        last = path
