"""A Ray of the test's own on this machine, by `ray.init`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any
from unittest import mock

import psutil

_ATTEMPTS = 3


@contextmanager
def without_monitors() -> Iterator[None]:
    """Nodes that start here have no dashboard server, log monitor or autoscaler.

    The tests use none of them, and together they take two seconds of CPU time. Ray has no options for `ray.init` that
    leave them out: even without the dashboard, its server runs.
    """
    from ray._private.node import Node

    with ExitStack() as patches:
        for start in ("start_api_server", "start_log_monitor", "start_monitor"):
            patches.enter_context(mock.patch.object(Node, start, _start_nothing))
        yield


def start_ray(*, monitors: bool = False, **options: Any) -> None:
    """`ray.init`, again where it fails: it waits for its raylet for half a minute, too short on a very busy machine.

    With `monitors`, all processes of Ray run: see `without_monitors`.
    """
    import ray

    for attempt in range(1, _ATTEMPTS + 1):
        before = set(psutil.Process().children(recursive=True))
        try:
            with nullcontext() if monitors else without_monitors():
                ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR", **options)
        except Exception:
            ray.shutdown()
            # What has started so far would stay until this process ends.
            for process in set(psutil.Process().children(recursive=True)) - before:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            if attempt == _ATTEMPTS:
                raise
        else:
            return


def _start_nothing(*_: Any, **__: Any) -> None:
    pass
