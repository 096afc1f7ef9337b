"""What the user said about the limits of an origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.config import LIMIT_NAMES

WEB = frozenset({"http", "https"})
"""Schemes of which one origin is many servers, the first part of each key."""

DEFAULT_MAX_REQUESTS = 128
"""A network card of 100 Gbit/s needs about 130 requests at the 90 MB/s that S3 gives to one; and of small objects, at 30 ms
each, 128 at once are some 4,000 a second, which is what S3 promises for one prefix (5,500)."""

DEFAULT_MAX_WEB_REQUESTS = 16
"""Of a web server nobody knows what it bears. That is what a few browsers would ask of it."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the user said about the limits (`config.LIMIT_NAMES`) of an origin of this `scheme`.

    What was not said is looked for where the origin is used, in the environment and the file: directories differ per node.
    """

    scheme: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, scheme: str, arguments: Mapping[str, Any] | None = None) -> Limits:
        """The limits with these explicit options, None where one was not given."""
        given = {name: value for name, value in (arguments or {}).items() if name in LIMIT_NAMES and value is not None}
        return cls(scheme=scheme, arguments=given)

    @property
    def default_max_requests(self) -> int:
        return DEFAULT_MAX_WEB_REQUESTS if self.scheme in WEB else DEFAULT_MAX_REQUESTS
