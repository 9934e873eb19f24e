"""Requests to a chat API, and the reader of its answers."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletionChunk

from runner import BadOption, Sampling
from runner.engines.base import FinishReason
from runner.engines.chat.engine import ChatEngine
from runner.engines.chat.server import too_long
from runner.engines.chat.wire import FIELDS, RequestFormat, body_of, check_sampling
from runner.engines.message_engine import MessagePiece
from runner.messages import ToolCall
from runner.parsing.events import ContentPiece, ReasoningPiece
from tests.engines.chat.api import Api, Says, asked, hear, wanted

pytestmark = pytest.mark.anyio

TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALLED: Any = [
    {"role": "user", "content": "2 + 3?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Adding.",
        "tool_calls": [
            {"id": "call_7", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "ß": 3}}}
        ],
    },
    {"role": "tool", "content": "5", "tool_call_id": "call_7", "name": "add"},
]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def sent(**options: Any) -> dict[str, Any]:
    request_format = options.pop("request_format", {})
    return body_of(wanted(**options), RequestFormat(model="model", **request_format))


def text_of(pieces: list[MessagePiece]) -> tuple[str, str, list[ToolCall]]:
    text = "".join(each.text for each in pieces if isinstance(each, ContentPiece))
    reasoning = "".join(each.text for each in pieces if isinstance(each, ReasoningPiece))
    return text, reasoning, [each for each in pieces if isinstance(each, ToolCall)]


# --- requests


def test_request_has_exactly_the_requested_sampling() -> None:
    body = sent(temperature=0.5, top_p=0.9, max_tokens=20, stop=("END",), presence_penalty=0.5, seed=11)
    assert body == {
        "model": "model",
        "messages": [{"role": "user", "content": "Hello?"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 20,
        "stop": ["END"],
        "presence_penalty": 0.5,
        "seed": 11,
    }


def test_messages_are_sent_as_servers_take_them() -> None:
    question, called, result = sent(messages=CALLED)["messages"]
    assert question == {"role": "user", "content": "2 + 3?"}
    assert called["content"] is None
    assert called["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2, "ß": 3}'}
    assert result == {"role": "tool", "content": "5", "tool_call_id": "call_7"}


def test_reasoning_is_sent_only_in_the_configured_field() -> None:
    assert "Adding." not in str(sent(messages=CALLED))
    called = sent(messages=CALLED, request_format={"reasoning": "reasoning"})["messages"][1]
    assert called["reasoning"] == "Adding."


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", "auto"),
        ("required", "required"),
        ("none", "none"),
        ("add", {"type": "function", "function": {"name": "add"}}),
    ],
)
def test_tool_choice_is_sent_in_openai_s_form(choice: Any, expected: Any) -> None:
    body = sent(tools=TOOLS, tool_choice=choice)
    assert (body["tools"], body["tool_choice"]) == (TOOLS, expected)


def test_a_schema_is_sent_as_a_response_format() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    given = sent(schema=schema)["response_format"]
    assert given["type"] == "json_schema"
    assert given["json_schema"]["schema"] == schema


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_can_be_left_out_for_a_server_without_it(name: str) -> None:
    options: Any = {
        "tools": TOOLS,
        "schema": {},
        "stop": ("a",),
        "presence_penalty": 1,
        "frequency_penalty": 1,
    }
    assert name in sent(**options)
    assert name not in sent(**options, request_format={"leave_out": (name,)})


def test_extra_body_overrides_sampling_fields() -> None:
    body = sent(request_format={"extra_body": {"reasoning_effort": "low", "temperature": 0.2}})
    assert (body["reasoning_effort"], body["temperature"]) == ("low", 0.2)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_k=20),
        Sampling(min_p=0.1),
        Sampling(min_tokens=2),
        Sampling(repetition_penalty=1.1),
        Sampling(logit_bias={3: 1.0}),
        Sampling(bad_words=("no",)),
        Sampling(stop_ids=(3,)),
        Sampling(ignore_eos=True),
        Sampling(logprobs=3),
        Sampling(regex="a+"),
        Sampling(choice=("a", "b")),
        Sampling(adapter="poet"),
    ],
    ids=lambda sampling: next(iter(sampling.given())),
)
def test_unsupported_sampling_is_refused_by_name(sampling: Sampling) -> None:
    name = next(iter(sampling.given()))
    with pytest.raises(BadOption, match=rf"Sampling\({name}="):
        check_sampling(sampling.over(Sampling.defaults()))
    # The fix in the message works: the field is switched off for a single conversation.
    off = Sampling(**{name: getattr(Sampling.defaults(), name)})
    check_sampling(off.over(sampling).over(Sampling.defaults()))


def test_left_out_sampling_field_is_refused_when_set() -> None:
    check_sampling(Sampling.defaults(), ("temperature", "response_format"))
    for sampling, field in ((Sampling(temperature=0.0), "temperature"), (Sampling(schema={"a": 1}), "response_format")):
        with pytest.raises(BadOption, match=f"leave out '{field}'"):
            check_sampling(sampling.over(Sampling.defaults()), (field,))


def test_invalid_engine_option_is_refused_by_its_name() -> None:
    for given, words in (
        ({"places": 0}, "places=0"),
        ({"context": 0}, "context=0"),
        ({"timeout": 0}, "timeout=0"),
        ({"leave_out": ("messages",)}, "leave_out="),
        ({"leave_out": "seed"}, "leave_out="),
        ({"base_url": "localhost:80"}, "base_url='localhost:80'"),
    ):
        with pytest.raises(BadOption, match=words):
            ChatEngine("model", **given)
    with pytest.raises(BadOption, match="give secrets as api_key") as refused:
        ChatEngine("model", base_url="http://me:hunter22@host/v1")
    assert "hunter22" not in str(refused.value)


# --- answers


def test_stand_in_streams_chunks_of_openai_s_own_types() -> None:
    said = Says("Yes", "Hm", (("add", '{"a": 1}'),))
    for chunk in Api(lambda _: said).chunks(said, {"stream_options": {}}):
        ChatCompletionChunk.model_validate(chunk)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_text_reasoning_and_calls_are_read_from_what_is_streamed(field: str) -> None:
    calls = (("add", '{"a": 1, "b": [2]}'), ("stop", ""))
    async with asked(Says("Größer.", "Let me think.", calls, reasoning_field=field)) as (_, engine):
        text, reasoning, made = text_of((await hear(engine))[0])
    assert (text, reasoning) == ("Größer.", "Let me think.")
    assert [(call.id, call.name, call.arguments, call.error) for call in made] == [
        ("call_0", "add", {"a": 1, "b": [2]}, None),
        ("call_1", "stop", {}, None),
    ]


async def test_tool_call_with_invalid_json_arguments_has_an_error() -> None:
    calls = (("add", '{"a": 1'), ("add", "[1]"), ("", "{}"), ("add", '{"a": 2}'))
    async with asked(Says(calls=calls)) as (_, engine):
        _, _, made = text_of((await hear(engine))[0])
    assert [bool(call.error) for call in made] == [True, True, True, False]
    assert len({call.id for call in made}) == 4


async def test_tool_call_arrives_as_soon_as_the_next_one_begins() -> None:
    calls = (("add", '{"a": 1}'), ("add", '{"a": 2}'))
    async with asked(Says(calls=calls, hold_after=6)) as (api, engine), engine.stream(wanted()) as stream:
        first = await anext(stream)
        assert isinstance(first, ToolCall)
        assert first.arguments == {"a": 1}
        api.released.set()


@pytest.mark.parametrize(
    ("said", "finish", "stop"),
    [
        (Says("a", stop="END"), FinishReason.STOP, "END"),
        (Says("a"), FinishReason.STOP, None),
        (Says(calls=(("add", "{}"),)), FinishReason.STOP, None),
        (Says("a", finish="length"), FinishReason.LENGTH, None),
        (Says("a", finish="content_filter"), FinishReason.CONTENT_FILTER, None),
        (Says("a", finish="end_turn"), FinishReason.STOP, None),
        (
            Says("a", finish="length", usage={"prompt_tokens": 90, "completion_tokens": 10}),
            FinishReason.CONTEXT,
            None,
        ),
    ],
    ids=["stop string", "stop", "calls", "length", "filtered", "another word", "context full"],
)
async def test_every_end_of_a_turn_has_its_reason(said: Says, finish: FinishReason, stop: str | None) -> None:
    async with asked(said, engine={"context": 100}) as (_, engine):
        _, stream = await hear(engine)
    assert stream.finish is not None
    assert (stream.finish.reason, stream.finish.stop) == (finish, stop)


async def test_usage_and_model_of_a_turn_are_read() -> None:
    reported = {
        "prompt_tokens": 20,
        "completion_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 16},
        "completion_tokens_details": {"reasoning_tokens": 4},
        "cost": 0.25,
    }
    async with asked(Says("Yes", usage=reported)) as (_, engine):
        _, stream = await hear(engine)
    usage = None if stream.finish is None else stream.finish.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.reasoning_tokens) == (20, 9, 16, 4)
    assert (usage.cost, usage.model, usage.fingerprint) == (0.25, "model-2026-01-01", "fp_1")


async def test_turn_without_usage_counts_is_accepted() -> None:
    async with asked(Says("Yes", usage=None), engine={"leave_out": ("stream_options",)}) as (api, engine):
        pieces, stream = await hear(engine)
    usage = None if stream.finish is None else stream.finish.usage
    assert text_of(pieces)[0] == "Yes"
    assert usage is not None
    assert (usage.prompt_tokens, usage.model) == (None, "model-2026-01-01")
    assert "stream_options" not in api.bodies[0]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        (
            "This model's maximum context length is 8192 tokens. However, your messages resulted in 9001 tokens.",
            (9001, 8192),
        ),
        (
            "This model's maximum context length is 2048 tokens. However, your prompt contains at least 2049 input "
            "tokens, which exceeds this limit even without any output tokens.",
            (2049, 2048),
        ),
        ("prompt is too long: 205000 tokens > 200000 maximum", (205000, 200000)),
        ("Please reduce your prompt.", (0, 0)),
    ],
)
def test_token_counts_are_read_from_overflow_errors(text: str, numbers: Any) -> None:
    assert too_long(text) == numbers
