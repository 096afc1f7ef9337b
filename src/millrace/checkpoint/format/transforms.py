"""Torch's stream extensions (encryption, say) on the stored chunks of our own checkpoints. Needs no torch itself.

The codec comes first, then the extensions, on each chunk as a stream of its own: so a slice still reads only its chunks,
threads still share a tensor, and memory stays bounded. As in torch's writer the first extension of a list is nearest to
the file. The manifest names them in this order, in which they are undone.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import IO, Any, Protocol

from typing_extensions import Buffer

from millrace.errors import ConfigurationError, CorruptCheckpointError, MillraceError, UnsupportedFormatError


class StreamExtension(Protocol):
    """What is used of torch's `StreamTransformExtension`. Its streams are used by one thread each."""

    def get_descriptor(self) -> str: ...

    def transform_to(self, output: IO[bytes]) -> IO[bytes]: ...

    def transform_from(self, input: IO[bytes]) -> IO[bytes]: ...


class _Sink(io.BytesIO):
    """Keeps what was written when the streams above close it."""

    content = b""

    def close(self) -> None:
        if not self.closed:
            self.content = self.getvalue()
        super().close()


class Transforms:
    """A list of extensions. Thread-safe where they are."""

    def __init__(self, extensions: Sequence[StreamExtension] = ()) -> None:
        """Raises `ConfigurationError` for what is no stream extension."""
        for extension in extensions:
            if not all(hasattr(extension, name) for name in ("get_descriptor", "transform_to", "transform_from")):
                raise ConfigurationError(
                    f"{type(extension).__name__} is no stream extension",
                    next_step="give instances of torch's StreamTransformExtension",
                )
        self._extensions = tuple(extensions)

    @property
    def descriptors(self) -> tuple[str, ...]:
        return tuple(extension.get_descriptor() for extension in self._extensions)

    def apply(self, stored: bytes) -> bytes:
        """Transform a chunk. Raises what the extensions raise."""
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
        """The chunk that `data` was made of; at most `limit_bytes` are read of it.

        Raises `CorruptCheckpointError` when an extension fails, or gives more.
        """
        if not self._extensions:
            return data
        content = bytearray()
        try:
            stream: IO[bytes] = io.BytesIO(data)
            for extension in self._extensions:
                stream = extension.transform_from(stream)
            # To the end of the stream: some extensions verify there.
            while len(content) <= limit_bytes and (part := stream.read(limit_bytes + 1 - len(content))):
                content += part
        except MillraceError:
            raise
        except Exception as error:
            raise CorruptCheckpointError(
                f"{' after '.join(self.descriptors)} cannot be undone ({type(error).__name__})",
                next_step="check the key or setting of the extension, else load another checkpoint",
            ) from error
        if len(content) > limit_bytes:
            raise CorruptCheckpointError(f"{' after '.join(self.descriptors)} gives more than was saved")
        return content


def transforms_for(descriptors: Sequence[str], registry: Any) -> Transforms:
    """The extensions that a manifest names, from torch's `ExtensionRegistry` (or None).

    Raises `UnsupportedFormatError`, naming the extension, when the registry does not know one.
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
                f"the checkpoint was written through the extension {descriptor!r:.100}",
                next_step="pass _extension_registry= with that extension registered to the reader",
            ) from error
    return Transforms(extensions)
