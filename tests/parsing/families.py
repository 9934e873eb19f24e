"""Published templates by family, the ends of their turns, and the test episode for each."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from runner import Environment, Task, Trajectory, reward, tool
from runner.parsing.format_cache import cached_format
from runner.parsing.turn_format import TurnFormat
from runner.testing import Reply, ScriptedEngine, assert_exact, call
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.probe_messages import ANSWER, ANSWERED, ASKED, CALL, QUESTION, TOOLS, VALUE, result
from runner.tokens.template import ChatTemplate, Renderer
from tests.conformance.corpus import CLOCK, VARIABLES, control_tokens, corpus

__all__ = [
    "FAMILIES",
    "TEMPLATES",
    "ExpectedTurns",
    "Family",
    "Library",
    "assert_played",
    "family",
    "played",
]

TEMPLATES: Final = {
    "Llama 3.1": "meta-llama-Llama-3.1-8B-Instruct",
    "Mistral 7B": "mistralai-Mistral-7B-Instruct-v0.3",
    "Mistral Small 3.2": "Mistral-Small-3.2-24B-Instruct-2506",
    "Ministral 3": "mistralai-Ministral-3-8B-Instruct-2512",
    "DeepSeek V3.2": "deepseek-ai-DeepSeek-V3.2",
    "GLM 4.6": "GLM-4.6",
    "GLM 5": "zai-org-GLM-5.2",
    "Kimi K2": "moonshotai-Kimi-K2-Instruct",
    "Gemma 4": "google-gemma-4-31B-it",
    "FunctionGemma": "unsloth-functiongemma-270m-it",
    "Nemotron 3": "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "Nemotron Nano 2": "nvidia-NVIDIA-Nemotron-Nano-12B-v2",
    "Hunyuan": "tencent-Hunyuan-0.5B-Pretrain",
    "MiniMax M2": "MiniMaxAI-MiniMax-M2",
    "Qwen3": "Qwen-Qwen3-0.6B",
    "Qwen3-Coder": "Qwen-Qwen3-Coder-30B-A3B-Instruct",
    "Qwen3.5": "Qwen3.5-4B",
    "Granite 4": "ibm-granite-granite-4.0",
    "Olmo 3": "allenai-Olmo-3-7B-Instruct",
    "LFM 2.5": "LFM2.5-8B-A1B",
    "Seed-OSS": "ByteDance-Seed-OSS",
    "Apertus": "Apertus-8B-Instruct",
    "EXAONE 4": "LGAI-EXAONE-EXAONE-4.0-32B",
    "Command A": "Cohere2MoE",
}
"""Families whose format is learnt."""

FAMILIES: Final = {**TEMPLATES, "gpt-oss": "openai-gpt-oss-120b"}


@dataclass(frozen=True)
class Family:
    """A published template and its turn format."""

    template: ChatTemplate
    form: TurnFormat
    ends: tuple[str, str]
    """Control tokens at the end of an answer, and of a turn with calls."""
    tokenizer: ByteTokenizer
    """Bytes and all control tokens of the template."""

    @property
    def stop_ids(self) -> tuple[int, int]:
        """Return the ids at the end of an answer, and of a turn with calls."""
        answer, calls = (self.tokenizer.encode(each)[0] for each in self.ends)
        return answer, calls

    def scripted(self, replies: Sequence[Reply]) -> ScriptedEngine:
        """Return an engine with these replies."""
        # Every byte is an id, so the schemas of many tools need a long context.
        return ScriptedEngine(
            replies, template=self.template, tokenizer=self.tokenizer, stop_ids=self.stop_ids, context=1 << 20
        )


@functools.cache
def family(name: str) -> Family:
    """Load one of `FAMILIES`."""
    text = next(entry.text for entry in corpus() if entry.name == FAMILIES[name])
    template = ChatTemplate(text, name=FAMILIES[name], variables=VARIABLES)
    renderer = template.renderer(now=CLOCK)
    form = cached_format(renderer).format
    # In a history, gpt-oss ends every message in the same way, and writes no end of a turn.
    ends = ("<|return|>", "<|call|>") if form.harmony else _ends(renderer, form)
    tokenizer = ByteTokenizer(list(dict.fromkeys((*control_tokens(renderer.written()), *ends))))
    return Family(template, form, ends, tokenizer)


def _ends(renderer: Renderer, form: TurnFormat) -> tuple[str, str]:
    """Return the end of an answer, and of a turn with calls."""
    assert form.calls is not None
    turns = [QUESTION, ANSWER, QUESTION]
    end = _first_control(renderer.render(turns, generation_prompt=False).partition(ANSWERED)[2])
    if renderer.render([QUESTION], generation_prompt=False).partition(ASKED)[0].rstrip().endswith(end):
        # Only the beginning of the next turn ends a turn. After calls, the end is a different token.
        called = renderer.render([QUESTION, CALL, result()], tools=TOOLS, generation_prompt=False)
        return end, _first_control(called.partition(VALUE)[2].partition(form.calls.close)[2])
    return end, form.calls.stop or end


def _first_control(text: str) -> str:
    return control_tokens(text)[0]


# --- the episode

HARD = 'a "quoted" word,\nit\'s <b>bold</b> & {braces} \\'


class Library(Environment):
    """Environment that requires two rounds of look-ups."""

    def tasks(self) -> list[Task]:
        return [Task("where", prompt="Where is it?")]

    @tool
    def look_up(self, query: str, limit: int = 3) -> str:
        """Look something up.

        Args:
            query: what to look for.
            limit: how much at most.
        """
        return f"{limit} things about {query!r}"

    @tool
    def refresh(self, hard: bool = False) -> str:
        """Read everything again.

        Args:
            hard: whether really everything.
        """
        return f"refreshed {hard}"

    @reward
    def done(self) -> bool:
        return self.episode.text == "Done."


@dataclass(frozen=True)
class ExpectedTurns:
    """The model's output, and the calls of its first turns."""

    replies: list[Reply]
    calls: list[list[tuple[str, Mapping[str, Any]]]]


