"""A process that reads through pyarrow ends after pyarrow's threads have released what they hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# A thread of C, as pyarrow's are, asks for the interpreter's lock while the script's last line holds it. A busy machine may
# run that thread late: each sleep of the pause waits for it.
SCRIPT = """
import ctypes, os, sys, time
import millrace

fs = millrace.filesystem("file", cache_dir=sys.argv[1])
released = []
release = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: released.append(os.write(1, b"released")))
thread = ctypes.c_ulong()
sys.setswitchinterval(1000)
ctypes.PyDLL(None).pthread_create(ctypes.byref(thread), None, release, None)
until = time.monotonic() + 0.3
while time.monotonic() < until:
    pass

def sleep(seconds, real=time.sleep, until=time.monotonic() + 120):
    real(seconds)
    while not released and time.monotonic() < until:
        real(seconds)

time.sleep = sleep
"""


def test_native_thread_that_waits_for_the_interpreter_at_exit_releases_first(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=300)
    assert done.stdout == b"released"


def test_ctrl_c_in_the_pause_prints_nothing(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time, millrace\n"
        "millrace.filesystem('file', cache_dir=sys.argv[1])\n"
        "time.sleep = lambda seconds: signal.raise_signal(signal.SIGINT)\n"
        "sys.exit(7)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (7, b"", b"")
