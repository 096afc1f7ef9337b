"""Machines that are namespaces of this one: each has processes, an address, a name, /tmp, /root and /dev/shm of its own.

    with Machines(tmp_path, 3) as machines:
        head, *workers = machines
        head.run("ray", "start", "--head", ...)
        workers[0].kill()           # kill -9 of all that runs there

They are on one network, on which this process has the address `machines.gateway`; nothing else can be reached from there.
Everything that makes up a machine hangs on one process, which dies with this one by whatever means: the kernel then ends
all other processes of the machine, and takes away its network, its mounts and its memory. Only its folders
below the given directory stay.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
from tests.support.machines.command import Command

import millrace
from millrace.testing.process import ChildProcess, log_tail

ROOT = Path(__file__).parents[3]
"""The clone."""
_INIT = Path(__file__).with_name("init.py")
_UNPACKED = ROOT / ".deps" / "debian"
_NETWORKS = "198.18"
"""Addresses for tests of networks (RFC 2544): no real network has them."""
_SHARED_MEMORY_BYTES = 1 << 30
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PATIENCE_SECONDS = 180.0


def unpacked_command(name: str) -> list[str] | None:
    """How to call a program that `tools/debian-packages.sh` unpacked in the clone; None when it did not."""
    libraries = ":".join(map(str, _UNPACKED.glob("usr/lib/*-linux-gnu")))
    for folder in ("usr/sbin", "sbin", "usr/bin", "bin"):
        if (_UNPACKED / folder / name).exists():
            return ["/usr/bin/env", f"LD_LIBRARY_PATH={libraries}", str(_UNPACKED / folder / name)]
    return None


def ip_command() -> list[str]:
    """How to call `ip`: that of the machine, or the one in the clone."""
    if found := shutil.which("ip"):
        return [found]
    if command := unpacked_command("ip"):
        return command
    raise FileNotFoundError("no ip: install Debian's package iproute2")


def _program(name: str) -> str:
    found = shutil.which(name, path=_PATH)
    assert found, f"no {name}: install Debian's package util-linux"
    return found


class Machine:
    """One of `Machines`, which makes them."""

    def __init__(
        self, name: str, address: str, directory: Path, environment: Mapping[str, str], programs: Sequence[str]
    ) -> None:
        self.name = name
        self.address = address
        self.directory = directory
        """The directory of its folders: `tmp`, `root`, `logs`."""
        self.environment = dict(environment)
        """Variables of every command, next to PATH and the like."""
        self._programs = programs
        self._commands: list[Command] = []
        self._log = directory / "init.log"
        self._process = ChildProcess(
            [
                *(
                    _program("unshare"),
                    "--mount",
                    "--uts",
                    "--ipc",
                    "--net",
                    "--pid",
                    "--fork",
                    "--kill-child",
                    "--mount-proc",
                ),
                *(sys.executable, "-I", "-S", str(_INIT), json.dumps(self._prepare())),
            ],
            log=self._log,
            pipes=True,
        )
        assert self._process.stdout.readline() == b"ready\n", log_tail(self._log)
        (self.pid,) = (child.pid for child in psutil.Process(self._process.pid).children())
        self._namespace = os.readlink(f"/proc/{self.pid}/ns/pid")

    def _prepare(self) -> dict[str, object]:
        for name in ("tmp", "root", "logs"):
            (self.directory / name).mkdir(parents=True, mode=0o1777 if name == "tmp" else 0o700)
        (self.directory / "tmp").chmod(0o1777)
        passwd = Path("/etc/passwd").read_text()
        if "\nsshd:" not in passwd:
            passwd += "sshd:x:10022:65534::/run/sshd:/usr/sbin/nologin\n"
        files = {
            "hosts": f"127.0.0.1 localhost\n{self.address} {self.name}\n",
            "hostname": f"{self.name}\n",
            "resolv.conf": "",  # names that are not in `hosts` are not found, at once
            "passwd": passwd,
        }
        for name, text in files.items():
            (self.directory / name).write_text(text)
        python = [Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parents[1]]
        keep = {ROOT, Path(millrace.__file__).parents[1], *python, self.directory.parent}
        return {
            "folders": {"/tmp": str(self.directory / "tmp"), self.home: str(self.directory / "root")},
            "files": {f"/etc/{name}": str(self.directory / name) for name in files},
            "memory": {"/dev/shm": _SHARED_MEMORY_BYTES, "/run": 64 << 20},
            "keep": sorted({str(path) for each in keep for path in (each, each.resolve())}),
            "hostname": self.name,
        }

    @property
    def gateway(self) -> str:
        """The address of the test's process, as the machine sees it."""
        return _gateway(self.address)

    @property
    def home(self) -> str:
        """Root's home on the machine; its files are in `directory / "root"`."""
        return pwd.getpwuid(0).pw_dir

    @property
    def is_running(self) -> bool:
        return self._process.exit_status() is None

    # --- commands -------------------------------------------------------------------------------------

    def run(
        self,
        *command: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        seconds: float = _PATIENCE_SECONDS,
        check: bool = True,
    ) -> str:
        """Run a program there until it ends; returns its output, with stderr. With `check` it must succeed."""
        given = self._command(command, env, cwd)
        done = subprocess.run(
            given, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds
        )
        output = done.stdout.decode("utf-8", "replace")
        assert not check or done.returncode == 0, f"{' '.join(map(str, command))}: {done.returncode}: {output}"
        return output

    def start(
        self,
        *command: str | Path,
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> Command:
        """Start a program there. Its output is written to `log`, or else to a file in `directory / "logs"`."""
        log = log or self.directory / "logs" / f"{Path(command[0]).name}.log"
        started = Command(ChildProcess(self._command(command, env, cwd), log=log))
        self._commands.append(started)  # else it would end with the last variable that holds it
        return started

    def _command(
        self, command: Sequence[str | Path], env: Mapping[str, str] | None, cwd: str | Path | None
    ) -> list[str]:
        variables = {**self.variables(), **(env or {})}
        return [
            *(_program("nsenter"), "--target", str(self.pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--"),
            *("env", "-i", "-C", str(cwd or self.home), *(f"{name}={value}" for name, value in variables.items())),
            *("setpriv", "--pdeathsig", "KILL", *map(str, command)),
        ]

    def variables(self) -> dict[str, str]:
        """The environment of every command."""
        path = ":".join([*self._programs, f"{sys.prefix}/bin", _PATH])
        return {"PATH": path, "HOME": self.home, "USER": "root", "LANG": "C.UTF-8", **self.environment}

    @property
    def network_prefix(self) -> list[str]:
        """The prefix of a command that has only the network of this machine, and all else of the test's."""
        return [_program("nsenter"), "--target", str(self.pid), "--net", "--"]

    def processes(self) -> dict[int, list[str]]:
        """The command lines of what runs there, by process as this machine names it, the first process left out."""
        found = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != self.pid:
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{entry}/ns/pid") == self._namespace:
                        line = Path(f"/proc/{entry}/cmdline").read_bytes().decode("utf-8", "replace")
                        if line:  # else it has ended, and its parent was not yet notified
                            found[int(entry)] = line.rstrip("\0").split("\0")
        return found

    # --- faults ---------------------------------------------------------------------------------------

    def kill(self) -> None:
        """`kill -9` of all processes; the address no longer responds. After `cut`: a power cut without notification."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # the kernel ends the others before this one is gone
        self._process.kill()
        for command in self._commands:
            command.process.kill()

    def suspend(self) -> None:
        """Stop every process."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let all continue."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def cut(self) -> None:
        """Take its link down: nothing that is sent arrives."""
        _ip(self.pid, "link set eth0 down")

    def mend(self) -> None:
        """Bring the link up again."""
        _ip(self.pid, "link set eth0 up", *_routes(self.address))


class Machines:
    """`count` machines, named `names[0]`, ... or `machine-1`, ..., and more by `add`. `environment` is that of all commands.

    All of them can read `directory` under the same path. A context manager.
    """

    def __init__(
        self,
        directory: Path,
        count: int = 0,
        *,
        names: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.environment = dict(environment or {})
        self._first = list(names) or [f"machine-{number + 1}" for number in range(count)]
        self.programs: list[str] = []
        """Folders of programs that all machines find first, those that are there as well."""
        self._all: list[Machine] = []
        self._made = 0
        self._switch: ChildProcess | None = None
        self._network = ""

    def __iter__(self) -> Iterator[Machine]:
        return iter(list(self._all))

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, number: int) -> Machine:
        return self._all[number]

    @property
    def gateway(self) -> str:
        """The address of this process, as the machines see it."""
        return f"{self._network}.1"

    def __enter__(self) -> Machines:
        try:
            self._open()
            for name in self._first:
                self.add(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, name: str | None = None) -> Machine:
        """One more machine. Safe from one thread at a time."""
        self._made += 1
        assert self._made < 250, "a network has 250 addresses"
        number = self._made + 1
        name = name or f"machine-{self._made}"
        machine = Machine(name, f"{self._network}.{number}", self.directory / name, self.environment, self.programs)
        self._all.append(machine)
        assert self._switch is not None
        _ip(
            self._switch.pid,
            f"link add port{number} type veth peer name eth0 netns {machine.pid}",
            f"link set port{number} master bridge",
            f"link set port{number} up",
        )
        _ip(
            machine.pid,
            "link set lo up",
            f"addr add {machine.address}/24 dev eth0",
            "link set eth0 up",
            *_routes(machine.address),
        )
        return machine

    def remove(self, machine: Machine) -> None:
        """End a machine for good; its folders stay."""
        machine.kill()
        if machine in self._all:
            self._all.remove(machine)

    def close(self) -> None:
        """End all machines."""
        for machine in list(self._all):
            self.remove(machine)
        if self._switch is not None:
            self._switch.kill()
            self._switch = None

    def _open(self) -> None:
        """Make the network: a bridge in a namespace of its own, with one link to this one. Both go with a process."""
        self.directory.mkdir(parents=True, exist_ok=True)
        command = [
            _program("unshare"),
            "--net",
            sys.executable,
            "-I",
            "-S",
            "-c",
            "print(flush=True); import signal; signal.pause()",
        ]
        self._switch = ChildProcess(command, log=self.directory / "switch.log", pipes=True)
        self._switch.stdout.readline()
        _ip(self._switch.pid, "link add bridge type bridge", "link set bridge up")
        for number in range(1, 255):
            # The name of the link is the claim of the network: another process may be looking for one as well.
            name, self._network = f"millrace{number}", f"{_NETWORKS}.{number}"
            add = f"link add {name} type veth peer name host netns {self._switch.pid}"
            done = subprocess.run([*ip_command(), *add.split()], capture_output=True)
            if done.returncode == 0:
                break
            assert b"File exists" in done.stderr, f"{add}: {done.stderr.decode()}"
        else:
            raise AssertionError("no network is free: see `ip link`")
        _ip(None, f"addr add {self.gateway}/24 dev {name}", f"link set {name} up")
        _ip(self._switch.pid, "link set host master bridge", "link set host up")


def _gateway(address: str) -> str:
    return address.rpartition(".")[0] + ".1"


def _routes(address: str) -> list[str]:
    # Programs find their address by the route to a distant one. The metadata service of clouds is unreachable at once.
    return [f"route replace default via {_gateway(address)}", "route replace unreachable 169.254.0.0/16"]


def _ip(process: int | None, *commands: str) -> None:
    """Run commands of `ip` in the network of a process."""
    enter = [_program("nsenter"), "--target", str(process), "--net", "--"] if process else []
    text = "".join(f"{command}\n" for command in commands)
    done = subprocess.run([*enter, *ip_command(), "-batch", "-"], input=text.encode(), capture_output=True)
    assert done.returncode == 0, f"{text}: {done.stderr.decode()}"
