"""Sentences to labels and back."""

from __future__ import annotations

import pytest

from millrace.demo.speech import text


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("Der Müller mahlt das Korn.", "der müller mahlt das korn"),
        ("Süßen Honig, heiße Suppe!", "süßen honig heiße suppe"),
        ("STRAẞE", "straße"),
        ("„Ach so“, sagte er.", "ach so sagte er"),
        ('"Wirklich?"', "wirklich"),
        ("Wie geht's dir?", "wie gehts dir"),
        ("Baden-Württemberg – im Süden", "baden württemberg im süden"),
        ("Café, Señor, Łódź", "cafe senor odz"),
        ("u\u0308ber", "über"),
        ("  viel \t Platz\u00a0hier ", "viel platz hier"),
        ("Raum 12", "raum"),
        ("…", ""),
        ("", ""),
        ("Привет", ""),
    ],
)
def test_normalise(sentence: str, expected: str) -> None:
    assert text.normalise(sentence) == expected
    assert text.normalise(expected) == expected


def test_labels_of_the_alphabet_never_move() -> None:
    # A stored model means these numbers: a change makes every one of them speak nonsense.
    assert text.SYMBOLS[:4] == ("<pad>", "<unk>", "|", "a")
    assert len(text.SYMBOLS) == 33
    assert text.encode("zäöüß z") == [28, 29, 30, 31, 32, 2, 28]
    assert text.encode("é") == [1]


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ("", ""),
        ("____", ""),
        ("hhaalllloo", "halo"),
        ("hhaal_lloo", "hallo"),
        ("_h_a_l_l_o_", "hallo"),
        ("ja||||nein", "ja nein"),
        ("|ja|_|nein|", "ja nein"),
    ],
)
def test_decode_joins_repeats_and_drops_blanks(frames: str, expected: str) -> None:
    labels = [text.BLANK_ID if sign == "_" else text.LABELS[sign] for sign in frames]
    assert text.decode(labels) == expected


@pytest.mark.parametrize(("word", "frames"), [("", 0), ("ja", 2), ("hallo", 6), ("aaa", 5)])
def test_frames_needed(word: str, frames: int) -> None:
    assert text.frames_needed(text.encode(word)) == frames
