"""The copy of a state: its contents, shared parts, and memory."""

from __future__ import annotations

import copy
import io
import itertools
import os
import pickle
import signal
import threading
from collections import OrderedDict
from types import MappingProxyType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.memory import resident_bytes
from tests.support.states import assert_same_state

from millrace.checkpoint.format.manifest import DTYPES
from millrace.checkpoint.state.arena import Arena
from millrace.checkpoint.state.staging import StagedState, StateStager
from millrace.errors import ConfigurationError, StorageError, UnsupportedObjectError, UsageError

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]


def addresses(value) -> list[int]:
    """The addresses of the tensors of a staged state, in its order."""
    if isinstance(value, torch.Tensor):
        return [value.data_ptr()]
    if isinstance(value, dict):
        value = list(value.values())
    return [address for member in value for address in addresses(member)] if isinstance(value, list | tuple) else []


def stage(state) -> StagedState:
    return StateStager().stage(state)


# --- contents -------------------------------------------------------------------------------------


def test_change_after_staging_is_not_in_the_copy():
    numbers = [1, 2]
    state = {
        "model": OrderedDict(weight=torch.nn.Parameter(torch.ones(3, 4)), bias=torch.zeros(4)),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "groups": [{"lr": 0.1, "params": [0]}]},
        "pair": (torch.arange(5), numbers),
        "seen": {1, 2},
        "note": "first",
    }
    expected = copy.deepcopy(state)
    expected["model"]["weight"] = expected["model"]["weight"].detach()
    staged = stage(state)
    with torch.no_grad():
        for tensor in (state["model"]["weight"], state["model"]["bias"], state["pair"][0]):
            tensor.fill_(9)
    state["optimizer"]["groups"][0]["lr"] = 7
    numbers.append(3)
    state["seen"].add(3)
    state["note"] = "second"
    assert_same_state(staged.state, expected)
    assert type(staged.state["model"]) is OrderedDict
    assert not staged.state["model"]["weight"].requires_grad
    assert staged.nbytes == 12 * 4 + 4 * 4 + 4 + 5 * 8


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_staged_copy_of_every_dtype_is_equal(name):
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (48 * dtype.itemsize,), dtype=torch.uint8)
    whole = raw.view(dtype).view(6, 8)
    state = {"whole": whole, "columns": whole.t(), "every other": whole[:, ::2], "one": whole[3, 3]}
    staged = stage(state).state
    for key, tensor in state.items():
        assert (staged[key].dtype, staged[key].shape) == (tensor.dtype, tensor.shape)
        assert staged[key].is_contiguous()
        assert bits_one_by_one(staged[key]) == bits_one_by_one(tensor)


def bits_one_by_one(tensor: torch.Tensor) -> bytes:
    """Looked up in the storage element by element: torch cannot copy every dtype."""
    memory = torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()).view(-1, tensor.element_size())
    places = [
        tensor.storage_offset() + sum(index * stride for index, stride in zip(indices, tensor.stride(), strict=True))
        for indices in itertools.product(*map(range, tensor.shape))
    ]
    return memory[places].numpy().tobytes()


def test_staged_copy_of_odd_tensors_is_equal():
    values = torch.randn(4, 6, dtype=torch.complex64)
    state = {
        "conj": values.conj(),
        "conj columns": values.t().conj(),
        "neg": values.conj().imag,
        "expanded": torch.arange(3.0).expand(4, 3),
        "nan": torch.tensor([float("nan")]).view(torch.int32).add(5).view(torch.float32),
        "scalar": torch.tensor(7),
        "empty": torch.randn(100)[50:50].view(0, 5)[:, :3],
        "empty columns": torch.zeros(0, 5).t(),
        "one column": torch.randn(10, 10)[:, 3:4],
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "zeros": torch._efficientzerotensor((3, 2)),
        "needs grad": torch.ones(3, requires_grad=True) * 2,
    }
    staged = stage(state)
    assert_same_state(staged.state, {**state, "zeros": torch.zeros(3, 2)})
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in staged.state.values())


def test_shared_tensors_are_copied_once_and_stay_shared():
    tied, base = torch.randn(50, 4), torch.randn(100)
    state = {
        "embedding": tied,
        "head": tied.detach().view(50, 4),
        "within": [tied],
        "other shape": tied.view(4, 50),
        "columns": tied.t(),
        "columns again": tied.t(),
        "first": base[:60],
        "second": base[40:],
    }
    staged = stage(state)
    assert_same_state(staged.state, state)
    copies = staged.state
    assert copies["embedding"] is copies["head"] is copies["within"][0]
    assert copies["columns"] is copies["columns again"]
    assert len(set(addresses(copies))) == 5
    assert staged.nbytes == 3 * 200 * 4 + 2 * 60 * 4


class Counter:
    """A `Stateful`."""

    def __init__(self) -> None:
        self.count = torch.zeros(())

    def state_dict(self) -> dict:
        return {"count": self.count, "list": [1]}

    def load_state_dict(self, state: dict) -> None:
        raise AssertionError


