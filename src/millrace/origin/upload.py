"""Streams one object to an origin, in parts."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from typing_extensions import Buffer

from millrace.errors import MillraceError, UsageError
from millrace.origin.base import byte_view, note_failure
from millrace.origin.side_by_side import action_at_late_end
from millrace.runtime import forks

PART_BYTES = 16 << 20
"""One part of a streamed upload. S3 allows 10,000 parts, so a file may have 160 GB. S3's limit of 5 TB would need growing
parts, and Millrace writes no such files."""


_PARTS_WAITING = 2


class _AbortUploadError(Exception):
    """Raised into obstore's part iterator so that it aborts the multipart upload."""


class ObjectUpload:
    """Streams one object in parts: a thread runs the upload, which takes parts from a short queue.

    Memory is bounded by the parts in the queue and in flight. An object that fits one part becomes a single PUT.
    Not thread-safe: one writer at a time. An exception of a signal handler (Ctrl-C) in `write` or `close` aborts the upload,
    unless all of it was sent: then it continues, see `at_late_end`. After such a `write`, or one that failed, `write` raises
    the same exception again, and `close` raises `UsageError`. In a forked process, `write` and `close` raise `UsageError`,
    and `abort` does nothing.
    """

    def __init__(
        self, key: str, upload: Callable[[Iterator[Buffer]], None], put_whole: Callable[[Buffer], None]
    ) -> None:
        self._key = key
        self._upload = upload
        self._put_whole = put_whole
        self._part = bytearray()
        # Not a `Queue` with a limit: an interrupt in the Python code of its conditions would stop both threads.
        self._parts: queue.SimpleQueue[Buffer | BaseException | None] = queue.SimpleQueue()
        self._places: queue.SimpleQueue[None] = queue.SimpleQueue()  # one for each part that may be put into the queue
        for _ in range(_PARTS_WAITING):
            self._places.put(None)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._finished = False
        self._cut_by: BaseException | None = None  # what ended a write that did not return
        self._is_sent = False
        self._after: Callable[[], None] | None = None
        self._owner = forks.Owner()

    def send_whole_by(self, put_whole: Callable[[Buffer], None]) -> None:
        """Send an object that fits one part with this function, which takes a slot and retries."""
        self._put_whole = put_whole

    def write(self, data: Buffer, /) -> int:
        self._require_owner()
        if self._cut_by is not None:  # as of a compressor, which ends its stream after a failed write, too
            raise self._cut_by
        if self._finished:
            raise ValueError(f"upload of {self._key} is closed")
        view = byte_view(data)
        position = 0
        try:
            while position < len(view):
                taken = view[position : position + PART_BYTES - len(self._part)]
                self._part += taken
                position += len(taken)
                if len(self._part) == PART_BYTES:
                    self._send(self._part)
                    self._part = bytearray()
        except BaseException as error:  # an interrupt: a part may have been sent, and would be sent again
            self._cut_by = error
            self.abort()
            raise
        return len(view)

    def close(self) -> None:
        self._require_owner()
        if self._cut_by is not None:
            raise UsageError(
                f"{self._key} was not written: a write was interrupted or failed", next_step="write it again"
            )
        if self._finished:
            return
        if self._thread is None:
            self._finished = True
            self._put_whole(self._part)
            return
        try:
            if self._part:
                self._send(self._part)
            self._send(None)
            self._is_sent = self._finished = True
            self._thread.join()
        except BaseException:
            if not self._is_sent:
                self.abort()
            self._after = action_at_late_end()  # if the upload has ended by now, it is not called
            raise
        self._raise_error()

    def abort(self) -> None:
        if self._finished or not self._owner.is_this_process:
            return
        self._finished = True
        self._part = bytearray()
        if self._thread is not None:
            self._parts.put(_AbortUploadError())
            self._thread.join()

    def _require_owner(self) -> None:
        if not self._owner.is_this_process:
            raise UsageError(
                f"{self._key} was opened for writing before this process was forked",
                next_step="write and close it in the process that opened it, or open another object here",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exc_type is None:
            self.close()
        else:
            self.abort()

    def _send(self, part: Buffer | None) -> None:
        thread = self._thread or self._start()
        while self._error is None:
            try:
                self._places.get(timeout=0.2)
            except queue.Empty:
                continue
            self._parts.put(part)
            return
        self._finished = True
        thread.join()
        self._raise_error()

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="millrace-upload", daemon=True)
        try:
            thread.start()
            self._thread = thread  # only now: a thread that did not start cannot be joined
        except BaseException:  # an interrupt: it may have started
            self._finished = True
            self._parts.put(_AbortUploadError())
            raise
        return thread

    def _raise_error(self) -> None:
        if self._error is not None:
            note_failure(self._error)
            raise self._error

    def _run(self) -> None:
        try:
            self._upload(self._pull())
        except BaseException as error:  # noqa: BLE001 - raised again in the writer's thread
            self._error = error
        if self._after is not None:
            with contextlib.suppress(MillraceError):  # the caller was interrupted, and has raised
                self._after()

    def _pull(self) -> Iterator[Buffer]:
        while (part := self._parts.get()) is not None:
            if isinstance(part, BaseException):
                raise part
            self._places.put(None)
            yield part
