"""The attributes that a subclass of the suite sets for its origin, and the fixtures of the suite's parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pytest
from typing_extensions import Buffer

from millrace.origin import ObjectInfo, Origin


class Contents(Protocol):
    """Creates and removes objects in the storage of the origin: through another client, or the origin itself."""

    def put(self, key: str, data: Buffer) -> None:
        """Create or replace an object."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects."""
        ...


@dataclass(frozen=True)
class FromEnvironment:
    """An origin with credentials from outside its options, and the secrets among them that must stay in the process."""

    origin: Origin
    secrets: Sequence[str] = field(repr=False)


def listed(origin: Origin, prefix: str) -> list[ObjectInfo]:
    """All objects below `prefix`, in one list."""
    return [info for page in origin.list_all(prefix) for info in page]


class OriginSuite:
    """The attributes and fixtures that a subclass sets; each part of the suite adds its tests."""

    picklable = True
    """Whether a copy in another process must read the same bytes. False only for storage in memory."""

    writes = True
    """Whether objects can be put, streamed and deleted. If False, all three raise `UsageError`, and the subclass defines
    the fixture `contents`."""

    lists = True
    """Whether names can be listed. If False, every listing raises `UsageError`."""

    ordered = True
    """Whether listings are in the order of the keys, as those of object stores are."""

    lists_versions = True
    """Whether a listing returns the same size and version of an object as `head`."""

    one_creator = True
    """Whether exactly one of many concurrent `put(if_absent=True)` succeeds."""

    exact_versions = True
    """Whether different bytes of the same size, written shortly after, always get another version."""

    largest_listing = 2_050
    """The number of objects in the test of many pages: more than two pages, or fewer if the storage is slow."""

    unsupported_names: frozenset[str] = frozenset()
    """Those of `ODD_NAMES` and `HOSTILE_NAMES` that the storage does not support, or reads as another name by its own
    rules. Give the reason next to the value."""

    secrets: Sequence[str] = ()
    """The secrets in the options of the fixture's origin. They must not appear in its messages, names and `repr`."""

    @pytest.fixture
    def origin(self) -> Origin:
        """The origin under test."""
        raise NotImplementedError("define the fixture `origin`")

    @pytest.fixture
    def root(self) -> str:
        """An empty key prefix for one test, without a trailing slash."""
        raise NotImplementedError("define the fixture `root`")

    @pytest.fixture
    def contents(self, origin: Origin) -> Contents:
        """Creates and removes objects. If `writes` is False: through the server that the origin reads from."""
        return origin

    @pytest.fixture
    def environment_origin(self) -> FromEnvironment | None:
        """An origin over the same storage with credentials from the environment; None if it has none."""
        return None

    @pytest.fixture
    def writable(self, origin: Origin) -> Origin:
        """The origin, for a test that writes through it."""
        if not self.writes:
            pytest.skip("this origin cannot write")
        return origin

    @pytest.fixture
    def listable(self, origin: Origin) -> Origin:
        """The origin, for a test that lists."""
        if not self.lists:
            pytest.skip("this origin cannot list")
        return origin
