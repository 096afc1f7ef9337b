"""How much a node asks of an origin, and how often it asks again: budgets, a gate, and retries, around any origin."""

from millrace.origin.limits.limited import LimitedOrigin, limited
from millrace.origin.limits.patience import Patience
from millrace.origin.limits.wanted import Limits

__all__ = ["LimitedOrigin", "Limits", "Patience", "limited"]
