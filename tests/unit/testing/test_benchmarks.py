"""The benchmark harness: its arithmetic, and separate, alternating and verified runs of the contenders."""

from __future__ import annotations

import importlib
import json
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from benchmarks.__main__ import main
from benchmarks.figures import Spread, paired_ratio, round_order, short, with_spread
from benchmarks.harness import Case, ContenderError, Outcome, Prepared, Run, check_results, run_case
from benchmarks.report import as_json, as_markdown, machine


@pytest.mark.parametrize(
    ("values", "expected"),
    [([3.0], (3, 3, 3)), ([3.0, 1.0, 2.0], (2, 1, 3)), ([1.0, 2.0, 3.0, 10.0], (2.5, 1, 10))],
)
def test_spread_of_values_has_their_median_lowest_and_highest(
    values: list[float], expected: tuple[float, float, float]
) -> None:
    assert Spread.of(values) == Spread(*expected)


def test_spread_of_no_values_raises() -> None:
    with pytest.raises(ValueError, match="no values"):
        Spread.of([])


def test_ratios_are_taken_round_by_round() -> None:
    # The second round was disturbed for both; the ratio of the medians would be 2 / 2.
    assert paired_ratio([1.0, 10.0, 2.0], [2.0, 20.0, 1.0]) == Spread(0.5, 0.5, 2.0)
    assert paired_ratio([1.0], [0.0]) is None
    assert paired_ratio([], []) is None
    with pytest.raises(ValueError, match="zip"):
        paired_ratio([1.0], [1.0, 2.0])


def test_each_contender_is_first_once() -> None:
    names = ["a", "b", "c"]
    orders = [round_order(names, number) for number in range(4)]
    assert [order[0] for order in orders] == ["a", "b", "c", "a"]
    assert all(sorted(order) == names for order in orders)
    assert round_order([], 3) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (3.0, "3"), (0.12345, "0.123"), (1.2345, "1.23"), (12.345, "12.3"), (1234.5, "1234")],
)
def test_number_in_a_table_is_formatted_with_few_digits(value: float, text: str) -> None:
    assert short(value) == text


def test_value_with_spread_is_formatted() -> None:
    assert with_spread(Spread(2.0, 1.0, 3.0)) == "2 (1–3)"
    assert with_spread(Spread(2.0, 2.0, 2.0)) == "2"


def run(contender: str, number: int, wall: float, result: object = "right") -> Run:
    return Run(contender, number, {"read": {"wall s": wall, "CPU s": wall / 2}}, result)


def test_results_that_differ_raise() -> None:
    runs = [run("a", 0, 1), run("b", 0, 1, "wrong"), run("a", 1, 1)]
    assert check_results(runs, None) == ["b, round 1: returned 'wrong' instead of 'right'"]
    assert len(check_results(runs, "wrong")) == 2
    assert check_results([], None) == []


def test_report_has_medians_ratios_machine_and_failures() -> None:
    case = Case(name="reads", title="Reads", prepare=lambda _: nullcontext(Prepared({})), baseline="a")
    for name in ("a", "b"):
        case.contender(name)(lambda *_: None)
    runs = (run("a", 0, 1), run("b", 0, 2), run("b", 1, 6), run("a", 1, 2))
    outcome = Outcome(case, 2, False, runs, ("b was wrong",), ("a note",))
    about = machine()
    text = as_markdown(outcome, about)
    assert "| b | 4 (2–6) | 2 (1–3) | 2.50 (2–3) | 2.50 (2–3) |" in text
    assert "**Wrong result**: b was wrong" in text
    assert "a note" in text
    assert "revision" in text
    assert json.loads(json.dumps(as_json(outcome, about)))["machine"]["cores"] >= 1


def test_second_contender_of_one_name_is_refused() -> None:
    case = Case(name="reads", title="Reads", prepare=lambda _: nullcontext(Prepared({})))
    case.contender("a")(lambda *_: None)
    with pytest.raises(ValueError, match="two contenders"):
        case.contender("a")


