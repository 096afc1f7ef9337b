"""Helpers of the tests of deploy/: the files, as Ray reads them, and the shell commands in them."""

from __future__ import annotations

import copy
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from millrace.config import OPTION_NAMES

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"

COMMANDS = (
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)


def cluster_file(name: str) -> dict[str, Any]:
    """A file of `ray up`, as it stands in deploy/."""
    config: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())
    return config


def prepared(config: dict[str, Any]) -> dict[str, Any]:
    """A cluster file as `ray up` prepares it for the provider; raises if Ray would refuse it."""
    from ray.autoscaler._private.util import prepare_config

    result: dict[str, Any] = prepare_config(copy.deepcopy(config))
    return result


def documents(name: str) -> list[dict[str, Any]]:
    """The documents of a Kubernetes manifest in deploy/."""
    return [document for document in yaml.safe_load_all((DEPLOY / name).read_text()) if document]


def commands_of(config: dict[str, Any]) -> list[str]:
    return [command for key in COMMANDS for command in config[key]]


def syntax_error(command: str) -> str:
    """The syntax error that bash reports for a command, without running it; empty if there is none."""
    done = subprocess.run(["bash", "-n"], input=command, text=True, capture_output=True, timeout=300)
    return done.stderr.strip() or ("" if done.returncode == 0 else f"exit {done.returncode}")


def unknown_options(text: str) -> set[str]:
    """`MILLRACE_*` variables in a text that are not options of the file system."""
    known = {f"MILLRACE_{name.upper()}" for name in OPTION_NAMES} | {"MILLRACE_CONFIG"}
    return set(re.findall(r"MILLRACE_[A-Z_]+", text)) - known
