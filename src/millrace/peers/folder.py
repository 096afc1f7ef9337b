"""The folder of a node on its machine: who holds it, which member that is, and what it tells the machine's other processes.

Below the first cache directory, `millrace/<name>.node/` has

==============  ==========================================================================
`lock`          locked by the node for as long as it lives
`id`            the member's id, which outlives the process as the store beside it does
`tag`           what the node called itself when it took the folder
`node.json`     the `NodeFacts` with the newest view, for this user only: the token is in it
`breakers`      which peers do not answer, shared by the machine's processes
==============  ==========================================================================

With several cache directories the lock and the id are in each, and any of them says the rest.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import struct
import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

from millrace.cache.failures import disk_errors
from millrace.cache.node import store_directory
from millrace.config import LOCAL_FOLDER, Amount, CacheOptions, Tls
from millrace.errors import ConfigurationError, DamagedError, StorageError
from millrace.members import View
from millrace.private_files import make_folder, new_file, opener, read_file, require_file

_log = logging.getLogger("millrace")

_MOST_NODES = 1000
_STAT_SECONDS = 0.1

# A `struct flock`. Locks of this kind belong to the open file, not to the process: they can be asked for without being
# taken, closing another descriptor of the file does not end them, and two nodes in one process exclude each other.
_FLOCK = "hhqqi0q"


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """What a node tells the other processes of its machine.

    `members` is the option by which it found its cluster, `pid` its process. `capacity` and `min_free` are its limits (None:
    an older node, which does not say).
    """

    member_id: str
    address: str
    token: str = field(repr=False)
    members: str
    replicas: int
    tls: Tls | None
    pid: int
    view: View
    capacity: Amount | None = None
    min_free: Amount | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        tls = None if self.tls is None else {name: str(getattr(self.tls, name)) for name in ("cert", "key", "ca")}
        return {
            "member_id": self.member_id,
            "address": self.address,
            "token": self.token,
            "members": self.members,
            "replicas": self.replicas,
            "tls": tls,
            "pid": self.pid,
            "view": self.view.to_json(),
            "capacity": _plain(self.capacity),
            "min_free": _plain(self.min_free),
        }

    @classmethod
    def from_json(cls, value: Any) -> NodeFacts:
        """The reverse of `to_json`; unknown names are ignored. Raises `DamagedError`."""
        try:
            tls = value["tls"]
            return cls(
                member_id=str(value["member_id"]),
                address=str(value["address"]),
                token=str(value["token"]),
                members=str(value["members"]),
                replicas=int(value["replicas"]),
                tls=None if tls is None else Tls(**{name: Path(tls[name]) for name in ("cert", "key", "ca")}),
                pid=int(value["pid"]),
                view=View.from_json(value["view"]),
                capacity=_amount(value.get("capacity")),
                min_free=_amount(value.get("min_free")),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DamagedError(f"no description of a node: {error!r}") from error


def _plain(amount: Amount | None) -> dict[str, Any] | None:
    return None if amount is None else {"nbytes": amount.nbytes, "share": amount.share}


def _amount(value: Any) -> Amount | None:
    """The reverse of `_plain`. Raises what wrong values raise."""
    if value is None:
        return None
    nbytes, share = value["nbytes"], value["share"]
    return Amount(nbytes=int(nbytes)) if share is None else Amount(share=float(share))


class NodeFolder:
    """One node's claim on a folder. Thread-safe; a forked child does not hold it.

    `name` is the folder's (`CacheOptions.folder`), `directory` where its files lie, `member_id` the id kept there.
    """

    def __init__(self, name: str, directories: Sequence[Path], locks: dict[Path, int], member_id: str) -> None:
        self.name = name
        self.directory = directories[0]
        self.member_id = member_id
        self.breakers_path = self.directory / "breakers"
        self._directories = tuple(directories)
        self._locks = locks
        self._publishing = threading.Lock()
        _held.add(self)

    @classmethod
    def claim(cls, options: CacheOptions, *, tag: str = "") -> NodeFolder:
        """Take the first folder that no living node holds, of `local`, `node-1`, `node-2`, ...

        With a `tag` (what this node is called again after a restart) the folder that had it comes first. A dead node's
        folder comes with its id and contents.
        Raises `ConfigurationError` when a thousand are taken, `StorageError` when no cache directory can be used.
        """
        parents = _usable_parents(options)
        there = [name for name in _existing(parents[0]) if tag and _read(parents[0] / f"{name}.node" / "tag") == tag]
        for name in chain(there, _names()):
            folder = cls._try(name, parents, tag)
            if folder is not None:
                return folder
        raise ConfigurationError(
            f"{_MOST_NODES} nodes have a folder in {options.cache_dirs[0]}", next_step="choose another 'cache_dir'"
        )

    @classmethod
    def _try(cls, name: str, parents: Sequence[Path], tag: str) -> NodeFolder | None:
        """The folder, if it is free in every cache directory."""
        directories = [parent / f"{name}.node" for parent in parents]
        locks: dict[Path, int] = {}
        try:
            # In one order, whatever the order in the options: then of two that want the same one gets it.
            for directory in sorted(directories):
                with disk_errors(directory):
                    make_folder(directory)
                    descriptor = _lock(directory / "lock")
                if descriptor is None:
                    return None
                locks[directory] = descriptor
            member_id = _keep_id(directories)
            for directory in directories:
                # What the last holder said is not what this one says.
                with disk_errors(directory):
                    (directory / "node.json").unlink(missing_ok=True)
                    _write(directory / "tag", tag)
            folder = cls(name, directories, locks, member_id)
            locks = {}
            return folder
        finally:
            for descriptor in locks.values():
                os.close(descriptor)

    def publish(
        self,
        view: View,
        *,
        address: str,
        token: str,
        members: str,
        member_id: str | None = None,
        replicas: int = 1,
        tls: Tls | None = None,
        capacity: Amount | None = None,
        min_free: Amount | None = None,
    ) -> None:
        """Tell the machine's processes; they see it within 100 ms, and always whole.

        `member_id` is that of the membership where it is not the folder's (static members). Raises `StorageError` when it
        cannot be written, and when somebody removed the folder and another node has taken it since.
        """
        facts = NodeFacts(
            member_id=member_id or self.member_id,
            address=address,
            token=token,
            members=members,
            replicas=replicas,
            tls=tls,
            pid=os.getpid(),
            view=view,
            capacity=capacity,
            min_free=min_free,
        )
        text = json.dumps(facts.to_json())
        with self._publishing:
            if not self._locks:
                raise StorageError(f"{self.directory} was given up", next_step="claim a folder again")
            for directory in self._directories:
                with disk_errors(directory):
                    self._hold(directory)
                    _write(directory / "node.json", text)

    def _hold(self, directory: Path) -> None:
        """Lock the folder again if somebody has removed it."""
        path = directory / "lock"
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._locks[directory]), os.stat(path)):
                return
        make_folder(directory)
        descriptor = _lock(path)
        if descriptor is None:
            raise StorageError(f"{directory} was removed, and another node has taken it", next_step="restart this node")
        os.close(self._locks[directory])
        self._locks[directory] = descriptor
        _write(directory / "id", self.member_id)

    def close(self) -> None:
        """Give the folder up. What was published goes, the id stays. Idempotent."""
        with self._publishing:
            for directory, descriptor in self._locks.items():
                with contextlib.suppress(
                    OSError
                ):  # a disk that fails keeps the file; without the lock nobody believes it
                    (directory / "node.json").unlink(missing_ok=True)
                os.close(descriptor)
            self._locks = {}

    def _forget(self) -> None:
        """In a forked child: the lock is the parent's. Closing this copy of the descriptor does not end it."""
        for descriptor in self._locks.values():
            os.close(descriptor)
        self._locks = {}
        self._publishing = threading.Lock()


