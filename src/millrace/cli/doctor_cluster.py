"""What `millrace doctor` says of the cluster: the token, this machine's node, the membership's service, the other nodes."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from millrace.cli.checks import Check
from millrace.config import CacheOptions, parse_etcd
from millrace.errors import MillraceError

if TYPE_CHECKING:
    from millrace.peers.folder import LiveNode

_CONNECT_SECONDS = 3.0


def cluster_checks(options: CacheOptions) -> Iterator[Check]:
    """Nothing where no cluster is named and no node runs."""
    from millrace.peers.folder import live_nodes

    nodes = live_nodes(options)
    if options.members == "ray":
        yield Check(name="cluster", state="note", detail="members='ray' is looked for inside a Ray job only")
        return
    if not nodes and options.members in ("none", "auto"):
        return
    yield _token(options, nodes)
    yield _node(options, nodes)
    reached = True
    if options.members.startswith("etcd://"):
        check = _etcd(parse_etcd(options.members)[0])
        reached = check.state != "failed"
        yield check
    if reached and (nodes or options.cluster_token is not None):
        yield _peers(options)


def _token(options: CacheOptions, nodes: list[LiveNode]) -> Check:
    if options.cluster_token is not None:
        return Check(name="cluster token", state="ok", detail="given")
    if nodes:
        return Check(name="cluster token", state="ok", detail="that of the node on this machine")
    return Check(
        name="cluster token",
        state="failed",
        detail="none: set MILLRACE_CLUSTER_TOKEN, or 'cluster_token' in millrace.toml, to that of the cluster",
    )


def _node(options: CacheOptions, nodes: list[LiveNode]) -> Check:
    if not nodes:
        return Check(
            name="node",
            state="note",
            detail="none runs on this machine, which takes part as a client: 'millrace node run' starts one",
        )
    others = sorted({node.facts.members for node in nodes} - {options.members})
    text = ", ".join(f"{node.facts.address} ({node.name})" for node in nodes)
    if others and options.members not in ("none", "auto"):
        return Check(
            name="node", state="note", detail=f"{text}; of another cluster than {options.members}: {others[0]}"
        )
    return Check(name="node", state="ok", detail=text)


def _etcd(addresses: tuple[tuple[str, int], ...]) -> Check:
    reached, failures = [], []
    for host, port in addresses:
        try:
            socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
            reached.append(f"{host}:{port}")
        except OSError as error:
            failures.append(f"{host}:{port} cannot be reached: {error.strerror or error}")
    if not reached:
        return Check(name="etcd", state="failed", detail=f"{'; '.join(failures)}: start it, or correct 'members'")
    return Check(name="etcd", state="note" if failures else "ok", detail="; ".join([*reached, *failures]))


def _peers(options: CacheOptions) -> Check:
    from millrace.filesystem.cluster_access import access_from_here, statuses

    try:
        access = access_from_here(options)
        if access is None:
            return Check(name="nodes", state="note", detail="no cluster")
        with access:
            told = statuses(access)
    except MillraceError as error:
        return Check(name="nodes", state="failed", detail=str(error))
    answering = [node["address"] for node in told if node["answers"]]
    silent = [node["error"] for node in told if not node["answers"]]
    if not told:
        return Check(name="nodes", state="note", detail="the cluster has none: 'millrace node run' starts one")
    if not answering:
        return Check(name="nodes", state="failed", detail=f"none answers: {silent[0]}")
    wrong = [*silent, *_disagreements([node for node in told if node["answers"]])]
    detail = f"{', '.join(answering)} answer" + "".join(f"; {text}" for text in wrong)
    return Check(name="nodes", state="note" if wrong else "ok", detail=detail)


def _disagreements(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """What has to be the same on all nodes, and is not."""
    replicas = {node["address"]: node["replicas"] for node in nodes if "replicas" in node}
    if len(set(replicas.values())) < 2:
        return []
    listed = ", ".join(f"{number} on {address}" for address, number in replicas.items())
    return [f"'replicas' is not the same everywhere ({listed}): start all nodes with one number"]
