"""deploy/helm and deploy/container: rendered by Helm's own engine, and checked against the schema of Kubernetes."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from tests.support.deploying import DEPLOY, ROOT, documents, unknown_options

from millrace._version import __version__
from millrace.cli.node import DEFAULT_PORT
from millrace.config import parse_amount

CHART = DEPLOY / "helm" / "millrace"
KUBERNETES = "1.33.0"
REQUIRED: dict[str, Any] = {
    "image": {"repository": "registry/millrace"},
    "members": "etcd://etcd:2379/training",
    "token": {"secretName": "cluster-token"},
}
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())

EVERYTHING: dict[str, Any] = {
    **REQUIRED,
    "imagePullSecrets": [{"name": "pull"}],
    "storageSecretName": "storage",
    "serviceAccountName": "reader",
    "tls": {"secretName": "certificates"},
    "env": [{"name": "AWS_REGION", "value": "eu-central-1"}],
    "podAnnotations": {"a/b": "c"},
    "podLabels": {"team": "speech"},
    "nodeSelector": {"disk": "nvme"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "high",
    "maxUnavailable": "10%",
}


def rendered(values: dict[str, Any]) -> dict[str, Any]:
    """The DaemonSet that Helm makes, accepted by the schema of Kubernetes."""
    helm = pytest.importorskip("helm_python", reason="needs helm-python-sdk (extra dev)")
    chart = helm.Chart.load(CHART)
    chart.validate_schema(values)
    [manifest] = [text for name, text in chart.render(values, name="cache").items() if name.endswith(".yaml")]
    [daemon_set] = yaml.safe_load_all(manifest)
    kubernetes_validate.validate(daemon_set, KUBERNETES, strict=True)
    assert isinstance(daemon_set, dict)
    return daemon_set


@pytest.mark.parametrize("values", [REQUIRED, EVERYTHING], ids=["required", "everything"])
def test_chart_is_linted_without_findings(values: dict[str, Any]) -> None:
    helm = pytest.importorskip("helm_python", reason="needs helm-python-sdk (extra dev)")
    findings = helm.chart.lint(CHART, values, strict=True)
    messages = [each for each in findings.get("messages", []) if "icon is recommended" not in str(each)]
    assert messages == [], findings


def test_every_value_has_its_schema_and_its_default() -> None:
    assert set(SCHEMA["properties"]) == set(VALUES) | {"global"}
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    for name, schema in SCHEMA["properties"].items():
        if schema.get("additionalProperties") is False:
            assert set(schema["properties"]) == set(VALUES[name]), name


@pytest.mark.parametrize(
    "values",
    [
        {},
        {**REQUIRED, "members": ""},
        {**REQUIRED, "members": "static://a:1"},
        {**REQUIRED, "token": {"secretName": "", "key": "token"}},
        {**REQUIRED, "image": {"repository": ""}},
        {**REQUIRED, "member": "etcd://a:1"},
        {**REQUIRED, "cache": {"capacity": "lots"}},
        {**REQUIRED, "replicas": 0},
        {**REQUIRED, "runAsUser": 0},
    ],
)
def test_wrong_values_do_not_pass_the_schema(values: dict[str, Any]) -> None:
    merged = {
        name: {**each, **values.get(name, {})} if isinstance(each, dict) else each for name, each in VALUES.items()
    }
    merged.update({name: each for name, each in values.items() if not isinstance(each, dict)})
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(merged, SCHEMA)


def container(daemon_set: dict[str, Any]) -> dict[str, Any]:
    [each] = daemon_set["spec"]["template"]["spec"]["containers"]
    assert isinstance(each, dict)
    return each


def test_node_gets_its_token_from_the_secret_and_only_known_options() -> None:
    daemon_set = rendered(REQUIRED)
    node = container(daemon_set)
    variables = {each["name"]: each for each in node["env"]}
    token = {"name": "cluster-token", "key": "token"}
    assert variables["MILLRACE_CLUSTER_TOKEN"]["valueFrom"]["secretKeyRef"] == token
    assert variables["MILLRACE_MEMBERS"]["value"] == REQUIRED["members"]
    assert unknown_options(" ".join(variables)) == set()
    assert "token" not in json.dumps(node["args"])
    assert node["image"] == f"registry/millrace:{yaml.safe_load((CHART / 'Chart.yaml').read_text())['appVersion']}"
    assert "envFrom" not in node
    for name in ("MILLRACE_CAPACITY", "MILLRACE_MIN_FREE"):
        parse_amount(variables[name]["value"], option=name)


def test_arguments_are_options_of_the_command() -> None:
    from millrace.cli.node import run

    options = {text for option in run.params for text in option.opts}
    args = container(rendered(REQUIRED))["args"]
    assert args[:2] == ["node", "run"]
    assert {each.partition("=")[0] for each in args[2:]} <= options
    assert VALUES["port"] == DEFAULT_PORT


def test_probes_and_annotations_name_the_endpoints_of_the_node() -> None:
    daemon_set = rendered(REQUIRED)
    node = container(daemon_set)
    assert [node[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")] == [
        "/healthz",
        "/healthz",
        "/readyz",
    ]
    assert {node[probe]["httpGet"]["port"] for probe in ("livenessProbe", "readinessProbe")} == {
        node["ports"][0]["name"]
    }
    annotations = daemon_set["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/path"] == "/metrics"
    assert annotations["prometheus.io/port"] == str(node["ports"][0]["containerPort"])


def test_nodes_with_tls_are_probed_by_their_port_only() -> None:
    node = container(rendered(EVERYTHING))
    assert all("tcpSocket" in node[probe] for probe in ("startupProbe", "livenessProbe", "readinessProbe"))
    assert {"name": "MILLRACE_TLS", "value": "/tls"} in node["env"]
    assert node["envFrom"] == [{"secretRef": {"name": "storage"}}]


def test_pod_is_root_only_to_set_the_owner_and_has_time_to_drain() -> None:
    spec = rendered(REQUIRED)["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["terminationGracePeriodSeconds"] > VALUES["drainSeconds"]
    [owner] = spec["initContainers"]
    assert owner["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    node = container({"spec": {"template": {"spec": spec}}})
    assert node["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert node["securityContext"]["readOnlyRootFilesystem"] is True


def test_metrics_are_public_only_on_request() -> None:
    public = {"name": "MILLRACE_PUBLIC_METRICS", "value": "1"}
    assert public not in container(rendered(REQUIRED))["env"]
    assert public in container(rendered({**REQUIRED, "metrics": {"public": True}}))["env"]


def test_nodes_and_the_pods_that_mount_their_cache_are_in_one_pid_namespace() -> None:
    assert rendered(REQUIRED)["spec"]["template"]["spec"]["hostPID"] is True
    assert "hostPID" not in rendered({**REQUIRED, "hostPID": False})["spec"]["template"]["spec"]
    [readers] = documents("kuberay/raycluster.yaml")
    groups = [readers["spec"]["headGroupSpec"], *readers["spec"]["workerGroupSpecs"]]
    assert [group["template"]["spec"]["hostPID"] for group in groups] == [True, True]


def test_kuberay_example_uses_the_directory_and_the_token_of_the_chart() -> None:
    [readers] = documents("kuberay/raycluster.yaml")
    group = readers["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    [volume] = group["volumes"]
    assert volume["hostPath"]["path"] == VALUES["cache"]["hostPath"]
    assert group["securityContext"]["runAsUser"] == VALUES["runAsUser"]
    variables = {each["name"]: each for each in group["containers"][0]["env"]}
    assert variables["MILLRACE_CLUSTER_TOKEN"]["valueFrom"]["secretKeyRef"]["key"] == VALUES["token"]["key"]
    assert unknown_options(" ".join(variables)) == set()


def test_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == re.match(r"\d+\.\d+\.\d+", __version__)[0]  # type: ignore[index]


def test_image_recipe_copies_existing_files_and_runs_as_a_user() -> None:
    text = (DEPLOY / "container" / "Containerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE) for name in line.split()]
    assert {"pyproject.toml", "constraints.txt", "src"} <= set(copied)
    assert all((ROOT / name).exists() for name in copied)
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE)[-1] == str(VALUES["runAsUser"])
    assert f"EXPOSE {DEFAULT_PORT}" in text


def test_kubernetes_page_has_only_values_of_the_chart() -> None:
    page = (ROOT / "docs" / "how-to" / "deploy-kubernetes.md").read_text()
    section = page[page.index("## One cache for several clusters") : page.index("## Where the cache is stored")]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    names = [*re.findall(r"--set ([\w.]+)=", section), *re.findall(r"`([\w.]+)`", " ".join(cells))]
    assert len(names) > 10
    for name in names:
        value = VALUES
        for key in name.split("."):
            value = value[key]
