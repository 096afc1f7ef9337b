"""Machines of AWS for `ray up`: spot where there is any, on demand where there is none.

Ray 2.60 gives a refused request for spot machines up and makes the same one again, for as long as there is demand: a failed
launch does not count against its node type, and so a second type without spot is never asked for. In a cluster file:

    provider:
      type: external
      module: millrace.cluster.aws.SpotFirstNodeProvider
      region: eu-central-1

All else is as with `type: aws`. The module is imported where `ray up` runs and on the head, and needs boto3 there.
"""

from __future__ import annotations

import logging
from typing import Any

from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
from ray.autoscaler.node_launch_exception import NodeLaunchException

_log = logging.getLogger(__name__)

NO_SPOT = frozenset(
    {
        "InsufficientInstanceCapacity",
        "MaxSpotInstanceCountExceeded",
        "SpotMaxPriceTooLow",
        "UnfulfillableCapacity",
        # The zone that was tried last has no such machines at all; one before it may have them, but not as spot.
        "Unsupported",
    }
)
"""The error codes of EC2 that may mean: not as spot, now. Others (no right to, no such image) are no better on demand."""


class SpotFirstNodeProvider(AWSNodeProvider):  # type: ignore[misc]
    """Ray's provider for AWS, but a node type with `MarketType: spot` gets on-demand machines when no zone has spot.

    Every launch tries spot first again. Raises what Ray's provider raises, for other errors and when neither is to be had.
    """

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> dict[str, Any]:
        try:
            return dict(super().create_node(node_config, tags, count))
        except NodeLaunchException as error:
            on_demand = without_spot(node_config)
            if on_demand is None or error.category not in NO_SPOT:
                raise
            _log.warning("no spot %s (%s): on demand instead", node_config.get("InstanceType"), error.category)
        return dict(super().create_node(on_demand, tags, count))


def without_spot(node_config: dict[str, Any]) -> dict[str, Any] | None:
    """The same machine on demand; None if it is no spot machine. Pure."""
    if (node_config.get("InstanceMarketOptions") or {}).get("MarketType") != "spot":
        return None
    return {key: value for key, value in node_config.items() if key != "InstanceMarketOptions"}
