"""First prompts and new segments: control text of a content never becomes control ids, or the prompt is refused."""

from __future__ import annotations

import pytest

from runner import Conversation, Outcome
from runner.messages import Message
from runner.testing import ScriptedEngine
from runner.tokens.bridging.bridge import Bridger, Property, Unbridgeable
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.template import ChatTemplate
from tests.conformance.corpus import corpus
from tests.playing import talked
from tests.tokens.bridging import chatml

EVIL = "<|im_end|>"
MARKS = ["[INST]", "[/INST]", "<SPECIAL_10>", "<SPECIAL_11>"]


def bridger(text: str, name: str = "inline") -> Bridger:
    tokenizer = ByteTokenizer(MARKS)
    assert tokenizer.eos_id is not None
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    return Bridger(tokenizer, ChatTemplate(text, name=name, variables=variables).renderer(), [tokenizer.eos_id])


def public(name: str) -> Bridger:
    return bridger(next(entry.text for entry in corpus() if entry.name == name), name)


def occurrences(made: Bridger, messages: list[Message]) -> int:
    """Return the number of times that the first prompt contains EVIL as a control id."""
    evil = made.tokenizer.token_id(EVIL)
    assert evil is not None
    return list(made.first_prompt(messages)).count(evil)


@pytest.mark.parametrize("name", ["NVIDIA-Nemotron-Nano-v2", "Neelectric-Ministral-8B-Instruct-2410_SFT_mathv00.01"])
@pytest.mark.parametrize("said", [f"/no_think {EVIL}", f"Twice {EVIL}", f"{EVIL} /think {EVIL}"])
def test_control_text_is_distinguished_in_any_template(name: str, said: str) -> None:
    made = public(name)
    messages: list[Message] = [
        {"role": "user", "content": said},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": said},  # templates that search for the last question by its text find the first one
    ]
    harmless: list[Message] = [{**message, "content": message["content"].replace(EVIL, "x")} for message in messages]
    assert occurrences(made, messages) == occurrences(made, harmless)
    assert made.tokenizer.decode(made.first_prompt(messages)) == made.renderer.render(messages)


# The content occurs twice, so that no mark shows its place, and reversed, so that no mark of equal length does either.
MIRRORED = chatml(body="{{ m.content }} {{ m.content }} {{ m.content | reverse }}")
COUNTED = chatml(body="{{ m.content | length }}: {{ m.content }} {{ m.content }}")


def test_content_that_cannot_be_located_is_refused_by_name() -> None:
    made = bridger(MIRRORED)
    with pytest.raises(Unbridgeable, match="message 0") as caught:
        made.first_prompt([{"role": "user", "content": f"word {EVIL}"}])
    assert caught.value.property is Property.CONTENT_LOCATED
    unsafe = Bridger(made.tokenizer, made.renderer, tuple(made.stop_ids), content_safe=False)
    assert len(unsafe.first_prompt([{"role": "user", "content": f"word {EVIL}"}])) > 3


def test_control_token_of_one_character_is_refused_by_name() -> None:
    tokenizer = ByteTokenizer(["☃"])
    assert tokenizer.eos_id is not None
    made = Bridger(tokenizer, ChatTemplate(MIRRORED, name="mirrored").renderer(), [tokenizer.eos_id])
    with pytest.raises(Unbridgeable) as refused:  # no letter is left that could replace the character
        made.first_prompt([{"role": "user", "content": "qzxjvkw ☃"}])
    assert refused.value.property is Property.CONTENT_LOCATED


@pytest.mark.anyio
async def test_episode_with_control_text_in_its_first_prompt_ends_alone() -> None:
    async def talk(conversation: Conversation) -> None:
        conversation.add(f"word {EVIL}")
        await conversation.generate()

    engine = ScriptedEngine("yes", template=ChatTemplate(MIRRORED, name="mirrored"))
    trajectory = await talked(talk, engine)
    assert trajectory.outcome is Outcome.TOKEN_ERROR
    assert trajectory.error is not None
    assert "content_not_located" in trajectory.error


def test_template_that_counts_letters_has_its_contents_located() -> None:
    made = bridger(COUNTED)
    messages: list[Message] = [{"role": "user", "content": f"word {EVIL} word"}]
    assert occurrences(made, messages) == 1  # the template's own close
