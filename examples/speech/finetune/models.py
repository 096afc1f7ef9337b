"""The two model families, through Hugging Face's classes: Wav2Vec2-BERT (CTC) and Whisper.

Each class has what differs between them: features and labels (its preprocessor), batches, the model, and how it transcribes.
Without a model's name they build a small one that learns the sample clips in minutes on a CPU.
"""

from __future__ import annotations

import json
import math
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    GenerationConfig,
    SeamlessM4TFeatureExtractor,
    Wav2Vec2BertConfig,
    Wav2Vec2BertForCTC,
    Wav2Vec2BertProcessor,
    Wav2Vec2CTCTokenizer,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

from millrace import MillraceFileSystem
from millrace.errors import UsageError

from .options import Settings
from .preprocessing import LETTERS, SAMPLE_RATE, Preprocessor

Inputs = dict[str, torch.Tensor]


class SpeechModel(ABC):
    """What both families share. Picklable: it travels to the training workers."""

    processor: Any
    preprocessor: Preprocessor

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @abstractmethod
    def collate(self, features: list[np.ndarray], labels: list[np.ndarray]) -> Inputs:
        """A padded batch: the keyword arguments of the forward pass."""

    @abstractmethod
    def build(self) -> Any:
        """The model on the CPU in float32. Small models are the same for the same seed."""

    def loss(self, model: Any, inputs: Inputs) -> torch.Tensor:
        """The training loss of a batch. `model` may be wrapped in DDP."""
        loss: torch.Tensor = model(**inputs).loss
        return loss

    @abstractmethod
    def transcribe(self, model: Any, inputs: Inputs) -> list[str]:
        """What the unwrapped model writes for each clip of a batch."""

    def spare_batch(self) -> Inputs:
        """One second of silence, for a worker without clips in a step that others still make."""
        labels = np.asarray(self.preprocessor.labels("a"), dtype=np.int64)
        return self.collate([self.preprocessor.features(np.zeros(SAMPLE_RATE, dtype=np.float32))], [labels])

    def save(self, model: Any, fs: MillraceFileSystem, url: str) -> None:
        """Store model and processor below `url`, as `from_pretrained` reads them."""
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            self.processor.save_pretrained(folder)
            for file in Path(folder).iterdir():
                fs.pipe_file(f"{url}/{file.name}", file.read_bytes())


def speech_model(settings: Settings) -> SpeechModel:
    """The family that the settings name. Loads the small files of a pretrained model, not its weights."""
    if settings.model is None:
        return CtcModel(settings) if settings.family == "ctc" else WhisperModel(settings)
    try:
        kind = AutoConfig.from_pretrained(settings.model).model_type
        families = {"wav2vec2-bert": CtcModel, "whisper": WhisperModel}
        if kind in families:
            return families[kind](settings)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{settings.model}: cannot be loaded ({reason})", next_step="check its name") from error
    raise UsageError(
        f"{settings.model}: models of type {kind} are not supported", next_step="choose Whisper or Wav2Vec2-BERT"
    )


