"""What is read, and never written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from typing_extensions import Buffer

from millrace.errors import UsageError
from millrace.origin.protocol import ObjectWriter


class ReadOnlyOrigin:
    """The writing half of an origin that cannot be written: every call raises `UsageError`."""

    _cannot_be_written = "cannot be written"
    _write_instead = "write to another origin"

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        self._refuse()

    def open_writer(self, key: str) -> ObjectWriter:
        self._refuse()

    def delete(self, keys: Sequence[str]) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UsageError(self._cannot_be_written, next_step=self._write_instead)
