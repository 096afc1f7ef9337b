"""The start of a process: `import millrace`, the first file system, and `millrace --help`.

Each contender starts processes one after the other and reports the least CPU time and wall time of one, in milliseconds.
Bytecode is cached, as it is after an installation. "a worker, after ray.data" measures inside the process, after the
imports of a Ray worker: what `import millrace`, the first file system, and the first byte of a cached object add to them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.harness import Case, Contestant, Measure, Options, Prepared


@contextmanager
def prepare(options: Options) -> Iterator[Prepared]:
    bytecode = options.scratch / "bytecode"
    bytecode.mkdir()
    file = options.scratch / "object.bin"
    file.write_bytes(b"x" * 1_000_000)
    yield Prepared(
        {"processes": 2 if options.quick else 15, "bytecode": str(bytecode), "object": str(file)},
        expected=0,
        notes=(
            "The least of all processes. Goals: `import millrace` 150 ms of CPU, `millrace --help` 200 ms; after ray.data "
            "25 ms of CPU for the import and the file system together, and 10 ms to the first byte of a cached object.",
        ),
    )


case = Case(name="imports", title="The start of a process", prepare=prepare, baseline="pyarrow, fsspec")

_PROGRAMS = {
    "Python alone": "pass",
    "pyarrow, fsspec": "import pyarrow.fs, fsspec",
    "import millrace": "import millrace",
    "millrace --help": "import sys, millrace_command; sys.argv = ['millrace', '--help']; millrace_command.main()",
    "millrace.filesystem(...)": "import millrace; millrace.filesystem('file')",
    "millrace.checkpoint": "import millrace.checkpoint",
}

# Its second argument is the number of bytes to read. The first process reads all, so that the others find them cached.
_WORKER = """
import json, sys, time
import ray, ray.data, pyarrow.fs, pyarrow.dataset, fsspec
start = time.process_time()
import millrace
imported = time.process_time()
fs = millrace.filesystem("file")
ready, opened = time.process_time(), time.perf_counter()
with fs.open_input_file(sys.argv[1]) as file:
    data = file.read(int(sys.argv[2]))
    first_byte = time.perf_counter() - opened
if data != b"x" * int(sys.argv[2]):
    sys.exit("wrong bytes")
requests = fs.cache_counters(settled=True)["origin_requests"]
print(json.dumps([imported - start, ready - imported, ready - start, first_byte, requests]))
"""


def _variables(context: Mapping[str, Any]) -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**variables, "PYTHONPYCACHEPREFIX": context["bytecode"], "MILLRACE_CACHE_DIR": context["scratch"]}


def _contestant(program: str) -> Contestant:
    def run(measure: Measure, context: Mapping[str, Any]) -> int:
        variables = _variables(context)

        def start() -> tuple[int, float, float]:
            began = time.perf_counter()
            process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL, env=variables)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, used.ru_utime + used.ru_stime, time.perf_counter() - began

        start()  # it writes the bytecode
        with measure("start") as figures:
            codes, cpu, wall = zip(*[start() for _ in range(context["processes"])], strict=True)
            figures["CPU ms"] = 1e3 * min(cpu)
            figures["wall ms"] = 1e3 * min(wall)
        return max(codes)

    return run


for _name, _program in _PROGRAMS.items():
    case.contender(_name)(_contestant(_program))


@case.contender("a worker, after ray.data")
def worker(measure: Measure, context: Mapping[str, Any]) -> int:
    def start(nbytes: int) -> list[float]:
        command = [sys.executable, "-c", _WORKER, context["object"], str(nbytes)]
        printed = subprocess.run(command, stdout=subprocess.PIPE, env=_variables(context), check=True).stdout
        seconds: list[float] = json.loads(printed)
        return seconds

    start(1_000_000)
    with measure("after ray.data") as figures:
        *columns, requests = zip(*[start(1) for _ in range(context["processes"])], strict=True)
        names = ("import CPU ms", "file system CPU ms", "both CPU ms", "first byte ms")
        figures.update({name: 1e3 * min(column) for name, column in zip(names, columns, strict=True)})
    return int(max(requests)) - 1  # the counter is that of the node: only the first process may read the original
