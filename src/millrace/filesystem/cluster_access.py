"""Requests to a cluster from a process that is not a node: found through this machine or through a node's address."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from millrace.cache.counters import SETTLE_SECONDS
from millrace.cluster.attach import link_for
from millrace.cluster.dataplane.client import PeerClient
from millrace.cluster.folder import FolderViews, live_nodes
from millrace.cluster.membership import Member, View, ViewSource
from millrace.config import CacheOptions, Tls, parse_addresses
from millrace.errors import ConfigurationError, MillraceError, OriginUnavailableError, PeerRefusedError
from millrace.origin.side_by_side import side_by_side

_DEADLINE_SECONDS = 3.0
_MAX_AGE_SECONDS = 1.0
_FIRST_VIEW_SECONDS = 5.0
_LOOK_SECONDS = 0.05
_THREADS = 32


class PolledViews:
    """The views of a cluster, requested from its nodes: first from one, then from any that responds. Thread-safe.

    `view` sends a request at most once a second and waits for the response; without a response it returns the last view.
    """

    def __init__(self, client: PeerClient, address: str) -> None:
        self._client = client
        self._address = address
        self._lock = threading.Lock()
        self._view = self._request(address)
        self._requested_at = time.monotonic()

    def view(self) -> View:
        with self._lock:
            if time.monotonic() - self._requested_at >= _MAX_AGE_SECONDS:
                self._refresh()
                self._requested_at = time.monotonic()
            return self._view

    def _refresh(self) -> None:
        for address in dict.fromkeys([self._address, *(member.address for member in self._view.members)]):
            try:
                self._view = self._request(address)
                self._address = address
                return
            except MillraceError:
                continue  # try the next one

    def _request(self, address: str) -> View:
        return View.from_json(self._client.call(address, "GET", "/v1/view", deadline=_DEADLINE_SECONDS))


@dataclass(frozen=True, kw_only=True)
class ClusterAccess:
    """Sends requests to the nodes of a cluster. A context manager that closes the connections."""

    views: ViewSource
    client: PeerClient
    replicas: int = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def members(self) -> tuple[Member, ...]:
        """The members of the current view."""
        return self.views.view().members


def statuses(access: ClusterAccess, *, query: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """The status of every member (`NodeProcess.status`), with `answers`. All are requested at once, with `query`.

    A member that does not respond has only `member_id`, `address`, `answers` and `error`.
    """
    found: list[dict[str, Any]] = []
    for member, response in _request_all(access, "/v1/status", _DEADLINE_SECONDS, query=query):
        if isinstance(response, MillraceError):
            failed = {"member_id": member.id, "address": member.address, "answers": False, "error": str(response)}
            found.append(failed)
        else:
            found.append({**response, "answers": True})
    return found


def metrics(access: ClusterAccess) -> dict[str, list[str]]:
    """The lines of `/metrics` of every member that responds, by address. All are requested at once."""

    def request(member: Member) -> tuple[str, list[str]]:
        try:
            page = access.client.page(member.address, "GET", "/metrics", deadline=_DEADLINE_SECONDS)
        except MillraceError:
            return member.address, []
        return member.address, page.decode("utf-8", "replace").splitlines()

    pages = side_by_side(request, access.members(), _THREADS, "millrace-cluster-access")
    return {address: lines for address, lines in pages if lines}


def counted(access: ClusterAccess, *, settled: bool = False) -> dict[str, dict[str, dict[str, int]]]:
    """The counters of every member that responds (`NodeFigures.counters`), by member id. All are requested at once.

    With `settled` each member waits for its processes before it responds, as `CacheNode.counters` does.
    """
    query = {"settled": "1"} if settled else None
    deadline = _DEADLINE_SECONDS + (SETTLE_SECONDS if settled else 0.0)
    responses = _request_all(access, "/v1/counters", deadline, query=query)
    return {member.id: response for member, response in responses if not isinstance(response, MillraceError)}


def _request_all(
    access: ClusterAccess, path: str, deadline: float, *, query: Mapping[str, str] | None = None
) -> list[tuple[Member, Any]]:
    """The response of every member, or its `MillraceError`."""

    def request(member: Member) -> tuple[Member, Any]:
        try:
            return member, access.client.call(member.address, "GET", path, query=query, deadline=deadline)
        except MillraceError as error:
            return member, error

    return side_by_side(request, access.members(), _THREADS, "millrace-cluster-access")


def access_through(address: str, options: CacheOptions) -> ClusterAccess:
    """Access to the cluster that the node at `address` (`host:port`) belongs to.

    Token and `tls` come from the options, or from a node on this machine. Raises `ConfigurationError`, `PeerError`.
    """
    if len(parse_addresses(address, option="address of a node")) != 1:
        raise ConfigurationError(f"{address!r}: not one address", next_step="give the address of one node")
    token, tls = secrets_for(address, options)
    client = PeerClient(token=token, tls=tls)
    try:
        views = PolledViews(client, address)
        status = client.call(address, "GET", "/v1/status", deadline=_DEADLINE_SECONDS)
    except MillraceError as error:
        client.close()
        raise _with_next_step(error, address) from error
    return ClusterAccess(views=views, client=client, replicas=int(status.get("replicas", 1)))


def secrets_for(address: str, options: CacheOptions) -> tuple[str, Tls | None]:
    """Token and `tls` for the node at `address`: of the options, or of a node on this machine.

    Raises `ConfigurationError` without a token.
    """
    here = next((node.facts for node in live_nodes(options) if node.facts.address == address), None)
    token = here.token if here is not None else options.cluster_token
    if token is None:
        raise ConfigurationError(
            "cluster_token: not set, but nodes require it",
            next_step="set MILLRACE_CLUSTER_TOKEN, or 'cluster_token' in millrace.toml",
        )
    return token, options.tls if here is None else here.tls


def _with_next_step(error: MillraceError, address: str) -> MillraceError:
    """The same error with a next step."""
    if isinstance(error, PeerRefusedError) and error.status == 401:
        return ConfigurationError(
            f"the node at {address} has another cluster_token", next_step="set the token of its cluster"
        )
    return OriginUnavailableError(error.message, next_step="check the address and 'tls', and that the node runs")


def access_from_here(options: CacheOptions) -> ClusterAccess | None:
    """Access to the cluster of the options, or of a node on this machine; None without a cluster.

    Waits a few seconds for the first view. Raises `ConfigurationError` if an option is missing.
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
