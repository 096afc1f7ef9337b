"""Models that say one label a frame (CTC): Wav2Vec2 and its kin."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from millrace.demo.place import Place
from millrace.demo.speech import text
from millrace.demo.speech.audio import FEATURES, SAMPLE_RATE, Array, log_mel
from millrace.demo.speech.families.pretrained import Source, write_folder
from millrace.demo.speech.settings import SpeechSettings
from millrace.errors import UsageError

if TYPE_CHECKING:
    import torch

MODEL_TYPES = (
    "wav2vec2", "wav2vec2-bert", "wav2vec2-conformer", "hubert", "wavlm", "data2vec-audio", "sew", "sew-d", "unispeech",
    "unispeech-sat",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Shrinking:
    """How many frames a model makes of those it reads: convolutions without padding, then an adapter's layers."""

    convolutions: tuple[tuple[int, int], ...] = ()
    """Kernel and stride of each."""
    adapter_layers: int = 0
    adapter_kernel: int = 1
    adapter_stride: int = 1
    adapter_padding: int = 0

    @classmethod
    def of(cls, kind: str, configuration: Any) -> Shrinking:
        """That of a model type's configuration (transformers')."""
        convolutions: tuple[tuple[int, int], ...] = ()
        if kind != "wav2vec2-bert":
            convolutions = tuple(zip(configuration.conv_kernel, configuration.conv_stride, strict=True))
        if not getattr(configuration, "add_adapter", False):
            return cls(convolutions=convolutions)
        # The kin of Wav2Vec2 reckon as if the adapter's kernel were one wide, and transformers' loss with them.
        kernel = configuration.adapter_kernel_size if kind == "wav2vec2-bert" else 1
        return cls(
            convolutions=convolutions,
            adapter_layers=configuration.num_adapter_layers,
            adapter_kernel=kernel,
            adapter_stride=configuration.adapter_stride,
            adapter_padding=kernel // 2,
        )

    def frames(self, read: int) -> int:
        """The frames that the model says something about, of `read` frames; none if there are too few."""
        left = read
        for kernel, stride in self.convolutions:
            left = (left - kernel) // stride + 1
        for _ in range(self.adapter_layers):
            left = (left + 2 * self.adapter_padding - self.adapter_kernel) // self.adapter_stride + 1
        return max(0, left)


