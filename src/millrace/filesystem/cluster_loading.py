"""`fs.load` in a cluster: every node brings its share of what is asked for to its disks, and whoever asked sums up.

The asker needs to reach the nodes, nothing else. When members come or go it asks again, with those that are there now: what
has come is skipped, and what a lost node was to load belongs to others.
"""

from __future__ import annotations

import contextlib
import importlib
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from millrace import errors
from millrace.config import CacheOptions
from millrace.errors import DiskFullError, MillraceError, ObjectNotFoundError, PeerError, PeerRefusedError
from millrace.filesystem.listing import ListingFileSystem
from millrace.filesystem.load_jobs import LoadOrder
from millrace.filesystem.loading import LoadProgress, complete, with_progress
from millrace.members import Member, MemberState, View, ViewSource
from millrace.peers.attach import link_for
from millrace.peers.client import PeerClient

_POLL_SECONDS = 0.5
_FIRST_POLL_SECONDS = 0.02
_DEADLINE_SECONDS = 3.0
_CANCEL_SECONDS = 1.0
_JOIN_SECONDS = 30.0
_RATE_SECONDS = 5.0
_THREADS = 16
_LOST_AFTER_FAILURES = 3

_NUMBERS = (
    "objects",
    "nbytes",
    "done_objects",
    "done_bytes",
    "fetched_bytes",
    "bad_blocks",
    "missing_objects",
    "left_objects",
)


def load_on_own_cluster(
    fs: ListingFileSystem,
    options: CacheOptions,
    urls: str | Iterable[str],
    *,
    progress: Callable[[LoadProgress], None] | None = None,
    verify: bool = False,
) -> LoadProgress | None:
    """Load on the cluster that a file system's options name; None where there is none, or it has no nodes, and for local
    files, which no node reads for another.
    """
    if fs._origin.head_is_local:
        return None
    link = link_for(options, fs._origin)
    if link is not None and options.members in ("auto", "ray"):
        start_everywhere(options, link.views)
    if link is None or not participants(link.views.view()):
        return None
    client = PeerClient(token=link.token, tls=link.tls)
    try:
        return load_on_cluster(
            link.views,
            client,
            fs._origin.identity,
            keys_of(fs, urls),
            replicas=link.replicas,
            verify=verify,
            progress=progress,
        )
    finally:
        client.close()


def start_everywhere(options: CacheOptions, views: ViewSource) -> None:
    """In Ray nodes start at their first use on their machine. Start all, and wait until the views show them.

    For whoever loads or places work by the owners. Raises `OriginUnavailableError` when Ray's control plane does not answer.
    """
    # By name: nothing but that module may import ray.
    start: Any = importlib.import_module("millrace.members.ray").start_everywhere
    wanted = start(options)
    deadline = time.monotonic() + _JOIN_SECONDS
    while not wanted <= {member.id for member in participants(views.view())} and time.monotonic() < deadline:
        time.sleep(_FIRST_POLL_SECONDS)


def keys_of(fs: ListingFileSystem, urls: str | Iterable[str]) -> list[str]:
    """What a file system's URLs are called at its origin; a slash at the end, which means a prefix, stays."""
    chosen = [urls] if isinstance(urls, str) else list(urls)
    return [fs.key_of(url) + ("/" if url.endswith("/") else "") for url in chosen]


def load_on_cluster(
    views: ViewSource,
    client: PeerClient,
    origin_identity: str,
    keys: Iterable[str],
    *,
    replicas: int = 1,
    verify: bool = False,
    progress: Callable[[LoadProgress], None] | None = None,
) -> LoadProgress:
    """Bring everything that `keys` select at an origin to the disks of the cluster; returns when it is there.

    Any exception in the calling thread, also from `progress`, ends the load on all nodes. Raises what `CacheManagement.load`
    raises, `DeniedError` where a node has no access to the origin, and `OriginUnavailableError` where no node answers.
    """
    order = LoadOrder(
        origin_identity=origin_identity, keys=tuple(keys), members=View(()), replicas=replicas, verify=verify
    )
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="millrace-load-ask") as pool:
        load = _ClusterLoad(views, client, order, pool, progress or (lambda _: None))
        return load.run()


