"""`millrace debug bundle`: diagnostics for a bug report, without secrets."""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from millrace._version import __version__
from millrace.cli.commands import GroupedCommands
from millrace.cli.common import cache_dir_option, cluster_access, json_option, node_option, print_json
from millrace.config import SECRET_NAMES, load_file, resolve
from millrace.errors import ConfigurationError, without_queries

_RELEVANT = re.compile(r"(MILLRACE|AWS|AZURE|GOOGLE|GCS|HF|RAY|TORCH|OMP)_.*|.*_PROXY|PYTHON.*", re.IGNORECASE)
_SECRET = re.compile(
    r"SECRET|TOKEN|KEY|PASS|PWD|CREDENTIAL|SAS|CONNECTION|AUTH|SIGNATURE|JSON|RUNTIME_ENV", re.IGNORECASE
)
_ADDRESS = re.compile(r".*_(PROXY|HOST|ADDRESS|ENDPOINT|URL|MEMBERS)", re.IGNORECASE)
_LOGIN = re.compile(
    r"((?:https?|socks\w*)://)?(.*)@", re.IGNORECASE | re.DOTALL
)  # the password may contain `@` and `/`
_USER = re.compile(r"((?:https?|socks\w*)://)\S*@|(\w+://)[^/\s]*@", re.IGNORECASE)
_HIDDEN = "***"
_SHORTEST_SECRET = 8  # a shorter value, such as "false", would be removed from other texts as well
_PACKAGES = (
    "millrace", "backports.zstd", "click", "fsspec", "lmdb", "numpy", "obstore", "prometheus-client", "pyarrow",
    "typing-extensions", "urllib3", "xxhash", "ray", "torch", "s3fs", "botocore", "adlfs", "gcsfs", "huggingface_hub",
    "opentelemetry-api", "pandas", "duckdb", "polars",
)  # fmt: skip


@click.group(cls=GroupedCommands)
def debug() -> None:
    """Collect diagnostics."""


@debug.command()
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write, readable by this user only. Default: millrace-debug-DATE-TIME.tar.gz in this directory.",
)
@node_option
@cache_dir_option
@json_option
def bundle(output: Path | None, node: str | None, cache_dir: tuple[str, ...], as_json: bool) -> None:
    """Write versions, checks, options, status and the nodes' events and metrics to a .tar.gz file for a bug report.

    It has no secret: tokens, keys and queries of URLs are removed. It does contain names of hosts, directories, prefixes,
    jobs and runs: look at it before you publish it. A part that fails contains its error.
    """
    if output == Path():
        raise click.UsageError("--output names no file")
    path = output or Path(time.strftime("millrace-debug-%Y%m%d-%H%M%S.tar.gz"))
    parts = {name: _gathered(gather) for name, gather in _parts(node, cache_dir).items()}
    hide = hidden(secrets_of(os.environ) | _tokens_here(cache_dir))
    files = {f"{name}.json": json.dumps(hide(content), indent=1) for name, content in parts.items()}
    try:
        _write(path, files)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}", next_step="choose another file with --output") from error
    if as_json:
        print_json({"path": str(path), "files": sorted(files)})
        return
    click.echo(f"{path}: {', '.join(sorted(files))}; look at it before you publish it")


def _parts(node: str | None, cache_dir: tuple[str, ...]) -> dict[str, Callable[[], Any]]:
    """The functions that gather the parts, by name."""
    from millrace.cli.config import options_here
    from millrace.cli.doctor import checks_despite_errors
    from millrace.cli.status import read_status

    return {
        "about": _about,
        "environment": lambda: environment_of(os.environ),
        "options": lambda: [asdict(each) for each in options_here(cache_dir)],
        "checks": lambda: [asdict(check) for check in checks_despite_errors(cache_dir)],
        "status": lambda: read_status(node, cache_dir),
        "nodes": lambda: _nodes(node, cache_dir),
    }


