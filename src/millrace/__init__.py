"""Millrace: the I/O layer of a Ray training cluster.

Data sets stream in through a cache on the nodes' idle disks (`millrace.filesystem`), checkpoints stream out compressed
(`millrace.checkpoint`).

`import millrace` loads no library. The first use of `filesystem` or `MillraceFileSystem` loads everything that a read needs,
so that no later read imports a module. `__init__.pyi` declares the public names for type checkers and editors.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from millrace import event_log as _event_log  # logs the events from now on
from millrace._version import __version__
from millrace.cluster.node_starter import set_node_starter
from millrace.events import Event, add_hook
from millrace.runtime.forks import imported, importing

del _event_log

__all__ = ["MillraceFileSystem", "__version__", "filesystem"]


class _Millrace(ModuleType):
    """The package as a module whose attribute `filesystem` is always the function.

    A function and a subpackage have this name. The import system sets the attribute to the subpackage when it is loaded.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "filesystem" or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickling imports the package. Ray pickles the modules that a function uses if their type is `ModuleType`."""
        return import_module, (__name__,)


sys.modules[__name__].__class__ = _Millrace


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with importing():  # a fork waits for it
        from millrace.filesystem import MillraceFileSystem, filesystem

    globals().update(MillraceFileSystem=MillraceFileSystem, filesystem=filesystem)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _count_values(event: Event) -> None:
    """See `millrace.cache.measures.count_event`. Imports it at the first event with values: a save may use nothing else of
    the cache.
    """
    if event.values is not None:
        imported("millrace.cache.measures").count_event(event)


add_hook(_count_values)


def _start_node(*arguments: Any, **named: Any) -> Any:
    """See `millrace.node.process.start_node`. Imports it at the first call, because most processes only read."""
    with importing():
        from millrace.node.process import start_node

    return start_node(*arguments, **named)


set_node_starter(_start_node)
