"""`deltarunner verify-trace`: check whether the ids of traces of other libraries are the ids that the model saw."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import anyio
from rich.console import Console
from rich.text import Text

from runner.cli.name_values import parse_values
from runner.cli.quiet_output import quiet_output
from runner.cli.report import make_console
from runner.errors import BadOption, DeltarunnerError, RunFileError
from runner.logs import check_level, log_to_file
from runner.models import load_language, resolve_model
from runner.options import Sampling
from runner.quantities import counted
from runner.store.json_values import encode_standard_json
from runner.trainers.trace_check import TraceFinding, TraceModel, verify_trace
from runner.trainers.trace_files import Trace, read_traces
from runner.trainers.trace_scores import DEFAULT_TOLERANCE_NATS, ScoreFinding, ScoreReport, score_trace
from runner.transcript import printable

__all__ = ["ScoreOptions", "verify_trace_command"]

MAX_SHOWN: int = 20
"""Maximum number of findings that are printed; all are counted, and --json has all."""
MAX_SHOWN_IDS: Final = 5
"""Maximum number of ids that are printed for one call whose log-probabilities differ from the engine's."""
LOG: Final = Path("runs/verify-trace.log")


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """The options of the engine that scores the ids, as given."""

    engine: Sequence[str] = ()
    """Arguments of vLLM's engine, as NAME=VALUE."""
    sampling: Sequence[str] = ()
    """Fields of `Sampling`, as NAME=VALUE."""
    tolerance: float | None = None
    """Allowed difference of the log-probability of an id, in nats; None for the default."""
    log_level: str | None = None
    """The least severe level of records that are written to the log; None writes none."""


@dataclass(slots=True)
class _Totals:
    """The result of checking a file of traces."""

    traces: int = 0
    calls: int = 0
    ids: int = 0
    findings: list[tuple[str, TraceFinding]] = field(default_factory=list)
    """The findings with the place of their trace in the file."""
    unchecked: Counter[str] = field(default_factory=Counter)
    scores: ScoreReport | None = None
    """The comparison of log-probabilities; None without --score."""
    scored: list[tuple[str, ScoreFinding]] = field(default_factory=list)
    """The findings of `scores`, with the place of their trace in the file."""

    @property
    def is_right(self) -> bool:
        """True if nothing was found. With --score, at least one log-probability must also have been compared."""
        return not self.findings and not self.scored and not self.is_unscored

    @property
    def is_unscored(self) -> bool:
        """True if --score was given and no log-probability could be compared."""
        return self.scores is not None and not self.scores.differences


def verify_trace_command(
    file: Path,
    *,
    model: str,
    template: str | None = None,
    options: Sequence[str] = (),
    now: str | None = None,
    score: bool = False,
    score_options: ScoreOptions | None = None,
    as_json: bool = False,
) -> int:
    """Check the traces of a file, print what differs, and return the exit code.

    The code is 7 if something differs, or if `score` was given and no log-probability could be compared.

    Args:
        file: traces of OpenEnv or verifiers, or rows like TRL's, as JSON or JSON Lines.
        model: the folder or name of the model that sampled the ids.
        template: a template in place of the model's own.
        options: variables of the template, as NAME=VALUE.
        now: the time that the template read, in ISO form; None for the time in the trace, else the current time.
        score: start an engine with the model, and compare the log-probabilities too.
        score_options: options of that engine; only with `score`.
        as_json: print one line of JSON instead of text, also after an error.

    Raises:
        BadOption: an option is invalid, or needs `score`.
        DeltarunnerError: the model, the template or the file cannot be used.
    """
    given = score_options or ScoreOptions()
    if not score and given != ScoreOptions():
        raise BadOption(
            "--engine-option, --sampling, --tolerance and --log-level are used only with --score: add --score."
        )
    check_level(given.log_level)
    totals, traces = _Totals(), list[Trace]()
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
            if score:
                traces.append(trace)
        if score:
            _score(totals, traces, model, template, given)
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
    return 0 if totals.is_right else RunFileError.exit_code