_held: weakref.WeakSet[NodeFolder] = weakref.WeakSet()


def _forget_all() -> None:
    for folder in list(_held):
        folder._forget()


os.register_at_fork(after_in_child=_forget_all)


@dataclass(frozen=True, kw_only=True)
class LiveNode:
    """A folder that a living node holds, and what that node has published."""

    name: str
    directory: Path
    facts: NodeFacts


def live_nodes(options: CacheOptions) -> list[LiveNode]:
    """The nodes that live in the cache directories, in the order of their folders. Makes nothing, never raises.

    A node that has not published anything yet is not among them.
    """
    found: dict[str, LiveNode] = {}
    for cache_dir in options.cache_dirs:
        parent = store_directory(cache_dir).parent
        for name in _existing(parent):
            directory = parent / f"{name}.node"
            if name not in found and is_held(directory):
                facts = read_facts(directory)
                if facts is not None:
                    found[name] = LiveNode(name=name, directory=directory, facts=facts)
    return sorted(found.values(), key=lambda node: _number(node.name))


def is_held(directory: Path) -> bool:
    """Whether a living node holds the folder with this `.node` directory. Never raises."""
    try:
        descriptor = opener(str(directory / "lock"), os.O_RDONLY)
    except OSError:
        return False
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        return bool(struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK)
    except OSError as error:
        _log.warning("cannot tell whether a node holds %s: %s", directory, error)
        return False
    finally:
        os.close(descriptor)


