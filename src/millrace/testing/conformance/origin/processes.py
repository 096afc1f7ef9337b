"""Copies in other processes, by fork and by pickle, and the secrets in them."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import wait

import pytest

from millrace.origin import Origin
from millrace.testing.conformance.origin.base import Contents, FromEnvironment, OriginSuite

_SECONDS = 60

_READ_A_COPY = """
import base64, pickle, sys
origin = pickle.loads(base64.b64decode(sys.stdin.readline()))
sys.stdout.buffer.write(bytes(origin.read(sys.argv[1], 0, int(sys.argv[2]))))
"""


def _in_forked_child(action: Callable[[], bytes]) -> bytes:
    """The result of `action` in a forked child. Fails if the child raises, or has not ended after a minute."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):  # no exception may run the parent's code a second time here
            os.write(write_end, action())
            status = 0
        os._exit(status)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        ended = bool(wait([read_end], _SECONDS))
        if not ended:
            os.kill(pid, signal.SIGKILL)
        response = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert ended, f"the forked child has not ended after {_SECONDS} seconds"
    assert status == 0, "the forked child could not read"
    return response


def _in_new_process(pickled: bytes, key: str, size: int) -> bytes:
    """The first `size` bytes of `key`, read in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", _READ_A_COPY, key, str(size)],
        input=base64.b64encode(pickled) + b"\n",
        capture_output=True,
        timeout=_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


class Processes(OriginSuite):
    """An origin works in every process of its users."""

    def test_unpickled_copy_reads_the_same_bytes(self, origin: Origin, contents: Contents, root: str) -> None:
        if not self.picklable:
            pytest.skip("lives in the memory of one process")
        contents.put(f"{root}/object", b"data")
        copy = pickle.loads(pickle.dumps(origin))
        assert copy.identity == origin.identity
        assert bytes(copy.read(f"{root}/object", 0, 4)) == b"data"

    def test_copy_in_new_process_reads_the_same_bytes(self, origin: Origin, contents: Contents, root: str) -> None:
        if not self.picklable:
            pytest.skip("lives in the memory of one process")
        contents.put(f"{root}/object", b"data")
        assert bytes(origin.read(f"{root}/object", 0, 4)) == b"data"  # a used one is pickled
        assert _in_new_process(pickle.dumps(origin), f"{root}/object", 4) == b"data"

    def test_origin_in_forked_child_reads_the_same_bytes(self, origin: Origin, contents: Contents, root: str) -> None:
        contents.put(f"{root}/object", b"data")
        assert bytes(origin.read(f"{root}/object", 0, 4)) == b"data"

        def read_twice_and_in_a_grandchild() -> bytes:
            mine = b"".join(bytes(origin.read(f"{root}/object", start, start + 2)) for start in (0, 2))
            return mine + _in_forked_child(lambda: bytes(origin.read(f"{root}/object", 0, 4)))

        for _ in range(2):
            assert _in_forked_child(read_twice_and_in_a_grandchild) == b"datadata"
        assert bytes(origin.read(f"{root}/object", 0, 4)) == b"data"  # the parent's origin still works

    def test_pickle_with_environment_credentials_contains_no_secret(
        self, environment_origin: FromEnvironment | None, contents: Contents, root: str
    ) -> None:
        if environment_origin is None:
            pytest.skip("this origin takes no credentials from the environment")
        origin, secrets = environment_origin.origin, environment_origin.secrets
        contents.put(f"{root}/object", b"data")
        assert bytes(origin.read(f"{root}/object", 0, 4)) == b"data"
        pickled = pickle.dumps(origin)
        assert [secret for secret in secrets if secret.encode() in pickled or secret in repr(origin)] == []
        assert _in_new_process(pickled, f"{root}/object", 4) == b"data"
