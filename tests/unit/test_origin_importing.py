"""A process forks while one of its threads imports what its first request needs: the child's own first request ends."""

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
assert began.wait(20)
child = os.fork()
if not child:
    use()
    os._exit(0)
thread.join()
deadline = time.monotonic() + 20
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
    origin.budget_of("host/key")
"""

REQUEST = """
from millrace.origin.limits import LimitedOrigin, Limits
from millrace.testing.origins import MemoryOrigin
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
from millrace.origin.importing import imported

def use():
    assert imported("botocore.session").Session
"""


@pytest.mark.parametrize(
    ("module", "prepare"),
    [
        ("millrace.origin.limits.retrying", REQUEST),
        ("millrace.origin.limits.budget", LIMITED),
        ("obstore.store", OBSTORE),
        ("botocore.session", ANY),
    ],
)
def test_a_fork_while_another_thread_imports(module: str, prepare: str) -> None:
    program = PROGRAM.format(module=module, prepare=prepare)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_a_request_from_the_cache_needs_no_import_and_a_module_is_imported_once() -> None:
    program = """
import sys
from millrace.origin import open_origin
open_origin("s3", {"anon": True})
for name in ("millrace.origin.limits.retrying", "millrace.origin.limits.budget", "obstore"):
    assert name not in sys.modules, name
from millrace.origin.importing import imported
assert imported("colorsys") is sys.modules["colorsys"] is imported("colorsys")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
