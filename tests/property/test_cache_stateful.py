"""A state machine against a plain dict: whatever happens to the cache, a read gives the bytes of one version, the right one.

Local files are the origin (a real one, whose versions are told apart by inode, size and time), a directory the store, small
enough to be always full.
"""

import os
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

import millrace
from millrace.cache.node import close_nodes
from millrace.errors import ChangedError

KEYS = [f"{directory}/{number}" for directory in ("a", "b/c") for number in range(3)]
SIZES = st.sampled_from([0, 1, 26_000, 300_000, 1 << 20, (1 << 20) + 1, 4 << 20, (4 << 20) + 1, 9_000_000])


def _content(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


class CacheMachine(RuleBasedStateMachine):
    """Opens, reads, overwrites, evictions, resizes, restarts and crashes, in any order."""

    native = True
    handles = Bundle("handles")

    @initialize(capacity=st.sampled_from(["0", "6MiB", "20MiB", "10GB"]))
    def start(self, capacity: str) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="millrace-stateful-"))
        self.data = self.base / "data"
        self.store = self.base / "cache"
        self.capacity = capacity
        self.truth: dict[str, bytes] = {}
        self.versions = 0
        self.opened: list[object] = []
        self._open()

    def _open(self) -> None:
        self.fs = millrace.filesystem(
            "file",
            cache_dir=str(self.store),
            capacity=self.capacity,
            min_free=0,
            consistency="always",
            native=self.native,
            skip_instance_cache=True,
        )

    def _path(self, key: str) -> str:
        return str(self.data / key)

    def _new(self, size: int) -> bytes:
        self.versions += 1
        return _content(self.versions, size)

    def teardown(self) -> None:
        if hasattr(self, "base"):
            self._close()
            shutil.rmtree(self.base)

    def _close(self) -> None:
        for file in self.opened:
            file.close()
        self.opened.clear()
        close_nodes()

    # --- the origin changes -----------------------------------------------------------------------

    @rule(key=st.sampled_from(KEYS), size=SIZES)
    def write_through_the_file_system(self, key: str, size: int) -> None:
        data = self._new(size)
        self.fs.makedirs(self._path(key).rpartition("/")[0], exist_ok=True)
        self.fs.pipe_file(self._path(key), data)
        self.truth[key] = data

    @rule(key=st.sampled_from(KEYS), size=SIZES)
    def write_behind_its_back(self, key: str, size: int) -> None:
        data = self._new(size)
        path = self.data / key
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.base / "incoming"
        temporary.write_bytes(data)
        os.replace(temporary, path)
        self.truth[key] = data

    @rule(key=st.sampled_from(KEYS), through=st.booleans())
    def remove(self, key: str, through: bool) -> None:
        if key in self.truth:
            if through:
                self.fs.rm(self._path(key))
            else:
                os.unlink(self._path(key))
            del self.truth[key]

    # --- reading ----------------------------------------------------------------------------------

    @rule(key=st.sampled_from(KEYS), how=st.sampled_from(["stream", "random", "fsspec", "cat"]))
    def read_all(self, key: str, how: str) -> None:
        path = self._path(key)
        expected = self.truth.get(key)
        if expected is None:
            with pytest.raises(FileNotFoundError):
                self.fs.cat_file(path)
            return
        if how == "stream":
            with self.fs.open_input_stream(path) as stream:
                data = stream.read()
        elif how == "random":
            with self.fs.open_input_file(path) as file:
                data = file.read()
        elif how == "fsspec":
            with self.fs.open(path) as file:
                data = file.read()
        else:
            data = self.fs.cat_file(path)
        assert data == expected

    @rule(key=st.sampled_from(KEYS), start=st.floats(0, 1), length=st.sampled_from([1, 1000, 70_000, 5_000_000]))
    def read_a_range(self, key: str, start: float, length: int) -> None:
        expected = self.truth.get(key)
        if expected:
            first = int(start * len(expected))
            assert self.fs.cat_file(self._path(key), first, first + length) == expected[first : first + length]

    @rule(target=handles, key=st.sampled_from(KEYS), native=st.booleans())
    def keep_open(self, key: str, native: bool) -> object:
        if key not in self.truth:
            return multiple()
        file = self.fs.open_input_file(self._path(key)) if native else self.fs.open(self._path(key))
        self.opened.append(file)
        return file, self.truth[key]

    @rule(handle=handles, start=st.floats(0, 1), length=st.sampled_from([1, 70_000, 10_000_000]))
    def read_what_was_opened(self, handle: tuple[object, bytes], start: float, length: int) -> None:
        file, version = handle
        if file.closed:
            return
        first = int(start * len(version))
        try:
            file.seek(first)
            data = file.read(length)
        except (ChangedError, FileNotFoundError):
            return  # this version is neither here nor at the origin any more: said, not mixed
        assert data == version[first : first + length]

    @rule(handle=consumes(handles))
    def close_one(self, handle: tuple[object, bytes]) -> None:
        handle[0].close()

    # --- the cache changes ------------------------------------------------------------------------

    @rule(key=st.sampled_from(KEYS))
    def free(self, key: str) -> None:
        self.fs.free([self._path(key)])

    @rule(capacity=st.sampled_from(["0", "3MiB", "12MiB", "1GB"]))
    def resize(self, capacity: str) -> None:
        self.fs.resize(capacity)

    @rule()
    def restart(self) -> None:
        self._close()
        self._open()

    @rule(
        damage=st.sampled_from(["none", "flip", "zero", "cut", "delete", "directory", "index", "empty"]),
        seed=st.integers(0, 1 << 20),
    )
    def crash_of_the_machine(self, damage: str, seed: int) -> None:
        """Another boot finds the store as a crash without fsync may leave it."""
        self._close()
        choice = random.Random(seed)
        marker = next(self.store.rglob("FORMAT"), None)
        if marker is None:  # nothing was read yet: there is no store
            self._open()
            return
        name, *_ = marker.read_text().splitlines()
        if choice.random() < 0.7:
            marker.write_text(f"{name}\n00000000-0000-0000-0000-{seed:012}\n")
        if damage == "index":
            shutil.rmtree(marker.parent / "index", ignore_errors=True)  # an earlier crash may have taken it
        elif damage == "empty":
            for path in (marker.parent / "index").glob("*"):
                path.write_bytes(b"")
        else:
            files = sorted(
                path
                for folder in ("objects", "segments")
                for path in (marker.parent / folder).rglob("*")
                if path.is_file()
            )
            for path in choice.sample(files, min(2, len(files))):
                _damage(path, damage, choice)
        self._open()

    @invariant()
    def the_store_stays_inside_its_directory(self) -> None:
        if hasattr(self, "base"):
            assert {path.name for path in self.base.iterdir()} <= {"data", "cache", "incoming"}


def _damage(path: Path, damage: str, choice: random.Random) -> None:
    size = path.stat().st_size
    position = choice.randrange(max(1, size))
    if damage in ("flip", "zero"):
        with open(path, "r+b") as file:
            file.seek(position)
            data = file.read(8192)
            file.seek(position)
            file.write(bytes(byte ^ 0x40 for byte in data[:1]) if damage == "flip" else bytes(len(data)))
    elif damage == "cut":
        os.truncate(path, position)
    elif damage in ("delete", "directory"):
        path.unlink()
        if damage == "directory":
            path.mkdir()


class VerifyingCacheMachine(CacheMachine):
    """The same without maps, where every read is verified."""

    native = False


_SETTINGS = settings(
    max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)

TestCache = CacheMachine.TestCase
TestCache.settings = _SETTINGS
TestVerifyingCache = VerifyingCacheMachine.TestCase
TestVerifyingCache.settings = settings(_SETTINGS, max_examples=8)
