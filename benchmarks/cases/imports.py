"""The start of a process: `import millrace`, the first file system, and `millrace --help`.

Each contender starts processes one after the other and reports the least CPU time and wall time of one, in milliseconds.
Bytecode is cached, as it is after an installation.
"""

from __future__ import annotations

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
    yield Prepared(
        {"processes": 2 if options.quick else 15, "bytecode": str(bytecode)},
        expected=0,
        notes=("The least of all processes. Goals: `import millrace` 150 ms of CPU, `millrace --help` 200 ms.",),
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


def _contestant(program: str) -> Contestant:
    def run(measure: Measure, context: Mapping[str, Any]) -> int:
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        variables.update(PYTHONPYCACHEPREFIX=context["bytecode"], MILLRACE_CACHE_DIR=context["scratch"])

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