def participants(view: View) -> tuple[Member, ...]:
    """The members that a load is divided among: those that are here, or else those that are joining."""
    here = tuple(member for member in view.members if member.state is MemberState.HERE)
    return here or tuple(member for member in view.members if member.state is MemberState.JOINING)


@dataclass
class _Share:
    """What one node said of its share, and how often in a row it did not answer."""

    member: Member
    numbers: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_NUMBERS, 0))
    listed: bool = False
    state: str = "running"
    error: MillraceError | None = None
    failures: int = 0

    def hear(self, answer: Mapping[str, Any]) -> None:
        told = answer.get("progress") or {}
        self.numbers = {name: int(told.get(name, 0)) for name in _NUMBERS}
        self.listed = bool(told.get("listed"))
        self.state = str(answer.get("state"))
        if (error := answer.get("error")) is not None:
            self.error = _error_of(self.member, error)


class _ClusterLoad:
    """One load: rounds, each with a fixed set of members, until one of them comes to its end."""

    def __init__(
        self,
        views: ViewSource,
        client: PeerClient,
        order: LoadOrder,
        pool: ThreadPoolExecutor,
        report: Callable[[LoadProgress], None],
    ) -> None:
        self._views = views
        self._client = client
        self._order = order
        self._pool = pool
        self._report = report
        self._name = uuid.uuid4().hex
        self._rounds = 0
        self._job = ""
        self._shares: list[_Share] = []
        self._lost: set[str] = set()
        self._before = dict.fromkeys(_NUMBERS, 0)  # what rounds that were given up had done
        self._started = time.monotonic()
        self._samples: deque[tuple[float, int]] = deque([(self._started, 0)])

    def run(self) -> LoadProgress:
        try:
            state = self._to_the_end(self._order)
            if self._order.replicas > 1 and len(self._shares) > 1:
                self._before = dict.fromkeys(_NUMBERS, 0)
                copies = self._to_the_end(replace(self._order, copies=True), told_as=state)
                state = replace(state, left_objects=state.left_objects + copies.left_objects)
        except BaseException:
            self._cancel(self._shares)
            raise
        first_missing = next((s.error.message for s in self._shares if s.numbers["missing_objects"] and s.error), "")
        return complete(state, first_missing=first_missing or "not known")

    def _to_the_end(self, order: LoadOrder, *, told_as: LoadProgress | None = None) -> LoadProgress:
        """Have every node load its share; gives the sums. `told_as` is reported in place of the progress."""
        self._begin(order)
        pause = _FIRST_POLL_SECONDS
        while True:
            self._poll(order)
            state = self._progress()
            self._report(told_as or state)
            self._raise_errors(state)
            if self._members_changed():
                self._begin(order)
            elif all(share.state != "running" for share in self._shares):
                return state
            else:
                time.sleep(pause)
                pause = min(2 * pause, _POLL_SECONDS)

    # --- rounds -----------------------------------------------------------------------------------

    def _present(self) -> tuple[Member, ...]:
        return tuple(member for member in participants(self._views.view()) if member.id not in self._lost)

    def _members_changed(self) -> bool:
        self._lost |= {share.member.id for share in self._shares if share.failures >= _LOST_AFTER_FAILURES}
        return {member.id for member in self._present()} != {share.member.id for share in self._shares}

    def _begin(self, order: LoadOrder) -> None:
        """Give up the round under way, and begin one with the members that are there."""
        self._cancel(self._shares)
        members = self._present()
        if not members:
            raise with_progress(
                errors.OriginUnavailableError(
                    "no node of the cluster answers", next_step="see to the nodes: 'millrace status' shows them"
                ),
                self._progress(),
            )
        for name in ("fetched_bytes", "bad_blocks"):
            self._before[name] += sum(share.numbers[name] for share in self._shares)
        self._rounds += 1
        self._job = f"{self._name}-{self._rounds}"
        view = View.of(replace(member, state=MemberState.HERE) for member in members)
        self._shares = [_Share(member) for member in members]
        self._ask_all(replace(order, members=view))

    def _poll(self, order: LoadOrder) -> None:
        view = View.of(replace(share.member, state=MemberState.HERE) for share in self._shares)
        order = replace(order, members=view)
        list(self._pool.map(lambda share: self._hear(share, order), [s for s in self._shares if s.state == "running"]))

    def _ask_all(self, order: LoadOrder) -> None:
        list(self._pool.map(lambda share: self._ask(share, order), self._shares))

    def _ask(self, share: _Share, order: LoadOrder) -> None:
        self._exchange(share, "POST", "/v1/load", {"job": self._job, **order.to_json()})

    def _hear(self, share: _Share, order: LoadOrder) -> None:
        if not self._exchange(share, "GET", f"/v1/load/{self._job}"):
            self._ask(share, order)  # it was started anew since, or has not heard of it yet

    def _exchange(self, share: _Share, method: str, path: str, body: Any = None) -> bool:
        """Ask a node, and take down what it says; whether it knows what it was asked about."""
        try:
            answer = self._client.call(share.member, method, path, body, deadline=_DEADLINE_SECONDS)
        except PeerRefusedError as error:
            if method == "GET" and error.status == 404:
                return False
            if error.status >= 500:
                share.failures += 1
            else:
                share.state, share.error = "failed", _refusal(share.member, error)
        except PeerError:  # silent, or nothing that can be spoken with
            share.failures += 1
        else:
            share.failures = 0
            share.hear(answer)
        return True

    def _cancel(self, shares: Sequence[_Share]) -> None:
        job = self._job

        def cancel(share: _Share) -> None:
            with contextlib.suppress(MillraceError):  # it ends by itself when nobody asks about it
                self._client.call(share.member, "DELETE", f"/v1/load/{job}", deadline=_CANCEL_SECONDS)

        list(self._pool.map(cancel, [share for share in shares if share.state == "running" and not share.failures]))

    # --- sums -------------------------------------------------------------------------------------

    def _progress(self) -> LoadProgress:
        sums = {name: self._before[name] + sum(share.numbers[name] for share in self._shares) for name in _NUMBERS}
        now = time.monotonic()
        self._samples.append((now, sums["fetched_bytes"]))
        while len(self._samples) > 2 and now - self._samples[0][0] > _RATE_SECONDS:
            self._samples.popleft()
        (then, before), (now, after) = self._samples[0], self._samples[-1]
        return LoadProgress(
            **sums,
            listed=bool(self._shares) and all(share.listed for share in self._shares),
            nodes=len(self._shares),
            seconds=now - self._started,
            bytes_per_second=max(0.0, (after - before) / (now - then)) if now > then else 0.0,
        )

    def _raise_errors(self, state: LoadProgress) -> None:
        """Raise what ended a node's share, but for what leaves only some objects out."""
        for share in self._shares:
            if share.error is None:
                continue
            left_out = isinstance(share.error, DiskFullError) and share.numbers["left_objects"]
            gone = isinstance(share.error, ObjectNotFoundError) and share.numbers["missing_objects"]
            if not (left_out or gone):
                raise with_progress(share.error, state)


_BY_CODE: Mapping[str, type[MillraceError]] = {
    value.code: value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, MillraceError)
}


def _error_of(member: Member, told: Mapping[str, Any]) -> MillraceError:
    """The error that a node told of."""
    kind = _BY_CODE.get(str(told.get("code")), MillraceError)
    return kind(f"node {member.address}: {told.get('message')}", next_step=str(told.get("next_step") or ""))


def _refusal(member: Member, error: PeerRefusedError) -> MillraceError:
    return type(error)(f"node {member.address}: {error.message}", next_step=error.next_step)
