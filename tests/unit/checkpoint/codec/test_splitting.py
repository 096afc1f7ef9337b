"""The compiled loops return what numpy does, and are loaded when a process has coded enough."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

import millrace.checkpoint.codec
from millrace.checkpoint.codec import splitting
from millrace.checkpoint.codec.splitting import Loops, Scratch, Splitter


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Splitter]:
    """A function that returns a splitter which uses numpy or the compiled loops."""

    def splitter(library: str) -> Splitter:
        monkeypatch.setattr(splitting, "loops", Loops())
        if library == "compiled":
            assert splitting.loops.load()
        return Splitter(Scratch())

    return splitter


def noise(count: int, dtype: type, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, count, dtype, endpoint=True)


@pytest.mark.parametrize("rotation", range(5))
@pytest.mark.parametrize("count", [0, 1, 15, 1000, 1 << 19])
def test_compiled_planes_of_16_bit_values_are_those_of_numpy(
    use: Callable[[str], Splitter], rotation: int, count: int
) -> None:
    words = noise(count, np.uint16)
    words.flags.writeable = False
    planes = {
        library: [plane.copy() for plane in use(library).split(words, rotation)] for library in ("numpy", "compiled")
    }
    assert np.array_equal(planes["numpy"], planes["compiled"])
    joined = np.zeros_like(words)
    use("compiled").join(planes["numpy"], joined, rotation)
    assert np.array_equal(joined, words)


@pytest.mark.parametrize("count", [0, 1, 15, 1000, 1 << 18])
@pytest.mark.parametrize("offset", [0, 1])
def test_compiled_halves_are_those_of_numpy(use: Callable[[str], Splitter], count: int, offset: int) -> None:
    words = noise(count, np.uint32)
    low, planes = use("compiled").split_halves(words)
    memory = np.zeros(2 * count + offset, np.uint8)  # the lower halves have any alignment in a stored chunk
    memory[offset:] = low.view(np.uint8)
    kept = [plane.copy() for plane in planes]
    low, planes = use("numpy").split_halves(words)
    assert np.array_equal(low.view(np.uint8), memory[offset:])
    assert np.array_equal(planes, kept)
    for library in ("numpy", "compiled"):
        joined = np.zeros_like(words)
        use(library).join_halves(memory[offset:], kept, joined)
        assert np.array_equal(joined, words), library


def test_compiled_join_accepts_constant_planes(use: Callable[[str], Splitter]) -> None:
    words = np.zeros(100, np.uint16)
    constant = np.broadcast_to(np.frombuffer(b"\x7f", np.uint8), (100,))
    use("compiled").join([noise(100, np.uint8), constant], words, 0)
    assert (words >> 8 == 0x7F).all()


def test_loops_are_loaded_after_enough_bytes_only(use: Callable[[str], Splitter]) -> None:
    words, loops = noise(1000, np.uint16), Loops(from_bytes=5000)
    assert [loops.for_values(words) is not None for _ in range(4)] == [False, False, True, True]
    assert loops.for_values(np.zeros(2001, np.uint8)[1:].view(np.uint16)) is None  # not aligned


def test_loops_that_cannot_be_loaded_are_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "millrace.checkpoint.codec.compiled", None)
    monkeypatch.delattr(millrace.checkpoint.codec, "compiled", raising=False)
    words, loops = noise(1000, np.uint16), Loops(from_bytes=1)
    assert [loops.for_values(words) for _ in range(3)] == [None] * 3
    assert ["numpy" in record.message for record in caplog.records] == [True]


def test_loops_are_not_loaded_where_numba_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "millrace.checkpoint.codec.compiled", raising=False)
    monkeypatch.delattr(millrace.checkpoint.codec, "compiled", raising=False)
    monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    assert not Loops().load()
    assert ["NUMBA_DISABLE_JIT" in record.message for record in caplog.records] == [True]


def test_loops_import_nothing_once_they_are_loaded() -> None:
    # A fork during an import leaves its lock held in the child.
    code = """if True:
        import sys
        import numpy as np
        from millrace.checkpoint.codec import splitting
        from millrace.checkpoint.codec.chunks import Kind
        from millrace.checkpoint.codec.planes import PlaneCodec

        def code():
            for kind, raw in ((Kind(2, True), bytes(2048)), (Kind(4, True), np.random.default_rng(0).bytes(1 << 16))):
                stored = b"".join(PlaneCodec().encode(raw, kind))
                PlaneCodec().decode(stored, kind, memoryview(bytearray(len(raw))))

        code()
        assert splitting.loops.load()
        before = set(sys.modules)
        code()
        print(sorted(set(sys.modules) - before))
        """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert ran.stdout.strip() == "[]"
