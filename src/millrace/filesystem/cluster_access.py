"""How whoever is no node asks a cluster: through the machine's node or membership, or through any node by its address."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from millrace.cache.counters import PATIENCE_SECONDS
from millrace.config import CacheOptions, parse_addresses
from millrace.errors import ConfigurationError, MillraceError, OriginUnavailableError, PeerRefusedError
from millrace.members import Member, View, ViewSource
from millrace.peers.attach import link_for
from millrace.peers.client import PeerClient
from millrace.peers.folder import FolderViews, live_nodes

_DEADLINE_SECONDS = 3.0
_BELIEVED_SECONDS = 1.0
_FIRST_VIEW_SECONDS = 5.0
_LOOK_SECONDS = 0.05
_THREADS = 32


class AskedViews:
    """The views of a cluster, asked of its nodes: at first of one, then of any that answers. Thread-safe.

    `view` asks once a second at most, and waits for the answer; where nobody answers the last one holds.
    """

    def __init__(self, client: PeerClient, address: str) -> None:
        self._client = client
        self._address = address
        self._lock = threading.Lock()
        self._view = self._ask(address)
        self._asked_at = time.monotonic()

    def view(self) -> View:
        with self._lock:
            if time.monotonic() - self._asked_at >= _BELIEVED_SECONDS:
                self._refresh()
                self._asked_at = time.monotonic()
            return self._view

    def _refresh(self) -> None:
        for address in dict.fromkeys([self._address, *(member.address for member in self._view.members)]):
            try:
                self._view = self._ask(address)
                self._address = address
                return
            except MillraceError:
                continue  # the next one; the last view holds where nobody answers

    def _ask(self, address: str) -> View:
        return View.from_json(self._client.call_address(address, "GET", "/v1/view", deadline=_DEADLINE_SECONDS))


@dataclass(frozen=True, kw_only=True)
class ClusterAccess:
    """What it takes to ask the nodes of a cluster. A context manager that closes the connections."""

    views: ViewSource
    client: PeerClient
    replicas: int = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()

    def members(self) -> tuple[Member, ...]:
        """Every member that is known."""
        return self.views.view().members


def statuses(access: ClusterAccess) -> list[dict[str, Any]]:
    """What every member says of itself (`NodeProcess.status`), with `answers`: a silent one has no more than its `Member`
    and an `error`. All are asked at once.
    """

    def ask(member: Member) -> dict[str, Any]:
        try:
            told = access.client.call(member, "GET", "/v1/status", deadline=_DEADLINE_SECONDS)
        except MillraceError as error:
            return {"member_id": member.id, "address": member.address, "answers": False, "error": str(error)}
        return {**told, "answers": True}

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="millrace-status") as pool:
        return list(pool.map(ask, access.members()))


def counted(access: ClusterAccess, *, settled: bool = False) -> dict[str, dict[str, dict[str, int]]]:
    """What every member that answers has counted (`NodeFigures.counters`), by the members' ids. All are asked at once.

    With `settled` each waits for its processes before it answers, as `CacheNode.counters` does.
    """
    query = {"settled": "1"} if settled else None
    deadline = _DEADLINE_SECONDS + (PATIENCE_SECONDS if settled else 0.0)

    def ask(member: Member) -> tuple[str, Any]:
        try:
            return member.id, access.client.call(member, "GET", "/v1/counters", query=query, deadline=deadline)
        except MillraceError:
            return member.id, None

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="millrace-counters") as pool:
        return {member_id: told for member_id, told in pool.map(ask, access.members()) if told is not None}


def access_through(address: str, options: CacheOptions) -> ClusterAccess:
    """Access to the cluster that the node at `address` (`host:port`) belongs to.

    Token and `tls` are those of the options, or of a node on this machine. Raises `ConfigurationError`, `PeerError`.
    """
    if len(parse_addresses(address, option="--node")) != 1:
        raise ConfigurationError(f"{address!r} are several addresses", next_step="name one node")
    here = next((node.facts for node in live_nodes(options) if node.facts.address == address), None)
    token = here.token if here is not None else options.cluster_token
    if token is None:
        raise ConfigurationError(
            "no cluster_token, which a node asks for",
            next_step="set MILLRACE_CLUSTER_TOKEN, or 'cluster_token' in millrace.toml",
        )
    client = PeerClient(token=token, tls=options.tls if here is None else here.tls)
    try:
        views = AskedViews(client, address)
        status = client.call_address(address, "GET", "/v1/status", deadline=_DEADLINE_SECONDS)
    except MillraceError as error:
        client.close()
        raise _with_next_step(error, address) from error
    return ClusterAccess(views=views, client=client, replicas=int(status.get("replicas", 1)))


def _with_next_step(error: MillraceError, address: str) -> MillraceError:
    """The same error with what to do about it."""
    if isinstance(error, PeerRefusedError) and error.status == 401:
        return ConfigurationError(
            f"the node at {address} has another cluster_token", next_step="give the one that its cluster has"
        )
    return OriginUnavailableError(error.message, next_step="check the address, 'tls', and that the node runs")


def access_from_here(options: CacheOptions) -> ClusterAccess | None:
    """Access to the cluster that the options name, or that a node on this machine belongs to; None where there is none.

    Waits a few seconds for the first view. Raises `ConfigurationError` where something must be set.
    """
    if options.members in ("none", "auto") and (here := live_nodes(options)):
        facts = here[0].facts
        client = PeerClient(token=facts.token, tls=facts.tls)
        return ClusterAccess(views=FolderViews(here[0].directory), client=client, replicas=facts.replicas)
    link = link_for(options)
    if link is None:
        return None
    deadline = time.monotonic() + _FIRST_VIEW_SECONDS
    while not link.views.view().members and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    return ClusterAccess(views=link.views, client=PeerClient(token=link.token, tls=link.tls), replicas=link.replicas)
