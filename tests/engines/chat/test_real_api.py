"""vLLM's OpenAI server as the API, with its own template and parser: evaluation, judging and streaming."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envs.calculator import Calculator
from runner import (
    Concurrency,
    ContentPiece,
    Conversation,
    FinishReason,
    Limits,
    Outcome,
    Run,
    RunFile,
    Sampling,
    ToolCalled,
    Trajectory,
    Turn,
)
from runner.engines.chat.engine import ChatEngine
from runner.testing import ScriptedEngine, play_many_async
from tests import sweeps
from tests.engines.remote.model_server import ModelServer
from tests.engines.remote.model_server import model_server as start_server
from tests.playing import Plain, talking
from tests.repository import ROOT
from tests.verifying import verify

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.apart, pytest.mark.sample_units("unusual engines", 7)]

NAME = "demo"
COUNTED = Sampling(temperature=0.0, max_tokens=64)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def server(demo_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    """A server of the demo model whose parser reads the calls of the model's template."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    arguments = ["--served-model-name", NAME, "--chat-template", str(ROOT / "templates" / "pythonic.jinja")]
    arguments += ["--enable-auto-tool-choice", "--tool-call-parser", "pythonic", "--api-key", "sk-here"]
    with start_server(demo_model_folder, log, *arguments) as server:
        yield server


def asking(server: ModelServer, **options: Any) -> ChatEngine:
    return ChatEngine(NAME, base_url=f"{server.url}/v1", **{"api_key": "sk-here", **options})


async def test_run_against_a_real_server_is_resumed_and_stored(server: ModelServer, tmp_path: Path) -> None:
    file, two = tmp_path / "run.db", Concurrency(episodes=2)
    questions = sweeps.times(4, 3)  # one finished episode, and two that were begun
    options: Any = {"sampling": COUNTED, "concurrency": two, "limits": Limits(turns=sweeps.times(4, 2))}
    async with Run(Calculator(questions=questions), asking(server), file=file, **options) as run:
        first = await anext(run)
    async with Run(Calculator(questions=questions), asking(server), file=file, **options) as run:
        got = [first, *[each async for each in run]]
        summary = run.summary.as_dict()
    with RunFile(file) as run_file:
        assert run_file.complete
        stored = [run_file.trajectory(row) for row in run_file.rows(trained=None)]
    assert len(stored) == questions
    assert {each.id for each in got} <= {each.id for each in stored}
    turns = [turn for each in stored for turn in each.turns]
    assert all(each.outcome.scored for each in stored), [each.error for each in stored]
    assert any(turn.tool_calls for turn in turns)
    for turn in turns:
        assert turn.usage is not None
        assert turn.usage.model == NAME
        assert (turn.usage.prompt_tokens or 0) > 0
        assert turn.usage.cached_tokens is not None
    assert summary["usage"]["completion"] == sum(turn.tokens for turn in turns)
    result = verify(file)
    assert result.exit_code == 0
    assert "trajectories of chat APIs" in result.output


async def test_greedy_server_repeats_its_answers(server: ModelServer) -> None:
    async def once() -> list[Any]:
        played = await play_many_async(
            Calculator(questions=sweeps.times(2, 1)),
            asking(server),
            sampling=COUNTED,
            limits=Limits(turns=sweeps.times(4, 2)),
        )
        return [(each.id, each.reward, [said(turn) for turn in each.turns]) for each in played]

    def said(turn: Turn) -> Any:  # the ids of calls are random in each request
        return turn.text, [(made.name, made.arguments) for made in turn.tool_calls], turn.finish

    assert await once() == await once()


async def test_turn_of_a_real_server_arrives_in_several_pieces(server: ModelServer) -> None:
    events: list[Any] = []

    async def talk(conversation: Conversation) -> None:
        async with conversation.stream(sampling=Sampling(max_tokens=24, temperature=0.0)) as said:
            events.extend([event async for event in said])
        assert said.turn.text == "".join(event.text for event in events if isinstance(event, ContentPiece))
        assert said.turn.finish in (FinishReason.LENGTH, FinishReason.STOP)
        assert said.turn.tokens <= 24

    (trajectory,) = await play_many_async(talking(talk), asking(server))
    assert trajectory.outcome.scored, trajectory.error
    assert len([event for event in events if not isinstance(event, ToolCalled)]) > 1


async def test_a_real_server_judges_in_a_run(server: ModelServer, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"good": {"type": "boolean"}}, "required": ["good"]}

    class Judged(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            turn = await conversation.generate()
            judge = self.episode.conversation("judge", system_prompt="Answer in JSON.")
            judge.add(f"Is this good? {turn.text}")
            said = await judge.generate(sampling=Sampling(schema=schema, max_tokens=64, temperature=0.0))
            assert said.text.replace(" ", "").replace("\n", "") in ('{"good":true}', '{"good":false}')

    file = tmp_path / "run.db"
    async with Run(Judged, ScriptedEngine("It is 4."), engines={"judge": asking(server)}, file=file) as run:
        got: list[Trajectory] = [each async for each in run]
    assert [each.outcome for each in got] == [Outcome.COMPLETED], got[0].error
    assert verify(file).exit_code == 0


async def test_real_server_stops_and_overflow_errors_are_understood(server: ModelServer) -> None:
    async def talk(conversation: Conversation) -> None:
        turn = await conversation.generate(sampling=Sampling(stop=("e",), temperature=0.0))
        assert "e" not in turn.text
        assert (turn.finish, turn.stop) == (FinishReason.STOP, "e")
        conversation.add("word " * 4000)
        await conversation.generate()

    (trajectory,) = await play_many_async(talking(talk), asking(server))
    assert (trajectory.outcome, trajectory.limit) == (Outcome.CONTEXT_LIMIT, "context"), trajectory.error


@pytest.mark.parametrize(
    ("options", "words"),
    [({"api_key": "sk-wrong"}, "HTTP 401"), ({"extra_body": {"model": "other"}}, "HTTP 404")],
    ids=["a wrong key", "no such model"],
)
async def test_a_real_server_that_refuses_ends_the_run_by_name(
    server: ModelServer, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(Exception, match=words) as refused:
        await play_many_async(Calculator(questions=4), asking(server, **options), breaker=1)
    assert "sk-wrong" not in str(refused.value)


async def test_leaving_a_turn_ends_it_on_the_real_server(server: ModelServer) -> None:
    async def talk(conversation: Conversation) -> None:
        async with conversation.stream(sampling=Sampling(max_tokens=1000)) as said:
            async for _ in said:
                break
        assert said.turn.finish is FinishReason.ABORT

    await play_many_async(talking(talk), asking(server))
    await server.until_idle()
