"""Batches on the scripted engine: the result of each row, and refusals before anything is sampled."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from runner import BadBatch, EngineDead, EngineError, EngineStalled, RequestRejected, ScriptedEngine
from runner.generation import Generation, verify_right_padding
from runner.testing import Fault, Latency, ModelCall, Reply
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.log import VersionSpan
from tests.generation.batching import EOS_ID, Kind, array, collect, generating, loudly, padded, rows_of, texts_of

pytestmark = [pytest.mark.anyio, pytest.mark.both_backends]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("kind", ["torch", "numpy"])
async def test_a_batch_comes_back_as_prompt_then_sampled_ids_then_padding(kind: Kind, dtype: str) -> None:
    async with generating(config={"_pad_token_id": 9}) as (generation, engine):
        output: Any = await generation.generate(padded(["ab", "cde", "f"], kind=kind, pad=9, width=6, dtype=dtype))
    expected = [[*b"abAB", EOS_ID, 9, 9], [*b"cdeCDE", EOS_ID], [*b"fF", EOS_ID, 9, 9, 9, 9]]
    assert output["output_ids"].tolist() == expected
    assert output["generation_lengths"].tolist() == [3, 4, 2]
    assert output["unpadded_sequence_lengths"].tolist() == [5, 7, 3]
    assert output["truncated"].tolist() == [False, False, False]
    assert output["finish_reasons"] == ["stop"] * 3
    types = {name: str(values.dtype).removeprefix("torch.") for name, values in output.items() if not _is_list(values)}
    assert types == {
        "output_ids": dtype,
        "generation_lengths": "int64",
        "unpadded_sequence_lengths": "int64",
        "logprobs": "float32",
        "truncated": "bool",
    }
    wanted = torch.Tensor if kind == "torch" else np.ndarray
    assert all(isinstance(values, wanted) for values in output.values() if not _is_list(values))
    assert verify_right_padding(output, 9) == (True, None)
    assert len(engine.calls) == 3


def _is_list(values: object) -> bool:
    return isinstance(values, list)


async def test_log_probabilities_and_versions_are_aligned_with_ids() -> None:
    async with generating() as (generation, engine):
        output = await generation.generate(padded(["ab", "cde", "f"]))
    for row, prompt in enumerate(("ab", "cde", "f")):
        (call,) = [call for call in engine.calls if list(call.prompt) == list(prompt.encode())]
        sampled = list(call.logprobs or ())
        rest = output["logprobs"].shape[1] - len(prompt) - len(sampled)
        expected = [0.0] * len(prompt) + sampled + [0.0] * rest
        assert output["logprobs"][row].tolist() == pytest.approx(expected)
        spans = [VersionSpan("scripted", len(prompt), len(prompt) + len(sampled))]
        assert output["weight_versions"][row] == spans


async def test_an_engine_without_log_probabilities_leaves_nan_and_not_zero() -> None:
    async with generating(logprobs=False) as (generation, _):
        output = await generation.generate(padded(["ab", "c"]))
    nan = math.nan
    assert np.array_equal(output["logprobs"], [[0, 0, nan, nan, nan], [0, nan, nan, 0, 0]], equal_nan=True)


@pytest.mark.parametrize("lone_finish", [False, True], ids=["", "finish alone"])
@pytest.mark.parametrize("chunks", [None, 1, 3, (1, 4), "whole", "random"], ids=str)
async def test_batch_is_the_same_for_every_cut_of_the_stream(chunks: Any, lone_finish: bool) -> None:
    prompts = ["", "a", "stop", "a longer prompt, é", "b" * 40]
    async with generating(
        lambda asked: f"Re: {asked.prompt}, and so on",
        {"stop_strings": ["op, a"]},
        chunks=chunks,
        lone_finish=lone_finish,
    ) as (generation, _):
        output = await generation.generate(padded([f"> {prompt}" for prompt in prompts]))
    expected = [f"Re: > {prompt}" + (", a" if prompt == "stop" else ", and so on") for prompt in prompts]
    assert texts_of(output) == expected
    assert output["finish_reasons"] == ["stop"] * 5


async def test_many_rows_on_few_places_all_come_back_in_their_order() -> None:
    prompts = [f"{number}{'x' * (number % 7)}" for number in range(300)]
    async with generating(places=3, latency=Latency(jitter=4)) as (generation, engine):
        output = await generation.generate(padded(prompts))
    assert texts_of(output) == [prompt.upper() for prompt in prompts]
    assert len(engine.calls) == 300


async def test_batch_without_rows_returns_empty_without_a_request() -> None:
    batch = {"input_ids": torch.zeros((0, 0), dtype=torch.int64), "input_lengths": torch.zeros(0, dtype=torch.int64)}
    async with generating() as (generation, engine):
        output = await generation.generate(batch)
        assert await generation.generate_text({"prompts": []}) == {"texts": []}
    assert output["output_ids"].shape == output["logprobs"].shape == (0, 0)
    assert output["generation_lengths"].shape == output["truncated"].shape == (0,)
    assert engine.calls == []


# --- stop strings


CHATTER = "one, two; three. four! five"


@pytest.mark.parametrize("chunks", [1, 2, 3, (1, 4), "whole"], ids=str)
async def test_stop_strings_of_configuration_and_sample_are_merged(chunks: Any) -> None:
    batch = padded(["a", "b", "c", "d", "e"])
    batch["stop_strings"] = [["two;"], [], None, ["nowhere", "re"], "one"]
    async with generating(lambda _: Reply(CHATTER, chunks=chunks), {"stop_strings": ["! f", "fi"]}) as (
        generation,
        engine,
    ):
        output = await generation.generate(batch)
    upto = CHATTER[: CHATTER.index(" five") + 2]
    assert texts_of(output) == ["one, two;", upto, upto, "one, two; thre", "one"]
    assert output["truncated"].tolist() == [False] * 5
    asked = {bytes(list(call.prompt)).decode(): call.sampling.stop for call in engine.calls}
    assert asked["a"] == ("! f", "fi", "two;")
    assert asked["b"] == asked["c"] == ("! f", "fi")


async def test_ids_up_to_the_end_of_a_stop_string_are_kept() -> None:
    tokenizer = ByteTokenizer(added_tokens=["bZ"])
    more = tokenizer.token_id("bZ")
    async with generating("xxabZyy", {"stop_strings": ["ab"]}, tokenizer=tokenizer, chunks="whole") as (
        generation,
        engine,
    ):
        output = await generation.generate(padded(["?"]))
        texts = await generation.generate_text({"prompts": ["?"]})
    assert rows_of(output) == [[*b"?xxa", more]]
    assert output["generation_lengths"].tolist() == [4]
    assert output["logprobs"][0, 1:].tolist() == pytest.approx(list(engine.calls[0].logprobs or ())[:4])
    assert texts == {"texts": ["xxab"]}


# --- sampling


async def test_every_setting_reaches_the_engine() -> None:
    config = {"max_new_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop_token_ids": [10, EOS_ID]}
    config["bad_words"] = ["moon"]
    async with generating(config=config) as (generation, engine):
        await generation.generate(padded(["a"]))
        await generation.generate(padded(["a"]), True)
    sampled, greedy = (call.sampling for call in engine.calls)
    assert (sampled.max_tokens, sampled.temperature, sampled.top_p, sampled.top_k) == (7, 0.5, 0.9, 3)
    assert (greedy.max_tokens, greedy.temperature, greedy.top_p, greedy.top_k) == (7, 0, 1, 1)
    assert sampled.bad_words == greedy.bad_words == ("moon",)
    assert [call.stop_ids for call in engine.calls] == [(EOS_ID, 10)] * 2
    assert [call.seed for call in engine.calls] == [None, None]


def drawn(asked: ModelCall) -> str:
    return str(asked.rng.random())


async def test_samples_with_a_seed_do_not_depend_on_the_number_of_rows() -> None:
    said = []
    for places in (1, 4, 64):
        async with generating(drawn, {"seed": 5}, places=places, latency=Latency(jitter=3)) as (generation, _):
            said.append([texts_of(await generation.generate(padded(["a"] * 8))) for _ in range(2)])
    assert said[0] == said[1] == said[2]
    first, second = said[0]
    assert len({*first, *second}) == 16


async def test_a_seed_of_the_batch_counts_whatever_was_generated_before() -> None:
    batch = padded(["a", "a"])
    async with generating(drawn, {"seed": 5}) as (generation, _):
        first = texts_of(await generation.generate(batch, seed=1))
        await generation.generate(batch)
        again = texts_of(await generation.generate(batch, seed=1))
        other = texts_of(await generation.generate(batch, seed=2))
    async with generating(drawn) as (generation, engine):
        assert texts_of(await generation.generate(batch, seed=1)) == first == again
        await generation.generate(batch, True, seed=1)
        assert [call.seed for call in engine.calls[2:]] == [None, None]
    assert len({*first, *other}) == 4


# --- room


async def test_row_without_room_returns_unchanged_and_not_truncated() -> None:
    prompts = ["abc", "x" * 8, "y" * 9, "z" * 7]
    async with generating(lambda _: "much too long", context=8) as (generation, engine):
        output = await generation.generate(padded(prompts))
    assert rows_of(output) == [[*b"abc", *b"much "], [*b"xxxxxxxx"], [*b"yyyyyyyyy"], [*b"zzzzzzz", *b"m"]]
    assert output["generation_lengths"].tolist() == [5, 0, 0, 1]
    assert output["truncated"].tolist() == [True, False, False, True]
    assert output["finish_reasons"] == ["context"] * 4
    assert output["logprobs"][1].tolist() == [0.0] * 9
    assert sorted(len(call.prompt) for call in engine.calls) == [3, 7]


async def test_the_trainers_own_context_counts_where_it_is_less() -> None:
    config = {"max_new_tokens": 4, "vllm_cfg": {"max_model_len": 6}}
    async with generating(lambda _: "much too long", config, context=100) as (generation, _):
        output = await generation.generate(padded(["a", "abcd", "abcdef"]))
    assert output["generation_lengths"].tolist() == [4, 2, 0]
    assert output["finish_reasons"] == ["length", "context", "context"]
    assert output["truncated"].tolist() == [True, True, False]


# --- bad batches


def changed(**fields: Any) -> dict[str, Any]:
    return {**padded(["abc", "de"]), **fields}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([[1, 2]], "the batch is a list: give a dictionary"),
        ({"input_ids": array([[1]])}, "the batch has no input_lengths, only input_ids"),
        (changed(input_ids=array([[0, 1, 2], [1, 2, 3]])), "row 1: input_ids holds 3 at position 2, where the padding"),
        (changed(input_lengths=array([3, 4])), "row 1: input_lengths is 4, but a row has 3 positions"),
        (changed(input_lengths=array([3, 0]), input_ids=array([[1, 2, 3], [0, 0, 0]])), "row 1: input_lengths is 0"),
        (
            changed(input_ids=array([[97, 98, 99], [97, 151645, 0]])),
            r"row 1: 151645 at position 1 .* vocabulary of 259:",
        ),
        (
            changed(input_ids=array([[97, -100, 99], [97, 98, 0]])),
            "row 0: -100 at position 1 is not an id of the engine's",
        ),
        (
            changed(input_ids=array([[1, 2, 3], [1, 2, 0]], dtype="uint8")),
            "the type uint8, which cannot hold .* 259 ids",
        ),
        (changed(input_ids=array([[1, 2, 3], [1, 2, 0]], dtype="float32")), "input_ids holds float32: give integers"),
        (changed(stop_strings=[["a"]]), "stop_strings = .* for each of the 2 rows"),
        (changed(stop_strings="ab"), "stop_strings = 'ab': give a list"),
        (
            changed(stop_strings=[None, [""]]),
            r"row 1: stop_strings = \[''\]: give a list of strings, none of them empty",
        ),
        (changed(vllm_images=[[], ["picture"]]), "the batch has vllm_images: the engines here take token ids only"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_batch_is_one_error_that_names_the_row(batch: Any, message: str) -> None:
    async with generating() as (generation, engine):
        with pytest.raises(BadBatch, match=message):
            generation.generate_async(batch)
        with pytest.raises(BadBatch, match=message):
            await generation.generate(batch)
        assert engine.stats().sampled_tokens == 0
    assert engine.calls == []


async def test_padding_that_the_type_of_the_ids_cannot_hold_is_refused() -> None:
    async with generating(config={"_pad_token_id": -1}) as (generation, _):
        with pytest.raises(BadBatch, match="cannot hold both the padding id -1 and the 259 ids of the vocabulary"):
            await generation.generate(padded(["ab"], dtype="uint16"))
        output = await generation.generate(padded(["ab", "a"], pad=-1, dtype="int16"))
    assert output["output_ids"].tolist() == [[*b"abAB", EOS_ID], [*b"aA", EOS_ID, -1, -1]]


@pytest.mark.parametrize("pad", [99_999, -100])
async def test_padding_may_be_an_id_that_no_tokenizer_has(pad: int) -> None:
    async with generating(config={"_pad_token_id": pad}) as (generation, _):
        output = await generation.generate(padded(["ab", "a"], pad=pad))
    assert output["output_ids"].tolist() == [[*b"abAB", EOS_ID], [*b"aA", EOS_ID, pad, pad]]


async def test_further_keys_of_a_trainer_are_not_read() -> None:
    async with generating() as (generation, _):
        output = await generation.generate(
            changed(idx=[3, 4], loss_multiplier=array([1, 0]), vllm_images=array([[], []]))
        )
    assert texts_of(output) == ["ABC", "DE"]


async def test_later_changes_of_the_callers_tensors_have_no_effect() -> None:
    batch = padded(["ab", "c"], kind="torch")
    async with generating() as (generation, _), generation.generate_async(batch) as results:
        batch["input_ids"].zero_()
        batch["input_lengths"].zero_()
        assert texts_of(await results.all()) == ["AB", "C"]


# --- faults


async def test_row_failed_by_the_engine_is_sampled_again_with_its_seed() -> None:
    faults = {0: Fault.error(at=1), 2: Fault.error(), 3: Fault.error(at=2)}
    async with generating(drawn, {"seed": 1}, faults=faults, places=1) as (generation, engine):
        output = await generation.generate(padded(["a", "b", "c"]))
    async with generating(drawn, {"seed": 1}) as (generation, _):
        undisturbed = await generation.generate(padded(["a", "b", "c"]))
    assert rows_of(output) == rows_of(undisturbed)
    assert len(engine.calls) == 6


def of(prompt: str, fault: Fault) -> Any:
    return lambda asked: fault if asked.prompt == prompt else None


async def test_row_that_fails_for_good_is_named_and_fails_alone() -> None:
    batch = padded(["a", "b", "c"])
    async with generating(faults=of("b", Fault.error(message="no memory")), retries=1) as (generation, engine):
        with pytest.raises(EngineError, match=r"row 1: the engine failed: no memory"):
            await generation.generate(batch)
        said: list[tuple[int, Any]] = []
        with pytest.raises(EngineError, match=r"row 1: the engine failed: no memory"):
            await collect(generation.generate_async(batch), said)
    assert sorted((index, texts_of(result)) for index, result in said) == [(0, ["A"]), (2, ["C"])]
    assert len(engine.calls) == 8


async def test_a_row_that_is_refused_is_not_tried_again() -> None:
    async with generating(faults=of("b", Fault.reject("too odd"))) as (generation, engine):
        with pytest.raises(RequestRejected, match=r"row 1: .*too odd"):
            await generation.generate(padded(["a", "b"]))
    assert len(engine.calls) == 2


async def test_several_rows_that_fail_are_counted() -> None:
    async with generating(faults=lambda _: Fault.reject("too odd")) as (generation, _):
        with pytest.raises(RequestRejected) as caught:
            await generation.generate(padded(["a", "b", "c"]))
    assert caught.value.__notes__ == ["2 further rows failed; the first of them: row 1: batch 0/main/1: too odd"]


async def test_the_death_of_the_engine_ends_the_batch_with_its_cause() -> None:
    async with generating(faults=of("c", Fault.death(message="no power")), places=2) as (generation, engine):
        said: list[tuple[int, Any]] = []
        with pytest.raises(EngineDead, match=r"row \d: .*no power"):
            await collect(generation.generate_async(padded(list("abcdefghij"))), said)
    assert {texts_of(result)[0] for _, result in said} < set("ABDEFGHIJ")
    assert len(engine.calls) < 10


async def test_an_engine_that_falls_silent_has_failed() -> None:
    async with ScriptedEngine("yes", faults=lambda _: Fault.stall(at=1)) as engine:
        async with Generation(engine, stall_seconds=0.01, retries=0) as generation:
            with pytest.raises(EngineStalled, match=r"row 0: .*the engine sent nothing for 0\.01 s"):
                await generation.generate(padded(["a"]))
        assert engine.stats().open == 0


async def test_error_of_a_function_that_plays_the_model_is_raised() -> None:
    def broken(_: ModelCall) -> str:
        raise ZeroDivisionError("in the script")

    async with generating(broken) as (generation, _):
        with pytest.raises(ZeroDivisionError, match="in the script"):
            await generation.generate(padded(["a", "b"]))
        with pytest.raises(ZeroDivisionError, match="in the script"):
            await generation.generate(padded(["a", "b"]))


# --- texts


async def test_texts_are_generated_from_texts() -> None:
    async with generating() as (generation, engine):
        assert await generation.generate_text({"prompts": ["hello", "grüße"]}) == {"texts": ["HELLO", "GRÜSSE"]}
        await generation.generate_text({"prompts": ["hello"]}, True)
    assert engine.calls[-1].sampling.temperature == 0


async def test_a_text_keeps_its_stop_string_and_loses_special_tokens() -> None:
    batch = {"prompts": ["a", "b", "c"], "stop_strings": [["three"], None, ["<|im_start|>"]]}
    async with generating(lambda _: "one <|im_start|>two three four") as (generation, _):
        texts = (await generation.generate_text(batch))["texts"]
    assert texts == ["one two three", "one two three four", "one <|im_start|>"]


async def test_control_tokens_of_a_prompt_count_and_none_are_added() -> None:
    prompt = "<|im_start|>user\nHi<|im_end|>"
    async with generating("Hello") as (generation, engine):
        await generation.generate_text({"prompts": [prompt]})
    assert list(engine.calls[0].prompt) == [256, *b"user\nHi", 257]


async def test_texts_come_as_each_finishes() -> None:
    def slowly(asked: ModelCall) -> Reply:
        return Reply(loudly(asked), latency=Latency(first=20 - 10 * int(asked.prompt)))

    async with generating(slowly) as (generation, _):
        said = [
            (index, result["texts"]) async for index, result in generation.generate_text_async({"prompts": ["0", "1"]})
        ]
    assert said == [(1, ["1"]), (0, ["0"])]


async def test_a_text_without_room_is_empty() -> None:
    async with generating(context=4) as (generation, _):
        assert await generation.generate_text({"prompts": ["abc", "abcd"]}) == {"texts": ["A", ""]}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"prompts": "hello"}, "the batch's prompts are 'hello': give a list of strings"),
        ({"input_ids": [[1]]}, "the batch's prompts are None"),
        ({"prompts": ["a", ""]}, "row 1: the prompt is ''"),
        ({"prompts": ["a", [1, 2]]}, r"row 1: the prompt is \[1, 2\]: give a string"),
        ({"prompts": ["a"], "stop_strings": [["b"], ["c"]]}, "for each of the 1 rows"),
        (["a"], "the batch is a list: give a dictionary"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_bad_batch_of_texts_is_one_error(batch: Any, message: str) -> None:
    async with generating() as (generation, engine):
        with pytest.raises(BadBatch, match=message):
            await generation.generate_text(batch)
    assert engine.calls == []
