"""A cloud for tests: an API that makes and ends machines with an sshd, for `provider.MachineProvider`.

with Machines(tmp_path, names=["laptop"], environment=...) as machines, Cloud(machines) as cloud:
    ...  # `ray up` on the laptop, with `cloud.url`, `cloud.key` and so on in its cluster file
"""

from __future__ import annotations

import json
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tests.support.machines.namespaces import Command, Machine, Machines, unpacked_command

_SSHD = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PidFile none
PrintMotd no
MaxStartups 100
MaxSessions 100
SetEnv PATH={path}
"""
_PROGRAMS = ("sshd", "ssh", "ssh-keygen", "rsync")
"""Debian's packages openssh-server, openssh-client, rsync."""
_PATIENCE_SECONDS = 180.0


class Cloud:
    """Makes machines on demand among `machines`. All of these have `ssh` and `rsync`. A context manager.

    `environment` is what a login has there, next to the machines' own.
    """

    def __init__(self, machines: Machines, environment: Mapping[str, str] | None = None) -> None:
        self.machines = machines
        self.folder = machines.directory / "cloud"
        self.key = self.folder / "user_key"
        """The private key that opens every machine, as root."""
        self.made: list[Machine] = []
        """All that there ever were, also those that are gone."""
        self._environment = dict(environment or {})
        self._lock = threading.Lock()
        self._tags: dict[str, dict[str, str]] = {}
        self._found: dict[str, Machine] = {}
        self._daemons: dict[str, Command] = {}

    @property
    def url(self) -> str:
        """Of the API, from everywhere."""
        return f"http://{self.machines.gateway}:{self._server.server_address[1]}"

    def __enter__(self) -> Cloud:
        self._prepare()
        self._server = ThreadingHTTPServer((self.machines.gateway, 0), _handler(self))
        self._server.daemon_threads = False  # so that closing waits for machines that are starting
        self._thread = threading.Thread(target=self._server.serve_forever, name="cloud")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # --- what the API does ----------------------------------------------------------------------------

    def list(self) -> dict[str, Any]:
        """The machines that run, by name."""
        with self._lock:
            return {
                name: {"address": machine.address, "tags": self._tags[name]}
                for name, machine in self._found.items()
                if machine.is_running
            }

    def create(self, tags: Mapping[str, str], count: int) -> Sequence[str]:
        """Make machines; they take logins when this returns."""
        new = []
        for _ in range(count):
            with self._lock:
                machine = self.machines.add()
                machine.environment |= self._environment
                self.made.append(machine)
            (machine.directory / "root" / ".bashrc").write_text(
                "".join(f"export {name}={shlex.quote(value)}\n" for name, value in machine.variables().items())
            )
            (machine.directory / "root" / ".hushlogin").touch()
            (machine.directory / "sshd_config").write_text(
                _SSHD.format(folder=self.folder, path=machine.variables()["PATH"])
            )
            machine.run("mkdir", "-p", "/run/sshd")
            sshd = _program("sshd") or []
            daemon = machine.start(*sshd, "-D", "-e", "-f", machine.directory / "sshd_config")
            _wait_for_port(machine.address, 22)
            with self._lock:
                self._daemons[machine.name] = daemon
                self._found[machine.name], self._tags[machine.name] = machine, dict(tags)
            new.append(machine.name)
        return new

    def tag(self, name: str, tags: Mapping[str, str]) -> None:
        """Change some tags of a machine."""
        with self._lock:
            self._tags[name] |= tags

    def delete(self, name: str) -> None:
        """End a machine, if it is there."""
        with self._lock:
            machine = self._found.pop(name, None)
            if machine is not None:
                self._daemons.pop(name)
                self.machines.remove(machine)

    # --- programs and keys ----------------------------------------------------------------------------

    def _prepare(self) -> None:
        self.folder.mkdir()
        programs = self.folder / "bin"
        programs.mkdir()
        for name in _PROGRAMS:
            command = _program(name)
            if not command:
                pytest.skip("needs sshd, ssh and rsync")
            (programs / name).write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
            (programs / name).chmod(0o755)
        self.machines.programs.append(str(programs))
        for name in ("host_key", "user_key"):
            make = [
                str(programs / "ssh-keygen"),
                "-q",
                "-t",
                "ed25519",
                "-N",
                "",
                "-C",
                "tests",
                "-f",
                str(self.folder / name),
            ]
            subprocess.run(make, check=True, stdin=subprocess.DEVNULL)


def _program(name: str) -> list[str] | None:
    found = shutil.which(name, path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    return [found] if found else unpacked_command(name)


def _wait_for_port(address: str, port: int) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            socket.create_connection((address, port), timeout=5.0).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f"nothing listens at {address}:{port}"
            time.sleep(0.05)


def _handler(cloud: Cloud) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            name = self.path.removeprefix("/machines").removeprefix("/")
            result: Any = None
            if self.command == "GET":
                result = cloud.list()
            elif self.command == "POST":
                result = cloud.create(body["tags"], body["count"])
            elif self.command == "PATCH":
                cloud.tag(name, body)
            else:
                cloud.delete(name)
            text = json.dumps(result).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PATCH = do_DELETE = answer  # noqa: N815 - the names that http.server calls

        def log_message(self, *_: object) -> None:
            pass

    return Handler
