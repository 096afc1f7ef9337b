#!/usr/bin/env python3
"""Builds the wheel and tests the base install, without extras, on every Python 3.11 to 3.14 of this machine.

    python3 tools/check_wheel.py [--python /path/to/python ...] [--with 'torch==2.6.0' ...] [--require 3.14 ...]

For each Python: a new virtual environment, `pip install` of the wheel, `import millrace`, the first lines of README.md with
their output, `millrace --help`, `doctor`. Pythons are looked for on PATH, among pyenv's and with uv. An absent version is
listed; it is an error with --require. `--with` installs more into each environment, such as an old torch or an old click,
without the versions of constraints.txt, which it may contradict. With torch, a checkpoint is saved and restored as well.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
MOST_BYTES = 1_000_000

_CHECKPOINT = """
import tempfile, torch
from millrace.checkpoint import CheckpointManager
state = {"w": torch.arange(1000.0)}
run = CheckpointManager(tempfile.mkdtemp())
run.save(1, state)
state["w"].zero_()
assert run.restore(state) == 1 and state["w"][-1] == 999
"""


def first_lines(readme: str) -> tuple[str, str]:
    """The first Python program of the README, and the output that the block after it shows."""
    found = re.search(r"```python\n(.*?)```.*?```\n(.*?)```", readme, re.DOTALL)
    if found is None:
        raise SystemExit("README.md has no Python block with its output after it")
    return found[1], found[2]


def interpreters() -> dict[str, str]:
    """A working interpreter for each version that this machine has."""
    found = {}
    for version in VERSIONS:
        uv = shutil.which("uv")
        candidates = [
            shutil.which(f"python{version}"),
            *map(str, sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python"), reverse=True)),
            _output([uv, "python", "find", version]).strip() if uv else None,
        ]
        for candidate in filter(None, candidates):
            # A shim of pyenv is a file for every version; Debian's Python may lack ensurepip.
            if (
                _output([candidate, "-c", "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"]).strip()
                == version
            ):
                found[version] = candidate
                break
    return found


def check(python: str, wheel: Path, extra: list[str], folder: Path) -> str:
    """Test the wheel with one interpreter; returns a line of figures. Exits with a message at the first failure."""
    environment = folder / "venv"
    _run([python, "-m", "venv", str(environment)], folder)
    own = str(environment / "bin" / "python")
    versions = [] if extra else ["-c", str(ROOT / "constraints.txt")]
    _run([own, "-m", "pip", "install", "-q", *versions, str(wheel), *extra], folder)
    if not extra:
        _run(
            [own, "-c", "import importlib.util as u; assert not u.find_spec('torch') and not u.find_spec('ray')"],
            folder,
        )
    program, expected = first_lines((ROOT / "README.md").read_text())
    _run([own, "-c", "import millrace"], folder)  # writes the bytecode
    before = os.times()
    _run([own, "-c", "import millrace"], folder)
    after = os.times()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    printed = _run([own, "-c", program], folder)
    if printed != expected:
        raise SystemExit(f"{python}: the first lines of README.md printed {printed!r} instead of {expected!r}")
    command = str(environment / "bin" / "millrace")
    began = time.perf_counter()
    _run([command, "--help"], folder)
    seconds = time.perf_counter() - began
    _run([command, "doctor", "--cache-dir", "cache"], folder)
    if any(each.startswith("torch") for each in extra):
        _run([own, "-c", _CHECKPOINT], folder)
    return f"import millrace {1e3 * cpu:.0f} ms of CPU, millrace --help {1e3 * seconds:.0f} ms"


def build(folder: Path) -> Path:
    """Build the wheel. Exits if it is too large or has files that no user of the package needs."""
    _run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)], folder)
    [wheel] = folder.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    wanted = (".py", ".pyi", "py.typed", "node/status.html")
    odd = [name for name in names if not name.endswith(wanted) and ".dist-info/" not in name]
    if not any(name.endswith("node/status.html") for name in names):
        raise SystemExit(f"{wheel.name} lacks the status page")
    if odd:
        raise SystemExit(f"{wheel.name} contains {', '.join(odd)}")
    if wheel.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{wheel.name} has {wheel.stat().st_size:,} bytes, more than {MOST_BYTES:,}")
    return wheel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", action="append", default=[], metavar="PATH", help="only these interpreters")
    parser.add_argument(
        "--with", dest="extra", action="append", default=[], metavar="REQUIREMENT", help="install as well"
    )
    parser.add_argument("--require", action="append", default=[], choices=VERSIONS, help="fail without this version")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-wheel-") as scratch:
        wheel = build(Path(scratch))
        print(f"{wheel.name}: {wheel.stat().st_size:,} bytes", flush=True)
        found = {path: path for path in given.python} or interpreters()
        for name, python in found.items():
            folder = Path(scratch) / f"with-{name.replace('/', '-')}"
            folder.mkdir()
            print(f"Python {name}: {check(python, wheel, given.extra, folder)}", flush=True)
            shutil.rmtree(folder)
    absent = [] if given.python else [version for version in VERSIONS if version not in found]
    if absent:
        print(f"not tested, because this machine does not have it: Python {', '.join(absent)}")
    return 1 if not found or set(absent) & set(given.require) else 0


def _run(command: list[str], folder: Path) -> str:
    """Run a command; returns its stdout. Exits with its output if it fails."""
    # Nothing of the clone: the installed package is tested.
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MILLRACE_"))}
    variables["HOME"] = str(folder)
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
