"""Traces of conversations of public templates in three formats, built without the code that checks traces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.messages import Message
from runner.tokens.template import ChatTemplate
from runner.trainers.trace_check import TraceModel
from tests.conformance.corpus import CLOCK, VARIABLES, Entry
from tests.conformance.expected import Expected, NotApplicable, expected
from tests.conformance.scenarios import Case, Past, Scenario, case
from tests.conformance.sweep import respelled
from tests.conformance.vocabulary import END_OF_TEXT, host

__all__ = ["FORMS", "Talk", "model_of", "talks", "written"]


@dataclass(frozen=True)
class Talk:
    """Two calls. The second prompt has the ids of the first call, and then the template's text."""

    name: str
    messages: list[Message]
    """The messages of the first prompt, its reply, and the new messages."""
    replied: int
    """The index of the reply."""
    tools: list[dict[str, Any]]
    prompt: list[int]
    sampled: list[int]
    seam: list[int]
    history: list[int] | None = None
    """The ids of the first call in the second prompt; None if they are unchanged."""

    @property
    def second(self) -> list[int]:
        return [*(self.history or [*self.prompt, *self.sampled]), *self.seam]


def talks(entry: Entry, *, seed: int = 0, spelled: bool = False) -> Iterator[tuple[Talk, tuple[str, ...]]]:
    """Return the conversations that a template renders, each with the control tokens that ended turns."""
    made: list[tuple[Case, Expected]] = []
    renderer = entry.renderer()
    for past in Past:
        for scenario in Scenario:
            one = case(scenario, past, seed)
            try:
                made.append((one, expected(one, renderer, END_OF_TEXT)))
            except NotApplicable:
                continue
    # The ends of a turn of this model are tokens that occur inside no turn.
    stops = {truth.stop for _, truth in made if truth.stop} | {END_OF_TEXT}
    stops -= {stop for stop in stops for _, truth in made if stop in truth.said}
    for one, truth in made:
        if not truth.stop or truth.stop in stops:
            yield _talk(one, truth, renderer.render, spelled=spelled), tuple(sorted(stops))


def _talk(one: Case, truth: Expected, render: Callable[..., str], *, spelled: bool) -> Talk:
    vocabulary, history = host(), truth.history
    prompt = vocabulary.encode(render(list(history[:-1]), tools=list(one.tools), generation_prompt=True))
    said = vocabulary.encode(truth.said)
    sampled = respelled(said, vocabulary) if spelled else said
    stop = [*vocabulary.encode(truth.stop)] if truth.stop else []
    seam = vocabulary.encode(truth.stop + truth.text)[len(stop) :]
    messages = [*history, *one.new]
    talk = Talk(
        f"{one.scenario}, {one.past}", messages, len(history) - 1, [dict(tool) for tool in one.tools],
        prompt, [*sampled, *stop], seam,
    )  # fmt: skip
    return replace(talk, history=[*prompt, *said, *stop]) if spelled and sampled != said else talk


def model_of(entry: Entry, stops: tuple[str, ...]) -> TraceModel:
    vocabulary = host()
    template = ChatTemplate(entry.text, name=entry.name, variables=VARIABLES)
    ids = [token_id for name in stops if (token_id := vocabulary.token_id(name)) is not None]
    return TraceModel(vocabulary, template, stop_ids=ids, now=CLOCK)


# --- the formats


def _openenv(talk: Talk) -> dict[str, Any]:
    calls = (talk.replied, talk.prompt, talk.sampled), (len(talk.messages), talk.second, [7])
    turns = []
    for number, (place, prompt, sampled) in enumerate(calls):
        messages, reply = talk.messages[:place], [*talk.messages, {"role": "assistant", "content": "done"}][place]
        turns.append(
            {
                "node_id": f"call {number}",
                "prompt_token_ids": prompt,
                "completion_token_ids": sampled,
                "per_token_logps": [-0.5] * len(sampled),
                "loss_mask": [0] * len(prompt) + [1] * len(sampled),
                "request": {"messages": [_as_client(each) for each in messages], "tools": talk.tools},
                "response": {"choices": [{"message": _as_client(reply)}]},
                "metadata": {},
            }
        )
    return {"schema_version": 1, "turns": turns}


def _verifiers(talk: Talk) -> dict[str, Any]:
    """Return an episode. If a prompt does not continue the first call, its ids are in a separate branch."""
    nodes: list[dict[str, Any]] = []

    def grow(parent: int | None, ids: list[int], messages: list[Any], reply: Any, sampled: list[int]) -> int:
        begin = len(nodes)
        for number, message in enumerate([*messages, reply]):
            ours = number == len(messages)
            own = (ids if not number else []) if not ours else [*([] if messages else ids), *sampled]
            node = {
                "parent": parent,
                "message": _as_verifiers(message),
                "sampled": ours,
                "token_ids": own,
                "mask": [ours and place >= len(own) - len(sampled) for place in range(len(own))],
                "logprobs": [-0.25] * len(sampled) if ours else [],
            }
            if parent is None and len(nodes) == begin:
                node["tools"] = [tool["function"] for tool in talk.tools]
            nodes.append(node)
            parent = len(nodes) - 1
        return len(nodes) - 1

    reply = {"role": "assistant", "content": "done"}
    first = grow(None, talk.prompt, talk.messages[: talk.replied], talk.messages[talk.replied], talk.sampled)
    if talk.history is None:
        grow(first, talk.seam, talk.messages[talk.replied + 1 :], reply, [7])
    else:
        grow(None, talk.second, talk.messages, reply, [7])
    return {"id": "e", "task": {}, "traces": [{"version": 1, "id": "t", "nodes": nodes}]}


def _row(talk: Talk) -> dict[str, Any]:
    completion = [*talk.sampled, *talk.seam, 7]
    mask = [1] * len(talk.sampled) + [0] * len(talk.seam) + [1]
    messages = [*map(_as_client, talk.messages), {"role": "assistant", "content": "done"}]
    return {
        "prompt_ids": talk.prompt,
        "completion_ids": completion,
        "env_mask": mask,
        "logprobs": [-0.5 * each for each in mask],
        "messages": messages,
        "tools": talk.tools,
    }


FORMS: dict[str, Callable[[Talk], dict[str, Any]]] = {"openenv": _openenv, "verifiers": _verifiers, "rows": _row}


def written(folder: Path, form: str, *given: Talk) -> Path:
    """Write a file of traces in a format, one trace per line."""
    path = folder / f"{form}.jsonl"
    path.write_text("".join(json.dumps(FORMS[form](talk)) + "\n" for talk in given), encoding="utf-8")
    return path


def _as_client(message: Any) -> dict[str, Any]:
    """Return a message as OpenAI's clients write it: null fields, and arguments as text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {
        **message,
        "refusal": None,
        **({"tool_calls": calls, "content": message["content"] or None} if calls else {}),
    }


def _as_verifiers(message: Any) -> dict[str, Any]:
    calls = [
        {"id": call["id"], "type": "function", "name": call["function"]["name"],
         "arguments": json.dumps(call["function"]["arguments"])}
        for call in message.get("tool_calls") or ()
    ]  # fmt: skip
    return {**message, **({"tool_calls": calls} if calls else {})}
