"""The pages on hot paths in `docs/architecture` list the files that the code runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.hot_paths import HOT_PATHS, MAY_RUN, HotPath, listed, trace_of

from millrace.testing.s3 import S3Server

SRC = Path(__file__).parents[2] / "src" / "millrace"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.mark.parametrize("path", HOT_PATHS, ids=lambda path: path.page)
def test_hot_path_runs_the_files_that_its_page_lists(path: HotPath, s3: S3Server, tmp_path: Path) -> None:
    page = set(listed(path.page))
    # What depends on the time (a lock that is not free, a task of the background) may run in one of several.
    traces = [set(trace_of(path, tmp_path / str(number), s3).files) for number in range(2)]
    assert set.intersection(*traces) - MAY_RUN <= page <= set.union(*traces) | MAY_RUN
    assert len(page) <= path.most_files


@pytest.mark.parametrize("path", HOT_PATHS, ids=lambda path: path.page)
def test_page_of_a_hot_path_lists_functions_that_exist(path: HotPath) -> None:
    for file, functions in listed(path.page).items():
        text = (SRC / file).read_text()
        for function in functions:
            name = function.rpartition(".")[2]
            assert re.search(rf"\bdef {name}\(|class {function.partition('.')[0]}\b", text), (file, function)
