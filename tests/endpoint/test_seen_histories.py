"""Requests with histories that were seen before: every format and the episode read them like first requests."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner import Conversation, history_cache
from runner.endpoint.anthropic_messages import AnthropicMessages
from runner.endpoint.chat_completions import ChatCompletions
from runner.endpoint.refusals import Refused
from runner.endpoint.responses import Responses
from runner.endpoint.wire_form import WireForm
from runner.errors import BadInput
from runner.history_cache import MAX_RECENT_HISTORIES, HistoryCache
from runner.testing import call
from tests.endpoint.serving import RUN
from tests.episode.awkward import misspelling
from tests.playing import Plain, play_all

ID, OTHER = "call_0123456789ab_0", "call_ba9876543210_0"
ARGUMENTS: list[Any] = [
    {"a": "1", "b": "2"},
    {"b": "2", "a": "1"},
    *({"n": number} for number in (1, True, 1.0, 2**70, 0.0, -0.0)),
    {"deep": [{"n": 1}, None]},
    {"deep": [{"n": True}, None]},
]
MARK: Any = {"cache_control": {"type": "ephemeral"}}
TEXTS = ["", "One.", "Two.", "<think>So.</think>One."]
IMAGE: Any = {"type": "image_url", "image_url": {"url": "data:x"}}
PLACE: Any = {"type": "place", "name": "n", "at": {"page": "1", "line": "2"}}

CHAT: list[Any] = [
    *({"role": role, "content": text} for role in ("user", "assistant", "system") for text in TEXTS[1:]),
    *(
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": each, "type": "function", "function": {"name": "run", "arguments": arguments}}],
        }
        for each in (ID, OTHER)
        for arguments in (*ARGUMENTS, '{"a":1}', '{"a": 1}', "{")
    ),
    {"role": "assistant", "tool_calls": [{"id": f"{ID}j", "type": "custom", "custom": {"name": "run", "input": "{}"}}]},
    {"role": "assistant", "content": "", "refusal": "No.", "reasoning": [{"text": "So."}]},
    *({"role": "tool", "tool_call_id": each, "content": "ok"} for each in (ID, f"{ID}j", OTHER)),
    {"role": "user", "content": [{"type": "text", "text": "One.", **MARK}]},
    {"role": "user", "content": [IMAGE]},
    {"role": "assistant", "content": [PLACE]},
    {"role": "user", "content": "One.", **MARK},
    *({"role": "user", "content": "One.", "n": number} for number in (1, True, 1.0)),
    *(5, None, {"role": "clown"}),
]
TAKEN = [each for each in CHAT[:-3] if each["role"] in ("user", "assistant")]
"""Messages that most requests accept at any place."""

BLOCKS: list[Any] = [
    *({"type": "text", "text": text} for text in TEXTS[1:]),
    {"type": "text", "text": "One.", **MARK},
    {"type": "thinking", "thinking": "So.", "signature": "call_0123456789ab"},
    *({"type": "tool_use", "id": ID, "name": "run", "input": arguments} for arguments in ARGUMENTS),
    {"type": "tool_result", "tool_use_id": ID, "content": "ok"},
    *({"type": "tool_result", "tool_use_id": ID, "is_error": number} for number in (1, True)),
    {"type": "web_search_result", "url": "u", "title": "t", "at": {"page": 1, "line": 2}},
    {"type": "image", "source": {"data": "x"}},
]
ANTHROPIC: list[Any] = [
    *({"role": role, "content": "One."} for role in ("user", "assistant", "system", "clown")),
    *({"role": role, "content": [block]} for role in ("user", "assistant") for block in BLOCKS),
    {"role": "user", "content": BLOCKS[-5:-2]},
    {"role": "assistant", "content": BLOCKS[4:7]},
]
ITEMS: list[Any] = [
    *({"role": role, "content": text} for role in ("user", "assistant", "developer") for text in TEXTS[1:3]),
    *({"type": "message", "role": "assistant", "id": f"msg_{at * 12}", "content": "One."} for at in "ab"),
    *({"type": "reasoning", "id": f"rs_{at * 12}", "summary": [], "n": n} for at in "ab" for n in (1, True)),
    *(
        {"type": "function_call", "call_id": f"call_{at * 12}_0", "name": "run", "arguments": arguments}
        for at in "ab"
        for arguments in ("{}", '{"a":1}', "{")
    ),
    *({"type": "function_call_output", "call_id": f"call_{at * 12}_0", "output": "ok"} for at in "ab"),
    *({"type": "custom_tool_call", "call_id": "c", "name": "run", "input": text} for text in TEXTS),
    {"type": "item_reference", "id": f"msg_{'a' * 12}"},
    *({"type": kind, "status": "done", "query": "q"} for kind in ("web_search_call", "shell_output", "")),
]
FORMS: Mapping[WireForm, tuple[str, list[Any]]] = {
    ChatCompletions(): ("messages", CHAT),
    AnthropicMessages(): ("messages", ANTHROPIC),
    Responses(): ("input", ITEMS),
}


def respelt(value: Any, number: int) -> Any:
    """Return a value that Python finds equal, with other number types, and with its keys in another order."""
    if isinstance(value, dict):
        return {key: respelt(value[key], number) for key in reversed(value)}
    if isinstance(value, list):
        return [respelt(each, number) for each in value]
    return [1, True, 1.0][number % 3] if isinstance(value, int | float) and value == 1 else value


def changed(histories: Sequence[Sequence[Any]], pool: Sequence[Any], draw: Any) -> list[Any]:
    """Return the history of the next request: one of the latest histories, edited as clients do."""
    history: list[Any] = copy.deepcopy(list(histories[draw(st.integers(-3, -1)) % len(histories)]))
    further = st.lists(st.sampled_from(pool), min_size=1, max_size=4)
    for change in draw(st.lists(st.sampled_from(["add", "edit", "respell", "cut", "drop"]), max_size=4)):
        at = draw(st.integers(0, 8)) % (len(history) + 1)
        if change == "add":
            history += draw(further)
        elif change == "edit":
            history[at : at + 1] = draw(further)[:1]
        elif change == "cut":
            del history[at:]
        elif change == "respell" and at < len(history):
            history[at] = respelt(history[at], draw(st.integers(0, 2)))
        elif change == "drop":
            del history[at : at + 1]
    return history


def read_by(form: WireForm, body: Mapping[str, Any], seen: HistoryCache[Any] | None) -> str:
    """Return everything that is read, as JSON, in which 1, 1.0 and True differ. The order of keys does not matter."""
    try:
        read = form.read(copy.deepcopy(body), {}, seen).chat_call
    except Refused as refused:
        return str(refused)
    return json.dumps([read.messages, read.handles], sort_keys=True)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_seen_history_is_read_as_one_that_is_new(form: WireForm, data: st.DataObject) -> None:
    (name, pool), seen = FORMS[form], HistoryCache[Any]()
    histories: list[list[Any]] = [pool[:1]]
    for _ in range(data.draw(st.integers(2, 8))):
        histories.append(changed(histories, pool, data.draw))
        body = {"model": "any", "max_tokens": 9, name: histories[-1]}
        assert read_by(form, body, seen) == read_by(form, body, None)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_an_episode_answers_a_seen_history_as_a_new_one(data: st.DataObject) -> None:
    steps: list[Any] = []

    def draw(what: Any) -> Any:
        steps.append(data.draw(what))
        return steps[-1]

    with pytest.MonkeyPatch.context() as patch:
        seen = anyio.run(played, draw)
        patch.setattr(history_cache._CachedHistory, "is_similar", lambda *_: False)
        again = iter(steps)
        alone = anyio.run(played, lambda _: next(again))
    assert seen == alone


async def played(draw: Any) -> list[Any]:
    """Return the result of each request. The client adds the answers to its histories, and edits them."""
    results: list[Any] = []

    class Served(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            histories: list[list[Any]] = [[{"role": "user", "content": "Go."}]]
            for number in range(3 + draw(st.integers(1, 6))):
                histories.append(changed(histories, TAKEN, draw) if number >= 3 else histories[-1])
                try:
                    turn = await self.episode.chat(histories[-1], tools=[RUN])
                except BadInput as error:
                    results.append(str(error))
                else:
                    results.append((turn.prompt_ids, turn.token_ids, turn.handle))
                    histories.append([*histories[-1], turn.as_message(), {"role": "user", "content": "Next."}])

    numbers = iter(range(100))
    engine = misspelling(lambda _: call("run", command="ls") if (number := next(numbers)) % 2 else f"Done {number}.")
    for trajectory in await play_all(Served, engine):
        results += [
            {key: value for key, value in asdict(request).items() if not key.endswith("seconds")}
            for request in trajectory.requests
        ]
        results.append((trajectory.outcome, [segment.log.mask() for segment in trajectory.segments]))
    return results


@pytest.mark.anyio
async def test_a_message_that_is_edited_late_reaches_the_model() -> None:
    prompts: list[str] = []

    class Served(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            history: list[Any] = [{"role": "user", "content": "Go."}]
            for number in range(6):
                if number == 5:
                    history[2]["content"] = "Edited."
                turn = await self.episode.chat(history)
                prompts.append(engine.tokenizer.decode(turn.prompt_ids))
                history += [turn.as_message(), {"role": "user", "content": f"Then {number}."}]

    engine = misspelling([f"Done {number}." for number in range(6)])
    await play_all(Served, engine)
    assert ["Then 0." in prompt for prompt in prompts] == [False, *[True] * 4, False]
    assert ["Edited." in prompt for prompt in prompts] == [False] * 5 + [True]


def counted(cache: HistoryCache[Any], items: Sequence[Any]) -> list[int]:
    """Return the indices of a history that are read."""
    read: list[int] = []
    cache.read(items, lambda index, item: read.append(index))
    return read


def test_only_items_that_differ_are_read_of_a_seen_history() -> None:
    cache, items = HistoryCache[Any](), [{"role": "user", "content": f"{number}", "n": number} for number in range(9)]
    assert counted(cache, items) == [*range(9)]
    assert counted(cache, [*items, items[0]]) == [9]
    marked = [{**items[0], "n": True}, *items[1:7], {**items[7], **MARK}, *items[8:]]
    assert counted(cache, marked) == [0, 7]
    assert counted(cache, items[:5]) == [0]
    items[2]["content"] = "changed in place"
    assert counted(cache, items[:5]) == [2]


def test_histories_of_clients_side_by_side_stay_in_the_cache() -> None:
    cache = HistoryCache[Any]()
    clients = [[f"client {number}", "Go."] for number in range(MAX_RECENT_HISTORIES)]
    for turn in range(4):
        for client in clients:
            assert counted(cache, client) == [*range(2 * turn * (turn > 0), len(client))]
            client += [f"{client[0]}: {turn}", "Go."]


def test_items_added_to_a_seen_turn_are_read_as_without_cache() -> None:
    seen, call_of_turn = HistoryCache[Any](), ITEMS[8 + 4]
    first, longer = [ITEMS[0], ITEMS[0], call_of_turn, ITEMS[0]], [ITEMS[0], ITEMS[0], call_of_turn, call_of_turn]
    for items in (first, longer, first):
        body = {"model": "any", "input": [*items, ITEMS[0]]}
        assert read_by(Responses(), body, seen) == read_by(Responses(), body, None)
