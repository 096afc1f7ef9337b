"""Who is a member while the service that says so comes and goes. Pure: times are given, nothing is asked.

A service that was silent, or comes back empty, forgets members that are alive: their leases ran out while nobody could renew
them. They publish themselves again within moments. If views followed at once, all placement would move twice; so whoever a
service forgets after trouble stays for one more lease.
"""

from __future__ import annotations

from collections.abc import Mapping

from millrace.members.protocol import Member, MemberState


class Roster:
    """What a service says, and those whom it has forgotten for now. Not thread-safe. Times are seconds of one clock."""

    def __init__(self, *, lease_seconds: float) -> None:
        self._lease = lease_seconds
        self._said: dict[str, Member] = {}
        self._forgotten: dict[str, tuple[Member, float]] = {}
        self._in_trouble = False
        self._trusted_at = 0.0

    def trouble(self) -> None:
        """The service did not answer, or is not what it was."""
        self._in_trouble = True

    def answered(self, now: float) -> None:
        """The service answers. After trouble its word that somebody is gone counts one lease from now on."""
        if self._in_trouble:
            self._in_trouble = False
            self._trusted_at = now + self._lease

    def put(self, member: Member) -> None:
        """The service says that there is this one."""
        self._said[member.id] = member
        self._forgotten.pop(member.id, None)

    def remove(self, member_id: str, now: float) -> None:
        """The service says that there is no such member any more.

        The last one of all stays for a lease, too: that nobody is left is rarely true.
        """
        member = self._said.pop(member_id, None)
        if member is None or member.state is MemberState.LEAVING:
            return
        if self._in_trouble or now < self._trusted_at or not self._said:
            self._forgotten[member_id] = (member, now + self._lease)

    def replace(self, members: Mapping[str, Member], now: float) -> None:
        """The service says that these are all."""
        gone = [member_id for member_id in self._said if member_id not in members]
        for member in members.values():
            self.put(member)
        for member_id in gone:
            self.remove(member_id, now)

    def says(self, member_id: str) -> bool:
        """Whether the service knows of this member now."""
        return member_id in self._said

    def members(self, now: float) -> list[Member]:
        """All who count as members."""
        self._forgotten = {name: entry for name, entry in self._forgotten.items() if now < entry[1]}
        return [*self._said.values(), *(member for member, _ in self._forgotten.values())]

    def next_change(self) -> float | None:
        """When `members` gives others although the service says nothing."""
        return min((until for _, until in self._forgotten.values()), default=None)
