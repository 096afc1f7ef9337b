"""deploy/aws against an emulated AWS: the machines that `ray up` and Ray's autoscaler start for the file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from moto import mock_aws
from tests.support.deploying import DEPLOY, cluster_file, prepared

REGION = "eu-central-1"
HEAD_TAGS = {"ray-node-type": "head", "ray-user-node-type": "head", "ray-node-status": "up-to-date"}


class Cloud:
    """An emulated AWS with the roles of access.yaml in it, and the cluster file as `ray up` resolves it there."""

    def __init__(self, config: dict[str, Any], stack: dict[str, Any]) -> None:
        self.config = config
        self.stack = stack
        self.refused: dict[str, str] = {}
        """The error code that requests for "spot" or "on demand" machines get."""
        self.asked: list[tuple[str, str]] = []
        """Every request for machines: what for, and its subnet."""
        self.operations: set[str] = set()

    def provider(self, config: dict[str, Any] | None = None) -> Any:
        from ray.autoscaler._private.providers import _get_node_provider

        config = config or self.config
        provider = _get_node_provider(config["provider"], config["cluster_name"], use_cache=False)
        for client in (provider.ec2.meta.client, provider.ec2_fail_fast.meta.client):
            client.meta.events.register_first("before-call.ec2", self._called, unique_id="cloud")
        return provider

    def _called(self, params: dict[str, Any], event_name: str, **_: Any) -> Any:
        self.operations.add(event_name.rpartition(".")[2])
        if not event_name.endswith("RunInstances"):
            return None
        body = params["body"]
        kind = "spot" if body.get("InstanceMarketOptions.MarketType") == "spot" else "on demand"
        self.asked.append((kind, body["SubnetId"]))
        if kind not in self.refused:
            return None
        error = {"Code": self.refused[kind], "Message": "There is none"}
        return SimpleNamespace(status_code=400), {"Error": error, "ResponseMetadata": {}}

    def machines(self) -> list[dict[str, Any]]:
        import boto3

        found = boto3.client("ec2", REGION).describe_instances()
        return [
            machine
            for reservation in found["Reservations"]
            for machine in reservation["Instances"]
            if machine["State"]["Name"] in ("pending", "running")
        ]


class _CloudFormation(yaml.SafeLoader):
    """Reads `!Sub text` as the text for a bucket called data, `!GetAtt X.Arn` as an ARN, other references as names."""


def _reference(loader: yaml.SafeLoader, tag: str, node: yaml.Node) -> str:
    if tag == "GetAtt":
        return "arn:aws:iam::123456789012:role/" + str(node.value).removesuffix(".Arn")
    return str(node.value).replace("${AWS::Partition}", "aws").replace("${Bucket}", "data")


_CloudFormation.add_multi_constructor("!", _reference)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """Resolved once: it takes seconds."""
    from moto.ec2.models.instance_types import InstanceTypeBackend

    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("HOME", str(home))
        # Ray looks through all that there are; of AWS's thousand these families will do.
        some = [each for each in InstanceTypeBackend.instance_types if each.name.split(".")[0] in ("m7i", "g5", "g6")]
        patch.setattr(InstanceTypeBackend, "instance_types", some)
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        with mock_aws():
            import boto3
            from ray.autoscaler._private.aws import config as ray_config
            from ray.autoscaler._private.aws import utils
            from ray.autoscaler._private.util import validate_config

            # Clients of an earlier emulation would be reused.
            for cache in (utils.resource_cache, utils.client_cache, ray_config._get_subnets_or_die):
                cache.cache_clear()
            image = boto3.client("ec2", REGION).describe_images()["Images"][0]["ImageId"]
            stack = yaml.load((DEPLOY / "aws" / "access.yaml").read_text(), _CloudFormation)["Resources"]
            iam = boto3.client("iam", REGION)
            for role, profile in (("HeadRole", "HeadProfile"), ("WorkerRole", "WorkerProfile")):
                properties = stack[role]["Properties"]
                name, document = properties["RoleName"], properties["AssumeRolePolicyDocument"]
                iam.create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(document))
                for policy in properties.get("Policies", []):
                    text = json.dumps(policy["PolicyDocument"])
                    iam.put_role_policy(RoleName=name, PolicyName=policy["PolicyName"], PolicyDocument=text)
                profile_name = stack[profile]["Properties"]["InstanceProfileName"]
                iam.create_instance_profile(InstanceProfileName=profile_name)
                iam.add_role_to_instance_profile(InstanceProfileName=profile_name, RoleName=name)
            storage = stack["Storage"]["Properties"]
            iam.create_policy(PolicyName="storage", PolicyDocument=json.dumps(storage["PolicyDocument"]))

            config = prepared(cluster_file("aws/raycluster.yaml"))
            for type_ in config["available_node_types"].values():
                assert type_["node_config"]["ImageId"].startswith("resolve:ssm:/aws/service/")
                type_["node_config"]["ImageId"] = image  # the emulation has no such parameters
            from millrace.ray.aws import SpotFirstNodeProvider

            config = SpotFirstNodeProvider.fillout_available_node_types_resources(config)
            validate_config(config)
            yield Cloud(SpotFirstNodeProvider.bootstrap_config(config), stack)
            for cache in (utils.resource_cache, utils.client_cache, ray_config._get_subnets_or_die):
                cache.cache_clear()


@pytest.fixture
def cloud(emulated: Cloud, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    import boto3

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    emulated.refused, emulated.asked, emulated.operations = {}, [], set()
    yield emulated
    running = [machine["InstanceId"] for machine in emulated.machines()]
    if running:
        boto3.client("ec2", REGION).terminate_instances(InstanceIds=running)


def _launch(cloud: Cloud) -> list[str]:
    """One machine: the emulation starts one of several that are requested at once."""
    node_config = cloud.config["available_node_types"]["gpu"]["node_config"]
    tags = {"ray-node-type": "worker", "ray-user-node-type": "gpu", "ray-node-name": "w", "ray-launch-config": "x"}
    return sorted(cloud.provider().create_node(node_config, tags, 1))


@pytest.mark.slow
def test_cluster_file_starts_machines_with_gpu_nvme_and_profile(cloud: Cloud) -> None:
    import boto3

    types = cloud.config["available_node_types"]
    assert types["gpu"]["resources"]["GPU"] == 1
    assert types["gpu"]["resources"]["CPU"] == 8
    assert types["head"]["resources"]["CPU"] == 0
    [details] = boto3.client("ec2", REGION).describe_instance_types(
        InstanceTypes=[types["gpu"]["node_config"]["InstanceType"]]
    )["InstanceTypes"]
    assert details["InstanceStorageInfo"]["NvmeSupport"] == "required"
    assert details["InstanceStorageInfo"]["TotalSizeInGB"] >= 400

    launched = _launch(cloud) + _launch(cloud)
    workers = cloud.machines()
    assert sorted(worker["InstanceId"] for worker in workers) == sorted(launched)
    assert len(workers) == 2
    for worker in workers:
        assert worker["InstanceLifecycle"] == "spot"
        assert worker["IamInstanceProfile"]["Arn"].endswith("/millrace-worker")
        assert worker["KeyName"] == types["head"]["node_config"]["KeyName"]
        tags = {tag["Key"]: tag["Value"] for tag in worker["Tags"]}
        assert tags["ray-cluster-name"] == "millrace"
    # Ray made no role of its own: the head has the one of the stack.
    assert cloud.config["head_node"] == {}
    assert Path(cloud.config["auth"]["ssh_private_key"]).exists()
    # The nodes reach each other; from outside there is SSH.
    groups = {group["GroupId"] for worker in workers for group in worker["SecurityGroups"]}
    rules = boto3.client("ec2", REGION).describe_security_groups(GroupIds=sorted(groups))["SecurityGroups"][0]
    open_to_all = [rule["FromPort"] for rule in rules["IpPermissions"] if rule["IpRanges"]]
    assert open_to_all == [22]


@pytest.mark.parametrize("code", ["InsufficientInstanceCapacity", "Unsupported"])
def test_machine_without_spot_capacity_is_on_demand(cloud: Cloud, code: str) -> None:
    cloud.refused = {"spot": code}
    assert len(_launch(cloud)) == 1
    [worker] = cloud.machines()
    assert "InstanceLifecycle" not in worker
    assert worker["IamInstanceProfile"]["Arn"].endswith("/millrace-worker")
    tags = {tag["Key"]: tag["Value"] for tag in worker["Tags"]}
    assert tags["Name"] == "w"
    assert tags["ray-user-node-type"] == "gpu"
    zones = set(cloud.config["available_node_types"]["gpu"]["node_config"]["SubnetIds"])
    assert len(zones) == 3
    assert {subnet for kind, subnet in cloud.asked if kind == "spot"} == zones
    assert [kind for kind, _ in cloud.asked][-1] == "on demand"
    # And the next one is requested as spot again.
    cloud.refused = {}
    _launch(cloud)
    assert sorted(machine.get("InstanceLifecycle", "on demand") for machine in cloud.machines()) == [
        "on demand",
        "spot",
    ]


@pytest.mark.parametrize(
    "refused",
    [{"spot": "UnauthorizedOperation"}, {"spot": "SpotMaxPriceTooLow", "on demand": "VcpuLimitExceeded"}],
    ids=["not for want of spot", "neither"],
)
def test_launch_refused_for_another_reason_raises_rays_error(cloud: Cloud, refused: dict[str, str]) -> None:
    from ray.autoscaler.node_launch_exception import NodeLaunchException

    cloud.refused = refused
    with pytest.raises(NodeLaunchException) as error:
        _launch(cloud)
    assert error.value.category == list(refused.values())[-1]
    assert cloud.machines() == []
    assert {kind for kind, _ in cloud.asked} == set(refused)


@contextmanager
def _autoscaler(cloud: Cloud, config: dict[str, Any], folder: Path) -> Iterator[Callable[[int], None]]:
    """Ray's autoscaler with a running head. Returns a function that runs one update with a number of requested GPUs."""
    from ray.autoscaler.v2.autoscaler import Autoscaler
    from ray.autoscaler.v2.instance_manager.config import FileConfigReader
    from ray.autoscaler.v2.instance_manager.reconciler import Reconciler
    from ray.core.generated.autoscaler_pb2 import ClusterResourceState, NodeStatus

    class Gcs:
        address = "10.0.0.1:6379"

    # As `ray up` stores it on the head, without logins to machines that do not exist.
    config = {**config, "provider": {**config["provider"], "disable_node_updaters": True}}
    config.pop("head_node")
    (folder / "bootstrap.yaml").write_text(yaml.safe_dump(config))
    reader = FileConfigReader(str(folder / "bootstrap.yaml"))
    autoscaler = Autoscaler("session", reader, Gcs())
    instances, machines = autoscaler._instance_manager, autoscaler._cloud_instance_provider
    machines._v1_provider = cloud.provider(config)
    machines._max_launch_batch_per_type = 1  # see _launch
    head_config = config["available_node_types"]["head"]["node_config"]
    [head] = machines.v1_provider.create_node(head_config, {**HEAD_TAGS, "ray-launch-config": "x"}, 1)

    def decide(gpus: int) -> None:
        state = ClusterResourceState(cluster_session_name="session", cluster_resource_state_version=1)
        node = state.node_states.add(
            node_id=b"\1" * 28, instance_id=head, ray_node_type_name="head", status=NodeStatus.RUNNING
        )
        node.total_resources["node:__internal_head__"] = 1
        state.pending_resource_requests.add(count=gpus).request.resources_bundle["GPU"] = 1
        Reconciler.reconcile(
            instance_manager=instances,
            scheduler=autoscaler._scheduler,
            cloud_provider=machines,
            cloud_resource_monitor=autoscaler._cloud_resource_monitor,
            ray_cluster_resource_state=state,
            non_terminated_cloud_instances=machines.get_non_terminated(),
            cloud_provider_errors=machines.poll_errors(),
            autoscaling_config=reader.get_cached_autoscaling_config(),
        )

    try:
        yield decide
    finally:  # what it still launches is part of this test
        machines._main_executor.shutdown()
        machines._node_launcher_executors.shutdown()


