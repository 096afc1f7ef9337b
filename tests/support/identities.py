"""Stand-ins for the services that give machines and pods their identity in a cloud, and a gate for these identities.

The clouds' own services are not available here. Each stand-in responds as documented, requires what the real one
requires (the token of IMDSv2, the pod's token from its file, ...), records every request, and refuses on demand.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import math
import re
import secrets
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, parse_qsl, quote

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tests.support.azurite import AzuriteServer
from tests.support.http_service import HttpService, Reply, Request

from millrace.testing.s3 import S3Server
from millrace.testing.sigv4 import signed_headers

_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/([^,]+), ?SignedHeaders=([^,]+), ?Signature=([0-9a-f]+)"
)
_PASSED_ON = ("if-match", "if-none-match", "range")
_PASSED_BACK = ("accept-ranges", "content-range", "content-type", "etag", "last-modified")


@dataclass(frozen=True, slots=True)
class Session:
    """Keys for some time, as AWS gives them to a role."""

    key: str
    secret: str
    token: str
    ends: datetime

    @property
    def end(self) -> str:
        """As AWS writes it."""
        return self.ends.strftime("%Y-%m-%dT%H:%M:%SZ")

    @property
    def content(self) -> dict[str, str]:
        """As the metadata services answer it."""
        return {
            "Code": "Success",
            "Type": "AWS-HMAC",
            "AccessKeyId": self.key,
            "SecretAccessKey": self.secret,
            "Token": self.token,
            "Expiration": self.end,
        }


class SessionGate:
    """A gate in front of a real S3 server without sessions: it admits requests that a current session has signed.

    `seconds` is how long the next sessions last, at least. A context manager; thread-safe.
    """

    def __init__(self, server: S3Server, *, seconds: float = 3600.0) -> None:
        self.seconds = seconds
        self.sessions: list[Session] = []
        self.refused = 0
        self._server = server
        self._service = HttpService(self._answer)
        self.url = self._service.url

    def open(self) -> Session:
        """A new session."""
        ends = datetime.fromtimestamp(math.ceil(time.time() + self.seconds), UTC)  # AWS returns whole seconds
        session = Session("ASIA" + secrets.token_hex(8).upper(), secrets.token_hex(20), secrets.token_hex(40), ends)
        self.sessions.append(session)
        return session

    def revoke_all(self) -> None:
        """From now on every session is refused that was opened until now."""
        past = datetime.now(UTC)
        self.sessions[:] = [Session(each.key, each.secret, each.token, past) for each in self.sessions]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._service.close()

    def _answer(self, request: Request) -> Reply:
        problem = self._problem(request)
        if problem is not None:
            self.refused += 1
            return Reply(
                status=400 if problem == "ExpiredToken" else 403, body=f"<Error><Code>{problem}</Code></Error>".encode()
            )
        path, _, query = request.target.partition("?")
        headers = signed_headers(
            request.method,
            f"127.0.0.1:{self._server.port}",
            path,
            key=self._server.key,
            secret=self._server.secret,
            query=_in_order(query),
            body_hash="UNSIGNED-PAYLOAD",
        )
        headers |= {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=300)
        try:
            target = f"{path}?{_in_order(query)}" if query else path
            connection.request(request.method, target, body=request.body, headers=headers)
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        kept = {name: value for name, value in answer.getheaders() if name.lower() in _PASSED_BACK}
        if request.method == "HEAD":
            kept["Content-Length"] = answer.headers["content-length"]
        return Reply(status=answer.status, headers=kept, body=body)

    def _problem(self, request: Request) -> str | None:
        """The error code of S3 for a request that is not let in."""
        match = _AUTHORIZATION.fullmatch(request.headers.get("authorization", ""))
        if match is None:
            return "AccessDenied"
        session = next((each for each in self.sessions if each.key == match[1]), None)
        if session is None or request.headers.get("x-amz-security-token") != session.token:
            return "InvalidAccessKeyId"
        if match[4] != _signature(request, session.secret, scope=match[2], names=match[3]):
            return "SignatureDoesNotMatch"
        return "ExpiredToken" if session.ends <= datetime.now(UTC) else None


def _in_order(query: str) -> str:
    pairs = sorted(parse_qsl(query, keep_blank_values=True))
    return "&".join(f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in pairs)


def _signature(request: Request, secret: str, *, scope: str, names: str) -> str:
    """AWS Signature Version 4 of a request that came."""
    path, _, query = request.target.partition("?")
    lines = "".join(f"{name}:{request.headers[name].strip()}\n" for name in names.split(";"))
    body_hash = request.headers["x-amz-content-sha256"]
    canonical = "\n".join((request.method, path, _in_order(query), lines, names, body_hash))
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    to_sign = "\n".join(("AWS4-HMAC-SHA256", request.headers["x-amz-date"], scope, digest))
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, to_sign.encode(), "sha256").hex()


class Stand:
    """The common part of the stand-ins. `refusal` replaces their answers, unless it is None."""

    def __init__(self, *, tls: ssl.SSLContext | None = None) -> None:
        self.refusal: Reply | None = None
        self.service = HttpService(self._reply, tls=tls)
        self.url = self.service.url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.service.close()

    def _reply(self, request: Request) -> Reply:
        return self.answer(request) if self.refusal is None else self.refusal

    def answer(self, request: Request) -> Reply:
        raise NotImplementedError


def _json(content: Mapping[str, object]) -> Reply:
    return Reply(headers={"Content-Type": "application/json"}, body=json.dumps(content).encode())


class InstanceMetadata(Stand):
    """EC2's, of version 2 alone: a token by PUT, without which nothing is answered. The machine has the role `reader`."""

    def __init__(self, gate: SessionGate) -> None:
        self._gate, self._tokens, self.given = gate, set[str](), 0
        super().__init__()

    def answer(self, request: Request) -> Reply:
        if request.method == "PUT" and request.path == "/latest/api/token":
            if not request.headers.get("x-aws-ec2-metadata-token-ttl-seconds", "").isdigit():
                return Reply(status=400)
            token = secrets.token_hex(28)
            self._tokens.add(token)
            return Reply(body=token.encode())
        if request.headers.get("x-aws-ec2-metadata-token") not in self._tokens:
            return Reply(status=401)
        if request.path == "/latest/meta-data/iam/security-credentials/":
            return Reply(body=b"reader")
        if request.path == "/latest/meta-data/iam/security-credentials/reader":
            self.given += 1
            return _json(self._gate.open().content)
        return Reply(status=404)


