"""What the checkpoint cases share: a state that was really trained, and the ways of saving and loading it.

The state is that of a byte-level transformer language model, initialised as GPT-2 is (normal, 0.02) and trained with
AdamW on the source code of Python's standard library, which every machine has: weights in bf16, the same in fp32, and
both moments in fp32. It is made once for each size and kept in `.deps`.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Measure, Options

_CONTEXT = 32
_BATCH = 4
_RATE = 3e-4


def _text(limit: int) -> bytes:
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"".join(source.read_bytes() for source in sources)[:limit]


def train(width: int, layers: int, steps: int) -> dict[str, Any]:
    """The state after training: `bf16` and `fp32` (the weights), `exp_avg` and `exp_avg_sq` (fp32), `losses`."""
    import torch

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True)
    embedding, body = torch.nn.Embedding(256, width), torch.nn.TransformerEncoder(layer, layers)
    head = torch.nn.Linear(width, 256)
    model = torch.nn.ModuleDict({"embedding": embedding, "body": body, "head": head})
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
    text = torch.frombuffer(bytearray(_text(4 << 20)), dtype=torch.uint8).long()
    mask = torch.nn.Transformer.generate_square_subsequent_mask(_CONTEXT)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - _CONTEXT - 1, (_BATCH,))
        batch = torch.stack([text[start : start + _CONTEXT + 1] for start in starts])
        scores = head(body(embedding(batch[:, :-1]), mask=mask, is_causal=True))
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    parameters = dict(model.named_parameters())
    state = optimizer.state
    return {
        "bf16": {name: value.detach().to(torch.bfloat16) for name, value in parameters.items()},
        "fp32": {name: value.detach().clone() for name, value in parameters.items()},
        "exp_avg": {name: state[value]["exp_avg"] for name, value in parameters.items()},
        "exp_avg_sq": {name: state[value]["exp_avg_sq"] for name, value in parameters.items()},
        "losses": torch.tensor(losses),
    }


def trained(options: Options) -> tuple[Path, str]:
    """The file with the trained state, made if need be, and a sentence about it."""
    import torch

    width, layers, steps = (256, 2, 20) if options.quick else (1024, 6, 60)
    file = ROOT / ".deps" / f"trained-{width}-{layers}-{steps}.pt"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        aside = file.with_suffix(f".{os.getpid()}")
        torch.save(train(width, layers, steps), aside)
        aside.rename(file)
    losses = torch.load(file, mmap=True)["losses"]
    return file, (
        f"A transformer ({layers} layers of width {width}, initialised with a deviation of 0.02 as GPT-2 is) after {steps} "
        f"steps of AdamW ({_RATE:g}) on the standard library's source code, byte by byte: loss {losses[0]:.1f} -> "
        f"{losses[-5:].mean():.1f}."
    )


def parts_of(file: str | Path, *names: str) -> dict[str, dict[str, Any]]:
    """Some of `bf16`, `fp32`, `exp_avg` and `exp_avg_sq`, read into memory."""
    import torch

    whole = torch.load(file, mmap=True)
    return {name: {key: value.clone() for key, value in whole[name].items()} for name in names}


CONTENTS: Mapping[str, tuple[str, ...]] = {
    "bf16": ("bf16",),
    "fp32": ("fp32",),
    "fp32 + Adam": ("fp32", "exp_avg", "exp_avg_sq"),
}
"""What is saved, as parts of the trained state."""


def tensors_of(state: Mapping[str, Any]) -> list[Any]:
    """All tensors, in an order that depends on their names only."""
    return [tensor for _, group in sorted(state.items()) for _, tensor in sorted(group.items())]


def raw_bytes(state: Mapping[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(state))


def digest(state: Mapping[str, Any]) -> str:
    """Depends on every bit of every tensor."""
    import torch
    import xxhash

    whole = xxhash.xxh3_128()
    for tensor in tensors_of(state):
        whole.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return whole.hexdigest()


# A place (a folder or URL) to a writer of it, and to a reader.
Opener = Callable[[str], Any]


def stock(threads: int, extension: str | None = None, *, sync_files: bool = True) -> tuple[Opener, Opener]:
    """Torch's own writer and reader, with `ZStandard` or `ZstdPlanes` in them, or plain."""
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint._extension import ZStandard

    from millrace.checkpoint import ZstdPlanes, extension_registry

    def writer(place: str) -> Any:
        extensions = {None: None, "zstd": [ZStandard()], "planes": [ZstdPlanes()]}[extension]
        return FileSystemWriter(place, sync_files=sync_files, thread_count=threads, _extensions=extensions)

    return writer, lambda place: FileSystemReader(place, _extension_registry=extension_registry(ZStandard))


