"""Any sequence of states, each saved against any earlier one or none, is loaded bit for bit, in any sharding."""

from __future__ import annotations

import pathlib
import tempfile
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.property.checkpoint.codec.test_roundtrip import DTYPES, BoxLoader, BoxPlanner, grid
from tests.support.states import assert_same_state, bits
from torch.distributed.checkpoint.api import CheckpointException

from millrace.checkpoint import CheckpointReader, CheckpointWriter
from millrace.checkpoint.format.manifest import DataFile, Manifest, decode_manifest, encode_manifest
from millrace.checkpoint.format.tables import chain_costs, restore_bytes
from millrace.checkpoint.storage.manifests import read_manifest
from millrace.checkpoint.storage.storage import open_storage
from millrace.checkpoint.writing.bases import Base, StoredBase, check_files
from millrace.errors import BaseGoneError, CorruptCheckpointError, MillraceError

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

KEYS = ("a", "b", "c", "large")


@st.composite
def tensors(draw, large: bool):
    dtype = draw(st.sampled_from(DTYPES))
    shape = (
        [draw(st.integers(500, 700)), draw(st.integers(300, 500))]
        if large
        else draw(st.lists(st.integers(0, 9), max_size=3))
    )
    count = torch.Size(shape).numel() * dtype.itemsize
    top = 2 if dtype == torch.bool else draw(st.sampled_from([1, 4, 256]))
    raw = np.random.default_rng(draw(st.integers(0, 99))).integers(0, top, count, np.uint8)
    return tensor_of(raw, dtype, shape)


def tensor_of(raw: np.ndarray, dtype: torch.dtype, shape) -> torch.Tensor:
    if not raw.size:
        return torch.zeros(0, dtype=torch.uint8).view(dtype).view(shape)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


@st.composite
def changed(draw, tensor):
    """The tensor, with nothing, a few bytes, or everything of it changed."""
    raw = np.frombuffer(bits(tensor), dtype=np.uint8).copy()
    share = draw(st.sampled_from([0.0, 0.0, 0.01, 1.0]))
    if raw.size and share:
        generator = np.random.default_rng(draw(st.integers(0, 99)))
        places = generator.integers(0, raw.size, max(1, int(raw.size * share)))
        raw[places] ^= 1 if tensor.dtype == torch.bool else generator.integers(0, 256, places.size, np.uint8)
    return tensor_of(raw, tensor.dtype, tensor.shape)


@st.composite
def successors(draw, state):
    """A changed state for the next save: values change, tensors are added, removed and replaced."""
    following = {}
    for key in KEYS:
        fate = draw(st.sampled_from(["stay", "stay", "stay", "new", "gone"] if key in state else ["new", "gone"]))
        if fate == "stay":
            following[key] = draw(changed(state[key]))
        elif fate == "new":
            following[key] = draw(tensors(key == "large"))
    return following


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_any_sequence_of_states_and_bases_loads_equal_values(data):
    limit = data.draw(st.sampled_from([1.0, 2.0, 50.0]))
    state: dict[str, torch.Tensor] = {}
    boxes: dict[str, list] = {}
    saved: list[dict[str, torch.Tensor]] = []
    memory: dict[int, Base | None] = {}
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        root = pathlib.Path(place)
        for step in range(data.draw(st.integers(2, 5))):
            state = data.draw(successors(state))
            # Most keep their sharding.
            boxes = {
                key: boxes[key]
                if key in boxes and saved[-1].get(key) is not None and saved[-1][key].shape == tensor.shape
                else grid(data.draw, tensor.shape)
                for key, tensor in state.items()
            }
            base: Base | None = None
            number = data.draw(st.integers(0, step)) - 1
            if number >= 0:
                from_memory = data.draw(st.booleans())
                name = f"step-{number}"
                base = memory[number] if from_memory else StoredBase.open(open_storage(root / name), name)
            writer = CheckpointWriter(
                root / f"step-{step}",
                sync_files=False,
                thread_count=2,
                base=base,
                restore_limit=limit,
                keep_base=True,
                compression=data.draw(st.sampled_from(["typed", "typed", "none", "max"])),
            )
            dcp.save(dict(state), storage_writer=writer, planner=BoxPlanner(boxes))
            memory[step] = writer.written_base(f"step-{step}")
            saved.append(state)
            manifest = read_manifest(open_storage(root / f"step-{step}")).manifest
            costs = chain_costs(manifest.chunks)
            assert writer.stats.restore_bytes == restore_bytes(manifest.chunks)
            assert (costs.chain_bytes <= limit * np.maximum(costs.root_bytes, 1)).all()
        for step, expected in enumerate(saved):
            loaded = {
                key: torch.zeros(tensor.numel() * tensor.itemsize, dtype=torch.uint8)
                .view(tensor.dtype)
                .view(tensor.shape)
                for key, tensor in expected.items()
            }
            wanted = {key: grid(data.draw, tensor.shape) for key, tensor in expected.items()}
            reader = CheckpointReader(root / f"step-{step}", thread_count=2)
            dcp.load(loaded, storage_reader=reader, planner=BoxLoader(wanted))
            assert_same_state(loaded, expected)


