"""Writable file objects that upload one object, and publish it only after a successful close."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

from typing_extensions import Buffer

from millrace.origin import ObjectWriter
from millrace.origin.side_by_side import at_late_end
from millrace.runtime import forks

_log = logging.getLogger("millrace.filesystem")


class UploadFile(io.RawIOBase):
    """A writable file that streams one object to the origin. The object becomes visible when the file is closed.

    The upload is discarded, with nothing visible, when

    - a `with` block over this file is left by an exception;
    - `close` is called while an exception is being handled that was raised after the open. Text wrappers, pyarrow streams,
      `pq.ParquetWriter` and `fsspec.open` call it so at the end of their `with` blocks. A `close` in an `except` block has
      the same effect, with a warning in the log;
    - the file is garbage-collected without having been closed, with a `ResourceWarning` and a line in the log. This includes
      a `close` by the destructor of another object: `pq.ParquetWriter` has one, also after an error of its own `close`.

    A `close` outside of any exception always publishes, even if it came too early. In a process that was forked since the
    open, `write` and `close` raise `UsageError`, and the end of the file there has no effect.
    """

    _failed = False
    _is_cut = False  # a write has raised an error
    _position = 0

    def __init__(self, writer: ObjectWriter, *, path: str, on_published: Callable[[], None]) -> None:
        super().__init__()
        self._on_published = on_published
        self._handled_at_open = sys.exc_info()[1]
        self._owner = forks.Owner()
        self.name = path
        self.mode = "wb"
        self._writer = writer  # last: with it the file is complete

    @property
    def is_of_this_process(self) -> bool:
        """False in a process that was forked since the open."""
        return self._owner.is_this_process

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: Buffer, /) -> int:
        if self.closed:
            raise ValueError(f"{self.name} is closed")
        nbytes = memoryview(data).nbytes
        if not self._failed:  # else the end of a compressed stream or a footer of a discarded file
            self._is_cut = True
            self._writer.write(data)
            self._is_cut = False
        self._position += nbytes
        return nbytes

    def fail(self) -> None:
        """Let `close` abort the upload; later writes are ignored."""
        self._failed = True

    def discard(self) -> None:
        """Abort the upload; nothing becomes visible."""
        self.fail()
        self.close()

    def fail_under_exception(self) -> None:
        """`fail` if an exception is being handled that was raised after the open."""
        error = sys.exc_info()[1]
        if error is not None and error is not self._handled_at_open and not self._failed and not self.closed:
            self.fail()
            _log.warning("%s was not written: closed while %s was being handled", self.name, type(error).__name__)

    def close(self) -> None:
        if not self.closed and _is_by_destructor():
            self._dealloc_warn(self)
            self.fail()
        self.fail_under_exception()
        self._end()

    def __exit__(self, exc_type: Any, exc: Any, trace: Any) -> None:
        self._failed = self._failed or exc_type is not None
        self._end()

    def __del__(self) -> None:
        # Closing here would publish half an object after an exception elsewhere.
        if not self.closed and hasattr(self, "_writer") and self.is_of_this_process:
            self._dealloc_warn(self)
            self.discard()

    def _dealloc_warn(self, source: object) -> None:
        """Called also by a buffer or text wrapper over this file that is garbage-collected, before it closes the file."""
        if not self.is_of_this_process:
            return
        self.fail()
        if self._position and not self._is_cut:
            _log.warning("%s was not written: its file was never closed", self.name)
            warnings.warn(f"{self.name} was not written: its file was never closed", ResourceWarning, 2, source)

    def _end(self) -> None:
        if self.closed:
            return
        self._handled_at_open = None
        try:
            if self._failed:
                self._writer.abort()
            else:
                try:
                    with at_late_end(self._on_published):
                        self._writer.close()
                finally:
                    self._on_published()  # also after an error: the object may have been published
        finally:
            super().close()


def _is_by_destructor() -> bool:
    """Whether a `__del__` has called the `close` that calls this, perhaps through the `close` of other objects."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name == "close":
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "__del__"


class CompressedUpload(io.RawIOBase):
    """An fsspec compressor over an `UploadFile`. It closes both: most compressors leave the file below open."""

    def __init__(self, upload: UploadFile, compress: Callable[..., Any]) -> None:
        super().__init__()
        self._upload = upload
        self._compressor = compress(upload, mode="w")
        self.name = upload.name
        self.mode = "wb"

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer, /) -> int:
        self._compressor.write(data)
        return memoryview(data).nbytes

    def discard(self) -> None:
        """Abort the upload; nothing becomes visible."""
        self._upload.fail()
        self._end()

    def close(self) -> None:
        if not self.closed and _is_by_destructor():
            self._dealloc_warn(self)
        self._upload.fail_under_exception()
        self._end()

    def __exit__(self, exc_type: Any, exc: Any, trace: Any) -> None:
        if exc_type is not None:
            self._upload.fail()
        self._end()

    def __del__(self) -> None:
        if not self.closed and hasattr(self, "_compressor") and self._upload.is_of_this_process:
            self._dealloc_warn(self)
            self.discard()

    def _dealloc_warn(self, source: object) -> None:
        self._upload._dealloc_warn(source)

    def _end(self) -> None:
        if self.closed:
            return
        try:
            self._compressor.close()
        except BaseException:
            self._upload.fail()
            raise
        finally:
            self._upload._end()
            super().close()
