"""The optional libraries that a speech run takes, checked before anything starts."""

from __future__ import annotations

import importlib.util

from millrace.errors import MissingDependencyError

SPEECH_MODULES = ("ray", "torch", "transformers", "soundfile", "soxr", "jiwer")


def check_modules(names: tuple[str, ...], *, what: str, next_step: str) -> None:
    """Raise `MissingDependencyError` with all of `names` that cannot be imported. Imports none of them."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(f"{what} needs {', '.join(missing)}", next_step=next_step)
