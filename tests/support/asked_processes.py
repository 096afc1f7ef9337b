"""Processes with a file system that run commands of a test, one after the other; their clock can be set."""

from __future__ import annotations

import base64
import json
import threading
from pathlib import Path
from typing import Any

from tests.support import patience
from tests.support.fork_server import ForkedProcess, node_server

from millrace.testing.process import log_tail

_PROGRAM = """
import base64, json, sys
import millrace
from tests.support import settable_time

if (clock := json.loads(sys.stdin.readline())) is not None:
    settable_time.hold(clock)
fs = millrace.filesystem("s3", **json.loads(sys.stdin.readline()))

def answer(do, key="", value=0.0):
    if do == "advance":
        settable_time.advance(value)
    elif do == "write":
        fs.pipe_file(key, base64.b64decode(value))
    elif do == "rm":
        fs.rm(key)
    elif do == "cat":
        return base64.b64encode(fs.cat_file(key)).decode()
    elif do == "open":
        with fs.open(key, "rb") as file:
            return base64.b64encode(file.read()).decode()
    elif do == "native":
        with fs.open_input_file(key) as file:
            return base64.b64encode(file.read()).decode()
    elif do == "info":
        return fs.info(key)["ETag"]
    elif do == "exists":
        return fs.exists(key)
    elif do == "ls":
        return sorted(fs.ls(key, detail=False))
    elif do == "find":
        return {name: entry["ETag"] for name, entry in fs.find(key, detail=True).items()}
    else:
        raise ValueError(do)

for line in sys.stdin:
    try:
        reply = {"answer": answer(**json.loads(line))}
    except OSError as error:
        reply = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(reply), flush=True)
"""


class AskedError(Exception):
    """The error of the process: its name and message."""


class AskedProcess:
    """A process with the file system `millrace.filesystem("s3", **options)`. Stop it in the end.

    With `clock` its time is that until it is set: a busy machine does not let metadata expire. With `patient` it waits for
    other processes as `tests/support/patience.py` describes.
    """

    def __init__(
        self, log: Path, options: dict[str, Any], *, clock: float | None = None, patient: bool = False
    ) -> None:
        self._log = log
        self._lock = threading.Lock()
        program = patience.CODE + _PROGRAM if patient else _PROGRAM
        self._process = ForkedProcess(node_server(), program, log=log, pipes=True)
        self._write(clock)
        self._write(options)

    def _write(self, line: dict[str, Any] | float | None) -> None:
        self._process.stdin.write(json.dumps(line).encode() + b"\n")
        self._process.stdin.flush()

    def ask(self, do: str, key: str = "", **more: Any) -> Any:
        """Run a command in it; returns the result. Raises `AskedError` if it failed. Thread-safe."""
        with self._lock:
            self._write({"do": do, "key": key, **more})
            line = self._process.stdout.readline()
        assert line, log_tail(self._log, 5)
        reported = json.loads(line)
        if "error" in reported:
            raise AskedError(reported["error"])
        return reported["answer"]

    def advance(self, seconds: float) -> None:
        """Set its clock forward."""
        self.ask("advance", value=seconds)

    def read(self, key: str, way: str = "cat") -> bytes:
        """All bytes of an object, by `cat`, `open` or `native`."""
        return base64.b64decode(self.ask(way, key))

    def write(self, key: str, data: bytes) -> None:
        """Write an object."""
        self.ask("write", key, value=base64.b64encode(data).decode())

    def stop(self) -> None:
        """End it."""
        self._process.kill()
