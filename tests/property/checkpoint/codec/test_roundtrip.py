"""Any state, saved in any sharding, is loaded bit for bit in any other."""

from __future__ import annotations

import itertools
import tempfile
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.states import assert_same_state
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from millrace.checkpoint import CheckpointReader, CheckpointWriter
from millrace.checkpoint.codec.chunks import Kind
from millrace.checkpoint.codec.planes import PlaneCodec
from millrace.checkpoint.format import manifest as format_module

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

DTYPES = [getattr(torch, name) for name in format_module.DTYPES if hasattr(torch, name)]
# Bits that arithmetic would change: zeros of both signs, infinities, quiet and signalling NaNs with payloads, denormals.
ODD_FLOATS = [0, 1 << 63, 0x7FF0 << 48, 0xFFF0 << 48, 0x7FF8_0000_0000_0001, 0x7FF0_0000_0000_0001, 1, (1 << 63) | 1]
ODD_BYTES = np.array(ODD_FLOATS, dtype="<u8").view(np.uint8)


@st.composite
def typed_bytes(draw):
    kind = Kind(draw(st.sampled_from([1, 2, 4, 8])), draw(st.booleans()))
    count = draw(st.integers(0, 4000))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    # From constant to noise, in pieces, so that planes take every mode.
    pieces = [
        generator.integers(0, limit, count * kind.width // 4 + 1, np.uint8, endpoint=True)
        for limit in draw(st.lists(st.sampled_from([0, 1, 15, 255]), min_size=4, max_size=4))
    ]
    return kind, np.concatenate(pieces)[: count * kind.width]


@given(typed_bytes(), st.booleans())
def test_any_chunk_is_decoded_to_the_same_bytes(data, with_base):
    kind, raw = data
    codec = PlaneCodec()
    base = np.roll(raw, 3).data if with_base else None
    stored = b"".join(codec.encode(raw.data, kind, base))
    assert len(stored) <= raw.size + 1 + 5 * kind.width
    out = np.full(raw.size, 7, np.uint8)
    codec.decode(stored, kind, out.data, base)
    assert np.array_equal(out, raw)


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 12), max_size=3))
    if draw(st.integers(0, 5)) == 0:
        # Several chunks.
        shape = [draw(st.integers(300, 900)), draw(st.integers(300, 900))]
    dtype = draw(st.sampled_from(DTYPES))
    count = torch.Size(shape).numel() * dtype.itemsize
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    if dtype == torch.bool:
        raw = generator.integers(0, 2, count, np.uint8)
    elif draw(st.booleans()):
        raw = generator.integers(0, 256, count, np.uint8)
    else:
        raw = np.resize(np.roll(ODD_BYTES, draw(st.integers(0, 63))), count)
    tensor = torch.tensor(raw.tolist(), dtype=torch.uint8).view(dtype).reshape(shape)
    return draw(views(tensor))


@st.composite
def views(draw, tensor):
    """The tensor itself, or a non-contiguous part of it, or its lazy conjugate."""
    for _ in range(draw(st.integers(0, 2))):
        way = draw(st.sampled_from(["transpose", "step", "narrow", "expand", "conj", "strided"]))
        if way == "transpose" and tensor.dim() > 1:
            tensor = tensor.transpose(0, -1)
        elif way == "step" and tensor.dim():
            tensor = tensor[draw(st.integers(0, 2)) :: draw(st.integers(1, 3))]
        elif way == "narrow" and tensor.dim():
            dim = draw(st.integers(0, tensor.dim() - 1))
            start = draw(st.integers(0, tensor.shape[dim]))
            tensor = tensor.narrow(dim, start, draw(st.integers(0, tensor.shape[dim] - start)))
        elif way == "expand" and tensor.dim() < 3:
            tensor = tensor.unsqueeze(0).expand(draw(st.integers(0, 4)), *tensor.shape)
        elif way == "conj" and tensor.dtype in (torch.complex64, torch.complex128):
            tensor = tensor.conj()
        elif way == "strided" and tensor.dim() and tensor.is_contiguous() and tensor.numel() > 20:
            # Rows that overlap in memory.
            tensor = tensor.flatten().as_strided((5, 4), (3, 2))
    return tensor


def grid(draw, shape):
    """Cut every dimension somewhere: boxes that cover the shape without overlap."""
    boxes = [([], [])]
    for size in shape:
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        pieces = list(itertools.pairwise(cuts)) or [(0, 0)]
        boxes = [([*off, low], [*sizes, high - low]) for off, sizes in boxes for low, high in pieces]
    return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]


class BoxPlanner(dcp.DefaultSavePlanner):
    """Saves one process's tensors as the shards that a test chose."""

    def __init__(self, boxes):
        super().__init__()
        self.boxes = boxes

    def create_local_plan(self):
        items = []
        for key, tensor in self.state_dict.items():
            for box in self.boxes[key]:
                data = TensorWriteData(box, TensorProperties.create_from_tensor(tensor), tensor.size())
                items.append(WriteItem(MetadataIndex(key, box.offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def resolve_data(self, write_item):
        box = write_item.tensor_data.chunk
        return self.state_dict[write_item.index.fqn][
            tuple(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True))
        ]


class BoxLoader(DefaultLoadPlanner):
    """Loads every tensor as the boxes that a test chose."""

    def __init__(self, boxes):
        super().__init__()
        self.boxes = boxes

    def create_local_plan(self):
        items = []
        for key in self.state_dict:
            described = self.metadata.state_dict_metadata[key]
            for box in self.boxes[key]:
                items += create_read_items_for_chunk_list(key, described, [box])
        return dcp.LoadPlan(items)

    def resolve_tensor(self, read_item):
        tensor = self.state_dict[read_item.dest_index.fqn]
        corner = zip(read_item.dest_index.offset, read_item.dest_offsets, read_item.lengths, strict=True)
        return tensor[tuple(slice(low + more, low + more + length) for low, more, length in corner)]


@st.composite
def blank(draw, tensor):
    """Somewhere to load the tensor: in one piece, or not."""
    shape = tuple(tensor.shape)
    if not shape or draw(st.booleans()):
        return (
            torch.zeros(torch.Size(shape).numel() * tensor.itemsize, dtype=torch.uint8).view(tensor.dtype).view(shape)
        )
    wide = (*shape[:-1], 2 * shape[-1])
    space = torch.zeros(torch.Size(wide).numel() * tensor.itemsize, dtype=torch.uint8).view(tensor.dtype).view(wide)
    return space[..., ::2]


@pytest.mark.slow
@settings(deadline=None, max_examples=80)
@given(st.data())
def test_state_saved_in_any_sharding_is_loaded_in_any_other(data):
    state = dict(enumerate(data.draw(st.lists(tensors(), min_size=1, max_size=4))))
    state = {f"t{number}": tensor for number, tensor in state.items()}
    saved = {key: grid(data.draw, tensor.shape) for key, tensor in state.items()}
    wanted = {key: grid(data.draw, tensor.shape) for key, tensor in state.items()}
    loaded = {key: data.draw(blank(tensor)) for key, tensor in state.items()}
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        writer = CheckpointWriter(place, sync_files=False, thread_count=2)
        dcp.save(state, storage_writer=writer, planner=BoxPlanner(saved))
        dcp.load(loaded, storage_reader=CheckpointReader(place, thread_count=2), planner=BoxLoader(wanted))
    assert_same_state(loaded, state)
