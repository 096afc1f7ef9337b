"""deploy/aws, without a cloud: Ray's schema, the shell commands, the disks' script, and the watcher of spot notices."""

from __future__ import annotations

import http.server
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.support.deploying import DEPLOY, ROOT, cluster_file, commands_of, prepared, syntax_error, unknown_options

AWS = DEPLOY / "aws"
CONFIG = cluster_file("aws/raycluster.yaml")


def test_ray_accepts_the_cluster_file() -> None:
    from ray.autoscaler._private.util import validate_config

    config = prepared(CONFIG)
    validate_config(config)
    assert config["max_workers"] == 5
    assert config["available_node_types"]["gpu"]["min_workers"] == 0
    assert config["available_node_types"]["gpu"]["max_workers"] == 5
    assert config["available_node_types"]["head"]["max_workers"] == 0
    assert config["idle_timeout_minutes"] > 0


def test_cluster_file_with_misspelt_field_is_refused_by_ray() -> None:
    from jsonschema import ValidationError
    from ray.autoscaler._private.util import validate_config

    with pytest.raises(ValidationError):
        validate_config(prepared({**CONFIG, "idle_timeout_minute": 5}))


def test_cluster_file_has_only_keys_that_ray_reads() -> None:
    # A top-level min_workers has no effect, and is dropped in silence.
    assert "min_workers" not in CONFIG


@pytest.mark.parametrize("command", commands_of(CONFIG))
def test_each_command_is_valid_shell(command: str) -> None:
    assert syntax_error(command) == ""


def test_broken_command_is_detected() -> None:
    assert syntax_error("if true; then") != ""


def test_commands_name_only_existing_options_and_extras() -> None:
    text = "\n".join(commands_of(CONFIG))
    assert unknown_options(text) == set()
    assert unknown_options("MILLRACE_CASH_DIR=/x") == {"MILLRACE_CASH_DIR"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"millrace\[([\w,]+)\]", text)
    assert named
    assert set(",".join(named).split(",")) <= set(extras)
    # On purpose, on every node: otherwise it depends on whether some machine has a token.
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert "RAY_AUTH_MODE=" in CONFIG[key][-1]
        assert "MILLRACE_CACHE_DIR" in CONFIG[key][-1]


def test_files_copied_to_nodes_exist_and_suffice() -> None:
    copied = CONFIG["file_mounts"]
    for local in copied.values():
        assert (ROOT / local).exists(), local
    home = "/home/ubuntu/millrace/"
    assert all(remote == home + local for remote, local in copied.items())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {home + name for name in ("pyproject.toml", project["readme"], *project["license-files"], "src")} <= set(
        copied
    )
    for path in re.findall(r'"\$HOME/millrace/([\w./-]+)"', "\n".join(commands_of(CONFIG))):
        assert (ROOT / path).exists(), path


def test_nodes_have_the_profiles_that_the_stack_makes() -> None:
    stack = yaml.load((AWS / "access.yaml").read_text(), _CloudFormation)
    made = {
        resource["Properties"]["InstanceProfileName"]
        for resource in stack["Resources"].values()
        if resource["Type"] == "AWS::IAM::InstanceProfile"
    }
    used = {type_["node_config"]["IamInstanceProfile"]["Name"] for type_ in CONFIG["available_node_types"].values()}
    assert used == made


def test_stack_has_no_yaml_aliases() -> None:
    events = list(yaml.parse((AWS / "access.yaml").read_text()))
    assert len(events) > 100
    assert not [event for event in events if isinstance(event, yaml.AliasEvent)]


class _CloudFormation(yaml.SafeLoader):
    """Reads `!Ref` and its like as plain values."""


_CloudFormation.add_multi_constructor("!", lambda loader, tag, node: {tag: node.value})


def test_on_demand_machine_equals_the_spot_machine() -> None:
    from millrace.ray.aws import without_spot

    spot = {"InstanceType": "a", "InstanceMarketOptions": {"MarketType": "spot"}}
    assert without_spot(spot) == {"InstanceType": "a"}
    assert "InstanceMarketOptions" in spot
    assert without_spot({"InstanceType": "a"}) is None
    assert without_spot({"InstanceMarketOptions": {"MarketType": "capacity-block"}}) is None


# --- the disks ---

LSBLK = """#!/bin/bash
# Reports some devices as instance store; everything else comes from lsblk.
if [[ "$*" == *--nodeps* ]]; then
  echo 'NAME="/dev/nvme0n1" MODEL="Amazon Elastic Block Store"'
  for disk in $INSTANCE_DISKS; do echo "NAME=\\"$disk\\" MODEL=\\"Amazon EC2 NVMe Instance Storage        \\""; done
else
  PATH=$REAL_PATH exec lsblk "$@"
fi
"""


@pytest.fixture
def lsblk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "lsblk").write_text(LSBLK)
    (folder / "lsblk").chmod(0o755)
    real = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    monkeypatch.setenv("REAL_PATH", real)
    monkeypatch.setenv("PATH", f"{folder}:{real}")
    monkeypatch.setenv("INSTANCE_DISKS", "")


