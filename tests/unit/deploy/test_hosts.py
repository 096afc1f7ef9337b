"""deploy/hosts: the file as Ray reads it, and the reason for Ray's older autoscaler."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.deploying import ROOT, cluster_file, commands_of, prepared, syntax_error, unknown_options

FILE: dict[str, Any] = cluster_file("hosts/raycluster.yaml")
HEAD, WORKERS = FILE["provider"]["head_ip"], FILE["provider"]["worker_ips"]
NODE_TYPE = "local.cluster.node"

open_files_of_ray = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
"""Ray's provider does not close the file with its state."""


def test_ray_accepts_the_cluster_file_and_keeps_every_worker() -> None:
    from ray.autoscaler._private.util import validate_config

    config = prepared(FILE)
    validate_config(config)
    assert config["max_workers"] == len(WORKERS)
    assert config["available_node_types"][NODE_TYPE]["min_workers"] == len(WORKERS)
    assert config["available_node_types"][NODE_TYPE]["max_workers"] == len(WORKERS)


def test_each_command_is_valid_shell_with_existing_names() -> None:
    commands = commands_of(prepared(FILE))
    assert [error for command in commands if (error := syntax_error(command))] == []
    text = "\n".join(commands)
    assert unknown_options(text) == set()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"millrace\[([\w,]+)\]", text)
    assert named
    assert set(",".join(named).split(",")) <= set(extras)


def test_copied_files_exist_and_suffice() -> None:
    for remote, local in FILE["file_mounts"].items():
        assert remote == f"~/millrace/{local}"
        assert (ROOT / local).exists()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"src", "pyproject.toml", project["readme"], *project["license-files"]} <= set(FILE["file_mounts"].values())


def _bootstrap_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file as `ray up` stores it on the head, without logins to machines that do not exist."""
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    config = prepared(FILE)
    config["cluster_name"] = folder.name  # Ray keeps one provider a name in a process
    config["provider"] |= {"disable_node_updaters": True, "foreground_node_launch": True}
    config["auth"].pop("ssh_private_key")
    config["file_mounts"] = {}
    path = folder / "bootstrap.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@open_files_of_ray
def test_autoscaler_of_the_file_starts_all_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "export RAY_enable_autoscaler_v2=0 " in FILE["head_start_ray_commands"][-1]
    from ray.autoscaler._private.autoscaler import StandardAutoscaler
    from ray.autoscaler._private.load_metrics import LoadMetrics

    path = _bootstrap_file(tmp_path, monkeypatch)
    autoscaler = StandardAutoscaler(str(path), LoadMetrics(), None, session_name="session", update_interval_s=0)
    autoscaler.update()
    assert sorted(autoscaler.provider.non_terminated_nodes({})) == sorted([HEAD, *WORKERS])


@open_files_of_ray
def test_newer_autoscaler_with_existing_machines_loses_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason for the older autoscaler. When this test fails, Ray is fixed, and the file no longer needs the setting."""
    from ray.autoscaler.v2.autoscaler import Autoscaler
    from ray.autoscaler.v2.instance_manager.config import FileConfigReader
    from ray.autoscaler.v2.instance_manager.reconciler import Reconciler
    from ray.core.generated.autoscaler_pb2 import ClusterResourceState, NodeStatus
    from ray.core.generated.instance_manager_pb2 import Instance

    class Gcs:
        address = f"{HEAD}:6379"

    reader = FileConfigReader(str(_bootstrap_file(tmp_path, monkeypatch)))
    autoscaler = Autoscaler("session", reader, Gcs())
    machines = autoscaler._cloud_instance_provider

    def decide() -> dict[str, str]:
        """One update of the autoscaler; returns its view of the machines."""
        state = ClusterResourceState(cluster_session_name="session", cluster_resource_state_version=1)
        head = state.node_states.add(
            node_id=b"\1" * 28, instance_id=HEAD, ray_node_type_name=NODE_TYPE, status=NodeStatus.RUNNING
        )
        head.total_resources["node:__internal_head__"] = 1
        Reconciler.reconcile(
            instance_manager=autoscaler._instance_manager,
            scheduler=autoscaler._scheduler,
            cloud_provider=machines,
            cloud_resource_monitor=autoscaler._cloud_resource_monitor,
            ray_cluster_resource_state=state,
            non_terminated_cloud_instances=machines.get_non_terminated(),
            cloud_provider_errors=machines.poll_errors(),
            autoscaling_config=reader.get_cached_autoscaling_config(),
        )
        found, _ = autoscaler._instance_manager._instance_storage.get_instances()
        return {each.cloud_instance_id: Instance.InstanceStatus.Name(each.status) for each in found.values()}

    try:
        for _ in range(6):
            seen = decide()
            machines._main_executor.submit(lambda: None).result()  # the requested machines are starting
        assert seen[HEAD] == "TERMINATED"
        assert len(machines.get_non_terminated()) < len(WORKERS)
    finally:
        machines._main_executor.shutdown()
        machines._node_launcher_executors.shutdown()
