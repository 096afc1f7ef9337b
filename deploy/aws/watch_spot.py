"""Tells Ray when AWS is about to take this spot machine away, two minutes before.

Ray then starts nothing new here, and Millrace hands this node's part of the cache to the others. Runs beside Ray on every
worker, reads the machine's metadata service every five seconds, and ends after its report. Only the standard library.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import urllib.error
import urllib.request

_EVERY_SECONDS = 5.0
_TOKEN_SECONDS = 21600
_NOTICE_SECONDS = 120
_TOLD_WITHIN_SECONDS = 20
"""What the two minutes lose to asking and to telling."""


def is_leaving(service: str) -> bool:
    """Whether the metadata service at this URL announces an interruption. False if it does not respond."""
    try:
        token = _ask(
            f"{service}/latest/api/token",
            method="PUT",
            headers={"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)},
        )
        _ask(f"{service}/latest/meta-data/spot/instance-action", headers={"X-aws-ec2-metadata-token": token})
    except (urllib.error.URLError, OSError):
        return False  # 404 until there is a notice
    return True


def _ask(url: str, *, method: str = "GET", headers: dict[str, str]) -> str:
    request = urllib.request.Request(url, method=method, headers=headers)
    with urllib.request.urlopen(request, timeout=5) as answer:
        return str(answer.read().decode())


def drain(ray: str) -> int:
    """Tell Ray that this node goes; the exit status of its command."""
    return subprocess.run(
        [
            *(ray, "drain-node", "--reason", "DRAIN_NODE_REASON_PREEMPTION"),
            *("--reason-message", "AWS takes this spot machine away"),
            *("--deadline-remaining-seconds", str(_NOTICE_SECONDS - _TOLD_WITHIN_SECONDS)),
        ]
    ).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--service", default="http://169.254.169.254", help="the metadata service")
    parser.add_argument("--ray", default="ray", help="Ray's command")
    parser.add_argument("--every", type=float, default=_EVERY_SECONDS, help="seconds between two looks")
    arguments = parser.parse_args()
    while not is_leaving(arguments.service):
        time.sleep(arguments.every)
    print("watch_spot: AWS takes this machine away; telling Ray", flush=True)
    while (status := drain(arguments.ray)) != 0:
        print(f"watch_spot: ray drain-node ended with {status}; once more", file=sys.stderr, flush=True)
        time.sleep(arguments.every)
    return 0


if __name__ == "__main__":
    sys.exit(main())
