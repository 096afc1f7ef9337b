"""A node's share in loads of the whole cluster: the jobs that `POST /v1/load` starts, and their progress.

The client (`filesystem/cluster_loading.py`) sends every node the same members, and each node determines its own share of
the selection. A job whose client no longer polls it ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from millrace.cache.eviction.usage import url_of
from millrace.cache.node import CacheNode
from millrace.cluster.load_order import LoadOrder
from millrace.cluster.placement import Placement, stripe_count, stripe_span
from millrace.errors import DeniedError, MillraceError, UsageError, without_queries
from millrace.filesystem.listing import ListingFileSystem
from millrace.filesystem.loading import LoadProgress, Share, Spans, load
from millrace.origin import ObjectInfo, Origin
from millrace.store.records import object_id

_ABANDONED_SECONDS = 60.0  # without a poll: the client is gone
_KEPT_SECONDS = 600.0
_MOST_KEPT = 256
_MOST_URLS = 10
_MOST_RUNNING = 16  # each has more than thirty threads


def share_of(member_id: str, order: LoadOrder) -> Share:
    """Returns the function for the spans of an object that a member has to load."""
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
    """Lists and describes one origin for the load jobs of a node. Not a file system for users."""

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
    """Ends a load from inside."""


class LoadJobs:
    """The load jobs of one node, by the ids that clients chose. Thread-safe.

    `node` stores the loaded blocks. `find_origin` returns the origin of an identity, or None without access to it.
    """

    def __init__(self, node: CacheNode, find_origin: Callable[[str], Origin | None], *, member_id: str) -> None:
        self._node = node
        self._find_origin = find_origin
        self._member_id = member_id
        self._lock = threading.Lock()
        self._jobs: dict[str, _LoadJob] = {}
        self._closed = False

    def start(self, job_id: str, order: LoadOrder) -> dict[str, Any]:
        """Start a job unless it exists; returns its state. If too many jobs are running, it is not started, and waits for
        the next request of its client. Raises `DeniedError` without access to the origin.
        """
        with self._lock:
            known = self._known(job_id)
        if known is not None:
            return known
        origin = self._find_origin(order.origin_identity)  # without the lock: it may wait for Ray's control plane
        with self._lock:
            known = self._known(job_id)
            if known is not None:
                return known
            if origin is None:
                raise DeniedError(
                    f"no access to {order.origin_identity}",
                    next_step="start it with --origin and the endpoint's URL, and credentials in its environment",
                )
            job = self._jobs[job_id] = _LoadJob(NodeFiles(self._node, origin), order, share_of(self._member_id, order))
        return job.state()

    def _known(self, job_id: str) -> dict[str, Any] | None:
        """The state of a job that exists or cannot start now; None if it can start. Call with the lock held."""
        self._remove_old()
        job = self._jobs.get(job_id)
        if job is not None:
            return job.state()
        if self._closed:
            raise UsageError("this node is stopping", next_step="use the other nodes")
        is_full = sum(each.ended_at is None for each in self._jobs.values()) >= _MOST_RUNNING
        return {"state": "running", "progress": {}} if is_full else None

    def state(self, job_id: str) -> dict[str, Any] | None:
        """The state of a job; None for an unknown one."""
        with self._lock:
            job = self._jobs.get(job_id)
        return None if job is None else job.state()

    def cancel(self, job_id: str) -> None:
        """End a job; loaded blocks stay. Does nothing for an unknown or ended job."""
        with self._lock:
            job = self._jobs.get(job_id)
        if job is not None:
            job.cancel()

    def running(self) -> int:
        """The number of running jobs."""
        with self._lock:
            return sum(job.ended_at is None for job in self._jobs.values())

    def running_loads(self) -> list[dict[str, Any]]:
        """The running jobs with their URLs and their progress. Unlike `state`, this does not keep a job alive."""
        with self._lock:
            running = [(name, job) for name, job in self._jobs.items() if job.ended_at is None]
        return [{"job": name, "urls": job.urls(), **asdict(job.progress)} for name, job in running]

    def close(self) -> None:
        """End every job."""
        with self._lock:
            self._closed = True
            jobs = list(self._jobs.values())
        for job in jobs:
            job.cancel()
        for job in jobs:
            job.thread.join(5.0)

    def _remove_old(self) -> None:
        """Under the lock."""
        now = time.monotonic()
        ended = [name for name, job in self._jobs.items() if job.ended_at is not None]
        for name in ended:
            if now - (self._jobs[name].ended_at or now) > _KEPT_SECONDS or len(self._jobs) >= _MOST_KEPT:
                del self._jobs[name]


class _LoadJob:
    """One load under way, in a thread of its own."""

    def __init__(self, fs: NodeFiles, order: LoadOrder, share: Share) -> None:
        self._fs = fs
        self._order = order
        self._share = share
        self.progress = LoadProgress()
        self._state = "running"
        self._error: MillraceError | None = None
        self._cancelled = threading.Event()
        self._polled_at = time.monotonic()
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
            # `load` adds this node's numbers to the error; they are not those of the whole load.
            self._error = error.__cause__ if isinstance(error.__cause__, MillraceError) else error
        except BaseException as error:  # noqa: BLE001 - any error: the client raises it
            self._error = MillraceError(f"a defect: {type(error).__name__}: {error}", next_step="please report it")
        finally:
            self.ended_at = time.monotonic()
            self._state = state

    def _report(self, progress: LoadProgress) -> None:
        self.progress = progress
        if self._cancelled.is_set() or time.monotonic() - self._polled_at > _ABANDONED_SECONDS:
            raise _CancelledError

    def state(self) -> dict[str, Any]:
        self._polled_at = time.monotonic()
        state = self._state  # before the progress: with "done" comes the last progress
        response: dict[str, Any] = {"state": state, "progress": asdict(self.progress)}
        if self._error is not None:
            response["error"] = error_to_json(self._error)
        return response

    def urls(self) -> list[str]:
        """The URLs of the selection, without queries."""
        return [without_queries(url_of(self._order.origin_identity, key)) for key in self._order.keys[:_MOST_URLS]]

    def cancel(self) -> None:
        self._cancelled.set()


def error_to_json(error: MillraceError) -> Mapping[str, str]:
    """An error as plain values, for a response."""
    return {"code": error.code, "message": error.message, "next_step": error.next_step}
