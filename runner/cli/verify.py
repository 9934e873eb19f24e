"""`deltarunner verify`: rebuild every prompt of a run file from its messages and sampled ids, and compare."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from runner.cli.report import make_console
from runner.episode.model import ChatModel
from runner.errors import BadModel, DeltarunnerError, RunFileError
from runner.models import resolve_model
from runner.options import History
from runner.parsing.external_reader import ExternalReader
from runner.parsing.learning.learnt_format import LearntFormat
from runner.quantities import counted
from runner.store.codec import episode_row
from runner.store.header import Header
from runner.store.json_values import encode_standard_json
from runner.store.reader import EpisodeRow, RunFile
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.template import ChatTemplate
from runner.tokens.tokenizer import Tokenizer, load_tokenizer
from runner.trajectory import Trajectory
from runner.transcript import printable
from runner.verify.audit import first_message_mismatch, first_misfit, launch_difference
from runner.verify.differences import Difference, Kind
from runner.verify.rebuild import first_difference, stored_chat
from runner.verify.records import first_contradiction

__all__ = ["verify_command"]


@dataclass(slots=True)
class VerifyResult:
    """The numbers of checked trajectories, turns and ids, and the first difference."""

    trajectories: int = 0
    turns: int = 0
    ids: int = 0
    """Number of token ids, from the table of episodes."""
    messages: int = 0
    """Number of trajectories of chat APIs. They have no prompt ids to rebuild."""
    differing: int = 0
    """Number of trajectories with a difference."""
    difference: Difference | None = None
    """The first difference; None if nothing differs."""

    @property
    def exit_code(self) -> int:
        return 0 if self.difference is None else RunFileError.exit_code


def verify_command(file: Path, *, models: Sequence[str] = (), json: bool = False) -> int:
    """Rebuild every prompt of the file, print the first difference, and return the exit code.

    Turns of chat APIs have no prompt ids. Their answers are compared with the messages instead.

    Args:
        file: the run file.
        models: folders or names of models with the run's vocabulary, if the header's path is not valid any more.
        json: print one line of JSON instead of text, also after an error.

    Raises:
        RunFileError: the file cannot be read.
        BadModel: the vocabulary of the run is not found.
    """
    try:
        with RunFile(file) as run_file:
            verdict = _verify_file(run_file, models)
    except DeltarunnerError as error:
        if json:
            _print_json(file, VerifyResult(), error)
        raise
    if json:
        _print_json(file, verdict, None)
    else:
        _print(make_console(), file, verdict)
    return verdict.exit_code


def _verify_file(run_file: RunFile, models: Sequence[str]) -> VerifyResult:
    header = run_file.header
    verdict = VerifyResult(difference=_header_difference(run_file))
    if verdict.difference is None:
        chats = ChatModels(header, models)
        for row in run_file.rows(trained=None, superseded=None):
            found = _difference(run_file, row, chats)
            verdict.trajectories += 1
            verdict.turns += row.turns
            verdict.ids += row.tokens
            verdict.messages += not header.has_ids(row.agent)
            verdict.differing += found is not None
            verdict.difference = verdict.difference or found
        verdict.difference = verdict.difference or first_misfit(run_file.path, header)
    return verdict


def _header_difference(run_file: RunFile) -> Difference | None:
    """Return the first change of the header since the run began, or the first fault in a launch's header, or None."""
    noted = run_file.first_launch()
    changes = [] if noted is None else noted.changes(run_file.header)
    if not changes:
        return launch_difference(run_file.path, run_file.header)
    return Difference(
        kind=Kind.HEADER,
        explanation=f"the run's header has changed since the run began: {changes[0].path}",
        stored=_text(changes[0].new),
        derived=_text(changes[0].old),
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _difference(run_file: RunFile, row: EpisodeRow, chats: ChatModels) -> Difference | None:
    differ = partial(Difference, episode=row.id, agent=row.agent, attempt=row.attempt)
    try:
        trajectory = run_file.trajectory(row)
    except RunFileError as error:
        cause = error.__cause__ or error
        explanation = f"the rows of the episode are not a valid trajectory: {type(cause).__name__}: {cause}"
        return differ(kind=Kind.UNREADABLE, explanation=explanation)
    # The row has these counts too, for lists of episodes; in a damaged file they may differ from the trajectory.
    counted = {name: getattr(row, name) for name in _COUNTS}
    held = episode_row(trajectory)
    wrong = next((name for name in _COUNTS if counted[name] != held[name]), None)
    if wrong is not None:
        explanation = f"the row of the episode counts {counted[wrong]} ({wrong}), but the trajectory has {held[wrong]}"
        return differ(kind=Kind.LAYOUT, explanation=explanation)

    def other(agent: str) -> Trajectory:
        return run_file.trajectory(row, agent=agent)

    if run_file.header.has_ids(row.agent):
        found = first_difference(trajectory, chats.of(row.agent), other)
    else:
        found = first_message_mismatch(trajectory)
    return found or first_contradiction(trajectory, run_file.header)


_COUNTS = ("turns", "segments", "tokens", "sampled", "prompted", "cached")


# --- models of the run


class ChatModels:
    """The chat models of a run, by agent, rebuilt from its header."""

    def __init__(self, header: Header, models: Sequence[str]) -> None:
        self._header = header
        self._given = {model: _load_vocabulary(model) for model in models}
        self._chats: dict[str | None, ChatModel] = {}

    def of(self, agent: str) -> ChatModel:
        """Return the chat model of an agent.

        Raises:
            BadModel: the vocabulary of the agent's engine is not found.
        """
        placed = agent if agent in self._header.engines else None
        if placed not in self._chats:
            self._chats[placed] = self._make(placed)
        return self._chats[placed]

    def _make(self, placed: str | None) -> ChatModel:
        header = self._header
        engine = header.engine if placed is None else header.engines[placed]
        template = header.template if placed is None else engine["template"]
        return stored_chat(
            self._vocabulary(engine),
            ChatTemplate(template["text"], name=template["name"], variables=template["variables"]),
            stop_ids=engine["stop_ids"],
            options=header.template_options,
            now=header.clock,
            history=History(**header.history),
            turns=LearntFormat.from_json(template["turns"]) if "turns" in template else None,
            named=_named_reader(header) if placed is None else None,
            fit_tools=bool(template.get("fits_tools")),
        )

    def _vocabulary(self, engine: Mapping[str, Any]) -> Tokenizer:
        for tokenizer in self._candidates(engine):
            if tokenizer.fingerprint == engine["tokenizer"]:
                return tokenizer
        if "control_tokens" in engine and not self._given:
            raise BadModel(
                f"The byte vocabulary of this version is not the run's, whose fingerprint is {engine['tokenizer']}. "
                f"Verify the run file with the version of deltarunner that wrote it: "
                f"{self._header.versions.get('deltarunner', 'unknown')}."
            )
        looked_at = ", ".join(self._given) or engine.get("model")
        raise BadModel(
            f"The vocabulary of {looked_at} is not the run's, whose fingerprint is "
            f"{engine['tokenizer']}. Give the folder of the run's model: --model FOLDER."
        )

    def _candidates(self, engine: Mapping[str, Any]) -> Iterator[Tokenizer]:
        if "control_tokens" in engine:
            yield ByteTokenizer(engine["control_tokens"], eos_token=engine["eos_token"])
        yield from self._given.values()
        if self._given or "control_tokens" in engine:
            return
        model = engine.get("model")
        if not isinstance(model, str) or engine.get("kind") == "scripted":
            raise BadModel(
                f"The run had a vocabulary with fingerprint {engine['tokenizer']}, and the run file does not "
                f"name the model. Give its folder: --model FOLDER."
            )
        try:
            yield _load_vocabulary(model)
        except BadModel as error:
            raise BadModel(f"{error} If the run's model has moved, give its folder: --model FOLDER.") from error


def _named_reader(header: Header) -> Callable[[Tokenizer], ExternalReader] | None:
    if header.tool_format is None:
        return None
    from runner.engines.vllm.call_reader import named_reader

    return partial(named_reader, header.tool_format)


def _load_vocabulary(model: str) -> Tokenizer:
    return load_tokenizer(resolve_model(model, say=lambda line: print(line, file=sys.stderr)).folder)


# --- output


def _print(console: Console, file: Path, verdict: VerifyResult) -> None:
    def say(text: str, style: str = "") -> None:
        console.print(Text(printable(text), style=style), soft_wrap=True)

    found = verdict.difference
    looked_at = _looked_at(verdict)
    if found is None:
        if verdict.messages < verdict.trajectories or not verdict.trajectories:
            say(f"{file}: {looked_at}: all follow from the messages and the sampled ids")
        if verdict.messages:
            of_chats = counted(verdict.messages, "trajectory")
            say(f"{file}: {of_chats} of chat APIs: turns match their messages; there are no prompt ids to rebuild")
        return
    if found.kind is Kind.HEADER:
        say(f"{file}: the trajectories were not checked")
    elif verdict.differing:
        verb = "differs" if verdict.differing == 1 else "differ"
        say(f"{file}: {looked_at}: {counted(verdict.differing, 'trajectory')} {verb}; the first one:")
        say(_place(found), "bold")
    else:
        say(f"{file}: {looked_at}: each trajectory is right, but the file as a whole is not consistent")
        say(found.episode, "bold")
    say(f"{found.kind.value}: {found.explanation}", "red")
    sides = (("stored", found.stored, found.stored_ids), ("derived", found.derived, found.derived_ids))
    for name, text, ids in sides if found.stored or found.derived else ():
        say(f"  {name:8} {text!r}")
        if ids:
            say(f"           {' '.join(map(str, ids))}", "dim")


def _looked_at(verdict: VerifyResult) -> str:
    counts = {"trajectory": verdict.trajectories, "turn": verdict.turns, "id": verdict.ids}
    return ", ".join(counted(count, noun) for noun, count in counts.items())


def _place(found: Difference) -> str:
    parts = [found.episode, f"agent {found.agent}"]
    if found.attempt:
        parts.append(f"attempt {found.attempt}")
    named = (("segment", found.segment), ("turn", found.turn), ("index", found.index))
    parts += [f"{name} {value}" for name, value in named if value is not None]
    return " · ".join(parts)


def _print_json(file: Path, verdict: VerifyResult, error: DeltarunnerError | None) -> None:
    document = {
        "file": str(file),
        "verified": error is None and verdict.difference is None,
        "trajectories": verdict.trajectories,
        "turns": verdict.turns,
        "ids": verdict.ids,
        "messages_only": verdict.messages,
        "differing": verdict.differing,
        "difference": None if verdict.difference is None else dataclasses.asdict(verdict.difference),
        "error": None if error is None else {"kind": type(error).__name__, "message": str(error)},
        "exit_code": verdict.exit_code if error is None else error.exit_code,
    }
    print(encode_standard_json(document).decode())
