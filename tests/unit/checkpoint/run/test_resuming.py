"""Positions in the data and random generators: a resumed run compared with an uninterrupted one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from millrace.checkpoint import DataPosition, EpochPosition, RandomState, ResumableSampler
from millrace.checkpoint.run.resuming import OptionalKeys
from millrace.checkpoint.run.sampling import rank_share, step_samples
from millrace.errors import ConfigurationError, MissingError, StateMismatchError, UsageError

SAMPLES = 23


class Noisy(Dataset):
    """Each sample is its index and the draws of the three generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, torch.rand(()).item(), float(np.random.rand()), random.random()


Make = Callable[[], DataPosition]


def own(**options: Any) -> Make:
    """Positions over a loader with our sampler."""
    sampling = {name: options.pop(name) for name in ("drop_last", "shuffle") if name in options}
    return lambda: DataPosition(
        DataLoader(Noisy(), batch_sampler=ResumableSampler(Noisy(), batch_size=4, seed=3, **sampling), **options)
    )


def stock(**options: Any) -> Make:
    """Positions over a loader as everybody makes it."""
    return lambda: DataPosition(DataLoader(Noisy(), batch_size=4, **options), seed=3)


LOADERS = {
    "own": own(),
    "own, in order, without the rest": own(shuffle=False, drop_last=True),
    "stock, shuffled": stock(shuffle=True),
    "stock, without the rest": stock(shuffle=True, drop_last=True),
    "stock, in order": stock(),
    "stock, distributed": stock(sampler=DistributedSampler(Noisy(), num_replicas=1, rank=0, seed=9)),
    "two workers": own(num_workers=2),
    "two persistent workers": stock(shuffle=True, num_workers=2, persistent_workers=True, prefetch_factor=4),
}


def epoch(position: DataPosition) -> list[Any]:
    return [[part.tolist() for part in batch] for batch in position]


def indices(batches: list[Any]) -> list[int]:
    return [index for batch in batches for index in batch[0]]


def seeded() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)


# --- one process ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADERS)
def test_resumed_loader_returns_the_remaining_samples(name: str) -> None:
    make = LOADERS[name]
    seeded()
    states, whole = [], []
    position, generators = make(), RandomState()
    begun = [(position.state_dict(), generators.state_dict())]
    for _ in range(3):
        for batch in position:
            whole.append([part.tolist() for part in batch])
            states.append((position.state_dict(), generators.state_dict()))
    end = position.state_dict()
    per_epoch = len(position)
    assert len(whole) == 3 * per_epoch
    assert (end["epoch"], end["given"]) == (3, 0)
    for number in (0, 1, 4, 5, 6, 9, len(whole)) if "workers" in name else range(len(whole) + 1):
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)
        resumed, generators = make(), RandomState()
        where, drawn = [*begun, *states][number]
        resumed.load_state_dict(where)
        generators.load_state_dict(drawn)
        rest = []
        while resumed.epoch < 3:
            rest += epoch(resumed)
        assert rest == whole[number:], number
        assert resumed.state_dict() == end


@pytest.mark.parametrize("name", LOADERS)
def test_epoch_returns_every_sample_once(name: str) -> None:
    position = LOADERS[name]()
    first, second = epoch(position), epoch(position)
    dropped = SAMPLES % 4 if "without" in name else 0
    assert len(first) == len(second) == len(position)
    for given in (indices(first), indices(second)):
        assert len(given) == len(set(given)) == SAMPLES - dropped
    assert (indices(first) == indices(second)) == ("in order" in name)


def test_loop_left_early_is_continued() -> None:
    position = LOADERS["two persistent workers"]()
    given = []
    for batch in position:
        given += batch[0].tolist()
        if len(given) == 8:
            break
    assert (position.epoch, position.given) == (0, 8)
    given += indices(epoch(position))
    assert sorted(given) == list(range(SAMPLES))
    assert position.epoch == 1


def test_state_after_the_last_batch_starts_the_next_epoch() -> None:
    position = LOADERS["own"]()
    for _ in position:
        state = position.state_dict()
    assert (state["epoch"], state["given"]) == (0, SAMPLES)
    resumed = LOADERS["own"]()
    resumed.load_state_dict(state)
    resumed._loader = None  # it is not iterated: its workers take a second to start
    assert epoch(resumed) == []
    assert resumed.epoch == 1


