"""Effects of a model's template on a turn: reasoning that the prompt opens, and stop ids that the template lacks."""

from __future__ import annotations

import pytest

from runner import Conversation, Environment, Run, Sampling, ScriptedEngine, Task, Trajectory, reward
from runner.testing import Reply
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.junction import Close
from runner.tokens.template import ChatTemplate

pytestmark = pytest.mark.anyio

THINKING = ChatTemplate(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    name="thinking",
)


class Chat(Environment):
    def tasks(self) -> list[Task]:
        return [Task("one", "Hello.")]

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate()
        conversation.add("And now?")
        await conversation.generate()

    @reward
    def one(self) -> int:
        return 1


async def play(engine: ScriptedEngine, sampling: Sampling | None = None) -> Trajectory:
    async with Run(Chat(), engine, sampling=sampling) as run:
        (trajectory,) = [trajectory async for trajectory in run]
    assert not trajectory.error
    return trajectory


async def test_turn_after_an_opened_thought_begins_with_reasoning() -> None:
    trajectory = await play(ScriptedEngine(["I wonder.</think>Good day.", "Hm.</think>Bye."], template=THINKING))
    assert [(turn.reasoning, turn.text) for turn in trajectory.turns] == [("I wonder.", "Good day."), ("Hm.", "Bye.")]


async def test_stop_id_of_the_author_ends_a_turn_that_is_then_closed() -> None:
    full_stop = ByteTokenizer().encode(".")[0]
    engine = ScriptedEngine([Reply("Good day. Never said", stop=full_stop), "Bye"])
    trajectory = await play(engine, Sampling(stop_ids=(full_stop,)))
    first, second = trajectory.turns
    assert (first.text, first.stop) == ("Good day", full_stop)
    assert list(second.prompt_ids[: first.end]) == list(first.log.ids[: first.end])
    assert second.junction is not None
    assert second.junction.close is Close.MASKED
    said = engine.tokenizer.decode(second.prompt_ids)
    assert "Good day.<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>" in said
