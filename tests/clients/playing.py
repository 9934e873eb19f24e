"""Play of an episode by an agent program: its prompt, its requests, and the assertions for every such episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import anyio.to_thread

from runner import Conversation, Engine, Environment, Outcome, Run, Task, Trajectory, reward
from runner.chat_requests import ChatRequest, Verdict
from runner.endpoint.endpoint import ChatThread, Endpoint
from runner.endpoint.programs import FinishedProgram
from runner.engines.scripted.replies import ReplyEncoder
from runner.engines.scripted.script import Answer, ModelCall, as_reply
from runner.testing import Reply, ScriptedEngine, assert_exact
from runner.tokens.tokenizer import load_tokenizer
from tests.verifying import verify

__all__ = [
    "PROMPT",
    "WROTE",
    "ProgramEpisode",
    "Says",
    "assert_appends",
    "assert_exact_and_verified",
    "assert_good",
    "assert_trained_once",
    "by_history",
    "in_order",
    "play_program",
    "respelling",
]

PROMPT = "Write hello into hello.txt with the tools that you have, and say what it holds."
WROTE = "hello.txt"

Says: TypeAlias = Callable[[ModelCall], Answer]
"""Function from a request to the model's answer."""

Argv: TypeAlias = Callable[[Endpoint], Sequence[str]]
"""The command line of a program."""


@dataclass(slots=True)
class ProgramEpisode:
    """Results of a program's episode."""

    folder: Path
    """The folder in which the program worked."""
    file: Path
    """The run file."""
    finished: FinishedProgram | None = None
    """The exit of the program."""
    threads: list[ChatThread] = field(default_factory=list)
    """The program's conversations, including untrained ones."""
    trajectories: list[Trajectory] = field(default_factory=list)
    """The trained trajectories."""

    @property
    def main(self) -> Trajectory:
        return next(each for each in self.trajectories if each.agent == "main")

    @property
    def requests(self) -> list[ChatRequest]:
        """The requests of trained threads, in order of arrival."""
        return sorted((each for own in self.trajectories for each in own.requests), key=lambda each: each.number)

    @property
    def verdicts(self) -> list[str]:
        return [each.verdict.value for each in self.main.requests]

    def tolerated(self) -> set[str]:
        return {each.value for request in self.requests for each in request.tolerated}

    def in_words(self) -> str:
        """The result in words, for the message of a failed test."""
        lines = [] if self.finished is None else [f"ended with {self.finished.returncode}"]
        lines += [each[-2000:] for each in (self.finished.stdout, self.finished.stderr)] if self.finished else []
        for thread in self.threads:
            verdicts = ", ".join(thread.verdicts)
            lines.append(f"{thread.name} {thread.label!r} trained={thread.trained} [{verdicts}] {thread.tools}")
            lines += [
                f"    {turn.reasoning!r:.80} {turn.text!r:.200} {[call.name for call in turn.tool_calls]}"
                for turn in thread.turns
            ]
        for own in self.trajectories:
            lines.append(f"{own.agent} {own.outcome} {own.error}")
            lines += [
                f"    {each.number} {each.verdict} {each.again} turn={each.turn} {[*each.tolerated]} {each.form} "
                f"{each.client} {dict(each.not_granted)} {each.delivery} {each.error}"
                for each in own.requests
            ]
        return "\n".join(lines)


def respelling(says: Says, model: Path, **settings: Any) -> ScriptedEngine:
    """An engine with a model's vocabulary, whose ids always differ from the encoding of its text.

    So the ids of a prompt show whether sampled text was encoded again.
    """
    tokenizer = load_tokenizer(model)

    def in_letters(asked: ModelCall) -> Reply:
        reply = as_reply(says(asked))
        text = tokenizer.decode(encoder.encode(reply).ids)
        ids = [each for character in text for each in tokenizer.encode(character)]
        return replace(reply, text="", calls=(), ids=ids)

    settings = {"template": "hermes", "context": 131_072, "record": True, **settings}
    engine = ScriptedEngine(in_letters, tokenizer=tokenizer, **settings)
    encoder = ReplyEncoder(engine.tokenizer, engine.template)
    return engine


