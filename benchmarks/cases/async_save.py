"""What an asynchronous save costs the training loop: the wait for the copy, and slower steps while the rest is done."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.checkpoints import parts_of, raw_bytes, sizes_of, trained
from benchmarks.harness import Case, Measure, Options, Prepared

_CONTENT = {"fp32 + Adam": ("fp32", "exp_avg", "exp_avg_sq")}
_SMALL_ELEMENTS = 64
_LATER = 9
_NICENESS = 10


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    file, about = trained(options)
    yield Prepared(
        {
            "state": str(file),
            "small": 2000 if options.quick else 20_000,
            "saves": {"large": 1 if options.quick else 2, "small": 1 if options.quick else 5},
        },
        notes=(
            f"{sizes_of(file, _CONTENT)}. {about}",
            f"Wait: median of {_LATER} copies into memory that is mapped, and the first one, which maps it. The loop has "
            "one intra-op thread; 'memcpy, one call' copies as many bytes between two blocks, 'a tensor each' as they lie.",
            "Steps: AdamW on a transformer of 2 layers of width 256, one intra-op thread, in turns alone and while a save "
            "runs (each turn as long as a save takes); 'slowdown' is the mean step beside a save to the mean step alone.",
            "Small operations: AdamW without foreach on 12 linear layers of width 256, one intra-op thread.",
        ),
    )


case = Case(name="async_save", title="What an asynchronous save costs the training loop", prepare=prepare, rounds=3)


def _states(context: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    import torch

    values = torch.randn(context["small"], _SMALL_ELEMENTS, generator=torch.Generator().manual_seed(0)) * 0.02
    return {
        "large": parts_of(context["state"], *_CONTENT["fp32 + Adam"]),
        "small": {"model": {f"layers.{number}.bias": row.clone() for number, row in enumerate(values)}},
    }


# --- the wait -------------------------------------------------------------------------------------


def _waits(
    measure: Measure, context: Mapping[str, Any], stage_with: Callable[[dict[str, Any]], Callable[[], object]]
) -> int:
    """Time the callable that `stage_with` makes of a state: its first call, and the median of later ones."""
    import torch

    torch.set_num_threads(1)
    total = 0
    for name, state in _states(context).items():
        total += raw_bytes(state)
        stage = stage_with(state)
        with measure(f"wait, {name}: first"):
            stage()
        seconds = []
        with measure(f"wait, {name}: later") as figures:
            for _ in range(_LATER):
                began = time.perf_counter()
                stage()
                seconds.append(time.perf_counter() - began)
            figures["ms a copy"] = statistics.median(seconds) * 1e3
            figures["GB/s"] = raw_bytes(state) / statistics.median(seconds) / 1e9
    return total


def _memmove() -> Callable[[int, int, int], None]:
    import ctypes

    move: Any = ctypes.CDLL(None).memmove
    move.argtypes, move.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
    return move  # type: ignore[no-any-return]


@case.contender("memcpy, one call")
def one_memcpy(measure: Measure, context: Mapping[str, Any]) -> int:
    import torch

    def stage_with(state: dict[str, Any]) -> Callable[[], object]:
        nbytes, move = raw_bytes(state), _memmove()
        source = torch.ones(nbytes, dtype=torch.uint8)
        target = torch.empty(nbytes, dtype=torch.uint8)
        return lambda: move(target.data_ptr(), source.data_ptr(), nbytes)

    return _waits(measure, context, stage_with)


@case.contender("memcpy, a tensor each", baseline="memcpy, one call")
def memcpy_each(measure: Measure, context: Mapping[str, Any]) -> int:
    import torch

    def stage_with(state: dict[str, Any]) -> Callable[[], object]:
        move = _memmove()
        pairs = [(torch.empty_like(value), value) for group in state.values() for value in group.values()]

        def stage() -> None:
            for target, source in pairs:
                move(target.data_ptr(), source.data_ptr(), source.nbytes)

        return stage

    return _waits(measure, context, stage_with)


@case.contender("torch's DefaultStager, kept", baseline="memcpy, one call")
def stock_stager(measure: Measure, context: Mapping[str, Any]) -> int:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    def stage_with(state: dict[str, Any]) -> Callable[[], object]:
        stager = DefaultStager(StagingOptions(False, False, False, False))
        return lambda: stager.stage(state)

    return _waits(measure, context, stage_with)


@case.contender("Millrace", baseline="memcpy, one call")
def our_stager(measure: Measure, context: Mapping[str, Any]) -> int:
    from millrace.checkpoint.state.staging import StateStager

    def stage_with(state: dict[str, Any]) -> Callable[[], object]:
        stager = StateStager()
        return lambda: stager.stage(state).release()

    return _waits(measure, context, stage_with)


# --- the steps ------------------------------------------------------------------------------------


def _training() -> Callable[[], float]:
    """A step of training on one thread; it returns the seconds that it took."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(4, 32, 256)

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - began

    for _ in range(20):
        step()
    return step


