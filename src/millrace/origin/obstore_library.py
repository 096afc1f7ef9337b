"""obstore, usable also in forked processes.

obstore runs its requests on threads of one runtime that lives in the extension module. A forked child inherits the runtime
without its threads, and every request there would wait forever, also with new clients. A child therefore loads a second
image of the extension, copied to an anonymous file (the dynamic loader identifies a library by its inode), which starts its
own runtime. That costs a child about 20 ms and 15 MB, once, and only when the parent had used obstore.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from millrace.runtime import forks
from millrace.runtime.forks import importing

_EXTENSION = "obstore._obstore"

_loaded_in: forks.Owner | None = None


def obstore_library() -> Any:
    """The `obstore` package for this process. Its types and errors must not be kept across a fork."""
    global _loaded_in
    if _loaded_in is None or not _loaded_in.is_this_process:
        with importing():
            if _loaded_in is None or not _loaded_in.is_this_process:
                if _loaded_in is not None:
                    _load_second_image()
                _import()
                # Last: another thread must not use a half imported package.
                _loaded_in = forks.Owner()
    return sys.modules["obstore"]  # the child has another package object than the parent


def is_panic(error: BaseException) -> bool:
    """Whether an error is an internal one of obstore; pyo3 raises a `BaseException` whose class cannot be imported."""
    return (type(error).__module__, type(error).__name__) == ("pyo3_runtime", "PanicException")


def _import() -> None:
    for name in ("obstore.store", "obstore.exceptions"):
        importlib.import_module(name)  # not `imported`: the child's package is another one


class _SecondImage:
    """Finds the extension in the copied file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _EXTENSION:
            return None
        return importlib.util.spec_from_loader(name, importlib.machinery.ExtensionFileLoader(name, self._path))


def _load_second_image() -> None:
    """Replace the obstore package of this process by one over a fresh copy of the extension."""
    source: Any = sys.modules[_EXTENSION]
    copy = os.memfd_create("millrace-obstore", os.MFD_CLOEXEC)
    try:
        with open(_original_path or source.__file__, "rb") as file:
            while os.sendfile(copy, file.fileno(), None, 1 << 30):
                pass
        for name in [name for name in sys.modules if name == "obstore" or name.startswith("obstore.")]:
            _retired.append(sys.modules.pop(name))
        finder: Any = _SecondImage(f"/proc/self/fd/{copy}")
        sys.meta_path.insert(0, finder)
        try:
            _import()
        finally:
            sys.meta_path.remove(finder)
    finally:
        os.close(copy)


def _remember_path() -> str | None:
    package = importlib.util.find_spec(_EXTENSION.partition(".")[0])
    if package is None:
        return None
    # Not by its full name, which would import the package: a process that finds everything cached never needs it.
    spec = importlib.machinery.PathFinder.find_spec(_EXTENSION, package.submodule_search_locations)
    return spec.origin if spec is not None else None


# The path of the extension; the module that a grandchild inherits has only "/proc/self/fd/...".
_original_path: str | None = _remember_path()
# The modules of the parent are kept: unloading them would run destructors that wait for its threads.
_retired: list[ModuleType] = []
