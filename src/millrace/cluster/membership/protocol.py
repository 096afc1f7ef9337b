"""Members, views, and the Protocol of a membership backend: how a node joins, leaves and follows the other members."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import xxhash

from millrace.config import Amount, Tls
from millrace.errors import DamagedError

_log = logging.getLogger("millrace.cluster")

WIRE_VERSION = 1
"""The version of the data plane's requests. Nodes and clients with different versions do not exchange blocks."""


class MemberState(StrEnum):
    """The share of a member in the cluster's data."""

    JOINING = "joining"
    """It owns nothing yet, and copies its share from the others."""
    HERE = "here"
    """It owns its share."""
    LEAVING = "leaving"
    """It no longer owns anything, and still serves its cached data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One node of the cluster.

    `id` stays with the node's disks when its address changes. `address` is `host:port` of its data plane (IPv6 hosts in
    brackets). `weight` is its capacity in bytes; shares are proportional to it. `wire` is its wire version.
    """

    id: str
    address: str
    weight: float = 1.0
    state: MemberState = MemberState.HERE
    wire: int = WIRE_VERSION

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "id": self.id,
            "address": self.address,
            "weight": self.weight,
            "state": str(self.state),
            "wire": self.wire,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Member:
        """The reverse of `to_json`; ignores unknown names. Raises `DamagedError`."""
        try:
            member = cls(
                id=str(value["id"]),
                address=str(value["address"]),
                weight=float(value["weight"]),
                state=MemberState(value["state"]),
                wire=int(value["wire"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DamagedError(f"not a description of a member: {error!r}") from error
        sound = 0 < member.weight < float("inf") and member.wire > 0
        if not (member.id and member.address and sound):
            raise DamagedError("not a description of a member: it lacks an id, an address, a weight or a version")
        return member


@dataclass(frozen=True, slots=True)
class View:
    """The members at one moment, in the order of their ids. Immutable; equal views are equal values.

    `version` is a digest of the input of placement: ids, weights and states.
    """

    members: tuple[Member, ...]
    version: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", tuple(sorted(self.members, key=lambda member: member.id)))
        text = json.dumps([[member.id, member.weight, str(member.state)] for member in self.members])
        object.__setattr__(self, "version", xxhash.xxh3_64_hexdigest(text.encode()))

    @classmethod
    def of(cls, members: Iterable[Member]) -> View:
        """The view of these members; of several with one id, it contains the last."""
        return cls(tuple({member.id: member for member in members}.values()))

    def member(self, member_id: str) -> Member | None:
        """The member with this id; None without one."""
        return next((member for member in self.members if member.id == member_id), None)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"members": [member.to_json() for member in self.members]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> View:
        """The reverse of `to_json`. Raises `DamagedError`."""
        members = value.get("members") if isinstance(value, Mapping) else None
        if not isinstance(members, list) or not all(isinstance(each, Mapping) for each in members):
            raise DamagedError("not a description of a cluster's members")
        return cls.of(Member.from_json(each) for each in members)


class ViewSource(Protocol):
    """Returns the newest known view. Thread-safe, fast (called at every fetch), and never raises."""

    def view(self) -> View:
        """The newest view; an empty one before the first is known."""
        ...


class Membership(ViewSource, Protocol):
    """The membership of one node, or one client, in a cluster. Thread-safe; not usable after a fork.

    While the service cannot be reached, the last view stays. When it responds again, the member is published again.
    """

    def watch(self, on_change: Callable[[View], None]) -> Callable[[], None]:
        """Call `on_change` with every new view, in a thread of the membership. Returns a function that ends it."""
        ...

    def join(self, me: Member) -> None:
        """Publish a member and keep it alive until `leave`; a later call changes its state or weight.

        Raises `OriginUnavailableError` if the service cannot be reached the first time, `ConfigurationError` if it refuses.
        """
        ...

    def leave(self) -> None:
        """Remove the member now. Never raises: a member that does not respond is removed later anyway."""
        ...

    def absences(self) -> int:
        """Twice the number of times that the others may have missed this member: its lease expired, although it runs.

        The number is odd until the others list the member again. Its own view may never show this. Never raises.
        """
        ...

    def close(self) -> None:
        """End threads and connections; a member that has not left stays until its lease ends."""
        ...


class Watchers:
    """The functions that a membership calls with new views. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._functions: dict[object, Callable[[View], None]] = {}

    def add(self, on_change: Callable[[View], None]) -> Callable[[], None]:
        """Add a function, which may be added several times. Returns a function that removes it."""
        name = object()
        with self._lock:
            self._functions[name] = on_change

        def remove() -> None:
            with self._lock:
                self._functions.pop(name, None)

        return remove

    def notify(self, view: View) -> None:
        """Call all functions; logs their errors, which must not end the views of a node."""
        with self._lock:
            functions = list(self._functions.values())
        for on_change in functions:
            try:
                on_change(view)
            except Exception:  # noqa: BLE001 - any error of a watcher
                _log.exception("a watcher of the cluster's members failed")


@dataclass(frozen=True, kw_only=True)
class NodeLink:
    """The part of a process in a cluster: through the node on its machine, or as a client.

    `folder` is the node's folder in the cache directories, which this process uses as well. `member_id` is that node's id
    (None for a client, which owns nothing). `token` is the cluster's secret. `capacity` and `min_free` are the node's
    limits, which hold for every process that stores blocks in its folder (None for a client).
    """

    views: ViewSource
    folder: str
    member_id: str | None
    token: str = field(repr=False)
    tls: Tls | None = None
    replicas: int = 1
    capacity: Amount | None = None
    min_free: Amount | None = None

    def address_of(self, member_id: str) -> str:
        """The address of a member, for people; the id if the newest view does not have the member."""
        member = self.views.view().member(member_id)
        return member_id if member is None else member.address
