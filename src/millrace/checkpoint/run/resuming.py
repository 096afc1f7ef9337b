"""State besides model and optimizer that a loop saves so that a resumed run equals an uninterrupted one.

This is the position in the data (`DataPosition`, `EpochPosition`) and the random generators (`RandomState`). Each is a
`Stateful`: put it into the state dict under its own name, on every rank.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset
from torch.utils.data.sampler import RandomSampler, SequentialSampler

from millrace.checkpoint.run.sampling import ResumableSampler, mixed_seed
from millrace.errors import UsageError

_MT19937_WORDS = 624


@runtime_checkable
class OptionalKeys(Protocol):
    """A `Stateful` with values that may be missing in a checkpoint. A restore leaves those unchanged."""

    def optional_keys(self) -> Collection[str]:
        """The optional keys of the first level of `state_dict()`; `load_state_dict` accepts a mapping without them."""
        ...


class DataPosition:
    """Counts the batches of a loop, and continues after them: use `for batch in position:` in place of the loader.

    `loader` is a `DataLoader` over a map-style data set, with a `ResumableSampler` as its `batch_sampler`, or a stock one
    (`batch_size=`, with or without `shuffle=True` or a `DistributedSampler`). A stock one is replaced by a loader with the
    same settings and a `ResumableSampler`, whose order depends on `seed`. Several ranks share the samples.

    A batch counts from the moment at which the loop receives it, not when a worker has fetched it. So save at the end of the
    loop's body. After a loop that was left early, the next one continues with the rest; a loop that ends finishes the epoch:

        for epoch in range(position.epoch, epochs):
            for batch in position:
                ...

    A state that is saved after an epoch's last batch, inside the loop, resumes with an epoch without batches, so that the
    code at the end of an epoch runs. The numbers of ranks and workers and the batch size may be different after the resume:
    the position is counted in samples, and the ranks take exactly the rest of the epoch.

    Creating the loader's iterator does not change torch's global generator, so the random numbers of dropout do not depend
    on where a run was interrupted. Not thread-safe; one loop at a time.
    """

    def __init__(self, loader: Any, *, seed: int = 0) -> None:
        self._loader, self._sampler = _resumable(loader, seed)
        # The number of the loop that may take the next batch.
        self._loop = 0

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0; the number of finished epochs."""
        return self._sampler.epoch

    @property
    def given(self) -> int:
        """The number of samples of this epoch that all ranks together have received."""
        return self._sampler.given

    def __len__(self) -> int:
        """Batches of a whole epoch, at any position."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        self._loop += 1
        loop = self._loop
        # An epoch that was saved after its last batch needs no worker processes.
        if self._sampler.left():
            with _generators_seeded(self._loader, mixed_seed(self._sampler.seed, self.epoch, -1)):
                batches = iter(self._loader)
            for batch in batches:
                self._sampler.advance()
                yield batch
                if self._loop != loop:
                    raise UsageError(
                        f"another loop over the data began, or a state was loaded, while a loop was at {self.given} samples",
                        next_step="leave the first loop, and begin a new one",
                    )
        self._sampler.set_epoch(self.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, the same on all ranks."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set a saved position, which ends a running loop. Raises as `ResumableSampler.load_state_dict`."""
        self._sampler.load_state_dict(state)
        self._loop += 1


