"""The host vocabulary: Qwen's, with the control tokens of every template of the corpus."""

from __future__ import annotations

import functools
import json
from typing import Any

from runner.tokens.tokenizer import VocabularyTokenizer
from tests.conformance.corpus import VARIABLES, every_control_token, is_special
from tests.tokens.vocabularies import qwen

__all__ = ["END_OF_TEXT", "host"]

END_OF_TEXT = VARIABLES["eos_token"]


@functools.cache
def host() -> VocabularyTokenizer:
    """Return one vocabulary for all templates, the same instance during the whole session.

    Tags such as `</think>` are added tokens that are not special, as in Qwen's own vocabulary. A name that is an
    ordinary word in this vocabulary, such as `</s>`, keeps its id.
    """
    settings = json.loads(qwen()._tokenizer.to_str())
    words: dict[str, int] = settings["model"]["vocab"]
    added: list[dict[str, Any]] = settings["added_tokens"]
    known = {token["content"] for token in added}
    following = max(*words.values(), *(token["id"] for token in added)) + 1
    for name in (name for name in every_control_token() if name not in known):
        added.append(
            {
                "id": words.get(name, following),
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": is_special(name),
            }
        )
        following += name not in words
    added.sort(key=lambda token: token["id"])
    return VocabularyTokenizer(json.dumps(settings), eos_token=END_OF_TEXT)
