"""Whisper: an encoder of 10 ms frames and a decoder that writes token after token."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from millrace.demo.place import Place
from millrace.demo.speech import text
from millrace.demo.speech.audio import MEL_BINS, SAMPLE_RATE, Array, whisper_log_mel, whisper_silence
from millrace.demo.speech.families import letters
from millrace.demo.speech.families.pretrained import Source, write_folder
from millrace.demo.speech.settings import SpeechSettings
from millrace.errors import UsageError

if TYPE_CHECKING:
    import torch

MODEL_TYPE = "whisper"

_FRAMES_A_SECOND = 100
_EXTRA_FRAMES = 2
"""A clip reaches with its last samples into so many frames that transformers would not look at."""
_TARGET_POSITIONS = 448
"""As many as every Whisper has: transformers' pipeline asks for 256 new tokens and more, unless it is told otherwise."""
_TOKENS_A_FRAME = 0.3
"""More than anybody says: a model that has learned little yet babbles on, and would do so to the last position."""

_HIDDEN = 0.3
"""The share of its own letters that a small model does not get to see in training: with all of them it learns the sentences
by heart, and listens late or never."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a model reads and how much it can write: mel bins, positions of 20 ms, positions of tokens."""

    bins: int
    source_positions: int
    target_positions: int

    @property
    def frames(self) -> int:
        """The frames that the encoder wants, no more and no less."""
        return 2 * self.source_positions


@dataclass(frozen=True, kw_only=True)
class Control:
    """The tokens that steer a model, by number. `language` is None where the model knows no German, or one language only."""

    start: int
    end: int
    pad: int
    language: int | None
    task: int | None
    no_timestamps: int | None

    @property
    def prompt(self) -> list[int]:
        """What the decoder is given before the text."""
        tokens = (self.start, self.language, self.task if self.language is not None else None, self.no_timestamps)
        return [token for token in tokens if token is not None]


