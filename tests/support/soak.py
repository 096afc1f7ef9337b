"""A soak of a local cluster: nodes are killed, suspended, drained, damaged and started again at random while others read.

`python -m tests.support.soak --seconds 600` starts its own S3 server and cluster, and prints a summary.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import xxhash
from tests.support.local_cluster import LocalCluster, LocalNode, Reading

from millrace.errors import OriginUnavailableError
from millrace.filesystem import filesystem

_FAULTS = ("kill", "suspend", "drain", "damage", "forget", "forget")
_BETWEEN_SECONDS = (0.2, 2.0)
_PIECE_BYTES = 256 << 10


@dataclass
class SoakReport:
    """The result of a soak. `wrong` and `errors` must be empty; `longest_seconds` is the longest single read."""

    seconds: float = 0.0
    reads: int = 0
    nbytes: int = 0
    passes: int = 0
    longest_seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    waits: list[str] = field(default_factory=list)
    """Where threads of readers were when a read took longer than 5 s."""


def soak(cluster: LocalCluster, keys: Mapping[str, str], *, seconds: float, seed: int) -> SoakReport:
    """Read and break a running cluster for so long. `keys` are objects with the hexadecimal xxh3 of their bytes.

    One reader on each node's machine reads whether its node lives or not. At the end all nodes run again.
    """
    started = time.monotonic()
    report = SoakReport()
    faults: Counter[str] = Counter()
    lock = threading.Lock()

    def follow(reading: Reading) -> None:
        with suppress(OriginUnavailableError):  # it has read until its time was over
            while True:
                found = reading.report()
                with lock:
                    report.reads += found["reads"]
                    report.nbytes += found["nbytes"]
                    report.passes += 1
                    report.wrong += found["wrong"]
                    report.errors += found["errors"]
                    report.longest_seconds = max(report.longest_seconds, found["longest_seconds"])

    readings = [
        cluster.read_on(node, keys, seed=seed + node.number, seconds=seconds, piece_bytes=_PIECE_BYTES)
        for node in cluster.nodes
    ]
    followers = [threading.Thread(target=follow, args=[reading], name="soak-follow") for reading in readings]
    for follower in followers:
        follower.start()
    chance = random.Random(seed)
    while time.monotonic() - started < seconds:
        time.sleep(chance.uniform(*_BETWEEN_SECONDS))
        faults[_break_something(cluster, keys, chance)] += 1
    for follower in followers:
        follower.join()
    for reading in readings:
        reading.stop()
        if log := reading.log():
            report.waits.append(log)
    for node in cluster.nodes:
        if not node.is_running:
            cluster.start_one(node.number)
            faults["start"] += 1
    report.faults = dict(faults)
    report.seconds = time.monotonic() - started
    return report


def _break_something(cluster: LocalCluster, keys: Mapping[str, str], chance: random.Random) -> str:
    """Start a node that is down, or break one that runs; one of them at least is left alone."""
    down = [node for node in cluster.nodes if not node.is_running]
    running = [node for node in cluster.nodes if node.is_running]
    if down and (len(running) < 2 or chance.random() < 0.5):
        node = chance.choice(down)
        cluster.start_one(node.number)
        return "start"
    node = chance.choice(running)
    fault = chance.choice(_FAULTS)
    if fault == "kill":
        node.kill()
    elif fault == "suspend":
        node.suspend()
        time.sleep(chance.uniform(0.5, 4.0))
        node.resume()
    elif fault == "drain":
        node.terminate()
        with suppress(OriginUnavailableError):
            node.wait(30.0)
        node.stop()
    elif fault == "forget":
        _forget(cluster, node, keys, chance)
    else:
        _damage(node, chance)
    return fault


def _forget(cluster: LocalCluster, node: LocalNode, keys: Mapping[str, str], chance: random.Random) -> None:
    """Free a part of a node's cache, so that it reads from others again."""
    fs = filesystem("s3", **cluster.arguments(node, members="none"))
    for key in chance.sample(list(keys), max(1, len(keys) // 2)):
        fs.free(f"s3://{key}")


def _damage(node: LocalNode, chance: random.Random) -> None:
    """Flip a byte of something that a node has on its disk, as a disk might; the node is stopped meanwhile.

    What a live process has verified and mapped is beyond what any check can see, so its node and reader are not alive.
    """
    node.kill()
    files = [path for path in node.cache_dir.glob("millrace/*/objects/*/*[0-9]") if path.stat().st_size > 1]
    for path in chance.sample(files, min(3, len(files))):
        copy = path.with_name(f"{path.name}.copy")
        data = bytearray(path.read_bytes())
        data[chance.randrange(len(data))] ^= 0xFF
        # In another file under the same name: existing maps stay unchanged.
        copy.write_bytes(data)
        copy.replace(path)


def main(arguments: list[str] | None = None) -> int:
    """The command. Exit code 1 when a byte was wrong or a read failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--members", default="static")
    chosen = parser.parse_args(arguments)
    from millrace.testing.s3 import S3Server

    with tempfile.TemporaryDirectory(prefix="millrace-soak-") as directory, S3Server(Path(directory) / "s3") as server:
        server.create_bucket("soak")
        fs = filesystem("s3", server.target_options, members="none", cache_dir=f"{directory}/unused")
        chance = random.Random(chosen.seed)
        keys: dict[str, str] = {}
        left = chosen.megabytes << 20
        while left > 0:
            size = min(left, int(chance.choice((30_000, 300_000, 3 << 20, 20 << 20)) * chance.uniform(0.5, 1.5)))
            data = chance.randbytes(size)
            keys[f"soak/{len(keys):05d}"] = xxhash.xxh3_64_hexdigest(data)
            fs.origin.put(f"soak/{len(keys) - 1:05d}", data)
            left -= size
        print(f"seed {chosen.seed}: {len(keys)} objects, {chosen.nodes} nodes", file=sys.stderr, flush=True)
        options = server.target_options
        with LocalCluster(Path(directory), chosen.nodes, target_options=options, members=chosen.members) as cluster:
            report = soak(cluster, keys, seconds=chosen.seconds, seed=chosen.seed)
            counters = cluster.counters()
    print(json.dumps({**asdict(report), "counters": counters}, indent=2))
    return 1 if report.wrong or report.errors else 0


if __name__ == "__main__":
    sys.exit(main())