def read_facts(directory: Path) -> NodeFacts | None:
    """What was last published there by a node of this user, which lives or has died; None where nothing was. Never raises.

    Of another user nothing is believed: who made the directory first could have us read whatever he likes.
    """
    try:
        with open(directory / "node.json", "rb", opener=opener) as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                raise DamagedError("it belongs to another user")
            return NodeFacts.from_json(json.load(file))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, DamagedError) as error:
        _log.warning("cannot read what the node in %s says: %s", directory, error)
        return None


class FolderViews:
    """The `ViewSource` of the other processes: what the node in `directory` published last, also after its death.

    Looks at the file once in 100 ms at most. Thread-safe; after a fork, make a new one.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._facts: NodeFacts | None = None
        self._seen: tuple[int, int, int] | None = None
        self._next_stat = 0.0
        self._reading = threading.Lock()
        self._refresh()

    def view(self) -> View:
        facts = self.facts()
        return _EMPTY if facts is None else facts.view

    def facts(self) -> NodeFacts | None:
        """All that was published last; None before the first time."""
        if time.monotonic() >= self._next_stat:
            self._refresh()
        return self._facts

    def _refresh(self) -> None:
        if not self._reading.acquire(blocking=False):
            return  # another thread is at it, and what is known is good enough meanwhile
        try:
            self._next_stat = time.monotonic() + _STAT_SECONDS
            try:
                status = os.stat(self.directory / "node.json")
            except OSError:
                return  # the node has just died or is just being restarted: what it said last holds
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
            if seen != self._seen:
                facts = read_facts(self.directory)
                if facts is not None:
                    self._facts, self._seen = facts, seen
        finally:
            self._reading.release()


_EMPTY = View(())


def _names() -> Iterator[str]:
    yield LOCAL_FOLDER
    for number in count(1):
        if number == _MOST_NODES:
            return
        yield f"node-{number}"


def _number(name: str) -> int:
    return 0 if name == LOCAL_FOLDER else int(name.removeprefix("node-"))


def _existing(parent: Path) -> list[str]:
    """The folders in a cache directory that a node has or had, in order."""
    try:
        files = os.listdir(parent)
    except OSError:
        return []  # no cache here yet, or a disk in trouble, which whoever opens the store says
    names = [file.removesuffix(".node") for file in files if file.endswith(".node")]
    known = [name for name in names if name == LOCAL_FOLDER or name.removeprefix("node-").isdecimal()]
    return sorted(known, key=_number)


def _usable_parents(options: CacheOptions) -> list[Path]:
    """Where the folders lie in each cache directory that can be written to."""
    usable: list[Path] = []
    first: StorageError | None = None
    for cache_dir in options.cache_dirs:
        parent = store_directory(cache_dir).parent
        try:
            with disk_errors(parent):
                make_folder(parent)
                if not os.access(parent, os.W_OK | os.X_OK):
                    raise StorageError(f"{parent} cannot be written to", next_step="choose another 'cache_dir'")
            usable.append(parent)
        except StorageError as error:
            first = first or error
            _log.warning("no node in %s: %s", cache_dir, error)
    if not usable:
        raise first or StorageError("no cache directory")
    return usable


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock until it is closed; None when another has it."""
    require_file(path)
    descriptor = opener(str(path), os.O_RDWR | os.O_CREAT)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _keep_id(directories: Sequence[Path]) -> str:
    """The id that the first of them has, or a new one; then in all of them."""
    ids = {directory: _read(directory / "id") for directory in directories}
    member_id = next(filter(None, ids.values()), "") or uuid.uuid4().hex
    for directory, old in ids.items():
        if old != member_id:
            with disk_errors(directory):
                _write(directory / "id", member_id)
    return member_id


def _read(path: Path) -> str:
    try:
        return read_file(path).decode().strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        _log.warning("%s cannot be read and is written anew: %s", path, error)
        return ""


def _write(path: Path, text: str) -> None:
    """Replace a file in one step. Only the lock's holder writes here, so the temporary name is free."""
    temporary = path.with_name(f"{path.name}.new")
    with open(new_file(temporary), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # a name may come back without its contents after a crash of the machine
    os.replace(temporary, path)
