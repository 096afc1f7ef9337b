"""What a cluster's membership is, whoever keeps it: members, views of them, and how a node joins and leaves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import xxhash

from millrace.config import Amount, Tls
from millrace.errors import DamagedError

WIRE_VERSIONS = (1, 2)
"""The oldest and the newest version of the data plane's requests that this program speaks."""


class MemberState(StrEnum):
    """What may be expected of a member."""

    JOINING = "joining"
    """It owns nothing yet: it is being filled from the others."""
    HERE = "here"
    """It owns its share."""
    LEAVING = "leaving"
    """It owns nothing any more, and is still asked for what it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One node of the cluster.

    `id` stays with the node's disks, whatever address it has. `address` is `host:port` of its data plane (IPv6 hosts in
    brackets). `weight` is what it can hold in bytes; shares follow it. `wire` are the oldest and newest version it speaks.
    """

    id: str
    address: str
    weight: float = 1.0
    state: MemberState = MemberState.HERE
    wire: tuple[int, int] = WIRE_VERSIONS

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "id": self.id,
            "address": self.address,
            "weight": self.weight,
            "state": str(self.state),
            "wire": list(self.wire),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Member:
        """The reverse of `to_json`; names it does not know, of a newer version, are ignored. Raises `DamagedError`."""
        try:
            oldest, newest = value["wire"]
            member = cls(
                id=str(value["id"]),
                address=str(value["address"]),
                weight=float(value["weight"]),
                state=MemberState(value["state"]),
                wire=(int(oldest), int(newest)),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DamagedError(f"no description of a member: {error!r}") from error
        sound = 0 < member.weight < float("inf") and 0 < member.wire[0] <= member.wire[1]
        if not (member.id and member.address and sound):
            raise DamagedError("no description of a member: it lacks an id, an address, a weight or a version")
        return member


@dataclass(frozen=True, slots=True)
class View:
    """The members as somebody knows them at one moment, in the order of their ids. Immutable; equal views are equal values.

    `version` is a digest of what placement depends on: ids, weights and states.
    """

    members: tuple[Member, ...]
    version: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", tuple(sorted(self.members, key=lambda member: member.id)))
        text = json.dumps([[member.id, member.weight, str(member.state)] for member in self.members])
        object.__setattr__(self, "version", xxhash.xxh3_64_hexdigest(text.encode()))

    @classmethod
    def of(cls, members: Iterable[Member]) -> View:
        """The view of these members; of several with one id the last holds."""
        return cls(tuple({member.id: member for member in members}.values()))

    def member(self, member_id: str) -> Member | None:
        """The member of this id."""
        return next((member for member in self.members if member.id == member_id), None)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"members": [member.to_json() for member in self.members]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> View:
        """The reverse of `to_json`. Raises `DamagedError`."""
        members = value.get("members") if isinstance(value, Mapping) else None
        if not isinstance(members, list) or not all(isinstance(each, Mapping) for each in members):
            raise DamagedError("no description of a cluster's members")
        return cls.of(Member.from_json(each) for each in members)


class ViewSource(Protocol):
    """Gives the newest known view. Thread-safe, quick (asked at every fetch), and never raises."""

    def view(self) -> View:
        """The newest view; an empty one where none is known yet."""
        ...


class Membership(ViewSource, Protocol):
    """One node's, or one client's, part in a cluster. Thread-safe; not usable after a fork.

    A service that cannot be reached costs news, not the view: the last one stays, and what was published is published again
    when the service is back.
    """

    def watch(self, on_change: Callable[[View], None]) -> Callable[[], None]:
        """Have `on_change` called with every new view, in a thread of the membership; gives what ends that."""
        ...

    def join(self, me: Member) -> None:
        """Publish a member, and keep it alive until `leave`; called again with another state or weight, change it.

        Raises `OriginUnavailableError` where the service cannot be reached at the first time, `ConfigurationError` where it
        says no.
        """
        ...

    def leave(self) -> None:
        """Take the member out now. Never raises: a member that does not answer any more is taken out anyway."""
        ...

    def close(self) -> None:
        """End the threads and connections; a member that has not left stays until its lease is over."""
        ...


@dataclass(frozen=True, kw_only=True)
class NodeLink:
    """What a process must know to take part in a cluster: through the node on its machine, or as a mere client.

    `folder` is the node's folder in the cache directories, which this process uses as well. `member_id` is that node's
    (None for a client, which owns nothing). `token` is the cluster's secret. `capacity` and `min_free` are the node's, and
    hold for every process that keeps things in its folder (None: a client's, or an older node's, are not told).
    """

    views: ViewSource
    folder: str
    member_id: str | None
    token: str = field(repr=False)
    tls: Tls | None = None
    replicas: int = 1
    capacity: Amount | None = None
    min_free: Amount | None = None