def _save(state: Mapping[str, Any], place: str, threads: int) -> None:
    import torch.distributed.checkpoint as dcp

    from millrace.checkpoint import CheckpointSavePlanner, CheckpointWriter

    writer = CheckpointWriter(place, thread_count=threads)
    dcp.save(state, storage_writer=writer, planner=CheckpointSavePlanner(), no_dist=True)


# Begins to save a state, and returns a function that returns whether the save has ended.
Begin = Callable[[Mapping[str, Any], str], Callable[[], bool]]


def _steps(measure: Measure, context: Mapping[str, Any], begin: Begin, *only: str) -> int:
    from millrace.checkpoint import describe
    from millrace.checkpoint.state.staging import StateStager

    step, total = _training(), 0
    for name, state in _states(context).items():
        total += raw_bytes(state)
        if only and name not in only:
            continue
        staged = StateStager().stage(state)
        done = begin(staged.state, f"{context['scratch']}/{name}-warm")
        while not done():
            step()
        alone: list[float] = []
        beside: list[float] = []
        with measure(f"steps, {name}") as figures:
            for number in range(context["saves"][name]):
                place = f"{context['scratch']}/{name}-{number}"
                before = len(beside)
                done = begin(staged.state, place)
                while not done():
                    beside.append(step())
                alone += [step() for _ in range(len(beside) - before)]
                if describe(place).raw_bytes != raw_bytes(state):
                    raise AssertionError("the save is not complete")
            mean_alone, mean_beside = statistics.mean(alone), statistics.mean(beside)
            figures["steps beside"] = len(beside)
            figures["step ms alone"] = mean_alone * 1e3
            figures["step ms beside"] = mean_beside * 1e3
            figures["slowdown"] = mean_beside / mean_alone
            figures["median slowdown"] = statistics.median(beside) / statistics.median(alone)
            figures["longest ms beside"] = max(beside) * 1e3
            figures["longest ms alone"] = max(alone) * 1e3
            figures["s a save"] = sum(beside) / context["saves"][name]
    return total


def _threads(threads: int, niceness: int, switch_seconds: float | None = None) -> Begin:
    import os
    import sys
    import threading

    from millrace.checkpoint.run.saving import SaveRunner

    runner = SaveRunner()

    def begin(state: Mapping[str, Any], place: str) -> Callable[[], bool]:
        def work(report: object) -> Any:
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + niceness)
            before = sys.getswitchinterval()
            sys.setswitchinterval(switch_seconds or before)
            try:
                _save(state, place, threads)
            finally:
                sys.setswitchinterval(before)

        pending = runner.submit(0, work)

        def done() -> bool:
            runner.check()
            return pending.done()

        return done

    return begin


@case.contender("steps beside 1 thread")
def one_thread(measure: Measure, context: Mapping[str, Any]) -> int:
    return _steps(measure, context, _threads(1, 0))


