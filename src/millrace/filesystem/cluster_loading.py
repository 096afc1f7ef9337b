"""`fs.load` in a cluster: every node loads its share to its disks, and the client adds up the progress.

The client only needs connections to the nodes. When members join or leave, it starts a new round with the present members:
cached blocks are skipped, and the share of a lost node belongs to others. It does the same after nodes cancelled its job.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from millrace import errors
from millrace.cluster.attach import link_for
from millrace.cluster.dataplane.client import PeerClient
from millrace.cluster.dataplane.wire import LOAD_PATH, MAX_ORDER_BYTES
from millrace.cluster.load_order import MOST_KEYS, LoadOrder
from millrace.cluster.membership import Member, MemberState, View, ViewSource
from millrace.cluster.node_starter import node_starter
from millrace.config import CacheOptions
from millrace.errors import (
    DiskFullError,
    MillraceError,
    ObjectNotFoundError,
    PeerError,
    PeerRefusedError,
    UsageError,
)
from millrace.filesystem.listing import ListingFileSystem
from millrace.filesystem.loading import LoadProgress, Rate, complete, with_progress
from millrace.origin.side_by_side import side_by_side
from millrace.runtime.forks import importing

_POLL_SECONDS = 0.5
_FIRST_POLL_SECONDS = 0.02
_DEADLINE_SECONDS = 3.0
_CANCEL_SECONDS = 1.0
_JOIN_SECONDS = 30.0
_THREADS = 16
_LOST_AFTER_FAILURES = 3
_VIEW_BYTES = 4 << 20  # of an order, for its members

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
    """Load on the cluster of a file system's options. Returns None without a cluster or without nodes, and for local files,
    which nodes do not read for each other.
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
    """Start the nodes on all machines of a Ray cluster, and wait until the views contain them.

    Otherwise they start at their first use. Raises `OriginUnavailableError` if Ray's control plane does not respond.
    """
    with importing():
        from millrace.cluster.membership.ray import start_everywhere

    wanted = start_everywhere(options, start=node_starter())
    deadline = time.monotonic() + _JOIN_SECONDS
    while not wanted <= {member.id for member in participants(views.view())} and time.monotonic() < deadline:
        time.sleep(_FIRST_POLL_SECONDS)


def keys_of(fs: ListingFileSystem, urls: str | Iterable[str]) -> list[str]:
    """The keys of URLs at the origin of `fs`. A slash at the end, which marks a prefix, stays."""
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
    """Load everything that `keys` select at an origin to the disks of the cluster; returns when it is cached.

    Any exception in the calling thread, also from `progress`, ends the load on all nodes. Raises the errors of
    `CacheManagement.load`, `DeniedError` if a node has no access to the origin, `OriginUnavailableError` if no node
    responds, and `UsageError` for more keys than nodes accept.
    """
    order = LoadOrder(
        origin_identity=origin_identity, keys=tuple(keys), members=View(()), replicas=replicas, verify=verify
    )
    if len(order.keys) > MOST_KEYS or len(json.dumps(order.to_json())) > MAX_ORDER_BYTES - _VIEW_BYTES:
        raise UsageError(
            f"load: {len(order.keys)} URLs are too many for one load in a cluster",
            next_step="name prefixes or patterns, or load them in several calls",
        )
    return _ClusterLoad(views, client, order, progress or (lambda _: None)).run()


def participants(view: View) -> tuple[Member, ...]:
    """The members that share a load: the active ones, or else those that are joining."""
    here = tuple(member for member in view.members if member.state is MemberState.HERE)
    return here or tuple(member for member in view.members if member.state is MemberState.JOINING)


@dataclass
class _Share:
    """The progress of one node, and the number of consecutive requests without a response."""

    member: Member
    numbers: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_NUMBERS, 0))
    listed: bool = False
    state: str = "running"
    error: MillraceError | None = None
    failures: int = 0

    def update(self, response: Mapping[str, Any]) -> None:
        progress = response.get("progress") or {}
        self.numbers = {name: int(progress.get(name, 0)) for name in _NUMBERS}
        self.listed = bool(progress.get("listed"))
        self.state = str(response.get("state"))
        if (error := response.get("error")) is not None:
            self.error = _error_of(self.member, error)