class CtcModel(SpeechModel):
    """Wav2Vec2-BERT, which writes one letter (or nothing) for each frame of 20 ms."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        extractor = (
            SeamlessM4TFeatureExtractor()
            if settings.model is None
            else SeamlessM4TFeatureExtractor.from_pretrained(settings.model)
        )
        tokenizer = _letter_tokenizer()
        self.processor = Wav2Vec2BertProcessor(extractor, tokenizer)
        shape = (-1, extractor.feature_size * extractor.stride)
        self.preprocessor = Preprocessor(extractor=extractor, tokenizer=tokenizer, feature_shape=shape)

    def collate(self, features: list[np.ndarray], labels: list[np.ndarray]) -> Inputs:
        """`input_features` (clips, frames, values), `attention_mask` and `labels`, padded at the end."""
        return {
            "input_features": pad_sequence([torch.tensor(clip) for clip in features], batch_first=True),
            "attention_mask": pad_sequence([torch.ones(len(clip), dtype=torch.long) for clip in features], True),
            "labels": pad_sequence([torch.tensor(clip) for clip in labels], True, padding_value=-100),
        }

    def build(self) -> Any:
        """The model with a head for the letters of German."""
        torch.manual_seed(self.settings.seed)
        tokenizer = self.processor.tokenizer
        head = {
            "vocab_size": len(tokenizer),
            "pad_token_id": tokenizer.pad_token_id,
            "ctc_loss_reduction": "mean",
            "ctc_zero_infinity": True,
            # DDP would wait for the gradient of a layer that is skipped at random.
            "layerdrop": 0.0,
        }
        if self.settings.model is not None:
            # transformers makes a new head if this vocabulary is not the one the model was trained with.
            return Wav2Vec2BertForCTC.from_pretrained(
                self.settings.model, dtype=torch.float32, ignore_mismatched_sizes=True, **head
            )
        model = Wav2Vec2BertForCTC(
            Wav2Vec2BertConfig(
                hidden_size=self.settings.hidden_size,
                num_hidden_layers=self.settings.layers,
                num_attention_heads=4,
                intermediate_size=2 * self.settings.hidden_size,
                feature_projection_input_dim=self.preprocessor.feature_shape[1],
                conv_depthwise_kernel_size=15,
                # Regularisation only slows down a model that is too small to overfit.
                apply_spec_augment=False,
                conformer_conv_dropout=0.0,
                final_dropout=0.0,
                **head,
            )
        )
        # Without SpecAugment nothing uses this parameter, and DDP would wait for its gradient.
        model.wav2vec2_bert.masked_spec_embed.requires_grad_(False)
        return model

    def transcribe(self, model: Any, inputs: Inputs) -> list[str]:
        """The likeliest letter of each frame; the tokenizer merges repetitions."""
        mask = inputs["attention_mask"]
        with torch.no_grad():
            letters = model(input_features=inputs["input_features"], attention_mask=mask).logits.argmax(dim=-1).cpu()
        lengths = model._get_feat_extract_output_lengths(mask.sum(dim=1)).tolist()
        for clip, length in zip(letters, lengths, strict=True):
            clip[length:] = self.processor.tokenizer.pad_token_id
        texts: list[str] = self.processor.batch_decode(letters)
        return texts


class WhisperModel(SpeechModel):
    """Whisper: the encoder reads clips of a fixed length, and the decoder writes one token after another."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        if settings.model is None:
            extractor = WhisperFeatureExtractor(chunk_length=math.ceil(settings.max_seconds))
            self.processor = WhisperProcessor(extractor, _small_whisper_tokenizer())
        else:
            self.processor = WhisperProcessor.from_pretrained(settings.model, language="german", task="transcribe")
            extractor = self.processor.feature_extractor
        self.preprocessor = Preprocessor(
            extractor=extractor,
            tokenizer=self.processor.tokenizer,
            feature_shape=(extractor.feature_size, extractor.nb_max_frames),
            max_labels=448,
            skipped_labels=1,  # the start token, which the model adds itself
        )

    def collate(self, features: list[np.ndarray], labels: list[np.ndarray]) -> Inputs:
        """`input_features` (clips, bins, frames) and `labels`, padded at the end."""
        return {
            "input_features": torch.tensor(np.stack(features)),
            "labels": pad_sequence([torch.tensor(clip) for clip in labels], True, padding_value=-100),
        }

    def build(self) -> Any:
        """The model, set to write German."""
        torch.manual_seed(self.settings.seed)
        if self.settings.model is not None:
            # DDP would wait for the gradient of a layer that is skipped at random.
            model = WhisperForConditionalGeneration.from_pretrained(
                self.settings.model, dtype=torch.float32, encoder_layerdrop=0.0, decoder_layerdrop=0.0
            )
            model.generation_config.forced_decoder_ids = None
            model.generation_config.language, model.generation_config.task = "german", "transcribe"
            return model
        width, layers, ids = self.settings.hidden_size, self.settings.layers, self.processor.tokenizer.get_vocab()
        end = ids["<|endoftext|>"]
        special = {
            "decoder_start_token_id": ids["<|startoftranscript|>"],
            "bos_token_id": end,
            "eos_token_id": end,
            "pad_token_id": end,
        }
        model = WhisperForConditionalGeneration(
            WhisperConfig(
                vocab_size=len(self.processor.tokenizer),
                d_model=width,
                encoder_layers=layers,
                decoder_layers=layers,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=2 * width,
                decoder_ffn_dim=2 * width,
                max_source_positions=self.preprocessor.feature_shape[1] // 2,
                begin_suppress_tokens=None,
                **special,
            )
        )
        model.generation_config = GenerationConfig(
            is_multilingual=True,
            lang_to_id={"<|de|>": ids["<|de|>"]},
            task_to_id={"transcribe": ids["<|transcribe|>"]},
            no_timestamps_token_id=ids["<|notimestamps|>"],
            language="german",
            task="transcribe",
            max_length=448,
            **special,
        )
        return model

    def loss(self, model: Any, inputs: Inputs) -> torch.Tensor:
        """The loss; a small model does not see 30 % of its own letters, so that it listens instead of memorising."""
        if self.settings.model is not None:
            return super().loss(model, inputs)
        tokenizer, labels = self.processor.tokenizer, inputs["labels"]
        start = torch.full_like(labels[:, :1], tokenizer.convert_tokens_to_ids("<|startoftranscript|>"))
        given = torch.cat([start, labels[:, :-1]], dim=1).masked_fill_(
            torch.cat([start, labels[:, :-1]], dim=1) == -100, tokenizer.pad_token_id
        )
        hidden = (torch.rand(given.shape, device=given.device) < 0.3) & (given < len(_WHISPER_LETTERS))
        given = given.masked_fill(hidden, tokenizer.convert_tokens_to_ids("<|startofprev|>"))
        return super().loss(model, {**inputs, "decoder_input_ids": given})

    def transcribe(self, model: Any, inputs: Inputs) -> list[str]:
        """Greedy decoding. A model that has learned little repeats itself, so its output is limited."""
        longest = inputs["labels"].shape[1] + 16
        with torch.no_grad():
            tokens = model.generate(inputs["input_features"], max_new_tokens=min(longest, 440), do_sample=False)
        texts: list[str] = self.processor.batch_decode(tokens, skip_special_tokens=True)
        return texts


