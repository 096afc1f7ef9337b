"""The runner of documentation pages (`tests.support.doc_pages`): what it runs, and which pages fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import doc_pages


def run(page: str, directory: Path) -> subprocess.CompletedProcess[str]:
    file = directory / "page.md"
    file.write_text(page)
    command = [sys.executable, doc_pages.__file__, str(file)]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def test_blocks_of_a_page_run_in_order_and_share_variables(tmp_path: Path) -> None:
    page = """
```python
a = 1
```

```sh
mkdir below && cd below
export WORD=seven
```

=== "a tab"

    ```python
    import os
    print(a, os.environ["WORD"], os.path.basename(os.getcwd()))
    ```

    ```text title="Output"
    1 ... below
    ```

```toml
a = not run
```
"""
    assert run(page, tmp_path).stdout == "1 seven below\n"


@pytest.mark.parametrize("code", ["```python\n1 / 0\n```", "```sh\nfalse\ntrue\n```"])
def test_block_that_fails_fails_the_page(code: str, tmp_path: Path) -> None:
    assert run(f"# Title\n\n{code}\n", tmp_path).returncode == 1


def test_block_with_another_output_fails_the_page(tmp_path: Path) -> None:
    done = run('```python\nprint(1)\n```\n\n```text title="Output"\n2\n```\n', tmp_path)
    assert done.returncode == 1
    assert "expected\n2" in done.stderr


def test_block_below_a_reason_is_left_out() -> None:
    page = "*Not run by the tests: it needs a cluster.*\n\n```sh\nfalse\n```\n\n```sh\ntrue\n```\n"
    assert [block.code for block in doc_pages.blocks_of(page)] == ["true\n"]


@pytest.mark.parametrize("mark", ["*Not run by the tests.*", "*Not run by the tests: no.*"])
def test_block_without_a_reason_is_run(mark: str) -> None:
    assert doc_pages.blocks_of(f"{mark}\n\n```sh\nfalse\n```\n")


def test_page_with_a_reason_is_left_out() -> None:
    page = "# Title\n\n*No code of this page is run by the tests: it needs a cluster.*\n\n```sh\nfalse\n```\n"
    assert doc_pages.blocks_of(page) == []
