"""Consoles, and the results of a run: summary, faults, loop lag."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from runner.concurrency.loop_lag import LATE_SECONDS, LagMonitor
from runner.concurrency.thread_frames import author_frame, frames_by_thread
from runner.engines.base import FinishReason
from runner.quantities import counted
from runner.runs.live_stats import TEMPLATE_ADVICE, as_time, suspect_template
from runner.runs.reporter import START_INTERVAL_SECONDS, discard
from runner.tokens.junction import Result
from runner.transcript import printable, printable_line

__all__ = ["lag_lines", "make_console", "naming_slow_code", "own_command", "plain_table", "quoted", "summary_table"]

MAX_FAULTS = 3
"""Maximum number of shown faults, of causes of repeated attempts, and of places that blocked the event loop."""
NOTABLE_SECONDS = 1.0
"""Total seconds of blocking below which no code is named, if the event loop was not late."""
PIPED_WIDTH = 200
"""Columns of piped output; Rich's default of 80 would cut paths and tables."""
MAX_PLAIN_MEAN = 1e9
"""Means from this number on are shown with an exponent, since a float may have 309 digits."""
UNTRAINED = "no request is trained: programs without tools are trained only with --train, or serve(train=True)"


@contextmanager
def naming_slow_code(seconds: float = START_INTERVAL_SECONDS) -> Iterator[None]:
    """Print on stderr, every `seconds`, which line of the author's code runs: an import or `tasks()` may be slow."""
    caller, over = threading.get_ident(), threading.Event()
    script = os.path.abspath(sys.argv[0])  # the command's own script is not an author's code

    def look() -> None:
        while not over.wait(seconds):
            with frames_by_thread() as frames:
                frame = author_frame(frames.get(caller))
                code, line = (None, 0) if frame is None else (frame.f_code, frame.f_lineno)
            if code is not None and code.co_filename != script:
                place = f"{code.co_qualname}, {code.co_filename}:{line}"
                print(printable_line(f"waiting for {place}"), file=sys.stderr, flush=True)

    watching = threading.Thread(target=look, name="deltarunner start", daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


class _ReaderOptionalConsole(Console):
    """A console that ignores a closed pipe, such as after `head`, since the run does not depend on its output."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard(self.file)


class _PipedConsole(Console):
    """A console that raises `BrokenPipeError` if the pipe is closed; Rich would exit with another code."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console(file: TextIO | None = None, *, reader_optional: bool = False) -> Console:
    """A console on a stream; piped output is not wrapped at 80 columns.

    Args:
        file: the stream; None stands for stdout.
        reader_optional: ignore a closed pipe; by default it raises `BrokenPipeError`.
    """
    kind = _ReaderOptionalConsole if reader_optional else _PipedConsole
    return kind(file=file, highlight=False, width=None if (file or sys.stdout).isatty() else PIPED_WIDTH)


def plain_table() -> Table:
    """Return a table without lines, with dim headers."""
    return Table(box=None, padding=(0, 2, 0, 0), header_style="dim")


def summary_table(summary: Mapping[str, Any], *, earlier: int = 0, verbose: bool = False) -> Table:
    """A table of `Summary.as_dict()`.

    Args:
        summary: the dict.
        earlier: the number of episodes that the file had before the run.
        verbose: also show how prompts were built, and the times of turns.
    """
    table = Table.grid(padding=(0, 2))
    for name, value in _rows(summary, earlier, verbose):
        table.add_row(Text(name, style="dim"), value)
    return table


def _rows(summary: Mapping[str, Any], earlier: int, verbose: bool) -> Iterator[tuple[str, RenderableType]]:
    yield "episodes", _episodes(summary, earlier)
    yield from _reward_rows(summary)
    episodes = summary["episodes"]
    yield "outcomes", _counts({name: f"{count} of {episodes}" for name, count in summary["outcomes"].items()})
    yield from _turn_rows(summary, verbose)
    yield from _token_rows(summary, verbose)
    yield from _junction_rows(summary, verbose)
    if summary["retried"]:
        yield "played again", Text(_retried(summary["retried"], summary.get("retry_causes", {})))
    if summary.get("stale"):
        yield "dropped", Text(f"{summary['stale']} with weights that were too old; played again")
    if summary.get("flat"):
        yield "left out", Text(f"{counted(summary['flat'], 'group')} with equal rewards")
    if summary["faults"]:
        yield "faults", _faults(summary["faults"])


def _episodes(summary: Mapping[str, Any], earlier: int) -> Text:
    episodes = summary["episodes"]
    played = f"{episodes}, {episodes - earlier} of them" if earlier else str(episodes)
    rate = summary["tokens_per_second"]
    pace = f", {rate:.0f} tokens/s" if rate else ""
    # The time is unknown after a launch that was killed.
    time = f" in {as_time(summary['seconds'])}" if summary["seconds"] is not None else ""
    return Text(f"{played}{time}{pace}", style="bold")


def _reward_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, RenderableType]]:
    first, *others = _by_agent(summary)
    yield first[0], Text(_mean(first[1]), style="bold")
    if summary.get("requests") and summary["turns"] and not summary["agents"] and first[1]["mean"] is None:
        yield "", Text(UNTRAINED, "yellow")
    for name, mean in summary.get("environments", {}).items():
        yield printable(name), Text(_mean(mean))
    for name, mean in summary["rewards"].items():
        yield f"  {printable_line(name)}", Text(_mean(mean))
    for name, mean in others:
        yield printable_line(name), Text(_mean(mean), style="bold")
    if len(summary["pass_at"]) > 1 and summary["pass_at"]["1"] is not None:  # pass@1 is None without a complete group
        shown = (f"pass@{k} {value:.3f}" for k, value in summary["pass_at"].items() if value is not None)
        unsolved = "  (failed episodes count as not solved)" if summary["failed"] else ""
        yield "solved", Text(" · ".join(shown) + unsolved)
        shown = (f"pass^{k} {value:.3f}" for k, value in summary["pass_all"].items() if value is not None)
        yield "  each time", Text(" · ".join(shown))
    for name, mean in summary["metrics"].items():
        yield f"  {printable_line(name)} (metric)", Text(_mean(mean))


