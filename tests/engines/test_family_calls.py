"""The call formats of many families on the real engine: required calls, and whole episodes with forced ids.

All families use one small model. Its vocabulary has the control tokens of every template, but the model has not learnt
them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from runner import Environment, Limits, Run, Sampling, Task, Turn, VllmEngine, reward, tool
from runner.engines.base import FinishReason
from runner.engines.scripted.replies import ReplyEncoder
from runner.parsing.harmony import NEXT_MESSAGE
from runner.parsing.turn_format import TurnFormat
from runner.testing import FORCING, Reply, assert_exact, force
from tests import sweeps
from tests.parsing.families import FAMILIES, TEMPLATES, Family, Library, assert_played, family, played

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.apart, pytest.mark.sample_units("unusual engines", 7)]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def engine(polyglot_folder: Path, anyio_backend: str) -> AsyncIterator[VllmEngine]:
    options: dict[str, Any] = {"template": "pythonic", "max_num_seqs": 8, "max_model_len": 8192, **FORCING}
    async with VllmEngine(polyglot_folder, **options) as engine:
        yield engine


def as_family(engine: VllmEngine, of: Family) -> tuple[int, int]:
    """Let the engine use a family's format, and return the ids that end an answer and a turn with calls."""
    answer, calls = (engine.tokenizer.token_id(name) for name in of.ends)
    assert answer is not None
    assert calls is not None
    # After a complete grammar only the vocabulary's own EOS is allowed, and most of these templates do not use it.
    known = [stop for stop in (answer, calls, engine.tokenizer.eos_id) if stop is not None]
    engine.template, engine.stop_ids = of.template, tuple(dict.fromkeys(known))
    return answer, calls


class Adder(Environment):
    """Environment that requires a call, answers it, and requires another one."""

    def tasks(self) -> list[Task]:
        return [Task(f"sum {n}", prompt=f"What is {n} + {n}?") for n in range(2)]

    @tool(parallel=False)  # an untrained model would make calls until it is cut
    def add(self, a: Literal[1, 25, 300], b: Literal["one", 'two "or" more'], exact: bool = True) -> str:
        """Add two numbers.

        Args:
            a: the first.
            b: the second.
            exact: whether to the last digit.
        """
        return f"{a} + {b}"

    async def rollout(self, conversation: Any) -> None:
        for _ in range(2):
            turn = await conversation.generate(tool_choice="required")
            conversation.add(*await conversation.call_tools(turn))

    @reward
    def done(self) -> bool:
        return True


def ending_thoughts(form: TurnFormat, engine: VllmEngine) -> Sampling:
    """Return sampling that makes a random model end its reasoning at once."""
    closes = NEXT_MESSAGE if form.harmony else form.reasoning.close.strip() if form.reasoning else ""
    return Sampling(max_tokens=400, logit_bias=dict.fromkeys(engine.tokenizer.encode(closes)[:1], 100.0))


async def turns_of(
    environment: type[Environment], name: str, engine: VllmEngine, sampling: Callable[[TurnFormat], Sampling]
) -> list[Turn]:
    """Return the turns of a family's episodes, after checking that they are exact."""
    of = family(name)
    as_family(engine, of)
    turns: list[Turn] = []
    async with Run(environment, engine, sampling=sampling(of.form), limits=Limits(turns=2), seed=3) as run:
        async for trajectory in run:
            assert not trajectory.outcome.failed, trajectory.error
            assert_exact(trajectory)
            turns += trajectory.turns
    return turns


def assert_called(turns: list[Turn]) -> None:
    assert turns
    for turn in turns:
        assert turn.tool_calls
        assert {(call.name, call.error) for call in turn.tool_calls} == {("add", None)}


@pytest.mark.parametrize("name", sweeps.part(list(FAMILIES), 12))
async def test_required_calls_of_a_family_are_read_without_an_error(name: str, engine: VllmEngine) -> None:
    turns = await turns_of(Adder, name, engine, lambda form: ending_thoughts(form, engine))
    assert_called([turn for turn in turns if turn.finish is FinishReason.STOP])


class StrictAdder(Adder):
    """Environment in which the model chooses whether to call."""

    @tool(parallel=False, strict=True)
    def add(self, a: Literal[1, 25, 300], b: Literal["one", 'two "or" more'], exact: bool = True) -> str:
        """Add two numbers."""
        return super().add(a, b, exact)

    async def rollout(self, conversation: Any) -> None:
        await conversation.generate()


BY_THEMSELVES = ["Mistral 7B", "Kimi K2", "Gemma 4", "Hunyuan", "Qwen3", "LFM 2.5"]
"""Families whose calls begin with a control token, and whose prompts do not open a thought."""


@pytest.mark.parametrize("name", sweeps.part(BY_THEMSELVES, 6))
async def test_strict_call_begun_by_the_model_is_read(name: str, engine: VllmEngine) -> None:
    def calling(form: TurnFormat) -> Sampling:
        assert form.calls is not None
        (trigger,) = engine.tokenizer.encode(form.calls.trigger)
        return Sampling(max_tokens=100, logit_bias={trigger: 100.0})

    assert_called(await turns_of(StrictAdder, name, engine, calling))


def forced_ids(reply: Reply, encoder: ReplyEncoder, engine: VllmEngine) -> list[int]:
    """Return the ids of a reply. Some formats end a call with the stop id."""
    ids = list(encoder.encode(reply).ids)
    assert reply.stop is not None
    return ids if ids[-1] in engine.stop_ids else [*ids, reply.stop]


@pytest.mark.parametrize("name", sweeps.part(list(TEMPLATES), 12))
async def test_family_calls_are_read_and_ids_stay_as_sampled(name: str, engine: VllmEngine) -> None:
    of = family(name)
    said = played(of.form, *as_family(engine, of))
    encoder = ReplyEncoder(engine.tokenizer, of.template)
    ids = [forced_ids(reply, encoder, engine) for reply in said.replies]
    forced = force(engine, ids)
    async with Run(Library, forced, sampling=Sampling(max_tokens=512)) as run:
        (trajectory,) = [each async for each in run]
    assert_played(trajectory, said, of.form)
    assert_exact(trajectory, forced)
    assert [list(turn.token_ids) for turn in trajectory.turns] == ids
    sent = [list(each.prompt) for each in forced.calls]
    assert [list(turn.prompt_ids) for turn in trajectory.turns] == sent
    # The second round begins with the ids of the first one; so do later rounds, unless the template moves something.
    segments = [turn.segment for turn in trajectory.turns]
    assert segments[:2] == [0, 0]
    for number, prompt in enumerate(sent[1:]):
        before = [*sent[number], *ids[number]]
        follows = prompt[: len(before)] == before and len(prompt) > len(before)
        assert follows == (segments[number] == segments[number + 1])