@pytest.fixture
def make_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Case]:
    def make(contenders: str) -> Case:
        module = tmp_path / "modules" / "tiny_case.py"
        module.parent.mkdir()
        module.write_text(
            textwrap.dedent(
                """
                import os, subprocess, sys
                from contextlib import contextmanager
                from benchmarks.harness import Case, Prepared
                @contextmanager
                def prepare(options):
                    asked = iter(range(1000))
                    yield Prepared({"base": 5}, probe=lambda: {"asked": next(asked)})
                case = Case(name="tiny", title="Tiny", prepare=prepare, rounds=2)
                """
            )
            + textwrap.dedent(contenders)
        )
        monkeypatch.syspath_prepend(module.parent)
        monkeypatch.setenv("PYTHONPATH", str(module.parent))
        monkeypatch.delitem(importlib.sys.modules, "tiny_case", raising=False)
        case: Case = importlib.import_module("tiny_case").case
        return case

    return make


def test_contenders_run_in_processes_of_their_own(make_case: Callable[[str], Case], tmp_path: Path) -> None:
    case = make_case(
        """
        @case.contender("busy child")
        def busy(measure, context):
            print("noise on stdout")
            program = "import time\\nwhile time.process_time() < 0.3: pass"
            with measure("work") as figures:
                subprocess.run([sys.executable, "-c", program], check=True)
                figures["pid"] = os.getpid()
            return context["base"]
        @case.contender("idle")
        def idle(measure, context):
            with measure("work") as figures:
                figures["pid"] = os.getpid()
            return len(os.listdir(context["scratch"])) + 5
        """
    )
    outcome = run_case(case, rounds=None, quick=False, scratch=tmp_path / "scratch")
    assert outcome.failures == ()
    assert [one.contender for one in outcome.runs] == ["busy child", "idle", "idle", "busy child"]
    assert len({one.phases["work"]["pid"] for one in outcome.runs}) == 4
    assert all(one.phases["work"]["CPU s"] >= 0.3 for one in outcome.runs if one.contender == "busy child")
    assert all(one.phases["work"]["asked"] == 1 for one in outcome.runs)
    assert all(one.phases["work"]["peak MiB"] > 1 for one in outcome.runs)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_phase_that_states_its_bytes_reports_time_per_gigabyte(
    make_case: Callable[[str], Case], tmp_path: Path
) -> None:
    case = make_case(
        """
        @case.contender("any")
        def any_contender(measure, context):
            with measure("work") as figures:
                figures["raw GB"] = 0.25
            with measure("rest"):
                pass
        """
    )
    (run,) = run_case(case, rounds=1, quick=True, scratch=tmp_path / "scratch").runs
    for name in ("wall s", "CPU s"):
        assert run.phases["work"][f"{name}/GB"] == pytest.approx(4 * run.phases["work"][name])
    assert "raw GB" not in run.phases["work"]
    assert "CPU s/GB" not in run.phases["rest"]


def test_contenders_keep_bytecode_as_an_installed_package_has_it(
    make_case: Callable[[str], Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    case = make_case(
        """
        @case.contender("any")
        def any_contender(measure, context):
            program = "import sys; print(sys.dont_write_bytecode)"
            return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip()
        """
    )
    outcome = run_case(case, rounds=1, quick=True, scratch=tmp_path / "scratch")
    assert [run.result for run in outcome.runs] == ["False"]


def test_failed_contender_reports_the_reason(make_case: Callable[[str], Case], tmp_path: Path) -> None:
    case = make_case(
        """
        @case.contender("broken")
        def broken(measure, context):
            raise RuntimeError("no such luck")
        """
    )
    with pytest.raises(ContenderError, match=r"tiny, broken: broke down: .*no such luck"):
        run_case(case, rounds=1, quick=True, scratch=tmp_path / "scratch")


def test_hanging_contender_is_ended(make_case: Callable[[str], Case], tmp_path: Path) -> None:
    case = make_case(
        """
        @case.contender("hanging")
        def hanging(measure, context):
            import time
            with measure("work"):
                time.sleep(100)
        """
    )
    case.timeout_seconds = 1.0
    with pytest.raises(ContenderError, match="killed, after 1 s"):
        run_case(case, rounds=1, quick=True, scratch=tmp_path / "scratch")


def test_command_line_lists_the_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert "epochs: " in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["no-such-case"])
    assert caught.value.code == 2
