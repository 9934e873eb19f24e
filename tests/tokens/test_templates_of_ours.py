"""Variants of public templates, kept here because the originals cannot be bridged. Each test is a reason."""

import pytest

from runner.messages import Message
from runner.tokens.bridging.bridge import Bridger, Unbridgeable
from runner.tokens.junction import Result
from runner.tokens.template import ChatTemplate
from runner.tokens.tokenizer import VocabularyTokenizer
from tests.conformance.corpus import corpus
from tests.tokens.vocabularies import vocabulary

QUESTION: Message = {"role": "user", "content": "What is 17 + 25?"}
SAID: Message = {"role": "assistant", "content": "42"}
MORE: Message = {"role": "user", "content": "And twice that?"}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}


@pytest.fixture(scope="module")
def tekken() -> VocabularyTokenizer:
    return vocabulary("tekken")


def bridger(template: ChatTemplate, tokenizer: VocabularyTokenizer) -> Bridger:
    eos = tokenizer.token_id("</s>")
    assert eos is not None
    named = template.with_variables({"bos_token": "<s>", "eos_token": "</s>"})
    return Bridger(tokenizer, named.renderer(), [eos])


def test_nemos_template_moves_the_tools_and_ours_does_not(tekken: VocabularyTokenizer) -> None:
    text = next(entry.text for entry in corpus() if entry.name == "0xA50C1A1-Mistral-Nemo-Instruct-2407-Heretic-v2")
    own = bridger(ChatTemplate(text, name="Mistral-Nemo"), tekken)
    ours = bridger(ChatTemplate.load("mistral_nemo"), tekken)
    (eos,) = ours.stop_ids
    sampled = [*tekken.encode("42"), eos]
    with pytest.raises(Unbridgeable, match="tools_move"):
        own.bridge([QUESTION, SAID], [MORE], [ADD], sampled=sampled, stop=eos)
    bridge = ours.bridge([QUESTION, SAID], [MORE], [ADD], sampled=sampled, stop=eos)
    assert bridge.junction.result is Result.APPENDED
    assert tekken.decode(bridge.ids) == "[INST]And twice that?[/INST]"
    whole = ours.renderer.render([QUESTION, SAID, MORE], tools=[ADD])
    assert whole == tekken.decode([*ours.first_prompt([QUESTION], [ADD]), *sampled, *bridge.ids])


def test_ours_for_nemo_writes_a_tool_round_as_nemos_own_does(tekken: VocabularyTokenizer) -> None:
    text = next(entry.text for entry in corpus() if entry.name == "0xA50C1A1-Mistral-Nemo-Instruct-2407-Heretic-v2")
    call = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 17, "b": 25}}}
    # parsed arguments
    turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}  # type: ignore[list-item]
    result: Message = {"role": "tool", "content": "42", "tool_call_id": "call00001", "name": "add"}
    own = bridger(ChatTemplate(text, name="Mistral-Nemo"), tekken).renderer
    ours = bridger(ChatTemplate.load("mistral_nemo"), tekken).renderer
    theirs = own.render([QUESTION, turn, result], tools=[ADD])
    # The original writes a numeric result without quotes, and ours writes it as text.
    assert ours.render([QUESTION, turn, result], tools=[ADD]) == theirs.replace('"content": 42', '"content": "42"')
