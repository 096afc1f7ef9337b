"""Processes in different PID namespaces, as those of containers, that share one index."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.indexes import new_index

pytestmark = pytest.mark.root

_READ = """
import sys
from pathlib import Path
from millrace.errors import StorageError
from millrace.store.index import Index

try:
    index = Index(Path(sys.argv[1]))
    index.used_bytes()
except StorageError as error:
    print(error, flush=True)
else:
    print("read", flush=True)
sys.stdin.read()
"""


def _first_process_of_a_namespace(directory: Path) -> "subprocess.Popen[str]":
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", _READ, str(directory)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_second_process_with_a_number_gets_an_error_that_names_the_cause(tmp_path: Path) -> None:
    with new_index(tmp_path / "index") as index, _first_process_of_a_namespace(tmp_path / "index") as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "read\n"  # another number than that of this process
        with _first_process_of_a_namespace(tmp_path / "index") as second:
            assert second.stdout is not None
            error = second.stdout.readline()
            second.communicate()
        assert "a process of another container has the same number as this one (1)" in error
        assert "in one PID namespace" in error
        assert index.used_bytes() == 0
        first.communicate()
