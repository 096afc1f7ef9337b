"""The registered membership backends, by the scheme of the option `members` (`"static://..."`, `"etcd://..."`).

A new backend is one module with a `Membership` and one entry in `BACKENDS`. Ray's membership is not opened by name:
`millrace.cluster.membership.ray` finds it in the job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from millrace.cluster.membership.protocol import Membership
from millrace.config import parse_addresses, parse_etcd
from millrace.errors import ConfigurationError
from millrace.runtime.forks import importing


class Backend(NamedTuple):
    """How to open a membership, and how to compare two options that both use this backend.

    `open` takes the option `members`, and raises `ConfigurationError` if it is malformed. `same_cluster` returns whether two
    options name one cluster; None means that equal options do.
    """

    open: Callable[[str], Membership]
    same_cluster: Callable[[str, str], bool] | None = None


def _open_static(members: str) -> Membership:
    with importing():
        from millrace.cluster.membership.static import StaticMembers

    return StaticMembers.parse(members)


def _same_static(one: str, other: str) -> bool:
    """Whether two lists have the same members."""
    mine, theirs = (parse_addresses(each.partition("://")[2], option="members") for each in (one, other))
    return set(mine) == set(theirs)


def _open_etcd(members: str) -> Membership:
    with importing():
        from millrace.cluster.membership.etcd import EtcdMembers

    return EtcdMembers.parse(members)


def _same_etcd(one: str, other: str) -> bool:
    """Whether two options name the same cluster in an etcd with a common endpoint."""
    (ours, our_name), (theirs, their_name) = parse_etcd(one), parse_etcd(other)
    return our_name == their_name and not set(ours).isdisjoint(theirs)


BACKENDS: Mapping[str, Backend] = {
    "etcd": Backend(open=_open_etcd, same_cluster=_same_etcd),
    "static": Backend(open=_open_static, same_cluster=_same_static),
}


def open_membership(members: str) -> Membership:
    """The membership that the option `members` names; the caller closes it. Raises `ConfigurationError`."""
    return backend_of(members).open(members)


def backend_of(members: str) -> Backend:
    """The backend of the option `members`. Raises `ConfigurationError` if its scheme is not registered."""
    backend = BACKENDS.get(_scheme(members))
    if backend is None:
        raise ConfigurationError(
            f"members={members!r} is not known as a service to join",
            next_step=f"use one of {', '.join(f'{name}://host:port' for name in sorted(BACKENDS))}",
        )
    return backend


def same_cluster(one: str, other: str) -> bool:
    """Whether two options `members` name one cluster."""
    if one == other:
        return True
    backend = BACKENDS.get(_scheme(one))
    if backend is None or backend.same_cluster is None or _scheme(one) != _scheme(other):
        return False
    return backend.same_cluster(one, other)


def _scheme(members: str) -> str:
    scheme, separator, _ = members.partition("://")
    return scheme if separator else ""
