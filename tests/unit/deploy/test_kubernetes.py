"""deploy/kubernetes: against the schemas of KubeRay and Kubernetes, and as Ray's autoscaler reads it.

KubeRay has its schema only in its repository and its Helm chart. So `kuberay.schema.yaml` lists its fields, written by hand
after the API reference of version 1.7; fields of Kubernetes are checked against its published schema.
"""

from __future__ import annotations

import copy
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from tests.support.deploying import DEPLOY, ROOT, documents, unknown_options

KUBERNETES = "1.33.0"
"""Neither the oldest nor the newest that KubeRay 1.5.1 to 1.7 runs on."""

SCHEMA: dict[str, Any] = yaml.safe_load((Path(__file__).parents[2] / "fixtures" / "kuberay.schema.yaml").read_text())

[CLUSTER] = documents("kubernetes/raycluster.yaml")
[JOB] = documents("kubernetes/rayjob.yaml")
[SECRET] = documents("kubernetes/secret.yaml")
[READERS] = documents("kuberay/raycluster.yaml")


def _check(resource: dict[str, Any]) -> None:
    """Raises `jsonschema.ValidationError` where the API server would refuse the resource."""
    definition = {**SCHEMA, "$ref": f"#/definitions/{resource['kind']}"}
    jsonschema.Draft7Validator.check_schema(definition)
    jsonschema.validate(resource, definition)
    spec = resource["spec"] if resource["kind"] == "RayCluster" else resource["spec"]["rayClusterSpec"]
    for template in _templates(spec):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **template}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def _templates(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def _containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        container
        for template in _templates(spec)
        for container in (*template["spec"].get("initContainers", []), *template["spec"]["containers"])
    ]


@pytest.mark.parametrize("resource", [CLUSTER, JOB, READERS], ids=["RayCluster", "RayJob", "readers of a DaemonSet"])
def test_kuberay_schema_accepts_the_cluster(resource: dict[str, Any]) -> None:
    _check(resource)


def test_kubernetes_schema_accepts_the_secret() -> None:
    kubernetes_validate.validate(SECRET, KUBERNETES, strict=True)
    assert not any(value for key, value in SECRET["stringData"].items() if "KEY" in key)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("enableInTreeAutoscaler",), True),
        (("autoscalerOptions", "idleTimeoutSecond"), 60),
        (("autoscalerOptions", "version"), "2"),
        (("authOptions", "mode"), "on"),
        (("workerGroupSpecs", 0, "maxReplicas"), "5"),
        (("headGroupSpec", "rayStartParams", "num-cpus"), 0),
        (("workerGroupSpecs", 0, "template", "spec", "volume"), []),
        (("workerGroupSpecs", 0, "template", "spec", "containers", 0, "resource"), {}),
        (("headGroupSpec", "template", "spec", "securityContext", "runAsUser"), "1000"),
    ],
)
def test_wrong_manifest_is_detected(path: tuple[Any, ...], value: object) -> None:
    resource = copy.deepcopy(CLUSTER)
    place: Any = resource["spec"]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        _check(resource)


def test_worker_group_without_limits_is_detected() -> None:
    resource = copy.deepcopy(CLUSTER)
    del resource["spec"]["workerGroupSpecs"][0]["minReplicas"]
    with pytest.raises(jsonschema.ValidationError):
        _check(resource)


def test_job_and_cluster_files_have_the_same_cluster() -> None:
    assert JOB["spec"]["rayClusterSpec"] == CLUSTER["spec"]
    # The text below `spec:` as well, comments and all.
    cluster = (DEPLOY / "kubernetes/raycluster.yaml").read_text().partition("\nspec:\n")[2]
    job = (DEPLOY / "kubernetes/rayjob.yaml").read_text().partition("  rayClusterSpec:\n")[2]
    assert re.sub(r"^  ", "", job, flags=re.MULTILINE) == cluster