# --- manifests with wrong siblings ----------------------------------------------------------------


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A save and a delta to it: the directory, and the second's manifest."""
    root = tmp_path_factory.mktemp("chain")
    values = torch.randn(60_000, generator=torch.Generator().manual_seed(0))
    base = None
    for step in range(2):
        writer = CheckpointWriter(root / f"step-{step}", base=base, keep_base=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.save({"w": values + 1e-4 * step, "frozen": values}, storage_writer=writer)
        base = writer.written_base(f"step-{step}")
    return root, read_manifest(open_storage(root / "step-1")).manifest


def rewritten(manifest: Manifest, **changes) -> bytes:
    return encode_manifest(Manifest(**{**{name: getattr(manifest, name) for name in Manifest.__slots__}, **changes}))


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_manifest_with_wrong_siblings_raises(chain, data):
    root, manifest = chain
    kind = data.draw(st.sampled_from(["file", "column", "name"]))
    files, columns = list(manifest.files), {name: column.copy() for name, column in manifest.chunks.columns.items()}
    if kind == "file":
        number = data.draw(st.integers(0, len(files) - 1))
        files[number] = DataFile(
            data.draw(st.sampled_from([files[number].name, "../step-0/data-x.millrace", "../nowhere/data-x.millrace"])),
            data.draw(st.integers(0, 1 << 40)),
        )
    elif kind == "name":
        files[0] = DataFile(
            data.draw(st.sampled_from(["../../data-x.millrace", "/data-x.millrace", "../data-x.millrace"])), 9
        )
    else:
        name = data.draw(st.sampled_from(["base", "file", "offset", "stored_bytes"]))
        row = data.draw(st.integers(0, len(manifest.chunks) - 1))
        columns[name][row] = data.draw(st.integers(0, 100_000) | st.just(0xFFFF_FFFF))
    lying = rewritten(manifest, files=tuple(files), chunks=type(manifest.chunks)(columns_of(manifest), columns))
    place = root / "step-9"
    place.mkdir(exist_ok=True)
    for path in (root / "step-1").glob("data-*"):
        (place / path.name).write_bytes(path.read_bytes())
    (place / "manifest.millrace").write_bytes(lying)
    loaded = {"w": torch.zeros(60_000), "frozen": torch.zeros(60_000)}
    failures: list[BaseException] = []
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(loaded, storage_reader=CheckpointReader(place))
    except CheckpointException as error:
        failures = [failure for failure, _ in error.failures.values()]
    if failures:
        assert [type(failure) for failure in failures if not isinstance(failure, MillraceError)] == []
        return
    # The change had no effect.
    values = torch.randn(60_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded["frozen"], values)
    assert torch.equal(loaded["w"], values + 1e-4)


def columns_of(manifest: Manifest) -> dict[str, str]:
    return {name: column.dtype.str for name, column in manifest.chunks.columns.items()}


def test_manifest_with_missing_sibling_file_raises_base_gone(chain):
    root, manifest = chain
    storage = open_storage(root / "step-1")
    check_files(storage, manifest.files, 2)
    for lying in (DataFile("../step-0/data-x.millrace", 1), DataFile(manifest.files[-1].name, 1)):
        with pytest.raises(BaseGoneError, match="builds on"):
            check_files(storage, [*manifest.files, lying], 2)
    with pytest.raises(CorruptCheckpointError):
        decode_manifest(rewritten(manifest, files=(DataFile("../../data-x.millrace", 1), *manifest.files[1:])))
