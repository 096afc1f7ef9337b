"""Saves that build on the one before: their size by what is in them, and a run of ten, each of which is restored."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from benchmarks.checkpoints import digest, folder_bytes, millrace, raw_bytes, tensors_of, warm_up
from benchmarks.fine_tuning import fine_tuned, state_at
from benchmarks.harness import Case, Measure, Options, Prepared

_ALL = ("bf16", "fp32", "exp_avg", "exp_avg_sq")
_THREADS = 2
_FULL_EVERY = 10


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    file, about = fine_tuned(options)
    saves = 3 if options.quick else 10
    expected = {name: digest(state_at(file, 1, (name,))) for name in _ALL}
    expected["frozen"] = digest(state_at(file, 0, ("fp32",)))
    expected["run"] = ",".join(digest(state_at(file, number, _ALL)) for number in range(saves))
    yield Prepared(
        {"state": str(file), "saves": saves},
        expected=expected,
        notes=(
            about,
            f"{_THREADS} threads, files not synced, the base in memory. One content alone: saved, and again after 10 steps "
            "(what is frozen: again as it is); the figures are of the second save.",
            f"A run: {saves} saves of all four, full at least every {_FULL_EVERY}th, then each of them loaded. `MB stored` "
            "of all saves; `dearest to full`: the most that a restore of any reads, in sizes of the full one.",
        ),
    )


case = Case(name="deltas", title="Saves that build on the one before", prepare=prepare, baseline="full", rounds=3)


class _Run:
    """Saves one state after the other into a directory each."""

    def __init__(self, root: str, deltas: bool, compression: Any) -> None:
        self.root, self.deltas, self.compression = root, deltas, compression
        self.history: list[Any] = []
        self.bases: dict[str, Any] = {}

    def save(self, number: int, state: Mapping[str, Any]) -> dict[str, float]:
        """Save, and give the figures of it."""
        import torch.distributed.checkpoint as dcp

        from millrace.checkpoint import CheckpointWriter
        from millrace.checkpoint.writing.delta import SaveRecord, choose_base

        kind: Literal["full", "previous", "anchor"] = "full"
        if self.deltas:
            kind = choose_base(self.history, full_every=_FULL_EVERY, previous_near=True, anchor_near=True)
        place = f"{self.root}/step-{number}"
        writer = CheckpointWriter(
            place,
            sync_files=False,
            thread_count=_THREADS,
            compression=self.compression,
            keep_base=self.deltas,
            base=None if kind == "full" else self.bases[self.history[-1 if kind == "previous" else 0].directory],
        )
        dcp.save(dict(state), storage_writer=writer, no_dist=True)
        if self.deltas:
            self.bases[f"step-{number}"] = writer.written_base(f"step-{number}")
        stats = writer.stats
        assert stats is not None
        record = SaveRecord(
            directory=f"step-{number}",
            kind="full" if kind == "full" else "delta",
            base=None if kind == "full" else kind,
            raw_bytes=stats.raw_bytes,
            own_bytes=stats.stored_bytes,
            restore_bytes=stats.restore_bytes,
        )
        self.history = [record] if kind == "full" else [*self.history, record]
        return {"restore": stats.restore_bytes, "stored": folder_bytes(place)}

    def load(self, number: int, like: Mapping[str, Any]) -> Mapping[str, Any]:
        import torch.distributed.checkpoint as dcp

        from millrace.checkpoint import CheckpointReader

        for tensor in tensors_of(like):
            tensor.fill_(7)
        reader = CheckpointReader(f"{self.root}/step-{number}", thread_count=_THREADS)
        dcp.load(dict(like), storage_reader=reader, no_dist=True)
        return like


def _saves(measure: Measure, context: Mapping[str, Any], *, deltas: bool, compression: str = "typed") -> dict[str, str]:
    scratch, file = context["scratch"], context["state"]
    warm_up(millrace(_THREADS, sync_files=False), f"{scratch}/warm-up")
    digests: dict[str, str] = {}
    for name in (*_ALL, "frozen"):
        run, part = _Run(f"{scratch}/{name}", deltas, compression), "fp32" if name == "frozen" else name
        before = state_at(file, 0, (part,))
        after = before if name == "frozen" else state_at(file, 1, (part,))
        run.save(0, before)
        gc.collect()  # what another content has left is not this one's
        with measure(f"save {name}") as figures:
            saved = run.save(1, after)
            figures |= {"MB stored": saved["stored"] / 1e6, "size to raw": saved["stored"] / raw_bytes(after)}
        digests[name] = digest(run.load(1, state_at(file, 1, (part,))))
    run = _Run(f"{scratch}/run", deltas, compression)
    states = [state_at(file, number, _ALL) for number in range(context["saves"])]
    with measure("run of saves") as figures:
        saved_all = [run.save(number, state) for number, state in enumerate(states)]
        stored = sum(saved["stored"] for saved in saved_all)
        figures["MB stored"] = stored / 1e6
        figures["size to raw"] = stored / sum(raw_bytes(state) for state in states)
        figures["dearest to full"] = max(saved["restore"] for saved in saved_all) / saved_all[0]["restore"]
    like = {group: {key: value.clone() for key, value in tensors.items()} for group, tensors in states[0].items()}
    loaded = []
    with measure("loads of all"):
        for number in range(len(states)):
            run.load(number, like)
            loaded.append(number)
    digests["run"] = ",".join(digest(run.load(number, like)) for number in loaded)
    return digests


@case.contender("full")
def full(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _saves(measure, context, deltas=False)


@case.contender("deltas")
def deltas(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _saves(measure, context, deltas=True)


@case.contender("deltas max")
def deltas_max(measure: Measure, context: Mapping[str, Any]) -> dict[str, str]:
    return _saves(measure, context, deltas=True, compression="max")
