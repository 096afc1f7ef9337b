"""Ctrl-C while the command `millrace` is still importing."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

_INTERRUPTED = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            os.kill(os.getpid(), signal.SIGINT)

_, moment, handler = sys.argv
sys.argv = ["millrace", "status"]
if handler == "ignored":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.meta_path.insert(0, Interrupt())
from millrace_command import main
sys.exit(main())
"""


def run(moment: str, handler: str = "usual") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _INTERRUPTED, moment, handler]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    "moment", ["millrace", "fsspec", "numpy", "numpy.linalg", "pyarrow.lib", "click", "millrace.cli.status"]
)
def test_interrupt_at_any_import_prints_one_line(moment: str) -> None:
    done = run(moment)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "millrace: interrupted; nothing is left running\n"


def test_ignored_interrupt_during_imports_stays_ignored() -> None:
    assert run("pyarrow.lib", "ignored").returncode != 130


def test_console_script_millrace_calls_millrace_command_main() -> None:
    (found,) = entry_points(group="console_scripts", name="millrace")
    assert found.value == "millrace_command:main"
