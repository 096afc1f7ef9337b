"""No thread enters a `threading.Condition`: an interrupt inside its Python code would leave its lock held.

Nor does the main thread use a `Future`, or a pool of `concurrent.futures`, which enter conditions of their own. An interrupt
can still come inside of Python's `Thread.start`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import millrace

SOURCE = Path(millrace.__file__).parent
# Threads of the node process, whose main thread only waits.
EXEMPT = {"node/process.py", "node/drain.py"}
DATA_PATH = ("cache", "cluster", "filesystem", "origin", "runtime", "store")
FUTURES = {
    "cache/reading/threads.py": "the future of a call that has ended, which no other thread has",
    "cluster/dataplane/conversation.py": "threads of the server",
    "cluster/moving.py": "threads of the node process",
    "cluster/owning.py": "threads of the node process",
    "filesystem/prefetching.py": "used by the thread that walks through the order",
    "runtime/forks.py": "the base class of `Pool`, whose `submit` enters no condition",
}


def entered_conditions(path: Path, root: Path = SOURCE) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    conditions = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "Condition":
            conditions.update(target.attr for target in node.targets if isinstance(target, ast.Attribute))
    for node in ast.walk(tree):
        if isinstance(node, ast.With):
            for item in node.items:
                expression = item.context_expr
                if isinstance(expression, ast.Attribute) and expression.attr in conditions:
                    yield f"{path.relative_to(root)}:{node.lineno}"


def test_no_condition_is_entered_where_an_interrupt_can_come() -> None:
    files = [path for path in SOURCE.rglob("*.py") if str(path.relative_to(SOURCE)) not in EXEMPT]
    assert len(files) > 200
    assert [place for path in files for place in entered_conditions(path)] == []


def uses_futures(path: Path) -> bool:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "concurrent.futures":
            if {name.name for name in node.names} - {"Executor", "CancelledError"}:
                return True
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("concurrent.futures."):
            return True
    return False


def test_no_future_is_used_where_an_interrupt_can_come() -> None:
    files = [path for package in DATA_PATH for path in (SOURCE / package).rglob("*.py")]
    assert {str(path.relative_to(SOURCE)) for path in files if uses_futures(path)} == set(FUTURES)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from concurrent.futures import wait", True),
        ("from concurrent.futures import Executor, ThreadPoolExecutor", True),
        ("import concurrent.futures; concurrent.futures.wait(())", True),
        ("from concurrent.futures import Executor", False),
    ],
)
def test_rule_for_futures_finds_the_lines_that_use_one(line: str, found: bool, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(line)
    assert uses_futures(tmp_path / "x.py") is found


def test_rule_finds_an_entered_condition(tmp_path: Path) -> None:
    lines = ("self._c = threading.Condition()", "with self._c:", "    pass")
    (tmp_path / "x.py").write_text("\n".join(lines))
    assert list(entered_conditions(tmp_path / "x.py", tmp_path)) == ["x.py:2"]
