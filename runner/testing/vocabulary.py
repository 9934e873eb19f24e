"""Vocabularies that nobody has to download: plain bytes, and an awkward one that cannot be decoded and encoded back."""

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
"""Rows behind the vocabulary that decode to nothing, as models have them that pad their embedding."""


class PlainTokenizer(ByteTokenizer):
    """Ids 0 to 255 are the bytes of UTF-8, then come ChatML's control tokens; with a chat template.

    Args:
        control_tokens: further control tokens.
        template: a bundled name or the path of a .jinja file.
    """

    def __init__(self, control_tokens: Sequence[str] = (), *, template: str = "pythonic") -> None:
        super().__init__(control_tokens)
        self.template = ChatTemplate.load(template)
        """The chat template."""

    def chat(
        self, messages: Prompt, *, tools: Sequence[dict[str, Any]] = (), generation_prompt: bool = True
    ) -> list[int]:
        """The ids of a conversation, as the template writes it.

        Args:
            messages: a text, a message or a list of messages.
            tools: the schemas of the tools, in OpenAI's shape.
            generation_prompt: end with the opening of the model's turn.
        """
        text = self._renderer.render(as_messages(messages), tools=tools, generation_prompt=generation_prompt)
        return self.encode(text)

    @cached_property
    def _renderer(self) -> Any:
        return self.template.renderer()


class AwkwardTokenizer(PlainTokenizer):
    """The plain one's twin with what makes real vocabularies hard.

    Most texts can be spelled in several ways, and `encode` knows one: sampled ids that are decoded and encoded again
    come back as others. Text is composed (NFC), so some changes even as text. The last rows are padding and decode to
    nothing. A scripted engine of this kit spells the model's words by `misspell`, never as `encode` would.
    """

    def __init__(self, control_tokens: Sequence[str] = (), *, template: str = "pythonic") -> None:
        super().__init__(control_tokens, template=template)
        assert self.pieces is not None
        words = [word.encode() for word in _WORDS]
        self._words = {word: self.size + number for number, word in enumerate(words)}
        self._longest = max(map(len, words))
        self.pieces = [*self.pieces, *words, *([b""] * _PADDING_ROWS)]
        self.size = len(self.pieces)
        self.longest_token = 3 * max(map(len, self.pieces))  # composing makes a text up to three times shorter
        self.fingerprint = f"awkward-{self.fingerprint}"
        self._bytes = dict(enumerate(self.pieces))

    def encode(self, text: str, content: Content = ()) -> list[int]:
        """Ids of the composed text, the longest word first; see `Tokenizer`."""
        ids: list[int] = []
        plain: list[int] = []
        for token_id in super().encode(text, content):
            if token_id < 256:  # a byte: joined with its neighbours to words; above are control tokens
                plain.append(token_id)
            else:
                ids += [*self._joined(bytes(plain)), token_id]
                plain = []
        return [*ids, *self._joined(bytes(plain))]

    def misspell(self, text: str) -> list[int]:
        """Ids that decode to `text` and that `encode` never gives where a word of the vocabulary stands in it."""
        return super().encode(text)

    def normalize(self, text: str) -> str:
        """`text` composed; see `Tokenizer`."""
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
