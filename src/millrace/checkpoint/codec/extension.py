"""The plane codec for torch's own checkpoint files: `ZstdPlanes`, a stream extension.

dcp.save(state, storage_writer=FileSystemWriter(path, _extensions=[ZstdPlanes()]))
dcp.load(state, storage_reader=FileSystemReader(path, _extension_registry=extension_registry()))
"""

from __future__ import annotations

from typing import IO, Any, cast

from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension, ZStandard

from millrace.checkpoint.codec import zstd
from millrace.checkpoint.codec.plane_stream import PlaneStreamReader, PlaneStreamWriter
from millrace.errors import UnsupportedFormatError


class ZstdPlanes(StreamTransformExtension):  # type: ignore[misc]
    """Compresses every item of a stock checkpoint by planes, block by block, with a checksum on each.

    The stream does not contain the element type, so a trial finds it. Needs about 1 MiB for each stream and 5 MiB for each
    thread. A damaged block raises `CorruptCheckpointError` when it is read. Thread-safe.
    """

    @staticmethod
    def registry_name() -> str:
        return "stream.zstd_planes@millrace"

    @staticmethod
    def from_descriptor(version: str) -> ZstdPlanes:
        """Raises `UnsupportedFormatError` for other versions than 1."""
        if version.partition(".")[0] != "1":
            raise UnsupportedFormatError(
                f"the checkpoint was compressed by version {version} of ZstdPlanes, and this Millrace reads version 1",
                next_step="install a newer Millrace",
            )
        return ZstdPlanes()

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return cast("IO[bytes]", PlaneStreamWriter(output))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return cast("IO[bytes]", PlaneStreamReader(input))


class _Zstd(ZStandard):  # type: ignore[misc]
    """Torch's `ZStandard`, which reads with Millrace's zstd library. Torch's own class needs another one."""

    def __init__(self) -> None:
        StreamTransformExtension.__init__(self)  # that of `ZStandard` raises without the other library

    @staticmethod
    def from_descriptor(version: str) -> _Zstd:
        """Raises `UnsupportedFormatError` for other versions than 1."""
        if version.partition(".")[0] != "1":
            raise UnsupportedFormatError(
                f"the checkpoint was compressed by version {version} of ZStandard, and this Millrace reads version 1",
                next_step="install a newer Millrace",
            )
        return _Zstd()

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return zstd.reader(input)


def extension_registry(*extensions: type[Any]) -> Any:
    """Torch's `ExtensionRegistry` for a reader, with `ZstdPlanes`, zstd and the classes `extensions`."""
    registry = ExtensionRegistry()
    for extension in (ZstdPlanes, _Zstd, *extensions):
        registry.register(extension)
    return registry
