"""A cold start of 64 worker processes, against a real S3 server behind a proxy that counts and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from millrace.origin import open_origin
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

WORKERS = 64
OBJECTS = 32
EACH = 4
NBYTES = 20_000

# Forked from one that has imported everything, so that all 64 begin together. Each prints one line of results.
PROGRAM = """
import json, os, sys, threading
from millrace.events import add_hook
from millrace.origin import object_store, open_origin
from millrace.origin.limits import retrying
import obstore.store

arguments = json.loads(sys.argv[1])
start, go = os.pipe()
answers, answer = os.pipe()
children = []
for worker in range(arguments["workers"]):
    pid = os.fork()
    if pid:
        children.append(pid)
        continue
    try:
        os.close(go)
        os.read(start, 1)  # returns when the parent has closed its end
        seen = []
        add_hook(lambda event: seen.append(event.name))
        origin = open_origin("s3", arguments["options"], arguments["limits"])
        right = []

        def work(number):
            key = f"{arguments['bucket']}/{number:03}"
            right.append(bytes(origin.read(key, 0, arguments["nbytes"])) == bytes([number]) * arguments["nbytes"])

        numbers = [(worker + 7 * step) % arguments["objects"] for step in range(arguments["each"])]
        threads = [threading.Thread(target=work, args=(number,)) for number in numbers]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        counts = {"right": right.count(True), "closed": seen.count("origin.gate.closed"),
                "private": seen.count("origin.limits.private")}
        os.write(answer, (json.dumps(counts) + "\\n").encode())
    finally:
        os._exit(0)
os.close(go)
os.close(answer)
with os.fdopen(answers) as lines:
    print(json.dumps([json.loads(line) for line in lines]))
for pid in children:
    os.waitpid(pid, 0)
"""


@pytest.fixture
def filled(s3: S3Server, bucket: str) -> str:
    origin = open_origin("s3", s3.target_options)
    for number in range(OBJECTS):
        origin.put(f"{bucket}/{number:03}", bytes([number]) * NBYTES)
    return bucket


def cold_start(region: EmulatedRegion, s3: S3Server, bucket: str, limits: dict[str, Any]) -> list[dict[str, int]]:
    """The output of each worker."""
    arguments = {
        "workers": WORKERS,
        "objects": OBJECTS,
        "each": EACH,
        "nbytes": NBYTES,
        "bucket": bucket,
        "options": {**s3.target_options, "endpoint_url": region.endpoint_url},
        "limits": limits,
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(arguments)], stdout=subprocess.PIPE, timeout=300, check=True
    )
    reported: list[dict[str, int]] = json.loads(done.stdout)
    return reported


@pytest.mark.slow
@pytest.mark.parametrize("storm", ["none", "begins so", "above a load", "asks for a pause"])
def test_64_processes_keep_the_limit_and_read_correctly(s3: S3Server, filled: str, tmp_path: Path, storm: str) -> None:
    most = 8
    with EmulatedRegion(s3.endpoint_url, round_trip_seconds=0.005, bytes_per_second=None) as region:
        if storm == "begins so":
            region.fail("status", status=503, code="SlowDown", count=8)
        elif storm == "above a load":
            region.fail("status", status=503, code="SlowDown", count=None, above_in_flight=5)
        elif storm == "asks for a pause":
            region.fail("status", status=503, code="SlowDown", count=4, retry_after=1)
        reported = cold_start(region, s3, filled, {"cache_dir": str(tmp_path), "max_requests": most})
        stats, refused = region.stats(), sum(region.fault_hits())

    assert [one["right"] for one in reported] == [EACH] * WORKERS
    assert not any(one["private"] for one in reported)
    assert stats.most_in_flight <= most
    assert stats.requests - refused >= WORKERS * EACH
    closed = sum(one["closed"] for one in reported)
    if storm == "none":
        assert (refused, closed, stats.requests) == (0, 0, WORKERS * EACH)
    else:
        assert closed
        # The gate is why: without one, each of the 256 reads would receive the refusals for itself.
        assert refused < WORKERS * EACH
