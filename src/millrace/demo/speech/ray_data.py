"""The splits of a run through Ray Data, shared out among the workers of Ray Train.

Nothing is kept between epochs: every pass opens and reads the clips again. That is what a training job does whose data set
does not fit into memory, and what the cache below is for. Nothing is materialised either, so nothing is lost with a node.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs
import ray
import ray.data
import ray.train
from ray.data.block import BlockMetadata
from ray.data.collate_fn import ArrowBatchCollateFn
from ray.data.datasource import ReadTask

from millrace.cluster import read_near
from millrace.demo.speech.batches import PREPARED, ClipBatch, batch_of
from millrace.demo.speech.data import SplitSource, table_of
from millrace.demo.speech.families.protocol import Family

CLIPS_A_TASK = 64
"""One read task takes about a tenth of a second of CPU: well above what scheduling it costs."""
_READERS = 8
"""Threads of a task that fetch clips, whose way may be long, while it decodes others."""
_TASKS_A_WORKER = 4
_FEWEST_CLIPS = 8


def dataset_of(source: SplitSource, *, workers: int, cpus_to_spare: bool = True) -> ray.data.Dataset:
    """A lazy data set of prepared clips, for so many workers. Without `cpus_to_spare` its tasks ask for no CPU."""
    paths = source.paths()
    # Whole blocks are shared out: few clips in each, where there are few, so that the shares are about equal.
    clips_a_task = min(CLIPS_A_TASK, max(_FEWEST_CLIPS, -(-len(paths) // (_TASKS_A_WORKER * workers))))
    # Tasks that ask for nothing are not held back by what there is, so their number is.
    asked: dict[str, Any] = {} if cpus_to_spare else {"num_cpus": 0, "concurrency": max(2, workers)}
    by_path = dict(zip(paths, source.clips, strict=True))

    def read(paths: Sequence[str], *, filesystem: pyarrow.fs.FileSystem, **options: Any) -> ray.data.Dataset:
        near = source.only([by_path[path] for path in paths])
        return ray.data.read_datasource(ClipDatasource(near), **options)

    blocks = max(2, -(-len(paths) // clips_a_task))
    return read_near(read, paths, filesystem=source.data.fs, override_num_blocks=blocks, **asked)


class ClipDatasource(ray.data.Datasource):  # type: ignore[misc]
    """The prepared clips of a split for Ray Data: fetched, decoded and made into features by tasks that know only their own.

    `read_binary_files` and a `map_batches` behind it would do as well, but for what every task would have to carry: the
    sentences of the whole split.
    """

    def __init__(self, source: SplitSource) -> None:
        super().__init__()
        self._source = source

    def get_name(self) -> str:
        """As Ray's dashboard shows it."""
        return "Clips"

    def estimate_inmemory_data_size(self) -> int | None:
        """Not known before the clips are decoded."""
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """As Ray Data calls it, anew for every pass: the clips in an order of this pass, in so many tasks.

        The passes are counted by attempt, so a resumed run begins again with the order of its first epoch.
        """
        source, clips = self._source, list(self._source.clips)
        if source.shuffle_seed is not None:
            execution = 0 if data_context is None else data_context._execution_idx
            np.random.default_rng((source.shuffle_seed, execution)).shuffle(clips)
        tasks = max(1, min(parallelism, len(clips)))
        parts = (clips[len(clips) * task // tasks : len(clips) * (task + 1) // tasks] for task in range(tasks))
        # How many of the clips are usable is not known yet.
        nothing = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [
            ReadTask(partial(_read, source.only(part)), nothing, schema=PREPARED, per_task_row_limit=per_task_row_limit)
            for part in parts
        ]


def _read(source: SplitSource) -> list[pa.Table]:
    with ThreadPoolExecutor(_READERS, thread_name_prefix="clips") as pool:
        encoded = pool.map(source.read, source.clips)
        return [table_of(source.row(clip, content) for clip, content in zip(source.clips, encoded, strict=True))]


class EveryClipOnce(ray.train.DataConfig):  # type: ignore[misc]
    """Shares out `SplitSource`s among the workers, every clip to one of them.

    Ray Train's own way makes the shares equal, and drops what is left over. Called anew for every worker group, with the
    nodes that are there then.
    """

    def __init__(self, *, cpus_per_worker: int) -> None:
        super().__init__(datasets_to_split="all")
        self._cpus_per_worker = cpus_per_worker

    def configure(
        self,
        datasets: dict[str, SplitSource],
        world_size: int,
        worker_handles: Any,
        worker_node_ids: list[str] | None,
        **_: Any,
    ) -> list[dict[str, ray.data.DataIterator]]:
        """As Ray Train calls it: by worker, its iterator of each data set."""
        shares: list[dict[str, ray.data.DataIterator]] = [{} for _ in range(world_size)]
        cpus = sum(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"])
        for name, source in datasets.items():
            # A worker group may hold every CPU that is left when a node is lost. Then reading has to do without, or both
            # would wait for each other.
            to_spare = cpus - world_size * self._cpus_per_worker >= 1
            dataset = dataset_of(source, workers=world_size, cpus_to_spare=to_spare)
            dataset.set_name(name)
            dataset.context.execution_options = copy.deepcopy(self.default_ingest_options())
            iterators = dataset.streaming_split(world_size, equal=False, locality_hints=worker_node_ids)
            for share, iterator in zip(shares, iterators, strict=True):
                share[name] = iterator
        return shares


class RayFeed:
    """A worker's batches through Ray Train."""

    def __init__(self, family: Family) -> None:
        self._collate = _Collate(family)

    def batches(self, split: str, *, epoch: int, size: int) -> Iterator[ClipBatch]:
        """This worker's share of a split; ready ahead of the loop."""
        shard = ray.train.get_dataset_shard(split)
        return iter(
            shard.iter_torch_batches(batch_size=size, collate_fn=self._collate, prefetch_batches=2, device="cpu")
        )


class _Collate(ArrowBatchCollateFn):  # type: ignore[misc]
    def __init__(self, family: Family) -> None:
        super().__init__()
        self._family = family

    def __call__(self, batch: pa.Table) -> ClipBatch:
        return batch_of(batch, self._family)
