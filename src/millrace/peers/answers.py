"""What a node answers to a request for blocks, as values: a head's status and fields, and the parts of a body."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from typing_extensions import Buffer


class OpenFile:
    """A descriptor that lives as long as anybody refers to this: an answer goes on when its object is evicted meanwhile."""

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class FilePart(NamedTuple):
    """So many bytes of a file from an offset on. A file that turns out shorter breaks the answer off."""

    file: OpenFile
    offset: int
    nbytes: int


Part = FilePart | Buffer


class Content(NamedTuple):
    """Bytes of an object. `head` is complete; `parts` have as many bytes as it says, and may be made while they are sent."""

    head: bytes
    parts: Iterable[Part]


class Refusal(NamedTuple):
    """Why there are none. `message` is for people; `fields` are further headers."""

    status: int
    message: str = ""
    code: str = "peer-refused"
    fields: tuple[tuple[str, str], ...] = ()


class Done(NamedTuple):
    """An answer without a body; `length` is what a `HEAD` says of the object."""

    status: int
    fields: tuple[tuple[str, str], ...] = ()
    length: int | None = None


Answer = Content | Refusal | Done


class BrokenAnswerError(Exception):
    """A body cannot be sent to its end: the connection is closed, so that the receiver sees it. Never leaves the server."""


class Exchange(Protocol):
    """The other side of a request under way, as whoever makes the answer sees it."""

    def processing(self) -> None:
        """Say that the answer takes a while, where the other side understands that; call it every 300 ms at least.

        Raises `OSError` when the other side is gone, or this server ends.
        """
        ...

    def read_body(self, nbytes: int) -> bytearray:
        """The next bytes of the request's body. Raises `OSError` when they do not come."""
        ...
