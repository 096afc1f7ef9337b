"""Families of speech models: from a configuration, a folder or the hub; trained a step, saved, loaded by transformers."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs
import pytest

from millrace.demo.place import Place
from millrace.demo.speech import text
from millrace.demo.speech.audio import SAMPLE_RATE, Array, log_mel, whisper_log_mel, whisper_silence
from millrace.demo.speech.families import letters
from millrace.demo.speech.families.choosing import family_of
from millrace.demo.speech.families.ctc import MODEL_TYPES, Shrinking, pretrained
from millrace.demo.speech.families.pretrained import Source
from millrace.demo.speech.families.protocol import Family
from millrace.demo.speech.settings import FAMILIES, SpeechSettings
from millrace.errors import RetryableError, UsageError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SETTINGS = SpeechSettings(data_url="s3://b/cv", run_url="s3://b/run", hidden_size=32, layers=1, max_seconds=2.0)
SENTENCES = ["ja", "über größe und maß"]

# Small ones, and no dropout, so that one step is enough to compare.
CTC_TINY: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 20,
    "conv_dim": (16, 16, 16), "conv_kernel": (10, 5, 4), "conv_stride": (8, 5, 4), "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "mask_time_length": 2, "layerdrop": 0.9,
}  # fmt: skip
CTC_OWN: dict[str, dict[str, Any]] = {
    "wav2vec2-bert": {"feature_projection_input_dim": 160, "add_adapter": True, "num_adapter_layers": 1},
    "wav2vec2-conformer": {"add_adapter": True, "num_adapter_layers": 1, "adapter_stride": 3, "output_hidden_size": 32},
    "sew": {"squeeze_factor": 2},
    "sew-d": {"squeeze_factor": 2, "position_buckets": 8, "max_position_embeddings": 64},
    "data2vec-audio": {"conv_pos_kernel_size": 5, "num_conv_pos_embeddings": 2},
    "wavlm": {"num_buckets": 16, "max_bucket_distance": 32},
}


@pytest.fixture(autouse=True)
def quiet_torch() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)


def samples(seconds: float, seed: int = 0) -> Array:
    time = np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    noise = np.random.default_rng(seed).normal(0, 0.02, len(time))
    return (0.3 * np.sin(2 * np.pi * (200 + 100 * seed + 300 * time) * time) + noise).astype(np.float32)


def batch_of(family: Family, sentences: list[str] = SENTENCES) -> dict[str, Any]:
    return family.collate(
        [family.features(samples(1.0 + 0.5 * index, index)) for index in range(len(sentences))],
        [family.labels(sentence) for sentence in sentences],
    )


def ctc_folder(folder: Path, kind: str, **changes: Any) -> Path:
    values = {**CTC_TINY, **CTC_OWN.get(kind, {}), **changes}
    config = transformers.AutoConfig.for_model(kind, **values)
    torch.manual_seed(0)
    transformers.AutoModelForCTC.from_config(config).save_pretrained(folder)
    extractor = (
        transformers.SeamlessM4TFeatureExtractor()
        if kind == "wav2vec2-bert"
        else transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True)
    )
    extractor.save_pretrained(folder)
    return folder


def whisper_folder(folder: Path, *, vocabulary: Callable[[dict[str, int]], dict[str, int]] | None = None) -> Path:
    """A tiny Whisper that was not made here: with capitals in its vocabulary, and what OpenAI's own configurations have."""
    signs = [*"abcdefghijklmnopqrstuvwxyzABCD.,", "Ġ", "Ã", "¤", "¶", "¼", "Ł", "en", "ch"]
    control = [
        letters.START,
        "<|en|>",
        "<|zh|>",
        letters.LANGUAGE,
        "<|translate|>",
        letters.TASK,
        letters.NO_TIMESTAMPS,
    ]
    tokenizer = transformers.WhisperTokenizer(
        vocab={sign: index for index, sign in enumerate(signs)},
        merges=[("e", "n"), ("c", "h")],
        extra_special_tokens=control,
        pad_token=letters.END,
    )
    ids = tokenizer.get_vocab()
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer), d_model=32, encoder_layers=2, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=100, num_mel_bins=128,
        max_target_positions=60, decoder_start_token_id=ids[letters.START], pad_token_id=ids[letters.END],
        bos_token_id=ids[letters.END], eos_token_id=ids[letters.END], begin_suppress_tokens=None,
        encoder_layerdrop=0.9, decoder_layerdrop=0.9,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config)
    # Letters are all that it is allowed: one that has learned nothing may have nothing to say otherwise.
    model.generation_config.suppress_tokens = [
        token for sign, token in ids.items() if not set(sign) <= {"Ġ", *"abcdefghijklmnopqrstuvwxyz"}
    ]
    model.generation_config.begin_suppress_tokens = [ids["Ġ"], ids[letters.END]]
    # As in the folders of the first Whispers: it would begin in English.
    model.generation_config.forced_decoder_ids = [[1, ids["<|en|>"]], [2, ids["<|translate|>"]]]
    model.generation_config._from_model_config = False
    model.to(torch.float16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=2).save_pretrained(folder)
    return folder


