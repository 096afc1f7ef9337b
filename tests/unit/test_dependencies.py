"""Every library that the package imports is declared: in the base if every user imports it, otherwise in an extra."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, packages_distributions
from pathlib import Path

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
# Packages that are of use without any extra. The rest (checkpoints, Ray, the demo, servers for tests) needs one.
BASE = ("cache", "cli", "cluster", "filesystem", "node", "origin", "runtime", "store")
# Of these, the packages whose functions run in threads of processes that fork.
READ_PATH = ("cache", "cluster", "filesystem", "origin", "runtime", "store")
# Of these, modules that are imported only where Ray is.
OF_RAY = re.compile(r"millrace/cluster/membership/ray\w*\.py")


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(requirements: list[str]) -> set[str]:
    return {normalized(re.match(r"[\w.-]+", each)[0]) for each in requirements}  # type: ignore[index]


def is_passed_over(node: ast.AST, at_once: bool) -> bool:
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.dump(node.test)
    return at_once and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def imports_of(tree: ast.AST, *, at_once: bool) -> Iterator[str]:
    """The top-level names that a module imports; `at_once`: only those that it imports when it is imported itself."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
        elif is_passed_over(node, at_once):
            continue
        else:
            is_lazy = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "imported"
            if is_lazy and isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value).partition(".")[0]
            yield from imports_of(node, at_once=at_once)


def plain_lazy_imports(node: ast.AST, *, in_function: bool = False) -> Iterator[int]:
    """The lines of import statements inside functions, but outside of `with importing()`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            if in_function:
                yield child.lineno
        elif not is_passed_over(child, at_once=False) and not (
            isinstance(child, ast.With) and ast.unparse(child.items[0].context_expr) == "importing()"
        ):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from plain_lazy_imports(child, in_function=in_function or is_function)


def third_party(*, at_once: bool) -> dict[str, set[str]]:
    """The libraries that are imported, by the name of the module, with the files that import them."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for module in imports_of(ast.parse(path.read_text()), at_once=at_once):
            if module not in sys.stdlib_module_names and not module.startswith("millrace"):
                found.setdefault(module, set()).add(path.relative_to(SOURCE).as_posix())
    return found


def undeclared(modules: dict[str, set[str]], known: set[str]) -> dict[str, list[str]]:
    """Those modules that come with none of the `known` distributions."""
    of = packages_distributions()
    return {
        module: sorted(files)
        for module, files in modules.items()
        if files and known.isdisjoint(map(normalized, of.get(module, [module])))
    }


def test_libraries_imported_anywhere_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: declared(each) for name, each in project["optional-dependencies"].items()}
    tests = extras.pop("dev")
    missing = undeclared(third_party(at_once=False), declared(project["dependencies"]).union(*extras.values()))
    # Part of Python from 3.14; older versions do not have it.
    missing.pop("compression", None)
    if sys.version_info >= (3, 14):
        missing.pop("backports", None)
    # Used only where they are installed, which is looked at first.
    assert missing.pop("certifi") == ["millrace/origin/reachability.py"]
    # For the tests of other implementations, which have it.
    assert "pytest" in tests
    assert all(file.startswith("millrace/testing/") for file in missing.pop("pytest"))
    assert missing == {}


def test_libraries_imported_by_the_base_are_base_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def is_base(file: str) -> bool:
        return not OF_RAY.fullmatch(file) and ("/" not in file.removeprefix("millrace/") or file.split("/")[1] in BASE)

    imported = {name: {file for file in files if is_base(file)} for name, files in third_party(at_once=True).items()}
    assert len(imported["typing_extensions"]) > 10
    assert undeclared(imported, declared(project["dependencies"])) == {}


def test_lazy_imports_of_the_read_path_wait_for_forks() -> None:
    """A module that is half imported at a fork stays locked in the child, see `millrace.runtime.forks`."""
    files = [path for part in READ_PATH for path in (SOURCE / "millrace" / part).rglob("*.py")]
    assert len(files) > 100
    found = {
        path.relative_to(SOURCE).as_posix(): list(plain_lazy_imports(ast.parse(path.read_text()))) for path in files
    }
    assert {file: lines for file, lines in found.items() if lines and not OF_RAY.fullmatch(file)} == {}


def test_pinned_versions_accept_the_python_of_debian() -> None:
    """Debian 12 has Python 3.11.2. A pin that needs a later 3.11 cannot be installed there."""
    refused, checked = {}, 0
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name = line.partition("==")[0].strip()
        if not name or name.startswith("#"):
            continue
        try:
            wanted = metadata(name).get("Requires-Python")
        except PackageNotFoundError:  # of another platform or Python
            continue
        checked += 1
        if wanted and not SpecifierSet(wanted).contains("3.11.2"):
            refused[name] = wanted
    assert checked > 100
    assert not refused
