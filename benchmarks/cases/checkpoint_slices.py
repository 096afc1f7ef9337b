"""One of sixteen ranks loads its slice of a tensor: how many bytes does it read?

Bytes are what the process asks the kernel for (`rchar` of /proc/self/io), for every contender.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import Opener, millrace, stock, warm_up
from benchmarks.harness import Case, Measure, Options, Prepared

_RANKS = 16


def _tensor(rows: int) -> Any:
    import torch

    return (torch.randn(rows, 4096, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()


def _digest(tensor: Any) -> str:
    import torch
    import xxhash

    return xxhash.xxh3_128_hexdigest(tensor.contiguous().view(torch.uint8).numpy())


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    rows = 2048 if options.quick else 32768
    tensor, share = _tensor(rows), rows // _RANKS
    yield Prepared(
        {"rows": rows},
        expected=[_digest(tensor[5 * share : 6 * share]), _digest(tensor[:, 5 * 256 : 6 * 256])],
        notes=(
            f"A bf16 tensor of {tensor.nbytes / 1e6:.0f} MB; rank 5 of {_RANKS} loads its rows, then its columns. "
            f"`bytes to a {_RANKS}th` compares what was read with a {_RANKS}th of the tensor's bytes, metadata included. "
            "Columns cross every chunk, so each contender has to read all of them.",
        ),
    )


case = Case(
    name="checkpoint_slices", title="A sixteenth of a tensor", prepare=prepare, baseline="stock plain", rounds=3
)


def _read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split("\n")[0].split()[1])


def _slices(measure: Measure, context: Mapping[str, Any], openers: tuple[Opener, Opener]) -> list[str]:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    place = f"{context['scratch']}/checkpoint"
    warm_up(openers, f"{context['scratch']}/warm-up")
    tensor = _tensor(context["rows"])
    dcp.save({"w": tensor}, storage_writer=openers[0](place), no_dist=True)
    # Torch's own stand-in for a process group: this process is rank 5 of 16, the others do not exist.
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=_RANKS)
    mesh = init_device_mesh("cpu", (_RANKS,))
    digests = []
    for phase, dimension in (("rows", 0), ("columns", 1)):
        local = torch.zeros_like(tensor.chunk(_RANKS, dimension)[5])
        state = {"w": DTensor.from_local(local, mesh, [Shard(dimension)], run_check=False)}
        with measure(f"load {phase}") as figures:
            before = _read_bytes()
            dcp.load(state, storage_reader=openers[1](place), no_dist=True)
            read = _read_bytes() - before
            figures |= {"MB read": read / 1e6, f"bytes to a {_RANKS}th": read / (tensor.nbytes / _RANKS)}
        digests.append(_digest(state["w"].to_local()))
    dist.destroy_process_group()
    return digests


@case.contender("stock plain")
def stock_plain(measure: Measure, context: Mapping[str, Any]) -> list[str]:
    return _slices(measure, context, stock(2))


@case.contender("stock ZStandard")
def stock_zstd(measure: Measure, context: Mapping[str, Any]) -> list[str]:
    return _slices(measure, context, stock(2, "zstd"))


@case.contender("Millrace")
def millrace_typed(measure: Measure, context: Mapping[str, Any]) -> list[str]:
    return _slices(measure, context, millrace(2))


@case.contender("Millrace none")
def millrace_none(measure: Measure, context: Mapping[str, Any]) -> list[str]:
    return _slices(measure, context, millrace(2, "none"))
