"""Indexes of stores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millrace.errors import StorageError
from millrace.store.index import Index


@contextmanager
def new_index(directory: Path) -> Iterator[Index]:
    """An empty index in a directory that this creates."""
    directory.mkdir()
    index = Index(directory)
    try:
        yield index
    finally:
        index.close()


def fail_on(error: StorageError) -> None:
    """A callback for errors of an index in a test that expects none."""
    raise error