class _ClusterLoad:
    """One load: rounds, each with a fixed set of members, until one round ends."""

    def __init__(
        self,
        views: ViewSource,
        client: PeerClient,
        order: LoadOrder,
        report: Callable[[LoadProgress], None],
    ) -> None:
        self._views = views
        self._client = client
        self._order = order
        self._round = order  # with the members of the present round
        self._report = report
        self._name = uuid.uuid4().hex
        self._rounds = 0
        self._job = ""
        self._shares: list[_Share] = []
        self._lost: set[tuple[str, str]] = set()
        self._before = dict.fromkeys(_NUMBERS, 0)  # of abandoned rounds
        self._started = time.monotonic()
        self._rate = Rate()

    def run(self) -> LoadProgress:
        try:
            state = self._run_order(self._order)
            if self._order.replicas > 1 and len(self._shares) > 1:
                self._before = dict.fromkeys(_NUMBERS, 0)
                copies = self._run_order(replace(self._order, copies=True), reported_as=state)
                state = replace(state, left_objects=state.left_objects + copies.left_objects)
        except BaseException:
            self._cancel()
            raise
        first_missing = next((s.error.message for s in self._shares if s.numbers["missing_objects"] and s.error), "")
        return complete(state, first_missing=first_missing or "unknown")

    def _run_order(self, order: LoadOrder, *, reported_as: LoadProgress | None = None) -> LoadProgress:
        """Let every node load its share; returns the sums. `reported_as` is reported instead of the progress."""
        self._begin(order)
        pause = _FIRST_POLL_SECONDS
        while True:
            self._poll()
            state = self._progress()
            self._report(reported_as or state)
            self._raise_errors(state)
            # Nodes cancel a job without polls: this process, or `report`, may have been stopped for longer.
            if self._members_changed() or any(share.state == "cancelled" for share in self._shares):
                self._begin(order)
            elif all(share.state != "running" for share in self._shares):
                return state
            else:
                time.sleep(pause)
                pause = min(2 * pause, _POLL_SECONDS)

    # --- rounds -----------------------------------------------------------------------------------

    def _present(self) -> tuple[Member, ...]:
        return tuple(member for member in participants(self._views.view()) if _place_of(member) not in self._lost)

    def _members_changed(self) -> bool:
        self._lost |= {_place_of(share.member) for share in self._shares if share.failures >= _LOST_AFTER_FAILURES}
        return {_place_of(member) for member in self._present()} != {_place_of(share.member) for share in self._shares}

    def _begin(self, order: LoadOrder) -> None:
        """Abandon the present round, and begin one with the present members."""
        self._cancel()
        members = self._present()
        if not members:
            raise with_progress(
                errors.OriginUnavailableError(
                    "no node of the cluster responds", next_step="check the nodes with 'millrace status'"
                ),
                self._progress(),
            )
        for name in ("fetched_bytes", "bad_blocks"):
            self._before[name] += sum(share.numbers[name] for share in self._shares)
        self._rounds += 1
        self._job = f"{self._name}-{self._rounds}"
        view = View.of(replace(member, state=MemberState.HERE) for member in members)
        self._round = replace(order, members=view)
        self._shares = [_Share(member) for member in members]
        self._on_running(self._start)

    def _poll(self) -> None:
        def poll(share: _Share) -> None:
            if not self._exchange(share, "GET", f"/v1/load/{self._job}"):
                self._start(share)  # it was restarted, runs too many jobs, or has not received the order yet

        self._on_running(poll)

    def _on_running(self, request: Callable[[_Share], None]) -> None:
        running = [share for share in self._shares if share.state == "running"]
        side_by_side(request, running, _THREADS, "millrace-load-request")

    def _start(self, share: _Share) -> None:
        self._exchange(share, "POST", LOAD_PATH, {"job": self._job, **self._round.to_json()})

    def _exchange(self, share: _Share, method: str, path: str, body: Any = None) -> bool:
        """Send a request to a node, and record the response. Returns whether the node has the job."""
        try:
            response = self._client.call(share.member.address, method, path, body, deadline=_DEADLINE_SECONDS)
        except PeerRefusedError as error:
            if method == "GET" and error.status == 404:
                return False
            if error.status >= 500:
                share.failures += 1
            else:
                share.state, share.error = "failed", _refusal(share.member, error)
        except PeerError:  # no response, or not a valid one
            share.failures += 1
        else:
            share.failures = 0
            share.update(response)
        return True

    def _cancel(self) -> None:
        job = self._job

        def cancel(share: _Share) -> None:
            with contextlib.suppress(MillraceError):  # the job ends by itself without requests
                self._client.call(share.member.address, "DELETE", f"/v1/load/{job}", deadline=_CANCEL_SECONDS)

        # Also on nodes that did not respond: without TLS, one that was stopped receives this when it continues, before it
        # has fetched the objects that the others now load.
        self._on_running(cancel)

    # --- sums -------------------------------------------------------------------------------------

    def _progress(self) -> LoadProgress:
        sums = {name: self._before[name] + sum(share.numbers[name] for share in self._shares) for name in _NUMBERS}
        return LoadProgress(
            **sums,
            listed=bool(self._shares) and all(share.listed for share in self._shares),
            nodes=len(self._shares),
            seconds=time.monotonic() - self._started,
            bytes_per_second=self._rate.after(sums["fetched_bytes"]),
        )

    def _raise_errors(self, state: LoadProgress) -> None:
        """Raise the error of a node, unless it only concerns some objects."""
        for share in self._shares:
            if share.error is None:
                continue
            left_out = isinstance(share.error, DiskFullError) and share.numbers["left_objects"]
            gone = isinstance(share.error, ObjectNotFoundError) and share.numbers["missing_objects"]
            if not (left_out or gone):
                raise with_progress(share.error, state)


def _place_of(member: Member) -> tuple[str, str]:
    """The identity of a member in a load. A node that was started again may have another address."""
    return member.id, member.address


_BY_CODE: Mapping[str, type[MillraceError]] = {
    value.code: value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, MillraceError)
}


def _error_of(member: Member, error: Mapping[str, Any]) -> MillraceError:
    """The error that a node reported."""
    kind = _BY_CODE.get(str(error.get("code")), MillraceError)
    return kind(f"node {member.address}: {error.get('message')}", next_step=str(error.get("next_step") or ""))


def _refusal(member: Member, error: PeerRefusedError) -> MillraceError:
    return type(error)(f"node {member.address}: {error.message}", next_step=error.next_step)
