"""huggingface_hub's own client reads the stored files from the stand-in, so it follows the protocol of the hub.

Conversely, Millrace reads the same bytes over `hf://`, with fsspec, pyarrow and pandas, as that client.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from tests.support.hub_server import HubServer

import millrace

LARGE = bytes(i * 11 % 256 for i in range(50_000))
FILES = {"README.md": b"# Things", "data/a.bin": LARGE, "data/deep/b.txt": b"bbb", "data/ü ä#.txt": b"odd"}
TOKEN = "hf_planted"


@pytest.fixture(autouse=True)
def _own_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the user's token or cache; Xet is another protocol, which the stand-in does not have."""
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGING")):
            monkeypatch.delenv(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer(tokens=[TOKEN], page_size=3) as hub:
        hub.commit("datasets", "user/things", dict(FILES))
        hub.commit("models", "user/model", {"config.json": b"{}"})
        yield hub
        huggingface_hub.close_session()


@pytest.fixture
def theirs(hub: HubServer) -> Any:
    return huggingface_hub.HfFileSystem(endpoint=hub.url, token=False, skip_instance_cache=True)


@pytest.fixture
def ours(hub: HubServer, tmp_path: Path) -> Any:
    return millrace.filesystem(
        "hf", target_options={"endpoint": hub.url}, cache_dir=str(tmp_path / "cache"), min_free=0
    )


def test_hub_library_reads_the_stand_in(hub: HubServer) -> None:
    api = huggingface_hub.HfApi(endpoint=hub.url, token=False)
    commit = hub.repository("datasets", "user/things").branches["main"]
    assert api.dataset_info("user/things").sha == commit
    assert api.dataset_info("user/things", revision=commit, expand=["sha", "lastModified"]).sha == commit
    assert api.model_info("user/model").id == "user/model"
    tree = list(api.list_repo_tree("user/things", recursive=True, repo_type="dataset"))
    assert {entry.path: entry.size for entry in tree if isinstance(entry, huggingface_hub.hf_api.RepoFile)} == {
        name: len(data) for name, data in FILES.items()
    }
    assert {entry.path for entry in tree if isinstance(entry, huggingface_hub.hf_api.RepoFolder)} == {
        "data",
        "data/deep",
    }
    infos = api.get_paths_info("user/things", ["data/a.bin", "data", "none"], repo_type="dataset")
    assert [info.path for info in infos] == ["data/a.bin", "data"]
    assert [branch.name for branch in api.list_repo_refs("user/things", repo_type="dataset").branches] == ["main"]


@pytest.mark.parametrize("name", sorted(FILES))
def test_hub_library_downloads_the_stored_files(hub: HubServer, tmp_path: Path, name: str) -> None:
    path = huggingface_hub.hf_hub_download(
        "user/things", name, repo_type="dataset", endpoint=hub.url, token=False, cache_dir=tmp_path / "hub"
    )
    assert Path(path).read_bytes() == FILES[name]


def test_hub_library_raises_the_errors_of_the_hub(hub: HubServer) -> None:
    api = huggingface_hub.HfApi(endpoint=hub.url, token=TOKEN)
    with pytest.raises(RepositoryNotFoundError):
        api.dataset_info("user/none")
    with pytest.raises(RevisionNotFoundError):
        api.dataset_info("user/things", revision="none")
    with pytest.raises(EntryNotFoundError):
        api.get_hf_file_metadata(
            url=huggingface_hub.hf_hub_url("user/things", "none", repo_type="dataset", endpoint=hub.url)
        )
    hub.repository("datasets", "user/things").gated = True
    with pytest.raises(GatedRepoError):
        api.get_hf_file_metadata(
            url=huggingface_hub.hf_hub_url("user/things", "README.md", repo_type="dataset", endpoint=hub.url),
            token=False,
        )


def test_both_hub_clients_return_the_same_metadata(hub: HubServer, theirs: Any) -> None:
    origin = millrace.origin.open_origin("hf", {"endpoint": hub.url, "token": False})
    root = "datasets/user/things"
    listed = {info.key: info for page in origin.list_all(root) for info in page}
    assert sorted(listed) == sorted(theirs.find(root))
    for key, info in listed.items():
        reported = theirs.info(key)
        assert info.size == reported["size"]
        assert info.version == (reported["lfs"].sha256 if reported["lfs"] else reported["blob_id"])
        assert info.version == origin.head(key).version
        assert bytes(origin.read(key, 0, info.size, version=info.version)) == theirs.cat_file(key)
    level = origin.list_level(f"{root}/data")
    names = [entry["name"] for entry in theirs.ls(f"{root}/data", detail=True)]
    assert sorted([*level.prefixes, *(info.key for info in level.objects)]) == sorted(names)


def test_files_read_as_by_their_file_system(theirs: Any, ours: Any) -> None:
    for name, data in FILES.items():
        path = f"hf://datasets/user/things/{name}"
        assert ours.cat(path) == theirs.cat(path) == data
        with ours.open(path) as file:
            file.seek(2)
            assert file.read(3) == data[2:5]
    assert sorted(ours.find("hf://datasets/user/things")) == sorted(theirs.find("datasets/user/things"))
    assert ours.isdir("datasets/user/things/data")
    assert not ours.exists("datasets/user/things/none")


def test_tables_are_read_by_pyarrow_and_pandas_and_pinned(hub: HubServer, ours: Any, tmp_path: Path) -> None:
    table = pa.table({"number": list(range(10_000)), "text": [f"row {n}" for n in range(10_000)]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=1_000)
    data = (tmp_path / "t.parquet").read_bytes()
    commit = hub.commit("datasets", "user/things", {"train/0.parquet": data, "train/1.parquet": data})
    assert pq.read_table("datasets/user/things/train/0.parquet", filesystem=ours).equals(table)
    assert pq.read_table("datasets/user/things/train", filesystem=ours).num_rows == 20_000
    pinned = f"hf://datasets/user/things@{commit}/train/0.parquet"
    frame = pd.read_parquet(pinned, filesystem=ours)
    assert len(frame) == 10_000
    hub.commit("datasets", "user/things", {"train/0.parquet": None})
    hub.service.requests.clear()
    hub.cdn.requests.clear()
    assert pd.read_parquet(pinned, filesystem=ours).equals(frame)
    assert hub.service.requests == hub.cdn.requests == []  # a commit never changes, and its bytes are here


def test_private_repository_is_read_with_the_environment_token(
    hub: HubServer, ours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repository("datasets", "user/things").private = True
    with pytest.raises(PermissionError):
        ours.cat("datasets/user/things/README.md")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert ours.cat("datasets/user/things/README.md") == b"# Things"
