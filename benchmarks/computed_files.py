"""Computed bytes as an fsspec library, so that a file system of ours stands on them as on any other storage."""

from __future__ import annotations

from typing import Any, ClassVar

import fsspec
from tests.support.computed import ComputedOrigin

PROTOCOL = "computed"


class ComputedFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Reads what `origin` computes. One a process: fsspec makes instances from options, which name no object."""

    protocol = PROTOCOL
    origin: ClassVar[ComputedOrigin]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        listing = self.origin.list_level(path)
        if listing.objects or listing.prefixes:
            return {"name": path, "size": 0, "type": "directory"}
        return self._described(self.origin.head(path))

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        listing = self.origin.list_level(path)
        entries = [self._described(info) for info in listing.objects]
        entries += [{"name": name.rstrip("/"), "size": 0, "type": "directory"} for name in listing.prefixes]
        if not entries:
            entries = [self.info(path)]
        return entries if detail else [entry["name"] for entry in entries]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        path = self._strip_protocol(path)
        size = self.origin.head(path).size
        return bytes(self.origin.read(path, start or 0, size if end is None else min(end, size)))

    @staticmethod
    def _described(info: Any) -> dict[str, Any]:
        return {"name": info.key, "size": info.size, "type": "file", "ETag": info.version, "mtime": info.modified}


def serve(origin: ComputedOrigin) -> None:
    """Make `computed://` of this process read from `origin`."""
    ComputedFileSystem.origin = origin
    fsspec.register_implementation(PROTOCOL, ComputedFileSystem, clobber=True)
