"""The responses of a node to requests for blocks, as values: status and headers, and the parts of a body."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from typing_extensions import Buffer


class OpenFile:
    """A descriptor, closed with the last reference to this: a response continues when its object is evicted."""

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class FilePart(NamedTuple):
    """`nbytes` of a file from `offset` on. A file that turns out shorter ends the response early."""

    file: OpenFile
    offset: int
    nbytes: int


Part = FilePart | Buffer


class Content(NamedTuple):
    """Bytes of an object. `head` is complete; `parts` have the length in it, and may be produced while they are sent."""

    head: bytes
    parts: Iterable[Part]


class Refusal(NamedTuple):
    """A refusal. `message` is for people; `fields` are additional headers."""

    status: int
    message: str = ""
    code: str = "peer-refused"
    fields: tuple[tuple[str, str], ...] = ()


class Done(NamedTuple):
    """The response 204, without a body."""


Response = Content | Refusal | Done


class BrokenResponseError(Exception):
    """A body cannot be sent to its end: the server closes the connection, so that the receiver detects it."""


class Exchange(Protocol):
    """The other side of a request in progress, for the code that produces the response."""

    def processing(self) -> None:
        """Report that the response is in progress, if the client supports that. Must be called at least every 300 ms.

        Raises `OSError` if the other side is gone, or this server stops.
        """
        ...

    def read_body(self, nbytes: int) -> bytearray:
        """The next bytes of the request's body. Raises `OSError` if they do not arrive."""
        ...
