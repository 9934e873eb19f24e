"""`deltarunner verify-trace`: check whether the ids of traces of other libraries are those that the model saw."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from runner.cli.name_values import parse_values
from runner.cli.report import make_console
from runner.errors import BadOption, DeltarunnerError, RunFileError
from runner.models import load_language, resolve_model
from runner.store.json_values import encode_standard_json
from runner.trainers.trace_check import TraceFinding, TraceModel, verify_trace
from runner.trainers.trace_files import read_traces
from runner.transcript import printable

__all__ = ["verify_trace_command"]

MAX_SHOWN: int = 20
"""The most findings that are printed; all are counted, and --json has all."""


@dataclass(slots=True)
class _Totals:
    """The result of checking a file."""

    traces: int = 0
    calls: int = 0
    ids: int = 0
    findings: list[tuple[str, TraceFinding]] = field(default_factory=list)
    """The findings with the place of their trace in the file."""
    unchecked: Counter[str] = field(default_factory=Counter)


def verify_trace_command(
    file: Path,
    *,
    model: str,
    template: str | None = None,
    options: Sequence[str] = (),
    now: str | None = None,
    as_json: bool = False,
) -> int:
    """Check the traces of a file, print what differs, and return the exit code: 7 if something does.

    Args:
        file: traces of OpenEnv or verifiers, or rows like TRL's, as JSON or JSON Lines.
        model: the folder or name of the model that sampled them.
        template: a template in place of the model's own.
        options: variables of the template, as NAME=VALUE.
        now: the time that the template saw, in ISO form.
        as_json: print one line of JSON instead, also after an error.
    """
    totals = _Totals()
    try:
        variables = parse_values(options, "--template-option")
        found = resolve_model(model, say=lambda line: print(line, file=sys.stderr))
        tokenizer, chat_template, stop_ids = load_language(found, template)
        checked = TraceModel(tokenizer, chat_template, stop_ids=stop_ids, options=variables, now=_time(now))
        for trace in read_traces(file, vocabulary=tokenizer.size):
            report = verify_trace(trace.calls, checked)
            totals.traces += 1
            totals.calls += report.calls
            totals.ids += report.ids
            totals.findings += [(trace.where, finding) for finding in report.findings]
            totals.unchecked += report.unchecked
    except DeltarunnerError as error:
        if as_json:
            _print_json(file, totals, error)
        raise
    if as_json:
        _print_json(file, totals, None)
    else:
        _print(make_console(), file, totals)
    return _exit_code(totals)


def _exit_code(totals: _Totals) -> int:
    return RunFileError.exit_code if totals.findings else 0


def _time(text: str | None) -> datetime | None:
    try:
        return None if text is None else datetime.fromisoformat(text)
    except ValueError:
        raise BadOption(f"--now {text}: give a date or time in ISO form, such as 2026-03-14.") from None


def _print(console: Console, file: Path, totals: _Totals) -> None:
    def say(text: str, style: str = "") -> None:
        console.print(Text(printable(text), style=style), soft_wrap=True)

    for where, finding in totals.findings[:MAX_SHOWN]:
        sequence = "sampled id" if finding.fault == "after_stop" else "prompt id"
        say(f"{where} · turn {finding.turn} ({finding.node_id}) · {sequence} {finding.index}".lstrip(" ·"), "bold")
        say(f"{finding.fault}: {finding.explanation}", "red")
        say(finding.shown)
    looked_at = f"{totals.traces} traces, {totals.calls} calls, {totals.ids} ids"
    if totals.findings:
        kinds = Counter(finding.fault.value for _, finding in totals.findings)
        counted = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        say(f"{file}: {looked_at}: {len(totals.findings)} findings ({counted})")
    else:
        say(f"{file}: {looked_at}: no finding")
    for reason, count in totals.unchecked.most_common():
        say(f"  not compared in {count} calls: {reason}", "dim")


def _print_json(file: Path, totals: _Totals, error: DeltarunnerError | None) -> None:
    def shown(where: str, finding: TraceFinding) -> Mapping[str, Any]:
        return {"where": where, **dataclasses.asdict(finding)}

    document = {
        "file": str(file),
        "verified": error is None and not totals.findings,
        "traces": totals.traces,
        "calls": totals.calls,
        "ids": totals.ids,
        "findings": [shown(*each) for each in totals.findings],
        "unchecked": dict(totals.unchecked),
        "error": None if error is None else {"kind": type(error).__name__, "message": str(error)},
        "exit_code": _exit_code(totals) if error is None else error.exit_code,
    }
    print(encode_standard_json(document).decode())
