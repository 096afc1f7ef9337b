"""The acoustic model: built small from a configuration, or loaded from a folder or the hub; and what it hears."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millrace.demo.place import Place
from millrace.demo.speech import text
from millrace.demo.speech.audio import FEATURES, SAMPLE_RATE, Array, log_mel
from millrace.demo.speech.settings import SpeechSettings
from millrace.errors import UsageError


def build_model(settings: SpeechSettings) -> torch.nn.Module:
    """A CTC model over `text.SYMBOLS`, on the CPU, in training mode; from scratch the same one for the same seed."""
    from transformers import AutoModelForCTC, Wav2Vec2BertConfig, Wav2Vec2BertForCTC

    torch.manual_seed(settings.seed)
    if settings.model is not None:
        # The body is kept; the head is new, since it must speak this alphabet.
        return _trainable(
            AutoModelForCTC.from_pretrained(
                settings.model,
                vocab_size=len(text.SYMBOLS),
                pad_token_id=text.BLANK_ID,
                ctc_loss_reduction="mean",
                ctc_zero_infinity=True,
                ignore_mismatched_sizes=True,
            )
        )
    model = Wav2Vec2BertForCTC(
        Wav2Vec2BertConfig(
            vocab_size=len(text.SYMBOLS),
            pad_token_id=text.BLANK_ID,
            hidden_size=settings.hidden_size,
            num_hidden_layers=settings.layers,
            num_attention_heads=4,
            intermediate_size=2 * settings.hidden_size,
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
    return _trainable(model)


def _trainable(model: Any) -> torch.nn.Module:
    """Freeze what no loss depends on: the optimizer would have no state for it, and DDP would wait for its gradient."""
    masks = model.config.apply_spec_augment and model.config.mask_time_prob > 0
    for name, parameter in model.named_parameters():
        if name.endswith("masked_spec_embed") and not masks:
            parameter.requires_grad_(False)
    trainable: torch.nn.Module = model
    return trainable


def features_for(settings: SpeechSettings) -> Callable[[Array], Array]:
    """What turns 16 kHz samples into the (frames, width) array that the model of `settings` reads. Picklable."""
    return log_mel if settings.model is None else PretrainedFeatures(settings.model)


class PretrainedFeatures:
    """The feature extractor that a pretrained model came with. Picklable; loads it on first use in a process."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._extractor: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_model": self._model, "_extractor": None}

    def __call__(self, samples: Array) -> Array:
        from transformers import AutoFeatureExtractor

        if self._extractor is None:
            self._extractor = AutoFeatureExtractor.from_pretrained(self._model)
        name = self._extractor.model_input_names[0]
        values = self._extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="np")[name][0]
        # A model that reads the wave itself gets it as frames of one value.
        array = np.ascontiguousarray(values if values.ndim == 2 else values[:, None], dtype=np.float32)
        if not len(array):
            raise UsageError(f"{self._model} has no features for CTC", next_step="give a CTC model such as Wav2Vec2")
        return array


def forward(model: torch.nn.Module, batch: dict[str, Any], *, device: torch.device, labels: bool) -> Any:
    """The model's output for a collated batch; with `labels`, its CTC loss too."""
    features = batch["features"].to(device)
    name = getattr(model, "module", model).main_input_name
    return model(
        **{name: features if name == "input_features" else features.squeeze(-1)},
        attention_mask=batch["mask"].to(device),
        labels=batch["labels"].to(device) if labels else None,
    )


def transcribe(model: torch.nn.Module, batch: dict[str, Any], *, device: torch.device) -> list[str]:
    """What the model hears in a collated batch, each frame decided on its own. Leaves the model's mode alone."""
    with torch.inference_mode():
        best = forward(model, batch, device=device, labels=False).logits.argmax(dim=-1).cpu()
    # The output may have fewer frames than the input; the share that is speech stays.
    lengths = (batch["mask"].sum(dim=1) * best.shape[1] / batch["mask"].shape[1]).ceil().int().tolist()
    return [text.decode(frames[:length].tolist()) for frames, length in zip(best, lengths, strict=True)]


def save_model(model: torch.nn.Module, settings: SpeechSettings, target: Place) -> list[str]:
    """Write the model as transformers loads it (`AutoModelForCTC`, `AutoProcessor`), and give the names of the files."""
    from transformers import AutoFeatureExtractor, SeamlessM4TFeatureExtractor, Wav2Vec2CTCTokenizer

    with tempfile.TemporaryDirectory(prefix="millrace-model-") as folder:
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
        extractor = (
            SeamlessM4TFeatureExtractor()
            if settings.model is None
            else AutoFeatureExtractor.from_pretrained(settings.model)
        )
        extractor.save_pretrained(folder)
        model.save_pretrained(folder, safe_serialization=True)
        names = sorted(path.name for path in Path(folder).iterdir() if path.is_file())
        for name in names:
            target.write(name, (Path(folder) / name).read_bytes())
    return names