def test_staging_calls_state_dict_of_stateful_objects():
    counter = Counter()
    staged = stage({"counter": counter, "model": torch.nn.Linear(2, 3)})
    counter.count += 5
    assert staged.state["counter"] == {"count": torch.zeros(()), "list": [1]}
    assert list(staged.state["model"]) == ["weight", "bias"]


def test_staging_of_uncopyable_value_names_it():
    with pytest.raises(UnsupportedObjectError, match=r"'a\.b\.0'"):
        stage({"a": {"b": [threading.Lock()]}})
    into_itself: dict = {}
    into_itself["me"] = into_itself
    with pytest.raises(UsageError, match="nested"):
        stage(into_itself)
    freed = torch.randn(100)[3:]
    freed.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedObjectError, match=r"'x\.freed'"):
        stage({"x": {"freed": freed}})
    assert stage({"mapping": MappingProxyType({"x": torch.ones(1)})}).state == {"mapping": {"x": torch.ones(1)}}


def test_staging_passes_unsupported_values_to_the_save():
    class Odd(torch.Tensor):
        pass

    state = {
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(3, device="meta"),
        "csr": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "subclass": torch.ones(3).as_subclass(Odd),
    }
    staged = stage(state).state
    state["sparse"].values().fill_(5)
    state["subclass"].fill_(5)
    assert staged["sparse"].to_dense().equal(torch.eye(3))
    assert staged["meta"].is_meta
    assert staged["csr"].to_dense().equal(torch.eye(3))
    assert staged["quantized"].dequantize().sum() == 3
    assert staged["nested"].is_nested
    assert type(staged["subclass"]) is Odd
    assert staged["subclass"].sum() == 3


def test_pickled_tensors_take_their_own_bytes_only():
    staged = stage({"large": torch.zeros(1_000_000), "small": torch.ones(3)})
    buffer = io.BytesIO()
    torch.save(staged.state["small"], buffer)
    assert len(buffer.getvalue()) < 5000
    assert pickle.loads(pickle.dumps(staged.state["small"])).equal(torch.ones(3))


# --- which memory it is in ----------------------------------------------------------------------


def make(seed: int, sizes=(300_000, 7, 100)) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {f"t{number}": torch.randn(size, generator=generator) for number, size in enumerate(sizes)}


def test_released_buffer_is_reused_and_used_one_is_not():
    stager = StateStager()
    first = stager.stage(make(0))
    second = stager.stage(make(1))
    assert not set(addresses(first.state)) & set(addresses(second.state))
    assert_same_state(first.state, make(0))
    first_at = addresses(first.state)
    first.release()
    first.release()
    third = stager.stage(make(2))
    assert addresses(third.state) == first_at
    assert_same_state(second.state, make(1))
    assert_same_state(third.state, make(2))
    fourth = stager.stage(make(3))  # a second release gave nothing back that another uses
    assert not set(addresses(fourth.state)) & {*addresses(second.state), *addresses(third.state)}


def test_staging_of_changed_structure_is_equal():
    stager = StateStager()
    for seed, sizes in enumerate([(100, 5), (100, 5, 9), (50, 5), (200_000, 1, 1, 1), (3,), (), (100, 5)]):
        state = make(seed, sizes)
        staged = stager.stage(state)
        assert_same_state(staged.state, state)
        staged.release()
    mixed = [
        {"x": torch.ones(10)},
        {"x": torch.ones(10).double()},
        {"x": torch.ones(10).int()},
        {"x": torch.ones(2, 5).int()},
        {"y": torch.ones(2, 5).int(), "x": torch.ones(3)},
    ]
    for state in mixed:
        staged = stager.stage(state)
        assert_same_state(staged.state, state)
        staged.release()


def test_unused_staging_memory_is_released():
    stager = StateStager()
    large, small = {"x": torch.ones(50_000_000)}, {"x": torch.ones(10)}
    held = [stager.stage(large) for _ in range(2)]
    before = resident_bytes()
    for one in held:
        one.release()
    del held, one
    for _ in range(5):  # one at a time from now on: the second buffer grows old
        stager.stage(large).release()
    assert before - resident_bytes() > 150_000_000
    stager.stage(small).release()  # and one that is much too large is exchanged
    assert before - resident_bytes() > 350_000_000
    staged = stager.stage(large)
    stager.close()
    stager.close()
    assert staged.state["x"].sum() == 50_000_000
    staged.release()
    del staged
    assert before - resident_bytes() > 350_000_000
    with pytest.raises(UsageError):
        stager.stage(small)


def test_failed_staging_keeps_the_stager_usable():
    stager = StateStager()
    stager.stage(make(0)).release()
    with pytest.raises(UnsupportedObjectError):
        stager.stage({**make(1), "lock": threading.Lock()})
    freed = torch.randn(10)
    freed.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedObjectError):
        stager.stage({"new": torch.ones(5), **make(1), "freed": freed})
    staged = stager.stage(make(2))
    assert_same_state(staged.state, make(2))