class WhisperFamily:
    """A Whisper model that writes German, lower-case letters only. Picklable; thread-safe."""

    def __init__(
        self,
        *,
        settings: SpeechSettings,
        shape: Shape,
        control: Control,
        source: Source | None = None,
        configuration: dict[str, Any] | None = None,
    ) -> None:
        self._settings = settings
        self._shape = shape
        self._control = control
        self._source = source
        self._configuration = configuration or {}
        self._forget()

    def _forget(self) -> None:
        self._tokenizer: Any = None
        # A tokenizer of transformers refuses a second thread while a first one is in it.
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_tokenizer", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def describe(self) -> str:
        """One line for people: which model."""
        if self._source is not None:
            return f"{self._source.given} (Whisper)"
        layers, width = self._settings.layers, self._settings.hidden_size
        return f"small Whisper, {layers} + {layers} layers of {width}"

    def features(self, samples: Array) -> Array:
        """Log-mel values of 10 ms frames, without the padding."""
        return whisper_log_mel(samples, self._shape.bins)

    def labels(self, sentence: str) -> list[int]:
        """The tokens of the sentence, and the one that ends it."""
        if self._source is None:
            return [*letters.encode(sentence), self._control.end]
        with self._lock:
            tokens = self._loaded_tokenizer(self._source)(sentence, add_special_tokens=False)["input_ids"]
        return [*tokens, self._control.end]

    def fits(self, labels: list[int], frames: int) -> bool:
        """Whether the encoder has room for the clip, and the decoder for the sentence."""
        written = len(self._control.prompt) - 1 + len(labels)
        return 0 < frames <= self._shape.frames + _EXTRA_FRAMES and written <= self._shape.target_positions

    def collate(self, features: list[Array], labels: list[list[int]]) -> dict[str, torch.Tensor]:
        """`features` (clips, bins, frames) padded with silence, their `lengths`, `tokens` for the decoder, and `labels`."""
        import torch

        count, prompt = len(features), self._control.prompt
        padded = np.empty((count, self._shape.bins, self._shape.frames), dtype=np.float32)
        lengths = np.empty(count, dtype=np.int64)
        width = len(prompt) - 1 + max(len(values) for values in labels)
        read = np.full((count, width), self._control.pad, dtype=np.int64)
        # The prompt is given, never guessed: only what comes after it counts.
        targets = np.full((count, width), -100, dtype=np.int64)
        for row, (values, tokens) in enumerate(zip(features, labels, strict=True)):
            lengths[row] = length = min(len(values), self._shape.frames)
            padded[row, :, :length] = values[:length].T
            padded[row, :, length:] = whisper_silence(values)
            given = [*prompt, *tokens[:-1]]
            read[row, : len(given)] = given
            targets[row, len(prompt) - 1 : len(given)] = tokens
        return {
            "features": torch.from_numpy(padded),
            "lengths": torch.from_numpy(lengths),
            "tokens": torch.from_numpy(read),
            "labels": torch.from_numpy(targets),
        }

    def build(self) -> torch.nn.Module:
        """The model, on the CPU, in training mode, in float32; from a configuration the same one for the same seed."""
        import torch

        torch.manual_seed(self._settings.seed)
        model = self._small() if self._source is None else self._pretrained(self._source)
        self._set_generation(model)
        trainable: torch.nn.Module = model.train()
        return trainable

    def _small(self) -> Any:
        from transformers import WhisperConfig, WhisperForConditionalGeneration

        width, layers = self._settings.hidden_size, self._settings.layers
        return WhisperForConditionalGeneration(
            WhisperConfig(
                vocab_size=len(letters.TOKENS),
                num_mel_bins=self._shape.bins,
                d_model=width,
                encoder_layers=layers,
                decoder_layers=layers,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=2 * width,
                decoder_ffn_dim=2 * width,
                max_source_positions=self._shape.source_positions,
                max_target_positions=self._shape.target_positions,
                decoder_start_token_id=self._control.start,
                pad_token_id=self._control.pad,
                bos_token_id=self._control.end,
                eos_token_id=self._control.end,
                begin_suppress_tokens=None,
            )
        )

    @staticmethod
    def _pretrained(source: Source) -> Any:
        import torch
        from transformers import WhisperForConditionalGeneration

        return source.load(
            lambda name: WhisperForConditionalGeneration.from_pretrained(
                name,
                # Half of a half-precision checkpoint's steps would be rounded away; autocast halves where it is safe.
                dtype=torch.float32,
                # A layer that is left out at random has no gradient, and DDP would wait for it.
                encoder_layerdrop=0.0,
                decoder_layerdrop=0.0,
            )
        )

    def _set_generation(self, model: Any) -> None:
        """Let the model's own `generate` write German, here and where it is loaded from what `save` leaves."""
        control, generation = self._control, model.generation_config
        # It is made to measure now; from this mark `generate` would take it for a guess and ask the configuration instead.
        generation._from_model_config = False
        generation.max_length = self._shape.target_positions
        generation.decoder_start_token_id = control.start
        generation.eos_token_id, generation.pad_token_id = control.end, control.pad
        if control.no_timestamps is not None:
            generation.no_timestamps_token_id = control.no_timestamps
        # The tokens that older models were forced to begin with; language and task say the same, and more.
        generation.forced_decoder_ids = None
        if control.language is None:
            generation.is_multilingual = False
            return
        generation.is_multilingual = True
        generation.lang_to_id = {**(getattr(generation, "lang_to_id", None) or {}), letters.LANGUAGE: control.language}
        generation.task_to_id = {**(getattr(generation, "task_to_id", None) or {}), "transcribe": control.task}
        generation.language, generation.task = "de", "transcribe"

    def loss(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Cross entropy: the mean over a clip's tokens, then over the clips, so that it is no matter who has which."""
        import torch

        tokens, labels = batch["tokens"], batch["labels"]
        if self._source is None and model.training:
            hidden = torch.rand(tokens.shape, device=tokens.device) < _HIDDEN
            hidden[:, : len(self._control.prompt)] = False
            tokens = tokens.masked_fill(hidden, letters.IDS[letters.HIDDEN])
        output = model(input_features=batch["features"], decoder_input_ids=tokens, use_cache=False)
        each = torch.nn.functional.cross_entropy(output.logits.transpose(1, 2), labels, reduction="none")
        return (each.sum(dim=1) / (labels != -100).sum(dim=1)).mean()

    def transcribe(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> list[str]:
        """What the bare model writes, always the likeliest token, as its own `generate` does. Leaves its mode alone."""
        import torch

        # Not `generate` itself: for one short greedy pass it costs as much as the model, and warns of what is meant so.
        bare: Any = model
        control, generation = self._control, bare.generation_config
        silent = list(generation.suppress_tokens or ())
        silent_first = [*silent, *(generation.begin_suppress_tokens or ())]
        room = self._shape.target_positions - len(control.prompt)
        plausible = 16 + math.ceil(_TOKENS_A_FRAME * int(batch["lengths"].max()))
        features = batch["features"]
        with torch.inference_mode():
            heard = bare.get_encoder()(features)
            read = torch.tensor([control.prompt], device=features.device).expand(len(features), -1)
            done = torch.zeros(len(features), dtype=torch.bool, device=features.device)
            past, written = None, []
            for step in range(min(room, plausible)):
                output = bare(encoder_outputs=heard, decoder_input_ids=read, past_key_values=past, use_cache=True)
                past, scores = output.past_key_values, output.logits[:, -1].float()
                scores[:, silent if step else silent_first] = -torch.inf
                best = scores.argmax(dim=-1).masked_fill(done, control.end)
                written.append(best)
                done |= best == control.end
                if bool(done.all()):
                    break
                read = best[:, None]
        return [self._text(tokens) for tokens in torch.stack(written, dim=1).tolist()]

    def _text(self, tokens: list[int]) -> str:
        if self._source is None:
            return text.normalise(letters.decode(tokens))
        with self._lock:
            written: str = self._loaded_tokenizer(self._source).decode(tokens, skip_special_tokens=True)
        return text.normalise(written)

    def save(self, model: torch.nn.Module, target: Place) -> list[str]:
        """Write the model as `WhisperForConditionalGeneration` and `AutoProcessor` load it; gives the names of the files."""
        from transformers import WhisperFeatureExtractor

        saved: Any = model

        def fill(folder: str) -> None:
            if self._source is None:
                letters.tokenizer().save_pretrained(folder)
                seconds = self._shape.frames // _FRAMES_A_SECOND
                WhisperFeatureExtractor(feature_size=self._shape.bins, chunk_length=seconds).save_pretrained(folder)
            else:
                with self._lock:
                    self._loaded_tokenizer(self._source).save_pretrained(folder)
                self._source.extractor().save_pretrained(folder)
            saved.save_pretrained(folder, safe_serialization=True)

        return write_folder(target, fill)

    def configuration(self) -> dict[str, Any]:
        """What the model card tells of the model, as plain values."""
        small = {
            "encoder_layers": self._settings.layers,
            "d_model": self._settings.hidden_size,
            "vocab_size": len(letters.TOKENS),
        }
        shown = small if self._source is None else self._configuration
        return {
            "family": "whisper",
            "model_type": MODEL_TYPE,
            "auto_class": "WhisperForConditionalGeneration",
            "layers": shown.get("encoder_layers"),
            "hidden_size": shown.get("d_model"),
            "labels": shown.get("vocab_size"),
            "longest_seconds": self._shape.frames / _FRAMES_A_SECOND,
        }

    def _loaded_tokenizer(self, source: Source) -> Any:
        if self._tokenizer is None:
            self._tokenizer = source.tokenizer()
        return self._tokenizer


def small(settings: SpeechSettings) -> WhisperFamily:
    """The small one that is built from a configuration: letters, and an encoder as long as `max_seconds`."""
    return WhisperFamily(
        settings=settings,
        shape=Shape(
            bins=MEL_BINS,
            # Whisper's extractor counts in whole seconds.
            source_positions=max(1, math.ceil(settings.max_seconds)) * _FRAMES_A_SECOND // 2,
            target_positions=_TARGET_POSITIONS,
        ),
        control=Control(
            start=letters.IDS[letters.START],
            end=letters.IDS[letters.END],
            pad=letters.IDS[letters.END],
            language=letters.IDS[letters.LANGUAGE],
            task=letters.IDS[letters.TASK],
            no_timestamps=letters.IDS[letters.NO_TIMESTAMPS],
        ),
    )


def pretrained(settings: SpeechSettings, source: Source, configuration: dict[str, Any]) -> WhisperFamily:
    """The one of `source`, whose `config.json` says `configuration`."""
    from transformers import WhisperConfig

    values = source.load(lambda _: WhisperConfig.from_dict(configuration))
    extractor, tokenizer = source.extractor(), source.tokenizer()
    read = {name: getattr(extractor, name, None) for name in ("sampling_rate", "hop_length", "n_fft", "feature_size")}
    usual = {"sampling_rate": SAMPLE_RATE, "hop_length": 160, "n_fft": 400, "feature_size": values.num_mel_bins}
    if read != usual:
        raise UsageError(
            f"{source.given} reads other features than Whisper's: {read}",
            next_step="give a model with Whisper's own processor",
        )
    vocabulary = tokenizer.get_vocab()
    language, task = vocabulary.get(letters.LANGUAGE), vocabulary.get(letters.TASK)
    if task is None or not source.generation().get("is_multilingual", True):
        language = None
    return WhisperFamily(
        settings=settings,
        shape=Shape(
            bins=values.num_mel_bins,
            source_positions=values.max_source_positions,
            target_positions=values.max_target_positions,
        ),
        control=Control(
            start=values.decoder_start_token_id,
            end=tokenizer.eos_token_id,
            pad=values.pad_token_id if values.pad_token_id is not None else tokenizer.eos_token_id,
            language=language,
            task=task,
            no_timestamps=vocabulary.get(letters.NO_TIMESTAMPS),
        ),
        source=source,
        configuration=values.to_dict(),
    )