def test_machine_without_nvme_uses_its_root_disk(lsblk: None, tmp_path: Path) -> None:
    for _ in range(2):
        done = subprocess.run(
            ["bash", AWS / "mount-cache.sh", tmp_path / "mnt"], text=True, capture_output=True, timeout=300, check=True
        )
        assert done.stdout == f"{tmp_path}/mnt/root/cache\n"
        assert "root disk" in done.stderr
    (tmp_path / "mnt/root/cache/x").write_text("the user can write")


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[list[str]]:
    """Two disks of 64 MiB."""
    attached: list[str] = []
    try:
        for number in range(2):
            image = tmp_path / f"disk-{number}"
            image.touch()
            os.truncate(image, 64 << 20)
            done = subprocess.run(["losetup", "--find", "--show", image], text=True, capture_output=True, timeout=300)
            if done.returncode != 0:
                pytest.skip("there are no loop devices")
            attached.append(done.stdout.strip())
        yield attached
    finally:
        for device in attached:
            subprocess.run(["losetup", "--detach", device], timeout=300, check=True)


DISKS_STORY = r"""
set -eu
set -- $INSTANCE_DISKS
run() { echo "[$1] $(bash "$SCRIPT" "$BASE" nobody 2>>"$LOG")"; }
run new
stat -c '%U' "$BASE/0/cache" "$BASE/1/cache"
touch "$BASE/0/cache/kept"
run again
umount "$BASE/0" "$BASE/1"
run remounted
ls "$BASE"/*/cache/kept
umount "$BASE/0"
mkfs.ext4 -q -F -L foreign "$1"
run foreign
mkdir "$ELSEWHERE"
mount "$1" "$ELSEWHERE"
run mounted
umount "$ELSEWHERE"
blkid --probe --match-tag LABEL --output value "$1"
"""


@pytest.mark.root
def test_nvme_disks_are_formatted_once_and_mounted_again(lsblk: None, disks: list[str], tmp_path: Path) -> None:
    base = tmp_path / "mnt"
    log = tmp_path / "log"
    environment = {
        **os.environ,
        "INSTANCE_DISKS": " ".join(disks),
        "SCRIPT": str(AWS / "mount-cache.sh"),
        "BASE": str(base),
        "ELSEWHERE": str(tmp_path / "elsewhere"),
        "LOG": str(log),
    }
    # The mounts are gone with the namespace, also when this fails in the middle.
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "bash", "-c", DISKS_STORY],
        text=True,
        capture_output=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, (done.stdout, done.stderr, log.read_text())
    both = f"{base}/0/cache:{base}/1/cache"
    assert done.stdout.splitlines() == [
        f"[new] {both}",
        "nobody",
        "nobody",
        f"[again] {both}",
        f"[remounted] {both}",
        f"{base}/0/cache/kept",
        f"[foreign] {base}/1/cache",
        f"[mounted] {tmp_path}/elsewhere/millrace:{base}/1/cache",
        "foreign",
    ]
    assert log.read_text().count("formatting") == 2


# --- notices that a spot machine goes ---


class _Metadata(http.server.BaseHTTPRequestHandler):
    """The machine's metadata service, version 2: nothing without a token; a notice after so many looks."""

    notice_after = 0
    looks = 0

    def do_PUT(self) -> None:
        assert self.path == "/latest/api/token"
        assert int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21600
        self._answer(200, "the-token")

    def do_GET(self) -> None:
        if self.headers["X-aws-ec2-metadata-token"] != "the-token":
            return self._answer(401, "")
        if self.path != "/latest/meta-data/spot/instance-action":
            return self._answer(404, "")
        type(self).looks += 1
        if self.looks <= self.notice_after:
            return self._answer(404, "")
        return self._answer(200, '{"action": "terminate", "time": "2030-01-01T00:00:00Z"}')

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


def test_interruption_of_machine_drains_its_ray_node(tmp_path: Path) -> None:
    calls_file = tmp_path / "calls_file"
    ray = tmp_path / "ray"
    # Fails the first time, as Ray does while its head is busy.
    ray.write_text(f'#!/bin/bash\necho "$@" >> "{calls_file}"\n[[ $(wc -l < "{calls_file}") -ge 2 ]]\n')
    ray.chmod(0o755)
    _Metadata.looks, _Metadata.notice_after = 0, 2
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Metadata) as service:
        thread = threading.Thread(target=service.serve_forever, daemon=True)
        thread.start()
        done = subprocess.run(
            [
                *(sys.executable, AWS / "watch_spot.py", "--service", f"http://127.0.0.1:{service.server_port}"),
                *("--ray", ray, "--every", "0.05"),
            ],
            text=True,
            capture_output=True,
            timeout=300,
        )
        service.shutdown()
        thread.join()
    assert done.returncode == 0, done.stderr
    assert _Metadata.looks > _Metadata.notice_after  # one more for each that was given up on a busy machine
    calls = calls_file.read_text().splitlines()
    assert len(calls) == 2
    assert set(calls) == {
        "drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message AWS takes this spot machine away "
        "--deadline-remaining-seconds 100"
    }


def test_drain_arguments_are_those_of_the_ray_command() -> None:
    from click.testing import CliRunner
    from ray.scripts.scripts import cli

    text = CliRunner().invoke(cli, ["drain-node", "--help"]).output
    for word in ("--reason ", "--reason-message", "--deadline-remaining-seconds", "DRAIN_NODE_REASON_PREEMPTION"):
        assert word in text
