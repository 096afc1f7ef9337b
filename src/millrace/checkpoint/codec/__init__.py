"""Codecs: encode a chunk of tensor bytes as a smaller one, and decode it bit for bit. No torch, except in `extension`.

Key terms:
- chunk: about 1 MiB of one tensor, encoded on its own.
- kind: width of the elements, and whether they are floats.
- effort: which codec to use, and at which level.

Start reading in `chunks.py` (shared types and the `Codec` protocol), then `planes.py` (the default codec). `registry.py`
lists the codecs and selects the effort of each chunk. `extension.py` with `plane_stream.py` is the codec for torch's own
checkpoint files.
"""
