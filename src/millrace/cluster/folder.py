"""The folder of a node on its machine: the node claims it and publishes its view; other processes find and read it.

Below the first cache directory, `millrace/<name>.node/` contains

==============  ==========================================================================
`lock`          locked by the node while it runs
`id`            the member's id; survives the process, like the store next to it
`tag`           the name under which the node claimed the folder
`node.json`     the `NodeFacts` with the newest view; readable by this user only, because it contains the token
`breakers`      the state of the breakers, shared by the machine's processes
==============  ==========================================================================

With several cache directories, each contains the lock, the id and the facts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.cache.node import store_directory
from millrace.cluster.membership import NodeLink, View
from millrace.cluster.membership.backends import same_cluster
from millrace.config import BY_RAY, LOCAL_FOLDER, Amount, CacheOptions, Tls
from millrace.errors import ConfigurationError, DamagedError, StorageError
from millrace.runtime import forks
from millrace.runtime.failures import disk_errors, reason_of
from millrace.runtime.locks import is_byte_locked, try_lock_byte
from millrace.runtime.private_files import make_folder, make_way, opener, read_file, recreate, replace_file

_log = logging.getLogger("millrace.cluster")

_MOST_NODES = 1000
_ID = re.compile("[0-9a-f]{32}")
_STAT_SECONDS = 0.1
_SUFFIX = ".node"


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """The facts that a node publishes for the other processes of its machine.

    `members` is the node's option of that name, `pid` its process. Its limits `capacity` and `min_free` hold for every
    process that stores blocks in its folder.
    """

    member_id: str
    address: str
    token: str = field(repr=False)
    members: str
    replicas: int
    tls: Tls | None
    pid: int
    view: View
    capacity: Amount
    min_free: Amount

    def is_of_cluster(self, options: CacheOptions) -> bool:
        """Whether the node is in the cluster that `options.members` names; in a Ray job, whether Ray started it."""
        if options.members in BY_RAY:
            return self.members in BY_RAY
        return same_cluster(self.members, options.members)

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
            "capacity": [self.capacity.nbytes, self.capacity.share],
            "min_free": [self.min_free.nbytes, self.min_free.share],
        }

    @classmethod
    def from_json(cls, value: Any) -> NodeFacts:
        """The reverse of `to_json`; ignores unknown names. Raises `DamagedError`."""
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
                capacity=_amount(*value["capacity"]),
                min_free=_amount(*value["min_free"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DamagedError(f"not a description of a node: {error!r}") from error


def _amount(nbytes: Any, share: Any) -> Amount:
    return Amount(nbytes=int(nbytes)) if share is None else Amount(share=float(share))


class NodeFolder:
    """One node's claim on a folder. Thread-safe; a forked child does not hold it.

    `name` is the folder's name (`CacheOptions.folder`), `directory` its path, `member_id` the id stored in it.
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
        """Claim the first folder that no running node holds, of `local`, `node-1`, `node-2`, ...

        With a `tag`, a folder that was claimed with the same tag comes first. The folder of a dead node keeps its id and
        contents. Raises `ConfigurationError` if all thousand are held, `StorageError` if no cache directory can be used.
        """
        parents = _usable_parents(options)
        tagged = [
            name for name in _existing(parents[0]) if tag and _read(parents[0] / f"{name}{_SUFFIX}" / "tag") == tag
        ]
        for name in (*tagged, LOCAL_FOLDER, *(f"node-{number}" for number in range(1, _MOST_NODES))):
            folder = cls._try(name, parents, tag)
            if folder is not None:
                return folder
        raise ConfigurationError(
            f"{_MOST_NODES} nodes have a folder in {options.cache_dirs[0]}", next_step="choose another 'cache_dir'"
        )

    @classmethod
    def _try(cls, name: str, parents: Sequence[Path], tag: str) -> NodeFolder | None:
        """The folder, if it is free in every cache directory."""
        directories = [parent / f"{name}{_SUFFIX}" for parent in parents]
        locks: dict[Path, int] = {}
        try:
            # In sorted order, so that one of two concurrent claims succeeds.
            for directory in sorted(directories):
                with disk_errors(directory):
                    make_folder(directory)
                    descriptor = _lock(directory / "lock")
                if descriptor is None:
                    return None
                locks[directory] = descriptor
            member_id = _keep_id(directories)
            for directory in directories:
                # The facts of the last holder are invalid now.
                with disk_errors(directory):
                    (directory / "node.json").unlink(missing_ok=True)
                    _write(directory / "tag", tag)
            folder = cls(name, directories, locks, member_id)
            locks = {}
            return folder
        finally:
            for descriptor in locks.values():
                os.close(descriptor)

    def publish(self, facts: NodeFacts) -> None:
        """Publish facts for the machine's processes. They see them within 100 ms, and always complete.

        Raises `StorageError` if they cannot be written, or if the folder was removed and another node has claimed it.
        """
        text = json.dumps(facts.to_json())
        with self._publishing:
            if not self._locks:
                raise StorageError(f"{self.directory}: already closed", next_step="claim a folder again")
            for directory in self._directories:
                with disk_errors(directory):
                    self._hold(directory)
                    _write(directory / "node.json", text)

    def _hold(self, directory: Path) -> None:
        """Lock the folder again if it was removed."""
        path = directory / "lock"
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._locks[directory]), os.stat(path)):
                return
        make_folder(directory)
        descriptor = _lock(path)
        if descriptor is None:
            raise StorageError(
                f"{directory} was removed, and another node has claimed it", next_step="restart this node"
            )
        os.close(self._locks[directory])
        self._locks[directory] = descriptor
        _write(directory / "id", self.member_id)

    def close(self) -> None:
        """Release the folder. Removes the published facts; the id stays. Idempotent."""
        with self._publishing:
            for directory, descriptor in self._locks.items():
                with contextlib.suppress(OSError):  # without the lock the facts are ignored
                    (directory / "node.json").unlink(missing_ok=True)
                os.close(descriptor)
            self._locks = {}

    def _abandon(self) -> None:
        """In a forked child: close this copy of the descriptors. The parent keeps the lock."""
        for descriptor in self._locks.values():
            os.close(descriptor)
        self._locks = {}
        self._publishing = threading.Lock()


