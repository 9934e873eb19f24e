"""Episodes on the templates and vocabularies of public families."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from runner import ScriptedEngine, Trajectory, tool
from tests.playing import Plain
from tests.tokens.families import called, model

CHATML = ["qwen2.5", "qwen3", "qwen3-thinking", "qwen3-coder", "qwen3.6", "smollm2", "smollm3"]
GLM = ["glm-4.5", "glm-4.6"]
SHOWS_CALLS = [
    *("qwen2.5", "qwen3", "qwen3-thinking", "qwen3-coder", "qwen3.6", "glm-4.5", "glm-4.6", "gpt-oss", "gemma-4"),
    *("kimi", "minimax", "llama-3.1", "llama-3.2", "deepseek-v3.1", "devstral", "ministral-3"),
]
SUM = called({"a": 17, "b": 25})


def speaking(name: str, replies: Any, **settings: Any) -> ScriptedEngine:
    """Return a scripted engine with the template, the vocabulary and the stops of a family."""
    made = model(name)
    return ScriptedEngine(
        replies, tokenizer=made.tokenizer, template=made.template, stop_ids=made.stop_ids, record=True, **settings
    )


class Adds(Plain):
    """Environment whose calls are answered until a turn has none."""

    @tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


def bridges(trajectory: Trajectory, engine: ScriptedEngine) -> list[str]:
    """Return the ids between the turns of a one-segment trajectory, after checking that prompts extend each other."""
    assert [segment.cause for segment in trajectory.segments] == ["start"], trajectory.error
    texts = []
    for before, turn in pairwise(trajectory.turns):
        prefix = [*before.prompt_ids, *before.token_ids]
        assert list(turn.prompt_ids[: len(prefix)]) == prefix
        assert (turn.junction.inserted if turn.junction else 0) == turn.start - before.end
        texts.append(engine.tokenizer.decode(turn.prompt_ids[len(prefix) :]))
    return texts
