"""What a subclass of the suite says of its origin, and the fixtures of the suite's parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pytest
from typing_extensions import Buffer

from millrace.origin import ObjectInfo, Origin


class Contents(Protocol):
    """Makes and removes what the origin shall find: another way to the same storage, or the origin itself."""

    def put(self, key: str, data: Buffer) -> None:
        """Make or replace an object."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects."""
        ...


@dataclass(frozen=True)
class FromEnvironment:
    """An origin that found its credentials outside of its options, and what of these may not leave the process."""

    origin: Origin
    secrets: Sequence[str] = field(repr=False)


def listed(origin: Origin, prefix: str) -> list[ObjectInfo]:
    """Everything below `prefix`, all pages in one."""
    return [info for page in origin.list_all(prefix) for info in page]


class OriginSuite:
    """The attributes and fixtures that a subclass sets; each part of the suite adds its tests."""

    picklable = True
    """Whether a copy in another process must read the same bytes: true of everything but what lives in memory."""

    writes = True
    """Whether objects can be put, streamed and deleted. Where not, all three raise `UsageError`, and the fixture
    `contents` is to be given."""

    lists = True
    """Whether names can be listed. Where not, every listing raises `UsageError`."""

    ordered = True
    """Whether listings come in the order of the keys, as object stores give them."""

    lists_versions = True
    """Whether a listing tells the size and version of an object exactly as `head` does."""

    one_creator = True
    """Whether of many `put(if_absent=True)` at the same time exactly one succeeds."""

    exact_versions = True
    """Whether other bytes of the same size, written a moment later, always have another version."""

    largest_listing = 2_050
    """How many objects the test of many pages makes: more than two pages, or fewer where a storage is slow."""

    unsupported_names: frozenset[str] = frozenset()
    """Those of `ODD_NAMES` and `HOSTILE_NAMES` that the storage behind this origin cannot have, or reads as another name by
    its own rules; say why where you set it."""

    secrets: Sequence[str] = ()
    """The secrets in the options that the origin of the fixture was given: nothing that it says may show them."""

    @pytest.fixture
    def origin(self) -> Origin:
        """The origin that is tried."""
        raise NotImplementedError("give an `origin` fixture")

    @pytest.fixture
    def root(self) -> str:
        """A prefix of keys, without a slash at its end: empty, and the test's own."""
        raise NotImplementedError("give a `root` fixture")

    @pytest.fixture
    def contents(self, origin: Origin) -> Contents:
        """How the tests make and remove objects. Where `writes` is false: by the server that the origin reads from."""
        return origin

    @pytest.fixture
    def environment_origin(self) -> FromEnvironment | None:
        """An origin over the same storage whose credentials come from the environment, where there is such a thing."""
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
