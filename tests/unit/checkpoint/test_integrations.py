"""The integrations are imported on first use, and name what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.fork_server import ForkedProcess, torch_server

from millrace.checkpoint import integrations

SOURCE = Path(__file__).parents[3] / "src"
LIBRARIES = {
    "MillraceTrainer": ("transformers", "trainers"),
    "MillraceTrainerMixin": ("transformers", "trainers"),
    "MillraceCheckpointIO": ("lightning", "trainers"),
    "MillraceCheckpointer": ("torchtitan", "torchtitan"),
    "accelerator_state": ("accelerate", "trainers"),
}


def test_every_public_name_has_a_library() -> None:
    assert sorted(LIBRARIES) == sorted(integrations.__all__)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["MillraceTrainer", "MillraceCheckpointIO", "MillraceCheckpointer", "accelerator_state"]
)
def test_missing_library_is_named_with_the_extra_to_install(name: str, tmp_path: Path) -> None:
    library, extra = LIBRARIES[name]
    program = (
        f"import sys; sys.modules[{library!r}] = None\n"
        "from millrace.checkpoint import integrations\n"
        f"try: integrations.{name}\n"
        "except ImportError as error: print(type(error).__name__, error)"
    )
    with ForkedProcess(torch_server(), program, log=tmp_path / "log", pipes=True) as process:
        [line] = process.output().splitlines()
    assert line.startswith(f"MissingDependencyError {name} cannot be imported (")
    assert line.endswith(f": pip install 'millrace[{extra}]'")


def test_package_imports_no_library() -> None:
    program = (
        "import sys, millrace.checkpoint.integrations\n"
        "print(sorted({'torch', 'transformers', 'accelerate', 'lightning', 'torchtitan'} & sys.modules.keys()))"
    )
    variables = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
