"""Suites for checkpoints: every storage, origin and stream extension must pass them. Needs pytest and torch.

Subclass one in a test module and give its fixture:

    class TestMyStorage(CheckpointConformance):
        @pytest.fixture
        def place(self) -> CheckpointPlace:
            return CheckpointPlace(url="s3://bucket/runs", target_options={...})

    class TestMyExtension(ExtensionConformance):
        @pytest.fixture
        def extension(self) -> MyExtension:
            return MyExtension(key)

`CheckpointConformance` saves and loads under a place: with another `url` it tries a storage, with `origin` reads
through a cache, with `extensions` the conversion of chunks. `ExtensionConformance` tries a stream extension by itself and in
torch's own writer and reader. Nothing here is imported by `import millrace.testing`.
"""

from __future__ import annotations

import io
import itertools
import logging
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from millrace.checkpoint import CheckpointReader, CheckpointWriter, extension_registry
from millrace.checkpoint.storage.base import CheckpointStorage
from millrace.checkpoint.storage.storage import open_storage
from millrace.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MillraceError,
    ObjectExistsError,
    UnsupportedFormatError,
)
from millrace.origin import Readable

State = dict[str, Any]

_MANIFEST = "manifest.millrace"
_WARNINGS = [
    pytest.mark.filterwarnings("ignore:torch.distributed is .*:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


@dataclass(frozen=True, kw_only=True)
class CheckpointPlace:
    """Where and how a suite saves. Checkpoints are stored below `url`, which has no other user.

    `origin`, called for every reader, returns an origin that it reads instead of the storage itself, by the same keys.
    `extensions` convert the chunks, and `registry` is torch's registry that contains them.
    """

    url: str
    target_options: Mapping[str, Any] = field(default_factory=dict)
    extensions: Sequence[Any] = ()
    registry: Any = None
    origin: Callable[[], Readable] | None = None

    def writer(self, name: str, **options: Any) -> Any:
        """A `CheckpointWriter` of the checkpoint `name`."""
        return CheckpointWriter(
            f"{self.url}/{name}", _extensions=self.extensions, target_options=self.target_options, **options
        )

    def reader(self, name: str, **options: Any) -> Any:
        """A `CheckpointReader` of the checkpoint `name`."""
        if self.origin is not None:
            options["origin"] = self.origin()
        else:
            options["target_options"] = self.target_options
        return CheckpointReader(f"{self.url}/{name}", _extension_registry=self.registry, **options)

    def storage(self, name: str) -> CheckpointStorage:
        """The files of the checkpoint `name`."""
        return open_storage(f"{self.url}/{name}", self.target_options)


def conformance_state(seed: int = 0) -> State:
    """A state with values that are difficult to store; a different one for each seed."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(700, 500, generator=generator)
    odd = torch.tensor([0x7FC00001, 0x7F800001, -0x7FFFFFFF - 1, 1, -1, 0x7F800000], dtype=torch.int32)
    return {
        "weights": noise * 0.02,  # two chunks
        "half": noise.bfloat16(),
        "nested": {"counts": torch.arange(1000) + seed, "flags": noise[0] > 0},
        "floats without value": odd.view(torch.float32),  # NaNs with payloads, -0.0, a denormal, infinity
        "complex": torch.complex(noise[1], noise[2]),
        "view": noise[::2, 5:300].t(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(float(seed)),
        "small": [torch.full((number,), float(seed)) for number in range(20)],
        "step": seed,
        "name": "run ü",
        "nothing": None,
    }


def blank(value: Any) -> Any:
    """The same structure with other values, to be loaded into."""
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: blank(member) for key, member in value.items()}
    return [blank(member) for member in value] if isinstance(value, list) else "?"


def assert_same(left: Any, right: Any, where: str = "state") -> None:
    """Raise `AssertionError` unless both are equal bit for bit."""
    if isinstance(right, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), where
        flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)]
        assert torch.equal(*flat), f"{where} has other bits"
    elif isinstance(right, dict):
        assert left.keys() == right.keys(), where
        for key, value in right.items():
            assert_same(left[key], value, f"{where}.{key}")
    elif isinstance(right, list):
        assert len(left) == len(right), where
        for number, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"{where}[{number}]")
    else:
        assert type(left) is type(right), where
        assert left == right, where


def failure_of(call: Callable[[], object]) -> BaseException:
    """The error of rank 0 inside torch's exception."""
    with pytest.raises(CheckpointException) as caught:
        call()
    failure: BaseException = caught.value.failures[0][0]
    return failure


class _Failing(DefaultSavePlanner):  # type: ignore[misc]
    """Fails when the last tensor is requested, after others were written."""

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "weights":
            raise RuntimeError("the planner fails")
        return super().resolve_data(write_item)


class _Rows(DefaultLoadPlanner):  # type: ignore[misc]
    """Loads rows `[begin, begin + its own length)` of every tensor, as one of several ranks would."""

    def __init__(self, begin: int) -> None:
        super().__init__()
        self._begin = begin

    def create_local_plan(self) -> Any:
        items = []
        for key, tensor in self.state_dict.items():
            offsets = torch.Size([self._begin] + [0] * (tensor.dim() - 1))
            box = ChunkStorageMetadata(offsets, tensor.shape)
            items += create_read_items_for_chunk_list(key, self.metadata.state_dict_metadata[key], [box])
        return dcp.LoadPlan(items)

    def resolve_tensor(self, read_item: Any) -> Any:
        tensor = self.state_dict[read_item.dest_index.fqn]
        start = read_item.dest_index.offset[0] - self._begin + read_item.dest_offsets[0]
        return tensor[start : start + read_item.lengths[0]]


class CheckpointConformance:
    """The guarantees of saving and loading, for any storage. Define the fixture `place`, new for every test."""

    pytestmark = _WARNINGS

    damaged_bits = 6
    """The number of bits flipped in each file; each needs one load."""

    @pytest.fixture
    def place(self) -> CheckpointPlace:
        raise NotImplementedError("give the place to test")

    def _save(
        self, place: CheckpointPlace, state: State, name: str = "run", planner: Any = None, **options: Any
    ) -> None:
        dcp.save(state, storage_writer=place.writer(name, **options), planner=planner, no_dist=True)

    def _load(self, place: CheckpointPlace, state: State, name: str = "run") -> State:
        loaded: State = blank(state)
        dcp.load(loaded, storage_reader=place.reader(name), no_dist=True)
        return loaded

    @pytest.mark.parametrize("compression", ["typed", "max", "adaptive", "none"])
    def test_load_returns_the_saved_state(self, place: CheckpointPlace, compression: str) -> None:
        state = conformance_state()
        self._save(place, state, compression=compression, thread_count=2)
        assert_same(self._load(place, state), state)

    def test_load_of_slice_returns_its_rows(self, place: CheckpointPlace) -> None:
        state = {key: value for key, value in conformance_state().items() if key in ("weights", "half")}
        self._save(place, state)
        rows: State = {key: torch.zeros_like(tensor[:40]) for key, tensor in state.items()}
        dcp.load(rows, storage_reader=place.reader("run"), planner=_Rows(333), no_dist=True)
        assert_same(rows, {key: tensor[333:373] for key, tensor in state.items()})

    def test_overwrite_replaces_the_whole_checkpoint(self, place: CheckpointPlace) -> None:
        self._save(place, conformance_state(1))
        before = set(place.storage("run").names())
        self._save(place, conformance_state(2))
        after = set(place.storage("run").names())
        assert before & after == {_MANIFEST}
        assert len(after) == len(before)
        assert_same(self._load(place, conformance_state(2)), conformance_state(2))

    def test_save_without_overwrite_keeps_the_first_checkpoint(self, place: CheckpointPlace) -> None:
        self._save(place, conformance_state(1), overwrite=False)
        names = sorted(place.storage("run").names())
        failure = failure_of(lambda: self._save(place, conformance_state(2), overwrite=False))
        assert isinstance(failure, ObjectExistsError)
        assert sorted(place.storage("run").names()) == names
        assert_same(self._load(place, conformance_state(1)), conformance_state(1))

    def test_failed_save_keeps_the_previous_checkpoint(self, place: CheckpointPlace) -> None:
        self._save(place, conformance_state(1))
        names = sorted(place.storage("run").names())
        failure = failure_of(lambda: self._save(place, conformance_state(2), planner=_Failing()))
        assert "the planner fails" in str(failure)
        assert sorted(place.storage("run").names()) == names
        assert_same(self._load(place, conformance_state(1)), conformance_state(1))

    def test_one_writer_saves_repeatedly_and_pickles(self, place: CheckpointPlace) -> None:
        writer = place.writer("run")
        for seed in (1, 2):
            dcp.save(conformance_state(seed), storage_writer=writer, no_dist=True)
            assert_same(self._load(place, conformance_state(seed)), conformance_state(seed))
        if not place.extensions:  # those may hold keys, and need not pickle
            dcp.save(conformance_state(3), storage_writer=pickle.loads(pickle.dumps(writer)), no_dist=True)
            assert_same(self._load(place, conformance_state(3)), conformance_state(3))

    def test_asynchronous_save_stores_the_state_of_its_call(self, place: CheckpointPlace) -> None:
        state = conformance_state(1)
        pending = dcp.async_save(state, storage_writer=place.writer("run"))
        state["weights"].fill_(9)
        pending.result()
        assert_same(self._load(place, state), conformance_state(1))

    def test_save_without_collectives_is_loaded(self, place: CheckpointPlace) -> None:
        for seed in (1, 2):
            dcp.save(conformance_state(seed), storage_writer=place.writer("run"), no_dist=True, use_collectives=False)
        assert_same(self._load(place, conformance_state(2)), conformance_state(2))

    def test_incomplete_checkpoint_is_not_found(self, place: CheckpointPlace) -> None:
        failure = failure_of(lambda: self._load(place, conformance_state(), "nothing"))
        assert isinstance(failure, CheckpointNotFoundError)
        self._save(place, conformance_state())
        place.storage("run").delete([_MANIFEST])
        failure = failure_of(lambda: self._load(place, conformance_state()))
        assert isinstance(failure, CheckpointNotFoundError)
        assert "\n" not in str(failure)

    @pytest.fixture
    def _quiet_torch(self) -> Iterator[None]:
        """Torch logs a failed load with several tracebacks, which takes longer than the load."""
        logging.disable(logging.CRITICAL)
        yield
        logging.disable(logging.NOTSET)

    @pytest.mark.usefixtures("_quiet_torch")
    def test_flipped_bit_is_reported(self, place: CheckpointPlace) -> None:
        state = conformance_state()
        self._save(place, state)
        storage, generator = place.storage("run"), random.Random(0)
        for name in sorted(storage.names()):
            file = storage.stat(name)
            content = bytearray(memoryview(storage.read(file, 0, file.size)))
            for _ in range(self.damaged_bits):
                bit = generator.randrange(8 * len(content))
                content[bit // 8] ^= 1 << bit % 8
                storage.publish(name, bytes(content), replace=True)
                failure = failure_of(lambda: self._load(place, state))
                assert isinstance(failure, CorruptCheckpointError), f"bit {bit} of {name}: {failure!r}"
                content[bit // 8] ^= 1 << bit % 8
            storage.publish(name, bytes(content), replace=True)
        assert_same(self._load(place, state), state)

    def test_missing_or_short_file_is_reported(self, place: CheckpointPlace) -> None:
        state = conformance_state()
        self._save(place, state)
        storage = place.storage("run")
        (name,) = (name for name in storage.names() if name != _MANIFEST)
        file = storage.stat(name)
        content = bytes(memoryview(storage.read(file, 0, file.size)))
        storage.publish(name, content[:-1], replace=True)
        assert isinstance(failure_of(lambda: self._load(place, state)), CorruptCheckpointError)
        storage.delete([name])
        assert isinstance(failure_of(lambda: self._load(place, state)), CorruptCheckpointError)

    def test_summary_equals_the_sizes_of_the_files(self, place: CheckpointPlace) -> None:
        self._save(place, conformance_state(), user_metadata={"step": 7})
        summary, storage = place.reader("run").summary(), place.storage("run")
        assert summary.stored_bytes == sum(storage.stat(name).size for name in storage.names())
        assert summary.user == {"step": 7}
        assert (summary.tensors, summary.objects) == (29, 3)

    def test_reader_without_extension_names_it(self, place: CheckpointPlace) -> None:
        if not place.extensions:
            pytest.skip("chunks go through nothing")
        state = conformance_state()
        self._save(place, state)
        known = {extension.registry_name() for extension in extension_registry().extensions.values()}
        missing = [one.get_descriptor() for one in place.extensions if one.registry_name() not in known]
        if not missing:
            assert_same(self._load(CheckpointPlace(url=place.url, target_options=place.target_options), state), state)
            return
        bare = CheckpointPlace(url=place.url, target_options=place.target_options)
        failure = failure_of(lambda: self._load(bare, state))
        assert isinstance(failure, UnsupportedFormatError)
        assert missing[0] in str(failure)


class ExtensionConformance:
    """What a stream extension must do to be used in Millrace's writer or torch's. Set `extension`. The default `registry`
    contains its class, whose `from_descriptor` must then find its other input, such as a key.
    """

    pytestmark = _WARNINGS

    notices_damage = True
    """Whether a changed or truncated stream raises. If not, only the checksums of Millrace's format detect the damage."""

    @pytest.fixture
    def extension(self) -> Any:
        raise NotImplementedError("give the extension to test")

    @pytest.fixture
    def registry(self, extension: Any) -> Any:
        return extension_registry(type(extension))

    @staticmethod
    def _transformed(extension: Any, content: bytes, portion: int) -> bytes:
        class Sink(io.BytesIO):
            def close(self) -> None:
                pass

        sink = Sink()
        stream = extension.transform_to(sink)
        for start in range(0, len(content), portion):
            stream.write(content[start : start + portion])
        stream.close()
        return sink.getvalue()

    @staticmethod
    def _restored(extension: Any, stored: bytes, portion: int = -1) -> bytes:
        stream = extension.transform_from(io.BytesIO(stored))
        return b"".join(iter(lambda: stream.read(portion), b""))

    @pytest.mark.parametrize("nbytes", [0, 1, 4095, 1 << 20, (2 << 20) + 3])
    def test_stream_read_in_any_portions_is_unchanged(self, extension: Any, nbytes: int) -> None:
        content = random.Random(nbytes).randbytes(nbytes // 2) + bytes(nbytes - nbytes // 2)
        for to, back in itertools.product((1 << 22, 70_001), (1 << 22, 50_021)):
            assert self._restored(extension, self._transformed(extension, content, to), back) == content

    def test_extension_is_restored_from_its_descriptor(self, extension: Any, registry: Any) -> None:
        (found,) = registry.from_descriptor_list([extension.get_descriptor()])
        stored = self._transformed(extension, b"grain" * 1000, 5000)
        assert self._restored(found, stored) == b"grain" * 1000

    def test_damaged_stream_raises(self, extension: Any) -> None:
        if not self.notices_damage:
            pytest.skip("the extension guarantees nothing")
        content = random.Random(1).randbytes(100_000)
        stored = self._transformed(extension, content, 1 << 20)
        for length in (0, 1, len(stored) // 2, len(stored) - 1):
            self._assert_refused(extension, stored[:length])
        for position in (0, len(stored) // 3, len(stored) // 2, len(stored) - 1):
            damaged = bytearray(stored)
            damaged[position] ^= 4
            self._assert_refused(extension, bytes(damaged))

    def _assert_refused(self, extension: Any, stored: bytes) -> None:
        try:
            self._restored(extension, stored)
        except Exception:  # noqa: BLE001 - its library may raise anything; Millrace's reader wraps it
            return
        raise AssertionError("damage went unseen")

    @pytest.mark.parametrize("stock", [False, True])
    def test_extension_works_in_both_writers(self, extension: Any, registry: Any, tmp_path: Any, stock: bool) -> None:
        state, writer = conformance_state(), dcp.FileSystemWriter if stock else CheckpointWriter
        dcp.save(state, storage_writer=writer(tmp_path, _extensions=[extension]), no_dist=True)
        readers = [CheckpointReader, dcp.FileSystemReader] if stock else [CheckpointReader]
        for reader in readers:
            loaded = blank(state)
            dcp.load(loaded, storage_reader=reader(tmp_path, _extension_registry=registry), no_dist=True)
            assert_same(loaded, state)

    def test_error_in_extension_fails_the_save(self, extension: Any, tmp_path: Any) -> None:
        class Failing(type(extension)):  # type: ignore[misc]
            def __init__(self) -> None:
                pass

            def get_descriptor(self) -> str:
                return str(extension.get_descriptor())

            def transform_to(self, output: Any) -> Any:
                raise OSError("no entropy")

        state = conformance_state()
        failure = failure_of(
            lambda: dcp.save(state, storage_writer=CheckpointWriter(tmp_path, _extensions=[Failing()]), no_dist=True)
        )
        assert "no entropy" in str(failure)
        with pytest.raises(MillraceError):
            CheckpointReader(tmp_path).summary()
