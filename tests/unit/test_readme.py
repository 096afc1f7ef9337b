"""The first lines of the README, as a new user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tools.check_wheel import ROOT, first_lines


def test_readme_example_prints_the_shown_output_every_time(tmp_path: Path) -> None:
    program, expected = first_lines((ROOT / "README.md").read_text())
    for _ in range(2):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
        assert (done.stdout, done.stderr) == (expected, "")