@case.contender("steps beside 1 thread, nice")
def one_nice_thread(measure: Measure, context: Mapping[str, Any]) -> int:
    return _steps(measure, context, _threads(1, _NICENESS))


@case.contender("steps beside 1 thread, nice, switching after 0.2 ms")
def one_nice_switching_thread(measure: Measure, context: Mapping[str, Any]) -> int:
    """The time for which a thread that needs the interpreter's lock leaves it to another one: 5 ms by default."""
    return _steps(measure, context, _threads(1, _NICENESS, 0.0002))


@case.contender("steps beside 2 threads")
def two_threads(measure: Measure, context: Mapping[str, Any]) -> int:
    return _steps(measure, context, _threads(2, 0))


@case.contender("steps beside 2 threads, nice")
def two_nice_threads(measure: Measure, context: Mapping[str, Any]) -> int:
    return _steps(measure, context, _threads(2, _NICENESS))


# --- the manager ----------------------------------------------------------------------------------


@contextmanager
def _manager(place: str) -> Iterator[Begin]:
    """Full saves through a `CheckpointManager`; `place` of each is ignored."""
    from millrace.checkpoint import CheckpointManager

    with CheckpointManager(place, full_every=1, thread_count=1) as run:
        steps = iter(range(1000))

        def begin(state: Mapping[str, Any], place: str) -> Callable[[], bool]:
            return run.save_async(next(steps), state).done

        yield begin


def _steps_of_manager(measure: Measure, context: Mapping[str, Any], training: Callable[[], Callable[[], float]]) -> int:
    """Steps in turns: while a save runs, and then as many alone."""
    step, total = training(), 0
    for name, state in _states(context).items():
        total += raw_bytes(state)
        with _manager(f"{context['scratch']}/{name}") as begin:
            for _ in range(2):  # the first ones map their memory, and start the process
                done = begin(state, "")
                while not done():
                    step()
            alone: list[float] = []
            beside: list[float] = []
            blocked: list[float] = []
            copied: list[float] = []
            with measure(f"steps, {name}") as figures:
                for _ in range(context["saves"][name]):
                    before = len(beside)
                    began = time.perf_counter()
                    done = begin(state, "")
                    blocked.append(time.perf_counter() - began)
                    while not done():
                        beside.append(step())
                    alone += [step() for _ in range(len(beside) - before)]
                    copied.append(_seconds_of_a_copy(raw_bytes(state)))
                figures["step ms alone"] = statistics.mean(alone) * 1e3
                figures["step ms beside"] = statistics.mean(beside) * 1e3
                figures["slowdown"] = statistics.mean(beside) / statistics.mean(alone)
                figures["median slowdown"] = statistics.median(beside) / statistics.median(alone)
                figures["longest ms beside"] = max(beside) * 1e3
                figures["s a save"] = sum(beside) / context["saves"][name]
                figures["blocked ms"] = statistics.median(blocked) * 1e3
                figures["blocked to a memcpy"] = statistics.median(blocked) / statistics.median(copied)
    return total


_blocks: dict[int, tuple[Any, Any]] = {}


def _seconds_of_a_copy(nbytes: int) -> float:
    """Of one memcpy between two blocks that are mapped."""
    import torch

    if nbytes not in _blocks:
        _blocks[nbytes] = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    target, source = _blocks[nbytes]
    move = _memmove()
    began = time.perf_counter()
    move(target.data_ptr(), source.data_ptr(), nbytes)
    return time.perf_counter() - began


def _small_operations() -> Callable[[], float]:
    """A step of many small operations on one thread, as a loop that drives a GPU; it returns the seconds that it took."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(12)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    batch = torch.randn(4, 256)

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - began

    for _ in range(20):
        step()
    return step


@case.contender("steps beside the manager")
def manager_process(measure: Measure, context: Mapping[str, Any]) -> int:
    return _steps_of_manager(measure, context, _training)


@case.contender("small operations beside the manager")
def small_operations(measure: Measure, context: Mapping[str, Any]) -> int:
    return _steps_of_manager(measure, context, _small_operations)
