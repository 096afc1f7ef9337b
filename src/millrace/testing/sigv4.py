"""Signs the few requests that Millrace's test server needs and no client library of the demo can make (a new bucket)."""

from __future__ import annotations

import hashlib
import hmac
from datetime import UTC, datetime


def signed_headers(
    method: str,
    host: str,
    path: str,
    *,
    key: str,
    secret: str,
    region: str = "us-east-1",
    query: str = "",
    body_hash: str = hashlib.sha256(b"").hexdigest(),
) -> dict[str, str]:
    """Return the headers (AWS Signature Version 4) of a request. `path` is already quoted, `query` quoted and sorted.

    `body_hash` is that of no body, or `UNSIGNED-PAYLOAD`.
    """
    now = datetime.now(UTC)
    stamp, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
    headers = {"host": host, "x-amz-content-sha256": body_hash, "x-amz-date": stamp}
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    request = "\n".join((method, path, query, lines, names, body_hash))
    scope = f"{day}/{region}/s3/aws4_request"
    to_sign = "\n".join(("AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(request.encode()).hexdigest()))
    signing_key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        signing_key = hmac.digest(signing_key, part.encode(), "sha256")
    signature = hmac.digest(signing_key, to_sign.encode(), "sha256").hex()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={key}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return headers
