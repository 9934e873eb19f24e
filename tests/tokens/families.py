"""Model families for tests of single cases: the real template, the real vocabulary if there is one, and the stops.

A family whose vocabulary is not available uses Qwen's, with the control tokens of its template added.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.messages import Message
from runner.tokens.bridging.bridge import Bridge, Bridger
from runner.tokens.junction import Result
from runner.tokens.template import ChatTemplate, Renderer, ToolSchema
from runner.tokens.tokenizer import VocabularyTokenizer
from tests.conformance.corpus import CLOCK, control_tokens, corpus
from tests.tokens.vocabularies import host, vocabulary

__all__ = [
    "ADD",
    "FAMILIES",
    "MORE",
    "QUESTION",
    "TOOLS_MOVE",
    "Family",
    "Model",
    "called",
    "family",
    "model",
    "result",
    "says",
]

WIDE = "\uff5c"
BAR = "\u2581"

QUESTION: Message = {"role": "user", "content": "What is 17 + 25?"}
MORE: Message = {"role": "user", "content": "And twice that?"}
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "description": "One."}, "b": {"type": "integer", "description": "Two."}},
    "required": ["a", "b"],
}
ADD: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS},
}


@dataclass(frozen=True, slots=True)
class Family:
    """The files of one model."""

    template: str
    """The template's name in the corpus."""
    stops: tuple[str, ...]
    """The names of the tokens that end its turns, the EOS first."""
    vocabulary: str = ""
    """The name of a real vocabulary; "" for Qwen's with the template's control tokens."""
    further: tuple[str, ...] = ()
    """Control tokens that the template writes in parts, or that only the model writes."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The variables that the template reads by name."""


_QWEN = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
_DEEPSEEK = {
    "bos_token": f"<{WIDE}begin{BAR}of{BAR}sentence{WIDE}>",
    "eos_token": f"<{WIDE}end{BAR}of{BAR}sentence{WIDE}>",
}
_MISTRAL = {"bos_token": "<s>", "eos_token": "</s>"}
_LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
_GLM = ("<|endoftext|>", "<|user|>", "<|observation|>")

