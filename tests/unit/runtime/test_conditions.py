"""No thread enters a `threading.Condition`: an interrupt inside its Python code would leave its lock held for ever."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import millrace

SOURCE = Path(millrace.__file__).parent
# Threads of the node process, whose main thread only waits.
EXEMPT = {"node/process.py", "node/drain.py"}


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


def test_rule_finds_an_entered_condition(tmp_path: Path) -> None:
    lines = ("self._c = threading.Condition()", "with self._c:", "    pass")
    (tmp_path / "x.py").write_text("\n".join(lines))
    assert list(entered_conditions(tmp_path / "x.py", tmp_path)) == ["x.py:2"]
