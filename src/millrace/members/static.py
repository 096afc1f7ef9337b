"""Members that are written down in the configuration: `static://host:port,host:port`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from millrace.config import address_text, parse_addresses
from millrace.errors import ConfigurationError
from millrace.members.protocol import Member, View

_SCHEME = "static://"


class StaticMembers:
    """A `Membership` that never changes: who is in the list is `here`, with weight 1 and its address as id.

    Whether a member runs is not known; one that does not answer is passed over by who asks it. Immutable, without threads.
    """

    def __init__(self, addresses: Iterable[str]) -> None:
        """`addresses` are `host:port`. Raises `ConfigurationError`."""
        text = ",".join(addresses)
        self._view = View.of(
            Member(id=address, address=address)
            for address in (address_text(*pair) for pair in parse_addresses(text, option=_SCHEME))
        )

    @classmethod
    def parse(cls, members: str) -> StaticMembers:
        """Of the option `members`. Raises `ConfigurationError`."""
        if not members.startswith(_SCHEME):
            raise ConfigurationError(
                f"members={members!r} is no list of members", next_step=f"write {_SCHEME}host:port"
            )
        return cls(members.removeprefix(_SCHEME).split(","))

    def view(self) -> View:
        """All that are in the list."""
        return self._view

    def watch(self, on_change: Callable[[View], None]) -> Callable[[], None]:
        """Nothing ever changes, so `on_change` is never called."""
        del on_change
        return _nothing

    def join(self, me: Member) -> None:
        """Check that the list has this address; state and weight are not told to anybody. Raises `ConfigurationError`."""
        addresses = [member.address for member in self._view.members]
        if me.address not in addresses:
            raise ConfigurationError(
                f"{me.address} is not among the cluster's members {', '.join(addresses)}",
                next_step="serve one of these addresses, or name this one in 'members' on every node",
            )

    def leave(self) -> None:
        """Nothing: the others find out by asking."""

    def close(self) -> None:
        """Nothing to close."""


def _nothing() -> None:
    pass
