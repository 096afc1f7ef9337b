"""Misconfigured clusters: each mistake is reported to the operator with the next step."""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.etcd import EtcdServer
from tests.support.local_cluster import TOKEN, LocalCluster, LocalNode
from tests.support.waiting import wait_until

from millrace.cli import main
from millrace.testing.s3 import S3Server

BUCKET = "cluster-operators"


@pytest.fixture
def millrace(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """The command line on a machine with a token and credentials, without a node; returns stdout and stderr."""
    monkeypatch.setenv("MILLRACE_CACHE_DIR", str(tmp_path / "asker"))
    monkeypatch.setenv("MILLRACE_CLUSTER_TOKEN", TOKEN)
    monkeypatch.setenv("MILLRACE_MIN_FREE", "0")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint_url)

    def run(*arguments: str) -> tuple[str, str]:
        assert main(list(arguments)) == 0
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run


def cluster_of(own_etcd: EtcdServer, s3: S3Server, directory: Path, count: int, **settings: Any) -> LocalCluster:
    return LocalCluster(
        directory,
        count,
        members=own_etcd.members,
        target_options=s3.target_options,
        options=["--min-free", "0"],
        **settings,
    )


def test_node_with_another_token_is_skipped(
    own_etcd: EtcdServer, s3: S3Server, tmp_path: Path, millrace: Callable[..., Any]
) -> None:
    other = [str(shutil.which("env")), "MILLRACE_CLUSTER_TOKEN=quite-another-token"]
    with cluster_of(own_etcd, s3, tmp_path / "cluster", 1, later=1, prefixes={1: other}) as cluster:
        first, stranger = cluster.nodes
        stranger.start()
        wait_until(lambda: "another cluster_token than this process" in log_of(stranger))
        assert log_of(stranger).count("another cluster_token") == 1
        assert first.address in log_of(stranger)
        shown, _ = millrace("status", "--node", first.address)
        assert f"\n{stranger.address}: status 401: use the cluster's token\n" in shown
        assert "quite-another-token" not in log_of(stranger) + log_of(first) + shown


def test_node_with_a_copied_cache_directory_is_reported(own_etcd: EtcdServer, s3: S3Server, tmp_path: Path) -> None:
    with cluster_of(own_etcd, s3, tmp_path / "cluster", 1, later=1) as cluster:
        first, copy = cluster.nodes

        def is_copied() -> bool:
            shutil.rmtree(copy.cache_dir, ignore_errors=True)
            with contextlib.suppress(shutil.Error):  # the node has replaced a file meanwhile
                shutil.copytree(first.cache_dir, copy.cache_dir)
                return True
            return False

        wait_until(is_copied)
        copy.start()
        wait_until(lambda: f"the node at {copy.address} has this node's id" in log_of(first))
        assert log_of(first).count("has this node's id") == 1
        # A node restarted with another address is not a duplicate.
        assert "has this node's id" not in log_of(copy)


def test_load_next_to_an_unnamed_cluster_is_refused(
    own_etcd: EtcdServer, s3: S3Server, tmp_path: Path, millrace: Callable[..., Any]
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a").write_bytes(b"a")
    with cluster_of(own_etcd, s3, tmp_path / "cluster", 1) as cluster:
        node = cluster.nodes[0]
        _, output = millrace("load", str(data), "--cache-dir", str(node.cache_dir))
        assert f"only this machine's cache is loaded: set 'members' or --node {node.address}" in output
        _, output = millrace("load", str(data))
        assert output == ""


@pytest.mark.slow
def test_joins_and_leaves_are_logged(own_etcd: EtcdServer, s3: S3Server, tmp_path: Path) -> None:
    with cluster_of(own_etcd, s3, tmp_path / "cluster", 1, later=1) as cluster:
        first, other = cluster.nodes
        cluster.start_one(1)
        wait_until(lambda: f"{other.address}: a node has joined" in log_of(first))
        other.kill()
        wait_until(lambda: f"{other.address}: a node was lost" in log_of(first))


def test_nodes_with_different_replicas_are_reported(
    own_etcd: EtcdServer, s3: S3Server, tmp_path: Path, millrace: Callable[..., Any]
) -> None:
    with cluster_of(own_etcd, s3, tmp_path / "cluster", 1, later=1) as cluster:
        first = ("--cache-dir", str(cluster.nodes[0].cache_dir))
        assert "'replicas'" not in millrace("doctor", *first)[0]
        cluster.start_one(1, "--replicas", "2")
        output, _ = millrace("doctor", *first)
        assert "'replicas' differs between the nodes (" in output
        assert f"2 on {cluster.nodes[1].address}" in output


def test_drained_node_ends(own_etcd: EtcdServer, s3: S3Server, tmp_path: Path, millrace: Callable[..., Any]) -> None:
    with cluster_of(own_etcd, s3, tmp_path / "cluster", 2) as cluster:
        for node in cluster.nodes:
            millrace("node", "drain", node.address)
            with socket.socket() as probe:
                assert probe.connect_ex((node.host, node.port)) != 0


def log_of(node: LocalNode) -> str:
    return node.log.read_text(errors="replace") if node.log.exists() else ""
