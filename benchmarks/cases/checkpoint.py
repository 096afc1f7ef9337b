"""Save and load one checkpoint on the local disk: Millrace beside what torch brings.

The state is that of a byte-level transformer language model that is really trained, with AdamW, on the source code of
Python's standard library (which every machine has): weights in bf16, both moments in fp32.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import Case, Measure, Options, Prepared

_CONTEXT = 64
_BATCH = 4


def _text(limit: int) -> bytes:
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"".join(source.read_bytes() for source in sources)[:limit]


def train(width: int, layers: int, steps: int) -> dict[str, Any]:
    """Train the model and return its state: `model` (bf16), `exp_avg` and `exp_avg_sq` (fp32), `step`."""
    import torch

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True)
    embedding, body = torch.nn.Embedding(256, width), torch.nn.TransformerEncoder(layer, layers)
    head = torch.nn.Linear(width, 256)
    model = torch.nn.ModuleDict({"embedding": embedding, "body": body, "head": head})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    text = torch.frombuffer(bytearray(_text(4 << 20)), dtype=torch.uint8).long()
    mask = torch.nn.Transformer.generate_square_subsequent_mask(_CONTEXT)
    for _ in range(steps):
        starts = torch.randint(len(text) - _CONTEXT - 1, (_BATCH,))
        batch = torch.stack([text[start : start + _CONTEXT + 1] for start in starts])
        scores = head(body(embedding(batch[:, :-1]), mask=mask, is_causal=True))
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    parameters = dict(model.named_parameters())
    state = optimizer.state
    return {
        "model": {name: value.detach().to(torch.bfloat16) for name, value in parameters.items()},
        "exp_avg": {name: state[value]["exp_avg"] for name, value in parameters.items()},
        "exp_avg_sq": {name: state[value]["exp_avg_sq"] for name, value in parameters.items()},
        "step": torch.tensor(steps),
    }


def _tensors(state: Mapping[str, Any]) -> list[Any]:
    """All tensors, in an order that depends on their names only."""
    groups = (value if isinstance(value, dict) else {"": value} for _, value in sorted(state.items()))
    return [tensor for group in groups for _, tensor in sorted(group.items())]


def digest(state: Mapping[str, Any]) -> str:
    """Depends on every bit of every tensor."""
    import torch
    import xxhash

    whole = xxhash.xxh3_128()
    for tensor in _tensors(state):
        whole.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return whole.hexdigest()


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    import torch

    width, layers, steps = (256, 2, 20) if options.quick else (768, 4, 40)
    state = train(width, layers, steps)
    file = options.scratch / "state.pt"
    torch.save(state, file)
    raw = sum(tensor.nbytes for tensor in _tensors(state))
    yield Prepared(
        {"state": str(file), "raw bytes": raw},
        expected=digest(state),
        notes=(
            f"State of {raw / 1e6:.0f} MB in {len(_tensors(state))} tensors: bf16 weights and fp32 Adam moments of a "
            f"transformer ({layers} layers of width {width}) after {steps} steps of AdamW (3e-4) on the source code of "
            "the standard library.",
            "All files are synced to the same disk before a save counts as done; a load finds them in the page cache, "
            "and what it gives is compared bit for bit.",
        ),
    )


case = Case(name="checkpoint", title="Saving and loading a checkpoint on the local disk", prepare=prepare, rounds=5)


def _save_and_load(
    measure: Measure, context: Mapping[str, Any], writer: Callable[[Path], Any], reader: Callable[[Path], Any]
) -> str:
    """Save the state with a new `writer` of a folder, load it with a new `reader`; returns the digest of what came back."""
    import torch
    import torch.distributed.checkpoint as dcp

    # What is imported on first use is paid once a process, not once a checkpoint.
    warm_up, folder = Path(context["scratch"]) / "warm-up", Path(context["scratch"]) / "checkpoint"
    small = {"x": torch.arange(1000.0)}
    dcp.save(small, storage_writer=writer(warm_up), no_dist=True)
    dcp.load(small, storage_reader=reader(warm_up), no_dist=True)

    state = torch.load(context["state"])
    with measure("save") as figures:
        dcp.save(state, storage_writer=writer(folder), no_dist=True)
        stored = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        figures |= {"MB stored": stored / 1e6, "size to raw": stored / context["raw bytes"]}
    for tensor in _tensors(state):
        tensor.fill_(7)
    with measure("load"):
        dcp.load(state, storage_reader=reader(folder), no_dist=True)
    return digest(state)


def _stock(measure: Measure, context: Mapping[str, Any], threads: int, *, compressed: bool = False) -> str:
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint._extension import ZStandard

    def writer(folder: Path) -> Any:
        extensions = [ZStandard()] if compressed else None
        return FileSystemWriter(folder, sync_files=True, thread_count=threads, _extensions=extensions)

    return _save_and_load(measure, context, writer, FileSystemReader)


def _millrace(measure: Measure, context: Mapping[str, Any], threads: int) -> str:
    from millrace.checkpoint import CheckpointReader, CheckpointWriter

    return _save_and_load(
        measure,
        context,
        lambda folder: CheckpointWriter(folder, thread_count=threads),
        lambda folder: CheckpointReader(folder, thread_count=threads),
    )


@case.contender("stock plain, 1 thread")
def stock_plain_1(measure: Measure, context: Mapping[str, Any]) -> str:
    return _stock(measure, context, 1)


@case.contender("stock plain, 2 threads")
def stock_plain_2(measure: Measure, context: Mapping[str, Any]) -> str:
    return _stock(measure, context, 2)


@case.contender("stock ZStandard, 1 thread", baseline="stock plain, 1 thread")
def stock_zstd_1(measure: Measure, context: Mapping[str, Any]) -> str:
    return _stock(measure, context, 1, compressed=True)


@case.contender("stock ZStandard, 2 threads", baseline="stock plain, 2 threads")
def stock_zstd_2(measure: Measure, context: Mapping[str, Any]) -> str:
    return _stock(measure, context, 2, compressed=True)


@case.contender("Millrace, 1 thread", baseline="stock plain, 1 thread")
def millrace_1(measure: Measure, context: Mapping[str, Any]) -> str:
    return _millrace(measure, context, 1)


@case.contender("Millrace, 2 threads", baseline="stock plain, 2 threads")
def millrace_2(measure: Measure, context: Mapping[str, Any]) -> str:
    return _millrace(measure, context, 2)
