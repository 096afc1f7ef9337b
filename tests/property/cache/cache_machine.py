"""The state machine of `test_stateful.py`: whatever happens to the cache, a read gives the bytes of one version.

Local files are the origin (a real one, whose versions differ by inode, size and time), a directory the store, small
enough to be full most of the time. Four keys, each nearly always of its own size, so that versions collide; all exist from
the beginning, and after every step several of them are read. A block has 64 KiB here, and objects from 32 KiB on have files
of their own, so that an object of six blocks is cheap.

Run as a program, it forks a small process. `python cache_machine.py MACHINE EXAMPLES STEPS` prints as JSON how often it did
what, and `python cache_machine.py MUTANT` ends with 1 when the machine finds the mutant, which it must.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from tests.support.stacks import new_stacks, stacks_of, write_stacks_on_signal

import millrace
from millrace.cache import node
from millrace.cache.eviction.copies import Keep
from millrace.cache.node import close_nodes
from millrace.cache.reading import fetching, locations, reader
from millrace.errors import ObjectChangedError
from millrace.store import segments, store
from millrace.store.records import Entry

BLOCK = 64 << 10
SIZES = {"a/0": 20_000, "a/1": 20_000, "b/c/0": 5 * BLOCK + 1, "b/c/1": 5 * BLOCK + 1}
KEYS = tuple(SIZES)
LARGE = tuple(key for key, size in SIZES.items() if size > BLOCK)
SMALL = tuple(key for key in KEYS if key not in LARGE)
TTL_SECONDS = 0.2
CHILD_SECONDS = 300.0

READS = ("cat", "stream", "file", "fsspec", "piece", "piece", "pieces", "pyarrow pieces")
CAPACITIES = st.sampled_from(["10GB", "600KiB", "400KiB", "10GB", "100KiB", "0"])
DAMAGES = ("flip", "flip", "zero", "cut", "delete", "directory")

done: Counter[str] = Counter()
"""What all machines of this process did."""


@contextmanager
def small_blocks() -> Iterator[None]:
    """The cache with blocks of 64 KiB, files of their own from 32 KiB and maps from 128 KiB on."""
    with ExitStack() as stack:
        for module in (node, reader):
            stack.enter_context(mock.patch.object(module, "BLOCK_BYTES", BLOCK))
        for module in (segments, locations):
            stack.enter_context(mock.patch.object(module, "SMALL_OBJECT_BYTES", 32 << 10))
        stack.enter_context(mock.patch.object(locations, "SMALL_FILE_BYTES", 128 << 10))
        yield


class Model:
    """The versions of one key, and those that a read may return."""

    def __init__(self) -> None:
        self.versions: list[bytes | None] = []
        """None: there was nothing by this name."""
        self._ended: list[float] = []
        self._floor = 0

    def change(self, data: bytes | None, *, reported: bool) -> None:
        """Another version; `reported`: written through the file system itself, which must use it from now on."""
        if self.versions:
            self._ended.append(time.time())
        self.versions.append(data)
        if reported:
            self.is_told()

    def is_told(self) -> None:
        self._floor = len(self.versions) - 1

    @property
    def newest(self) -> bytes | None:
        return self.versions[-1]

    def allowed(self, consistency: str) -> list[bytes | None]:
        """The versions that an open may find now."""
        first = self._floor
        if consistency == "always":
            return self.versions[-1:]
        if consistency != "immutable":
            earliest = time.time() - TTL_SECONDS - 0.3  # it may have been requested before it was noted here
            while first < len(self._ended) and self._ended[first] < earliest:
                first += 1
        return self.versions[first:]

    def saw(self, data: bytes | None) -> None:
        """A read gave all of a version, so no later one may give an older one."""
        self._floor = max(self._floor, self.versions.index(data, self._floor))


def _right(answer: Any, *details: Any) -> None:
    """A read must return the bytes of one of the permitted versions."""
    if not answer:
        done["wrong reads"] += 1
        raise AssertionError(f"wrong: {details}")


@dataclass
class _Held:
    """An open file, and which versions of its key it may be of."""

    file: Any
    key: str
    candidates: list[bytes]


class CacheMachine(RuleBasedStateMachine):
    """Opens, reads, overwrites, evictions, resizes, restarts, kills, damage and crashes, in any order."""

    native = True

    @initialize(capacity=CAPACITIES, consistency=st.sampled_from(["always", "always", "immutable", f"{TTL_SECONDS}s"]))
    def start(self, capacity: str, consistency: str) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="millrace-stateful-"))
        self.data, self.store = self.base / "data", self.base / "cache"
        self.capacity, self.consistency = capacity, consistency
        self.models = {key: Model() for key in KEYS}
        self.numbers = self.steps = 0
        self.held: list[_Held] = []
        """The open files; not across restarts."""
        for key in KEYS:
            self._write(key, SIZES[key], through=False)
        self._open()

    def _open(self) -> None:
        self.fs = millrace.filesystem(
            "file",
            cache_dir=str(self.store),
            capacity=self.capacity,
            min_free=0,
            consistency=self.consistency,
            native=self.native,
            skip_instance_cache=True,
        )

    def _close(self) -> None:
        for held in self.held:
            held.file.close()
        self.held.clear()
        close_nodes()

    def teardown(self) -> None:
        if hasattr(self, "base"):
            self._close()
            shutil.rmtree(self.base)

    def _path(self, key: str) -> str:
        return str(self.data / key)

    # --- the origin changes -----------------------------------------------------------------------

    def _write(self, key: str, size: int, *, through: bool) -> None:
        self.numbers += 1
        data = np.random.default_rng(self.numbers).bytes(size)
        path = Path(self._path(key))
        if through:
            self.fs.makedirs(str(path.parent), exist_ok=True)
            self.fs.pipe_file(str(path), data)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            (self.base / "incoming").write_bytes(data)
            os.replace(self.base / "incoming", path)
        self.models[key].change(data, reported=through)
        time.sleep(0.005)  # the clock of files may tick as slowly as that, and this origin has no other version

    @rule(key=st.sampled_from(LARGE), through=st.booleans(), other_size=st.sampled_from([None, None, None, 0, BLOCK]))
    def overwrite_large(self, key: str, through: bool, other_size: int | None) -> None:
        self._write(key, SIZES[key] if other_size is None else other_size, through=through)
        done["overwrites"] += 1

    @rule(key=st.sampled_from(SMALL), through=st.booleans())
    def overwrite_small(self, key: str, through: bool) -> None:
        self._write(key, SIZES[key], through=through)
        done["overwrites"] += 1

    @rule(key=st.sampled_from(KEYS), through=st.booleans())
    def remove(self, key: str, through: bool) -> None:
        if self.models[key].newest is None:
            self._write(key, SIZES[key], through=through)
        elif through:
            with_what_it_knows = self.models[key].allowed(self.consistency)
            try:
                self.fs.rm_file(self._path(key))
            except FileNotFoundError:
                _right(None in with_what_it_knows, key)
                self.models[key].saw(None)
                return
            self.models[key].change(None, reported=True)
        else:
            os.unlink(self._path(key))
            self.models[key].change(None, reported=False)
        done["removals"] += 1

    # --- reading ----------------------------------------------------------------------------------

    @invariant()
    def what_is_read_is_of_one_version(self) -> None:
        if not hasattr(self, "base"):
            return
        self.steps += 1
        choice = random.Random(self.steps)
        for key in choice.sample(KEYS, 2):
            self._read(key, choice.choice(READS), choice)

    @rule(key=st.sampled_from(KEYS), how=st.sampled_from(READS), seed=st.integers(0, 1 << 20))
    def read(self, key: str, how: str, seed: int) -> None:
        self._read(key, how, random.Random(seed))

    def _read(self, key: str, how: str, choice: random.Random) -> None:
        model = self.models[key]
        allowed = model.allowed(self.consistency)
        spans: list[tuple[int, int]] = []
        for _ in range(3 if "pieces" in how else 1):
            start = choice.choice([0, choice.randrange(SIZES[key]), 5 * BLOCK - 100])
            spans.append((start, start + choice.choice([100, 3000, BLOCK, 3 * BLOCK])))
        if "piece" not in how:
            spans = [(0, 1 << 30)]
        try:
            found = self._pieces(self._path(key), how, spans)
        except FileNotFoundError:
            _right(None in allowed, key, how)
            model.saw(None)
            done["reads of nothing"] += 1
            return
        except ObjectChangedError:
            # Only if the file system may regard an older version as fresh; then it sends a new request.
            _right(len(allowed) > 1, key, how)
            model.is_told()
            done["changes that were reported"] += 1
            return
        fitting = [data for data in allowed if data is not None and [data[a:b] for a, b in spans] == found]
        _right(fitting, key, how, spans, [len(piece) for piece in found])
        if len(fitting) == 1:
            model.saw(fitting[0])
        done["reads"] += 1
        done[f"reads by {how}"] += 1

    def _pieces(self, path: str, how: str, spans: list[tuple[int, int]]) -> list[bytes]:
        if how in ("piece", "pieces"):
            # One call a piece looks up the name once each, so pieces of one call are requested together.
            if len(spans) == 1:
                return [self.fs.cat_file(path, *spans[0])]
            with self.fs.open(path) as file:
                return [_read_at(file, *span) for span in spans]
        if how == "pyarrow pieces":
            with self.fs.open_input_file(path) as file:
                return [file.read_at(stop - start, start) for start, stop in spans]
        if how == "cat":
            return [self.fs.cat_file(path)]
        opened = {"stream": self.fs.open_input_stream, "file": self.fs.open_input_file, "fsspec": self.fs.open}[how]
        with opened(path) as file:
            return [file.read()]

    @rule(
        key=st.sampled_from(LARGE),
        way=st.sampled_from(["native", "fsspec", "stream"]),
        through=st.booleans(),
        cold=st.booleans(),
    )
    def overwrite_under_a_reader(self, key: str, way: str, through: bool, cold: bool) -> None:
        """Its first block is read, the object overwritten by one of the same size, and then its last block read."""
        model = self.models[key]
        if cold:
            self.fs.free([self._path(key)])
        candidates = [data for data in model.allowed(self.consistency) if data is not None]
        try:
            file = self._opened(key, way)
            first = file.read(100)
        except (FileNotFoundError, ObjectChangedError):
            return
        with file:
            candidates = [data for data in candidates if data[:100] == first]
            _right(candidates, key, way)
            self._write(key, SIZES[key], through=through)
            try:
                file.seek(5 * BLOCK - 100)
                last = file.read()
            except (ObjectChangedError, FileNotFoundError):
                done["overwrites that a reader detected"] += 1
                model.is_told()
                return
        _right(any(data[5 * BLOCK - 100 :] == last for data in candidates), key, way)
        done["overwrites under a reader that had it all"] += 1

    def _opened(self, key: str, way: str) -> Any:
        opened = {"native": self.fs.open_input_file, "fsspec": self.fs.open, "stream": self.fs.open_input_stream}[way]
        return opened(self._path(key))

    @rule(key=st.sampled_from(KEYS), way=st.sampled_from(["native", "fsspec", "stream"]))
    def keep_open(self, key: str, way: str) -> None:
        candidates = [data for data in self.models[key].allowed(self.consistency) if data is not None]
        try:
            file = self._opened(key, way)
        except (FileNotFoundError, ObjectChangedError):
            return
        self.held.append(_Held(file, key, candidates))
        if len(self.held) > 4:
            self.held.pop(0).file.close()

    @invariant()
    def what_is_open_stays_what_it_was(self) -> None:
        for held in getattr(self, "held", [])[-2:]:
            choice = random.Random(self.steps)
            first = choice.choice([0, choice.randrange(SIZES[held.key]), 5 * BLOCK - 100])
            length = choice.choice([100, BLOCK, 10 * BLOCK])
            try:
                held.file.seek(first)
                data = held.file.read(length)
            except (ObjectChangedError, FileNotFoundError):
                # This version is no longer cached or at the origin: an error, not a mix.
                model = self.models[held.key]
                _right(held.candidates != [model.newest], held.key)
                model.is_told()
                done["changes that were reported"] += 1
                continue
            held.candidates = [version for version in held.candidates if version[first : first + length] == data]
            _right(held.candidates, held.key, first, len(data))
            done["reads of what was opened before"] += 1

    # --- the cache changes ------------------------------------------------------------------------

    @rule(keys=st.sets(st.sampled_from(KEYS), min_size=1))
    def free(self, keys: set[str]) -> None:
        self.fs.free([self._path(key) for key in sorted(keys)])

    @rule(capacity=CAPACITIES)
    def resize(self, capacity: str) -> None:
        self.fs.resize(capacity)
        done["resizes"] += 1

    @rule()
    def restart(self) -> None:
        self._close()
        self._open()
        done["restarts"] += 1

    # --- other processes --------------------------------------------------------------------------

    @rule(seed=st.integers(0, 1 << 20))
    def another_process_reads(self, seed: int) -> None:
        allowed = {key: self.models[key].allowed(self.consistency) for key in KEYS}
        answers = pickle.loads(self._child(seed, reads=len(KEYS)))
        for key, found in answers.items():
            if found is not ObjectChangedError:
                _right(found in allowed[key], key)
                self.models[key].saw(found)
            else:
                _right(len(allowed[key]) > 1, key)
                self.models[key].is_told()
        done["reads of another process"] += len(answers)

    @rule(seed=st.integers(0, 1 << 20), reads=st.integers(0, 3))
    def a_reader_is_killed(self, seed: int, reads: int) -> None:
        """At some moment after so many reads; what it wrote, and its locks, are left as they are."""
        self._child(seed, reads=reads, kill=True)
        done["kills"] += 1

    def _child(self, seed: int, *, reads: int, kill: bool = False) -> bytes:
        """Fork a process that reads; with `kill` it reads on and on until it is ended in the middle."""
        here, there = os.pipe()
        stacks = new_stacks()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about forks with threads, which this tests
            pid = os.fork()
        if pid == 0:
            try:
                os.close(here)
                write_stacks_on_signal(stacks)
                self._in_child(there, random.Random(seed), endless=kill)
            finally:
                os._exit(1)
        os.close(there)
        received = io.BytesIO()
        try:
            while not kill or received.tell() < reads:
                # Twice: on a virtual machine that was paused the first wait may end before the other process had its time.
                assert wait([here], CHILD_SECONDS) or wait([here], 30), (
                    f"the other process hangs: {stacks_of(pid, stacks)}"
                )
                data = os.read(here, 1 if kill else 1 << 20)
                if not data:
                    break
                received.write(data)
            if kill:
                time.sleep(random.Random(seed).choice([0, 0, 0.001, 0.005]))
        finally:
            os.kill(pid, signal.SIGKILL)
            os.close(here)
            os.close(stacks)
            status = os.waitpid(pid, 0)[1]
        if kill:
            assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL  # it was at work until then
        return received.getvalue()

    def _in_child(self, pipe: int, choice: random.Random, *, endless: bool) -> None:
        keys = list(KEYS)
        choice.shuffle(keys)
        answers: dict[str, Any] = {}
        while True:
            for key in keys:
                try:
                    answers[key] = self.fs.cat_file(self._path(key))
                except FileNotFoundError:
                    answers[key] = None
                except ObjectChangedError:
                    answers[key] = ObjectChangedError
                if endless:
                    self.fs.free([self._path(choice.choice(keys))])  # or there would soon be nothing to write
                    os.write(pipe, b".")
            if not endless:
                break
        with open(pipe, "wb") as file:
            file.write(pickle.dumps(answers))

    # --- harm -------------------------------------------------------------------------------------

    @rule(damage=st.sampled_from(DAMAGES), seed=st.integers(0, 1 << 20))
    def files_are_damaged(self, damage: str, seed: int) -> None:
        """While no process maps them, which a live map cannot survive."""
        self._close()
        self._damage_some(damage, random.Random(seed))
        self._open()
        self._read_everything(random.Random(seed))

    @rule(damage=st.sampled_from([*DAMAGES, "index", "empty index", "none"]), seed=st.integers(0, 1 << 20))
    def crash_of_the_machine(self, damage: str, seed: int) -> None:
        """Another boot finds the store as a crash without fsync may leave it."""
        self._close()
        choice = random.Random(seed)
        marker = next(self.store.rglob("FORMAT"), None)
        if marker is not None:
            name, *_ = marker.read_text().splitlines()
            marker.write_text(f"{name}\n00000000-0000-0000-0000-{seed:012}\n")
            if damage == "index":
                shutil.rmtree(marker.parent / "index", ignore_errors=True)  # an earlier crash may have taken it
            elif damage == "empty index":
                for path in (marker.parent / "index").glob("*"):
                    path.write_bytes(b"")
            self._damage_some(damage, choice)
            done["crashes with a store"] += 1
        self._open()
        self._read_everything(choice)

    def _damage_some(self, damage: str, choice: random.Random) -> None:
        folders = (path for name in ("objects", "segments") for path in self.store.rglob(name))
        files = sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())
        for path in choice.sample(files, min(2, len(files))):
            done["files damaged"] += _damage(path, damage, choice)

    def _read_everything(self, choice: random.Random) -> None:
        for key in KEYS:
            self._read(key, choice.choice(["file", "cat", "fsspec"]), choice)

    @invariant()
    def the_store_stays_inside_its_directory(self) -> None:
        if hasattr(self, "base"):
            assert {path.name for path in self.base.iterdir()} <= {"data", "cache", "incoming"}


def _read_at(file: Any, start: int, stop: int) -> bytes:
    file.seek(start)
    data: bytes = file.read(stop - start)
    return data


def _damage(path: Path, damage: str, choice: random.Random) -> bool:
    """Harm a file where it holds something; whether that was done."""
    written = [(a, b) for a, b in _extents(path) if b > a]
    if damage in ("flip", "zero"):
        if not written:
            return False
        position = choice.randrange(*choice.choice(written))
        with open(path, "r+b") as file:
            file.seek(position)
            data = file.read(8192)
            file.seek(position)
            file.write(bytes(byte ^ 0x40 for byte in data[:1]) if damage == "flip" else bytes(len(data)))
    elif damage == "cut":
        os.truncate(path, choice.randrange(max(1, path.stat().st_size)))
    elif damage in ("delete", "directory"):
        path.unlink()
        if damage == "directory":
            path.mkdir()
    else:
        return False
    return True


def _extents(path: Path) -> list[tuple[int, int]]:
    """Where a sparse file has bytes."""
    found: list[tuple[int, int]] = []
    with open(path, "rb") as file:
        stop, size = 0, os.fstat(file.fileno()).st_size
        while stop < size:
            try:
                start = os.lseek(file.fileno(), stop, os.SEEK_DATA)
            except OSError:  # ENXIO: only a hole follows
                break
            stop = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            found.append((start, stop))
    return found


class VerifyingCacheMachine(CacheMachine):
    """The same without maps, where every read is verified."""

    native = False


# --- running it -----------------------------------------------------------------------------------

SETTINGS = settings(
    max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)


def run(machine: type[CacheMachine], how: settings = SETTINGS) -> Counter[str]:
    """Run a machine; returns the counts of its actions."""
    done.clear()
    with small_blocks():
        run_state_machine_as_test(machine, settings=how)  # type: ignore[no-untyped-call]
    return Counter(done)


def _no_checksums(stack: ExitStack) -> None:
    stack.enter_context(mock.patch.object(store, "checksum", return_value=7))


def _no_seals(stack: ExitStack) -> None:
    stack.enter_context(mock.patch.object(Entry, "seal_holds", lambda entry, file: entry.sealed))
    stack.enter_context(mock.patch.object(locations, "slot_holds", return_value=True))


def _versions_ignored(stack: ExitStack) -> None:
    real = node.object_id
    for module in (node, locations):
        stack.enter_context(mock.patch.object(module, "object_id", lambda o, k, v, size: real(o, k, "", size)))
    stack.enter_context(mock.patch.object(node.CacheNode, "discard"))


def _no_condition(stack: ExitStack) -> None:
    def read(self: Any, start: int, stop: int) -> fetching.Fetched:
        return fetching.Fetched(self._origin.read(self._info.key, start, stop), Keep.OWNED)

    stack.enter_context(mock.patch.object(fetching.DirectSource, "read", read))


MUTANTS: dict[str, Callable[[ExitStack], None]] = {
    "no checksums": _no_checksums,
    "no seals": _no_seals,
    "versions ignored": _versions_ignored,
    "no condition on the version": _no_condition,
}
"""Caches that are broken on purpose. Each must be found by a run of the size of `make test`."""


def run_alone(machine: str, examples: str, steps: str, *random_ones: str) -> None:
    """Run a machine with the same examples each time, or with random ones; writes to stderr only what must not happen."""
    warnings.simplefilter("error")
    logging.getLogger("millrace").addHandler(logging.NullHandler())
    sizes = {"max_examples": int(examples), "stateful_step_count": int(steps)}
    print(json.dumps(run(globals()[machine], settings(SETTINGS, **sizes, derandomize=not random_ones))))


def main(mutant: str) -> int:
    """1 when the machine finds a wrong read in a cache that is broken this way."""
    machine = VerifyingCacheMachine if mutant == "no checksums" else CacheMachine
    how = settings(SETTINGS, phases=[Phase.generate], database=None)
    try:
        with ExitStack() as stack:
            MUTANTS[mutant](stack)
            run(machine, how)
    except Exception as error:  # noqa: BLE001 - Hypothesis may report a flaky failure instead
        print(f"{type(error).__name__}: {error}"[:300])
    print(f"wrong reads: {done['wrong reads']}")
    return int(done["wrong reads"] > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]) if sys.argv[1] in MUTANTS else run_alone(*sys.argv[1:]))
