"""Planted secrets in Ray: its logs, its errors and the caches of its nodes show none, and its tasks still read."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.planted import Planted
from tests.support.ray_sessions import start_ray
from tests.support.waiting import wait_until

import millrace
from millrace.cluster.attach import close_all
from millrace.cluster.folder import live_nodes
from millrace.origin import open_origin
from millrace.testing.s3 import S3Server

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture
def session() -> Iterator[Path]:
    """The folder of a Ray session of the test's own: short, since sockets are in it."""
    folder = Path(tempfile.mkdtemp(prefix="r"))
    start_ray(monitors=True, num_cpus=2, _temp_dir=str(folder))  # their logs are searched, too
    yield folder
    close_all()
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def test_ray_session_contains_no_secret(session: Path, s3: S3Server, bucket: str, tmp_path: Path) -> None:
    planted = Planted()
    planted.known("secret of the server", s3.secret)
    origin = open_origin("s3", s3.target_options)
    origin.put(f"{bucket}/x", b"x" * 3_000_000)
    with planted.watching():
        fs = millrace.filesystem("s3", s3.target_options, cache_dir=str(tmp_path / "cache"), min_free=0)

        @ray.remote  # type: ignore[untyped-decorator]
        def read(fs: Any, path: str) -> int:
            return len(fs.cat_file(path))

        assert ray.get(read.remote(fs, f"{bucket}/x")) == 3_000_000
        wait_until(lambda: bool(live_nodes(fs._options)), "no node has started")
        planted.known("cluster_token", live_nodes(fs._options)[0].facts.token)
        assert ray.get(read.remote(fs, f"{bucket}/x")) == 3_000_000
        for wrong in (f"{bucket}/nothing", "no-such-bucket-at-all/x"):
            with pytest.raises(FileNotFoundError) as caught:
                ray.get(read.remote(fs, wrong))
            planted.saw_error("the error of a task", caught.value)
        planted.saw("the nodes that Ray lists", repr(ray.nodes()))
        planted.saw_files("the cache", tmp_path / "cache", but=("node.json",))
        close_all()
        ray.shutdown()
    assert planted.saw_files("the session of Ray", session) > 5
    assert planted.leaks() == []
