"""The members during and after an outage of the membership service. Pure: times are arguments, no I/O.

After an outage, or with empty storage, a service no longer lists members that run: their leases expired while they could not
renew them. They publish themselves again within moments. If views followed at once, all placement would move twice.
Therefore a member that disappears after an outage remains in the roster for one more lease.
"""

from __future__ import annotations

from collections.abc import Mapping

from millrace.cluster.membership.protocol import Member, MemberState


class Roster:
    """The members that a service lists, and those retained for now. Not thread-safe. Times are seconds of one clock."""

    def __init__(self, *, lease_seconds: float) -> None:
        self._lease = lease_seconds
        self._listed: dict[str, Member] = {}
        self._retained: dict[str, tuple[Member, float]] = {}
        self._in_outage = False
        self._trusted_at = 0.0

    def outage(self) -> None:
        """The service did not respond, or lost its data."""
        self._in_outage = True

    def responded(self, now: float) -> None:
        """The service responds. Removals after an outage take effect one lease from now on."""
        if self._in_outage:
            self._in_outage = False
            self._trusted_at = now + self._lease

    def put(self, member: Member) -> None:
        """The service lists this member."""
        self._listed[member.id] = member
        self._retained.pop(member.id, None)

    def remove(self, member_id: str, now: float) -> None:
        """The service no longer lists this member.

        The last member is retained for a lease, too: an empty cluster is unlikely.
        """
        member = self._listed.pop(member_id, None)
        if member is None or member.state is MemberState.LEAVING:
            return
        if self._in_outage or now < self._trusted_at or not self._listed:
            self._retained[member_id] = (member, now + self._lease)

    def replace(self, members: Mapping[str, Member], now: float) -> None:
        """The service lists exactly these members."""
        gone = [member_id for member_id in self._listed if member_id not in members]
        for member in members.values():
            self.put(member)
        for member_id in gone:
            self.remove(member_id, now)

    def is_listed(self, member_id: str) -> bool:
        """Whether the service lists this member now."""
        return member_id in self._listed

    def members(self, now: float) -> list[Member]:
        """The listed and the retained members."""
        self._retained = {name: entry for name, entry in self._retained.items() if now < entry[1]}
        return [*self._listed.values(), *(member for member, _ in self._retained.values())]

    def next_change(self) -> float | None:
        """When `members` changes next without a change of the service."""
        return min((until for _, until in self._retained.values()), default=None)