def _nodes(address: str | None, cache_dir: tuple[str, ...]) -> list[dict[str, Any]]:
    """The status of every member of the cluster with the figures of the status page, its last events, and its metrics."""
    from millrace.filesystem.cluster_access import metrics, statuses

    access = cluster_access(resolve({"cache_dir": list(cache_dir) or None}), address)
    if access is None:
        return []
    with access:
        lines = metrics(access)
        return [
            {**status, "metrics": lines.get(status["address"], [])}
            for status in statuses(access, query={"details": "1"})
        ]


def _tokens_here(cache_dir: tuple[str, ...]) -> set[str]:
    """The tokens of the nodes on this machine, which may be in no variable and no file of options."""
    from millrace.cluster.folder import live_nodes

    with contextlib.suppress(ConfigurationError):  # the part `checks` contains this error
        return {node.facts.token for node in live_nodes(resolve({"cache_dir": list(cache_dir) or None}))}
    return set()


def _gathered(gather: Callable[[], Any]) -> Any:
    try:
        return gather()
    except Exception as error:  # noqa: BLE001 - whatever fails is the reason for the report
        return {"error": f"{type(error).__name__}: {error}"}


def _about() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "millrace": __version__,
        "python": sys.version,
        "platform": platform.platform(),
        "libc": "-".join(platform.libc_ver()),
        "processors": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "packages": versions,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def environment_of(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that may matter. A value that may be a secret is hidden."""
    return {
        name: _HIDDEN if _SECRET.search(name) else _without_login(value) if _ADDRESS.fullmatch(name) else value
        for name, value in sorted(environ.items())
        if _RELEVANT.fullmatch(name)
    }


def _without_login(address: str) -> str:
    """An address without user and password. It may have no scheme: `user:password@host:3128`."""
    return _LOGIN.sub(rf"\1{_HIDDEN}@", address, count=1)


def secrets_of(environ: Mapping[str, str]) -> set[str]:
    """Values that must not be in the file: of variables with a name of a secret, logins in addresses, and the token."""
    found = {value.strip() for name, value in environ.items() if _SECRET.search(name) and not os.path.exists(value)}
    for name, value in environ.items():
        if _ADDRESS.fullmatch(name) and (login := _LOGIN.match(value)) is not None:
            found |= {login[2], login[2].partition(":")[2]}
    with contextlib.suppress(ConfigurationError):  # the part `options` contains this error
        found |= {str(value).strip() for name, value in load_file(environ).items() if name in SECRET_NAMES}
    return {each for each in found if len(each) >= _SHORTEST_SECRET}


def hidden(secrets: set[str]) -> Callable[[Any], Any]:
    """A function that removes secrets, users in URLs, and queries of web addresses from every text in a JSON value."""
    longest_first = sorted(secrets, key=len, reverse=True)

    def hide(value: Any) -> Any:
        if isinstance(value, Mapping):
            scheme = value.get("origin")
            if scheme in ("http", "https") and "prefix" in value:  # a web address without its scheme
                value = {**value, "prefix": hide(f"{scheme}://{value['prefix']}").partition("://")[2]}
            return {hide(str(name)): hide(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [hide(each) for each in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        text = str(value)
        for each in longest_first:
            text = text.replace(each, _HIDDEN)
        return without_queries(_USER.sub(rf"\1\2{_HIDDEN}@", text))

    return hide


def _write(path: Path, files: Mapping[str, str]) -> None:
    """Write the archive, readable by this user only. Raises `FileExistsError` for an existing file. No error leaves one."""
    import tarfile

    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, text in files.items():
                content = text.encode("utf-8", "backslashreplace")
                entry = tarfile.TarInfo(f"millrace-debug/{name}")
                entry.size, entry.mode, entry.mtime = len(content), 0o600, int(time.time())
                archive.addfile(entry, io.BytesIO(content))
    except BaseException:
        path.unlink(missing_ok=True)  # made here, and not complete
        raise
