"""Planted secrets in a cluster and in checkpoints: real processes, a real server, and a search of every stored byte.

Texts of origins and file systems: test_origins.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from tests.integration.security.test_plane import Authority
from tests.support.planted import Planted
from tests.support.ports import reserved_port

import millrace
from millrace.checkpoint import CheckpointManager, CheckpointReader, CheckpointWriter, verify_checkpoint
from millrace.cluster.dataplane.client import PeerClient
from millrace.cluster.listings import HEAD, LEVEL, LISTING
from millrace.cluster.membership import Member
from millrace.config import Tls
from millrace.errors import MillraceError, PeerError, PeerRefusedError
from millrace.origin import open_origin
from millrace.testing.process import ChildProcess
from millrace.testing.s3 import S3Server


@pytest.fixture
def planted(s3: S3Server) -> Iterator[Planted]:
    planted = Planted()
    planted.known("key id of the server", s3.key)
    planted.known("secret of the server", s3.secret)
    with planted.watching():
        yield planted


def saw_command_lines(planted: Planted, pid: int) -> int:
    """What every user of the machine may read of a process and all below it; returns how many these are."""
    top = psutil.Process(pid)
    processes = [top, *top.children(recursive=True)]
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            planted.saw(f"the command line of {process.name()}", "\n".join(process.cmdline()))
    return len(processes)


# --- a node and its commands ----------------------------------------------------------------------------


@dataclass
class RunningNode:
    """A node with TLS that has read objects; `run` returns the output of a command on its machine."""

    planted: Planted
    process: ChildProcess
    environ: dict[str, str]
    address: str
    cache_dir: Path
    log: Path
    tls: Tls
    token: str

    def run(self, *arguments: str, code: int | None = 0, **environ: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "millrace.cli", *arguments],
            env={**self.environ, "MILLRACE_DEBUG": "1", **environ},
            capture_output=True,
            timeout=300,
        )
        self.planted.saw(f"output of {' '.join(arguments)}", done.stdout)
        self.planted.saw(f"errors of {' '.join(arguments)}", done.stderr)
        if code is not None:
            assert done.returncode == code, done.stderr.decode()
        return done.stdout.decode()


@pytest.fixture
def node(planted: Planted, s3: S3Server, bucket: str, port: int, tmp_path: Path) -> Iterator[RunningNode]:
    origin = open_origin("s3", s3.target_options)
    origin.put(f"{bucket}/data/small", b"s" * 1000)
    origin.put(f"{bucket}/data/large", os.urandom(9 << 20))
    pem = tmp_path / "pem"
    pem.mkdir()
    tls = Authority(pem, "ours").member("node")
    for name, path in (("cert", tls.cert), ("key", tls.key), ("ca", tls.ca)):
        (pem / f"{name}.pem").write_bytes(path.read_bytes())
    for number, line in enumerate(tls.key.read_text().splitlines()[1:-1]):
        planted.known(f"line {number} of the TLS key", line)
    token = planted.secret("cluster_token")
    (tmp_path / "credentials").write_text(f"[team]\naws_access_key_id={s3.key}\naws_secret_access_key={s3.secret}\n")
    address = f"127.0.0.1:{port}"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE_", "AWS_"))}
    environ |= {
        "AWS_PROFILE": "team",
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
        "AWS_ENDPOINT_URL": s3.endpoint_url,
        "HF_TOKEN": planted.secret("token of the hub", prefix="hf_"),
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_STORAGE_ACCOUNT_KEY": planted.secret("key of the account", base64_key=True),
        "MILLRACE_CLUSTER_TOKEN": token,
        "MILLRACE_CACHE_DIR": str(tmp_path / "cache"),
        "MILLRACE_MEMBERS": f"static://{address}",
        "MILLRACE_TLS": str(pem),
        "MILLRACE_MIN_FREE": "0%",
    }
    log = tmp_path / "node.log"
    command = [sys.executable, "-m", "millrace.cli", "node", "run"]
    with ChildProcess(command, log=log, env=environ) as process:
        until = time.monotonic() + 120
        while b"READY" not in log.read_bytes():
            assert process.exit_status() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        yield RunningNode(planted, process, environ, address, tmp_path / "cache", log, tls, token)


@pytest.mark.slow
def test_node_and_commands_show_no_secret(node: RunningNode, planted: Planted, s3: S3Server, bucket: str) -> None:
    assert saw_command_lines(planted, node.process.pid) >= 1

    assert json.loads(node.run("load", f"s3://{bucket}/data", "--json"))
    assert "data/large" in node.run("ls")
    for arguments in (("ls", "--long"), ("status",), ("status", "--json"), ("doctor", f"s3://{bucket}/data")):
        assert node.run(*arguments, code=None)
    node.run("doctor", f"s3://{bucket}/data", "--json", code=None)
    bundle = node.cache_dir.parent / "bundle.tar.gz"
    node.run("debug", "bundle", "--output", str(bundle))
    with tarfile.open(bundle) as archive:
        files = {entry.name: archive.extractfile(entry) for entry in archive}
        parts = {name: file.read() for name, file in files.items() if file is not None}
    assert b"millrace_reads_total" in parts["millrace-debug/nodes.json"]
    for name, text in parts.items():
        planted.saw(f"{name} of the bundle", text)
    node.run("load", f"s3://{bucket}/nothing", code=1)
    node.run("load", "s3://no-such-bucket-at-all/x", code=1)
    node.run("load", f"s3://{bucket}/data/small", code=None, AWS_PROFILE="of-nobody")
    node.run("status", code=None, MILLRACE_CLUSTER_TOKEN="another-token-that-is-wrong")

    client = PeerClient(token=node.token, tls=node.tls)
    me = Member(id=node.address, address=node.address)
    for path in ("/v1/status", "/v1/counters", "/v1/view", "/status.json"):
        planted.saw(f"the answer of {path}", json.dumps(client.call(me.address, "GET", path, deadline=120)))
    body = {"view": client.call(me.address, "GET", "/v1/view", deadline=120)}
    inventory = client.call(me.address, "POST", f"/v1/inventory/{node.address}", body, deadline=120)
    planted.saw("the inventory", json.dumps(inventory))
    planted.saw_object("the client", client)
    client.close()
    stranger = PeerClient(token="another-token-that-is-wrong", tls=node.tls)
    with pytest.raises(PeerRefusedError) as caught:
        stranger.call(me.address, "GET", "/v1/status", deadline=120)
    planted.saw_error("the error of a stranger", caught.value)
    stranger.close()

    facts = node.cache_dir / "millrace" / "local.node" / "node.json"
    assert planted.is_in(facts.read_bytes(), "cluster_token")  # the one place, for this machine's other processes
    assert stat.S_IMODE(facts.stat().st_mode) == 0o600
    assert planted.saw_files("the cache", node.cache_dir, but=("node.json",)) > 5
    planted.saw("node.json but for the token", facts.read_text().replace(node.token, ""))

    node.process.stop()
    planted.saw("the log of the node", node.log.read_bytes())
    assert not facts.exists()
    planted.saw_files("the cache after the node", node.cache_dir)
    assert planted.leaks() == []


@pytest.mark.slow
def test_node_that_cannot_start_shows_no_secret(node: RunningNode, planted: Planted, tmp_path: Path) -> None:
    node.run("node", "run", code=1)  # the address is taken
    node.run("node", "run", code=1, MILLRACE_CLUSTER_TOKEN=f"{planted.secret('a wrong token')} with spaces")
    node.run("node", "run", code=1, MILLRACE_MEMBERS=f"static://user:{planted.secret('in members')}@127.0.0.1:1")
    (tmp_path / "pem" / "key.pem").write_text(planted.secret("no key of TLS"))
    with reserved_port() as port:
        node.run("node", "run", code=1, MILLRACE_MEMBERS=f"static://127.0.0.1:{port}")
    secret = planted.secret("in a URL")
    for arguments in (("load", f"s3://user:{secret}@bucket/x"), ("ls", f"s3://user:{secret}@bucket/x")):
        node.run(*arguments, code=1)
    (tmp_path / "bad.toml").write_text(f'cluster_token = "{planted.secret("in a file")}"\ncluster_tokem = "x"\n')
    node.run("status", code=1, MILLRACE_CONFIG=str(tmp_path / "bad.toml"))
    assert planted.leaks() == []


def test_member_request_for_local_files_is_refused(node: RunningNode, tmp_path: Path) -> None:
    """A node serves other members only from its own origins, with a token as well as with a certificate."""
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "diary").write_text("of nobody's business")
    client = PeerClient(token=node.token, tls=node.tls)
    me = Member(id=node.address, address=node.address)
    view = client.call(me.address, "GET", "/v1/view", deadline=120)
    identities = ("file", "memory", "s3+http://169.254.169.254", "https+internal", "az+https://x", "")
    paths = (str(tmp_path / "private"), f"{tmp_path}/private/../private", "bucket/latest/meta-data")
    for number, (identity, path) in enumerate(itertools.product(identities, paths)):
        about = {"origin": identity, "age": "60"}
        for command, more in (
            (LISTING, {"prefix": path, "after": ""}),
            (LEVEL, {"prefix": path}),
            (HEAD, {"key": f"{path}/diary"}),
        ):
            with pytest.raises(PeerError, match="no access"):
                client.call(me.address, "GET", command, query=about | more, deadline=120)
        job = f"job-{number}"
        order = {"view": view, "replicas": 1, "verify": False, "copies": False}
        body = {"job": job, "origin": identity, "keys": [path], **order}
        state = client.call(me.address, "POST", "/v1/load", body, deadline=120)
        until = time.monotonic() + 120
        while state["state"] == "running":
            assert time.monotonic() < until, state
            time.sleep(0.02)
            state = client.call(me.address, "GET", f"/v1/load/{job}", deadline=120)
        assert state["state"] == "failed"
        assert "diary" not in json.dumps(state)
    client.close()


# --- checkpoints ------------------------------------------------------------------------------------------


def state(step: int) -> dict[str, Any]:
    torch.manual_seed(step)
    return {"model": {"weight": torch.randn(200, 300)}, "optimizer": {"step": step, "lr": 0.1}}


@pytest.mark.parametrize("given", ["as options", "by the environment"])
def test_checkpoint_bytes_contain_no_secret(
    given: str, planted: Planted, s3: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, str] | None = s3.target_options
    if given == "by the environment":
        options = None
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret)
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint_url)
    url = f"s3://{bucket}/run"
    with CheckpointManager(url, local=tmp_path / "near", target_options=options) as manager:
        planted.saw_object("the manager", manager)
        for step in (1, 2):
            planted.saw_object("a result", manager.save_async(step, state(step)).result())
        assert saw_command_lines(planted, os.getpid()) >= 2  # the saver's, next to this one
    origin = open_origin("s3", s3.target_options)
    stored = 0
    for page in origin.list_all(bucket):
        for info in page:
            stored += 1
            planted.saw("a name", info.key)
            planted.saw(f"the object {info.key}", bytes(origin.read(info.key, 0, info.size)))
    assert stored >= 3
    assert planted.saw_files("the near place", tmp_path / "near") >= 3

    checkpoints = sorted({key.rpartition("/")[0] for page in origin.list_all(bucket) for key in (i.key for i in page)})
    place = next(f"s3://{each}" for each in reversed(checkpoints) if each.count("/") >= 2)
    writer, reader = CheckpointWriter(place, target_options=options), CheckpointReader(place, target_options=options)
    for thing in (writer, reader):
        planted.saw_object(type(thing).__name__, thing)
        pickled = pickle.dumps(thing)
        assert planted.is_in(pickled, "secret of the server") == (options is not None)
        if options is None:
            planted.saw(f"the pickle of {type(thing).__name__}", pickled)
    planted.saw("the report of a verification", repr(verify_checkpoint(place, target_options=options)))
    for wrong in ("s3://no-such-bucket-at-all/x", f"s3://{bucket}/nothing"):
        with pytest.raises((MillraceError, OSError)) as caught:
            CheckpointReader(wrong, target_options=options).read_metadata()
        planted.saw_error("an error", caught.value)
    assert planted.leaks() == []


@pytest.mark.slow
def test_unpickled_file_system_finds_its_own_credentials(
    planted: Planted, s3: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pickle contains no credentials of the environment: the receiver needs its own. It contains explicit ones."""
    open_origin("s3", s3.target_options).put(f"{bucket}/x", b"the content")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret)
    of_environment = pickle.dumps(millrace.filesystem("s3", cache_dir=str(tmp_path / "cache"), min_free=0))
    explicit = pickle.dumps(
        millrace.filesystem("s3", target_options=s3.target_options, cache_dir=str(tmp_path / "cache"), min_free=0)
    )
    assert not planted.is_in(of_environment, "secret of the server")
    assert planted.is_in(explicit, "secret of the server")
    program = (
        "import pickle, sys; sys.stdout.buffer.write(pickle.load(sys.stdin.buffer).cat_file(sys.argv[1]))"  # in a child
    )
    plain = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    plain |= {
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
        "AWS_CONFIG_FILE": "/nowhere",
    }
    for pickled, environ, works in (
        (of_environment, dict(os.environ), True),
        (of_environment, plain, False),
        (explicit, plain, True),
    ):
        done = subprocess.run(
            [sys.executable, "-c", program, f"{bucket}/x"], input=pickled, env=environ, capture_output=True, timeout=300
        )
        assert (done.stdout == b"the content") is works, done.stderr.decode()
        planted.saw("the receiver's output", done.stderr)
    assert planted.leaks() == []
