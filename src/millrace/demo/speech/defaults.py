"""What suits a model when nobody says otherwise. Pure."""

from __future__ import annotations

from millrace.demo.speech.settings import FamilyName

SMALL_EPOCHS: dict[FamilyName, int] = {"ctc": 10, "whisper": 30}
"""A decoder learns the sentences by heart before it begins to listen."""
GIVEN_EPOCHS = 3
SMALL_RATES: dict[FamilyName, float] = {"ctc": 3e-3, "whisper": 2e-3}
GIVEN_RATE = 3e-5
"""One that has learned before forgets it at the rate from which a small one learns."""


def epochs_for(model: str | None, family: FamilyName) -> int:
    """Passes over the training split."""
    return SMALL_EPOCHS[family] if model is None else GIVEN_EPOCHS


def learning_rate_for(model: str | None, family: FamilyName) -> float:
    """The learning rate at its peak."""
    return SMALL_RATES[family] if model is None else GIVEN_RATE
