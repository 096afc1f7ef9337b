"""Imports by a string follow the layers of `pyproject.toml`, too. import-linter sees only import statements."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
# `package.module`, or `package.module:class`.
_OWN_NAME = re.compile(r"(millrace(?:\.\w+)+)(?::\w+)?")
# Files that import a name that is not a constant: it is in a table that the test reads, relative to the package itself,
# which is above its layers, or given by the caller.
COMPUTED = {
    "millrace/checkpoint/__init__.py",
    "millrace/checkpoint/integrations/__init__.py",
    "millrace/cli/checkpoints/common.py",
    "millrace/origin/obstore_library.py",
    "millrace/origin/schemes.py",
    "millrace/runtime/forks.py",
}


def _module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_module(name: str) -> bool:
    path = SOURCE.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def _called(node: ast.AST) -> str:
    """The last part of the name of the function that `node` calls."""
    return ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


def strings_in(tree: ast.AST) -> Iterator[str]:
    """Modules of this package that a constant string names, except names of loggers."""
    for node in ast.iter_child_nodes(tree):
        if _called(node) == "getLogger":
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = _OWN_NAME.fullmatch(node.value)
            if match and _is_module(match[1]):
                yield match[1]
        yield from strings_in(node)


def computed_imports(tree: ast.AST) -> bool:
    return any(
        _called(node) in ("imported", "import_module") and not isinstance(node.args[0], ast.Constant)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    )


def levels() -> dict[str, dict[str, tuple[int, bool]]]:
    """Of each container: the level of each module in it, 0 at the top, and whether modules of this level are independent."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return {
        container: {
            name.strip(): (level, ":" not in layer)
            for level, layer in enumerate(contract["layers"])
            for name in re.split(r"[|:]", layer)
        }
        for contract in contracts
        if contract["type"] == "layers"
        for container in contract["containers"]
    }


def wrong_direction(importer: str, name: str) -> str:
    """The layers that `importer` breaks by an import of the module `name`; empty if there are none."""
    for container, level_of in levels().items():
        prefix = f"{container}."
        if not (importer.startswith(prefix) and name.startswith(prefix)):
            continue
        upper, lower = (each.removeprefix(prefix).partition(".")[0] for each in (importer, name))
        if upper == lower or upper not in level_of or lower not in level_of:
            continue
        (above, independent), (below, _) = level_of[upper], level_of[lower]
        if above > below or (above == below and independent):
            return f"{importer} -> {name}: in {container}, {upper} is not above {lower}"
    return ""


def test_modules_imported_by_a_string_are_in_lower_layers() -> None:
    named = [
        (_module_of(path), name)
        for path in sorted(SOURCE.rglob("*.py"))
        for name in strings_in(ast.parse(path.read_text()))
    ]
    assert ("millrace.origin.schemes", "millrace.origin.web") in named
    assert ("millrace.origin.base", "millrace.origin.limits.slots") in named
    assert [wrong for each in named if (wrong := wrong_direction(*each))] == []


def test_imports_of_computed_names_are_in_listed_files_only() -> None:
    """The strings of other imports are constants, which the test above reads."""
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if computed_imports(ast.parse(path.read_text()))
    }
    assert found == COMPUTED


@pytest.mark.parametrize(
    ("importer", "code", "is_wrong"),
    [
        ("millrace.cache.disk", 'imported("millrace.filesystem.loading")', True),
        ("millrace.origin.limits.slots", 'name = "millrace.origin.web:WebOrigin"', True),
        ("millrace.origin.web.origin", 'imported("millrace.origin.object_store")', True),  # the same layer
        ("millrace.origin.base", 'imported("millrace.origin.limits.slots")', False),
        ("millrace.cluster.source", 'import_module("millrace.cache.node")', False),
        ("millrace.cache.disk", 'logging.getLogger("millrace.cluster")', False),
    ],
)
def test_string_in_the_wrong_direction_is_detected(importer: str, code: str, is_wrong: bool) -> None:
    wrong = [name for name in strings_in(ast.parse(code)) if wrong_direction(importer, name)]
    assert bool(wrong) == is_wrong
