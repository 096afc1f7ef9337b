"""The order of a data set's samples for the ranks of a training, as a function of seed, epoch and position.

The samples of each rank in a step depend only on the rest of the epoch. So an epoch can continue from any position with any
number of ranks: together they take each remaining sample, and no other.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

import torch
import xxhash
from torch.utils.data import Sampler, get_worker_info

from millrace.errors import ConfigurationError, StateMismatchError


def step_samples(left: int, *, world_size: int, batch_size: int, drop_last: bool) -> int:
    """The number of the samples `left` that all ranks together take in the next step; 0 at the end of the epoch. Pure.

    Every rank always gets a sample: if a whole step would leave fewer samples than ranks, each rank takes one less.
    """
    whole = world_size * batch_size
    if drop_last:
        return whole if left >= whole else 0
    if batch_size > 1 and whole < left < whole + world_size:
        return whole - world_size
    return min(left, whole)


def rank_share(taken: int, *, rank: int, world_size: int) -> range:
    """The positions of one rank among the `taken` samples of a step: equal shares, one longer on the first ranks. Pure.

    With fewer samples than ranks, some samples are given to two ranks.
    """
    if taken < world_size:
        first = rank % taken
        return range(first, first + 1)
    each, more = divmod(taken, world_size)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def mixed_seed(*numbers: int) -> int:
    """One seed of 64 bits from several numbers; with sums, neighbouring epochs and ranks would share seeds. Pure."""
    return xxhash.xxh3_64_intdigest(repr(numbers).encode("ascii"))


class ResumableSampler(Sampler):  # type: ignore[misc]
    """Batches of indices for `DataLoader(dataset, batch_sampler=ResumableSampler(dataset, batch_size=32))`.

    A batch sampler for a map-style data set, with an order that is a function of (seed, epoch), from any position.
    `DataPosition` sets the position, and counts. Every rank creates one with the same arguments.

    - `dataset`: anything with a length, or the number of samples.
    - `batch_size`: samples of one rank in one step.
    - `shuffle`, `seed`: a different order for every epoch; otherwise that of the data set.
    - `drop_last`: leave out a smaller last batch of an epoch. Otherwise the last samples are shared evenly (batches of two
      ranks differ by one sample at most), every rank has the same number of batches, and no sample is repeated. One
      exception: with fewer samples than ranks (at `batch_size=1`, or after a resume with more ranks) some ranks get the
      same sample.
    - `rank`, `world_size`: those of `torch.distributed` unless given.

    A batch sets the generators of Python, numpy and torch in the worker process that receives it, by seed, epoch, position
    and rank. So random augmentation in workers repeats exactly, for any number of workers. (With `num_workers=0` it uses
    the process's own generators, which `RandomState` saves.)

    A `Stateful` of plain numbers. Not thread-safe; for the main process only.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.samples = dataset if isinstance(dataset, int) else len(dataset)
        self.batch_size, self.shuffle, self.seed, self.drop_last = batch_size, shuffle, seed, drop_last
        self.rank = rank if rank is not None else torch.distributed.get_rank() if distributed else 0
        self.world_size = (
            world_size if world_size is not None else torch.distributed.get_world_size() if distributed else 1
        )
        if batch_size < 1 or self.samples < 0:
            raise ConfigurationError(
                f"batches of {batch_size} from {self.samples} samples", next_step="give a positive batch_size"
            )
        if not 0 <= self.rank < self.world_size:
            raise ConfigurationError(
                f"rank {self.rank} of {self.world_size}", next_step="give rank and world_size, or neither"
            )
        self.epoch = self.given = 0
        # The order of the last used epoch: a hundred million indices take a while to shuffle.
        self._order: tuple[tuple[int, int], Any] | None = None
        self._checksum: tuple[Any, int] | None = None

    def __len__(self) -> int:
        """Steps of a whole epoch, at any position."""
        whole = self.world_size * self.batch_size
        return self.samples // whole if self.drop_last else -(-self.samples // whole)

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator itself: the position is taken now, not at the first batch.
        return self._batches(self.epoch, self.given)

    def set_epoch(self, epoch: int, given: int = 0) -> None:
        """Set the position: an epoch, and the number of its samples that all ranks together have received."""
        self.epoch, self.given = epoch, given

    def left(self) -> bool:
        """Whether the epoch has another batch."""
        return self._taken(self.given) > 0

    def advance(self) -> None:
        """Count one step of all ranks."""
        self.given += self._taken(self.given)

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on all ranks."""
        # At the beginning of an epoch there is no order to compare, so the data set may change there.
        order = self._order_checksum(self.epoch) if self.given else 0
        return {"epoch": self.epoch, "given": self.given, "seed": self.seed, "order": order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set a saved position and its seed.

        Raises `StateMismatchError`, without a change, if the rest of a begun epoch would be different: another number of
        samples or `shuffle`, or a version of torch that shuffles differently.
        """
        before = self.seed
        self.seed = int(state["seed"])
        epoch, given = int(state["epoch"]), int(state["given"])
        if given and self._order_checksum(epoch) != int(state["order"]):
            self.seed = before
            raise StateMismatchError(
                f"the checkpoint was saved after {given} samples of an epoch, in another order than that of these "
                f"{self.samples} samples with shuffle={self.shuffle}",
                next_step="resume with the same data set, shuffle and version of torch, or from the end of an epoch",
            )
        self.set_epoch(epoch, given)

    # --- inside -----------------------------------------------------------------------------------

    def _taken(self, given: int) -> int:
        return step_samples(
            self.samples - given, world_size=self.world_size, batch_size=self.batch_size, drop_last=self.drop_last
        )

    def _batches(self, epoch: int, given: int) -> Iterator[list[int]]:
        order = self._order_of(epoch)
        while taken := self._taken(given):
            share = rank_share(taken, rank=self.rank, world_size=self.world_size)
            indices = order[given + share.start : given + share.stop]
            yield _Batch(indices.tolist(), seed=mixed_seed(self.seed, epoch, given, self.rank))
            given += taken

    def _order_of(self, epoch: int) -> Any:
        """The indices of an epoch, as a tensor."""
        if self._order is None or self._order[0] != (self.seed, epoch):
            if self.shuffle:
                generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch))
                order = torch.randperm(self.samples, generator=generator)
            else:
                order = torch.arange(self.samples)
            self._order = (self.seed, epoch), order
        return self._order[1]

    def _order_checksum(self, epoch: int) -> int:
        order = self._order_of(epoch)
        if self._checksum is None or self._checksum[0] is not order:
            self._checksum = order, xxhash.xxh3_64_intdigest(order.numpy())
        return self._checksum[1]


class _Batch(list[int]):
    """Indices that set the generators of the worker process that receives them.

    A worker of a stock `DataLoader` receives nothing but the batch for each batch: `worker_init_fn` runs once, and with
    persistent workers only in the first epoch.
    """

    def __init__(self, indices: Iterable[int], *, seed: int) -> None:
        super().__init__(indices)
        self.seed = seed

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return _arrive, (list(self), self.seed)


def _arrive(indices: Sequence[int], seed: int) -> Sequence[int]:
    if get_worker_info() is not None:
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None:
            # With the same seed it would return the same numbers as Python's generator.
            other = mixed_seed(seed)
            numpy_random.seed([other & 0xFFFFFFFF, other >> 32])
    return indices
