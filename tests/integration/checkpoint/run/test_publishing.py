"""Weights that are published and followed: in place, whole, and with few bytes."""

from __future__ import annotations

import threading
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from tests.support import harms, ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from millrace.checkpoint import CheckpointManager, WeightFollower, WeightPublisher, load_weights
from millrace.checkpoint.format import manifest as manifests
from millrace.checkpoint.format.manifest import decode_manifest
from millrace.checkpoint.storage.manifests import read_manifest
from millrace.checkpoint.storage.storage import open_storage
from millrace.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MissingKeyError,
    StateMismatchError,
    UnsupportedFormatError,
    UsageError,
)
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

ROWS, COLUMNS = 1536, 1024


def weights(version: int, **options: Any) -> dict[str, torch.Tensor]:
    """Weights of which each version changes one value in 300, by one unit in the last place."""
    generator = torch.Generator().manual_seed(7)
    values = {
        "body.weight": (torch.randn(ROWS, COLUMNS, generator=generator) * 0.02).to(torch.bfloat16),
        "body.bias": torch.randn(ROWS, generator=generator).to(torch.bfloat16),
        "head": torch.randn(700, 800, generator=generator),
    }
    for number in range(1, version + 1):
        values["body.weight"].view(torch.int16).view(-1)[number::300] += 1
        values["body.bias"][number % ROWS] = number
    return values


def empty() -> dict[str, torch.Tensor]:
    return {key: torch.full_like(value, -1) for key, value in weights(0).items()}


