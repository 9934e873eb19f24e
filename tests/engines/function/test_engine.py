"""The token engine: the same trajectories as with the engine that its function uses, and refusals before a turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from runner import (
    BadControl,
    BadOption,
    EngineDead,
    Environment,
    Outcome,
    RequestRejected,
    Run,
    Sampling,
    Task,
    TokenEngine,
    TokenFeature,
    TokenOutput,
    TokenSampling,
    Trajectory,
    reward,
    tool,
)
from runner.engines.base import Engine, FinishReason
from runner.engines.function import runtime, stream
from runner.errors import EngineError
from runner.testing import Latency, ScriptedEngine, assert_exact, call, force
from runner.testing.engine_under_test import wait_until
from runner.tokens.byte_tokenizer import ByteTokenizer
from tests.engines.engine_requests import STOP, request
from tests.engines.function.functions import EngineFunctions, engine_over
from tests.engines.remote.model_folder import byte_model

pytestmark = pytest.mark.anyio
both_backends = pytest.mark.both_backends


class Adder(Environment):
    """Environment with two turns: a call, and an answer."""

    def tasks(self) -> list[Task]:
        return [Task(id=str(number), prompt=f"What is {number} + 25?") for number in range(4)]

    @tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @reward
    def any_answer(self) -> bool:
        return True


async def play(engine: Engine, **options: Any) -> list[Trajectory]:
    async with Run(options.pop("environment", Adder), engine, seed=7, **options) as run:
        played = [trajectory async for trajectory in run]
    return sorted(played, key=lambda trajectory: trajectory.task.id)


def samples_of(trajectories: list[Trajectory]) -> list[Any]:
    """Sampled ids with their log-probabilities, and the outcome."""
    return [
        (each.outcome, [(s.log.ids, s.log.mask(), str(s.log.logprobs)) for s in each.segments], each.reward)
        for each in trajectories
    ]


async def say_hello(prompt: list[int], sampling: TokenSampling, *, session: str) -> TokenOutput:
    ids = [*ByteTokenizer().encode("Hello."), STOP]
    return TokenOutput(ids, [-0.5] * len(ids), sampling.finish_of(ids))


def over(generate: Any, **settings: Any) -> TokenEngine:
    return TokenEngine(generate, **{"tokenizer": ByteTokenizer(), "template": "hermes", "context": 2000, **settings})


# --- trajectories


@both_backends
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
async def test_run_over_a_function_equals_a_run_on_the_wrapped_engine(streamed: bool) -> None:
    script: Any = [[call("add", a=17, b=25)], "It is 42."]
    expected = await play(ScriptedEngine(script, chunks=3))
    async with ScriptedEngine(script, chunks=3) as inner:
        engine = engine_over(inner, streamed=streamed)
        played = await play(engine)
    assert samples_of(played) == samples_of(expected)
    assert {each.outcome for each in played} == {Outcome.COMPLETED}
    for trajectory in played:
        assert_exact(trajectory, engine)
        assert {span.version for segment in trajectory.segments for span in segment.log.versions} == {"scripted"}


@both_backends
async def test_stop_string_cuts_the_call_as_in_the_inner_engine() -> None:
    script, sampling = "It is 42, and that is that." * 20, Sampling(stop=(", and",))
    expected = await play(ScriptedEngine(script), sampling=sampling)
    async with ScriptedEngine(script, latency=Latency(between=1)) as inner:
        played = await play(engine_over(inner), sampling=sampling)
        assert inner.stats().sampled_tokens < 4 * len(script), "the engine did not sample to the end"
        assert inner.stats().open == 0
    assert samples_of(played) == samples_of(expected)
    assert played[0].turns[0].text == "It is 42"


@both_backends
async def test_conversations_have_distinct_sessions() -> None:
    async with ScriptedEngine([[call("add", a=17, b=25)], "It is 42."]) as inner:
        functions = EngineFunctions(inner)
        engine = TokenEngine(
            functions.streamed, tokenizer=inner.tokenizer, template=inner.template, context=inner.context
        )
        played = await play(engine)
    assert sum(len(each.turns) for each in played) == 2 * len(functions.sessions) == 8


@both_backends
async def test_version_of_an_output_is_stamped_on_turn_and_engine() -> None:
    versions: Iterator[str | int] = iter(["7", "7", 8, 8])

    async def generate(prompt: list[int], sampling: TokenSampling, *, session: str) -> AsyncIterator[TokenOutput]:
        yield TokenOutput([72, 105], [-0.5, -0.5], version=next(versions))
        yield TokenOutput([46, STOP], [-0.5, -0.5], "stop", next(versions))

    async with over(generate) as engine:
        assert engine.weight_version == ""
        for expected in (["7"], ["8"]):
            async with engine.stream(request()) as stream:
                _ = [delta async for delta in stream]
            assert stream.finish is not None
            assert [span.version for span in stream.finish.versions] == expected
            assert engine.weight_version == expected[-1]
        assert engine.lag("7") == 1


@both_backends
async def test_ids_of_two_versions_in_one_turn_have_two_spans() -> None:
    async def generate(prompt: list[int], sampling: TokenSampling, *, session: str) -> AsyncIterator[TokenOutput]:
        yield TokenOutput([72, 105], [-0.5, -0.5], version="7")
        yield TokenOutput([46, STOP], [-0.5, -0.5], "stop", "8")

    async with over(generate) as engine, engine.stream(request()) as stream:
        _ = [delta async for delta in stream]
    assert stream.finish is not None
    assert [(s.version, s.start, s.end) for s in stream.finish.versions] == [("7", 0, 2), ("8", 2, 4)]


@both_backends
@pytest.mark.parametrize(
    ("kind", "temperature", "kept"),
    [("processed", 0.5, True), ("raw", 1.0, True), ("raw", 0.5, False), ("none", 1.0, False)],
)
async def test_log_probabilities_of_another_distribution_are_not_kept(
    kind: str, temperature: float, kept: bool
) -> None:
    asked = request()
    asked = replace(asked, sampling=replace(asked.sampling, temperature=temperature))
    async with over(say_hello, logprobs=kind) as engine, engine.stream(asked) as stream:
        (delta,) = [delta async for delta in stream]
    assert (delta.logprobs is not None) == kept


async def test_tokenizer_template_and_stop_ids_come_from_the_folder(tmp_path: Path) -> None:
    folder = byte_model(tmp_path / "model")
    async with TokenEngine(say_hello, tokenizer=folder, context=2000) as engine:
        assert engine.stop_ids == (STOP,)
        assert engine.tokenizer.encode("Hi") == [72, 105]
        assert engine.vocabulary >= engine.tokenizer.size
        async with engine.stream(request()) as stream:
            assert [list(delta.token_ids)[-1] async for delta in stream] == [STOP]


# --- its end


@both_backends
async def test_leaving_a_turn_cancels_its_call_and_waits_for_its_clean_up() -> None:
    events: list[str] = []

    async def generate(prompt: list[int], sampling: TokenSampling, *, session: str) -> TokenOutput:
        events.append("called")
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.01)
            events.append("cleaned up")
        raise AssertionError

    async with over(generate) as engine:
        async with engine.stream(request()) as stream:
            await anyio.wait_all_tasks_blocked()
        assert events == ["called", "cleaned up"]
        assert stream.finish is not None
        assert stream.finish.reason is FinishReason.ABORT
        assert engine.stats().open == 0


@pytest.mark.asyncio_alone
async def test_cancellation_comes_once_and_clean_up_needs_no_shield() -> None:
    cleaned: list[str] = []

    async def generate(prompt: list[int], sampling: TokenSampling, *, session: str) -> AsyncIterator[TokenOutput]:
        try:
            await asyncio.Event().wait()
            yield TokenOutput([72], [-0.5])
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # as vLLM's own generate() aborts its request
            await asyncio.sleep(0)
            cleaned.append(session)
            raise

    async with over(generate) as engine:
        with anyio.CancelScope() as scope:
            async with engine.stream(request()) as stream:
                await anyio.wait_all_tasks_blocked()
                scope.cancel()
                _ = [delta async for delta in stream]
        assert scope.cancelled_caught
        assert len(cleaned) == 1


@both_backends
async def test_cut_call_keeps_its_output_though_clean_up_raises() -> None:
    async def generate(prompt: list[int], sampling: TokenSampling, *, session: str) -> AsyncIterator[TokenOutput]:
        yield TokenOutput([72, 105], [-0.5, -0.5])
        try:
            await anyio.sleep_forever()
        finally:
            raise OSError("the connection is gone already")

    async with over(generate) as engine, engine.stream(request()) as stream:
        await anyio.wait_all_tasks_blocked()
    assert [list(delta.token_ids) for delta in stream.rest] == [[72, 105], []]
    assert stream.finish is not None
    assert stream.finish.reason is FinishReason.ABORT


@both_backends
async def test_exception_in_a_function_fails_its_turn_alone() -> None:
    async def generate(prompt: list[int], sampling: TokenSampling, *, session: str) -> TokenOutput:
        if prompt == [1]:
            raise OSError("no route to host")
        return await say_hello(prompt, sampling, session=session)

    async with over(generate) as engine:
        with pytest.raises(
            EngineError, match=r"^episode/main/0: generate\(\) raised OSError: no route to host"
        ) as raised:
            async with engine.stream(request(prompt=[1])) as stream:
                _ = [delta async for delta in stream]
        assert isinstance(raised.value.__cause__, OSError)
        async with engine.stream(request()) as stream:
            assert len([delta async for delta in stream]) == 1


@pytest.mark.asyncio_alone
async def test_a_cancellation_of_the_functions_own_is_an_error_of_its_turn() -> None:
    async def generate(prompt: list[int], sampling: TokenSampling, *, session: str) -> TokenOutput:
        raise asyncio.CancelledError

    async with over(generate) as engine, engine.stream(request()) as stream:
        with pytest.raises(EngineError, match="raised a cancellation that was not requested"):
            _ = [delta async for delta in stream]


@both_backends
async def test_engine_dead_of_a_function_ends_the_run() -> None:
    async def generate(prompt: list[int], sampling: TokenSampling, *, session: str) -> TokenOutput:
        raise EngineDead("the trainer's servers are gone")

    with pytest.raises(EngineDead, match="the trainer's servers are gone"):
        await play(over(generate))


@both_backends
async def test_exit_ends_every_call_even_slow_ones() -> None:
    ended: list[str] = []

    async def generate(prompt: list[int], sampling: TokenSampling, *, session: str) -> TokenOutput:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(session)
        raise AssertionError

    async with over(generate) as engine:
        stream = engine.stream(request())
        await stream.__aenter__()
        await anyio.wait_all_tasks_blocked()
    assert len(ended) == 1
    with pytest.raises(EngineDead, match="was stopped"):
        await anext(stream)
    await stream.__aexit__(None, None, None)


@pytest.mark.asyncio_alone
async def test_leaving_the_engine_cancels_a_call_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_END_SECONDS", 0.01)
    monkeypatch.setattr(runtime, "_AGAIN_SECONDS", 0.01)
    cancelled: list[int] = []

    async def generate(prompt: list[int], sampling: TokenSampling, *, session: str) -> TokenOutput:
        while len(cancelled) < 3:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(1)
        raise asyncio.CancelledError

    async with over(generate) as engine:
        async with engine.stream(request()) as left:
            await anyio.wait_all_tasks_blocked()
        assert cancelled == [1]
        assert left.finish is not None
        assert left.finish.reason is FinishReason.ABORT
        assert engine.stats().open == 0
    assert cancelled == [1, 1, 1]


# --- refusals


CANNOT = {
    "update_weights": lambda engine: engine.update_weights("a folder"),
    "add_adapter": lambda engine: engine.add_adapter("poet", "a folder"),
    "remove_adapter": lambda engine: engine.remove_adapter("poet"),
    "reset_prefix_cache": lambda engine: engine.reset_prefix_cache(),
    "sleep": lambda engine: engine.sleep(),
    "start_profile": lambda engine: engine.start_profile(),
    "keep": lambda engine: engine.pause("keep"),
}


@both_backends
@pytest.mark.parametrize("control", CANNOT.values(), ids=CANNOT)
async def test_owner_only_calls_are_refused_and_the_engine_continues(control: Any) -> None:
    async with over(say_hello) as engine:
        with pytest.raises(BadControl, match=r"the owner of generate\(\)'s engine|mode='wait'"):
            await control(engine)
        async with engine.stream(request()) as stream:
            assert len([delta async for delta in stream]) == 1


SETTINGS = {
    "top_p": Sampling(top_p=0.9),
    "top_k": Sampling(top_k=5),
    "min_p": Sampling(min_p=0.1),
    "min_tokens": Sampling(min_tokens=3),
    "repetition_penalty": Sampling(repetition_penalty=1.1),
    "presence_penalty": Sampling(presence_penalty=0.5),
    "frequency_penalty": Sampling(frequency_penalty=0.5),
    "logit_bias": Sampling(logit_bias={72: 1}),
    "bad_words": Sampling(bad_words=("no",)),
    "logprobs": Sampling(logprobs=2),
    "constraint": Sampling(regex="[ab]+"),
}


@pytest.mark.parametrize("feature", list(TokenFeature))
async def test_unsupported_setting_is_refused_before_an_episode(
    feature: TokenFeature,
) -> None:
    called: list[str] = []

    async def generate(prompt: list[int], sampling: TokenSampling, *, session: str) -> TokenOutput:
        called.append(session)
        return await say_hello(prompt, sampling, session=session)

    with pytest.raises(BadOption, match=rf"TokenEngine\(takes=\['{feature}'\]\)"):
        await play(over(generate), sampling=SETTINGS[feature])
    async with over(generate) as engine, anyio.create_task_group():
        asked = request()
        given = SETTINGS[feature].over(asked.sampling)
        if feature is not TokenFeature.CONSTRAINT:
            with pytest.raises(RequestRejected, match=feature):
                engine.stream(replace(asked, sampling=given))
    assert called == []
    others = [each for each in TokenFeature if each is not feature]
    over(generate, takes=[feature]).check_sampling(SETTINGS[feature].over(Sampling.defaults()))
    with pytest.raises(BadOption):
        over(generate, takes=others).check_sampling(SETTINGS[feature].over(Sampling.defaults()))


class Required(Adder):
    tool_choice = "required"


class Strict(Environment):
    def tasks(self) -> list[Task]:
        return [Task(id="0", prompt="What is 17 + 25?")]

    @tool(strict=True)
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @reward
    def any_answer(self) -> bool:
        return True


@pytest.mark.parametrize("environment", [Required, Strict])
async def test_grammar_calls_are_refused_before_an_episode(environment: Any) -> None:
    with pytest.raises(BadOption, match="generate\\(\\) enforces no grammar, which required and strict tool calls"):
        await play(over(say_hello), environment=environment)


async def test_adapter_must_be_one_of_those_given_for_the_function() -> None:
    asked: list[str | None] = []

    async def generate(prompt: list[int], sampling: TokenSampling, *, session: str) -> TokenOutput:
        asked.append(sampling.adapter)
        return await say_hello(prompt, sampling, session=session)

    with pytest.raises(BadOption, match="it has none"):
        await play(over(generate), sampling=Sampling(adapter="poet"))
    await play(over(generate, adapters=["poet"]), sampling=Sampling(adapter="poet"))
    assert asked == ["poet"] * 4


def test_ids_cannot_be_forced() -> None:
    with pytest.raises(BadOption, match=r"force\(\): a TokenEngine cannot force ids"):
        force(over(say_hello), [[72, STOP]])


async def positional(prompt: list[int], sampling: TokenSampling) -> TokenOutput:
    raise AssertionError


class Somebodys:
    """A tokenizer of another library."""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"generate": "a name"}, "give a function, `async def generate"),
        ({"generate": positional}, r"positional\): give a function to call as .* unexpected keyword .*'session'"),
        ({"context": 1}, r"context=1\): give a whole number of at least 2"),
        ({"places": 0}, r"places=0\): give a whole number"),
        ({"takes": "temperature"}, r"takes=\['temperature'\]\): give some of top_p"),
        ({"logprobs": "some"}, r"logprobs='some'\): give one of processed, raw, none"),
        ({"stop_ids": []}, "no id would end a turn"),
        ({"template": None}, "a tokenizer alone has no chat template"),
        ({"tokenizer": Somebodys()}, r"tokenizer=Somebodys\): give the folder .* `tokenizer.name_or_path`"),
        ({"adapters": ["a b"]}, "adapter 'a b'"),
    ],
)
def test_invalid_option_is_refused_at_construction(settings: dict[str, Any], message: str) -> None:
    generate = settings.pop("generate", say_hello)
    with pytest.raises(BadOption, match=message):
        over(generate, **settings)


async def test_a_stop_id_past_the_vocabulary_is_refused() -> None:
    with pytest.raises(BadOption, match="99999 is not an id"):
        async with over(say_hello, stop_ids=[99_999]):
            raise AssertionError


async def test_paused_engine_makes_no_call_and_resumes_waiting_turns() -> None:
    async with ScriptedEngine("Hello.", latency=Latency(between=1)) as inner:
        expected = samples_of(await play(engine_over(inner)))
        engine = engine_over(inner)
        async with engine, anyio.create_task_group() as group:
            played: list[Trajectory] = []

            async def go() -> None:
                played.extend(await play(engine))

            await engine.pause("wait")
            group.start_soon(go)
            with anyio.fail_after(300):
                await wait_until(lambda: engine.stats().waiting > 0)
            assert engine.stats().open == 0
            await engine.resume()
    assert samples_of(played) == expected


def test_vllm_arguments_are_those_of_our_own_engine() -> None:
    asked = request(max_tokens=5, seed=3)
    arguments = TokenSampling.of(asked).vllm_arguments()
    assert (arguments["max_tokens"], arguments["seed"], arguments["stop_token_ids"]) == (5, 3, [STOP])
    assert not {"flat_logprobs", "stream_interval", "extra_args"} & set(arguments)