def _letter_tokenizer() -> Wav2Vec2CTCTokenizer:
    """The alphabet is fixed, not collected from the data: resumed runs and other splits have the same labels."""
    vocabulary = {token: index for index, token in enumerate(("<pad>", "<unk>", "|", *LETTERS))}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "vocab.json")
        file.write_text(json.dumps(vocabulary), encoding="utf-8")
        return Wav2Vec2CTCTokenizer(
            str(file), pad_token="<pad>", unk_token="<unk>", word_delimiter_token="|", bos_token=None, eos_token=None
        )


# Whisper's tokenizer works on bytes, which it writes as visible characters: "Ġ" is a space, and an umlaut has two bytes.
_WHISPER_LETTERS = (*"abcdefghijklmnopqrstuvwxyz", "Ġ", "Ã", "¤", "¶", "¼", "Ł")


def _small_whisper_tokenizer() -> WhisperTokenizer:
    """A tokenizer with one token per byte of a German letter, and Whisper's control tokens in Whisper's order."""
    control = ["<|startoftranscript|>", "<|en|>", "<|zh|>", "<|de|>", "<|translate|>", "<|transcribe|>"]
    return WhisperTokenizer(
        vocab={token: index for index, token in enumerate(_WHISPER_LETTERS)},
        merges=[],
        pad_token="<|endoftext|>",
        extra_special_tokens=[*control, "<|startofprev|>", "<|notimestamps|>"],
        language="german",
        task="transcribe",
    )
