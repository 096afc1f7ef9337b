"""Two installed versions of Millrace work together: version N and version N+1, each from its own wheel.

There is no release yet. The commit `OLDER` is a stand-in for version N, installed as `0.1.0+stand.in`. N+1 is this working
tree with the next minor version number.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.local_cluster import LocalCluster, LocalNode
from tests.support.waiting import wait_until

from millrace.origin import open_origin
from millrace.testing.s3 import S3Server

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
OLDER = "421c71a"
OBJECTS, OBJECT_BYTES = 24, 300_000
TOTAL = OBJECTS * OBJECT_BYTES

_READ = """
import hashlib, json, sys, millrace
options, names = json.loads(sys.argv[1]), sys.argv[2:]
fs = millrace.filesystem("s3", **options)
sums = [hashlib.sha256(fs.cat_file(name)).hexdigest() for name in names]
print(json.dumps([millrace.__version__, sums]))
"""

_WRITE = """
import json, sys, millrace
fs = millrace.filesystem("s3", **json.loads(sys.argv[1]))
fs.pipe_file(sys.argv[2], sys.argv[3].encode())
"""

_SAVE = """
import json, sys, torch
from millrace.checkpoint import CheckpointManager
torch.manual_seed(0)
url, steps = sys.argv[1], [int(step) for step in sys.argv[2:]]
state = {"model": torch.nn.Linear(200, 200), "half": torch.randn(50_000).bfloat16(), "note": "x", "seen": 0}
with CheckpointManager(url, keep=10) as run:
    found = run.restore(state)
    for step in steps:
        with torch.no_grad():
            state["model"].weight += 1e-4
        state["seen"] = step
        run.save(step, state, metrics={"loss": 1 / step})
    total = float(state["model"].weight.double().sum())
    print(json.dumps({"restored": found, "seen": state["seen"], "sum": total, "steps": run.steps()}))
"""


class Version:
    """An installed wheel: a directory for `PYTHONPATH`, in front of every other Millrace."""

    def __init__(self, directory: Path, number: str) -> None:
        self.directory = directory
        self.number = number

    def run(self, program: str, *arguments: str, cwd: Path) -> str:
        """Run a program with this version; returns its stdout."""
        command = [sys.executable, "-c", program, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(self.directory)}
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def install(source: Path, directory: Path, number: str) -> Version:
    """Build a wheel of the sources with this version number, and install it below `directory`."""
    (source / "src" / "millrace" / "_version.py").write_text(f'__version__ = "{number}"\n')
    wheels, site = directory / "wheels", directory / "site"
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", wheels, source], check=True, stdin=subprocess.DEVNULL)
    [wheel] = wheels.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True, stdin=subprocess.DEVNULL)
    return Version(site, number)


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Version:
    source = tmp_path_factory.mktemp("older-source")
    done = subprocess.run(["git", "archive", "--format=zip", OLDER], cwd=ROOT, capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"needs the history of the repository with {OLDER}")
    with zipfile.ZipFile(io.BytesIO(done.stdout)) as archive:
        archive.extractall(source)
    return install(source, tmp_path_factory.mktemp("older"), "0.1.0+stand.in")


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Version:
    source = tmp_path_factory.mktemp("newer-source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__"))
    return install(source, tmp_path_factory.mktemp("newer"), "0.2.0")


@pytest.fixture
def names(s3: S3Server, bucket: str) -> list[str]:
    origin = open_origin("s3", s3.target_options)
    found = [f"{bucket}/data/{number}" for number in range(OBJECTS)]
    for number, name in enumerate(found):
        origin.put(name, bytes([number]) * OBJECT_BYTES)
    return found


@pytest.fixture
def cluster(s3: S3Server, tmp_path: Path, older: Version, newer: Version) -> Iterator[LocalCluster]:
    prefixes = {number: ["/usr/bin/env", f"PYTHONPATH={each.directory}"] for number, each in enumerate((older, newer))}
    with LocalCluster(tmp_path, 2, target_options=s3.target_options, prefixes=prefixes) as cluster:
        yield cluster


def read(version: Version, cluster: LocalCluster, node: LocalNode, names: list[str], **options: Any) -> list[str]:
    """The digests of objects, read by a process of this version on a node's machine."""
    arguments = json.dumps(cluster.arguments(node, **options))
    number, sums = json.loads(version.run(_READ, arguments, *names, cwd=cluster.directory))
    assert number == version.number
    assert isinstance(sums, list)
    return sums


