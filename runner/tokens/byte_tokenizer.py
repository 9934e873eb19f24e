"""A vocabulary of the 256 bytes and a few control tokens, for scripted engines and tests, without a download."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from runner.tokens.content_encoding import Borders, Content, masked
from runner.tokens.token_bytes import Words
from runner.tokens.tokenizer import Tokenizer, without_surrogates

__all__ = ["ByteTokenizer"]


class ByteTokenizer(Tokenizer):
    """A `Tokenizer` whose ids 0 to 255 are bytes; control tokens follow, and then added tokens, in the given order.

    Args:
        control_tokens: further control tokens, after ChatML's.
        eos_token: the token that ends a turn.
        added_tokens: further tokens that are single ids, but not special, as "<tool_call>" is in some vocabularies.

    Raises:
        ValueError: `eos_token` is not a control token, or a name is empty, or is a control token and an added token.
    """

    CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

    def __init__(
        self,
        control_tokens: Sequence[str] = (),
        *,
        eos_token: str = "<|im_end|>",
        added_tokens: Sequence[str] = (),
    ) -> None:
        special = tuple(dict.fromkeys((*self.CHATML, *control_tokens)))
        names = tuple(dict.fromkeys((*special, *added_tokens)))
        if "" in names or len(names) != len(special) + len(set(added_tokens)):
            twice = sorted({*special}.intersection(added_tokens))
            raise ValueError(
                "a token is empty: leave it out"
                if "" in names
                else f"the tokens {twice!r:.80} are control tokens and in added_tokens: leave them out of added_tokens"
            )
        self._control = {name: 256 + index for index, name in enumerate(names)}
        if eos_token not in special:
            raise ValueError(
                f"eos_token={eos_token!r:.60} is not a control token: give one of {', '.join(special)}, or add the "
                "token to control_tokens"
            )
        self.eos_id: int | None = self._control[eos_token]
        self.special_ids = frozenset(self._control[name] for name in special)
        self.control_ids = frozenset(self._control.values())
        self.size = 256 + len(names)
        self.pieces: Sequence[bytes] | None = [bytes([value]) for value in range(256)] + [n.encode() for n in names]
        self.words: Words | None = None
        self._bytes = dict(enumerate(self.pieces))
        self.longest_token = max(map(len, self.pieces))
        kinds = (*special, eos_token, *(("", *added_tokens) if added_tokens else ()))
        self.fingerprint = hashlib.sha256("\0".join(kinds).encode()).hexdigest()[:16]
        # The longest tokens come first, so that a shorter token does not match the beginning of a longer token.
        longest_first = sorted(names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._borders = Borders(names)
        self._mask = next(char for char in map(chr, range(256, 512)) if not any(char in name for name in names))

    def encode(self, text: str, content: Content = ()) -> list[int]:
        text = without_surrogates(text)
        scaffold = masked(text, content, lambda said: self._mask * len(said)) if content else text
        ids: list[int] = []
        end = 0
        for match in self._pattern.finditer(scaffold):
            ids.extend(text[end : match.start()].encode())
            ids.append(self._control[match[0]])
            end = match.end()
        ids.extend(text[end:].encode())
        return ids

    def holds_control(self, text: str) -> bool:
        return self._pattern.search(text) is not None or self._borders.touched_by(text)

    def decode(self, ids: Sequence[int]) -> str:
        try:
            said = b"".join(map(self._bytes.__getitem__, ids))
        except KeyError:  # ids without a token have no text
            said = b"".join([self._bytes.get(token_id, b"") for token_id in ids])
        return said.decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        """Return the id of a control token, an added token, or a single ASCII character; None for any other text."""
        if len(token) == 1 and token.isascii():
            return ord(token)
        return self._control.get(token)

    def normalize(self, text: str) -> str:
        return without_surrogates(text)
