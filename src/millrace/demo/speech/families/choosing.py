"""Which family a run trains."""

from __future__ import annotations

from millrace.demo.speech.families.protocol import Family
from millrace.demo.speech.settings import SpeechSettings
from millrace.errors import UsageError


def family_of(settings: SpeechSettings) -> Family:
    """The family and model that `settings` ask for.

    A small one of `settings.family` where they name no model; else the family that the model's own configuration says.
    Raises `UsageError` for a model that is of neither family or cannot be found, `RetryableError` where the hub cannot
    be reached. Looks at the model's small files only, and raises here, on the driver, what the workers would stumble over.
    """
    from millrace.demo.speech.families import ctc, whisper

    if settings.model is None:
        return whisper.small(settings) if settings.family == "whisper" else ctc.small(settings)
    from millrace.demo.speech.families.pretrained import Source

    source = Source.find(settings.model)
    configuration = source.configuration()
    kind = configuration.get("model_type")
    if kind in ctc.MODEL_TYPES:
        return ctc.pretrained(settings, source, configuration)
    if kind == whisper.MODEL_TYPE:
        return whisper.pretrained(settings, source, configuration)
    said = f"is a model of type {kind}" if kind else "does not say of what type it is"
    raise UsageError(
        f"{settings.model} {said}, and cannot be trained here",
        next_step=f"give one of type {whisper.MODEL_TYPE}, {', '.join(ctc.MODEL_TYPES)}",
    )