def shaken(model: Any) -> Any:
    """A model that has something to say: a fresh one repeats one sign."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def learns(family: Family) -> Any:
    """A model after a step in training mode. Everything that is trained had a gradient, as DDP wants it."""
    model: Any = family.build()
    assert model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    loss = family.loss(model, batch_of(family))
    assert loss.ndim == 0
    assert torch.isfinite(loss)
    loss.backward()
    silent = [name for name, values in model.named_parameters() if values.requires_grad and values.grad is None]
    assert silent == []
    return model


def saved(family: Family, model: Any, folder: Path) -> list[str]:
    return family.save(model, Place(fs=pyarrow.fs.LocalFileSystem(), url=str(folder)))


# --- every family -----------------------------------------------------------------------------------


@pytest.fixture(params=FAMILIES)
def small(request: pytest.FixtureRequest) -> Family:
    return family_of(replace(SETTINGS, family=request.param))


def test_a_small_one_is_the_same_for_the_same_seed(small: Family) -> None:
    first, second = small.build().state_dict(), pickle.loads(pickle.dumps(small)).build().state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = family_of(replace(SETTINGS, family=small.configuration()["family"], seed=8)).build().state_dict()
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_a_small_one_says_what_it_is(small: Family) -> None:
    assert "small W" in small.describe()
    assert "32" in small.describe()
    assert small.configuration()["hidden_size"] == 32
    assert json.loads(json.dumps(small.configuration())) == small.configuration()


def test_a_family_that_has_worked_travels_small(small: Family) -> None:
    small.labels("ja")
    small.features(samples(0.5))
    assert len(pickle.dumps(small)) < 4096


def test_a_small_one_learns_one_batch_by_heart(small: Family) -> None:
    torch.manual_seed(0)
    model = learns(small)
    batch = batch_of(small)
    optimizer = torch.optim.AdamW([values for values in model.parameters() if values.requires_grad], lr=5e-3)
    for step in range(300):
        loss = small.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 19 and small.transcribe(model.eval(), batch) == SENTENCES:
            break
        model.train()
    assert small.transcribe(model.eval(), batch) == SENTENCES
    # What a clip is heard as does not depend on the clips beside it.
    alone = small.collate([small.features(samples(1.0, 0))], [small.labels("ja")])
    assert small.transcribe(model, alone) == SENTENCES[:1]


def test_the_loss_is_a_mean_over_clips(small: Family) -> None:
    model = small.build().eval()
    features = [small.features(samples(1.0, seed)) for seed in range(3)]
    labels = [small.labels(sentence) for sentence in ("eins", "zwei und drei", "vier")]

    def loss(chosen: slice) -> float:
        with torch.no_grad():
            return float(small.loss(model, small.collate(features[chosen], labels[chosen])))

    assert loss(slice(0, 3)) == pytest.approx((loss(slice(0, 1)) + 2 * loss(slice(1, 3))) / 3, rel=1e-4)


def test_hearing_leaves_the_mode_alone(small: Family) -> None:
    model = small.build()
    for mode in (True, False):
        model.train(mode)
        assert len(small.transcribe(model, batch_of(small))) == 2
        assert model.training is mode


def test_nothing_is_said_of_a_clip_that_is_empty(small: Family) -> None:
    assert len(small.features(samples(0.0))) == 0
    assert not small.fits(small.labels("ja"), 0)


def test_threads_share_a_family(small: Family, tmp_path: Path) -> None:
    saved(small, small.build(), tmp_path)
    loaded = family_of(replace(SETTINGS, model=str(tmp_path)))
    sentences = ["eins", "zwei", "größe", "fünf und sechs"] * 25
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(loaded.labels, sentences)) == [small.labels(sentence) for sentence in sentences]


def test_what_is_saved_is_a_model_to_go_on_with(small: Family, tmp_path: Path) -> None:
    model = shaken(small.build())
    names = saved(small, model, tmp_path / "model")
    assert {"config.json", "model.safetensors", "preprocessor_config.json", "tokenizer_config.json"} <= set(names)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == names
    again = family_of(replace(SETTINGS, model=str(tmp_path / "model")))
    assert str(tmp_path / "model") in again.describe()
    assert again.configuration() == small.configuration()
    loaded = again.build()
    assert all(torch.equal(values, loaded.state_dict()[name]) for name, values in model.state_dict().items())
    ours, theirs = batch_of(small), batch_of(again)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert again.transcribe(loaded.eval(), theirs) == small.transcribe(model, ours)
    assert saved(again, loaded, tmp_path / "again") == names


def test_transformers_hears_the_same_in_what_is_saved(small: Family, tmp_path: Path) -> None:
    model = shaken(small.build())
    if small.configuration()["family"] == "whisper":
        # One that has learned nothing may have nothing to say, unless letters are all it is allowed.
        model.generation_config.suppress_tokens = [
            token for sign, token in letters.IDS.items() if sign not in tuple(text.LETTERS)
        ]
    saved(small, model, tmp_path)
    processor = transformers.AutoProcessor.from_pretrained(tmp_path)
    clip = samples(1.0)
    heard = small.transcribe(model, small.collate([small.features(clip)], [small.labels("ja")]))[0]
    inputs = processor(clip, sampling_rate=SAMPLE_RATE, return_tensors="pt")
    if small.configuration()["family"] == "ctc":
        labels = transformers.AutoModelForCTC.from_pretrained(tmp_path)(**inputs).logits.argmax(dim=-1)
        written = processor.batch_decode(labels)[0].replace(text.UNKNOWN, "")
    else:
        loaded = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path)
        written = processor.batch_decode(loaded.generate(**inputs, max_new_tokens=40), skip_special_tokens=True)[0]
        heard = heard[: len(text.normalise(written))]
    assert len(heard) > 2
    assert text.normalise(written) == heard


# --- CTC --------------------------------------------------------------------------------------------


def test_ctc_labels_are_letters_and_need_frames() -> None:
    family = family_of(SETTINGS)
    labels = family.labels("alle")
    assert labels == text.encode("alle")
    assert not family.fits(labels, 4)
    assert family.fits(labels, 5)


def test_ctc_batches_are_padded_and_masked() -> None:
    batch = batch_of(family_of(SETTINGS))
    lengths = [len(log_mel(samples(1.0))), len(log_mel(samples(1.5)))]
    assert batch["mask"].sum(dim=1).tolist() == lengths
    assert batch["features"].shape == (2, lengths[1], 160)
    assert not batch["features"][0, lengths[0] :].any()
    assert batch["labels"].tolist()[0] == [*text.encode("ja"), *[-100] * (len(SENTENCES[1]) - 2)]


# WavLM hands torch two kinds of masks.
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning")
@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_ctc_models_of_every_type_learn(kind: str, tmp_path: Path) -> None:
    family = family_of(replace(SETTINGS, model=str(ctc_folder(tmp_path, kind))))
    assert kind in family.describe()
    model = learns(family)
    # The head is new, whatever it was, and speaks this alphabet.
    assert model.config.vocab_size == model.lm_head.out_features == len(text.SYMBOLS)
    assert len(family.transcribe(model.eval(), batch_of(family))) == 2


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_ctc_output_is_as_long_as_reckoned(kind: str, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(kind, **{**CTC_TINY, **CTC_OWN.get(kind, {})})
    with torch.device("meta"):
        model = transformers.AutoModelForCTC.from_config(config)
    shrinking = Shrinking.of(kind, config)
    base = getattr(model, model.base_model_prefix)
    for frames in (400, 1000, 16_001):
        assert shrinking.frames(frames) == int(base._get_feat_extract_output_lengths(torch.tensor(frames)))


def test_a_clip_must_be_long_enough_for_the_frames_that_a_wave_model_makes(tmp_path: Path) -> None:
    family = family_of(replace(SETTINGS, model=str(ctc_folder(tmp_path, "wav2vec2"))))
    second = family.features(samples(1.0))
    assert second.shape == (SAMPLE_RATE, 1)
    assert abs(float(second.mean())) < 1e-3
    frames = Shrinking(convolutions=((10, 8), (5, 5), (4, 4))).frames(SAMPLE_RATE)
    assert family.fits([3, 4] * (frames // 2), SAMPLE_RATE)
    assert not family.fits([3, 4] * (frames // 2 + 1), SAMPLE_RATE)


def test_a_clip_must_be_longer_than_what_training_hides_of_it(tmp_path: Path) -> None:
    folder = ctc_folder(tmp_path, "wav2vec2", mask_time_length=30)
    family = family_of(replace(SETTINGS, model=str(folder)))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "apply_spec_augment": False}))
    unmasked = family_of(replace(SETTINGS, model=str(folder)))
    shrinking = Shrinking(convolutions=((10, 8), (5, 5), (4, 4)))
    short = next(frames for frames in range(SAMPLE_RATE) if shrinking.frames(frames) == 30)
    long = next(frames for frames in range(SAMPLE_RATE) if shrinking.frames(frames) == 31)
    assert (family.fits([3], short), family.fits([3], long), unmasked.fits([3], short)) == (False, True, True)


def test_a_model_that_is_not_told_of_padding_is_not_told(tmp_path: Path) -> None:
    folder = ctc_folder(tmp_path, "wav2vec2", feat_extract_norm="group")
    transformers.Wav2Vec2FeatureExtractor(return_attention_mask=False).save_pretrained(folder)
    seen: dict[str, Any] = {}
    family = family_of(replace(SETTINGS, model=str(folder)))
    model = family.build()
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    family.loss(model, batch_of(family))
    assert seen["attention_mask"] is None


def test_a_head_with_as_many_other_labels_is_made_anew(tmp_path: Path) -> None:
    folder = ctc_folder(tmp_path, "wav2vec2", vocab_size=len(text.SYMBOLS))
    before = transformers.AutoModelForCTC.from_pretrained(folder)
    after = family_of(replace(SETTINGS, model=str(folder))).build()
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)
    body = "wav2vec2.encoder.layers.0.attention.q_proj.weight"
    assert torch.equal(before.state_dict()[body], after.state_dict()[body])


def test_a_head_of_the_hub_that_speaks_this_alphabet_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ctc_folder(tmp_path, "wav2vec2", vocab_size=len(text.SYMBOLS))
    vocabulary = tmp_path / "vocab.json"
    vocabulary.write_text(json.dumps(text.LABELS), encoding="utf-8")
    # With a beginning and an end of its own, as most have.
    transformers.Wav2Vec2CTCTokenizer(
        str(vocabulary), pad_token=text.BLANK, unk_token=text.UNKNOWN, word_delimiter_token=text.WORD_BORDER
    ).save_pretrained(folder)
    before = transformers.AutoModelForCTC.from_pretrained(folder)
    # As the hub has it: transformers finds it by its name, and nothing lies below that in the working directory.
    monkeypatch.setattr(Source, "load", lambda source, load: load(str(folder)))
    configuration = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    family = pretrained(replace(SETTINGS, model="someone/ours"), Source(given="someone/ours"), configuration)
    assert torch.equal(before.lm_head.weight, family.build().lm_head.weight)


# --- Whisper ----------------------------------------------------------------------------------------


def test_letters_are_the_tokens_of_the_tokenizer() -> None:
    tokenizer = letters.tokenizer()
    assert tokenizer.get_vocab() == letters.IDS
    sentence = f"über größe maß äh {text.LETTERS}"
    tokens = letters.encode(sentence)
    assert len(tokens) == len(sentence)
    assert tokenizer(sentence, add_special_tokens=False)["input_ids"] == tokens
    whole = tokenizer(sentence)["input_ids"]
    prompt = [letters.IDS[token] for token in (letters.START, letters.LANGUAGE, letters.TASK, letters.NO_TIMESTAMPS)]
    assert whole == [*prompt, *tokens, letters.IDS[letters.END]]
    assert letters.decode(whole) == tokenizer.decode(whole, skip_special_tokens=True) == sentence


def test_whisper_is_given_the_prompt_and_learns_what_follows() -> None:
    family = family_of(replace(SETTINGS, family="whisper"))
    batch = batch_of(family)
    prompt, end = [37, 40, 42, 44], letters.IDS[letters.END]
    tokens = letters.encode("ja")
    assert [letters.TOKENS[token] for token in prompt] == [
        letters.START, letters.LANGUAGE, letters.TASK, letters.NO_TIMESTAMPS,
    ]  # fmt: skip
    assert family.labels("ja") == [*tokens, end]
    assert batch["tokens"][0].tolist()[:7] == [*prompt, *tokens, end]
    assert batch["labels"][0].tolist()[:7] == [-100, -100, -100, *tokens, end, -100]
    assert batch["features"].shape == (2, 80, 200)
    clip = whisper_log_mel(samples(1.0))
    assert batch["lengths"][0] == len(clip)
    assert torch.equal(batch["features"][0, :, : len(clip)], torch.from_numpy(clip.T))
    assert set(batch["features"][0, :, len(clip) :].flatten().tolist()) == {np.float32(whisper_silence(clip))}


def test_a_small_whisper_is_shown_most_letters_in_training_and_all_of_them_later() -> None:
    family = family_of(replace(SETTINGS, family="whisper"))
    sentence = "a" * 200
    batch = family.collate([family.features(samples(1.0))], [family.labels(sentence)])
    model: Any = family.build()
    seen: dict[str, Any] = {}
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    torch.manual_seed(0)
    family.loss(model, batch)
    shown = seen["decoder_input_ids"][0]
    hidden = (shown == letters.IDS[letters.HIDDEN]).tolist()
    assert 30 < sum(hidden) < 90
    assert torch.equal(shown[:4], batch["tokens"][0, :4])
    assert [token for token, out in zip(shown.tolist(), hidden, strict=True) if not out][4:] == [1] * (
        200 - sum(hidden)
    )
    family.loss(model.eval(), batch)
    assert torch.equal(seen["decoder_input_ids"], batch["tokens"])


@pytest.mark.parametrize("max_seconds", [2.0, 1.2])
def test_a_clip_as_long_as_allowed_fits(max_seconds: float) -> None:
    family = family_of(replace(SETTINGS, family="whisper", max_seconds=max_seconds))
    features = family.features(samples(max_seconds))
    labels = family.labels("ja")
    assert family.fits(labels, len(features))
    assert family.collate([features], [labels])["features"].shape[-1] == 200
    assert not family.fits(labels, len(family.features(samples(2.02))))
    assert not family.fits(family.labels("a" * 500), len(features))


def test_a_whisper_from_elsewhere_learns_german(tmp_path: Path) -> None:
    family = family_of(replace(SETTINGS, model=str(whisper_folder(tmp_path / "given"))))
    assert family.features(samples(0.5)).shape[1] == 128
    vocabulary = transformers.AutoTokenizer.from_pretrained(tmp_path / "given").get_vocab()
    assert family.labels("ich renne") == [
        *(vocabulary[token] for token in ("i", "ch", "Ġ", "r", "en", "n", "e")), vocabulary[letters.END],
    ]  # fmt: skip
    prompt = [vocabulary[token] for token in (letters.START, letters.LANGUAGE, letters.TASK, letters.NO_TIMESTAMPS)]
    assert batch_of(family)["tokens"][0].tolist()[:4] == prompt
    model = shaken(learns(family))
    saved(family, model, tmp_path / "model")
    loaded = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / "model")
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "model")
    clip = samples(1.0)
    inputs = processor(clip, sampling_rate=SAMPLE_RATE, return_tensors="pt")
    tokens = loaded.generate(**inputs, max_new_tokens=20, return_dict_in_generate=True)["sequences"]
    written = processor.batch_decode(tokens, skip_special_tokens=True)[0]
    # Signs that the model was told to keep to itself stay away.
    assert not set("ABCD.,") & set(written)
    heard = family.transcribe(model, family.collate([family.features(clip)], [family.labels("ja")]))[0]
    normal = text.normalise(written)
    assert len(normal) > 2
    assert heard[: len(normal)] == normal


def test_a_whisper_without_german_gets_no_language(tmp_path: Path) -> None:
    folder = whisper_folder(tmp_path)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "is_multilingual": False}))
    family = family_of(replace(SETTINGS, model=str(folder)))
    vocabulary = transformers.AutoTokenizer.from_pretrained(folder).get_vocab()
    first = batch_of(family)["tokens"][0].tolist()
    assert first[:3] == [vocabulary[letters.START], vocabulary[letters.NO_TIMESTAMPS], vocabulary["j"]]
    assert len(family.transcribe(family.build().eval(), batch_of(family))) == 2


def test_a_whisper_without_a_generation_configuration_writes_german(tmp_path: Path) -> None:
    folder = whisper_folder(tmp_path)
    (folder / "generation_config.json").unlink()
    family = family_of(replace(SETTINGS, model=str(folder)))
    generation = family.build().generation_config
    vocabulary = transformers.AutoTokenizer.from_pretrained(folder).get_vocab()
    assert (generation.language, generation.task) == ("de", "transcribe")
    assert generation.lang_to_id == {letters.LANGUAGE: vocabulary[letters.LANGUAGE]}
    assert batch_of(family)["tokens"][0, 1] == vocabulary[letters.LANGUAGE]


def test_a_whisper_that_reads_something_else_is_refused(tmp_path: Path) -> None:
    folder = whisper_folder(tmp_path)
    transformers.WhisperFeatureExtractor(feature_size=128, hop_length=320).save_pretrained(folder)
    with pytest.raises(UsageError, match="reads other features than Whisper's"):
        family_of(replace(SETTINGS, model=str(folder)))


# --- what cannot be had -----------------------------------------------------------------------------


def refused(model: str) -> str:
    with pytest.raises(UsageError) as caught:
        family_of(replace(SETTINGS, model=model))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    assert f"{tmp_path} has no config.json" in refused(str(tmp_path))


@pytest.mark.parametrize("content", ["no json", "[]"])
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert "config.json" in refused(str(tmp_path))


def test_a_model_of_another_type_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    message = refused(str(tmp_path))
    assert "type bert" in message
    assert "whisper, wav2vec2" in message
    (tmp_path / "config.json").write_text("{}")
    assert "does not say of what type it is" in refused(str(tmp_path))


def test_a_folder_without_its_processor_is_refused_before_the_training(tmp_path: Path) -> None:
    ctc_folder(tmp_path, "hubert")
    (tmp_path / "preprocessor_config.json").unlink()
    assert f"the folder {tmp_path} cannot be loaded" in refused(str(tmp_path))


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    ctc_folder(tmp_path, "hubert")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=f"the folder {tmp_path} cannot be loaded"):
        family_of(replace(SETTINGS, model=str(tmp_path))).build()


def test_weights_that_were_cut_off_are_told_by_the_folder(tmp_path: Path) -> None:
    ctc_folder(tmp_path, "hubert")
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(UsageError, match=f"{tmp_path} cannot be loaded"):
        family_of(replace(SETTINGS, model=str(tmp_path))).build()


@pytest.mark.parametrize("model", ["/no/such/folder", "s3://bucket/model", "three/part/name", "with space"])
def test_a_name_that_is_neither_folder_nor_hub_is_refused_at_once(model: str) -> None:
    assert f"there is no folder {model}" in refused(model)


def test_a_folder_that_another_node_does_not_have_is_named(tmp_path: Path) -> None:
    family = family_of(replace(SETTINGS, model=str(ctc_folder(tmp_path / "here", "wav2vec2"))))
    travelled = pickle.loads(pickle.dumps(family))
    (tmp_path / "here").rename(tmp_path / "gone")
    with pytest.raises(UsageError, match=f"this node has no folder {tmp_path / 'here'}"):
        travelled.build()


def test_a_folder_of_the_working_directory_is_found_from_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctc_folder(tmp_path / "one" / "model", "wav2vec2")
    monkeypatch.chdir(tmp_path / "one")
    family = family_of(replace(SETTINGS, model="model"))
    # As on the nodes of a job: the working directory is there, and called something else.
    (tmp_path / "one").rename(tmp_path / "two")
    monkeypatch.chdir(tmp_path / "two")
    assert pickle.loads(pickle.dumps(family)).build().training


_ASK = """
import sys
from millrace.demo.speech.families.choosing import family_of
from millrace.demo.speech.settings import SpeechSettings
from millrace.errors import MillraceError