class EpochPosition:
    """Counts finished epochs of batches without a repeatable order: Ray Data, iterable data sets, streams.

    `batches` is iterated again for every epoch (`shard.iter_torch_batches(...)`, a `DataLoader` over an `IterableDataset`),
    or is a function that returns the batches of an epoch, by its number. `for batch in position:` is one epoch. A state
    that was saved in the middle of an epoch resumes at its beginning, and so does a loop that was left early: samples are
    repeated, and none is skipped. So save after the loop. Not thread-safe.
    """

    def __init__(self, batches: Iterable[Any] | Callable[[int], Iterable[Any]], *, seed: int = 0) -> None:
        if isinstance(batches, Iterator):
            raise UsageError(
                f"a {type(batches).__name__} can be iterated only once",
                next_step="give a function that creates it, as a function of the epoch's number",
            )
        self._batches, self._seed = batches, seed
        self.epoch = 0
        # The number of loaded states. A loop that began before the last one does not set the epoch.
        self._loads = 0

    def __iter__(self) -> Iterator[Any]:
        epoch, loads = self.epoch, self._loads
        source = self._batches(epoch) if callable(self._batches) else self._batches
        with _generators_seeded(source, mixed_seed(self._seed, epoch, -1)):
            batches = iter(source)
        yield from batches
        if self._loads == loads:
            self.epoch = epoch + 1

    def state_dict(self) -> dict[str, Any]:
        """One plain number."""
        return {"epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the beginning of the saved epoch. The end of a running loop does not change it."""
        self.epoch = int(state["epoch"])
        self._loads += 1


class RandomState:
    """The random generators of this process: torch's on the CPU and on every visible CUDA device, Python's, and numpy's
    global one if `numpy.random` is imported.

    Every rank has its own, under keys with its number. A checkpoint of fewer ranks, or from a machine without GPUs, does not
    change the generators that it does not contain. `CheckpointManager.restore` supports this; `dcp.load` needs a planner
    with `allow_partial_load=True`.
    """

    def __init__(self, *, rank: int | None = None) -> None:
        self._rank = rank

    def state_dict(self) -> dict[str, Any]:
        """Small tensors on the CPU."""
        rank = self._rank_now()
        return {f"{name}-rank{rank}": value for name, value in _generator_states().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set every generator of this rank that `state` contains."""
        ending = f"-rank{self._rank_now()}"
        for key, value in state.items():
            if key.endswith(ending):
                _set_generator(key.removesuffix(ending), value)

    def optional_keys(self) -> Collection[str]:
        """All of them."""
        return self.state_dict().keys()

    def _rank_now(self) -> int:
        # This object is often created before the process group.
        if self._rank is not None:
            return self._rank
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        return torch.distributed.get_rank() if distributed else 0


# --- loaders --------------------------------------------------------------------------------------


def _resumable(loader: Any, seed: int) -> tuple[Any, ResumableSampler]:
    """A loader with a `ResumableSampler`, and the sampler. Raises `UsageError` for a loader whose order is not known."""
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"DataPosition counts the batches of a torch DataLoader, and this is a {type(loader).__name__}",
            next_step="use EpochPosition, which resumes at the beginning of an epoch",
        )
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            f"{type(loader.dataset).__name__} is an iterable data set, which has no position",
            next_step="use EpochPosition, which resumes at the beginning of an epoch, or a map-style data set",
        )
    if not getattr(loader, "in_order", True):
        raise UsageError(
            "in_order=False returns batches in an order that cannot be repeated", next_step="leave in_order=True"
        )
    if isinstance(loader.batch_sampler, ResumableSampler):
        return loader, loader.batch_sampler
    sampler = loader.sampler
    known = (
        (type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset))
        or type(sampler) is SequentialSampler
        or type(sampler) is DistributedSampler
    )
    if not known or type(loader) is not DataLoader or type(loader.batch_sampler) is not BatchSampler:
        what = type(loader if type(loader) is not DataLoader else loader.batch_sampler if known else sampler).__name__
        raise UsageError(
            f"{what} chooses this loader's batches, and its position cannot be set",
            next_step="create the DataLoader with batch_sampler=ResumableSampler(dataset, batch_size=...)",
        )
    shared = {"rank": sampler.rank, "world_size": sampler.num_replicas} if type(sampler) is DistributedSampler else {}
    own = ResumableSampler(
        loader.dataset,
        batch_size=loader.batch_size,
        shuffle=sampler.shuffle if type(sampler) is DistributedSampler else type(sampler) is RandomSampler,
        seed=seed,
        drop_last=loader.drop_last,
        **shared,
    )
    return _with_sampler(loader, own), own


def _with_sampler(loader: Any, sampler: ResumableSampler) -> Any:
    settings = {
        name: getattr(loader, name)
        for name in (
            "num_workers",
            "collate_fn",
            "pin_memory",
            "timeout",
            "worker_init_fn",
            "multiprocessing_context",
            "generator",
            "persistent_workers",
        )
    }
    if loader.num_workers:
        settings["prefetch_factor"] = loader.prefetch_factor
    return DataLoader(loader.dataset, batch_sampler=sampler, **settings)


@contextmanager
def _generators_seeded(loader: Any, seed: int) -> Iterator[None]:
    """Make the seeds of a `DataLoader`'s workers depend on `seed` alone, and keep torch's global generator unchanged."""
    generator = getattr(loader, "generator", None)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


# --- generators -----------------------------------------------------------------------------------


def _generator_states() -> dict[str, Any]:
    states = {"torch": torch.get_rng_state(), "python": _pack_python(random.getstate())}
    if torch.cuda.is_available():
        for device, state in enumerate(torch.cuda.get_rng_state_all()):
            states[f"cuda{device}"] = state
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        states["numpy"] = _pack_numpy(numpy_random.get_state(legacy=False))
    return states


def _set_generator(name: str, state: Any) -> None:
    if name == "torch":
        torch.set_rng_state(state)
    elif name == "python":
        random.setstate(_unpack_python(state))
    elif name == "numpy":
        import numpy as np

        np.random.set_state(_unpack_numpy(state))
    elif name.startswith("cuda"):
        torch.cuda.set_rng_state(state, int(name.removeprefix("cuda")))


def _pack_python(state: Any) -> Any:
    """Python's generator as 627 integers: 624 words, the position in them, and the cached number of `gauss`."""
    _, words, kept = state
    return torch.cat([torch.tensor(words), _bits(kept is not None, kept or 0.0)])


def _unpack_python(packed: Any) -> tuple[Any, ...]:
    numbers = packed.tolist()
    has_kept, kept = _from_bits(packed[-2:])
    return 3, tuple(numbers[: _MT19937_WORDS + 1]), kept if has_kept else None


def _pack_numpy(state: Any) -> Any:
    """numpy's global generator in the same way."""
    if state["bit_generator"] != "MT19937":
        raise UsageError(
            f"numpy's global generator is a {state['bit_generator']}, which RandomState does not support",
            next_step="keep numpy's default global generator, and save other generators in your own code",
        )
    words = torch.tensor(state["state"]["key"].tolist())
    place = torch.tensor([state["state"]["pos"]])
    return torch.cat([words, place, _bits(bool(state["has_gauss"]), state["gauss"])])


def _unpack_numpy(packed: Any) -> dict[str, Any]:
    numbers = packed.tolist()
    has_kept, kept = _from_bits(packed[-2:])
    return {
        "bit_generator": "MT19937",
        "state": {"key": numbers[:_MT19937_WORDS], "pos": numbers[_MT19937_WORDS]},
        "has_gauss": int(has_kept),
        "gauss": kept,
    }


def _bits(flag: bool, value: float) -> Any:
    return torch.cat([torch.tensor([int(flag)]), torch.tensor([value], dtype=torch.float64).view(torch.int64)])


def _from_bits(pair: Any) -> tuple[bool, float]:
    return bool(pair[0]), float(pair[1:].clone().view(torch.float64))
