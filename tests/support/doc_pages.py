"""Runs the code of a documentation page from top to bottom, as a reader who copies every block would.

`python doc_pages.py PAGE` runs it in the current directory: Python blocks as one program, shell blocks with bash. The
variables that a shell block exports and the directory that it changes to apply to the blocks after it. A block below the
line `*Not run by the tests: REASON.*` is left out. The line `*No code of this page is run by the tests: REASON.*` leaves all
of them out. A block with `title="Output"` is the output of the block before it; `...` in it stands for any text.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import subprocess
import sys
import tempfile
import types
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_PAGE_NOT_RUN = re.compile(r"^\*No code of this page is run by the tests: [^*]{10,}\.\*$", re.MULTILINE)
_BLOCK_NOT_RUN = re.compile(r"^ *\*Not run by the tests: [^*]{10,}\.\*\s*\Z", re.MULTILINE)
_SHELLS = ("sh", "bash")
_OUTPUT = 'text title="Output"'
_MATCHING = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code that is run; `line` is the number of its first line in the page."""

    language: str
    line: int
    code: str
    output: str | None


def has_code(text: str) -> bool:
    """Whether a page contains blocks of Python or shell code, run or not."""
    return any(fence[2].split(" ")[0] in ("python", *_SHELLS) for fence in _FENCE.finditer(text))


def blocks_of(text: str) -> list[Block]:
    """Return the blocks of a page that are run, in order."""
    if _PAGE_NOT_RUN.search(text):
        return []
    found: list[Block] = []
    fences = list(_FENCE.finditer(text))
    for fence, after in zip(fences, [*fences[1:], None], strict=False):
        indent, language, body = fence.groups()
        if language.split(" ")[0] not in ("python", *_SHELLS) or _BLOCK_NOT_RUN.search(text[: fence.start()]):
            continue
        line = text.count("\n", 0, fence.start(3)) + 1
        output = after[3] if after is not None and after[2] == _OUTPUT else None
        found.append(Block(language, line, re.sub(rf"^{indent}", "", body, flags=re.MULTILINE), output))
    return found


def run(page: Path) -> None:
    """Run the blocks of a page; the first that fails or prints something else raises."""
    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program
    for block in blocks_of(page.read_text()):
        printed = _shell(block, page) if block.language in _SHELLS else _python(block, page, program)
        sys.stdout.write(printed)
        if block.output is not None and not doctest.OutputChecker().check_output(block.output, printed, _MATCHING):
            raise AssertionError(f"{page}:{block.line}: expected\n{block.output}\nbut the block printed\n{printed}")


def _python(block: Block, page: Path, program: types.ModuleType) -> str:
    # The page has the same lines, so tracebacks show the right ones.
    code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, program.__dict__)
    return printed.getvalue()


def _shell(block: Block, page: Path) -> str:
    # Into files: a process in the background of the block would hold a pipe open.
    with tempfile.TemporaryFile("w+") as printed, tempfile.NamedTemporaryFile() as left:
        script = f"set -euo pipefail\ntrap 'env -0 > {left.name}' EXIT\n{block.code}"
        bash = subprocess.run(["bash", "-c", script], stdin=subprocess.DEVNULL, stdout=printed, check=False)
        printed.seek(0)
        output = printed.read()
        if bash.returncode:
            raise AssertionError(f"{page}:{block.line}: the shell block ended with status {bash.returncode}\n{output}")
        variables = dict(item.split("=", 1) for item in Path(left.name).read_text().split("\0") if item)
    os.environ.update(variables)
    os.chdir(variables["PWD"])
    return output


if __name__ == "__main__":
    sys.path[0] = ""  # the reader's directory, not the one of this file
    sys.argv = sys.argv[1:]  # Ray's workers import from the directory of the first argument
    run(Path(sys.argv[0]))