def in_order(*answers: Answer, aside: Answer = "A short title") -> Says:
    """Reply with these answers in order if tools are offered, else with `aside`."""

    def says(asked: ModelCall) -> Answer:
        if "<tools>" not in asked.prompt:
            return aside
        return answers[min(asked.turn, len(answers) - 1)]

    return says


def by_history(*answers: Answer, aside: Answer = "A short title") -> Says:
    """Reply by the number of answers in the history, so that a repeated request gets the same answer."""
    least: dict[str, int] = {}

    def says(asked: ModelCall) -> Answer:
        if "<tools>" not in asked.prompt:
            return aside
        said = asked.prompt.count("<|im_start|>assistant")
        return answers[min(said - least.setdefault(asked.agent, said), len(answers) - 1)]

    return says


def environment_of(
    argv: Argv, played: ProgramEpisode, env: Mapping[str, str], serve: Mapping[str, Any]
) -> type[Environment]:
    class Program(Environment):
        """Environment that a program plays."""

        def tasks(self) -> list[Task]:
            return [Task(id="t0", prompt=PROMPT)]

        async def rollout(self, conversation: Conversation) -> None:
            async with self.episode.serve(**serve) as endpoint:
                try:
                    played.finished = await endpoint.run(argv(endpoint), cwd=played.folder, env=env, check=False)
                finally:
                    played.threads = endpoint.threads

        @reward
        def wrote(self) -> bool:
            return (played.folder / WROTE).is_file()

    return Program


async def play_program(
    argv: Argv,
    engine: Engine,
    tmp_path: Path,
    *,
    env: Mapping[str, str] | None = None,
    serve: Mapping[str, Any] | None = None,
    **options: Any,
) -> ProgramEpisode:
    """Let a program play one episode."""
    folder = tmp_path / "work"
    folder.mkdir(exist_ok=True)
    played = ProgramEpisode(folder, tmp_path / "run.db")
    environment = environment_of(argv, played, env or {}, serve or {})
    async with Run(environment, engine, file=played.file, breaker=1, **options) as run:
        played.trajectories = [trajectory async for trajectory in run]
    return played


async def assert_good(played: ProgramEpisode, engine: ScriptedEngine, model: Path) -> None:
    """Assert the properties of every episode that a program played to its end."""
    assert played.finished is not None, played.in_words()
    assert played.finished.ok, played.in_words()
    assert (played.folder / WROTE).read_text().strip() == "hello", played.in_words()
    for trajectory in played.trajectories:
        assert (trajectory.outcome, trajectory.error) == (Outcome.COMPLETED, ""), played.in_words()
    assert played.main.reward == 1.0
    await assert_exact_and_verified(played, engine, model)


async def assert_exact_and_verified(played: ProgramEpisode, engine: ScriptedEngine, model: Path) -> None:
    """Assert that trained ids are exactly the sampled ids, each once, and that the run file can be rebuilt."""
    for trajectory in played.trajectories:
        assert_exact(trajectory, engine)
        assert_trained_once(trajectory)
    result = await anyio.to_thread.run_sync(verify, played.file, "--model", str(model))
    assert result.exit_code == 0, result.output


def assert_trained_once(trajectory: Trajectory) -> None:
    """Assert that every sampled id is trained once, except for the ids of discarded turns."""
    kept = sum(turn.end - turn.start for turn in trajectory.turns if not turn.retried)
    assert sum(sum(segment.log.mask()) for segment in trajectory.segments) == kept


def assert_appends(trajectory: Trajectory) -> None:
    """Assert that the prompt of an appending request begins with the ids of the earlier prompt and its turn."""
    for request in trajectory.requests:
        if request.verdict is not Verdict.APPEND or request.turn is None:  # or it was refused
            continue
        assert request.parent_turn is not None
        turn, parent = trajectory.turns[request.turn], trajectory.turns[request.parent_turn]
        before = [*parent.prompt_ids, *parent.token_ids]
        assert [*turn.prompt_ids][: len(before)] == before
