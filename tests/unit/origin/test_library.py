"""The import of the obstore package by concurrent threads."""

import subprocess
import sys

PROGRAM = """
import importlib, sys, threading, time, types
from millrace.origin.obstore_library import obstore_library

assert "obstore" not in sys.modules
names = ("obstore", "obstore.store", "obstore.exceptions")
really = importlib.import_module

def half_and_then_whole(name):
    # As other threads see an import on a busy machine: the names exist before their objects.
    halves = [each for each in names if each not in sys.modules]
    sys.modules.update({each: types.ModuleType(each) for each in halves})
    time.sleep(0.3)
    for each in halves:
        del sys.modules[each]
    return really(name)

importlib.import_module = half_and_then_whole
found = []

def use():
    library = obstore_library()
    found.append((library.store.S3Store, library.exceptions.BaseError))

threads = [threading.Thread(target=use) for _ in range(8)]
for thread in threads:
    thread.start()
    time.sleep(0.05)
for thread in threads:
    thread.join()
print(len(found))
"""


def test_obstore_import_by_concurrent_threads_returns_the_whole_library() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.stderr) == ("8\n", "")
