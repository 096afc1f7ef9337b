"""A cluster reads storages of every kind once for all nodes, and only configured ones."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support.azurite import AzuriteServer
from tests.support.hub_server import HubServer
from tests.support.local_cluster import LocalCluster
from tests.support.web_server import WebServer

import millrace

pytestmark = pytest.mark.usefixtures("patient_peers")

NOWHERE = {"key": "none", "secret": "none", "endpoint_url": "http://127.0.0.1:9"}
DATA = os.urandom(3_000_000)


def filesystems(cluster: LocalCluster, protocol: str, options: Any) -> list[millrace.MillraceFileSystem]:
    """A file system of this process on each node's machine."""
    return [
        millrace.filesystem(protocol, skip_instance_cache=True, **cluster.arguments(node, target_options=options))
        for node in cluster.nodes
    ]


@pytest.mark.azurite
def test_environment_origin_is_read_once_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, azurite: AzuriteServer, container: str
) -> None:
    with HubServer() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.commit("datasets", "user/set", {"x.bin": DATA})
        options = azurite.target_options
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", options["account_name"])
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", options["account_key"])
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", options["account_host"])
        with LocalCluster(tmp_path, 2, target_options=NOWHERE, patient=True) as cluster:
            before = cluster.counters()
            for fs in filesystems(cluster, "hf", None):
                assert fs.cat_file("datasets/user/set/x.bin") == DATA
            azure = filesystems(cluster, "az", None)
            azure[0].pipe_file(f"{container}/y.bin", DATA)
            for fs in azure:
                assert fs.cat_file(f"az://{container}/y.bin") == DATA
            azure[0].pipe_file(f"{container}/y.bin", DATA[::-1])
            for fs in azure:  # a write is seen on every node
                assert fs.cat_file(f"az://{container}/y.bin") == DATA[::-1]
            reported = {name: value - before.get(name, 0) for name, value in cluster.counters().items()}
    assert reported["origin_bytes"] == 3 * len(DATA)


@pytest.mark.parametrize("given", [False, True])
def test_web_server_is_read_for_others_only_if_configured(tmp_path: Path, given: bool) -> None:
    with WebServer() as web:
        web.put("/x.bin", DATA)
        options = ["--origin", "http://"] if given else []
        with LocalCluster(tmp_path, 2, target_options=NOWHERE, options=options, patient=True) as cluster:
            before = cluster.counters()
            for fs in filesystems(cluster, "http", None):
                assert fs.cat_file(f"{web.url}/x.bin") == DATA
            reported = {name: value - before.get(name, 0) for name, value in cluster.counters().items()}
    # If no node may read for others, each reader reads the origin; uploaded blocks can still be shared.
    assert (reported["origin_bytes"] == len(DATA)) or not given
    assert len(DATA) <= reported["origin_bytes"] <= 2 * len(DATA)


def test_clients_of_nodes_without_access_share_what_one_of_them_reads(tmp_path: Path) -> None:
    with WebServer() as web:
        keys = [f"/{number}.bin" for number in range(4)]
        for key in keys:
            web.put(key, DATA)
        with LocalCluster(tmp_path, 2, target_options=NOWHERE, patient=True) as cluster:
            clients = [
                millrace.filesystem(
                    "http",
                    skip_instance_cache=True,
                    **cluster.arguments(
                        cluster.nodes[0], target_options=None, cache_dir=str(tmp_path / f"client-{number}")
                    ),
                )
                for number in range(4)
            ]
            with ThreadPoolExecutor(4) as threads:
                for key in keys:  # all clients request it at the same time
                    read = list(threads.map(lambda fs, url=f"{web.url}{key}": fs.cat_file(url), clients))
                    assert read == [DATA] * 4
            counts = [fs.cache_counters() for fs in clients]
    nbytes = len(keys) * len(DATA)
    from_origin, from_peers = (sum(count[name] for count in counts) for name in ("origin_bytes", "peer_bytes"))
    assert from_origin + from_peers == 4 * nbytes
    assert from_origin < 2 * nbytes  # `nbytes` on a quiet machine; 4 times as much without upload leases
