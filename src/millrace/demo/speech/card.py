"""The model card: the `README.md` of the model's folder, as the Hugging Face hub reads it. Loads no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.demo.speech.families.protocol import Family
from millrace.demo.speech.log import EpochRecord
from millrace.demo.speech.settings import SpeechSettings

CARD_NAME = "README.md"

_ROWS = 12
"""Of a long run, so many epochs are shown."""

_TASK = "automatic-speech-recognition"

_LOADING = {
    "ctc": """\
from transformers import AutoModelForCTC, AutoProcessor

folder = "."  # a copy of this folder on a disk
processor = AutoProcessor.from_pretrained(folder)
model = AutoModelForCTC.from_pretrained(folder)

# samples: one channel, 16,000 a second, between -1 and 1
inputs = processor(samples, sampling_rate=16_000, return_tensors="pt")
labels = model(**inputs).logits.argmax(dim=-1)
print(processor.batch_decode(labels)[0])
""",
    "whisper": """\
from transformers import AutoProcessor, WhisperForConditionalGeneration

folder = "."  # a copy of this folder on a disk
processor = AutoProcessor.from_pretrained(folder)
model = WhisperForConditionalGeneration.from_pretrained(folder)

# samples: one channel, 16,000 a second, between -1 and 1
inputs = processor(samples, sampling_rate=16_000, return_tensors="pt")
tokens = model.generate(**inputs)
print(processor.batch_decode(tokens, skip_special_tokens=True)[0])
""",
}


def model_card(
    settings: SpeechSettings, family: Family, epochs: Sequence[EpochRecord], metrics: Mapping[str, Any]
) -> str:
    """The card of the model that a run ended with. `metrics` is what `metrics.json` has; a figure that is None is left out.

    Of places it names the data set's alone, without the credentials that a URL may have.
    """
    facts = family.configuration()
    results = _results(epochs, metrics)
    parts = [
        _header(settings, facts, results),
        f"# {_name(settings, facts)}\n",
        f"A model that writes down spoken German, {_origin(settings, facts)}, trained with Millrace.\n",
        _results_table(results),
        _transcripts(metrics),
        "## How to use it\n",
        f"```python\n{_LOADING[facts['family']]}```\n",
        "## How it was trained\n",
        _training(settings, epochs),
        _curve(epochs),
        "## Limits\n",
        _limits(settings, facts, metrics),
    ]
    return "\n".join(part for part in parts if part)


def _name(settings: SpeechSettings, facts: Mapping[str, Any]) -> str:
    base = f"small {facts['model_type']}" if settings.model is None else _last(settings.model)
    return f"{base}, fine-tuned on German" if settings.model is not None else f"{base} for German"


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _is_on_hub(model: str) -> bool:
    """Whether a model's name can be one of the hub; a folder's own path is nobody else's business."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", model, re.ASCII) is not None


def _origin(settings: SpeechSettings, facts: Mapping[str, Any]) -> str:
    size = f"{facts['model_type']}, {facts['layers']} layers of {facts['hidden_size']}, {facts['labels']} labels"
    if settings.model is None:
        return f"made from scratch ({size})"
    return f"fine-tuned from {_last(settings.model)} ({size})"


def public_url(url: str) -> str:
    """A URL without what may be secret in it: user, password, query."""
    bare = re.split(r"[?#]", url, maxsplit=1)[0]
    scheme, separator, rest = bare.partition("://")
    if not separator:
        return bare
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


_Result = tuple[str, str, float, int | None]
"""Split, what of it, character error rate, clips."""


def _results(epochs: Sequence[EpochRecord], metrics: Mapping[str, Any]) -> list[_Result]:
    clips, held_out = metrics.get("test_clips"), metrics.get("test_clips_held_out")
    known = clips - held_out if clips is not None and held_out is not None else None
    found: list[tuple[str, str, Any, int | None]] = [
        ("dev", "all", epochs[-1].dev_cer if epochs else None, None),
        ("test", "all", metrics.get("test_cer"), clips),
        ("test", "speakers of the training split", metrics.get("test_cer_known_speakers"), known),
        ("test", "held-out speakers", metrics.get("test_cer_held_out_speakers"), held_out),
    ]
    return [(split, part, float(rate), count) for split, part, rate, count in found if rate is not None]


