"""A node's share in loads of the whole cluster: what `POST /v1/load` starts, and what it says of how far it has come.

Whoever asks (`cluster_loading.py`) sends every node the same members, and each finds out by itself what of the selection it
is to hold. A job that nobody asks about any more ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from millrace.cache.blocks import object_id
from millrace.cache.node import CacheNode
from millrace.errors import DeniedError, MillraceError, RetryableError, UsageError
from millrace.filesystem.listing import ListingFileSystem
from millrace.filesystem.loading import LoadProgress, Share, Spans, load
from millrace.members import View
from millrace.origin import ObjectInfo, Origin
from millrace.peers.placement import Placement, stripe_count, stripe_span

_FORGOTTEN_AFTER_SECONDS = 60.0  # without a question: whoever asked for it is gone
_KEPT_SECONDS = 600.0
_MOST_KEPT = 256
_MOST_RUNNING = 16  # each has more than thirty threads
_MOST_KEYS = 10_000


@dataclass(frozen=True, kw_only=True)
class LoadOrder:
    """What a node is asked to load.

    `keys` are selections at the origin of `origin_identity`: an object, a prefix (with a slash at its end never an object),
    or a pattern. `members` take part; of each object the node loads what it owns among them, or with `copies` what it holds
    without owning it.
    """

    origin_identity: str
    keys: tuple[str, ...]
    members: View
    replicas: int = 1
    verify: bool = False
    copies: bool = False

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "origin": self.origin_identity,
            "keys": list(self.keys),
            "view": self.members.to_json(),
            "replicas": self.replicas,
            "verify": self.verify,
            "copies": self.copies,
        }

    @classmethod
    def from_json(cls, value: Any) -> LoadOrder:
        """The reverse of `to_json`. Raises `UsageError`."""
        try:
            keys = value["keys"]
            if not (isinstance(keys, list) and 0 < len(keys) <= _MOST_KEYS and all(isinstance(k, str) for k in keys)):
                raise ValueError("no keys")
            return cls(
                origin_identity=str(value["origin"]),
                keys=tuple(keys),
                members=View.from_json(value["view"]),
                replicas=max(1, int(value.get("replicas", 1))),
                verify=bool(value.get("verify")),
                copies=bool(value.get("copies")),
            )
        except (AttributeError, KeyError, TypeError, ValueError, MillraceError) as error:
            raise UsageError(
                f"this is no order to load: {error}", next_step="send what 'millrace load' of this version sends"
            ) from error


def share_of(member_id: str, order: LoadOrder) -> Share:
    """What a member is to load of each object."""
    placement = Placement(order.members, replicas=order.replicas)

    def is_mine(name: bytes, stripe: int) -> bool:
        holders = placement.holders(name, stripe)
        chosen = holders[1:] if order.copies else holders[:1]
        return any(member.id == member_id for member in chosen)

    def share(info: ObjectInfo) -> Spans:
        name = object_id(order.origin_identity, info.key, info.version, info.size)
        return [stripe_span(stripe, info.size) for stripe in range(stripe_count(info.size)) if is_mine(name, stripe)]

    return share


class NodeFiles(ListingFileSystem):
    """What a node lists and describes of one origin when it loads. No file system for users."""

    cachable = False

    def __init__(self, node: CacheNode, origin: Origin) -> None:
        super().__init__()
        self._node = node
        self._origin = origin

    @property
    def node(self) -> CacheNode:
        return self._node

    def key_of(self, path: str) -> str:
        return f"/{path.strip('/')}" if path.startswith("/") else path.strip("/")

    def unstrip_protocol(self, name: str) -> str:
        return f"{self._origin.identity.partition('+')[0]}://{name}"


class _CancelledError(Exception):
    """Ends a load from within."""


class LoadJobs:
    """The loads of one node, by the ids that askers gave them. Thread-safe.

    `node` keeps what is loaded; `find_origin` gives the origin of an identity, or None where the node has no access to it.
    """

    def __init__(self, node: CacheNode, find_origin: Callable[[str], Origin | None], *, member_id: str) -> None:
        self._node = node
        self._find_origin = find_origin
        self._member_id = member_id
        self._lock = threading.Lock()
        self._jobs: dict[str, _Job] = {}
        self._closed = False

    def start(self, job_id: str, order: LoadOrder) -> dict[str, Any]:
        """Begin a job, or find out how far it has come where it has begun.

        Raises `DeniedError` without access to the origin, `RetryableError` when too many are under way.
        """
        with self._lock:
            self._forget_old()
            job = self._jobs.get(job_id)
            if job is None:
                if self._closed:
                    raise UsageError("this node is about to end", next_step="ask the others")
                if sum(each.ended_at is None for each in self._jobs.values()) >= _MOST_RUNNING:
                    raise RetryableError(
                        f"{_MOST_RUNNING} loads are under way", next_step="wait for one of them to end"
                    )
                job = self._jobs[job_id] = self._begin(order)
        return job.state()

    def _begin(self, order: LoadOrder) -> _Job:
        origin = self._find_origin(order.origin_identity)
        if origin is None:
            raise DeniedError(
                f"it has no access to {order.origin_identity}",
                next_step="start it with --origin and the endpoint's URL, and credentials in its environment",
            )
        return _Job(NodeFiles(self._node, origin), order, share_of(self._member_id, order))

    def state(self, job_id: str) -> dict[str, Any] | None:
        """How far a job has come; None where it is not known."""
        with self._lock:
            job = self._jobs.get(job_id)
        return None if job is None else job.state()

    def cancel(self, job_id: str) -> None:
        """End a job; what has come stays. One that is not known, or has ended, is no error."""
        with self._lock:
            job = self._jobs.get(job_id)
        if job is not None:
            job.cancel()

    def running(self) -> int:
        """How many jobs are under way."""
        with self._lock:
            return sum(job.ended_at is None for job in self._jobs.values())

    def close(self) -> None:
        """End every job."""
        with self._lock:
            self._closed = True
            jobs = list(self._jobs.values())
        for job in jobs:
            job.cancel()
        for job in jobs:
            job.thread.join(5.0)

    def _forget_old(self) -> None:
        """Under the lock."""
        now = time.monotonic()
        ended = [name for name, job in self._jobs.items() if job.ended_at is not None]
        for name in ended:
            if now - (self._jobs[name].ended_at or now) > _KEPT_SECONDS or len(self._jobs) >= _MOST_KEPT:
                del self._jobs[name]


class _Job:
    """One load under way, in a thread of its own."""

    def __init__(self, fs: NodeFiles, order: LoadOrder, share: Share) -> None:
        self._fs = fs
        self._order = order
        self._share = share
        self._progress = LoadProgress()
        self._state = "running"
        self._error: MillraceError | None = None
        self._cancelled = threading.Event()
        self._asked_at = time.monotonic()
        self.ended_at: float | None = None
        self.thread = threading.Thread(target=self._run, name="millrace-load-job", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        state = "failed"
        try:
            load(self._fs, self._order.keys, progress=self._report, verify=self._order.verify, share=self._share)
            state = "done"
        except _CancelledError:
            state = "cancelled"
        except MillraceError as error:
            # What comes from below is raised with this node's numbers added, which say nothing of the whole.
            self._error = error.__cause__ if isinstance(error.__cause__, MillraceError) else error
        except Exception as error:  # noqa: BLE001 - the asker has to hear of it, whatever it is
            self._error = MillraceError(f"a defect: {type(error).__name__}: {error}", next_step="please report it")
        finally:
            self.ended_at = time.monotonic()
            self._state = state

    def _report(self, progress: LoadProgress) -> None:
        self._progress = progress
        if self._cancelled.is_set() or time.monotonic() - self._asked_at > _FORGOTTEN_AFTER_SECONDS:
            raise _CancelledError

    def state(self) -> dict[str, Any]:
        self._asked_at = time.monotonic()
        state = self._state  # before the progress: who reads "done" reads the last one
        answer: dict[str, Any] = {"state": state, "progress": asdict(self._progress)}
        if self._error is not None:
            answer["error"] = error_to_json(self._error)
        return answer

    def cancel(self) -> None:
        self._cancelled.set()


def error_to_json(error: MillraceError) -> Mapping[str, str]:
    """An error as plain values, for who is told of it on another machine."""
    return {"code": error.code, "message": error.message, "next_step": error.next_step}
