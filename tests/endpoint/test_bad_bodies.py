"""Bodies that no real client sends: each gets an answer or an error that names the fault, and the episode continues."""

from __future__ import annotations

import random
from typing import Any

import pytest

from runner import Conversation, Endpoint, Outcome, Sampling
from runner.endpoint.request_body import MAX_MESSAGES, decode_body
from runner.testing import ScriptedEngine
from tests.endpoint.serving import RUN, http, user
from tests.playing import Plain, play_all

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.asyncio_alone]

CALL = {"id": "a", "type": "function", "function": {"name": "run", "arguments": '{"command": "ls"}'}}
BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "One."}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm."},
            {"role": "tool", "tool_call_id": "a", "content": "a file"},
        ],
        "tools": [RUN],
        "tool_choice": "auto",
        "max_tokens": 5,
        "stop": ["."],
        "temperature": 1,
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
    },
    "/responses": {
        "instructions": "Be brief.",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "One."}]},
            {"type": "reasoning", "summary": [], "encrypted_content": "a"},
            {"type": "function_call", "call_id": "a", "name": "run", "arguments": "{}", "id": "b"},
            {"type": "function_call_output", "call_id": "a", "output": "a file"},
        ],
        "tools": [
            {"type": "function", "name": "run", "parameters": {"type": "object"}, "description": "Run."},
            {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read", "parameters": {}}]},
            {"type": "custom", "name": "patch", "format": {"type": "text"}},
        ],
        "max_output_tokens": 4,
        "include": ["message.output_text.logprobs"],
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "stream": True,
    },
    "/messages": {
        "max_tokens": 5,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "One."}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "a"},
                    {"type": "tool_use", "id": "a", "name": "run", "input": {}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "a file"}]},
        ],
        "tools": [{"name": "run", "input_schema": {"type": "object"}, "description": "Run."}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["."],
        "metadata": {"user_id": "u"},
        "stream": True,
    },
}
BODIES["/messages/count_tokens"] = BODIES["/messages"]
ODD: list[Any] = [None, True, -1, 0, 1e300, 2**70, "", "x", "\0", [], {}, [1], [[]], [{}], {"a": 1}, {"type": "text"}]
ODD += [[{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}], {"type": "function", "function": 1}]


def spoilt(value: Any, rng: random.Random) -> Any:
    """Return the value with parts of it removed, doubled or replaced."""
    if rng.random() < 0.03:
        return rng.choice(ODD)
    if isinstance(value, dict):
        return {name: spoilt(each, rng) for name, each in value.items() if rng.random() > 0.04}
    if isinstance(value, list):
        return [spoilt(each, rng) for each in value if rng.random() > 0.04] * rng.choice([1] * 20 + [2])
    return value


@pytest.mark.parametrize("path", BODIES)
async def test_damaged_body_is_answered_or_refused(path: str, request: Any, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(request.config.option.sweep_seed)
    bodies = [spoilt(BODIES[path], rng) for _ in range(300)]

    class Served(Plain):
        async def rollout(self, conversation: Any) -> None:
            async with self.episode.serve(train=False) as endpoint:
                await loop(endpoint)
            conversation.add("Two.")
            await conversation.generate()

    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            for body in bodies:
                answer = await client.post(path, json=body)
                assert answer.status_code in (200, 400), (body, answer.text)
                if answer.status_code == 400:
                    assert answer.json()["error"]["message"], body
            answer = await client.post("/chat/completions", json={"messages": [user("One.")]})
            assert answer.status_code == 200, answer.text

    trajectories = await play_all(
        Served, ScriptedEngine(lambda _: "Done.", template="hermes"), sampling=Sampling(max_tokens=50)
    )
    assert {each.outcome for each in trajectories} == {Outcome.COMPLETED}, trajectories[0].error
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(("path", "name"), [("/chat/completions", "messages"), ("/responses", "input")])
async def test_history_of_too_many_messages_is_refused_first(path: str, name: str) -> None:
    """Reading 100,000 messages would block all other requests for seconds."""

    class Served(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            async with self.episode.serve() as endpoint, http(endpoint) as client:
                body = {"model": "any", name: [user(str(number)) for number in range(MAX_MESSAGES + 1)]}
                answer = await client.post(path, json=body)
                assert answer.status_code == 400
                assert f"{name}: the list has 10,001 items" in answer.json()["error"]["message"]
                assert (await client.post(path, json={**body, name: body[name][:2]})).status_code == 200

    (trajectory,) = await play_all(Served, ScriptedEngine(lambda _: "Done."))
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.error


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (rb"a\ud83d", "a\ufffd"),
        (rb"\udE00b", "\ufffdb"),
        (rb"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (rb"\ud83d\ude00\uD83D!", "\U0001f600\ufffd!"),
        (rb"\\ud83d \ud83d", "\\ud83d \ufffd"),
        (rb"\\\ud83d\n", "\\\ufffd\n"),
        (rb"\ud83d\\ude00", "\ufffd\\ude00"),
        (rb"\ud83d\"", '\ufffd"'),
    ],
)
def test_half_a_surrogate_pair_is_replaced(written: bytes, text: str) -> None:
    """JavaScript cuts texts between the two halves, and every later request repeats the history with such a text."""
    assert decode_body(b'{"a": "%b", "b": [1]}' % written) == {"a": text, "b": [1]}


def test_a_body_may_begin_with_a_byte_order_mark() -> None:
    assert decode_body(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
async def test_a_compressed_body_is_refused_by_its_encoding(encoding: str) -> None:
    class Served(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            async with self.episode.serve() as endpoint, http(endpoint) as client:
                for path in BODIES:
                    answer = await client.post(path, content=b"\x1f\x8b\x08", headers={"content-encoding": encoding})
                    assert answer.status_code == 400
                    assert f"content-encoding: '{encoding}'" in answer.json()["error"]["message"]
                plain = {"content-encoding": "identity"}
                assert (
                    await client.post("/chat/completions", json={"messages": [user("One.")]}, headers=plain)
                ).is_success

    (trajectory,) = await play_all(Served, ScriptedEngine(lambda _: "Done."))
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