_held = forks.objects_reset_in_child(NodeFolder._abandon)


@dataclass(frozen=True, kw_only=True)
class LocalNode:
    """A node's `.node` directory and the facts that the node published there."""

    directory: Path
    facts: NodeFacts

    @classmethod
    def at(cls, directory: Path) -> LocalNode | None:
        """The node that published in this directory, running or dead; None without readable facts."""
        facts = read_facts(directory)
        return None if facts is None else cls(directory=directory, facts=facts)

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.directory.name.removesuffix(_SUFFIX)

    def link(self) -> NodeLink:
        """The link of a process that takes part in the cluster through this node."""
        return FolderViews(self.directory).link(self.facts)


def live_nodes(options: CacheOptions) -> list[LocalNode]:
    """The running nodes in the cache directories, in the order of their folders. Creates nothing, never raises.

    Leaves out nodes that have not published anything yet.
    """
    found: dict[str, LocalNode] = {}
    for cache_dir in options.cache_dirs:
        parent = store_directory(cache_dir).parent
        for name in _existing(parent):
            if name not in found and (node := live_node(parent / f"{name}{_SUFFIX}")) is not None:
                found[name] = node
    return sorted(found.values(), key=lambda node: _number(node.name))


def live_node(directory: Path) -> LocalNode | None:
    """The running node that holds this `.node` directory; None if there is none, or it has published nothing yet."""
    return LocalNode.at(directory) if is_held(directory) else None


def node_of_cluster(options: CacheOptions) -> LocalNode | None:
    """The first running node of this machine in the cluster of `options`, see `NodeFacts.is_of_cluster`."""
    return next((node for node in live_nodes(options) if node.facts.is_of_cluster(options)), None)


def is_held(directory: Path) -> bool:
    """Whether a running node holds the folder with this `.node` directory. Never raises."""
    try:
        descriptor = opener(str(directory / "lock"), os.O_RDONLY)
    except OSError:
        return False
    try:
        return is_byte_locked(descriptor, 0)
    except OSError as error:
        _log.warning("%s: cannot check whether a node holds it: %s", directory, reason_of(error))
        return False
    finally:
        os.close(descriptor)


def read_facts(directory: Path) -> NodeFacts | None:
    """The facts that a node of this user, running or dead, published last; None without any. Never raises.

    Facts of another user are ignored: the user who created the directory first could redirect this process's reads.
    """
    try:
        with open(directory / "node.json", "rb", opener=opener) as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                raise DamagedError("it belongs to another user")
            return NodeFacts.from_json(json.load(file))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, DamagedError) as error:
        _log.warning("%s: cannot read the facts that its node published: %s", directory, reason_of(error))
        return None