@pytest.mark.parametrize("name", LOADERS)
def test_start_of_an_epoch_keeps_the_random_state_of_the_process(name: str) -> None:
    # Samples that are made here, without workers, may draw: so only the making of the iterator is looked at.
    before = torch.get_rng_state()
    position = LOADERS[name]()
    if "workers" in name:
        epoch(position)
        epoch(position)
    else:
        position._loader.collate_fn = lambda batch: batch
        position._loader.dataset.__class__.__getitem__, draw = (lambda _, index: index), Noisy.__getitem__
        try:
            list(position)
        finally:
            Noisy.__getitem__ = draw
    assert torch.equal(torch.get_rng_state(), before)


def test_augmentation_in_workers_does_not_depend_on_their_number_or_the_process() -> None:
    seeded()
    one = epoch(own(num_workers=1)())
    torch.manual_seed(77)
    assert epoch(own(num_workers=2, generator=torch.Generator().manual_seed(5))()) == one
    drawn = [number for batch in one for part in batch[1:] for number in part]
    assert len(set(drawn)) == len(drawn)


class WorkerSeeds(Noisy):
    """The seed of the worker before its first batch."""

    def __getitem__(self, index: int) -> int:
        return get_worker_info().seed - get_worker_info().id


def test_worker_seeds_depend_only_on_seed_and_epoch() -> None:
    def begun(**options: Any) -> list[int]:
        sampler = ResumableSampler(SAMPLES, batch_size=12, seed=3)
        position = DataPosition(DataLoader(WorkerSeeds(), batch_sampler=sampler, num_workers=1, **options))
        return [int(batch[0]) for _ in range(2) for batch in position]

    seeds = begun()
    assert len(set(seeds)) == 2
    assert begun(generator=torch.Generator().manual_seed(8)) == seeds


def test_new_loop_or_loaded_state_ends_the_running_loop() -> None:
    position = LOADERS["own"]()
    first = iter(position)
    next(first)
    state = position.state_dict()
    second = iter(position)
    next(second)
    with pytest.raises(UsageError, match="begin a new one"):
        next(first)
    position.load_state_dict(state)
    with pytest.raises(UsageError, match="begin a new one"):
        next(second)
    assert len(indices(epoch(position))) == SAMPLES - 4


# --- several ranks --------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_ranks_together_take_the_remaining_samples(world: int, batch_size: int, drop_last: bool) -> None:
    for left in range(60):
        taken, steps = 0, 0
        while step := step_samples(left - taken, world_size=world, batch_size=batch_size, drop_last=drop_last):
            shares = [rank_share(step, rank=rank, world_size=world) for rank in range(world)]
            assert all(1 <= len(share) <= batch_size for share in shares)
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
            positions = [position for share in shares for position in share]
            assert set(positions) == set(range(step))
            assert len(positions) == step or (batch_size == 1 or left < world)
            taken, steps = taken + step, steps + 1
        assert left - taken == (left % (world * batch_size) if drop_last else 0)
        assert steps == len(
            ResumableSampler(left, batch_size=batch_size, drop_last=drop_last, rank=0, world_size=world)
        )


def ranks(world: int, **options: Any) -> list[ResumableSampler]:
    return [
        ResumableSampler(101, batch_size=4, seed=5, rank=rank, world_size=world, **options) for rank in range(world)
    ]


def steps(samplers: list[ResumableSampler], limit: int | None = None) -> Iterator[list[int]]:
    for number, batches in enumerate(zip(*samplers, strict=True)):
        if number == limit:
            return
        for sampler in samplers:
            sampler.advance()
        yield [index for batch in batches for index in batch]


def test_other_number_of_ranks_takes_the_same_samples() -> None:
    alone = [index for batch in steps(ranks(1)) for index in batch]
    for before, after in ((1, 3), (3, 1), (3, 2), (2, 8)):
        first = ranks(before)
        given = [index for batch in steps(first, limit=5) for index in batch]
        assert len({str(sampler.state_dict()) for sampler in first}) == 1
        resumed = ranks(after)
        for sampler in resumed:
            sampler.load_state_dict(first[0].state_dict())
        rest = [index for batch in steps(resumed) for index in batch]
        # The order of the whole training is that of the epoch, for any number of ranks.
        assert given + rest == alone


def test_distributed_sampler_defines_rank_and_order() -> None:
    loaders = [
        DataLoader(
            Noisy(), batch_size=4, sampler=DistributedSampler(Noisy(), num_replicas=2, rank=rank, shuffle=rank < 0)
        )
        for rank in range(2)
    ]
    given = [indices(epoch(DataPosition(loader))) for loader in loaders]
    assert sorted(given[0] + given[1]) == list(range(SAMPLES))
    assert given[0][:4] == [0, 1, 2, 3]
    assert given[1][:4] == [4, 5, 6, 7]


