"""Whole episodes with tools on published templates: two rounds, parallel calls, a malformed call, thoughts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runner import Environment, Run, Task, Trajectory, reward, tool
from runner.parsing.learnt import learnt_turn
from runner.parsing.turn_format import TurnFormat
from runner.testing import Reply, ScriptedEngine, assert_exact, call
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.template import ChatTemplate, Renderer
from tests.conformance.corpus import CLOCK, VARIABLES, control_tokens, corpus
from tests.verifying import verify

pytestmark = pytest.mark.anyio

HARD = 'a "quoted" word,\nit\'s <b>bold</b> & {braces} \\'
TEMPLATES = {
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


class Library(Environment):
    """Asks for two rounds of look-ups."""

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
class Played:
    """What the model says, and the calls that must have been read of its first turns."""

    replies: list[Reply]
    calls: list[list[tuple[str, Mapping[str, Any]]]]


def played(form: TurnFormat, stop: int, call_stop: int) -> Played:
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
    begun = form.calls.trigger or f"{form.calls.begin}{opening(form)}"
    replies += [Reply(f"{thought}{begun} ...", stop=stop), Reply(f"{thought}Done.", stop=stop)]
    return Played(replies, calls)


def opening(form: TurnFormat) -> str:
    """How a call of a tool begins where nothing announces it."""
    assert form.calls is not None
    return "".join("look_up" if isinstance(piece, str) else piece.text for piece in form.calls.call[:3])


def first_control(text: str | None, behind: str) -> str:
    """The control token that ends what stands behind a word."""
    assert text is not None
    return control_tokens(text.rpartition(behind)[2])[0]


def ends(renderer: Renderer) -> tuple[str, str]:
    """What ends an answer, and what ends a turn with calls."""
    if learnt_turn(renderer).format.harmony:  # in a history it ends all messages alike, and no turn
        return "<|return|>", "<|call|>"
    question, again = {"role": "user", "content": "?"}, {"role": "user", "content": "And?"}
    said = {"role": "assistant", "content": "zqanswerz"}
    answer = renderer.render([question, said, again], generation_prompt=False)
    form = learnt_turn(renderer).format.calls
    assert form is not None
    return first_control(answer, "zqanswerz"), form.stop or first_control(answer, "zqanswerz")


@pytest.mark.parametrize("name", TEMPLATES)
async def test_two_rounds_with_parallel_calls_a_malformed_one_and_thoughts(name: str, tmp_path: Path) -> None:
    text = next(entry.text for entry in corpus() if entry.name == TEMPLATES[name])
    template = ChatTemplate(text, name=TEMPLATES[name], variables=VARIABLES)
    renderer = template.renderer(now=CLOCK)
    form = learnt_turn(renderer).format
    stops = ends(renderer)
    tokenizer = ByteTokenizer(list(dict.fromkeys((*control_tokens(renderer.written()), *stops))))
    stop, call_stop = (tokenizer.encode(each)[0] for each in stops)
    said = played(form, stop, call_stop)
    engine = ScriptedEngine(said.replies, template=template, tokenizer=tokenizer, stop_ids=(stop, call_stop))
    path = tmp_path / "run.db"
    async with Run(Library, engine, file=path) as run:
        (trajectory,) = [each async for each in run]
    check(trajectory, said, form)
    result = verify(path)
    assert result.exit_code == 0, result.output


def check(trajectory: Trajectory, said: Played, form: TurnFormat) -> None:
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
