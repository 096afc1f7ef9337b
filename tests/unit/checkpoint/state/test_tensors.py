"""Tensors that are not in row-major order: their bytes, part by part, and whether their elements share memory."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.checkpoint.state.tensors import dense, flat_bytes, overlaps_itself, part_of_bytes

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.complex128, torch.float8_e4m3fn)
BASE = torch.randint(0, 256, (8192,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@st.composite
def views(draw):
    """Strided, overlapping, expanded, conjugated."""
    dims = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), max_size=4))
    base = BASE.view(draw(st.sampled_from(DTYPES)))
    view = base.as_strided([size for size, _ in dims], [stride for _, stride in dims], draw(st.integers(0, 50)))
    return view.conj() if view.dtype.is_complex and draw(st.booleans()) else view


@given(views(), st.data())
def test_part_of_tensor_equals_the_slice_of_the_whole(view, data):
    width = view.element_size()
    start = data.draw(st.integers(0, view.numel() - 1))
    stop = data.draw(st.integers(start + 1, view.numel()))
    whole = view.resolve_conj().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    assert flat_bytes(view, "key").equal(whole)
    part = part_of_bytes(dense(view, "key"), start * width, stop * width)
    assert part.equal(whole[start * width : stop * width])


@given(views())
def test_tensor_whose_elements_share_memory_overlaps_itself(view):
    places = [
        sum(place * step for place, step in zip(index, view.stride(), strict=True))
        for index in itertools.product(*map(range, view.shape))
    ]
    assert overlaps_itself(view) == (len(set(places)) < len(places))