# --- what cannot be resumed -----------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


@pytest.mark.parametrize(
    ("loader", "next_step"),
    [
        ([1, 2, 3], "EpochPosition"),
        (DataLoader(Stream()), "EpochPosition"),
        (DataLoader(Noisy(), batch_size=None), "batch_sampler=ResumableSampler"),
        (DataLoader(Noisy(), sampler=WeightedRandomSampler([1.0] * SAMPLES, 5)), "batch_sampler=ResumableSampler"),
        (DataLoader(Noisy(), sampler=ResumableSampler(Noisy(), batch_size=2)), "batch_sampler=ResumableSampler"),
        (DataLoader(Noisy(), num_workers=1, in_order=False, shuffle=True), "in_order=True"),
    ],
)
def test_loader_without_known_position_is_refused(loader: Any, next_step: str) -> None:
    with pytest.raises(UsageError, match=next_step):
        DataPosition(loader)


def test_state_of_another_order_inside_an_epoch_is_refused() -> None:
    sampler = ResumableSampler(40, batch_size=4, seed=1)
    sampler.advance()
    state = sampler.state_dict()
    for other in (ResumableSampler(41, batch_size=4, seed=2), ResumableSampler(40, batch_size=4, shuffle=False)):
        seed = other.seed
        with pytest.raises(StateMismatchError, match="after 4 samples"):
            other.load_state_dict(state)
        assert (other.seed, other.given) == (seed, 0)
    sampler.set_epoch(1)
    other = ResumableSampler(41, batch_size=4, seed=2)
    other.load_state_dict(sampler.state_dict())
    assert (other.epoch, other.given, other.seed) == (1, 0, 1)


def test_impossible_samplers_are_refused() -> None:
    for options in ({"batch_size": 0}, {"batch_size": 1, "rank": 1}, {"batch_size": 1, "rank": 2, "world_size": 2}):
        with pytest.raises(ConfigurationError):
            ResumableSampler(10, **options)


# --- by epochs ------------------------------------------------------------------------------------


def test_state_inside_an_epoch_restarts_the_epoch() -> None:
    asked = []

    def batches(number: int) -> list[int]:
        asked.append(number)
        return [10 * number, 10 * number + 1]

    position = EpochPosition(batches)
    assert list(position) == [0, 1]
    for _ in position:
        state = position.state_dict()
    resumed = EpochPosition(batches)
    resumed.load_state_dict(state)
    assert list(resumed) == [10, 11]
    assert resumed.state_dict() == {"epoch": 2}
    assert asked == [0, 1, 1]


def test_state_loaded_inside_an_epoch_is_not_changed_by_the_end_of_the_loop() -> None:
    position = EpochPosition(lambda number: [number, number])
    earlier = position.state_dict()
    assert list(position) + list(position) == [0, 0, 1, 1]
    for _ in position:
        position.load_state_dict(earlier)  # as a loop that goes back to an earlier checkpoint
    assert position.epoch == 0
    assert list(position) == [0, 0]
    assert position.epoch == 1


def test_finite_stream_is_refused() -> None:
    with pytest.raises(UsageError, match="as a function of the epoch"):
        EpochPosition(iter([1, 2]))


def test_failed_epoch_is_not_counted() -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise MissingError("gone")

    position = EpochPosition(lambda _: batches())
    with pytest.raises(MissingError):
        list(position)
    assert position.epoch == 0


# --- generators -----------------------------------------------------------------------------------


def test_restored_generators_continue_their_sequence() -> None:
    seeded()
    # Both keep the second of a pair of normal numbers for the next call.
    random.gauss(0, 1)
    np.random.normal()
    state = RandomState(rank=4).state_dict()
    assert all(key.endswith("-rank4") and isinstance(value, torch.Tensor) for key, value in state.items())
    assert {key.removesuffix("-rank4") for key in state} >= {"torch", "numpy", "python"}

    def draw() -> list[float]:
        return [torch.rand(()).item(), random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand()]

    expected = draw()
    draw()
    RandomState(rank=4).load_state_dict(state)
    assert draw() == expected


def test_rank_without_state_keeps_its_generators() -> None:
    seeded()
    state = RandomState(rank=0).state_dict()
    torch.manual_seed(50)
    before = torch.get_rng_state()
    newcomer = RandomState(rank=1)
    newcomer.load_state_dict(state)
    newcomer.load_state_dict({})
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(newcomer, OptionalKeys)
    assert set(newcomer.optional_keys()) == set(newcomer.state_dict())
    assert not isinstance(EpochPosition([1]), OptionalKeys)
