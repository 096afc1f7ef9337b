"""What a case is made of, and how it is run.

A case declares how it is prepared (once: a server, the data) and its contenders: plain functions of a `Measure` and the
prepared context. Every contender runs in a fresh process in every round, so that CPU time and memory are its own; only
what stands inside `with measure("phase")` is counted, so imports and set-up are not. Rounds are interleaved. The values
that contenders return must all be equal, or the case fails: a wrong result has no speed.

    @contextmanager
    def prepare(options):
        with S3Server(options.scratch) as s3: ...; yield Prepared({"endpoint": ...})

    case = Case(name="reads", title="Random reads", prepare=prepare, baseline="plain file")

    @case.contender("plain file")
    def plain_file(measure, context):
        import pyarrow
        with measure("read") as figures:
            ...
            figures["reads"] = 1000
        return checksum
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.figures import round_order
from millrace.testing.process import ChildProcess, log_tail

ROOT = Path(__file__).resolve().parent.parent


class Measure(Protocol):
    """Given to a contender: what happens inside `with measure("phase") as figures:` is measured.

    `figures` takes further numbers of the phase, such as the bytes that it stored. With `raw GB`, wall and CPU time are
    reported for each of them as well.
    """

    def __call__(self, phase: str) -> AbstractContextManager[dict[str, float]]: ...


Contestant = Callable[[Measure, Mapping[str, Any]], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a case is to be prepared. `scratch` is an empty folder on disk, removed afterwards."""

    quick: bool
    scratch: Path


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a prepared case hands out.

    `context` reaches every contender as JSON, with a fresh folder in `scratch` added. `probe` returns counters that
    only ever grow (such as bytes from the origin); their growth during a phase is added to that phase's figures.
    `expected` is what every contender must return, when that is known. `notes` go into the report.
    """

    context: Mapping[str, Any]
    probe: Callable[[], Mapping[str, float]] | None = None
    expected: object = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Contender:
    """One way of doing what the case is about. `baseline` names the contender that it is compared with."""

    name: str
    run: Contestant
    baseline: str | None


@dataclass(slots=True, kw_only=True)
class Case:
    """One comparison, the `case` of its module. `rounds` is the number without `--rounds`; `--quick` makes one."""

    name: str
    title: str
    prepare: Callable[[Options], AbstractContextManager[Prepared]]
    baseline: str | None = None
    rounds: int = 3
    timeout_seconds: float = 900.0
    contenders: dict[str, Contender] = field(default_factory=dict)

    def contender(self, name: str, *, baseline: str | None = None) -> Callable[[Contestant], Contestant]:
        """Register the decorated function."""
        if name in self.contenders:
            raise ValueError(f"case {self.name} has two contenders named {name!r}")

        def register(run: Contestant) -> Contestant:
            compared = baseline or self.baseline
            self.contenders[name] = Contender(name, run, None if compared == name else compared)
            return run

        return register


@dataclass(frozen=True, slots=True)
class Run:
    """One contender in one round: figures by phase, and what it returned."""

    contender: str
    round: int
    phases: Mapping[str, Mapping[str, float]]
    result: object


@dataclass(frozen=True, slots=True)
class Outcome:
    """All rounds of a case. `failures` is empty when every result is right."""

    case: Case
    rounds: int
    quick: bool
    runs: tuple[Run, ...]
    failures: tuple[str, ...]
    notes: tuple[str, ...]


class ContenderError(RuntimeError):
    """A contender did not get to its end."""


def find_cases() -> dict[str, Case]:
    """Every `case` of the modules in `benchmarks/cases`, by name."""
    package = importlib.import_module("benchmarks.cases")
    modules = [
        importlib.import_module(f"benchmarks.cases.{found.name}") for found in pkgutil.iter_modules(package.__path__)
    ]
    return {module.case.name: module.case for module in modules}


def check_results(runs: list[Run], expected: object) -> list[str]:
    """Return the contenders whose result is not `expected`, or, without it, not that of the first contender."""
    if not runs:
        return []
    right = runs[0].result if expected is None else expected
    return [
        f"{run.contender}, round {run.round + 1}: returned {run.result!r} instead of {right!r}"
        for run in runs
        if run.result != right
    ]


def run_case(
    case: Case,
    *,
    rounds: int | None,
    quick: bool,
    scratch: Path,
    only: str = "",
    report: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Prepare a case and run all its rounds, of contenders whose names the regular expression `only` is found in.

    Raises `ContenderError` when a contender breaks down.
    """
    chosen = [name for name in case.contenders if re.search(only, name)]
    count = rounds or (1 if quick else case.rounds)
    folder = scratch / case.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    runs: list[Run] = []
    try:
        report(f"{case.name}: preparing")
        prepared_at = folder / "prepared"
        prepared_at.mkdir()
        with case.prepare(Options(quick=quick, scratch=prepared_at)) as prepared:
            for number in range(count):
                for name in round_order(chosen, number):
                    run = _run_one(case, name, number, prepared, folder)
                    seconds = {phase: round(figures["wall s"], 2) for phase, figures in run.phases.items()}
                    report(f"{case.name}: round {number + 1} of {count}, {name}: {seconds}")
                    runs.append(run)
            notes, expected = prepared.notes, prepared.expected
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(case, count, quick, tuple(runs), tuple(check_results(runs, expected)), notes)


@contextmanager
def _fresh(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def environment() -> dict[str, str]:
    """What contenders see: they keep bytecode, as an installed package has it.

    Ray starts new processes in every epoch. Where each had to compile what it imports, that was measured, and only of what
    is not installed as a wheel, which is us.
    """
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _run_one(case: Case, name: str, number: int, prepared: Prepared, folder: Path) -> Run:
    os.sync()  # so that one contender's dirty pages are not written in another's time
    log = folder / "contender.log"
    log.unlink(missing_ok=True)
    with _fresh(folder / "run") as scratch:
        task = {
            "module": case.prepare.__module__,
            "contender": name,
            "context": {**prepared.context, "scratch": str(scratch)},
        }
        command = [sys.executable, "-m", "benchmarks.worker"]
        with ChildProcess(command, log=log, cwd=ROOT, env=environment(), pipes=True, grace_seconds=5.0) as process:
            # By its number, not by `kill`: that would close the pipe which this thread is reading.
            alarm = threading.Timer(case.timeout_seconds, os.kill, (process.pid, signal.SIGKILL))
            alarm.start()
            try:
                process.stdin.write(json.dumps(task).encode() + b"\n")
                process.stdin.flush()
                return _follow(process, case, name, number, prepared, log)
            finally:
                alarm.cancel()
                alarm.join()


def _follow(process: ChildProcess, case: Case, name: str, number: int, prepared: Prepared, log: Path) -> Run:
    """Answer the contender's phase marks until it hands in its result."""
    probe = prepared.probe or dict
    phases: dict[str, dict[str, float]] = {}
    before: Mapping[str, float] = {}
    while line := process.stdout.readline():
        message = json.loads(line)
        if message["at"] == "start":
            before = probe()
        elif message["at"] == "stop":
            after = probe()
            grown = {key: value - before.get(key, 0) for key, value in after.items()}
            phases[message["phase"]] = {**message["figures"], **grown}
        else:
            return Run(name, number, phases, message["result"])
        process.stdin.write(b"\n")
        process.stdin.flush()
    process.stop()
    if process.exit_status() == -signal.SIGKILL:
        raise ContenderError(f"{case.name}, {name}: killed, after {case.timeout_seconds:.0f} s or for want of memory")
    raise ContenderError(f"{case.name}, {name}: broke down: {log_tail(log, lines=6)}")
