"""A tokenizer for a small Whisper model: one token a letter, in the form of Whisper's own.

Whisper's tokenizer is a byte-level BPE with tokens of control behind its vocabulary. This one has the bytes that German
text is made of, merges those of each umlaut, and keeps the tokens of control that transformers reckons with, in its
order: a language's token is found by its distance from `<|startoftranscript|>`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from millrace.demo.speech import text

END = "<|endoftext|>"
START = "<|startoftranscript|>"
LANGUAGE = "<|de|>"
TASK = "<|transcribe|>"
NO_TIMESTAMPS = "<|notimestamps|>"
HIDDEN = "<|startofprev|>"
"""Whisper's for what was said before a clip. There is none here, so it stands for a letter that is not shown."""
_CONTROL = (END, START, "<|en|>", "<|zh|>", LANGUAGE, "<|translate|>", TASK, HIDDEN, NO_TIMESTAMPS)


def _visible(byte: int) -> str:
    """The sign that a byte-level BPE writes for a byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return (
        chr(byte) if byte in plain else chr(0x100 + [other for other in range(256) if other not in plain].index(byte))
    )


def _parts(letter: str) -> list[str]:
    return [_visible(byte) for byte in letter.encode("utf-8")]


_SIGNS = (" ", *text.LETTERS)
_BYTES = tuple(dict.fromkeys(part for sign in _SIGNS for part in _parts(sign)))
_MERGES = tuple(tuple(_parts(sign)) for sign in _SIGNS if len(_parts(sign)) > 1)
TOKENS: tuple[str, ...] = (*_BYTES, *("".join(merge) for merge in _MERGES), *_CONTROL)
IDS: dict[str, int] = {token: index for index, token in enumerate(TOKENS)}
_TEXT: dict[int, str] = {IDS["".join(_parts(sign))]: sign for sign in _SIGNS}


def encode(sentence: str) -> list[int]:
    """The tokens of a normalised sentence, one a letter; the same as the tokenizer's."""
    return [IDS["".join(_parts(sign))] for sign in sentence]


def decode(tokens: Iterable[int]) -> str:
    """The text of tokens; control and halves of umlauts say nothing."""
    return "".join(_TEXT.get(token, "") for token in tokens)


def tokenizer() -> Any:
    """The tokenizer as transformers has it, set to German and to transcribing."""
    from transformers import WhisperTokenizer

    return WhisperTokenizer(
        vocab={token: index for token, index in IDS.items() if token not in _CONTROL},
        merges=list(_MERGES),
        pad_token=END,
        extra_special_tokens=list(_CONTROL[1:]),
        language="german",
        task="transcribe",
    )
