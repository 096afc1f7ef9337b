"""Requests that end together, so that the cleanup after a failure does not take as long as the failure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from millrace.errors import OriginUnavailableError


class Operation:
    """The requests in all threads that run `part_of(operation)`, or in a copy of such a context.

    After one of them has failed because its origin did not respond in time, further ones to an origin with the option
    `timeout` fail at once. So the check whether a write has arrived, or the removal of its objects, does not take the same
    time again. Has no effect on origins without that option. Thread-safe.
    """

    def __init__(self) -> None:
        self.ended_by: OriginUnavailableError | None = None
        """The error that ended the operation; None allows requests again."""


_current: ContextVar[Operation | None] = ContextVar("millrace-origin-operation", default=None)


@contextlib.contextmanager
def part_of(operation: Operation) -> Iterator[None]:
    """Make the requests of this thread inside of the `with` block a part of `operation`."""
    token = _current.set(operation)
    try:
        yield
    finally:
        _current.reset(token)


def refuse_if_ended(what: str) -> None:
    """Raise `OriginUnavailableError` for a request to the URL `what` if the current operation has ended."""
    operation = _current.get()
    ended_by = operation.ended_by if operation is not None else None
    if ended_by is not None:
        raise OriginUnavailableError(
            f"{what}: not requested, since the origin has not answered before ({ended_by.message})",
            next_step=ended_by.next_step,
        ) from ended_by


def note_failure(error: BaseException) -> None:
    """End the current operation if `error` is that of an origin that did not respond in time."""
    operation = _current.get()
    if operation is not None and isinstance(error, OriginUnavailableError) and not error.is_final:
        operation.ended_by = operation.ended_by or error
