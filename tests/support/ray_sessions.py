"""A Ray of the test's own on this machine, by `ray.init`."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import psutil

_ATTEMPTS = 3


def start_ray(**options: Any) -> None:
    """`ray.init`, again where it fails: it waits for its raylet for half a minute, too short on a very busy machine."""
    import ray

    for attempt in range(1, _ATTEMPTS + 1):
        before = set(psutil.Process().children(recursive=True))
        try:
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
