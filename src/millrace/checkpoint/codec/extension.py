"""The typed codec for torch's own checkpoint files: `ZstdPlanes`, a stream extension.

dcp.save(state, storage_writer=FileSystemWriter(path, _extensions=[ZstdPlanes()]))
dcp.load(state, storage_reader=FileSystemReader(path, _extension_registry=extension_registry()))
"""

from __future__ import annotations

from typing import IO, Any, cast

from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension

from millrace.checkpoint.codec.plane_stream import PlaneStreamReader, PlaneStreamWriter
from millrace.errors import UnsupportedFormatError


class ZstdPlanes(StreamTransformExtension):  # type: ignore[misc]
    """Compresses every item of a stock checkpoint by planes, block by block, with a checksum on each.

    The stream does not say what the elements are; the width is found by trial. Holds about 1 MiB a stream and 5 MiB a
    thread. Damage is a `CorruptCheckpointError` when it is read. Thread-safe.
    """

    @staticmethod
    def registry_name() -> str:
        return "stream.zstd_planes@millrace"

    @staticmethod
    def from_descriptor(version: str) -> ZstdPlanes:
        """Raises `UnsupportedFormatError` for another version than 1."""
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


def extension_registry(*extensions: type[Any]) -> Any:
    """Torch's `ExtensionRegistry` with `ZstdPlanes` in it, and further `extensions` (classes), for a reader."""
    registry = ExtensionRegistry()
    for extension in (ZstdPlanes, *extensions):
        registry.register(extension)
    return registry
