"""`python -m benchmarks [case...]`: run cases, print their tables, keep them in benchmarks/results."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.harness import ROOT, ContenderError, Outcome, find_cases, run_case
from benchmarks.report import as_json, as_markdown, machine
from millrace.errors import MillraceError


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0; 1 when a contender broke down or returned a wrong result; 2 for a wrong call."""
    cases = find_cases()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Millrace beside its alternatives.")
    parser.add_argument("cases", nargs="*", metavar="case", help=f"default: all ({', '.join(cases)})")
    parser.add_argument("--rounds", type=int, help="default: the number of the case")
    parser.add_argument("--quick", action="store_true", help="little data and one round: does it work at all")
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="only contenders whose name matches; tables are not kept then"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there as well")
    parser.add_argument("--list", action="store_true", help="name the cases and their contenders")
    parser.add_argument(
        "--scratch", type=Path, default=ROOT / ".deps" / "bench", help="a folder on the disk to measure"
    )
    given = parser.parse_args(arguments)
    unknown = [name for name in given.cases if name not in cases]
    if unknown or (given.rounds is not None and given.rounds < 1):
        parser.error(f"unknown case {unknown[0]!r}" if unknown else "--rounds must be 1 or more")
    if given.list:
        for case in cases.values():
            print(f"{case.name}: {case.title}: {', '.join(case.contenders)}")
        return 0

    status, collected = 0, []
    for name in given.cases or cases:
        about = machine()
        try:
            outcome = run_case(
                cases[name],
                rounds=given.rounds,
                quick=given.quick,
                scratch=given.scratch,
                only=given.only,
                report=_progress,
            )
        except (ContenderError, MillraceError) as error:
            print(error, file=sys.stderr)
            status = 1
            continue
        print("\n" + as_markdown(outcome, about), flush=True)
        collected.append(as_json(outcome, about))
        if not given.quick and not given.only:  # quick figures and parts of a table are not kept
            _keep(outcome, collected[-1], as_markdown(outcome, about))
        status = 1 if outcome.failures else status
    if given.json:
        given.json.write_text(json.dumps(collected, indent=1) + "\n")
    return status


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _keep(outcome: Outcome, result: object, table: str) -> None:
    folder = ROOT / "benchmarks" / "results"
    folder.mkdir(exist_ok=True)
    (folder / f"{outcome.case.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / f"{outcome.case.name}.md").write_text(table)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