class FolderViews:
    """The `ViewSource` of the other processes: the view that the node in `directory` published last, also after its death.

    Checks the file at most every 100 ms. Thread-safe; after a fork, create a new one.
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
        return View(()) if facts is None else facts.view

    def facts(self) -> NodeFacts | None:
        """The facts that were published last; None before the first."""
        if time.monotonic() >= self._next_stat:
            self._refresh()
        return self._facts

    def link(self, facts: NodeFacts) -> NodeLink:
        """The link through the node that has published `facts` here."""
        return NodeLink(
            views=self,
            folder=self.directory.name.removesuffix(_SUFFIX),
            member_id=facts.member_id,
            token=facts.token,
            tls=facts.tls,
            replicas=facts.replicas,
            capacity=facts.capacity,
            min_free=facts.min_free,
        )

    def _refresh(self) -> None:
        if not self._reading.acquire(blocking=False):
            return  # another thread does it; the present facts are used meanwhile
        try:
            self._next_stat = time.monotonic() + _STAT_SECONDS
            try:
                status = os.stat(self.directory / "node.json")
            except OSError:
                return  # the node died or restarts: its last facts hold
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
            if seen != self._seen:
                facts = read_facts(self.directory)
                if facts is not None:
                    self._facts, self._seen = facts, seen
        finally:
            self._reading.release()


def _number(name: str) -> int:
    return 0 if name == LOCAL_FOLDER else int(name.removeprefix("node-"))


def _existing(parent: Path) -> list[str]:
    """The names of all folders of nodes, running or dead, in a cache directory, in order."""
    try:
        files = os.listdir(parent)
    except OSError:
        return []  # no cache yet, or a failing disk, which is reported when the store is opened
    names = [file.removesuffix(_SUFFIX) for file in files if file.endswith(_SUFFIX)]
    known = [name for name in names if name == LOCAL_FOLDER or name.removeprefix("node-").isdecimal()]
    return sorted(known, key=_number)


def _usable_parents(options: CacheOptions) -> list[Path]:
    """The parents of the folders in all writable cache directories."""
    usable: list[Path] = []
    first: StorageError | None = None
    for cache_dir in options.cache_dirs:
        parent = store_directory(cache_dir).parent
        try:
            with disk_errors(parent):
                make_folder(parent)
                if not os.access(parent, os.W_OK | os.X_OK):
                    raise StorageError(f"{parent}: not writable", next_step="choose another 'cache_dir'")
            usable.append(parent)
        except StorageError as error:
            first = first or error
            _log.warning("%s: not used by this node: %s", cache_dir, error)
    if not usable:
        raise first or StorageError("no cache directory")
    return usable


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock until it is closed; None if another node has the lock.

    The lock belongs to the open file: other descriptors can be closed, and two nodes in one process exclude each other.
    """
    make_way(path)
    descriptor = opener(str(path), os.O_RDWR | os.O_CREAT)
    locked = False
    try:
        locked = try_lock_byte(descriptor, 0)
    finally:
        if not locked:
            os.close(descriptor)
    return descriptor if locked else None


def _keep_id(directories: Sequence[Path]) -> str:
    """Write one id to all directories: that of the first with an id, or a new one."""
    ids = {directory: _read_id(directory / "id") for directory in directories}
    member_id = next(filter(None, ids.values()), "") or uuid.uuid4().hex
    for directory, old in ids.items():
        if old != member_id:
            with disk_errors(directory):
                _write(directory / "id", member_id)
    return member_id


def _read_id(path: Path) -> str:
    """The id in a file; empty without one."""
    text = _read(path)
    if text and not _ID.fullmatch(text):
        recreate(path, "does not contain the id of a node", lost="the share of the cluster's data that this node held")
        return ""
    return text


def _read(path: Path) -> str:
    try:
        return read_file(path).decode().strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        _log.warning("%s: cannot be read, and is written again: %s", path, reason_of(error))
        return ""


def _write(path: Path, text: str) -> None:
    """Replace a file atomically. Only the holder of the lock writes."""
    if not path.is_symlink():  # a link is replaced
        make_way(path)
    replace_file(path, text.encode())
