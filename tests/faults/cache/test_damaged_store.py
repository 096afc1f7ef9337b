"""Any damage to any file of a store, while a process has it open and while none has: no wrong byte, no error that is not
Millrace's, and no store that stays unusable. `store_damage.py` defines the cases and their requirements.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults import store_damage
from tests.faults.store_damage import HARMS, Case


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Data, and a cache that processes which have ended filled with it."""
    folder = tmp_path_factory.mktemp("filled")
    subprocess.run(
        [sys.executable, store_damage.__file__, str(folder / "data"), str(folder / "cache")], check=True, timeout=300
    )
    return folder / "data", folder / "cache"


def require_no_harm(cases: list[Case], filled: tuple[Path, Path], place: Path) -> None:
    """Fails with every case in which something happened that must not, and with what it was."""
    (place / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, store_damage.__file__, *map(str, filled), str(place), str(place / "cases.json")]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    wrongs = [f"{Case(*case)}: {wrong}" for case, wrong in json.loads(done.stdout)]
    assert not wrongs, "\n".join(wrongs)


@pytest.mark.slow
@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
def test_damaged_small_file_of_store_fails_no_read_and_no_later_process(
    is_open: bool, filled: tuple[Path, Path], tmp_path: Path
) -> None:
    names = store_damage.store_files(filled[1])
    assert {"local/FORMAT", "local/counters/retired", "local/rules.json", "local/index/index.mdb"} <= set(names)
    rng = random.Random(15)
    cases = [Case(name, harm, rng.randrange(1 << 30), is_open) for name in names for harm in HARMS]
    assert len(cases) >= 100
    require_no_harm(cases, filled, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
def test_damaged_index_byte_fails_no_read_and_no_later_process(
    is_open: bool, filled: tuple[Path, Path], tmp_path: Path
) -> None:
    require_no_harm(store_damage.index_cases(100, 17, is_open=is_open), filled, tmp_path)
