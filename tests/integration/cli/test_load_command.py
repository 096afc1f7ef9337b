"""`millrace load` as users run it, against a real S3 server behind a link that stalls: Ctrl-C, kill -9, refusals, and
continued loads.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import millrace
from millrace.filesystem import MillraceFileSystem
from millrace.origin import open_origin
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

OBJECTS, OBJECT_BYTES = 8, 5 << 20
PROGRESS = re.compile(r"listing$|(\d+%, )?\d+ of \d+\+? objects, ")


@pytest.fixture(scope="module")
def region(s3: S3Server) -> Iterator[EmulatedRegion]:
    s3.create_bucket("loads")
    origin = open_origin("s3", s3.target_options)
    for number in range(OBJECTS):
        origin.put(f"loads/train/{number}.bin", os.urandom(OBJECT_BYTES))
    with EmulatedRegion(s3.endpoint_url) as region:
        yield region


@pytest.fixture
def start(s3: S3Server, region: EmulatedRegion, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    environment = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": s3.key,
        "AWS_SECRET_ACCESS_KEY": s3.secret,
        "AWS_ENDPOINT_URL": region.endpoint_url,
        "MILLRACE_CACHE_DIR": str(tmp_path / "cache"),
        "MILLRACE_MIN_FREE": "0",
    }

    def start(*arguments: str, **more: str) -> subprocess.Popen[str]:
        region.reset()
        return subprocess.Popen(
            [sys.executable, "-m", "millrace.cli", "load", *arguments],
            env={**environment, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def without_progress(err: str) -> str:
    """What a command has printed besides its progress, of which there is a line for each ten seconds that it took."""
    return "".join(line for line in err.splitlines(keepends=True) if not PROGRESS.match(line))


def complete(fs: MillraceFileSystem) -> int:
    """How many objects the index has wholly."""
    return sum(found.complete for found in fs.cached("s3://loads/train"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_load_continues_with_the_missing_objects(
    start: Callable[..., subprocess.Popen[str]],
    region: EmulatedRegion,
    s3: S3Server,
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    options = {**s3.target_options, "endpoint_url": region.endpoint_url}
    fs = millrace.filesystem("s3", target_options=options, cache_dir=str(tmp_path / "cache"), min_free=0)
    # Three objects arrive whole, the others in part.
    region.fail("stall", method="GET", path="/loads/train/*", skip=3, after_bytes=1 << 20, seconds=60)
    process = start("s3://loads/train")
    deadline = time.monotonic() + 120
    while complete(fs) < 3 or not sum(region.fault_hits()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    region.clear_faults()
    err = without_progress(err)
    assert out == ""
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert err.startswith("millrace: interrupted: ")
        assert f" of {OBJECTS} objects, " in err
        assert err.endswith("run the same command again to continue\n")
    else:
        assert process.returncode == -signal.SIGKILL
    before = complete(fs)
    assert 3 <= before < OBJECTS
    again = start("s3://loads/train", "--json")
    out, err = again.communicate(timeout=300)
    done = json.loads(out)
    assert (again.returncode, without_progress(err), done["done_objects"]) == (0, "", OBJECTS)
    assert done["done_bytes"] == OBJECTS * OBJECT_BYTES
    # Complete objects are not fetched again, by the report and by the requests.
    assert done["fetched_bytes"] <= (OBJECTS - before) * OBJECT_BYTES
    assert region.stats(prefix="/loads/train/").requests <= OBJECTS - before
    assert complete(fs) == OBJECTS
    assert fs.load("s3://loads/train", verify=True).bad_blocks == 0


def test_load_with_wrong_credentials_prints_one_line(start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("s3://loads/train", AWS_SECRET_ACCESS_KEY="wrong")
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, without_progress(err).count("\n")) == (1, "", 1)
    assert "denied: check the credentials" in err


def test_load_into_too_small_cache_exits_with_3(start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("s3://loads/train", MILLRACE_CAPACITY="20MB")
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (3, "")
    assert "millrace: the cache or a quota in it is full: " in err
    assert f" of {OBJECTS} objects, " in err
