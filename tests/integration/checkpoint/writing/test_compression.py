"""`CheckpointWriter(compression=...)`: every setting loads the same values, and has its documented effect."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed.checkpoint as dcp

from millrace.checkpoint import CheckpointReader, CheckpointWriter, describe
from millrace.checkpoint.codec.chunks import Effort, Kind
from millrace.checkpoint.codec.registry import Adaptive
from millrace.checkpoint.storage.storage import LocalStorage
from millrace.checkpoint.writing.packing import write_items
from millrace.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*single process:UserWarning")


def state(value=None):
    generator = torch.Generator().manual_seed(0)
    made = {
        "bf16": (torch.randn(700, 1000, generator=generator) * 0.02).bfloat16(),
        "fp32": torch.randn(300, 1000, generator=generator) * 0.02,
        "fp64": torch.randn(100, 1000, generator=generator, dtype=torch.float64),
        "int64": torch.arange(100_000),
        "step": 7,
    }
    if value is not None:
        for tensor in list(made.values())[:-1]:
            tensor.fill_(value)
    return made


def stored_bytes(path, compression):
    dcp.save(state(), storage_writer=CheckpointWriter(path, compression=compression))
    loaded = state(3)
    dcp.load(loaded, storage_reader=CheckpointReader(path))
    for key, value in state().items():
        assert torch.equal(loaded[key], value) if isinstance(value, torch.Tensor) else loaded[key] == value
    return describe(path)


def test_compressions_load_equal_values_and_more_effort_is_smaller(tmp_path):
    summaries = {name: stored_bytes(tmp_path / name, name) for name in ("none", "typed", "max", "adaptive")}
    sizes = {name: summary.stored_bytes for name, summary in summaries.items()}
    raw = summaries["none"].raw_bytes
    assert raw <= sizes["none"] <= raw + 10_000
    assert sizes["max"] < 0.995 * sizes["typed"] < 0.995 * 0.8 * sizes["none"]
    assert 0.999 * sizes["typed"] <= sizes["adaptive"] <= sizes["none"]


def test_unknown_compression_raises_at_once(tmp_path):
    with pytest.raises(ConfigurationError, match="brotli"):
        CheckpointWriter(tmp_path, compression="brotli")


class _Weights:
    """300 MB of bf16, made of one."""

    kind, nbytes = Kind(2, True), 300_000_000
    _values = (torch.randn(1_000_000, generator=torch.Generator().manual_seed(1)) * 0.02).bfloat16().view(torch.uint8)

    def read(self, start, stop):
        repeats = -(-(stop - start) // self._values.numel())
        return self._values.repeat(repeats)[: stop - start].numpy()


class _PacedStorage(LocalStorage):
    """Takes so many bytes a second and keeps none of them."""

    def __init__(self, path, bytes_per_second):
        super().__init__(path)
        self._bytes_per_second = bytes_per_second

    def open_writer(self, name):
        rate = self._bytes_per_second

        class Paced:
            def write(self, data):
                if rate is not None:
                    time.sleep(len(data) / rate)

            def close(self):
                pass

            def abort(self):
                pass

        return Paced()


class _AsOnIdleMachine(Adaptive):
    """Uses given speeds, those of a machine without other work: a busy machine has a slower codec and storage."""

    def __init__(self, bytes_per_second):
        super().__init__(threads=2)
        self._bytes_per_second = bytes_per_second

    def encoded(self, effort, raw_bytes, stored_bytes, seconds):
        assert seconds > 0
        super().encoded(effort, raw_bytes, stored_bytes, raw_bytes / (2.5e9 if effort == Effort.RAW else 0.5e9))

    def stored(self, total_bytes, busy_seconds):
        if self._bytes_per_second is not None:
            assert busy_seconds > 0.9 * total_bytes / self._bytes_per_second
        super().stored(total_bytes, total_bytes / (self._bytes_per_second or 20e9))


@pytest.mark.parametrize(("bytes_per_second", "smallest", "largest"), [(150e6, 0.6, 0.7), (None, 0.8, 0.95)])
def test_adaptive_effort_follows_the_speed_of_the_storage(tmp_path, bytes_per_second, smallest, largest):
    storage = _PacedStorage(str(tmp_path), bytes_per_second)
    (item,) = write_items(storage, "0-0", [_Weights()], 2, _AsOnIdleMachine(bytes_per_second))
    size = sum(file.size for file in item.data.files)
    assert smallest * _Weights.nbytes <= size <= largest * _Weights.nbytes