def versions_of(cluster: LocalCluster, node: LocalNode) -> dict[str, str]:
    """The versions of all nodes, in the status of one."""
    status = cluster.client.call(node.address, "GET", "/v1/status")
    return {node.address: str(status["version"])}


def test_nodes_of_two_versions_read_from_each_other_and_are_updated_one_at_a_time(
    cluster: LocalCluster, older: Version, newer: Version, names: list[str]
) -> None:
    first, second = cluster.nodes
    assert versions_of(cluster, first) | versions_of(cluster, second) == {
        first.address: older.number,
        second.address: newer.number,
    }
    sums = read(older, cluster, first, names)
    assert read(newer, cluster, second, names) == sums
    assert read(newer, cluster, first, names) == sums  # a newer reader on the machine of an older node
    counters = cluster.counters()
    assert counters["origin_bytes"] == TOTAL, counters
    assert counters["peer_bytes"] >= TOTAL // 2, counters  # of each object one node has its bytes from the other
    assert counters["peer_failures"] == 0

    for writer, version, reader, other in ((first, older, second, newer), (second, newer, first, older)):
        arguments = json.dumps(cluster.arguments(writer))
        version.run(_WRITE, arguments, names[0], f"by {version.number}", cwd=cluster.directory)
        expected = read(version, cluster, writer, names[:1])
        wait_until(lambda: read(other, cluster, reader, names[:1]) == expected)  # noqa: B023 - called at once

    before = cluster.counters()["origin_bytes"]
    first.terminate()  # a planned leave of N, which hands over to N+1
    assert first.wait(60) == 0
    cluster.prefixes[first.number] = ["/usr/bin/env", f"PYTHONPATH={newer.directory}"]
    first.start()
    cluster.wait(first)
    assert versions_of(cluster, first) == {first.address: newer.number}
    assert read(newer, cluster, first, names)[1:] == sums[1:]
    assert read(newer, cluster, second, names)[1:] == sums[1:]
    assert (
        cluster.counters()["origin_bytes"] == before
    )  # the directory of N is continued, and the nodes know each other


def test_caches_of_the_older_version_keep_their_data_and_rules(
    older: Version, newer: Version, s3: S3Server, names: list[str], tmp_path: Path
) -> None:
    options = {"target_options": s3.target_options, "cache_dir": str(tmp_path / "cache"), "min_free": 0}
    program = f"{_READ}\nfs.pin('s3://' + names[0])"
    _, sums = json.loads(older.run(program, json.dumps(options), *names, cwd=tmp_path))
    program = f"{_READ}\nprint(fs.cache_counters()['origin_bytes'], *[fs.free(f's3://{{name}}') for name in names[:2]])"
    lines = newer.run(program, json.dumps(options), *names, cwd=tmp_path).splitlines()
    assert json.loads(lines[0]) == [newer.number, sums]
    # The counters are those of the directory; a pinned object is not freed.
    assert [int(word) for word in lines[1].split()] == [TOTAL, 0, OBJECT_BYTES]


@pytest.mark.parametrize("back", [False, True], ids=["newer-after-older", "older-after-newer"])
def test_run_of_one_version_is_continued_by_the_other(
    older: Version, newer: Version, tmp_path: Path, *, back: bool
) -> None:
    one, other = (newer, older) if back else (older, newer)
    run = str(tmp_path / "run")
    first = json.loads(one.run(_SAVE, run, "1", "2", "3", cwd=tmp_path))
    assert first["steps"] == [1, 2, 3]
    second = json.loads(other.run(_SAVE, run, "4", "5", cwd=tmp_path))
    assert (second["restored"], second["steps"]) == (3, [1, 2, 3, 4, 5])
    third = json.loads(one.run(_SAVE, run, cwd=tmp_path))
    assert third == {**second, "restored": 5}  # the weights as well
    assert second["sum"] > first["sum"]
