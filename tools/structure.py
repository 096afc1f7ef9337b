#!/usr/bin/env python3
"""Prints the structure of the source tree, one row per package: size, mechanisms and wording.

    python tools/structure.py [--json] [DIRECTORY]        # DIRECTORY: src/millrace of this clone by default

Columns:
  lines, files, classes   of Python source
  locks     places that create a lock or lock a file (threading, fcntl, multiprocessing)
  forks     `os.register_at_fork` calls
  pids      `os.getpid` calls and uses of `Owner.is_this_process`, most of which guard state that a forked child must not use
  mutable   module-level names bound to a mutable value, or rebound with `global`
  cycles    groups of files that import each other, also inside functions; imports under TYPE_CHECKING excluded
  words     matches of the pattern of words that treat a component as a person, without calls and definitions of a
            file's `tell()`; per 1,000 lines in brackets

Needs only the standard library.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

PERSONAL_WORDS = re.compile(
    r"\b(whoever|somebody|nobody|anybody|believ\w*|hears|heard|tells?(?!\()|told|says?|said|promis\w*|forgets?"
    r"|goes on|gone on|is no \w+|are no \w+)\b",
    re.IGNORECASE,
)
LOCKS = frozenset({"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "flock", "lockf", "fcntl"})
MUTABLE_CALLS = frozenset({"dict", "list", "set", "defaultdict", "deque", "OrderedDict", "WeakValueDictionary",
                           "WeakKeyDictionary", "WeakSet", "Counter", "Lock", "RLock", "local"})  # fmt: skip


@dataclass
class Row:
    """What one package holds."""

    package: str
    lines: int = 0
    files: int = 0
    classes: int = 0
    locks: int = 0
    forks: int = 0
    pids: int = 0
    mutable: int = 0
    cycles: int = 0
    words: int = 0


def measure(root: Path) -> list[Row]:
    """Returns one row per package directly below `root`, modules of `root` itself under its own name, and a total."""
    rows: dict[str, Row] = {}
    imports: dict[str, set[str]] = {}
    modules = {module_name(root, path): path for path in sorted(root.rglob("*.py"))}
    for name, path in modules.items():
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, filename=str(path))
        inside = path.relative_to(root)
        row = rows.setdefault(inside.parts[0] if len(inside.parts) > 1 else f"({root.name})", Row(""))
        row.lines += text.count("\n")
        row.files += 1
        row.words += len(PERSONAL_WORDS.findall(text))
        count_code(tree, row)
        imports[name] = set(imported_modules(tree, name, path.name == "__init__.py", modules))
    for cycle in cycles(imports):
        package = cycle[0].split(".")[1] if cycle[0].count(".") else ""
        rows.get(package, rows[f"({root.name})"]).cycles += 1
    for package, row in rows.items():
        row.package = package
    ordered = [rows[package] for package in sorted(rows)]
    total = Row("total")
    for row in ordered:
        for field in fields(Row)[1:]:
            setattr(total, field.name, getattr(total, field.name) + getattr(row, field.name))
    return [*ordered, total]


def module_name(root: Path, path: Path) -> str:
    """The dotted name of the module in `path`."""
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def count_code(tree: ast.Module, row: Row) -> None:
    """Adds the classes, locks, fork hooks, process-id guards and module-level mutable names of `tree` to `row`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            row.classes += 1
        elif isinstance(node, ast.Call):
            called = called_name(node)
            row.locks += called in LOCKS
            row.forks += called == "register_at_fork"
            row.pids += called == "getpid"
        elif isinstance(node, ast.Attribute):
            row.pids += node.attr == "is_this_process"
    rebound = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    mutable = {target for target, value in module_assignments(tree) if is_mutable(value)}
    row.mutable += len(rebound | mutable)


def called_name(call: ast.Call) -> str:
    """`flock` of `fcntl.flock(...)`."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def module_assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Names bound at module level, with their values; dunder names excluded."""
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = getattr(node, "value", None)
        for target in targets:
            if isinstance(target, ast.Name) and value is not None and not target.id.startswith("__"):
                yield target.id, value


def is_mutable(value: ast.expr) -> bool:
    """Whether `value` is an empty container, a lock or a thread-local: module state, not a constant table."""
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.List):
        return not value.elts
    return isinstance(value, ast.Call) and called_name(value) in MUTABLE_CALLS


def imported_modules(tree: ast.Module, name: str, is_package: bool, modules: Iterable[str]) -> Iterator[str]:
    """Modules of this tree that `name` imports, at its own import or later."""
    known = set(modules)
    package = name if is_package else name.rpartition(".")[0]
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                if full in known:
                    yield full
                elif base in known:
                    yield base


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below `node`, without those under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from statements(other)
        else:
            yield child
            yield from statements(child)


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan 1972), each sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph.get(name, ())):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            component = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(component) > 1:
                found.append(sorted(component))

    sys.setrecursionlimit(10_000)
    for name in sorted(graph):
        if name not in index:
            visit(name)
    return found


def table(rows: list[Row]) -> str:
    """The rows as aligned text."""
    names = [field.name for field in fields(Row)]
    lines = [f"{names[0]:<14}" + "".join(f"{name:>9}" for name in names[1:])]
    for row in rows:
        cells = [getattr(row, name) for name in names[1:]]
        share = f" ({1000 * row.words / row.lines:.1f})" if row.lines else ""
        lines.append(f"{row.package:<14}" + "".join(f"{cell:>9,}" for cell in cells) + share)
    return "\n".join(lines)


def main() -> None:
    """Prints the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, default=Path(__file__).parents[1] / "src" / "millrace")
    parser.add_argument("--json", action="store_true", help="print one JSON object per package")
    arguments = parser.parse_args()
    if not arguments.directory.is_dir():
        parser.error(f"{arguments.directory}: not a directory; name the package's directory, such as src/millrace")
    rows = measure(arguments.directory)
    print(json.dumps([asdict(row) for row in rows], indent=2) if arguments.json else table(rows))


if __name__ == "__main__":
    main()