def _header(settings: SpeechSettings, facts: Mapping[str, Any], results: Sequence[_Result]) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    data = _last(public_url(settings.data_url)) or "data"
    card = ModelCardData(
        language="de",
        library_name="transformers",
        pipeline_tag=_TASK,
        tags=[_TASK, facts["family"], facts["model_type"], "common-voice", "millrace"],
        metrics=["cer"],
        base_model=settings.model if settings.model is not None and _is_on_hub(settings.model) else None,
        model_name=_name(settings, facts),
        eval_results=[
            EvalResult(
                task_type=_TASK,
                task_name="Automatic Speech Recognition",
                dataset_type="common_voice",
                dataset_name=f"{data} ({part})" if part != "all" else data,
                dataset_config="de",
                dataset_split=split,
                metric_type="cer",
                metric_name=f"CER, {split}" if part == "all" else f"CER, {split}, {part}",
                metric_value=round(rate, 4),
            )
            for split, part, rate, _ in results
        ]
        or None,
    )
    return f"---\n{card.to_yaml()}\n---\n"


def _results_table(results: Sequence[_Result]) -> str:
    if not results:
        return ""
    rows = [
        f"| {split} | {part} | {'' if clips is None else clips} | {rate:.1%} |" for split, part, rate, clips in results
    ]
    return "\n".join(
        [
            "## Results\n",
            "Character error rate (CER): edits a character of what was said.\n",
            "| split | of it | clips | CER |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _transcripts(metrics: Mapping[str, Any]) -> str:
    lines = metrics.get("transcripts") or []
    if not lines:
        return ""
    rows = [
        f"| {line['said']} | {line['heard']} | {'training split' if line['known_speaker'] else 'held out'} |"
        for line in lines
    ]
    return "\n".join(["| said | heard | speaker |", "|---|---|---|", *rows, ""])


def _training(settings: SpeechSettings, epochs: Sequence[EpochRecord]) -> str:
    lines = [
        f"- Data: {public_url(settings.data_url)}, in the layout of Mozilla Common Voice; clips over "
        f"{settings.max_seconds:g} s were left out.",
        f"- {settings.epochs} epochs, batches of {settings.batch_size} clips a worker, AdamW (weight decay "
        f"{settings.weight_decay:g}), learning rate up to {settings.learning_rate:g}: a linear rise over the first "
        f"{settings.warmup:.0%}, then half a cosine to zero. Precision: {settings.precision}. Seed: {settings.seed}.",
    ]
    if epochs:
        last = epochs[-1]
        workers = sorted({len(epoch.workers) for epoch in epochs})
        spread = f"{workers[0]}" if len(workers) == 1 else f"{workers[0]} to {workers[-1]}"
        minutes = sum(epoch.seconds for epoch in epochs) / 60
        lines.append(f"- {spread} worker(s), {last.clips} clips an epoch, {minutes:.1f} minutes of epochs.")
        same = len({epoch.clips_digest for epoch in epochs}) == 1
        lines.append(
            "- Every epoch saw the same clips, each as often."
            if same
            else "- Not every epoch saw the same clips: the log says which."
        )
        restarts = last.attempt
        if restarts:
            lines.append(f"- Begun again {restarts} time(s), from the newest complete checkpoint.")
    return "\n".join([*lines, ""])


def _curve(epochs: Sequence[EpochRecord]) -> str:
    if not epochs:
        return ""
    count = min(_ROWS, len(epochs))
    # The last epoch is always among them.
    shown = [epochs[-1 - (len(epochs) - 1) * back // max(1, count - 1)] for back in reversed(range(count))]
    rows = [
        f"| {epoch.epoch} | {epoch.train_loss:.3f} | {'' if epoch.dev_cer is None else f'{epoch.dev_cer:.1%}'} |"
        for epoch in shown
    ]
    return "\n".join(["| epoch | loss | CER of dev |", "|---|---|---|", *rows, ""])


def _limits(settings: SpeechSettings, facts: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    lines = [
        "- It writes lower-case letters, ä, ö, ü, ß and spaces: no digits, no punctuation, no capitals.",
        "- It has learned from single sentences, read aloud. Conversation, music and noise are unknown to it.",
    ]
    known, held_out = metrics.get("test_cer_known_speakers"), metrics.get("test_cer_held_out_speakers")
    if known is not None and held_out is not None and held_out > known:
        lines.append(
            f"- It hears voices that it was trained on better ({known:.1%} CER) than others ({held_out:.1%}): "
            "expect the latter."
        )
    longest = facts.get("longest_seconds")
    if longest is not None:
        lines.append(f"- It hears {longest:g} seconds at a time; what comes after is cut off.")
    else:
        lines.append(f"- It has met no clip of more than {settings.max_seconds:g} seconds.")
    lines.append("- No licence is set here: the data set and the model that was begun from have theirs.")
    return "\n".join([*lines, ""])
