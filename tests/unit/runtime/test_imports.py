"""A process forks while one of its threads imports a module for its first request. The child's first request completes."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, threading, time

began = threading.Event()

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}" and not began.is_set():
            began.set()
            time.sleep(1.0)

sys.meta_path.insert(0, Slow())

{prepare}

assert "{module}" not in sys.modules
thread = threading.Thread(target=use)
thread.start()
assert began.wait(120)
child = os.fork()
if not child:
    use()
    os._exit(0)
thread.join()
deadline = time.monotonic() + 120
while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
    time.sleep(0.02)
if ended == (0, 0):
    os.kill(child, 9)
    os.waitpid(child, 0)
print("hangs" if ended == (0, 0) else ended[1])
"""

LIMITED = """
from millrace.origin import open_origin
origin = open_origin("http")

def use():
    origin.limiter_of("host/key")
"""

REQUEST = """
from millrace.origin.base import LimitedOrigin, Limits
from tests.support.origins import MemoryOrigin
inner = MemoryOrigin()
inner.put("a", b"1")
origin = LimitedOrigin(inner, Limits.of("s3"))

def use():
    assert origin.head("a").size == 1
"""

OBSTORE = """
from millrace.origin.obstore_library import obstore_library

def use():
    obstore_library().store.MemoryStore()
"""

ANY = """
from millrace.runtime.forks import imported

def use():
    assert imported("botocore.session").Session
"""

PACKAGE = """
import millrace

def use():
    assert callable(millrace.filesystem)
"""

LOAD = """
import tempfile
import millrace
folder = tempfile.mkdtemp()
open(f"{folder}/a", "wb").write(b"1")
fs = millrace.filesystem("file", cache_dir=f"{folder}/cache", min_free=0, members="none")
fs.cat_file(f"{folder}/a")

def use():
    assert fs.load(f"{folder}/a").done_objects == 1
"""


@pytest.mark.parametrize(
    ("module", "prepare"),
    [
        ("millrace.filesystem.filesystem", PACKAGE),
        ("millrace.origin.limits.retrying", REQUEST),
        ("millrace.origin.limits.slots", LIMITED),
        ("millrace.filesystem.loading", LOAD),
        ("obstore.store", OBSTORE),
        ("botocore.session", ANY),
    ],
)
def test_import_in_forked_child_during_import_succeeds(module: str, prepare: str) -> None:
    program = PROGRAM.format(module=module, prepare=prepare)
    # Python 3.12 warns of a fork next to threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_module_is_imported_once_and_only_when_needed() -> None:
    program = """
import sys
from millrace.origin import open_origin
open_origin("s3", {"anon": True})
for name in ("millrace.origin.limits.retrying", "millrace.origin.limits.slots", "obstore"):
    assert name not in sys.modules, name
from millrace.runtime.forks import imported
assert imported("colorsys") is sys.modules["colorsys"] is imported("colorsys")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