for model in sys.argv[1:]:
    try:
        print(family_of(SpeechSettings(data_url="a", run_url="b", model=model)).describe())
    except MillraceError as error:
        print(type(error).__name__, error)
"""


def asked(*models: str, **environment: str) -> list[str]:
    """What is said of models by a process of its own, since the hub's library reads its variables when it is imported."""
    run = subprocess.run(
        [sys.executable, "-c", _ASK, *models],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.splitlines()


def test_a_hub_that_cannot_be_reached_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    # Offline by word, not by network: else the library tries again for half a minute.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RetryableError, match="there is no folder nobody/no-such-model, and the hub cannot be reached"):
        family_of(replace(SETTINGS, model="nobody/no-such-model"))


class _Hub(BaseHTTPRequestHandler):
    """A hub with one model; what it says of others is in their names."""

    files: Path

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        status, error, content = 404, "EntryNotFound", b""
        if "/secret/" in self.path:
            status, error = 403, "GatedRepo"
        elif "/gone/" in self.path:
            error = "RepoNotFound"
        elif "/good/" in self.path and (file := self.files / self.path.rpartition("/")[2]).is_file():
            status, error, content = 200, "", file.read_bytes()
        self.send_response(status)
        self.send_header("X-Error-Code", error)
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", f'"{hash(content)}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_hub_says_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Hub, "files", ctc_folder(tmp_path / "model", "wav2vec2"), raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            told = asked(
                "good/model", "gone/model", "secret/model", "empty/model",
                HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}", HF_HOME=str(tmp_path / "cache"), HF_HUB_OFFLINE="0",
            )  # fmt: skip
        finally:
            server.shutdown()
            thread.join()
    assert told[0] == "good/model (wav2vec2, CTC)"
    assert told[1].startswith("UsageError there is no folder gone/model, and no such model on the hub")
    assert told[2] == "UsageError the hub lets not everyone have secret/model: log in to it (HF_TOKEN)"
    assert told[3].startswith("UsageError empty/model of the hub has no config.json")
    assert len(told) == 4
