"""German sentences to labels and back. Pure; no library beyond Python's own."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterable, Sequence

BLANK = "<pad>"
UNKNOWN = "<unk>"
WORD_BORDER = "|"
LETTERS = "abcdefghijklmnopqrstuvwxyzäöüß"

# The alphabet is fixed rather than collected from the data: a resumed run, another split and another worker can
# never disagree about what a label means. Index 0 is CTC's blank and the padding, as transformers expects.
SYMBOLS: tuple[str, ...] = (BLANK, UNKNOWN, WORD_BORDER, *LETTERS)
BLANK_ID = 0
LABELS: dict[str, int] = {symbol: index for index, symbol in enumerate(SYMBOLS)}


def normalise(sentence: str) -> str:
    """What a listener can hear of a sentence: lower-case letters, umlauts and ß, single spaces between words.

    Accents that German does not have are taken off (`Café` gives `cafe`), a hyphen or a dash parts words, an
    apostrophe does not, and all other signs are dropped. Digits are dropped too: how they are spoken is not written.
    """
    kept: list[str] = []
    for sign in unicodedata.normalize("NFC", sentence).lower():
        if sign in LETTERS:
            kept.append(sign)
        elif sign.isspace() or unicodedata.category(sign) == "Pd":
            kept.append(" ")
        else:
            base = unicodedata.normalize("NFKD", sign)
            kept.extend(letter for letter in base if letter in LETTERS)
    return " ".join("".join(kept).split())


def encode(text: str) -> list[int]:
    """The labels of a normalised text."""
    return [LABELS.get(WORD_BORDER if sign == " " else sign, LABELS[UNKNOWN]) for sign in text]


def decode(frames: Iterable[int]) -> str:
    """The text of one label a frame, as CTC means it: repeats are one, blanks part them and vanish."""
    text: list[str] = []
    previous = BLANK_ID
    for label in frames:
        if label not in (previous, BLANK_ID):
            text.append(" " if SYMBOLS[label] == WORD_BORDER else SYMBOLS[label] if len(SYMBOLS[label]) == 1 else "")
        previous = label
    return " ".join("".join(text).split())


def frames_needed(labels: Sequence[int]) -> int:
    """The fewest frames in which CTC can say `labels`: one each, and a blank between two equal ones."""
    return len(labels) + sum(a == b for a, b in itertools.pairwise(labels))
