"""The request to load a share of a selection, which `fs.load` and `millrace load` send to the nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from millrace.cluster.membership import View
from millrace.errors import MillraceError, UsageError

MOST_KEYS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class LoadOrder:
    """A node's part of a load.

    `keys` are selections at the origin of `origin_identity`: an object, a prefix (with a slash at its end), or a pattern.
    `members` take part. Of each object the node loads the stripes that it owns among them, or with `copies` those that it
    holds without owning them.
    """

    origin_identity: str
    keys: tuple[str, ...]
    members: View
    replicas: int = 1
    verify: bool = False
    copies: bool = False

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "origin": self.origin_identity,
            "keys": list(self.keys),
            "view": self.members.to_json(),
            "replicas": self.replicas,
            "verify": self.verify,
            "copies": self.copies,
        }

    @classmethod
    def from_json(cls, value: Any) -> LoadOrder:
        """The reverse of `to_json`. Raises `UsageError`."""
        try:
            keys = value["keys"]
            if not (isinstance(keys, list) and 0 < len(keys) <= MOST_KEYS and all(isinstance(k, str) for k in keys)):
                raise ValueError("no keys")
            return cls(
                origin_identity=str(value["origin"]),
                keys=tuple(keys),
                members=View.from_json(value["view"]),
                replicas=max(1, int(value["replicas"])),
                verify=bool(value["verify"]),
                copies=bool(value["copies"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError, MillraceError) as error:
            raise UsageError(f"malformed load order: {error}", next_step="use the same version on all nodes") from error
