"""A model that is really trained and then fine-tuned, as its checkpoints see it: one state every ten steps.

A byte-level transformer language model, initialised as GPT-2 is, learns the source code of Python's standard library with
AdamW, and is then fine-tuned on that of its packages: a new AdamW at 2e-5, the customary rate. Weights are kept in fp32 and,
as mixed precision has them, in bf16. Made once and kept in `.deps`.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Options

STEPS_A_SAVE = 10
_CONTEXT, _BATCH = 64, 8
_RATE, _FINE_RATE = 3e-4, 2e-5


def _text(pattern: str, limit: int) -> Any:
    import torch

    sources = sorted(Path(sysconfig.get_path("stdlib")).glob(pattern))
    data = b"".join(source.read_bytes() for source in sources if "site-packages" not in source.parts)[:limit]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


class _Training:
    def __init__(self, width: int, layers: int) -> None:
        import torch

        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True)
        body = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.model = torch.nn.ModuleDict(
            {"embedding": torch.nn.Embedding(256, width), "body": body, "head": torch.nn.Linear(width, 256)}
        )
        for parameter in self.model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)
        self.mask = torch.nn.Transformer.generate_square_subsequent_mask(_CONTEXT)
        self.losses: list[float] = []

    def run(self, text: Any, optimizer: Any, steps: int) -> None:
        import torch

        for _ in range(steps):
            starts = torch.randint(len(text) - _CONTEXT - 1, (_BATCH,))
            batch = torch.stack([text[start : start + _CONTEXT + 1] for start in starts])
            hidden = self.model["body"](self.model["embedding"](batch[:, :-1]), mask=self.mask, is_causal=True)
            scores = self.model["head"](hidden)
            loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.losses.append(loss.item())

    def state(self, optimizer: Any) -> dict[str, dict[str, Any]]:
        """Weights and moments, in fp32."""
        named = dict(self.model.named_parameters())
        kept = {"fp32": {name: value.detach().clone() for name, value in named.items()}}
        for moment in ("exp_avg", "exp_avg_sq"):
            kept[moment] = {name: optimizer.state[value][moment].clone() for name, value in named.items()}
        return kept


def fine_tuned(options: Options) -> tuple[Path, str]:
    """The file with the states, one every ten steps of fine-tuning, made if need be; and a sentence about it."""
    import torch

    width, layers, steps, saves = (128, 2, 20, 4) if options.quick else (256, 6, 300, 11)
    file = ROOT / ".deps" / f"fine-tuned-{width}-{layers}-{steps}-{saves}.pt"
    if not file.exists():
        training = _Training(width, layers)
        training.run(_text("*.py", 4 << 20), torch.optim.AdamW(training.model.parameters(), lr=_RATE), steps)
        fine = torch.optim.AdamW(training.model.parameters(), lr=_FINE_RATE)
        states = []
        for _ in range(saves):
            training.run(_text("*/*.py", 4 << 20), fine, STEPS_A_SAVE)
            states.append(training.state(fine))
        file.parent.mkdir(exist_ok=True)
        aside = file.with_suffix(f".{os.getpid()}")
        torch.save({"states": states, "losses": torch.tensor(training.losses)}, aside)
        aside.rename(file)
    whole = torch.load(file, mmap=True)
    losses, count = whole["losses"], sum(value.numel() for value in whole["states"][0]["fp32"].values())
    return file, (
        f"A transformer of {count / 1e6:.1f} M parameters ({layers} layers of width {width}, initialised with a deviation "
        f"of 0.02) after {steps} steps of AdamW ({_RATE:g}) on the standard library's source code, byte by byte, loss "
        f"{losses[0]:.1f} -> {losses[steps - 5 : steps].mean():.2f}; then fine-tuned on its packages' by a new AdamW at "
        f"{_FINE_RATE:g}, {_BATCH} x {_CONTEXT} bytes a step, -> {losses[-20:].mean():.2f}. "
        f"{saves} states, {STEPS_A_SAVE} steps apart."
    )


def state_at(file: str | Path, number: int, parts: tuple[str, ...]) -> Mapping[str, Mapping[str, Any]]:
    """Some of `bf16`, `fp32`, `exp_avg` and `exp_avg_sq` of one of the states, in memory."""
    import torch

    whole = torch.load(file, mmap=True)["states"][number]
    kept = {name: {key: value.clone() for key, value in whole[name].items()} for name in parts if name != "bf16"}
    if "bf16" in parts:
        kept["bf16"] = {key: value.to(torch.bfloat16) for key, value in whole["fp32"].items()}
    return kept


def further_steps(file: str | Path, rate: float, *, before: int, chunks: int, elements: int) -> tuple[Any, Any]:
    """Weights of bf16 before and after one more step of the training of `checkpoints.train`, after `before` others.

    AdamW continues with its moments, at `rate` and on other text. Returns the bits of `chunks` parts of so many elements
    each, spread evenly over all weights.
    """
    import numpy as np
    import torch

    whole = torch.load(file, mmap=True)
    width = whole["fp32"]["head.weight"].shape[1]
    layers = 1 + max(int(key.split(".")[2]) for key in whole["fp32"] if key.startswith("body.layers."))
    training = _Training(width, layers)
    training.model.load_state_dict(whole["fp32"])
    named = dict(training.model.named_parameters())
    optimizer = torch.optim.AdamW(training.model.parameters(), lr=rate)
    for name, value in named.items():
        moments = {moment: whole[moment][name].clone() for moment in ("exp_avg", "exp_avg_sq")}
        optimizer.state[value] = {"step": torch.tensor(float(len(whole["losses"]))), **moments}

    def taken() -> Any:
        flat = torch.cat([value.detach().to(torch.bfloat16).reshape(-1) for value in named.values()])
        starts = np.linspace(0, flat.numel() - elements, chunks).astype(int)
        return np.stack([flat[start : start + elements].view(torch.int16).numpy().view(np.uint16) for start in starts])

    text = _text("*/*.py", 4 << 20)
    training.run(text, optimizer, before)
    old = taken()
    training.run(text, optimizer, 1)
    return old, taken()