FAMILIES: Mapping[str, Family] = {
    "qwen2.5": Family("Qwen-Qwen2.5-7B-Instruct", ("<|im_end|>", "<|endoftext|>"), "qwen", variables=_QWEN),
    "qwen3": Family("Qwen-Qwen3-0.6B", ("<|im_end|>", "<|endoftext|>"), "qwen", variables=_QWEN),
    "qwen3-thinking": Family("Qwen-Qwen3-4B-Thinking-2507", ("<|im_end|>", "<|endoftext|>"), "qwen", variables=_QWEN),
    "qwen3-coder": Family(
        "Qwen-Qwen3-Coder-30B-A3B-Instruct", ("<|im_end|>", "<|endoftext|>"), "qwen", variables=_QWEN
    ),
    "qwen3.6": Family("Qwen-Qwen3.6-35B-A3B", ("<|im_end|>", "<|endoftext|>"), "qwen3_6", variables=_QWEN),
    "glm-4.5": Family("zai-org-GLM-4.5-Air", _GLM, further=("<|assistant|>", "<|system|>", *_GLM)),
    "glm-4.6": Family("GLM-4.6", _GLM, further=("<|assistant|>", "<|system|>", *_GLM)),
    "glm-4": Family("zai-org-GLM-4-9B-0414", _GLM, further=("<|assistant|>", "<|system|>", *_GLM)),
    "gpt-oss": Family("openai-gpt-oss-120b", ("<|return|>", "<|call|>"), further=_HARMONY),
    "gemma-4": Family(
        "google-gemma-4-31B-it",
        ("<turn|>", "<|tool_response>"),
        further=("<bos>", "<|tool_call>", "<tool_call|>"),
        variables={"bos_token": "<bos>"},
    ),
    "kimi": Family("moonshotai-Kimi-K2-Instruct", ("<|im_end|>",)),
    "minimax": Family("MiniMaxAI-MiniMax-M2", ("[e~[",)),
    "llama-3.1": Family(
        "meta-llama-Llama-3.1-8B-Instruct",
        ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
        further=(*_LLAMA, "<|end_of_text|>"),
        variables={"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    ),
    "llama-3.2": Family(
        "meta-llama-Llama-3.2-3B-Instruct",
        ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
        further=(*_LLAMA, "<|end_of_text|>"),
        variables={"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    ),
    "deepseek-v3": Family(
        "yujiepan-deepseek-v3-tiny-random", (_DEEPSEEK["eos_token"],), "deepseek", variables=_DEEPSEEK
    ),
    "deepseek-v3.1": Family("deepseek-ai-DeepSeek-V3.1", (_DEEPSEEK["eos_token"],), "deepseek", variables=_DEEPSEEK),
    "mistral-7b": Family("mistralai-Mistral-7B-Instruct-v0.3", ("</s>",), "mistral_sentencepiece", variables=_MISTRAL),
    "mistral-small": Family("mistralai-Mistral-Small-24B-Instruct-2501", ("</s>",), "tekken", variables=_MISTRAL),
    "nemo": Family("mistralai-Mistral-Nemo-Instruct-2407", ("</s>",), "tekken", variables=_MISTRAL),
    "devstral": Family("unsloth-mistral-Devstral-Small-2507", ("</s>",), "tekken", variables=_MISTRAL),
    "ministral-3": Family("mistralai-Ministral-3-8B-Instruct-2512", ("</s>",), "tekken", variables=_MISTRAL),
    "smollm2": Family(
        "HuggingFaceTB-SmolLM2-135M-Instruct",
        ("<|im_end|>",),
        "smollm2",
        variables={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
    ),
    "smollm3": Family("HuggingFaceTB-SmolLM3-3B", ("<|im_end|>",), "smollm2", variables={"eos_token": "<|im_end|>"}),
}


TOOLS_MOVE = frozenset({"mistral-7b", "nemo"})
"""Families whose template prints the tools before the last user turn, so that the tools move."""


@functools.cache
def _entry(name: str) -> str:
    return next(entry.text for entry in corpus() if entry.name == name)


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded family: its tokenizer, its template, and functions for its turns."""

    name: str
    tokenizer: VocabularyTokenizer
    template: ChatTemplate
    stop_ids: tuple[int, ...]
    renderer: Renderer

    def bridger(self, **settings: Any) -> Bridger:
        """Return a new bridger, which has seen nothing."""
        return Bridger(self.tokenizer, self.renderer, self.stop_ids, **settings)

    def id(self, token: str) -> int:
        """Return the id of a control token."""
        found = self.tokenizer.token_id(token)
        assert found is not None, token
        return found

    def sampled(self, said: str, stop: str | None) -> list[int]:
        """Return the ids of a turn that the model samples, with the stop id at the end."""
        return [*self.tokenizer.encode(said), *([] if stop is None else [self.id(stop)])]

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), *, generation_prompt: bool = True
    ) -> str:
        """Return the template's render of messages."""
        return self.renderer.render(messages, tools=tools, generation_prompt=generation_prompt)

    def after(
        self,
        sampled: Sequence[int],
        history: Sequence[Message],
        *new: Message,
        tools: Sequence[ToolSchema] = (ADD,),
        cut: bool = False,
    ) -> tuple[str, Bridge]:
        """Return the bridge after a turn, and its text. The last id of the turn is its stop, unless the turn was cut.

        The bridge is checked to be the template's own: its text ends the render of all messages. If no content has
        control text, its ids end the ids of that render.
        """
        made = self.bridger()
        bridge = made.bridge(history, new, tools, sampled=sampled, stop=None if cut else sampled[-1])
        assert bridge.junction.result is Result.APPENDED
        assert bridge.junction.inserted == len(bridge.ids) > 0
        text, whole = self.tokenizer.decode(bridge.ids), self.render([*history, *new], tools)
        assert whole.endswith(text)
        if not any(self.tokenizer.holds_control(message["content"]) for message in new):
            assert self.tokenizer.encode(whole)[-len(bridge.ids) :] == bridge.ids
        return text, bridge


@functools.cache
def model(name: str, **options: Any) -> Model:
    """Return a family of `FAMILIES`, made once a session; `options` are the template's, such as `enable_thinking`."""
    kind = FAMILIES[name]
    text = _entry(kind.template)
    if kind.vocabulary:
        tokenizer = vocabulary(kind.vocabulary)
    else:
        names = dict.fromkeys((*control_tokens(text), *kind.further, *kind.stops, *kind.variables.values()))
        tokenizer = host(tuple(names), eos_token=kind.stops[0])
    template = ChatTemplate(text, name=kind.template, variables=kind.variables)
    stops = tuple(token_id for stop in kind.stops if (token_id := tokenizer.token_id(stop)) is not None)
    assert len(stops) == len(kind.stops), kind.stops
    return Model(name, tokenizer, template, stops, template.renderer(options=options, now=CLOCK))


def family(name: str) -> Family:
    """Return the files of the family."""
    return FAMILIES[name]


def called(arguments: Any, *, name: str = "add", call_id: str = "call00000") -> dict[str, Any]:
    """Return a call in OpenAI's form. Its id has nine letters and digits, since Mistral's templates require this."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def says(content: str, *calls: dict[str, Any], reasoning: str = "") -> Message:
    """Return an assistant message."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message  # type: ignore[return-value]  # a message, built key by key


def result(content: str, call_id: str = "call00000", *, name: str = "add") -> Message:
    """Return a tool's result."""
    return {"role": "tool", "content": content, "tool_call_id": call_id, "name": name}


CALL_STOPS = {"glm-4.5": "<|observation|>", "glm-4.6": "<|observation|>", "gpt-oss": "<|call|>"}
CALL_STOPS |= {"gemma-4": "<|tool_response>"}
QWEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>'


def call_stop(name: str) -> str:
    """Return the stop of a turn of the family that calls a tool."""
    return CALL_STOPS.get(name, FAMILIES[name].stops[0])
