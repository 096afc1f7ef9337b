"""AWS machines for `ray up`: spot if available, otherwise on demand.

Ray 2.60 repeats a refused request for spot machines while there is demand. A failed launch does not count against its node
type, so a second node type without spot is never used. In a cluster file:

    provider:
      type: external
      module: millrace.ray.aws.SpotFirstNodeProvider
      region: eu-central-1

Everything else is as with `type: aws`. The machine that runs `ray up` and the head import this module, and need boto3.
"""

from __future__ import annotations

import logging
from typing import Any

from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
from ray.autoscaler.node_launch_exception import NodeLaunchException

_log = logging.getLogger("millrace.ray")

NO_SPOT = frozenset(
    {
        "InsufficientInstanceCapacity",
        "MaxSpotInstanceCountExceeded",
        "SpotMaxPriceTooLow",
        "UnfulfillableCapacity",
        # The last zone has no such machines at all; an earlier one may have them, but not as spot.
        "Unsupported",
    }
)
"""EC2 error codes that can mean: not available as spot now. Other errors also occur on demand."""


class SpotFirstNodeProvider(AWSNodeProvider):  # type: ignore[misc]
    """Ray's provider for AWS, except that `MarketType: spot` falls back to on-demand machines if no zone has spot.

    Every launch tries spot first. Raises the errors of Ray's provider, also if neither is available.
    """

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> dict[str, Any]:
        try:
            return dict(super().create_node(node_config, tags, count))
        except NodeLaunchException as error:
            on_demand = without_spot(node_config)
            if on_demand is None or error.category not in NO_SPOT:
                raise
            _log.warning("no spot %s (%s): using on demand", node_config.get("InstanceType"), error.category)
        return dict(super().create_node(on_demand, tags, count))


def without_spot(node_config: dict[str, Any]) -> dict[str, Any] | None:
    """The same machine on demand; None if it is not a spot machine. Pure."""
    if (node_config.get("InstanceMarketOptions") or {}).get("MarketType") != "spot":
        return None
    return {key: value for key, value in node_config.items() if key != "InstanceMarketOptions"}
