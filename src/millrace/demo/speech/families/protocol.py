"""What a family of speech models is to the rest of a run. Importing it loads neither torch nor transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from millrace.demo.speech.audio import Array

if TYPE_CHECKING:
    import torch

    from millrace.demo.place import Place


class Family(Protocol):
    """One family with one model of it: a folder, a name of the hub, or a small one built from a configuration.

    Picklable and small: it travels to every worker and every task of Ray Data, and loads what it needs there at the first
    use. Methods may be called from several threads.
    """

    def describe(self) -> str:
        """One line for people: which model."""
        ...

    def features(self, samples: Array) -> Array:
        """What the model reads of 16 kHz samples: float32, (frames, width)."""
        ...

    def labels(self, sentence: str) -> list[int]:
        """What the model is to say for a normalised sentence, without padding."""
        ...

    def fits(self, labels: list[int], frames: int) -> bool:
        """Whether the model can learn these labels from so many frames (of `features`)."""
        ...

    def collate(self, features: list[Array], labels: list[list[int]]) -> dict[str, torch.Tensor]:
        """Padded CPU tensors, as `loss` and `transcribe` take them."""
        ...

    def build(self) -> torch.nn.Module:
        """The model, on the CPU, in training mode. From a configuration it is the same one for the same seed."""
        ...

    def loss(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The training loss of a batch on the model's device, a mean over its clips. `model` may be wrapped (DDP)."""
        ...

    def transcribe(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> list[str]:
        """What the bare model hears, normalised text, greedily. Leaves the model's mode alone."""
        ...

    def save(self, model: torch.nn.Module, target: Place) -> list[str]:
        """Write the bare model with its processor as transformers loads them; gives the names of the files."""
        ...

    def configuration(self) -> dict[str, Any]:
        """What the model card tells of the model, as plain values."""
        ...
