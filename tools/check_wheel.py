#!/usr/bin/env python3
"""Builds the wheel and tests it on every Python 3.11 to 3.14 of this machine, and with the oldest and newest libraries.

    python3 tools/check_wheel.py [--base] [--python /path/to/python ...] [--require 3.14 ...] [--with 'click==8.1.0' ...]

For each Python: a new virtual environment, `pip install` of the wheel without extras, `import millrace`, the first lines of
README.md with their output, `millrace --help`, `doctor`. Pythons are looked for on PATH, among pyenv's and with uv. An
absent version is listed; it is an error with --require. Then, unless --base, the same on one Python with
  - the lower bound of each dependency,
  - the lower bounds of torch and Ray: a checkpoint is saved and restored, alone and in a Ray Train job, and Ray Data reads,
  - the torch and Ray of constraints.txt: the same.
`--with` makes one environment per Python with these requirements in place of the three. The lower bounds and `--with` do not
use constraints.txt, which they may contradict. torch needs several GB where pip finds only its CUDA build.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
MOST_BYTES = 1_100_000  # the goal of 1 MB is missed by 9 %, see docs/figures/cache.md

_CHECKPOINT = """
import tempfile, torch
from millrace.checkpoint import CheckpointManager
state = {"w": torch.arange(1000.0)}
run = CheckpointManager(tempfile.mkdtemp())
run.save(1, state)
state["w"].zero_()
assert run.restore(state) == 1 and state["w"][-1] == 999
"""

_RAY = """
import tempfile, pyarrow as pa, pyarrow.parquet as pq, ray, torch, millrace
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from millrace.ray import report, restore

def train():
    state = {"w": torch.zeros(1000)}
    restore(state)
    state["w"] += 1
    report({"loss": 0.5}, state, step=1)

folder = tempfile.mkdtemp()
pq.write_table(pa.table({"a": range(1000)}), f"{folder}/part.parquet")
ray.init(num_cpus=2, include_dashboard=False)
fs = millrace.filesystem("file", cache_dir=f"{folder}/cache")
assert ray.data.read_parquet(f"file://{folder}/part.parquet", filesystem=fs).sum("a") == 499500
trainer = TorchTrainer(
    train, scaling_config=ScalingConfig(num_workers=1), run_config=RunConfig(name="run", storage_path=f"{folder}/runs")
)
assert trainer.fit().metrics["loss"] == 0.5
ray.shutdown()
"""


def lower_bounds(requirements: list[str]) -> list[str]:
    """The oldest version that each requirement accepts: `ray[data]>=2.60` becomes `ray[data]==2.60`."""
    found = []
    for requirement in requirements:
        match = re.fullmatch(r"([\w.-]+(?:\[[\w,]+\])?)>=([\d.]+)(,<[\d.]+)?(;.*)?", requirement.replace(" ", ""))
        if match is None:
            raise SystemExit(f"pyproject.toml: {requirement!r} has no lower bound")
        found.append(f"{match[1]}=={match[2]}{';' + requirement.partition(';')[2] if match[4] else ''}")
    return found


def libraries() -> dict[str, list[str]]:
    """The sets of other versions to test, by name; see the top of this file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    frameworks = [*project["optional-dependencies"]["torch"], *project["optional-dependencies"]["ray"]]
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    names = [re.split(r">=", requirement)[0] for requirement in frameworks]
    return {
        "the lower bound of each dependency": lower_bounds(project["dependencies"]),
        "the oldest torch and Ray": lower_bounds(frameworks),
        "the newest torch and Ray": [f"{name}=={pinned[name.partition('[')[0]]}" for name in names],
    }


def first_lines(readme: str) -> tuple[str, str]:
    """The first Python program of the README, and the output that the block after it shows."""
    found = re.search(r'```python\n(.*?)```.*?```text title="Output"\n(.*?)```', readme, re.DOTALL)
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
    imported = _cpu_seconds([own, "-c", "import millrace"], folder)
    printed = _run([own, "-c", program], folder)
    if printed != expected:
        raise SystemExit(f"{python}: the first lines of README.md printed {printed!r} instead of {expected!r}")
    command = str(environment / "bin" / "millrace")
    _run([command, "--help"], folder)
    helped = _cpu_seconds([command, "--help"], folder)
    _run([command, "doctor", "--cache-dir", "cache"], folder)
    for library, test in (("torch", _CHECKPOINT), ("ray", _RAY)):
        if any(re.match(rf"{library}\b", each) for each in extra):
            _run([own, "-c", test], folder)
    return f"import millrace {1e3 * imported:.0f} ms of CPU, millrace --help {1e3 * helped:.0f} ms of CPU"


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
    parser.add_argument(
        "--base", action="store_true", help="only the base install, with the versions of constraints.txt"
    )
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
        tests = [(name, python, given.extra) for name, python in found.items()]
        if found and not given.base and not given.extra:
            name, python = next(iter(found.items()))
            tests += [(f"{name} with {what}", python, extra) for what, extra in libraries().items()]
        for number, (name, python, extra) in enumerate(tests):
            folder = Path(scratch) / str(number)  # short: sockets of Ray lie below it
            folder.mkdir()
            print(f"Python {name}: {check(python, wheel, extra, folder)}", flush=True)
            shutil.rmtree(folder)
    absent = [] if given.python else [version for version in VERSIONS if version not in found]
    if absent:
        print(f"not tested, because this machine does not have it: Python {', '.join(absent)}")
    return 1 if not found or set(absent) & set(given.require) else 0


def _run(command: list[str], folder: Path) -> str:
    """Run a command; returns its stdout. Exits with its output if it fails."""
    # Nothing of the clone: the installed package is tested.
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MILLRACE_"))}
    variables |= {"HOME": str(folder), "RAY_TMPDIR": str(folder), "TMPDIR": str(folder)}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def _cpu_seconds(command: list[str], folder: Path) -> float:
    """CPU time of a command."""
    before = os.times()
    _run(command, folder)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
