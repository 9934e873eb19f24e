"""Sampling fields of requests in clients' notation: a provider's or vLLM's field is accepted in each wire format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anthropic
import pytest

from runner import Endpoint, RunFile
from runner.chat_requests import ChatCall
from runner.endpoint.anthropic_messages import AnthropicMessages
from runner.endpoint.chat_completions import ChatCompletions
from runner.endpoint.refusals import Refused
from runner.endpoint.responses import Responses
from runner.endpoint.wire_form import WireForm
from runner.options import Sampling
from tests.endpoint.serving import RUN, chat_body, http, openai_client, served, user
from tests.playing import recording

FORMS: Mapping[str, tuple[WireForm, dict[str, Any]]] = {
    "chat": (ChatCompletions(), {"messages": [user("One.")]}),
    "responses": (Responses(), {"input": "One."}),
    "anthropic": (AnthropicMessages(), {"messages": [user("One.")], "max_tokens": 50}),
}
EMPTY: Mapping[str, Any] = {
    **dict.fromkeys(["temperature", "top_p", "top_k", "min_p", "tools", "tool_choice", "metadata", "stream"]),
    **dict.fromkeys(["service_tier", "seed", "unknown"]),
}
OF_CHAT: Mapping[str, Any] = {
    **dict.fromkeys(["max_tokens", "max_completion_tokens", "stop", "n", "logit_bias", "presence_penalty", "logprobs"]),
    **dict.fromkeys(["frequency_penalty", "repetition_penalty", "min_tokens", "response_format", "top_logprobs"]),
    **dict.fromkeys(["user", "store", "stream_options", "functions", "function_call", "modalities", "audio"]),
    **dict.fromkeys(["reasoning_effort", "verbosity", "prediction", "stop_token_ids", "parallel_tool_calls"]),
    **dict.fromkeys(["structured_outputs", "guided_json", "bad_words", "ignore_eos", "web_search_options"]),
}
OF_RESPONSES: Mapping[str, Any] = {
    **dict.fromkeys(["max_output_tokens", "stop", "text", "reasoning", "include", "instructions", "truncation"]),
    **dict.fromkeys(["previous_response_id", "conversation", "background", "prompt", "max_tool_calls", "user"]),
}
OF_ANTHROPIC: Mapping[str, Any] = dict.fromkeys(["stop_sequences", "system", "thinking", "container", "mcp_servers"])


def asked(form: str, **fields: Any) -> ChatCall:
    wire, body = FORMS[form]
    return wire.read({"model": "any", **body, **fields}, {}).chat_call


def sampled(form: str, **fields: Any) -> dict[str, Any]:
    """Return the sampling of the request, without the limit that one wire format requires."""
    sampling = asked(form, **fields).sampling
    given = {} if sampling is None else sampling.given()
    return {name: value for name, value in given.items() if (name, value) != ("max_tokens", 50)}


@pytest.mark.parametrize(
    ("form", "fields"), [("chat", OF_CHAT), ("responses", OF_RESPONSES), ("anthropic", OF_ANTHROPIC)]
)
def test_null_in_a_field_is_the_same_as_nothing(form: str, fields: Mapping[str, Any]) -> None:
    for name in (*EMPTY, *fields):
        assert (sampled(form, **{name: None}), asked(form, **{name: None}).not_granted) == ({}, {}), name
    assert sampled(form, **EMPTY, **fields) == {}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "value", "is_read_as"),
    [
        ("top_k", -1, 0),
        ("top_k", -1.0, 0),
        ("top_k", 0, 0),
        ("top_k", 5, 5),
        ("top_k", 5.0, 5),
        ("top_p", 0, 1e-6),
        ("top_p", 1, 1),
        ("temperature", 0, 0),
        ("temperature", 2, 2),
        ("min_p", 0, 0),
    ],
)
def test_a_value_as_a_provider_takes_it_is_taken(form: str, name: str, value: float, is_read_as: float) -> None:
    given = sampled(form, **{name: value})
    assert given == {name: is_read_as}
    assert type(given[name]) is type(is_read_as) or name != "top_k"


@pytest.mark.parametrize(
    ("form", "name"), [("chat", "max_tokens"), ("chat", "max_completion_tokens"), ("responses", "max_output_tokens")]
)
def test_limit_of_minus_one_token_means_no_limit(form: str, name: str) -> None:
    assert sampled(form, **{name: -1}) == {}
    assert sampled(form, **{name: 7.0}) == {"max_tokens": 7}
    for value in (0, -2, 1.5):
        with pytest.raises(Refused, match=name):
            asked(form, **{name: value})


def test_the_smaller_of_two_limits_of_tokens_is_taken() -> None:
    assert sampled("chat", max_tokens=9, max_completion_tokens=5) == {"max_tokens": 5}
    assert sampled("chat", max_tokens=-1, max_completion_tokens=5) == {"max_tokens": 5}


@pytest.mark.parametrize("value", [None, [], ""])
def test_null_and_empty_stop_mean_no_stop_string(value: Any) -> None:
    assert sampled("chat", stop=value) == {}
    assert sampled("responses", stop=value) == {}
    assert sampled("anthropic", stop_sequences=value) == {}


def test_fields_of_vllms_are_granted_as_far_as_sampling_has_them() -> None:
    given = sampled(
        "chat", stop_token_ids=[5], logit_bias={"7": -100}, bad_words=["no"], ignore_eos=True, min_tokens=2.0, n=1.0
    )
    assert given == {
        "stop_ids": (5,),
        "logit_bias": {7: -100},
        "bad_words": ("no",),
        "ignore_eos": True,
        "min_tokens": 2,
    }


@pytest.mark.parametrize(
    ("fields", "is_read_as"),
    [
        ({"guided_json": {"type": "object"}}, {"schema": {"type": "object"}}),
        ({"guided_json": '{"type": "object"}'}, {"schema": {"type": "object"}}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ("a", "b")}),
        ({"structured_outputs": {"json": {"type": "object"}}}, {"schema": {"type": "object"}}),
        ({"structured_outputs": {"json_object": True}}, {"schema": {"type": "object"}}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a"]}}, {"choice": ("a",)}),
        ({"structured_outputs": {}}, {}),
        ({"response_format": {"type": "text"}, "guided_regex": "a+"}, {"regex": "a+"}),
    ],
)
@pytest.mark.parametrize("form", ["chat", "responses"])
def test_constraints_in_vllms_fields_are_read_if_no_tools_are_given(
    form: str, fields: dict[str, Any], is_read_as: dict[str, Any]
) -> None:
    assert sampled(form, **fields) == is_read_as
    tools: list[Any] = [RUN] if form == "chat" else [{"type": "function", "name": "run", "parameters": {}}]
    called = asked(form, **fields, tools=tools)
    assert called.sampling is None
    assert list(called.not_granted) == (["response_format"] if is_read_as else [])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"n": 2}, "n: one answer"),
        ({"best_of": 2}, "best_of: one answer"),
        ({"functions": [{"name": "run"}]}, "functions: "),
        ({"function_call": {"name": "run"}}, "functions: "),
        ({"modalities": ["text", "audio"]}, "modalities: "),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio: "),
        ({"echo": True}, "echo: "),
        ({"prompt_logprobs": 1}, "prompt_logprobs: "),
        ({"use_beam_search": True}, "use_beam_search: "),
        ({"structured_outputs": {"grammar": "root ::= 'a'"}}, "structured_outputs.grammar: "),
        ({"guided_grammar": "root ::= 'a'"}, "guided_grammar: "),
        ({"guided_json": "{"}, "guided_json: "),
        ({"guided_choice": []}, "guided_choice: "),
        ({"guided_regex": "("}, "regex="),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "one constraint"),
        ({"logit_bias": {"a": 1}}, "logit_bias: "),
        ({"logit_bias": {"1": 1000}}, "logit_bias="),
        ({"stop_token_ids": [-1]}, "stop_token_ids: "),
        ({"top_k": -2}, "top_k=-2: "),
        ({"top_k": 1.5}, "top_k=1.5: "),
        ({"temperature": "1"}, "temperature: "),
        ({"top_p": -1}, "top_p=-1: "),
        ({"stop": [""]}, "stop: "),
    ],
)
def test_unsupported_or_invalid_field_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused) as refused:
        asked("chat", **fields)
    assert said in refused.value.message


@pytest.mark.parametrize("form", FORMS)
def test_unknown_field_is_accepted_and_recorded_as_not_granted(form: str) -> None:
    deep: Any = {"a": {"b": ["c" * 1_000]}}
    not_granted = asked(form, newest=5, deep=deep, listed=["a"] * 9, words="x" * 101, off=False).not_granted
    assert not_granted == {"newest": 5, "deep": "(an object)", "listed": "(a list)", "words": "(a string)"}


@pytest.mark.parametrize("form", FORMS)
def test_first_20_of_many_unknown_fields_are_recorded_in_order(form: str) -> None:
    not_granted = asked(form, **{f"x{number}": 1 for number in range(1_000)}).not_granted
    assert list(not_granted) == [f"x{number}" for number in range(20)]


@pytest.mark.anyio
@pytest.mark.asyncio_alone
@pytest.mark.parametrize("train", [False, True])
async def test_the_providers_own_clients_may_give_what_vllm_takes(train: bool, tmp_path: Path) -> None:
    async def loop(endpoint: Endpoint) -> None:
        extra = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": [], "ignore_eos": False}
        async with openai_client(endpoint) as client:
            await client.chat.completions.create(
                model="any",
                messages=[user("One.")],
                temperature=None,
                top_p=None,
                max_tokens=None,
                stop=None,
                seed=None,
                n=1,
                logit_bias={"5": -1},
                extra_body=extra,
            )
            await client.responses.create(model="any", input="Two.", extra_body={"top_k": -1}, temperature=None)
        settings: Any = {"base_url": endpoint.root_url, "api_key": endpoint.api_key, "max_retries": 0}
        async with anthropic.AsyncAnthropic(**settings) as other:
            await other.messages.create(model="any", max_tokens=50, messages=[user("Three.")], extra_body={"top_k": -1})

    engine = recording(["Done.", "Done.", "Done."], template="hermes")
    await served(loop, engine, serve={"train": train}, file=tmp_path / "run.db")
    with RunFile(tmp_path / "run.db") as stored:
        threads = [stored.trajectory(row) for row in stored.rows(trained=None)]
    requests = [request for thread in threads for request in thread.requests]
    assert [request.form for request in requests] == ["chat", "responses", "anthropic"]
    granted = [turn.sampling for thread in threads for turn in thread.turns]
    assert all(isinstance(each, Sampling) and each.top_k == 0 for each in granted)
    if not train:
        assert next(each.logit_bias for each in granted if each is not None) == {5: -1}


@pytest.mark.anyio
@pytest.mark.asyncio_alone
async def test_a_bias_of_an_id_that_the_model_has_not_is_refused_alone() -> None:
    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            body = chat_body([user("One.")], logit_bias={"99999999": 1})
            refused = await client.post("/chat/completions", json=body)
            assert refused.status_code == 400
            assert "logit_bias" in refused.json()["error"]["message"]
            assert (await client.post("/chat/completions", json=chat_body([user("One.")]))).status_code == 200

    await served(loop, recording(["Done."], template="hermes"), serve={"train": False})
