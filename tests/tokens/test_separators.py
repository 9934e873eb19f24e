"""The separator of two turns: it follows the stop of the first turn, and belongs to the bridge, never to the model."""

import functools
import json
from collections.abc import Callable

import pytest

from runner.messages import Message
from runner.tokens.bridging.bridge import Bridge, Bridger
from runner.tokens.junction import Close
from runner.tokens.template import ChatTemplate
from runner.tokens.tokenizer import VocabularyTokenizer
from tests.conformance.corpus import CLOCK, corpus
from tests.tokens.vocabularies import vocabulary

HISTORY: list[Message] = [{"role": "user", "content": "What is 17 + 25?"}, {"role": "assistant", "content": "42"}]
MORE: Message = {"role": "user", "content": "And twice that?"}
PHI = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")


@functools.cache
def phi(*, rstrip: bool) -> VocabularyTokenizer:
    """Return a vocabulary with Phi-3's control tokens, which in Phi-3 swallow the white space after them."""
    settings = json.loads(vocabulary("smollm2")._tokenizer.to_str())
    first = vocabulary("smollm2").size
    flags = dict.fromkeys(("single_word", "lstrip", "normalized"), False) | {"rstrip": rstrip, "special": True}
    settings["added_tokens"] += [{"id": first + index, "content": name, **flags} for index, name in enumerate(PHI)]
    return VocabularyTokenizer(json.dumps(settings), eos_token="<|endoftext|>")


MODELS: dict[str, tuple[str, Callable[[], VocabularyTokenizer], str, str]] = {
    "ChatML": ("Qwen-Qwen2.5-7B-Instruct", lambda: vocabulary("qwen"), "<|im_end|>", "<|endoftext|>"),
    "Gemma": ("unsloth-gemma-3-270m-it", lambda: vocabulary("gemma"), "<end_of_turn>", "<eos>"),
    "Phi-3": ("microsoft-Phi-3-mini-4k-instruct", lambda: phi(rstrip=True), "<|end|>", "<|endoftext|>"),
    "Phi-3 that swallows nothing": (
        "microsoft-Phi-3-mini-4k-instruct",
        lambda: phi(rstrip=False),
        "<|end|>",
        "<|endoftext|>",
    ),
}


def after(name: str, stop: str) -> tuple[Bridge, VocabularyTokenizer]:
    """Return the bridge from a turn that ended with this stop."""
    template, load, *stops = MODELS[name]
    text = next(entry.text for entry in corpus() if entry.name == template)
    variables = {"bos_token": "<bos>", "eos_token": "<|endoftext|>"}
    tokenizer = load()
    ids = [token_id for each in stops if (token_id := tokenizer.token_id(each)) is not None]
    bridger = Bridger(tokenizer, ChatTemplate(text, name=template, variables=variables).renderer(now=CLOCK), ids)
    sampled = tokenizer.encode(f"42{stop}")
    assert sampled[-1] in ids
    return bridger.bridge(HISTORY, [MORE], sampled=sampled, stop=sampled[-1]), tokenizer


@pytest.mark.parametrize("name", MODELS)
def test_another_stop_is_followed_by_what_follows_the_templates_own(name: str) -> None:
    own, another = MODELS[name][2:]
    expected, tokenizer = after(name, own)
    made, _ = after(name, another)
    assert made.ids == expected.ids
    assert (expected.junction.close, made.junction.close) == (Close.SAMPLED, Close.REPLACED)
    swallowed = name == "Phi-3"
    assert tokenizer.decode(made.ids).startswith("\n") != swallowed