def _turn_rows(summary: Mapping[str, Any], verbose: bool) -> Iterator[tuple[str, RenderableType]]:
    yield "turns", Text(_turns(summary, verbose))
    if summary.get("calls"):
        yield "tool calls", _calls(summary["calls"], summary["malformed_calls"], summary.get("failed_calls", 0))
    if summary.get("requests"):
        yield "requests", _counts(summary["requests"])
    if summary.get("tolerated"):
        yield "  tolerated", _counts(summary["tolerated"])


def _token_rows(summary: Mapping[str, Any], verbose: bool) -> Iterator[tuple[str, RenderableType]]:
    usage = summary.get("usage", {})
    if summary["tokens"]["prompt"] or not usage.get("models"):
        yield "tokens", Text(_tokens(summary["tokens"], verbose))
    if usage.get("models"):
        yield "usage", Text(_usage(usage))
        yield "  answered by", _counts({printable_line(name): n for name, n in usage["models"].items()})
    if summary.get("throttled") or summary.get("resent"):
        yield "servers", Text(f"rate-limited {summary['throttled']} times · {summary['resent']} requests sent again")


def _junction_rows(summary: Mapping[str, Any], verbose: bool) -> Iterator[tuple[str, RenderableType]]:
    if verbose and summary["junctions"]:
        yield "junctions", Text("\n".join(_junctions(summary["junctions"])))
    if summary.get("junction_causes") and (verbose or _new_segments(summary["junctions"])):
        yield "  because of", _counts(summary["junction_causes"])
    if summary["turns"] and verbose:
        yield "time a turn", Text(_times(summary["times"], summary["turns"]))


def _counts(counts: Mapping[str, object]) -> Text:
    return Text(" · ".join(f"{name} {count}" for name, count in counts.items()))