class CtcFamily:
    """A CTC model over `text.SYMBOLS`. Picklable; thread-safe."""

    def __init__(
        self,
        *,
        settings: SpeechSettings,
        kind: str,
        reads_wave: bool,
        shrinking: Shrinking,
        masked: bool = True,
        hidden_frames: int = 0,
        source: Source | None = None,
        configuration: dict[str, Any] | None = None,
    ) -> None:
        self._settings = settings
        self._source = source
        self._kind = kind
        self._reads_wave = reads_wave
        self._shrinking = shrinking
        # Models whose first layer normalises over a whole clip were made for padding that they are not told of.
        self._masked = masked
        self._hidden_frames = hidden_frames
        self._configuration = configuration or {}
        self._extractor: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_extractor": None}

    def describe(self) -> str:
        """One line for people: which model."""
        if self._source is not None:
            return f"{self._source.given} ({self._kind}, CTC)"
        return f"small Wav2Vec2-BERT (CTC), {self._settings.layers} layers of {self._settings.hidden_size}"

    def features(self, samples: Array) -> Array:
        """Log-mel values, or the samples themselves as frames of one value where the model reads the wave."""
        if self._source is None:
            return log_mel(samples)
        extractor = self._loaded_extractor()
        # An empty clip has no mean that it could be normalised by.
        if not len(samples):
            return np.zeros((0, 1 if self._reads_wave else FEATURES), dtype=np.float32)
        if not self._reads_wave and type(extractor).__name__ == "SeamlessM4TFeatureExtractor":
            return log_mel(samples)
        values = extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="np")[extractor.model_input_names[0]][0]
        return np.ascontiguousarray(values if values.ndim == 2 else values[:, None], dtype=np.float32)

    def labels(self, sentence: str) -> list[int]:
        """A label a letter."""
        return text.encode(sentence)

    def fits(self, labels: list[int], frames: int) -> bool:
        """Whether the output has the frames that CTC needs for these labels, and more than training hides at a time."""
        left = self._shrinking.frames(frames)
        heard = replace(self._shrinking, adapter_layers=0).frames(frames)
        return left > 0 and heard > self._hidden_frames and text.frames_needed(labels) <= left

    def collate(self, features: list[Array], labels: list[list[int]]) -> dict[str, torch.Tensor]:
        """`features` (clips, frames, width), their `mask` (clips, frames), and `labels` padded with -100."""
        import torch

        count, frames = len(features), max(len(values) for values in features)
        padded = np.zeros((count, frames, features[0].shape[1]), dtype=np.float32)
        mask = np.zeros((count, frames), dtype=np.int64)
        targets = np.full((count, max(len(values) for values in labels)), -100, dtype=np.int64)
        for row, (values, label) in enumerate(zip(features, labels, strict=True)):
            padded[row, : len(values)] = values
            mask[row, : len(values)] = 1
            targets[row, : len(label)] = label
        return {
            "features": torch.from_numpy(padded),
            "mask": torch.from_numpy(mask),
            "labels": torch.from_numpy(targets),
        }

    def build(self) -> torch.nn.Module:
        """The model, on the CPU, in training mode, in float32; from a configuration the same one for the same seed."""
        import torch

        torch.manual_seed(self._settings.seed)
        model = self._small() if self._source is None else self._pretrained(self._source)
        _freeze_unused(model)
        trainable: torch.nn.Module = model.train()
        return trainable

    def _small(self) -> Any:
        from transformers import Wav2Vec2BertConfig, Wav2Vec2BertForCTC

        return Wav2Vec2BertForCTC(
            Wav2Vec2BertConfig(
                vocab_size=len(text.SYMBOLS),
                pad_token_id=text.BLANK_ID,
                hidden_size=self._settings.hidden_size,
                num_hidden_layers=self._settings.layers,
                num_attention_heads=4,
                intermediate_size=2 * self._settings.hidden_size,
                feature_projection_input_dim=FEATURES,
                conv_depthwise_kernel_size=15,
                ctc_loss_reduction="mean",
                ctc_zero_infinity=True,
                # A model this small underfits: whatever makes learning harder only makes it slower.
                apply_spec_augment=False,
                conformer_conv_dropout=0.0,
                final_dropout=0.0,
                layerdrop=0.0,
            )
        )

    def _pretrained(self, source: Source) -> Any:
        import torch
        from transformers import AutoModelForCTC

        def load(name: str) -> Any:
            return AutoModelForCTC.from_pretrained(
                name,
                # Half of a half-precision checkpoint's steps would be rounded away; autocast halves where it is safe.
                dtype=torch.float32,
                vocab_size=len(text.SYMBOLS),
                pad_token_id=text.BLANK_ID,
                ctc_loss_reduction="mean",
                ctc_zero_infinity=True,
                # A layer that is left out at random has no gradient, and DDP would wait for it.
                layerdrop=0.0,
                ignore_mismatched_sizes=True,
            )

        model = source.load(load)
        if not self._speaks_this_alphabet(source):
            # The head may have as many labels and mean others, so its size does not tell.
            model.lm_head.weight.data.normal_(mean=0.0, std=0.02)
            model.lm_head.bias.data.zero_()
        return model

    @staticmethod
    def _speaks_this_alphabet(source: Source) -> bool:
        """Whether the model's labels are `text.SYMBOLS`: an earlier run's are."""
        try:
            vocabulary = source.tokenizer().get_vocab()
        except (UsageError, TypeError):
            # A model that was never taught an alphabet has no tokenizer, and transformers says so in either way.
            return False
        # Behind the model's labels a tokenizer may have signs of its own, which the model never says.
        return {sign: label for sign, label in vocabulary.items() if label < len(text.SYMBOLS)} == text.LABELS

    def loss(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """CTC loss, a label's mean."""
        loss: torch.Tensor = self._forward(model, batch, labels=batch["labels"]).loss
        return loss

    def transcribe(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> list[str]:
        """What the bare model hears, each frame decided on its own. Leaves the model's mode alone."""
        import torch

        with torch.inference_mode():
            best = self._forward(model, batch, labels=None).logits.argmax(dim=-1).cpu()
        lengths = [self._shrinking.frames(int(read)) for read in batch["mask"].sum(dim=1).tolist()]
        return [text.decode(frames[:length].tolist()) for frames, length in zip(best, lengths, strict=True)]

    def _forward(self, model: Any, batch: dict[str, torch.Tensor], *, labels: torch.Tensor | None) -> Any:
        values: dict[str, Any] = (
            {"input_values": batch["features"].squeeze(-1)}
            if self._reads_wave
            else {"input_features": batch["features"]}
        )
        return model(**values, attention_mask=batch["mask"] if self._masked else None, labels=labels)

    def save(self, model: torch.nn.Module, target: Place) -> list[str]:
        """Write the model as `AutoModelForCTC` and `AutoProcessor` load it; gives the names of the files."""
        from transformers import SeamlessM4TFeatureExtractor, Wav2Vec2CTCTokenizer

        saved: Any = model

        def fill(folder: str) -> None:
            vocabulary = Path(folder) / "vocab.json"
            vocabulary.write_text(json.dumps(text.LABELS, ensure_ascii=False), encoding="utf-8")
            Wav2Vec2CTCTokenizer(
                str(vocabulary),
                pad_token=text.BLANK,
                unk_token=text.UNKNOWN,
                word_delimiter_token=text.WORD_BORDER,
                bos_token=None,
                eos_token=None,
            ).save_pretrained(folder)
            extractor = SeamlessM4TFeatureExtractor() if self._source is None else self._loaded_extractor()
            extractor.save_pretrained(folder)
            saved.save_pretrained(folder, safe_serialization=True)

        return write_folder(target, fill)

    def configuration(self) -> dict[str, Any]:
        """What the model card tells of the model, as plain values."""
        small = {"num_hidden_layers": self._settings.layers, "hidden_size": self._settings.hidden_size}
        shown = small if self._source is None else self._configuration
        return {
            "family": "ctc",
            "model_type": self._kind,
            "auto_class": "AutoModelForCTC",
            "layers": shown.get("num_hidden_layers"),
            "hidden_size": shown.get("hidden_size"),
            "labels": len(text.SYMBOLS),
        }

    def _loaded_extractor(self) -> Any:
        if self._extractor is None:
            assert self._source is not None, "the small model's features need no extractor"
            self._extractor = self._source.extractor()
        return self._extractor


def _hides_frames(configuration: Any) -> bool:
    """Whether the model hides frames from itself in training (SpecAugment). Data2Vec has no switch for it."""
    return bool(getattr(configuration, "apply_spec_augment", True) and configuration.mask_time_prob > 0)


def _freeze_unused(model: Any) -> None:
    """Freeze what no loss depends on: the optimizer would have no state for it, and DDP would wait for its gradient."""
    configuration = model.config
    unused = []
    if not _hides_frames(configuration):
        unused.append("masked_spec_embed")
    if configuration.model_type == "wav2vec2-conformer":
        # Made for every one of them, and left out of all: the position is in the attention.
        unused.append("pos_conv_embed")
    for name, parameter in model.named_parameters():
        if not set(unused).isdisjoint(name.split(".")):
            parameter.requires_grad_(False)


def small(settings: SpeechSettings) -> CtcFamily:
    """The small one that is built from a configuration."""
    return CtcFamily(settings=settings, kind="wav2vec2-bert", reads_wave=False, shrinking=Shrinking())


def pretrained(settings: SpeechSettings, source: Source, configuration: dict[str, Any]) -> CtcFamily:
    """The one of `source`, whose `config.json` says `configuration`."""
    from transformers import AutoConfig

    extractor = source.extractor()
    kind = configuration["model_type"]
    values = dict(configuration)
    complete = AutoConfig.for_model(values.pop("model_type"), **values)
    reads_wave = kind != "wav2vec2-bert"
    return CtcFamily(
        settings=settings,
        source=source,
        kind=kind,
        reads_wave=reads_wave,
        shrinking=Shrinking.of(kind, complete),
        masked=bool(getattr(extractor, "return_attention_mask", True)) or not reads_wave,
        hidden_frames=complete.mask_time_length if _hides_frames(complete) else 0,
        configuration=complete.to_dict(),
    )