def holds(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether the tensors of `found` that `expected` has are equal to them, in the dtypes of `found`."""
    return all(torch.equal(found[key], value.to(found[key].dtype)) for key, value in expected.items() if key in found)


def only(directory: Path, version: int) -> Path:
    """The data file of a version."""
    (file,) = (directory / f"step-{version:012d}").glob("data-*.millrace")
    return file


def test_follower_of_relative_path_after_change_of_directory_gets_new_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    follower, mine = WeightFollower("policy"), empty()
    with WeightPublisher("policy") as publisher:
        publisher.publish(0, weights(0))
        assert follower.update(mine) == 0
        monkeypatch.chdir("/")
        publisher.publish(1, weights(1))
        assert follower.update(mine) == 1
        assert holds(mine, weights(1))


def test_follower_gets_each_version_in_place_and_reads_only_what_changed(s3: S3Server, bucket: str) -> None:
    url = f"s3://{bucket}/policy"
    with EmulatedRegion(s3.endpoint_url, round_trip_seconds=0.0, bytes_per_second=None) as region:
        options = {**s3.target_options, "endpoint_url": region.endpoint_url}
        follower, mine = WeightFollower(url, target_options=options), empty()
        addresses = [value.data_ptr() for value in mine.values()]
        with WeightPublisher(url, target_options=s3.target_options) as publisher:
            full = publisher.publish(0, weights(0)).stored_bytes
            assert follower.update(mine) == 0
            assert holds(mine, weights(0))
            for version in range(1, 4):
                stored = publisher.publish(version, weights(version)).stored_bytes
                assert stored < full / 50
                storage = open_storage(f"{url}/step-{version:012d}", s3.target_options)
                manifest = read_manifest(storage).nbytes
                before = region.stats().by_kind["GET"].bytes_down
                assert follower.update(mine) == version
                assert holds(mine, weights(version))
                assert region.stats().by_kind["GET"].bytes_down - before <= stored + manifest
            # A follower that is behind reads the deltas, and nothing of the full version.
            late = weights(0)
            before = region.stats().by_kind["GET"].bytes_down
            assert WeightFollower(url, target_options=options).update(late) == 3
            assert region.stats().by_kind["GET"].bytes_down - before < full / 10
            assert holds(late, weights(3))
        assert [value.data_ptr() for value in mine.values()] == addresses


def test_follower_with_another_dtype_and_a_part_of_the_keys_reads_only_deltas(tmp_path: Path) -> None:
    with WeightPublisher(tmp_path) as publisher:
        publisher.publish(1, weights(1))
        wide = {"body.weight": torch.zeros(ROWS, COLUMNS), "body.bias": torch.zeros(ROWS, dtype=torch.float64)}
        follower = WeightFollower(tmp_path)
        assert follower.update(wide) == 1
        assert holds(wide, weights(1))
        publisher.publish(2, weights(2))
        only(tmp_path, 1).rename(tmp_path / "aside")  # the full version cannot be read any more
        assert follower.update(wide) == 2
        assert holds(wide, weights(2))


def test_modified_tensors_are_detected_and_brought_to_the_version(tmp_path: Path) -> None:
    with WeightPublisher(tmp_path) as publisher:
        publisher.publish(1, weights(1))
        follower, mine = WeightFollower(tmp_path), empty()
        follower.update(mine)
        publisher.publish(2, weights(2))
        mine["body.weight"][3, 4] = 17
        mine["head"].zero_()
        assert follower.update(mine) == 2
        assert holds(mine, weights(2))
        mine["head"][5] = 1
        assert follower.update(mine) == 2
        assert holds(mine, weights(2))


def test_damaged_version_leaves_the_tensors_as_they_were(tmp_path: Path) -> None:
    with WeightPublisher(tmp_path) as publisher:
        publisher.publish(1, weights(1))
        follower, mine = WeightFollower(tmp_path), empty()
        follower.update(mine)
        publisher.publish(2, weights(2))
    file = only(tmp_path, 2)
    intact = file.read_bytes()
    harms.flip(file, len(intact) - 3)  # the last chunk: others were read before it
    with pytest.raises(CorruptCheckpointError, match="does not match its checksum"):
        follower.update(mine)
    assert holds(mine, weights(1))
    file.write_bytes(intact)
    assert follower.update(mine) == 2
    assert holds(mine, weights(2))


def test_weights_that_do_not_fit_raise_before_anything_changes(tmp_path: Path) -> None:
    with WeightPublisher(tmp_path) as publisher:
        publisher.publish(1, weights(1))
    follower = WeightFollower(tmp_path)
    for wrong, error in (
        ({**empty(), "head": torch.zeros(3)}, StateMismatchError),
        ({**empty(), "other": torch.zeros(3)}, MissingKeyError),
        ({**empty(), "body.bias": torch.zeros(1).expand(ROWS)}, StateMismatchError),
        ({**empty(), "head": torch.zeros(701 * 400).as_strided((700, 800), (400, 1))}, StateMismatchError),
        ({**empty(), "head": torch._efficientzerotensor((700, 800))}, StateMismatchError),
    ):
        before = {key: value.clone() for key, value in wrong.items()}
        with pytest.raises(error):
            follower.update(wrong)
        assert holds(wrong, before)
    with pytest.raises(UsageError, match="list"):
        follower.update([])  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no float4_e2m1fn_x2")
def test_dtype_that_torch_cannot_convert_is_refused_before_anything_changes(tmp_path: Path) -> None:
    packed = torch.arange(64, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with WeightPublisher(tmp_path) as publisher:
        publisher.publish(1, {"w": torch.ones(4), "packed": packed})
    mine = {"w": torch.zeros(4), "packed": torch.zeros(64)}
    with pytest.raises(
        StateMismatchError, match=r"'packed' is stored as .*: load into a tensor of torch\.float4_e2m1fn_x2"
    ):
        WeightFollower(tmp_path).update(mine)
    assert not mine["w"].any()
    strided = torch.zeros(128, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)[::2]
    assert WeightFollower(tmp_path).update({"packed": strided}) == 1
    assert torch.equal(strided.view(torch.uint8), packed.view(torch.uint8))


def test_tensors_and_module_made_in_inference_mode_are_updated(tmp_path: Path) -> None:
    source = torch.nn.Linear(30, 20)
    with WeightPublisher(tmp_path) as publisher:
        publisher.publish(1, {"w": weights(1), "module": source})
    with torch.inference_mode():
        module = torch.nn.Linear(30, 20)
        tensors = {
            "body.weight": torch.zeros(ROWS, COLUMNS),
            "body.bias": torch.zeros(ROWS * 2, dtype=torch.bfloat16)[::2],
            "head": torch.zeros(800, 700).t(),
        }
    assert WeightFollower(tmp_path).update({"w": tensors, "module": module}) == 1
    assert holds(tensors, weights(1))
    assert holds(module.state_dict(), source.state_dict())
    with torch.inference_mode():
        module.weight.zero_()
    CheckpointManager(tmp_path).restore({"module": module})
    assert holds(module.state_dict(), source.state_dict())


def test_module_nested_dict_and_plain_value_are_updated(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = torch.nn.Linear(300, 400), torch.nn.Linear(300, 400)
    with WeightPublisher(tmp_path) as publisher:
        publisher.publish(1, {"model": model, "scale": {"ema": torch.ones(3), "rate": 0.5}, "more": torch.ones(2)})
    mine = {"model": other, "scale": {"ema": torch.zeros(3), "rate": 0.0}}
    assert WeightFollower(tmp_path).update(mine) == 1
    assert torch.equal(other.weight, model.weight)
    assert mine["scale"]["rate"] == 0.5
    assert torch.equal(mine["scale"]["ema"], torch.ones(3))


class Frozen(dict):  # type: ignore[type-arg]
    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("frozen")


class Counted(dict):  # type: ignore[type-arg]
    visits = 0

    def __iter__(self) -> Any:
        Counted.visits += 1
        return super().__iter__()


def test_follower_visits_the_keys_of_a_mapping_once_for_all_its_objects(tmp_path: Path) -> None:
    with WeightPublisher(tmp_path) as publisher:
        publisher.publish(1, {"w": torch.ones(4), "state": {number: {"step": number} for number in range(50)}})
    mine: dict[str, Any] = {"w": torch.zeros(4), "state": Counted({number: {"step": -1} for number in range(50)})}
    Counted.visits = 0
    WeightFollower(tmp_path).update(mine)
    assert mine["state"] == {number: {"step": number} for number in range(50)}
    assert Counted.visits < 20


def test_keys_with_the_same_text_get_their_own_values(tmp_path: Path) -> None:
    with WeightPublisher(tmp_path) as publisher:
        publisher.publish(1, {"w": torch.ones(4), 1: {"a": {"q": 5}}, "1": {"b": {"q": 6}}})
    mine: dict[Any, Any] = {"w": torch.zeros(4), 1: {"a": {"q": 0}}, "1": {"b": {"q": 0}}}
    WeightFollower(tmp_path).update(mine)
    assert (mine[1], mine["1"]) == ({"a": {"q": 5}}, {"b": {"q": 6}})


def test_value_in_an_immutable_mapping_is_refused_before_anything_changes(tmp_path: Path) -> None:
    with WeightPublisher(tmp_path) as publisher:
        publisher.publish(1, {"w": torch.ones(4), "settings": {"rate": 0.1, "scale": torch.ones(2)}})
    settings = {"rate": 0.5, "scale": torch.zeros(2)}
    mine: dict[str, Any] = {"w": torch.zeros(4)}
    frozen = Frozen(settings)
    for each in (MappingProxyType(settings), frozen):
        mine["settings"] = each
        with pytest.raises(UsageError, match=r"'settings\.rate' cannot be set in the state"):
            WeightFollower(tmp_path).update(mine)
        assert not mine["w"].any()
        assert not settings["scale"].any()
    mine["settings"] = settings
    assert WeightFollower(tmp_path).update(mine) == 1
    assert (settings["rate"], float(mine["w"][0])) == (0.1, 1.0)


def test_part_of_a_published_module_is_updated(tmp_path: Path) -> None:
    whole = torch.nn.ModuleDict({"body": torch.nn.Linear(8, 8), "head": torch.nn.Linear(8, 2)})
    part = torch.nn.ModuleDict({"body": torch.nn.Linear(8, 8)})
    with WeightPublisher(tmp_path / "policy") as publisher:
        publisher.publish(0, {"model": whole})
    assert WeightFollower(tmp_path / "policy").update({"model": part}) == 0
    assert all(torch.equal(value, whole.state_dict()[key]) for key, value in part.state_dict().items())


def test_wait_returns_a_newer_version_or_none(tmp_path: Path) -> None:
    follower = WeightFollower(tmp_path)
    assert follower.newest() is None
    assert follower.wait(timeout=0.1) is None
    with pytest.raises(CheckpointNotFoundError, match="nothing is published"):
        follower.update(empty())
    with WeightPublisher(tmp_path) as publisher:
        publisher.publish(5, weights(0))
        assert follower.wait(timeout=60) == 5
        assert follower.wait(newer_than=5, timeout=0) is None
        found: list[int | None] = []
        waiting = threading.Thread(target=lambda: found.append(follower.wait(newer_than=5, timeout="2min")))
        waiting.start()
        publisher.publish(6, weights(1))
        waiting.join(120)
        assert found == [6]


def test_versions_must_increase_also_for_a_new_publisher(tmp_path: Path) -> None:
    with WeightPublisher(tmp_path) as publisher:
        assert publisher.newest() is None
        publisher.publish(3, weights(0))
        with pytest.raises(UsageError, match=r"version 3 of .* is not above version 3.*publish version 4 or above"):
            publisher.publish(3, weights(1))
    with WeightPublisher(tmp_path) as publisher:
        assert publisher.newest() == 3
        with pytest.raises(UsageError, match="version 2 of"):
            publisher.publish(2, weights(1))
        publisher.publish(4, weights(1))
    mine = empty()
    assert WeightFollower(tmp_path).update(mine) == 4
    assert holds(mine, weights(1))


def test_only_the_newest_versions_stay_and_all_of_them_can_be_read(tmp_path: Path) -> None:
    with WeightPublisher(tmp_path, keep=2, full_every=4) as publisher:
        for version in range(10):
            publisher.publish(version, weights(version))
            assert holds(load_weights(tmp_path / f"step-{version:012d}"), weights(version))
    left = sorted(path.parent.name for path in tmp_path.glob("step-*/manifest.millrace"))
    assert left[-2:] == ["step-000000000008", "step-000000000009"]
    assert len(left) <= 3  # and the full one that the next delta may build on
    for name in left:
        assert holds(load_weights(tmp_path / name), weights(int(name[5:])))


def test_run_of_a_training_is_followed(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as run:
        run.save(1, {"model": weights(1), "step": 1})
        mine = {"model": empty()}
        follower = WeightFollower(tmp_path)
        assert follower.update(mine) == 1
        run.save(2, {"model": weights(2), "step": 2})
        assert follower.update(mine) == 2
        assert holds(mine["model"], weights(2))


def test_reader_without_sparse_chunks_refuses_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with WeightPublisher(tmp_path) as publisher:
        for version in range(1, 4):
            publisher.publish(version, weights(min(version, 2)))  # the third has references to sparse chunks only
    stored = [(tmp_path / f"step-{version:012d}" / "manifest.millrace").read_bytes() for version in range(1, 4)]
    assert [decode_manifest(data).sparse for data in stored] == [False, True, True]
    monkeypatch.setattr(manifests, "_KNOWN_FEATURES", frozenset({"delta", "transforms", "wrapped"}))
    assert decode_manifest(stored[0])
    for data in stored[1:]:
        with pytest.raises(UnsupportedFormatError, match=r"sparse.*install a newer Millrace"):
            decode_manifest(data)


# --- several ranks (this file is its own program) -------------------------------------------------


def follow_sharded(root: Path) -> None:
    """Two ranks follow with shards along the second dimension, and fail together."""
    mesh = init_device_mesh("cpu", (2,))
    rank = torch.distributed.get_rank()
    if rank == 0:
        torch.save([{"body.weight": weights(version)["body.weight"]} for version in (1, 2)], root / "expected")
    torch.distributed.barrier()
    expected = torch.load(root / "expected")
    publisher, follower = WeightPublisher(root / "run"), WeightFollower(root / "run")
    mine = {"body.weight": distribute_tensor(torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16), mesh, [Shard(1)])}

    def is_version(number: int) -> bool:
        return bool(torch.equal(mine["body.weight"].full_tensor(), expected[number - 1]["body.weight"]))

    publisher.publish(1, expected[0])
    assert follower.wait(timeout=60) == 1
    assert follower.update(mine) == 1
    assert is_version(1)
    publisher.publish(2, expected[1])
    publisher.close()
    torch.distributed.barrier()
    file = only(root / "run", 2)
    intact = file.read_bytes()
    torch.distributed.barrier()
    if rank == 0:
        harms.flip(file, len(intact) - 3)
    torch.distributed.barrier()
    try:
        follower.update(mine)
    except CorruptCheckpointError:
        pass
    else:
        raise AssertionError("a damaged version was accepted")
    assert is_version(1)
    torch.distributed.barrier()
    if rank == 0:
        file.write_bytes(intact)
        only(root / "run", 1).rename(root / "aside")  # the deltas suffice
    torch.distributed.barrier()
    assert follower.update(mine) == 2
    assert is_version(2)
    follower.close()


def test_ranks_with_another_sharding_follow_together(tmp_path: Path) -> None:
    ranks.run(__file__, "follow_sharded", 2, tmp_path)


if __name__ == "__main__":
    ranks.main({"follow_sharded": follow_sharded})
