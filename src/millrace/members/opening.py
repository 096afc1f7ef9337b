"""From the option `members` to the `Membership` that it names."""

from __future__ import annotations

from millrace.config import parse_addresses, parse_etcd
from millrace.errors import ConfigurationError
from millrace.members.protocol import Membership


def open_membership(members: str) -> Membership:
    """The membership of `"static://..."` or `"etcd://..."`; the caller closes it. Raises `ConfigurationError`.

    That of Ray is not opened by name: `millrace.members.ray` finds it in the job.
    """
    if members.startswith("static://"):
        from millrace.members.static import StaticMembers

        return StaticMembers.parse(members)
    if members.startswith("etcd://"):
        from millrace.members.etcd import EtcdMembers

        return EtcdMembers.parse(members)
    raise ConfigurationError(
        f"members={members!r} names no service that can be joined from here",
        next_step="use 'etcd://host:port' or 'static://host:port,host:port'",
    )


def same_cluster(one: str, other: str) -> bool:
    """Whether two options `members` name one cluster: the same list, or the same name in an etcd that both know."""
    if one == other:
        return True
    if one.startswith("etcd://") and other.startswith("etcd://"):
        (ours, our_name), (theirs, their_name) = parse_etcd(one), parse_etcd(other)
        return our_name == their_name and not set(ours).isdisjoint(theirs)
    if one.startswith("static://") and other.startswith("static://"):
        return set(_listed(one)) == set(_listed(other))
    return False


def _listed(members: str) -> tuple[tuple[str, int], ...]:
    return parse_addresses(members.partition("://")[2], option="members")
