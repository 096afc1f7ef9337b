"""Web servers as origins, and what every origin that speaks plain HTTP shares: addresses, answers, connections."""

from millrace.origin.web.web_origin import WebOrigin

__all__ = ["WebOrigin"]
