"""The planners against torch's own: the same plans and metadata for the same state dicts, and more precise errors."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from types import MappingProxyType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _validate_global_plan,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from millrace.checkpoint import CheckpointLoadPlanner, CheckpointSavePlanner
from millrace.checkpoint.state.flattening import flatten
from millrace.checkpoint.writing.plans import check_cover, deduplicate, join
from millrace.errors import MissingKeyError, StateMismatchError, UsageError

TENSOR = torch.arange(3)
MODEL = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))


def state() -> dict:
    """One of everything that a single process has."""
    optimizer = torch.optim.AdamW(MODEL.parameters())
    MODEL(torch.randn(8, 3)).sum().backward()
    optimizer.step()
    return {
        "model": MODEL.state_dict(),
        "parameters": dict(MODEL.named_parameters()),
        "optimizer": optimizer.state_dict(),
        "scalar": torch.tensor(5.0),
        "empty": torch.empty(0, 4),
        "bf16": torch.ones(4, 3, dtype=torch.bfloat16).t(),
        "list": [torch.ones(2), 5, {"deep": [torch.zeros(1), None]}],
        "numbers": [1, 2, [3]],
        "tuple": (torch.ones(2), 3),
        "nothing": {},
        7: {8: torch.ones(1), "none": None},
    }


def same_indices(left: list, right: list) -> None:
    """Hints of an index do not take part in its comparison."""
    assert [item.index.index for item in left] == [item.index.index for item in right]


# --- flattening -----------------------------------------------------------------------------------

KEYS = st.sampled_from(["a", "b", "c.d", 1, 2])
LEAVES = st.sampled_from([TENSOR, torch.nn.Parameter(torch.ones(2)), None, 5, "text", (TENSOR, {}), (), {1, 2}])
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=2).map(OrderedDict),
        st.dictionaries(KEYS, inner, max_size=2).map(MappingProxyType),
    ),
    max_leaves=12,
)


def flattened_by_torch(nested: dict, as_torch_2_3: bool) -> tuple[dict, dict] | None:
    _version._derived_version = "2_3" if as_torch_2_3 else None
    try:
        return flatten_state_dict(nested)
    except ValueError:
        return None
    finally:
        _version._derived_version = None


@given(st.dictionaries(KEYS, NESTED, max_size=4), st.booleans())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_flattening_equals_torch(nested, as_torch_2_3):
    expected = flattened_by_torch(nested, as_torch_2_3)
    if expected is None:
        with pytest.raises(UsageError, match="flattened key"):
            flatten(nested, as_torch_2_3=as_torch_2_3)
        return
    values, paths = flatten(nested, as_torch_2_3=as_torch_2_3)
    assert list(paths.items()) == list(expected[1].items())
    assert [id(value) for value in values.values()] == [id(value) for value in expected[0].values()]


def test_two_values_of_one_key_raise_with_the_key():
    with pytest.raises(UsageError, match=r"'a\.b'"):
        flatten({"a": {"b": 1}, "a.b": 2})


# --- saving ---------------------------------------------------------------------------------------


def planned(planner, values, ranks: int = 1):
    planner.set_up_planner(values, None, True)
    plan = planner.create_local_plan()
    plans, metadata = planner.create_global_plan([plan] * ranks)
    return plan, plans, metadata, planner.finish_plan(plans[0])


@pytest.mark.parametrize("ranks", [1, 3, 11])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"flatten_state_dict": False},
        {"flatten_sharded_tensors": False},
        {"dedup_save_to_lowest_rank": True},
    ],
    ids=str,
)
def test_save_plans_and_metadata_are_torchs(options, ranks):
    values = state()
    plan, plans, metadata, last = planned(CheckpointSavePlanner(**options), values, ranks)
    expected = planned(DefaultSavePlanner(**options), values, ranks)
    assert plan == expected[0]
    assert plans == expected[1]
    for ours, torchs in zip(plans, expected[1], strict=True):
        same_indices(ours.items, torchs.items)
    assert metadata == expected[2]
    assert list(metadata.state_dict_metadata) == list(expected[2].state_dict_metadata)
    assert list(metadata.planner_data or ()) == list(expected[2].planner_data or ())
    assert last == expected[3]
    assert pickle.loads(pickle.dumps(plans)) == expected[1]


def test_save_plan_resolves_like_torch():
    values = state()
    ours, torchs = CheckpointSavePlanner(), DefaultSavePlanner()
    last, expected = planned(ours, values)[3], planned(torchs, values)[3]
    for item, other in zip(last.items, expected.items, strict=True):
        if item.type == WriteItemType.BYTE_IO:
            assert ours.resolve_data(item).getvalue() == torchs.resolve_data(other).getvalue()
        else:
            assert ours.resolve_data(item) is torchs.resolve_data(other)
    with pytest.raises(ValueError, match="gone"):
        ours.resolve_data(WriteItem(MetadataIndex("gone", (0,)), WriteItemType.TENSOR))
    with pytest.raises(ValueError, match="scalar"):
        ours.resolve_data(WriteItem(MetadataIndex("scalar", (5,)), WriteItemType.TENSOR))


def test_planner_subclass_transforms_saved_values():
    class Halves(CheckpointSavePlanner):
        def transform_object(self, write_item, object):
            return super().transform_object(write_item, object).half()

    planner = Halves()
    last = planned(planner, {"x": torch.ones(3)})[3]
    assert planner.resolve_data(last.items[0]).dtype == torch.float16


@pytest.mark.usefixtures("no_cached_plans")
def test_cached_plans_are_used_until_something_changes():
    values = {"x": torch.ones(3), "n": 1}
    first = planned(CheckpointSavePlanner(enable_plan_caching=True), values)
    assert first[0].usable
    again = planned(CheckpointSavePlanner(enable_plan_caching=True), {"x": torch.zeros(3), "n": 2})
    assert not again[0].usable
    assert again[0].items == again[1][0].items == []
    assert again[2] == first[2]
    assert again[3] == first[3]
    # A dtype, too, which torch's planner does not notice.
    for changed in ({**values, "y": torch.ones(2)}, {"x": torch.ones(3).half(), "n": 1}, {"x": torch.ones(4), "n": 1}):
        plan, _, metadata, last = planned(CheckpointSavePlanner(enable_plan_caching=True), changed)
        expected = planned(DefaultSavePlanner(), changed)
        assert plan.usable
        assert (metadata, last) == (expected[2], expected[3])


@pytest.mark.usefixtures("no_cached_plans")
def test_failed_plan_is_not_cached():
    planner = CheckpointSavePlanner(enable_plan_caching=True)
    planner.set_up_planner({"x": torch.ones(3)}, None, True)
    assert planner.create_local_plan().usable
    other = CheckpointSavePlanner(enable_plan_caching=True)
    other.set_up_planner({"x": torch.ones(3)}, None, True)
    assert other.create_local_plan().usable


# --- the coordinator ------------------------------------------------------------------------------


def shard(key: str, offsets: tuple, sizes: tuple, size: tuple, kind=WriteItemType.SHARD) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size(size))
    return WriteItem(MetadataIndex(key, offsets), kind, tensor_data=data)


def blob(key: str) -> WriteItem:
    return WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)


ITEMS = st.lists(
    st.sampled_from(
        [*(shard(f"s{n % 7}", (n, 0), (1, n % 3), (40, 2)) for n in range(12)), *(blob(f"b{n}") for n in range(4))]
    ),
    unique_by=id,
    max_size=16,
)


@given(st.lists(ITEMS, min_size=1, max_size=12), st.booleans())
@settings(max_examples=100, deadline=None)
def test_deduplication_and_join_equal_torch(items, to_lowest_rank):
    plans = [SavePlan(rank) for rank in items]
    expected = dedup_save_plans(plans, to_lowest_rank)
    assert deduplicate(plans, to_lowest_rank=to_lowest_rank) == expected
    (ours, metadata), (torchs, expected_metadata) = join(expected), create_default_global_save_plan(expected)
    assert (ours, metadata) == (torchs, expected_metadata)
    for one, other in zip(ours, torchs, strict=True):
        same_indices(one.items, other.items)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (blob("x"), shard("x", (0,), (2,), (2,))),
        (shard("x", (0,), (2,), (2,)), blob("x")),
        (blob("x"), shard("x", (0,), (2,), (2,), WriteItemType.TENSOR)),
        (shard("x", (0,), (2,), (2,)), shard("x", (0, 0), (2, 2), (2, 2), WriteItemType.TENSOR)),
    ],
)
def test_different_kinds_of_value_on_ranks_raise_with_the_key(first, second):
    with pytest.raises(UsageError, match="'x' is not the same kind"):
        join([SavePlan([first]), SavePlan([second])])


BOUND = st.integers(0, 4)
BOXES = st.integers(0, 3).flatmap(
    lambda rank: st.tuples(
        st.tuples(*[BOUND] * rank),
        st.lists(st.tuples(st.tuples(*[BOUND] * rank), st.tuples(*[BOUND] * rank)), max_size=5),
    )
)


@given(BOXES, st.booleans())
@settings(max_examples=250, deadline=None)
def test_cover_check_of_any_parts_agrees_with_torch(boxes, several):
    size, parts = boxes
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in parts]
    metadata = Metadata(
        {"x": TensorStorageMetadata(TensorProperties(), torch.Size(size), chunks), "b": BytesStorageMetadata()}
    )
    # Torch counts a part without elements as one that overlaps; nothing is stored twice by it.
    if any(0 in sizes for _, sizes in parts) and len(parts) > 1:
        check = [
            message for message in _validate_global_plan([None] * (1 + several), metadata) if "overlap" not in message
        ]
        if not check:
            return
    wrong = bool(_validate_global_plan([None] * (1 + several), metadata))
    if wrong:
        with pytest.raises(UsageError, match="'x'"):
            check_cover(metadata, complete=several)
    else:
        check_cover(metadata, complete=several)


def test_parts_that_overlap_are_all_found_and_some_named():
    items = [shard(f"t{n}", (0, n % 2), (2, 2), (4, 4)) for n in range(5)]
    items += [shard(f"t{n}", (1, 1), (3, 2), (4, 4)) for n in range(5)]
    planner = CheckpointSavePlanner(flatten_state_dict=False)
    with pytest.raises(UsageError, match=r"'t0' overlap; .*'t2' overlap \(2 more\)"):
        planner.create_global_plan([SavePlan(items)])


# --- loading --------------------------------------------------------------------------------------


def load_planned(planner, values, metadata):
    planner.set_up_planner(values, metadata, True)
    return planner.finish_plan(planner.create_global_plan([planner.create_local_plan()])[0])


def metadata_of(values) -> Metadata:
    return planned(DefaultSavePlanner(), values)[2]


@pytest.mark.parametrize("options", [{}, {"flatten_sharded_tensors": False}, {"allow_partial_load": True}], ids=str)
def test_load_plans_equal_torch(options):
    metadata, values = metadata_of(state()), state()
    del values["tuple"]
    ours, torchs = CheckpointLoadPlanner(**options), DefaultLoadPlanner(**options)
    plan, expected = load_planned(ours, values, metadata), load_planned(torchs, values, metadata)
    assert plan == expected
    for item, other in zip(plan.items, expected.items, strict=True):
        assert item.dest_index.index == other.dest_index.index
        assert item.storage_index.index == other.storage_index.index
        if item.type == LoadItemType.TENSOR:
            assert ours.resolve_tensor(item).data_ptr() == torchs.resolve_tensor(other).data_ptr()


def test_unflattened_state_dict_is_loaded_like_torch():
    values = {"x": torch.ones(3), "n": {"deep": 5}}
    metadata = planned(DefaultSavePlanner(flatten_state_dict=False), values)[2]
    ours, torchs = CheckpointLoadPlanner(flatten_state_dict=False), DefaultLoadPlanner(flatten_state_dict=False)
    assert load_planned(ours, values, metadata) == load_planned(torchs, values, metadata)


def test_tensors_saved_in_parts_are_loaded_as_by_torch():
    size = torch.Size((6, 4))
    parts = [((0, 0), (2, 4)), ((2, 0), (4, 3)), ((2, 3), (4, 1))]
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in parts]
    metadata = Metadata({"x": TensorStorageMetadata(TensorProperties(), size, chunks)})
    ours, torchs, values = CheckpointLoadPlanner(), DefaultLoadPlanner(), {"x": torch.zeros(6, 4)}
    plan = load_planned(ours, values, metadata)
    assert plan == load_planned(torchs, values, metadata)
    assert len(plan.items) == 3
    for item in plan.items:
        assert torch.equal(ours.resolve_tensor(item), torchs.resolve_tensor(item))
        assert ours.resolve_tensor(item).shape == item.lengths


def test_keys_of_torch_2_3_are_found():
    values = {"model": {"w": torch.ones(2)}, "settings": {"rate": 0.1}}
    _version._derived_version = "2_3"
    try:
        metadata = metadata_of(values)
    finally:
        _version._derived_version = None
    assert "settings" in metadata.state_dict_metadata
    ours = CheckpointLoadPlanner()
    assert load_planned(ours, values, metadata) == load_planned(DefaultLoadPlanner(), values, metadata)
    assert ours.mappings["settings"] == ("settings",)


def test_missing_keys_are_all_named_in_one_error():
    metadata = metadata_of({"kept": torch.ones(2)})
    values = {"kept": torch.ones(2), "model": {f"w{n}": torch.ones(n) for n in range(9)}, "step": 3}
    planner = CheckpointLoadPlanner()
    planner.set_up_planner(values, metadata, True)
    with pytest.raises(MissingKeyError) as caught:
        planner.create_local_plan()
    assert str(caught.value) == (
        "the checkpoint lacks 10 of 11 keys: 'model.w0', 'model.w1', 'model.w2', 'model.w3', 'model.w4' and 5 more "
        "(it has 1, the first one is 'kept'): name the keys as they were saved, or pass allow_partial_load=True to "
        "leave these as they are"
    )
    assert caught.value.keys == (*(f"model.w{n}" for n in range(9)), "step")
    assert pickle.loads(pickle.dumps(caught.value)).keys == caught.value.keys
    assert isinstance(caught.value, KeyError)
    plan = load_planned(CheckpointLoadPlanner(allow_partial_load=True), values, metadata)
    assert [item.dest_index.fqn for item in plan.items] == ["kept"]


@pytest.mark.parametrize("partial", [False, True])
def test_all_mismatches_are_named_in_one_error(partial):
    metadata = metadata_of({"a": torch.ones(2, 3), "b": torch.ones(5), "c": torch.ones(4), "d": 5})
    planner = CheckpointLoadPlanner(allow_partial_load=partial)
    planner.set_up_planner({"a": torch.ones(3, 2), "b": "text", "c": torch.ones(4)}, metadata, True)
    with pytest.raises(StateMismatchError) as caught:
        planner.create_local_plan()
    assert str(caught.value) == (
        "the checkpoint does not fit 2 of 3 keys: 'a' has shape (2, 3) in the checkpoint and (3, 2) in the state, 'b' is a "
        "tensor of shape (5,) in the checkpoint and a str in the state: build the state dict with the settings of the saved "
        "model"
    )
    assert caught.value.keys == ("a", "b")
    assert not isinstance(caught.value, MissingKeyError)


def test_load_plan_without_metadata_raises():
    planner = CheckpointLoadPlanner()
    planner.set_up_planner({"x": torch.ones(2)})
    with pytest.raises(UsageError, match="set_up_planner"):
        planner.create_local_plan()


def test_planners_are_picklable():
    for planner in (CheckpointSavePlanner(enable_plan_caching=True), CheckpointLoadPlanner(allow_partial_load=True)):
        copy = pickle.loads(pickle.dumps(planner))
        assert vars(copy) == vars(planner)