def _score(totals: _Totals, traces: Sequence[Trace], model: str, template: str | None, given: ScoreOptions) -> None:
    """Start an engine with the model and compare the log-probabilities of the traces with its scores."""
    arguments = parse_values(given.engine, "--engine-option")
    fields = parse_values(given.sampling, "--sampling")
    known = {each.name for each in dataclasses.fields(Sampling)}
    if unknown := [name for name in fields if name not in known]:
        raise BadOption(f"--sampling {unknown[0]}: Sampling has no such field: give {', '.join(sorted(known))}.")
    sampling = Sampling(**fields) if fields else None
    tolerance = DEFAULT_TOLERANCE_NATS if given.tolerance is None else given.tolerance
    totals.scores = ScoreReport()

    async def run() -> None:
        from runner.engines.vllm.engine import VllmEngine

        async with VllmEngine(model, template=template, **arguments) as engine:
            for trace in traces:
                report = await score_trace(trace.calls, engine, sampling=sampling, tolerance=tolerance)
                assert totals.scores is not None
                totals.scores.add(report)
                totals.scored += [(trace.where, finding) for finding in report.findings]

    with log_to_file(LOG, given.log_level), quiet_output(LOG) as terminal:
        terminal.stderr.write(f"log   {LOG} (what vLLM prints)\nstarting the engine\n")
        anyio.run(run)


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
    for where, scored in totals.scored[:MAX_SHOWN]:
        _print_scored(say, where, scored)
    counts = {"trace": totals.traces, "call": totals.calls, "id": totals.ids}
    looked_at = ", ".join(counted(number, noun) for noun, number in counts.items())
    if totals.findings or totals.scored:
        kinds = Counter(finding.fault.value for _, finding in totals.findings)
        kinds.update({"logprobs": len(totals.scored)} if totals.scored else {})
        by_kind = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        say(f"{file}: {looked_at}: {counted(kinds.total(), 'finding')} ({by_kind})")
    else:
        say(f"{file}: {looked_at}: no finding")
    if totals.is_unscored:
        say("  not verified: no log-probability was compared with the engine", "red")
    for reason, count in totals.unchecked.most_common():
        say(f"  not compared in {counted(count, 'call')}: {reason}", "dim")
    if totals.scores is not None:
        _print_scores(say, totals.scores)


def _print_scored(say: Callable[..., None], where: str, found: ScoreFinding) -> None:
    say(f"{where} · turn {found.turn} ({found.node_id}) · sampled id {found.places[0]}".lstrip(" ·"), "bold")
    say(
        f"logprobs: {len(found.places)} of {found.ids} ids have another log-probability than the engine computes", "red"
    )
    rows = list(zip(found.places, found.traced, found.scored, strict=True))
    for place, traced, scored in rows[:MAX_SHOWN_IDS]:
        say(f"  sampled id {place}: trace {traced:.3f}, engine {scored:.3f}")


def _print_scores(say: Callable[..., None], scores: ScoreReport) -> None:
    if scores.median is not None:
        figures = f"median difference {scores.median:.2g} nats, largest {scores.largest:.2g}"
        say(f"  log-probabilities of {len(scores.differences)} ids: {figures}")
    for reason, count in scores.unchecked.most_common():
        say(f"  not scored in {count} calls: {reason}", "dim")


def _print_json(file: Path, totals: _Totals, error: DeltarunnerError | None) -> None:
    def shown(where: str, finding: TraceFinding) -> Mapping[str, Any]:
        return {"where": where, **dataclasses.asdict(finding)}

    document = {
        "file": str(file),
        "verified": error is None and totals.is_right,
        "traces": totals.traces,
        "calls": totals.calls,
        "ids": totals.ids,
        "findings": [shown(*each) for each in totals.findings],
        "unchecked": dict(totals.unchecked),
        "scores": _scores_as_dict(totals),
        "error": None if error is None else {"kind": type(error).__name__, "message": str(error)},
        "exit_code": _exit_code(totals) if error is None else error.exit_code,
    }
    print(encode_standard_json(document).decode())


def _scores_as_dict(totals: _Totals) -> Mapping[str, Any] | None:
    scores = totals.scores
    if scores is None:
        return None
    return {
        "ids": len(scores.differences),
        "median": scores.median,
        "largest": scores.largest,
        "findings": [{"where": where, **dataclasses.asdict(finding)} for where, finding in totals.scored],
        "unchecked": dict(scores.unchecked),
    }
