"""Invalid outputs of a token function: each is one error that names the field."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from runner import Environment, Outcome, Run, Task, TokenEngine, TokenOutput, TokenSampling, reward
from runner.engines.base import Delta, FinishReason, GenerationRequest
from runner.engines.function import stream
from runner.errors import EngineError
from runner.options import Limits, Sampling
from runner.testing.engine_under_test import drain
from runner.tokens.byte_tokenizer import ByteTokenizer
from tests.engines.engine_requests import STOP, request

pytestmark = [pytest.mark.anyio, pytest.mark.both_backends]

FIRST = [-0.5, -0.25]


def says(*outputs: Any, streamed: bool = True) -> TokenEngine:
    """Return an engine whose function returns these outputs."""

    async def stream(prompt: list[int], sampling: TokenSampling, *, session: str) -> AsyncIterator[TokenOutput]:
        for output in outputs:
            yield output

    async def whole(prompt: list[int], sampling: TokenSampling, *, session: str) -> TokenOutput:
        answer: TokenOutput = outputs[0]
        return answer

    return TokenEngine(
        stream if streamed else whole, tokenizer=ByteTokenizer(), template="hermes", context=100, takes=["logprobs"]
    )


async def ask(engine: TokenEngine, asked: GenerationRequest | None = None) -> list[Delta]:
    async with engine, engine.stream(asked or request(max_tokens=4)) as stream:
        return [delta async for delta in stream]


def stop(ids: list[int], logprobs: Any = None, **fields: Any) -> TokenOutput:
    return TokenOutput([*ids, STOP], [-0.5] * (len(ids) + 1) if logprobs is None else logprobs, "stop", **fields)


WRONG = {
    "no answer": (None, "gave None: give a TokenOutput"),
    "another answer": ([72, STOP], "gave a list: give a TokenOutput"),
    # wrong on purpose
    "ids are None": (TokenOutput(None, [], "length"), "gave None for token_ids"),  # type: ignore[arg-type]
    "ids are text": (TokenOutput("Hi", [], "length"), "gave 'Hi' for token_ids: give whole numbers"),  # type: ignore[arg-type]
    "an id past the vocabulary": (stop([9999]), r"gave the id 9999: the model's ids are 0 to \d+"),
    "an id below 0": (stop([-1]), "gave the id -1"),
    "no log-probabilities": (TokenOutput([72, STOP], None, "stop"), "gave no log-probabilities"),
    "too few log-probabilities": (stop([72], [-0.5]), "gave 1 log-probabilities of 2 ids"),
    "log-probabilities that are not numbers": (
        stop([72], [-0.5, None]),
        r"gave \[-0.5, None\] for logprobs: give a number",
    ),
    "NaN": (stop([72], [-0.5, float("nan")]), "gave the log-probability nan"),
    "minus infinity": (stop([72], [-0.5, float("-inf")]), "gave the log-probability -inf"),
    "probabilities": (stop([72], [0.9, 0.8]), "gave the log-probability 0.9: give logarithms"),
    "no finish": (TokenOutput([72, STOP], FIRST), "ended without a finish"),
    "another finish": (TokenOutput([72, STOP], FIRST, "completed"), "gave the finish 'completed': give one of stop"),
    "a stop id that is missing": (TokenOutput([72, 72], FIRST, "stop"), "gave the finish 'stop' without a stop id"),
    "a stop without any id": (TokenOutput([], [], "stop"), "gave the finish 'stop' without a stop id"),
    "ids after a stop id": (TokenOutput([STOP, 72], FIRST, "stop"), f"continued after the stop id {STOP}"),
    "a length that is a stop": (TokenOutput([72, STOP], FIRST, "length"), "gave the finish 'length' after a stop id"),
    "a length too early": (TokenOutput([72, 72], FIRST, "length"), "gave the finish 'length' after 2 ids: max_tokens"),
    "too many ids": (TokenOutput([72] * 5, [-0.5] * 5, "length"), "gave 5 ids: max_tokens is 4"),
    "a version that is a float": (stop([72], version=1.5), "gave the weight version 1.5"),
}


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(("output", "message"), WRONG.values(), ids=WRONG)
async def test_invalid_output_names_the_turn_and_the_field(output: Any, message: str, streamed: bool) -> None:
    with pytest.raises(EngineError, match=rf"^episode/main/0: generate\(\) {message}"):
        await ask(says(output, streamed=streamed))


async def test_turn_that_fills_the_context_has_finish_length() -> None:
    room = 98  # the context is 100, and the prompt has two ids
    (delta,) = await ask(says(TokenOutput([72] * room, [-0.5] * room, "length")), request(max_tokens=1000))
    assert delta.finish is not None
    assert delta.finish.reason is FinishReason.LENGTH


async def test_output_after_the_finish_is_an_error() -> None:
    read: list[Delta] = []
    engine = says(TokenOutput([72], [-0.5]), stop([73]), TokenOutput([74], [-0.5]))
    async with engine, engine.stream(request(max_tokens=9)) as stream:
        with pytest.raises(EngineError, match="continued after its finish"):
            await drain(stream, read)
    assert [list(delta.token_ids) for delta in read] == [[72]]


async def test_empty_stream_is_refused_as_ended_without_a_finish() -> None:
    with pytest.raises(EngineError, match="ended without a finish"):
        await ask(says())


@pytest.mark.parametrize(
    ("top", "message"),
    [
        (None, "the most likely ids of 0 positions of 2"),
        ([{72: -0.5}, {STOP: -0.5}], "gave 1 most likely id for a position: give 2"),
    ],
    ids=["none", "too few"],
)
async def test_missing_most_likely_ids_are_refused(top: Any, message: str) -> None:
    sampling = Sampling(logprobs=2, max_tokens=4).over(Sampling.defaults())
    asked = GenerationRequest(name="episode/main/0", prompt=[72], sampling=sampling, stop_ids=(STOP,))
    with pytest.raises(EngineError, match=message):
        await ask(says(stop([72], top=top)), asked)


async def test_output_after_the_turn_was_left_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_END_SECONDS", 0.01)
    late = anyio.Event()

    async def generate(prompt: list[int], sampling: TokenSampling, *, session: str) -> TokenOutput:
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await late.wait()
        return TokenOutput([72], [-0.5], "length", version="late")

    engine = TokenEngine(generate, tokenizer=ByteTokenizer(), template="hermes", context=100)
    async with engine:
        async with engine.stream(request(max_tokens=1)):
            await anyio.wait_all_tasks_blocked()
        late.set()
        await anyio.wait_all_tasks_blocked()
        assert (engine.stats().sampled_tokens, engine.weight_version) == (0, "")


async def test_numbers_of_other_libraries_are_taken() -> None:
    import numpy as np

    output = TokenOutput(np.array([72, STOP]), np.array(FIRST, dtype=np.float32), "stop")  # type: ignore[arg-type]
    (delta,) = await ask(says(output))
    assert (list(delta.token_ids), delta.logprobs) == ([72, STOP], FIRST)


async def test_function_without_async_is_refused_by_its_type_of_answer() -> None:
    def generate(prompt: list[int], sampling: TokenSampling, *, session: str) -> TokenOutput:
        return stop([72])

    engine = TokenEngine(generate, tokenizer=ByteTokenizer(), template="hermes", context=100)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="gave a TokenOutput in place of an answer: make it an `async def`"):
        await ask(engine)


class Question(Environment):
    def tasks(self) -> list[Task]:
        return [Task(id="0", prompt="Say something.")]

    @reward
    def any_answer(self) -> bool:
        return True


async def test_invalid_output_fails_the_episode_without_a_reward() -> None:
    async with Run(Question, says(stop([9999])), limits=Limits(stall_seconds=60), retries=0) as run:
        (trajectory,) = [trajectory async for trajectory in run]
    assert trajectory.outcome is Outcome.ENGINE_ERROR
    assert "gave the id 9999" in str(trajectory.error)
