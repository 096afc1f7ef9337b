"""A process that reads objects through a file system and checks every byte; started by `LocalCluster.read_on`.

Reads its settings as a line of JSON, and writes a line of JSON for each pass.
"""

from __future__ import annotations

import faulthandler
import json
import random
import sys
import threading
import time
from typing import Any

import xxhash

import millrace
from millrace.errors import MillraceError

_LONG_SECONDS = 5.0


class _Watch:
    """Writes to stderr where every thread is when a read takes long, once for each such read."""

    def __init__(self) -> None:
        self.since: float | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        reported: float | None = None
        while True:
            time.sleep(0.5)
            since = self.since
            if since is not None and since != reported and time.monotonic() - since > _LONG_SECONDS:
                reported = since
                print(f"at {time.strftime('%H:%M:%S')} a read has taken {_LONG_SECONDS} s", file=sys.stderr, flush=True)
                faulthandler.dump_traceback()


def run(settings: dict[str, Any]) -> None:
    """Read according to the settings."""
    watch = _Watch()
    fs = millrace.filesystem("s3", **settings["options"])
    keys = dict(settings["keys"])
    ends = time.monotonic() + settings["seconds"] if "seconds" in settings else None
    order = list(keys)
    chance = random.Random(settings.get("seed", 0))
    passes = 0
    while passes < settings.get("passes", 1) if ends is None else time.monotonic() < ends:
        if "seed" in settings:
            chance.shuffle(order)
        print(json.dumps(_pass(fs, order, keys, settings.get("piece_bytes"), ends, watch)), flush=True)
        passes += 1


def _pass(
    fs: Any, order: list[str], keys: dict[str, str], piece_bytes: int | None, ends: float | None, watch: _Watch
) -> dict[str, Any]:
    started = time.monotonic()
    reads = nbytes = 0
    wrong: list[str] = []
    errors: list[str] = []
    longest = 0.0
    for key in order:
        if ends is not None and time.monotonic() > ends:
            break
        digest = xxhash.xxh3_64()
        before = watch.since = time.monotonic()
        try:
            with fs.open(key, "rb") as file:
                while True:
                    data = file.read(piece_bytes or -1)
                    now = time.monotonic()
                    longest = max(longest, now - before)
                    before = watch.since = now
                    reads += 1
                    nbytes += len(data)
                    digest.update(data)
                    if not data or piece_bytes is None:
                        break
        except MillraceError as error:
            errors.append(f"{key}: {error}")
            continue
        finally:
            watch.since = None
        if digest.hexdigest() != keys[key]:
            wrong.append(key)
    return {
        "reads": reads,
        "nbytes": nbytes,
        "wrong": wrong,
        "errors": errors,
        "longest_seconds": longest,
        "seconds": time.monotonic() - started,
        "counters": fs.cache_counters(),
    }


if __name__ == "__main__":
    run(json.loads(sys.stdin.readline()))
