"""Web servers as origins, and the HTTP client that the hub uses, too.

Key terms:
- response: one HTTP response, whose body is read inside of `Connections.request`.
- whole copy: a temporary file with an object of a server without ranges.
- route: the target of a redirect, which is reused for other ranges of the same object.

Start reading in `web_origin.py`, then `connections.py` and `responses.py`.
"""

from millrace.origin.web.web_origin import WebOrigin

__all__ = ["WebOrigin"]
