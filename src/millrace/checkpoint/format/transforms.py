"""Applies torch's stream extensions (encryption, for example) to stored chunks. Does not import torch.

The extensions run after the codec, with one stream per chunk. So a slice still reads only its chunks, threads still share a
tensor, and memory stays limited. As in torch's writer, the first extension of a list is nearest to the file. The manifest
lists them in this order, in which a reader reverses them.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import IO, Any, Protocol

from typing_extensions import Buffer

from millrace.checkpoint.arguments import sequence
from millrace.errors import ConfigurationError, CorruptCheckpointError, MillraceError, UnsupportedFormatError


class StreamExtension(Protocol):
    """The used part of torch's `StreamTransformExtension`. One thread uses each stream."""

    def get_descriptor(self) -> str: ...

    def transform_to(self, output: IO[bytes]) -> IO[bytes]: ...

    def transform_from(self, input: IO[bytes]) -> IO[bytes]: ...


class _Sink(io.BytesIO):
    """Keeps the written bytes after `close`."""

    content = b""

    def close(self) -> None:
        if not self.closed:
            self.content = self.getvalue()
        super().close()


class Transforms:
    """A list of extensions. Thread-safe where they are."""

    def __init__(self, extensions: Sequence[StreamExtension] = ()) -> None:
        """Raises `ConfigurationError` for an object that is not a stream extension."""
        for extension in sequence("_extensions", extensions, "stream extensions"):
            if not all(hasattr(extension, name) for name in ("get_descriptor", "transform_to", "transform_from")):
                raise ConfigurationError(
                    f"{type(extension).__name__} is not a stream extension",
                    next_step="give instances of torch's StreamTransformExtension",
                )
        self._extensions = tuple(extensions)
        self.descriptors = tuple(extension.get_descriptor() for extension in self._extensions)

    def apply(self, stored: bytes) -> bytes:
        """Transform a stored chunk. Raises the errors of the extensions."""
        if not self._extensions:
            return stored
        sink = _Sink()
        stream: IO[bytes] = sink
        for extension in self._extensions:
            stream = extension.transform_to(stream)
        stream.write(stored)
        stream.close()
        sink.close()
        return sink.content

    def undo(self, data: Buffer, limit_bytes: int) -> Buffer:
        """Reverse `apply`. Reads at most `limit_bytes` of the chunk.

        Raises `CorruptCheckpointError` when an extension fails or returns more.
        """
        if not self._extensions:
            return data
        content = bytearray()
        try:
            stream: IO[bytes] = io.BytesIO(data)
            for extension in self._extensions:
                stream = extension.transform_from(stream)
            # Read to the end of the stream, where some extensions verify the content.
            while len(content) <= limit_bytes and (part := stream.read(limit_bytes + 1 - len(content))):
                content += part
        except MillraceError:
            raise
        except Exception as error:
            raise CorruptCheckpointError(
                f"{' after '.join(self.descriptors)} cannot be reversed ({type(error).__name__})",
                next_step="check the key or settings of the extension, or load another checkpoint",
            ) from error
        if len(content) > limit_bytes:
            raise CorruptCheckpointError(f"{' after '.join(self.descriptors)} returns more than was saved")
        return content


def transforms_for(descriptors: Sequence[str], registry: Any) -> Transforms:
    """The extensions of a manifest, from torch's `ExtensionRegistry` or None.

    Raises `UnsupportedFormatError`, naming the extension, when it is not in the registry.
    """
    extensions = []
    for descriptor in descriptors:
        try:
            if registry is None:
                raise ValueError("no registry")
            extensions += registry.from_descriptor_list([descriptor])
        except MillraceError:
            raise
        except ValueError as error:
            raise UnsupportedFormatError(
                f"the checkpoint was written with the extension {descriptor!r:.100}",
                next_step="give the reader a registry with it: CheckpointReader(url, _extension_registry=registry), or "
                "extension_registry=registry for other functions",
            ) from error
    return Transforms(extensions)
