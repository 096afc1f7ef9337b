"""A state machine against a plain dict: whatever happens to the cache, a read returns the bytes of one permitted version.

The machine, and the broken caches that it must detect, are in `cache_machine.py`. Each run prints how often it did what.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings
from tests.support.fork_server import PATH

PROGRAM = Path(__file__).with_name("cache_machine.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": PATH}


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cache_machine", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cache_machine"] = module
    spec.loader.exec_module(module)
    return module


cache_machine = _load()


def _run(machine: str, examples: int, steps: int) -> Counter[str]:
    """In a process of its own, whose forks are cheaper than those of one that has run a thousand tests."""
    random_ones = [] if settings.default.derandomize else ["random"]
    command = [sys.executable, str(PROGRAM), machine, str(examples), str(steps), *random_ones]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert (run.returncode, run.stderr) == (0, "")
    done = Counter(json.loads(run.stdout))
    print(f"{machine}, {examples} x {steps}: " + ", ".join(f"{count} {what}" for what, count in sorted(done.items())))
    return done


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "examples"), [("CacheMachine", 30), ("VerifyingCacheMachine", 15)])
def test_each_read_is_of_one_version(machine: str, examples: int) -> None:
    done = _run(machine, examples, 40)
    assert done["reads"] > 20 * examples
    for what in (
        *(f"reads by {how}" for how in cache_machine.READS),
        "reads of what was opened before",
        "reads of another process",
        "overwrites",
        "overwrites that a reader detected",
        "overwrites under a reader that had it all",
        "removals",
        "resizes",
        "restarts",
        "kills",
        "files damaged",
        "crashes with a store",
    ):
        assert done[what], what


@pytest.mark.slow
@pytest.mark.parametrize("mutant", cache_machine.MUTANTS)
def test_planted_bug_is_detected(mutant: str) -> None:
    """By up to ten runs of the size of `make test`, each with other random numbers: one of them misses some bugs."""
    for _ in range(10):
        command = [sys.executable, str(PROGRAM), mutant]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=ENVIRONMENT)
        if run.returncode:
            break
    assert "wrong reads" in run.stdout, run.stderr
    assert run.returncode == 1, f"a cache with {mutant} passes"
