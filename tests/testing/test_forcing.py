"""Forced ids without a model: the turn that gets each list of ids, and the texts of refusals."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from runner import Conversation, Environment, Outcome, Run, Sampling, Task, Trajectory, VllmEngine, reward
from runner.engines.base import FinishReason, GenerationRequest
from runner.errors import BadOption, RequestRejected
from runner.options import Constraint, ConstraintKind
from runner.testing import FORCING, Latency, ScriptedEngine, assert_exact, force
from runner.testing.forcing import ForcedEngine

pytestmark = pytest.mark.anyio

STOP_ID = 257  # <|im_end|> in the scripted engine's vocabulary


def test_the_kit_loads_no_engine() -> None:
    code = "import runner.testing, sys; print(*{'torch', 'vllm', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


class Talk(Environment):
    """Environment with two turns of the main agent, and one turn of a judge between them."""

    def tasks(self) -> list[Task]:
        return [Task(id=name, prompt=f"Question {name}?") for name in ("a", "b")]

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate()
        judge = self.episode.conversation("judge", prompt="Was that right?")
        await judge.generate()
        conversation.add("Continue.")
        await conversation.generate()

    @reward
    def spoke(self) -> bool:
        return len(self.episode.turns) == 2


def ids_of(text: str) -> list[int]:
    return [*text.encode(), STOP_ID]


async def played(engine: ForcedEngine, **options: Any) -> list[Trajectory]:
    async with Run(Talk(), engine, **options) as run:
        trajectories = [trajectory async for trajectory in run]
    for trajectory in trajectories:
        assert_exact(trajectory, engine)
    return trajectories


def said(engine: ForcedEngine) -> set[tuple[str, str]]:
    tokenizer = engine.tokenizer
    return {(call.name, tokenizer.decode([i for i in call.sampled if i != STOP_ID])) for call in engine.calls}


async def test_a_list_is_read_from_its_beginning_by_every_conversation() -> None:
    engine = force(ScriptedEngine("free"), [ids_of("one"), ids_of("two")])
    episodes = {trajectory.id for trajectory in await played(engine)}
    turns = (("main/0", "one"), ("judge/0", "one"), ("main/1", "two"))
    assert said(engine) == {(f"{episode}/{name}", text) for episode in episodes for name, text in turns}
    assert len(said(engine)) == 6


async def test_agents_without_a_list_and_turns_that_are_none_are_free() -> None:
    engine = force(ScriptedEngine("free"), {"main": [None, ids_of("two")]})
    await played(engine)
    assert {text for name, text in said(engine) if name.endswith("main/1")} == {"two"}
    assert {text for name, text in said(engine) if not name.endswith("main/1")} == {"free"}


async def test_forcing_function_receives_episode_agent_and_turn() -> None:
    engine = force(ScriptedEngine("free"), lambda asked: ids_of(f"{asked.episode} {asked.agent} {asked.turn}"))
    await played(engine)
    assert {text for _, text in said(engine)} == {name.replace("/", " ") for name, _ in said(engine)}
    assert len(engine.calls) == 6


async def test_foreign_integers_are_ids_and_scripts_are_copied() -> None:
    numpy = pytest.importorskip("numpy")
    first = ids_of("one")
    engine = force(ScriptedEngine("free"), [first, numpy.array(ids_of("two"))])
    first.clear()
    await played(engine)
    assert {text for _, text in said(engine)} == {"one", "two"}


async def test_wrapped_engine_is_entered_once_and_marked_forced() -> None:
    beneath = ScriptedEngine("free")
    engine = force(beneath, [ids_of("one")] * 2)
    async with engine:
        assert (engine.running, beneath.running) == (True, True)
        async with force(beneath, [ids_of("two")] * 2) as other:
            assert engine.describe() == {**beneath.describe(), "forced": engine.describe()["forced"]}
            assert engine.describe() != other.describe()
        await engine.health()
        assert engine.places == beneath.places
        assert engine.stats() == beneath.stats()
    assert (engine.running, beneath.running) == (False, False)


@pytest.mark.parametrize("script", [[72, STOP_ID], "text", 7, [["a", "b"]], {"main": 3}, [[1.5]]], ids=repr)
def test_script_that_is_not_a_list_of_turns_is_refused_at_once(script: Any) -> None:
    with pytest.raises(BadOption, match=r"a list of (turns|token ids)"):
        force(ScriptedEngine("free"), script)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "no logits processor"),
        ({**FORCING, "logits_processors": ["mine:Other"]}, "no logits processor"),
        ({**FORCING, "logprobs_mode": "processed_logprobs"}, "'processed_logprobs'"),
        ({"logits_processors": FORCING["logits_processors"]}, "'processed_logprobs'"),
        ({**FORCING, "logprobs_mode": "raw_logits"}, "'raw_logits'"),
    ],
    ids=["none", "another", "processed", "default mode", "logits"],
)
def test_an_engine_that_cannot_be_forced_is_refused_before_it_starts(arguments: Mapping[str, Any], said: str) -> None:
    with pytest.raises(BadOption, match=said) as refused:
        force(VllmEngine("smollm2-135m", **arguments), [[1, 2]])
    assert "VllmEngine(model, **FORCING)" in str(refused.value)
    force(VllmEngine("smollm2-135m", **FORCING), [[1, 2]])


def request(max_tokens: int = 8, constraint: Constraint | None = None) -> GenerationRequest:
    sampling = replace(Sampling.defaults(), max_tokens=max_tokens, stop_ids=(99,))
    return GenerationRequest(
        name="e/main/0", prompt=[72, 105], sampling=sampling, stop_ids=(STOP_ID,), constraint=constraint
    )


async def sampled(engine: ForcedEngine, wanted: GenerationRequest) -> tuple[list[int], FinishReason]:
    async with engine, engine.stream(wanted) as stream:
        ids = [token_id async for delta in stream for token_id in delta.token_ids]
    assert stream.finish is not None
    assert list(engine.calls[0].sampled) == ids
    assert engine.calls[0].finish == stream.finish
    return ids, stream.finish.reason


@pytest.mark.parametrize(
    ("ids", "kept", "reason"),
    [
        ([1, 2, STOP_ID], [1, 2, STOP_ID], FinishReason.STOP),
        ([1, 2, 99], [1, 2, 99], FinishReason.STOP),
        ([*range(8)], [*range(8)], FinishReason.LENGTH),
        ([*range(20), STOP_ID], [*range(8)], FinishReason.LENGTH),
    ],
    ids=["the model's stop", "the author's stop", "exactly full", "cut"],
)
async def test_a_turn_ends_by_its_own_stop_or_is_cut(ids: list[int], kept: list[int], reason: FinishReason) -> None:
    engine = ScriptedEngine("free")
    # The scripted engine uses only the stops of a request, not the stops of its sampling.
    wanted = replace(request(), stop_ids=(STOP_ID, 99))
    assert await sampled(force(engine, [ids]), wanted) == (kept, reason)


async def test_a_stop_id_before_min_tokens_cannot_be_forced() -> None:
    wanted = replace(request(), sampling=replace(request().sampling, min_tokens=4))
    with pytest.raises(RequestRejected, match=r"the stop id 257 is forced after 2 ids, but Sampling\(min_tokens=4\)"):
        await sampled(force(ScriptedEngine("free"), [[1, 2, STOP_ID]]), wanted)
    assert await sampled(force(ScriptedEngine("free"), [[1, 2, 3, 4, STOP_ID]]), wanted) == (
        [1, 2, 3, 4, STOP_ID],
        FinishReason.STOP,
    )


@pytest.mark.parametrize(
    ("ids", "constraint", "said"),
    [
        ([1, 2, 3], None, r"3 ids are forced, none is a stop id, .* continues to 8 ids: add a stop id \(99, 257\), or"),
        ([], None, r"0 ids are forced, .* continues to 8 ids: add a stop id \(99, 257\)\.$"),
        ([1, STOP_ID, 3], None, "the stop id 257 ends the turn after 2 ids, so the 1 ids after it"),
        ([1, 400, STOP_ID], None, "400 cannot be forced: the model's ids are 0 to"),
        ([-1, STOP_ID], None, "-1 cannot be forced"),
        ([1, STOP_ID], Constraint(ConstraintKind.REGEX, "[0-9]+"), r"constrained \(regex\).*tool_choice='auto'"),
    ],
    ids=["too few", "none at all", "after a stop", "past the vocabulary", "negative", "grammar"],
)
async def test_a_turn_that_cannot_be_sampled_as_written_is_refused(
    ids: list[int], constraint: Constraint | None, said: str
) -> None:
    engine = force(ScriptedEngine("free"), [ids])
    with pytest.raises(RequestRejected, match=said):
        await sampled(engine, request(constraint=constraint))
    assert engine.calls == []


async def test_a_refusal_is_the_episodes_error_and_is_not_tried_again() -> None:
    engine = force(ScriptedEngine("free"), {"main": [ids_of("one")]})
    trajectories = await played(engine, breaker=1.0)
    assert {trajectory.outcome for trajectory in trajectories} == {Outcome.ENGINE_ERROR}
    assert {trajectory.attempt for trajectory in trajectories} == {0}
    for trajectory in trajectories:
        assert "force() has ids for 1 turns of this conversation, and this is turn number 2" in trajectory.error
        assert trajectory.turns[0].text == "one"


class Deaf(ScriptedEngine):
    """Engine that ignores the forced ids."""

    def stream(self, request: GenerationRequest) -> Any:
        return super().stream(replace(request, extra={}))


async def test_engine_with_other_ids_is_rejected_at_the_first() -> None:
    engine = force(Deaf("one"), [ids_of("only")])
    with pytest.raises(RequestRejected, match=r"e/main/0: the engine sampled 101, not the forced 108"):
        await sampled(engine, request())
    assert engine.inner.stats().open == 0


async def test_a_turn_that_is_left_early_keeps_what_was_sampled() -> None:
    engine = force(ScriptedEngine("free", chunks=2, latency=Latency(between=1)), [ids_of("sixteen letters.")])
    async with engine, engine.stream(request(max_tokens=100)) as stream:
        async for _ in stream:
            break
    assert list(engine.calls[0].sampled[:2]) == [*b"si"]
    assert list(engine.calls[0].sampled) == [*b"si", *(i for delta in stream.rest for i in delta.token_ids)]
    assert engine.calls[0].finish == stream.finish