def use_loops(compiled: bool) -> None:
    """Split planes by the compiled loops in this process, or never: it must not begin to load them while it is measured."""
    from millrace.checkpoint.codec import splitting

    splitting.loops = splitting.Loops(from_bytes=1 << 62)
    if compiled and not splitting.loops.load():
        raise RuntimeError("numba is not installed, or cannot be used")


def millrace(
    threads: int, compression: Any = "typed", *, compiled: bool = False, **options: Any
) -> tuple[Opener, Opener]:
    from millrace.checkpoint import CheckpointReader, CheckpointWriter

    use_loops(compiled)
    return (
        lambda place: CheckpointWriter(place, thread_count=threads, compression=compression, **options),
        lambda place: CheckpointReader(place, thread_count=threads, target_options=options.get("target_options")),
    )


def warm_up(openers: tuple[Opener, Opener], place: str) -> None:
    """What is imported on first use is paid once a process, not once a checkpoint."""
    import torch
    import torch.distributed.checkpoint as dcp

    small = {"x": torch.arange(1000.0)}
    dcp.save(small, storage_writer=openers[0](place), no_dist=True)
    dcp.load(small, storage_reader=openers[1](place), no_dist=True)


def folder_bytes(place: str) -> int:
    return sum(path.stat().st_size for path in Path(place).rglob("*") if path.is_file())


def fill_page_cache(folder: Path) -> None:
    """Read every file below `folder`: a load then finds them in the page cache, however they were written."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.read_bytes()


def empty_page_cache(folder: Path) -> None:
    """Remove every synced file below `folder` from the page cache: a load then reads them from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def expected_of(file: Path, contents: Mapping[str, tuple[str, ...]] = CONTENTS) -> dict[str, str]:
    """What `save_and_load` returns when nothing was lost."""
    return {name: digest(parts_of(file, *parts)) for name, parts in contents.items()}


def sizes_of(file: Path, contents: Mapping[str, tuple[str, ...]] = CONTENTS) -> str:
    """The contents in words, for a report."""
    states = {name: parts_of(file, *parts) for name, parts in contents.items()}
    return "; ".join(
        f"{name}: {raw_bytes(state) / 1e6:.0f} MB in {len(tensors_of(state))} tensors" for name, state in states.items()
    )


def save_and_load(
    measure: Measure,
    context: Mapping[str, Any],
    openers: tuple[Opener, Opener],
    contents: Mapping[str, tuple[str, ...]] = CONTENTS,
    *,
    again: bool = False,
) -> dict[str, str]:
    """Save each of the contents to a checkpoint in `context["place"]` and load it; the digests of what came back.

    With `again`, it is saved twice more to the same place, and the last save is measured as well: it finds memory that
    earlier saves have used for the page cache, as on a host that has been up for a day. Then it is loaded twice: from the
    page cache, and from the disk.
    """
    import torch.distributed.checkpoint as dcp

    place = context.get("place") or context["scratch"]
    warm_up(openers, f"{place}/warm-up")
    digests = {}
    for name, parts in contents.items():
        state, checkpoint = parts_of(context["state"], *parts), f"{place}/{name.replace(' ', '')}"
        with measure(f"save {name}" + (", new directory" if again else "")) as figures:
            dcp.save(state, storage_writer=openers[0](checkpoint), no_dist=True)
            figures["raw GB"] = raw_bytes(state) / 1e9
            if "place" not in context:
                stored = folder_bytes(checkpoint)
                figures |= {"MB stored": stored / 1e6, "size to raw": stored / raw_bytes(state)}
        if again:
            dcp.save(state, storage_writer=openers[0](checkpoint), no_dist=True)
            os.sync()
            with measure(f"save {name}, same directory") as figures:
                dcp.save(state, storage_writer=openers[0](checkpoint), no_dist=True)
                figures["raw GB"] = raw_bytes(state) / 1e9
        loads = {f"load {name}": fill_page_cache} | ({f"load {name}, from the disk": empty_page_cache} if again else {})
        for phase, prepare in loads.items():
            if "place" not in context:
                prepare(Path(checkpoint))
            for tensor in tensors_of(state):
                tensor.fill_(7)
            with measure(phase) as figures:
                figures["raw GB"] = raw_bytes(state) / 1e9
                dcp.load(state, storage_reader=openers[1](checkpoint), no_dist=True)
            found = digest(state)
            digests[name] = found if digests.get(name, found) == found else "the two loads differ"
    return digests
