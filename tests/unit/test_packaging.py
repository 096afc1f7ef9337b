"""The declarations of the package: metadata, the files for contributors, and the workflow."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools.check_wheel import ROOT, VERSIONS, lower_bounds

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_classifiers_name_the_tested_pythons_and_no_placeholder_is_left() -> None:
    named = [each.rpartition(" :: ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)]
    assert tuple(named) == VERSIONS
    text = (ROOT / "pyproject.toml").read_text()
    assert not re.search(r"example\.(com|org)|your-|TODO|<[a-z]+>", text)


def test_extra_all_has_all_but_the_extras_for_contributors_and_examples() -> None:
    [everything] = PROJECT["optional-dependencies"]["all"]
    extras = set(re.findall(r"[\w-]+", everything.partition("[")[2]))
    others = {"all", "demo", "dev", "docs", "server", "speech", "torchtitan"}  # the last one needs an old fsspec
    assert extras == set(PROJECT["optional-dependencies"]) - others


@pytest.mark.parametrize(
    "name", ["SECURITY.md", "CODE_OF_CONDUCT.md", "docs/reference/versioning.md", "deploy/README.md"]
)
def test_links_of_a_page_lead_to_files(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("name", ["millrace.checkpoint", "millrace.ray"])
def test_checkpoints_with_an_older_torch_name_the_declared_bound(name: str, tmp_path: Path) -> None:
    [bound] = lower_bounds(PROJECT["optional-dependencies"]["torch"])
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()  # as an older torch, it lacks what is imported
    used = {"millrace.checkpoint": "CheckpointManager", "millrace.ray": "report"}[name]
    program = f"import {name} as package\ntry: package.{used}\nexcept Exception as error: print(error)"
    variables = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    assert f"{used} needs torch {bound.removeprefix('torch==')} or newer: pip install" in done.stdout


def test_lower_bounds_of_requirements_are_pins() -> None:
    assert lower_bounds(["a>=1.2", "b[c,d]>=3,<4", "e>=5; python_version < '3.14'"]) == [
        "a==1.2",
        "b[c,d]==3",
        "e==5; python_version < '3.14'",
    ]


def test_workflow_runs_make_test_and_the_wheel_on_every_python() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert "make test" in commands
    [check] = [command for command in commands if "check_wheel" in command]
    assert re.findall(r"--require (\S+)", check) == list(VERSIONS)
    assert workflow["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_template_is_a_form(name: str) -> None:
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert {"name", "description", "body"} <= set(form)
    ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
    assert len(set(ids)) == len(ids)