def test_rays_autoscaler_reads_none_to_five_gpu_workers() -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
    from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig

    resource = copy.deepcopy(CLUSTER)
    resource["metadata"]["namespace"] = "default"
    config = _derive_autoscaling_config_from_ray_cr(resource)  # validates against Ray's own schema
    types = config["available_node_types"]
    assert types["gpu"]["min_workers"] == 0
    assert types["gpu"]["max_workers"] == 5
    assert types["gpu"]["resources"]["GPU"] == 1
    assert types["gpu"]["resources"]["CPU"] == 7
    assert types["headgroup"]["resources"]["CPU"] == 0
    read = AutoscalingConfig(config)
    assert read.get_idle_timeout_s() == 300
    assert read.get_max_num_worker_nodes() == 5


def test_autoscaler_requests_workers_of_the_group() -> None:
    """Ray's provider for KubeRay, whose API server is a list: two more workers are one patch of the resource."""
    from ray.autoscaler.v2.instance_manager.cloud_providers.kuberay.cloud_provider import KubeRayProvider

    resource = copy.deepcopy(CLUSTER)
    resource["metadata"]["resourceVersion"] = "1"
    patches: list[Any] = []

    class ApiServer:
        def get(self, path: str) -> dict[str, Any]:
            if path.startswith("rayclusters/"):
                return resource
            return {"metadata": {"resourceVersion": "1"}, "items": []}

        def patch(self, path: str, payload: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
            patches.append((path, payload))
            return resource

    provider = KubeRayProvider(
        "millrace",
        {"namespace": "default", "head_node_type": "headgroup"},
        gcs_client=None,
        k8s_api_client=ApiServer(),
    )
    provider.get_non_terminated()
    provider.launch({"gpu": 2}, "request-1")
    assert provider.poll_errors() == []
    assert patches == [
        ("rayclusters/millrace", [{"op": "replace", "path": "/spec/workerGroupSpecs/0/replicas", "value": 2}])
    ]


def test_only_the_disk_setup_container_is_root() -> None:
    for template in _templates(CLUSTER["spec"]):
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        assert template["spec"]["securityContext"]["runAsUser"] > 0
    for container in _containers(CLUSTER["spec"]):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"]["drop"] == ["ALL"]
        if container["name"] == "cache-owner":
            assert context["capabilities"]["add"] == ["CHOWN"]
        else:
            assert "runAsUser" not in context
            assert "add" not in context["capabilities"]


def test_containers_have_resources_and_the_cache_is_a_volume() -> None:
    for container in _containers(CLUSTER["spec"]):
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert "/cache" in [mount["mountPath"] for mount in container["volumeMounts"]]
        if container["name"].startswith("ray-"):
            assert {"name": "MILLRACE_CACHE_DIR", "value": "/cache"} in container["env"]
            assert container["envFrom"] == [{"secretRef": {"name": SECRET["metadata"]["name"]}}]
    text = (DEPLOY / "kubernetes/raycluster.yaml").read_text()
    assert unknown_options(text) == set()


def test_ray_version_is_the_tested_one() -> None:
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert CLUSTER["spec"]["rayVersion"] == READERS["spec"]["rayVersion"] == pinned[1]
    assert f"rayproject/ray:{pinned[1]}-" in (DEPLOY / "kubernetes/Dockerfile").read_text()


def test_image_contains_its_files_and_the_script_of_the_job() -> None:
    text = (DEPLOY / "kubernetes/Dockerfile").read_text()
    lines = re.findall(r"^COPY --chown=\S+ (.+) /opt/millrace\S*$", text, re.MULTILINE)
    copied = [name for line in lines for name in line.split()]
    assert copied
    for name in copied:
        assert (ROOT / name).exists(), name
    script = re.search(r"/opt/millrace/(examples/\S+\.py)", JOB["spec"]["entrypoint"])
    assert script is not None
    assert (ROOT / script[1]).exists()


def test_job_script_accepts_its_arguments() -> None:
    from finetune.options import parse_settings

    python, script, *arguments = shlex.split(JOB["spec"]["entrypoint"])
    assert python == "python"
    assert script.endswith(".py")
    settings = parse_settings("", arguments)
    assert settings.gpu
    assert settings.workers == CLUSTER["spec"]["workerGroupSpecs"][0]["maxReplicas"]
    assert settings.min_workers == 1
