"""Streams one object to an origin, in parts."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from typing_extensions import Buffer

from millrace.origin.base import note_failure

PART_BYTES = 16 << 20
"""One part of a streamed upload. S3 allows 10,000 parts, so a file may have 160 GB. S3's limit of 5 TB would need growing
parts, and Millrace writes no such files."""


class _AbortUploadError(Exception):
    """Raised into obstore's part iterator so that it aborts the multipart upload."""


class ObjectUpload:
    """Streams one object in parts: a thread runs the upload, which takes parts from a short queue.

    Memory is bounded by the parts in the queue and in flight. An object that fits one part becomes a single PUT.
    Not thread-safe: one writer at a time.
    """

    def __init__(
        self, key: str, upload: Callable[[Iterator[Buffer]], None], put_whole: Callable[[Buffer], None]
    ) -> None:
        self._key = key
        self._upload = upload
        self._put_whole = put_whole
        self._part = bytearray()
        self._parts: queue.Queue[Buffer | BaseException | None] = queue.Queue(maxsize=2)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._finished = False

    def send_whole_by(self, put_whole: Callable[[Buffer], None]) -> None:
        """Send an object that fits one part with this function, which takes a slot and retries."""
        self._put_whole = put_whole

    def write(self, data: Buffer, /) -> int:
        if self._finished:
            raise ValueError(f"upload of {self._key} is closed")
        view = memoryview(data).cast("B")
        position = 0
        while position < len(view):
            taken = view[position : position + PART_BYTES - len(self._part)]
            self._part += taken
            position += len(taken)
            if len(self._part) == PART_BYTES:
                self._send(self._part)
                self._part = bytearray()
        return len(view)

    def close(self) -> None:
        if self._finished:
            return
        if self._thread is None:
            self._finished = True
            self._put_whole(self._part)
            return
        if self._part:
            self._send(self._part)
        self._send(None)
        self._finished = True
        self._thread.join()
        self._raise_error()

    def abort(self) -> None:
        if self._finished:
            return
        self._finished = True
        self._part = bytearray()
        if self._thread is not None:
            while self._thread.is_alive():
                with contextlib.suppress(queue.Full):
                    self._parts.put(_AbortUploadError(), timeout=0.1)
                    break
            self._thread.join()

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
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="millrace-upload", daemon=True)
            self._thread.start()
        while self._error is None:
            try:
                self._parts.put(part, timeout=0.2)
                return
            except queue.Full:
                continue
        self._finished = True
        self._thread.join()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            note_failure(self._error)
            raise self._error

    def _run(self) -> None:
        try:
            self._upload(self._pull())
        except BaseException as error:  # noqa: BLE001 - raised again in the writer's thread
            self._error = error

    def _pull(self) -> Iterator[Buffer]:
        while (part := self._parts.get()) is not None:
            if isinstance(part, BaseException):
                raise part
            yield part
