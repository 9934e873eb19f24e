"""`deltarunner check`: print the findings of the environment linter."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
from rich.text import Text

from runner.cli.name_values import parse_pairs
from runner.cli.report import make_console
from runner.cli.settings import HARBOR
from runner.environment.checks import check_playable
from runner.environment.loading import construct, construct_named, find_environment
from runner.errors import BadEnvironment
from runner.quantities import counted
from runner.runs.event_loop import exit_now
from runner.scoring import Scorer, ScorerKind
from runner.testing.environment_linter.findings import Finding
from runner.testing.environment_linter.hang_watch import HangWatch
from runner.testing.environment_linter.linter import EnvironmentCheck, distinct
from runner.transcript import printable

__all__ = ["check_command"]

CHECKED_ASPECTS = (
    "tools: schemas, arguments that some chat templates cannot write, calls of one turn that depend on each other",
    "rewards: errors, values that are not numbers, values that differ when an episode is repeated or within a group",
    "tasks: ids, and values that a run file cannot keep",
    "episodes: shared state, open resources, random numbers without a seed",
    "code: blocked event loop, missing await, lifespan(), hooks, exit_stack",
)


def check_command(name: str, settings: tuple[str, ...], *, episodes: int, tasks: Path | None) -> int:
    """Check an environment, or the tasks of Harbor, and print the findings.

    If the checked code hangs, this ends the process with exit code 3.

    Returns:
        The exit code: 3 if a finding is fatal or a Harbor task is wrong, else 0.

    Raises:
        BadEnvironment: the environment cannot be loaded or played.
        BadOption: `settings` are malformed, or do not fit the constructor of the environment.
        BadTask: `tasks` is not an existing file.
    """
    if name.partition(":")[0] == HARBOR:
        return _check_harbor(name, parse_pairs(settings, "--set"))
    started: list[EnvironmentCheck] = []
    # The watch also covers the author's module and constructor, which may hang as well.
    with HangWatch(_print_waiting, partial(_end_process, started)) as watch:
        cls = find_environment(name)
        check = EnvironmentCheck(lambda: construct(cls, parse_pairs(settings, "--set")), episodes, watch, tasks=tasks)
        started.append(check)
        check_playable(check.environment)
        findings = distinct(check.findings())
    _print(check, findings)
    return BadEnvironment.exit_code if any(finding.fatal for finding in findings) else 0


def _check_harbor(name: str, settings: Mapping[str, str]) -> int:
    """Score each task after its solution and after no action; print a row for each, and return the exit code."""
    from runner.interop.harbor import Harbor, HarborCheck, check_tasks

    environment = construct_named(name, settings)
    assert isinstance(environment, Harbor)
    console = make_console()

    def show(task: str, found: HarborCheck) -> None:
        rewards = f"solution {_number(found.solution)}, no action {_number(found.nothing)}"
        mark, style = ("ok", "bold green") if found.ok else ("error", "bold red")
        console.print(Text.assemble((f"{mark:7}", style), f"{task}: {rewards}"), soft_wrap=True)
        for error in found.errors:
            console.print(Text(f"       {printable(error)}", "red"), soft_wrap=True)

    found = anyio.run(partial(check_tasks, environment.folder, show, skip=environment.skip_unsupported))
    wrong = sum(not each.ok for each in found)
    console.print(f"{counted(len(found), 'task')}, {wrong} wrong (a solution must have reward 1, and no action 0)")
    return BadEnvironment.exit_code if wrong else 0


def _number(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:g}"


def _print_waiting(text: str) -> None:
    print(f"check: {text}", file=sys.stderr, flush=True)


def _end_process(started: Sequence[EnvironmentCheck], text: str) -> None:
    """Print the findings so far, and `text` about the code that hangs. End the process: such code cannot be stopped."""
    if started:
        check = started[0]
        with suppress(Exception):  # the thread that plays may change the findings during the copy
            _print(check, distinct([Finding(text), *check.current.findings]))
        if check.temporary is not None:
            check.temporary.cleanup()
    else:
        _print_waiting(text)
    exit_now(BadEnvironment.exit_code)


def _print(check: EnvironmentCheck, findings: Sequence[Finding]) -> None:
    console = make_console()
    environment, played = check.environment, check.first
    tools = [f"{tool.name}({', '.join(tool.parameters.get('properties', {}))})" for tool in check.known_tools()]
    scorers = [f"{s.name} ({s.kind.replace('_', ' ')}{_weight(s)})" for s in environment.scorers]
    counts = Counter(record.outcome for record in played.records.values())
    outcomes = ", ".join(f"{outcome.value} {count}" for outcome, count in counts.items())
    rows = (
        ("tools", ", ".join(tools) or "none"),
        ("scores", ", ".join(scorers)),
        ("played", f"in groups of two, on a scripted engine: {outcomes or 'nothing'}; {counted(played.turns, 'turn')}"),
        *zip(("checked", *[""] * len(CHECKED_ASPECTS)), CHECKED_ASPECTS, strict=False),
    )
    for label, text in rows:
        console.print(Text.assemble((f"{label:9}", "dim"), text), soft_wrap=True)
    for finding in findings:
        kind, style = ("error", "bold red") if finding.fatal else ("warning", "yellow")
        console.print(Text.assemble((f"{kind:9}", style), printable(finding.text)), soft_wrap=True)
    if not findings:
        console.print("ok", style="bold green")


def _weight(scorer: Scorer) -> str:
    return "" if scorer.kind == ScorerKind.METRIC else f", weight {scorer.weight:g}"