class ContainerCredentials(Stand):
    """The credentials service of a pod of EKS or a task of ECS. With `token`, it requires that token."""

    def __init__(self, gate: SessionGate, token: str | None = None) -> None:
        self._gate, self.token, self.given = gate, token, 0
        super().__init__()

    def answer(self, request: Request) -> Reply:
        if request.path != "/v1/credentials":
            return Reply(status=404)
        if self.token is not None and request.headers.get("authorization") != self.token:
            return Reply(status=401, body=b'{"message": "invalid token"}')
        self.given += 1
        return _json(self._gate.open().content)


class TokenService(Stand):
    """AWS's STS as far as a web identity goes; over TLS, without which obstore sends it no token."""

    def __init__(self, gate: SessionGate, token: str, *, tls: ssl.SSLContext) -> None:
        self._gate, self.token, self.given = gate, token, 0
        super().__init__(tls=tls)

    def answer(self, request: Request) -> Reply:
        asked = {**request.query, **parse_qs(request.body.decode())}
        if asked.get("Action") != ["AssumeRoleWithWebIdentity"] or not asked.get("RoleArn", [""])[0].endswith(
            "/reader"
        ):
            return self.no(400, "ValidationError")
        if asked.get("WebIdentityToken") != [self.token]:
            return self.no(400, "InvalidIdentityToken")
        self.given += 1
        session = self._gate.open()
        body = (
            '<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
            "<AssumeRoleWithWebIdentityResult><Credentials>"
            f"<AccessKeyId>{session.key}</AccessKeyId><SecretAccessKey>{session.secret}</SecretAccessKey>"
            f"<SessionToken>{session.token}</SessionToken><Expiration>{session.end}</Expiration>"
            "</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
        )
        return Reply(headers={"Content-Type": "text/xml"}, body=body.encode())

    @staticmethod
    def no(status: int, code: str, message: str = "no") -> Reply:
        """An error of STS."""
        body = f"<ErrorResponse><Error><Code>{code}</Code><Message>{message}</Message></Error></ErrorResponse>"
        return Reply(status=status, headers={"Content-Type": "text/xml"}, body=body.encode())


class ManagedIdentity(Stand):
    """The token service of a machine or an app of Azure. `secret` is the header of an app, None on machines."""

    def __init__(self, server: AzuriteServer, secret: str | None = None) -> None:
        self._server, self.secret, self.given, self.seconds = server, secret, 0, 3600.0
        self.tokens: list[str] = []
        super().__init__()

    def answer(self, request: Request) -> Reply:
        header = ("metadata", "true") if self.secret is None else ("x-identity-header", self.secret)
        if request.headers.get(header[0], "").lower() != header[1].lower():
            return Reply(status=400, body=b'{"error": "invalid_request"}')
        if not request.query.get("resource", [""])[0].startswith("https://storage.azure.com"):
            return Reply(status=400, body=b'{"error": "invalid_resource"}')
        self.given += 1
        self.tokens.append(self._server.token(seconds=self.seconds))
        ends = str(int(time.time() + self.seconds))
        return _json({"access_token": self.tokens[-1], "expires_on": ends, "resource": "r", "token_type": "Bearer"})


class FederatedTokens(Stand):
    """Entra ID as far as a workload's identity goes: gives tokens for the one in the pod's file, over TLS."""

    def __init__(self, server: AzuriteServer, token: str, *, tls: ssl.SSLContext) -> None:
        self._server, self.token, self.given, self.seconds = server, token, 0, 3600.0
        self.tokens: list[str] = []
        super().__init__(tls=tls)

    def answer(self, request: Request) -> Reply:
        asked = parse_qs(request.body.decode())
        if request.path != "/the-tenant/oauth2/v2.0/token" or asked.get("client_id") != ["the-client"]:
            return Reply(status=404)
        if asked.get("client_assertion") != [self.token]:
            return Reply(status=401, body=b'{"error": "invalid_client"}')
        self.given += 1
        self.tokens.append(self._server.token(seconds=self.seconds))
        return _json({"access_token": self.tokens[-1], "expires_in": int(self.seconds), "token_type": "Bearer"})


def certificate(directory: Path) -> tuple[Path, Path]:
    """The files of a certificate for 127.0.0.1 that vouches for itself, and of its key."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(private, hashes.SHA256())
    )
    file, key = directory / "cert.pem", directory / "key.pem"
    file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return file, key


def tls_context(files: tuple[Path, Path]) -> ssl.SSLContext:
    """That of a server with this certificate and key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    return context
