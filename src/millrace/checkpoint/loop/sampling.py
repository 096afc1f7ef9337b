"""The order in which a data set's samples are given to the ranks of a training, as a function of seed, epoch and position.

What every rank takes in a step is decided by the samples that are left of the epoch and by nothing else, so an epoch can
be gone on with from any position, by any number of ranks: together they take each sample that is left, and no other.
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
    """How many of the samples that are `left` all ranks together take in the next step; 0 at the end of the epoch. Pure.

    No rank goes without: where a whole step would leave fewer samples than there are ranks, it takes one less for each.
    """
    whole = world_size * batch_size
    if drop_last:
        return whole if left >= whole else 0
    if batch_size > 1 and whole < left < whole + world_size:
        return whole - world_size
    return min(left, whole)


def rank_share(taken: int, *, rank: int, world_size: int) -> range:
    """The positions that one rank has among the `taken` samples of a step: an even share, the first ranks' one longer. Pure.

    Of fewer samples than ranks some are given to two.
    """
    if taken < world_size:
        first = rank % taken
        return range(first, first + 1)
    each, more = divmod(taken, world_size)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def mixed_seed(*numbers: int) -> int:
    """One seed of 64 bits from several numbers. Sums would make those of neighbouring epochs and ranks meet. Pure."""
    return xxhash.xxh3_64_intdigest(repr(numbers).encode("ascii"))


class ResumableSampler(Sampler):  # type: ignore[misc]
    """Batches of indices for `DataLoader(dataset, batch_sampler=ResumableSampler(dataset, batch_size=32))`.

    A batch sampler for a map-style data set, whose order is a function of (seed, epoch), and which begins where it is
    told. `DataPosition` tells it, and counts. Every rank makes one with the same arguments.

    - `dataset`: anything with a length, or the number of samples.
    - `batch_size`: samples of one rank in one step.
    - `shuffle`, `seed`: an order of its own for every epoch; else that of the data set.
    - `drop_last`: leave out what would be a smaller batch at the epoch's end. Otherwise the last samples are shared
      evenly (batches of two ranks differ by one at most), every rank has as many batches as the others, and none is
      repeated. One exception: of fewer samples than ranks (at `batch_size=1`, or after a resume with more ranks) some
      ranks get the same.
    - `rank`, `world_size`: those of `torch.distributed` unless given.

    A batch sets the generators of Python, numpy and torch in the worker process where it arrives, by seed, epoch, position
    and rank: random augmentation in workers repeats exactly, whichever worker of however many does it. (With
    `num_workers=0` it draws from the process's own generators, which `RandomState` saves.)

    A `Stateful`, in plain numbers. Not thread-safe; it stays in the main process.
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
        # Of the epoch that was asked for last: a hundred million indices take a while to shuffle.
        self._order: tuple[tuple[int, int], Any] | None = None
        self._checksum: tuple[Any, int] | None = None

    def __len__(self) -> int:
        """Steps of a whole epoch, wherever it stands."""
        whole = self.world_size * self.batch_size
        return self.samples // whole if self.drop_last else -(-self.samples // whole)

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator itself: its place is that of now, not of its first batch.
        return self._batches(self.epoch, self.given)

    def set_epoch(self, epoch: int, given: int = 0) -> None:
        """Go to a place: an epoch, and how many of its samples were given to all ranks together."""
        self.epoch, self.given = epoch, given

    def left(self) -> bool:
        """Whether the epoch has another batch."""
        return self._taken(self.given) > 0

    def advance(self) -> None:
        """Count one step of all ranks."""
        self.given += self._taken(self.given)

    def state_dict(self) -> dict[str, Any]:
        """The place: the same on all ranks."""
        # No order to compare at the beginning of an epoch, which so may have another data set.
        order = self._order_checksum(self.epoch) if self.given else 0
        return {"epoch": self.epoch, "given": self.given, "seed": self.seed, "order": order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved place; the seed becomes the saved one.

        Raises `StateMismatchError`, and stays as it was, where the rest of a begun epoch would not be that of the saved one:
        another number of samples, `shuffle`, or a version of torch that shuffles in another way.
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
    """Indices that set the generators of the worker process that they are sent to.

    The only thing of ours that a worker of a stock `DataLoader` gets for each batch is the batch: `worker_init_fn` runs
    once, and with persistent workers only in the first epoch.
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
            # From the same number it would draw what Python's draws.
            other = mixed_seed(seed)
            numpy_random.seed([other & 0xFFFFFFFF, other >> 32])
    return indices