def played(form: TurnFormat, stop: int, call_stop: int) -> ExpectedTurns:
    """Return two rounds of calls, a malformed call and an answer, each after reasoning if the format has it.

    Args:
        form: turn format.
        stop: id at the end of an answer.
        call_stop: id at the end of a turn with calls.
    """
    assert form.calls is not None
    thought = ""
    if form.reasoning is not None:
        thought = f"{'' if form.reasoning.opened_by_prompt else form.reasoning.open}Hm.{form.reasoning.close}"
    first, second = ("look_up", {"limit": 2, "query": HARD}), ("refresh", {"hard": True})
    calls: list[list[tuple[str, Mapping[str, Any]]]] = [[first], [first, second] if form.calls.between else [second]]
    replies = [
        Reply(thought, calls=tuple(call(name, **arguments) for name, arguments in turn), stop=call_stop)
        for turn in calls
    ]
    begun = form.calls.trigger or f"{form.calls.begin}{_opening(form)}"
    replies += [Reply(f"{thought}{begun} ...", stop=stop), Reply(f"{thought}{form.content.open}Done.", stop=stop)]
    return ExpectedTurns(replies, calls)


def _opening(form: TurnFormat) -> str:
    """Return the beginning of a call in a format without a trigger."""
    assert form.calls is not None
    return "".join("look_up" if isinstance(piece, str) else piece.text for piece in form.calls.call[:3])


def assert_played(trajectory: Trajectory, said: ExpectedTurns, form: TurnFormat) -> None:
    """Check that all turns were read as intended."""
    assert trajectory.outcome.scored, trajectory.error
    assert trajectory.reward == 1
    assert_exact(trajectory)
    turns = trajectory.turns
    for turn, calls in zip(turns[:2], said.calls, strict=True):
        assert [(each.name, each.arguments) for each in turn.tool_calls] == calls
        assert all(each.error is None for each in turn.tool_calls)
    (malformed,) = turns[2].tool_calls
    assert malformed.error is not None
    assert [turn.reasoning for turn in turns] == ["Hm." if form.reasoning else ""] * 4
