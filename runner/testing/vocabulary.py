"""Vocabularies without downloads: plain bytes, and one whose ids change when they are decoded and encoded again."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

from runner.messages import Prompt, as_messages
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.template import ChatTemplate
from runner.tokens.tokenizer import Content

__all__ = ["AwkwardTokenizer", "PlainTokenizer"]

_WORDS: Final = (
    *("th", "the", " the", " is", " is ", "It", "It is ", "in", "er", " a", ", ", ". ", "?\n", "\n\n", "\n[", "]\n"),
    *("system", "user", "assistant", "assistant\n", "tool", "tool\n", "([", "])", "(a=", ", b=", "=", "call"),
    *("00", "42", "é", "日本", "\U0001f600", "</", "><", '{"', '"}', '": ', "think>"),
)
_PADDING_ROWS: Final = 8
"""Number of ids after the vocabulary that decode to nothing, as in models with a padded embedding."""


class PlainTokenizer(ByteTokenizer):
    """A vocabulary of the 256 bytes of UTF-8 and ChatML's control tokens, with a chat template.

    Args:
        control_tokens: further control tokens.
        template: the name of a bundled template, or the path of a .jinja file.
    """

    def __init__(self, control_tokens: Sequence[str] = (), *, template: str = "pythonic") -> None:
        super().__init__(control_tokens)
        self.template = ChatTemplate.load(template)
        """The chat template."""

    def chat(
        self, messages: Prompt, *, tools: Sequence[dict[str, Any]] = (), generation_prompt: bool = True
    ) -> list[int]:
        """The ids of a conversation, rendered by the template.

        Args:
            messages: a string, a message or a list of messages.
            tools: the schemas of the tools, in OpenAI's shape.
            generation_prompt: end with the opening of the model's turn.
        """
        text = self._renderer.render(as_messages(messages), tools=tools, generation_prompt=generation_prompt)
        return self.encode(text)

    @cached_property
    def _renderer(self) -> Any:
        return self.template.renderer()


class AwkwardTokenizer(PlainTokenizer):
    """A vocabulary with the difficulties of real vocabularies.

    Most texts have several sequences of ids, of which `encode` returns one: sampled ids change when they are decoded
    and encoded again. Text is composed (NFC), so some texts change too. The last ids are padding and decode to
    nothing. `QueuedEngine` encodes replies with `misspell`, not with `encode`, unless a reply has its own ids.
    """

    def __init__(self, control_tokens: Sequence[str] = (), *, template: str = "pythonic") -> None:
        super().__init__(control_tokens, template=template)
        assert self.pieces is not None
        words = [word.encode() for word in _WORDS]
        self._words = {word: self.size + number for number, word in enumerate(words)}
        self._longest = max(map(len, words))
        self.pieces = [*self.pieces, *words, *([b""] * _PADDING_ROWS)]
        self.size = len(self.pieces)
        self.longest_token = 3 * max(map(len, self.pieces))  # composed text is up to three times shorter
        self.fingerprint = f"awkward-{self.fingerprint}"
        self._bytes = dict(enumerate(self.pieces))

    def encode(self, text: str, content: Content = ()) -> list[int]:
        """Ids of the composed text; at each place the longest word that fits. See `Tokenizer`."""
        ids: list[int] = []
        plain: list[int] = []
        for token_id in super().encode(text, content):
            if token_id < 256:  # bytes are joined to words; higher ids are control tokens
                plain.append(token_id)
            else:
                ids += [*self._joined(bytes(plain)), token_id]
                plain = []
        return [*ids, *self._joined(bytes(plain))]

    def misspell(self, text: str) -> list[int]:
        """Ids that decode to `text`. They differ from those of `encode` if `text` contains a word of the vocabulary."""
        return super().encode(text)

    def normalize(self, text: str) -> str:
        """Return `text` composed (NFC); see `Tokenizer`."""
        return unicodedata.normalize("NFC", super().normalize(text))

    def _joined(self, said: bytes) -> list[int]:
        text = self.normalize(said.decode()).encode()
        ids, at = [], 0
        while at < len(text):
            length = next((size for size in range(self._longest, 1, -1) if text[at : at + size] in self._words), 1)
            word = text[at : at + length]
            ids.append(self._words.get(word, word[0]))
            at += length
        return ids
