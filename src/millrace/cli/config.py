"""`millrace config show`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click

from millrace.cli.commands import GroupedCommands
from millrace.cli.common import cache_dir_option, json_option, print_json, table
from millrace.config import BY_RAY, LOCAL_FOLDER, EffectiveOption, effective_options, find_file, resolve
from millrace.errors import ConfigurationError


@click.group(cls=GroupedCommands)
def config() -> None:
    """Show the configuration of this machine."""


@config.command()
@cache_dir_option
@json_option
def show(cache_dir: tuple[str, ...], as_json: bool) -> None:
    """Show each option with its value and its source: a variable, a file, a node, 'resize', or the default.

    These are the values that a file system without arguments uses here. A secret is shown as 'set'.
    """
    options, variables = options_here(cache_dir), _variables(os.environ)
    if as_json:
        print_json({"options": [asdict(each) for each in options], "variables": [asdict(each) for each in variables]})
        return
    found = ((each.name, value_text(each.value), each.source) for each in (*options, *variables))
    click.echo("\n".join(table(("option", "value", "source"), list(found))))


def options_here(cache_dir: Sequence[str]) -> list[EffectiveOption]:
    """The options that a file system without arguments uses here: also those of a node that runs here, and of `resize`.

    Raises `ConfigurationError` for a value that cannot be used.
    """
    from millrace.cache.disk import RulesFile
    from millrace.cache.node import store_directory
    from millrace.cluster.attach import node_holding
    from millrace.cluster.folder import node_of_cluster

    given = {"cache_dir": list(cache_dir) or None}
    found, options = effective_options(given), resolve(given)
    names = [each.name for each in found]
    replaced: dict[str, tuple[Any, str]] = {}
    own = None if options.members in ("none", *BY_RAY) else node_of_cluster(options)
    node = own or node_holding(options)
    if node is not None:
        facts, source = node.facts, f"node {node.facts.address}"
        replaced = {"capacity": (facts.capacity.text(), source), "min_free": (facts.min_free.text(), source)}
        if own is not None:
            tls = facts.to_json()["tls"]
            replaced |= {"cluster_token": ("set", source), "tls": (tls, source), "replicas": (facts.replicas, source)}
    folder = LOCAL_FOLDER if node is None else node.name
    resized = [RulesFile(store_directory(each, folder)).current().capacity for each in options.cache_dirs]
    if any(resized):
        unchanged = replaced.get("capacity", (found[names.index("capacity")].value, ""))[0]
        sizes = [unchanged if each is None else each.text() for each in resized]
        replaced["capacity"] = sizes[0] if len(set(sizes)) == 1 else sizes, "resize"
    for name, (value, source) in replaced.items():
        found[names.index(name)] = EffectiveOption(name=name, value=value, source=source)
    return found


def _variables(environ: Mapping[str, str]) -> list[EffectiveOption]:
    """The variables that are not options of a file system. Raises `ConfigurationError` for an unusable value."""
    from millrace.cache.attribution import job_of
    from millrace.node.measures import Prices

    prices = Prices.of(environ)
    try:
        public = click.BOOL.convert(environ.get("MILLRACE_PUBLIC_METRICS", "").strip() or False, None, None)
    except click.BadParameter as error:
        raise ConfigurationError(
            "MILLRACE_PUBLIC_METRICS is neither true nor false", next_step="write true or false"
        ) from error
    values = {
        "MILLRACE_CONFIG": find_file(environ)[0],
        "MILLRACE_DEBUG": environ.get("MILLRACE_DEBUG") == "1",
        "MILLRACE_JOB": job_of(environ) or None,
        "MILLRACE_PRICE_PER_1000_REQUESTS": prices.per_1000_requests,
        "MILLRACE_PRICE_PER_GB": prices.per_gb,
        "MILLRACE_PUBLIC_METRICS": public,
    }
    sources = {name: name if environ.get(name, "").strip() else "default" for name in values}
    if sources["MILLRACE_JOB"] == "default" and values["MILLRACE_JOB"]:
        sources["MILLRACE_JOB"] = "RAY_JOB_ID"
    return [EffectiveOption(name=name, value=value, source=sources[name]) for name, value in values.items()]


def value_text(value: Any) -> str:
    """A value for people: `-` for none, paths separated by commas."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