def _until(condition: Callable[[], bool], step: Callable[[], None]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        step()
        time.sleep(0.05)


def test_rays_autoscaler_gets_five_machines_without_spot_and_no_sixth(cloud: Cloud, tmp_path: Path) -> None:
    cloud.refused = {"spot": "InsufficientInstanceCapacity"}
    with _autoscaler(cloud, cloud.config, tmp_path) as decide:
        _until(lambda: len(cloud.machines()) == 6, lambda: decide(7))
        for _ in range(3):
            decide(7)
    kinds = [
        tag["Value"] for machine in cloud.machines() for tag in machine["Tags"] if tag["Key"] == "ray-user-node-type"
    ]
    assert sorted(kinds) == ["gpu"] * 5 + ["head"]


def test_ray_alone_requests_spot_repeatedly(cloud: Cloud, tmp_path: Path) -> None:
    """The reason for `SpotFirstNodeProvider`. When Ray supports this, the test fails, and two node types suffice."""
    cloud.refused = {"spot": "InsufficientInstanceCapacity"}
    gpu = cloud.config["available_node_types"]["gpu"]
    on_demand = {key: value for key, value in gpu["node_config"].items() if key != "InstanceMarketOptions"}
    config = {
        **cloud.config,
        "provider": {**cloud.config["provider"], "type": "aws"},
        "available_node_types": {
            "head": cloud.config["available_node_types"]["head"],
            "gpu": {**gpu, "priority": 1},
            "gpu-on-demand": {**gpu, "node_config": on_demand, "priority": 0},
        },
    }
    config["provider"].pop("module")
    with _autoscaler(cloud, config, tmp_path) as decide:
        cloud.asked.clear()  # the head
        _until(lambda: len(cloud.asked) >= 20, lambda: decide(1))
    assert {kind for kind, _ in cloud.asked} == {"spot"}


def test_head_has_the_permissions_of_the_autoscaler(cloud: Cloud) -> None:
    provider = cloud.provider()
    node_config = cloud.config["available_node_types"]["gpu"]["node_config"]
    tags = {"ray-node-type": "worker", "ray-node-name": "w", "ray-launch-config": "x"}
    [worker] = provider.create_node(node_config, tags, 1)
    assert provider.non_terminated_nodes({}) == [worker]
    assert provider.internal_ip(worker)
    provider.set_node_tags(worker, {"ray-node-status": "up-to-date"})
    provider.terminate_nodes([worker])
    assert provider.non_terminated_nodes({}) == []
    assert {"RunInstances", "DescribeInstances", "CreateTags", "TerminateInstances"} <= cloud.operations
    [policy] = cloud.stack["HeadRole"]["Properties"]["Policies"]
    allowed = set()
    for statement in policy["PolicyDocument"]["Statement"]:
        actions = statement["Action"]
        allowed |= set([actions] if isinstance(actions, str) else actions)
    assert {f"ec2:{operation}" for operation in cloud.operations} <= allowed
    assert "iam:PassRole" in allowed