def test_tensor_moved_to_shared_memory_is_staged():
    stager = StateStager()
    staged = stager.stage(make(0))
    for tensor in staged.state.values():
        tensor.share_memory_()
    staged.release()
    again = stager.stage(make(1))
    assert_same_state(again.state, make(1))
    assert all(tensor.is_shared() for tensor in again.state.values())


def test_stager_in_forked_child_is_unused_and_parent_continues():
    stager = StateStager()
    staged = stager.stage(make(0))
    child = os.fork()
    if child == 0:
        # By numpy: torch's own threads are not in the child.
        os._exit(bool(staged.state["t0"].numpy().any()))
    assert os.waitpid(child, 0)[1] == 0
    assert_same_state(staged.state, make(0))
    staged.release()
    assert_same_state(stager.stage(make(1)).state, make(1))


def test_threads_stage_and_release_at_the_same_time():
    stager, failures = StateStager(), []

    def work(seed: int) -> None:
        for number in range(40):
            state = make(seed * 100 + number, (5000, 3))
            staged = stager.stage(state)
            if not all(staged.state[key].equal(value) for key, value in state.items()):
                failures.append(seed)
            staged.release()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_interrupted_staging_stops_its_threads(monkeypatch):
    """Ctrl-C while several threads copy: all threads that write to the memory have ended when the interrupt is raised."""
    from millrace.checkpoint.state import copying

    real = copying._copy_pieces
    main = threading.current_thread()

    def interrupted(pieces) -> None:
        if threading.current_thread() is main:
            signal.raise_signal(signal.SIGINT)
        real(pieces)

    monkeypatch.setattr(copying, "_copy_pieces", interrupted)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    with pytest.raises(KeyboardInterrupt):
        stage({"x": torch.ones(20_000_000)})
    assert not [thread for thread in threading.enumerate() if thread.name == "millrace-staging"]


class Pins:
    """In the place of CUDA's runtime. `unpinned` has, for each unpinned memory, whether it was still mapped."""

    def __init__(self):
        self.unpinned = []

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802
        with open("/proc/self/maps") as maps:
            ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
        self.unpinned.append(any(low <= address < high for low, high in ranges))


@pytest.mark.parametrize("shared", [False, True])
def test_pinned_memory_is_unpinned_before_it_is_unmapped(shared, monkeypatch):
    pins = Pins()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pins)
    arena = Arena(1 << 20, pinned=True, shared=shared)
    tensor = arena.tensor(0, torch.float32, torch.Size((4,)))
    del arena
    assert pins.unpinned == []
    del tensor
    assert pins.unpinned == [True]


def test_pinned_stager_without_a_gpu_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigurationError):
        StateStager(pin=True)


# --- any state ------------------------------------------------------------------------------------

DTYPES_DRAWN = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]


@st.composite
def tensors(draw) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    dtype = draw(st.sampled_from(DTYPES_DRAWN))
    count = torch.Size(shape).numel()
    seed = draw(st.integers(0, 1000))
    raw = torch.randint(0, 2, (count * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    tensor = raw.to(torch.uint8).view(dtype).view(shape)
    if len(shape) > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    if shape and draw(st.booleans()):
        tensor = tensor[:: draw(st.integers(1, 3))]
    return tensor


def states():
    leaves = st.one_of(
        tensors(),
        st.integers(),
        st.floats(),
        st.text(max_size=5),
        st.none(),
        st.binary(max_size=5),
        st.sets(st.integers()),
    )
    return st.dictionaries(
        st.text(max_size=4),
        st.recursive(
            leaves,
            lambda inner: st.one_of(
                st.lists(inner, max_size=4),
                st.lists(inner, max_size=3).map(tuple),
                st.dictionaries(st.one_of(st.text(max_size=3), st.integers(0, 9)), inner, max_size=4),
            ),
            max_leaves=12,
        ),
        max_size=5,
    )


def scramble(value) -> None:
    """Change all that can be changed."""
    if isinstance(value, torch.Tensor):
        value.zero_()
    elif isinstance(value, dict):
        for member in value.values():
            scramble(member)
        value["more"] = 1
    elif isinstance(value, list | tuple):
        for member in value:
            scramble(member)
        if isinstance(value, list):
            value.append(1)
    elif isinstance(value, set):
        value.add(-1)


@pytest.mark.parametrize("shared", [False, True])
def test_state_for_which_the_system_refuses_memory_raises_and_the_next_one_is_staged(shared):
    stager = StateStager(shared=shared)
    with pytest.raises(StorageError, match=f"{1 << 60} bytes of host memory .* cannot be allocated"):
        stager.stage({"large": torch.zeros(1).expand(1 << 58)})
    assert_same_state(stager.stage({"small": torch.ones(3)}).state, {"small": torch.ones(3)})


@pytest.mark.slow
@given(st.lists(states(), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_any_staged_state_is_equal(drawn):
    stager = StateStager()
    held = []
    for number, state in enumerate(drawn):
        expected = copy.deepcopy(state)
        staged = stager.stage(state)
        scramble(state)
        held.append((staged, expected))
        if number % 2:
            held.pop(0)[0].release()
        for one, was in held:
            assert_same_state(one.state, was)