def _by_agent(summary: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """(label, mean reward) of each trained agent. The summary's `rewards` belong to the first agent."""
    agents = summary["agents"]
    if len(agents) < 2:
        return [("reward", summary["reward"])]
    return [(f"reward of {printable(agent)}", mean) for agent, mean in agents.items()]


def _mean(mean: Mapping[str, Any]) -> str:
    if mean["mean"] is None:
        return "no episode scored"
    error, tasks = mean["standard_error"], mean.get("tasks")
    of = counted(mean["count"], "episode") + (f" of {counted(tasks, 'task')}" if tasks is not None else "")
    form = ".3f" if max(abs(mean["mean"]), error or 0.0) < MAX_PLAIN_MEAN else ".3g"
    return f"{mean['mean']:{form}}" + (f" ± {error:{form}}" if error is not None else "") + f"  ({of})"


def _calls(calls: int, malformed: int, failed: int) -> Text:
    parts = [
        f"{count} of them {words}" for count, words in ((malformed, "could not be read"), (failed, "failed")) if count
    ]
    text = Text(", ".join([str(calls), *parts]))
    if suspect_template(calls, malformed):
        text.append(f"\n{TEMPLATE_ADVICE}", "yellow")
    return text


def _usage(usage: Mapping[str, Any]) -> str:
    parts = [f"{name} {usage[name]:,}" for name in ("prompt", "cached", "completion", "reasoning") if usage[name]]
    return " · ".join([*parts, *([f"cost {usage['cost']:.4g}"] if usage["cost"] else [])])


def _turns(summary: Mapping[str, Any], verbose: bool) -> str:
    """The number of turns, the number by finish reason, and the number that began a new segment.

    The usual reason `stop` is shown only with `verbose`.
    """
    ends = {name: count for name, count in summary["finishes"].items() if verbose or name != FinishReason.STOP}
    began = _new_segments(summary["junctions"])
    parts = [str(summary["turns"]), *(f"{name} {count}" for name, count in ends.items())]
    return " · ".join([*parts, *([f"{began} of them began a new segment"] if began else [])])


def _tokens(tokens: Mapping[str, int], verbose: bool) -> str:
    cached = f" ({100 * tokens['cached'] / tokens['prompt']:.0f}% cached)" if tokens["prompt"] else ""
    bridged = f" · bridged {tokens['bridged']:,}" if verbose else ""
    return f"prompts {tokens['prompt']:,}{cached} · sampled {tokens['sampled']:,}{bridged}"


def _new_segments(junctions: Mapping[str, int]) -> int:
    """The number of turns that began a new segment."""
    return sum(count for key, count in junctions.items() if not key.startswith(Result.APPENDED))


def _junctions(junctions: Mapping[str, int]) -> Iterator[str]:
    for key, count in junctions.items():
        result, anchor, close, seam = key.split("/")
        yield f"{count} {result} (anchor {anchor}, close {close}, seam {seam})"


def _retried(count: int, causes: Mapping[str, int]) -> str:
    """The number of repeated attempts by cause. Files of older versions have no causes; then only the total."""
    if not causes:
        return f"{count} after an engine failure"
    shown = [f"{n} after: {printable_line(cause)}" for cause, n in list(causes.items())[:MAX_FAULTS]]
    return "\n".join([*shown, *(["and for other causes"] if len(causes) > MAX_FAULTS else [])])


def _times(times: Mapping[str, float], turns: int) -> str:
    return " · ".join(f"{name.replace('_', ' ')} {seconds / turns:.2f} s" for name, seconds in times.items())


def _faults(faults: Sequence[str]) -> Text:
    text = Text("\n".join(printable(fault) for fault in faults[-MAX_FAULTS:]), style="yellow")
    if len(faults) > MAX_FAULTS:
        text.append(f"\nand {len(faults) - MAX_FAULTS} earlier ones", "dim")
    return text


def lag_lines(lag: LagMonitor) -> Iterator[Text]:
    """Lines about the lag of the event loop and the code that blocked it.

    There are no lines if the loop was on time and was blocked for less than `NOTABLE_SECONDS`.
    """
    late = lag.percentile(99)
    blockers = lag.blockers(MAX_FAULTS)
    if late > LATE_SECONDS:
        yield Text(f"the event loop was {1000 * late:.0f} ms late (99th percentile)", style="yellow")
    elif sum(blocker.seconds for blocker in blockers) < NOTABLE_SECONDS:
        return
    for blocker in blockers:
        yield Text(f"  {blocker.where}, {blocker.seconds:.1f} s: {blocker.advice}", style="yellow")


def own_command() -> str:
    """The command that runs this program from the current folder."""
    called = Path(sys.argv[0])
    found = shutil.which("deltarunner")
    if called.name != "deltarunner" or (found is not None and Path(found).resolve() == called.resolve()):
        return "deltarunner"
    absolute = called.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def quoted(word: object) -> str:
    """Quote a word for a shell if necessary; a # inside a word needs no quotes."""
    return str(word) if re.fullmatch(r"[\w@%+=:,./-][\w@%+=:,./#-]*", str(word), re.ASCII) else shlex.quote(str(word))
