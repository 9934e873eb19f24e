"""A tail as ids, and the positions in it where a bridge may begin."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from runner.tokens.bridging.content_spans import Span
from runner.tokens.bridging.refusal import Property, Unbridgeable
from runner.tokens.bridging.tail import Tail
from runner.tokens.bridging.turn_closers import TurnClosers
from runner.tokens.token_diff import first_mismatch
from runner.tokens.tokenizer import Tokenizer

__all__ = ["TailIds"]

_MIN_END_CHARS = 2
"""Minimum number of characters, common to the model's text and the template's, that identify the end of a call."""

_MARK_BORDER = re.compile(r"""[\s"'}\])>]|(?=[<\[])""")
"""Pattern whose matches end outside the marks that close a call, such as `</tool_call>`."""


class TailIds:
    """A tail as ids, and the positions in it where a bridge may begin.

    Control text within `spans` is encoded as ordinary text.
    """

    ids: list[int]

    def __init__(self, tail: Tail, tokenizer: Tokenizer, closes: TurnClosers, spans: Sequence[Span]) -> None:
        self.ids = tokenizer.encode(tail.text, spans)
        self._tail = tail
        self._text = tail.text
        self._spans = spans
        self._tokenizer = tokenizer
        self._closes = closes

    def check_text(self) -> None:
        """Check that encoding and decoding keep the tail's text.

        Raises:
            Unbridgeable: a part of the text is lost or changed.
        """
        if self._tokenizer.decode(self.ids) != self._text:
            self._check_stretches()

    def _check_stretches(self) -> None:
        """Check that encoding and decoding keep the text between any two control tokens.

        Some vocabularies write a space before each such text, which decoding removes. Some control tokens swallow
        adjacent white space.
        """
        tokenizer, at = self._tokenizer, 0
        text = tokenizer.normalize(self._text)
        for control, group in groupby(self.ids, tokenizer.control_ids.__contains__):
            for ids in [[token_id] for token_id in group] if control else [list(group)]:
                at = self._after_piece(text, at, tokenizer.normalize(tokenizer.decode(ids)))
        self._after_piece(text, at, "", end=True)

    def _after_piece(self, text: str, at: int, piece: str, *, end: bool = False) -> int:
        bare = at + len(text[at:]) - len(text[at:].lstrip())
        swallowed = f"x{text[at:bare]}x"
        starts = [(piece, at), (" " + piece, at)]
        # If the vocabulary can write the missing text, an adjacent control token swallowed it. Other text is lost.
        if bare > at and self._tokenizer.decode(self._tokenizer.encode(swallowed)) == swallowed:
            starts.append((piece, bare))
        for form, begin in starts:
            after = begin + len(form)
            if text.startswith(form, begin) and (not end or after == len(text)):
                return after
        shared = first_mismatch(text[at:], piece)
        lost, became = text[at + shared : at + shared + 20], piece[shared : shared + 20]
        raise Unbridgeable(Property.TEXT_KEPT, f"the vocabulary has no ids for {lost!r}, which becomes {became!r}")

    def find_in_close(self, wanted: Iterable[int]) -> int | None:
        """Return the first position of a wanted id in the template's text before any new content; None if none occurs.

        The result is also None if a token before the position opens a message, since the id then closes this message.
        """
        # The first position counts, since the contents and the next turn, which follow, may have the same ids.
        index = min((self.ids.index(token_id) for token_id in wanted if token_id in self.ids), default=None)
        if index is None or not self._before_content(index + 1):
            return None
        before = self._tokenizer.control_ids.intersection(self.ids[:index])
        return None if any(map(self._closes.opens_a_role, before)) else index

    def end_of_sampled_close(self, sampled: Sequence[int]) -> int | None:
        """Return the index into `ids` after the close with which `sampled` ends; None if it does not end with a close.

        The close begins at the tail's first control token, since the rest of a call may come before this token.

        Raises:
            Unbridgeable: the first new content changes the template's text before it, and the close may be in this
                text.
        """
        special = self._tokenizer.special_ids
        first = next((index for index, token_id in enumerate(self.ids) if token_id in special), None)
        if first is None:
            return None
        last = list(sampled[-len(self.ids) :])
        # The close is short, and begins at one of the few control tokens near the end of the sampled ids.
        for begin in (index for index, token_id in enumerate(last) if token_id == self.ids[first]):
            end = first + len(last) - begin
            if last[begin:] != self.ids[first:end]:
                continue
            if self._before_content(end):
                return end
            if not self._tail.border_is_exact:
                raise Unbridgeable(
                    Property.CLOSE_KNOWN,
                    f"the turn ended with {self._tokenizer.decode(last[begin:])!r}, and the next message changes the "
                    f"template's text before this message: {self._text[:40]!r}",
                )
        return None

    def ids_after_close(self) -> list[int] | None:
        """Return the ids after the template's own close; None if the end of this close is not known.

        This is for a sampled stop that is not part of this close. The close is the end of the same render without new
        messages, or a control token that ends every turn if a message follows. White space after the close separates
        the turns, so it also follows another stop.

        The result is also None if the first new content changes the template's text before it, since the close may then
        be any part of this text.
        """
        alone = self._tail.alone
        if alone is None or not self._tail.border_is_exact:
            return None
        # The close ends before the first content. Without this limit, words of the content could equal the text that
        # follows the close in the tail without content.
        cut = min(first_mismatch(self._text, alone), self._tail.border)
        cut = self._token_border(cut)
        if any(map(self._closes.opens_a_role, self._control_ids_before(cut))):
            return None
        # The template's own close is skipped, since the sampled stop replaces it.
        rest = self._encode_from(cut)
        if rest and self._is_close(rest[0], cut):
            return rest[1:]
        if not self._only_control(alone[cut:]):
            return None
        separated = self._after_last_control(cut)
        return rest if separated is None else self.ids[separated:]

    def _after_last_control(self, cut: int) -> int | None:
        """Return the index into `ids` after the last control token before `cut`, a position in the tail's text.

        The result is None if there is no such token, or if more than white space is between the token and `cut`.
        """
        after, end = None, 0
        for index, token_id in enumerate(self.ids):
            until = len(self._tokenizer.decode(self.ids[: index + 1]))
            if until > cut:
                break
            if token_id in self._tokenizer.control_ids:
                after, end = index + 1, until
        return after if not self._text[end:cut].strip() else None

    def ids_after_call(self, sampled: Sequence[int], stop_ids: Iterable[int]) -> list[int] | None:
        """Return the ids after the sampled part of the last call; None if the end of the call is not known.

        The tail begins inside that call.

        The turn's close is at a stop id, or at the beginning of the tail of the same turn without calls. The bridge
        contains the unsampled part of the text before the close.
        """
        index, plain = self.find_in_close(stop_ids), None
        if index is not None:
            close = len(self._tokenizer.decode(self.ids[:index]))
        else:
            plain = self._plain_text()
            close = len(self._text) - len(plain) if plain is not None else self._tail.border
        begin = _end_of_call(self._text[:close], self._tokenizer.decode(sampled))
        if begin is None and index is None and plain is None:
            return None
        return self._encode_from(close if begin is None else begin)

    def _plain_text(self) -> str | None:
        plain = self._tail.without_calls
        if not plain or not self._text.endswith(plain) or self._text == plain:
            return None
        # Without a control token at its beginning, the end of the call would be a guess.
        return plain if self._tokenizer.encode(plain)[0] in self._tokenizer.special_ids else None

    def _control_ids_before(self, end: int) -> list[int]:
        control = self._tokenizer.control_ids
        return [token_id for token_id in self._tokenizer.encode(self._text[:end]) if token_id in control]

    def _encode_from(self, begin: int) -> list[int]:
        spans = [(one - begin, other - begin) for one, other in self._spans if one >= begin]
        return self._tokenizer.encode(self._text[begin:], spans)

    def _token_border(self, cut: int) -> int:
        """Return the last position at or before `cut` that is not inside a control token."""
        ids, control = self.ids, self._tokenizer.control_ids
        for index, token_id in enumerate(ids):
            if token_id in control:
                begin = len(self._tokenizer.decode(ids[:index]))
                if begin >= cut:
                    return cut
                if cut < begin + len(self._tokenizer.decode([token_id])):
                    return begin
        return cut

    def _is_close(self, token_id: int, at: int) -> bool:
        """Return True if the token at position `at` of the tail's text is a control token that closes the turn.

        Such a token does not depend on later messages, and does not open the next turn.
        """
        if token_id not in self._tokenizer.control_ids or token_id in self._closes.generation_prompt:
            return False
        if token_id == self._closes.of_user:
            return True
        asking = self._tail.alone_asking
        if asking is None or not asking.startswith(self._text[:at]):
            return False
        return self._tokenizer.encode(asking[at:])[:1] == [token_id]

    def _only_control(self, text: str) -> bool:
        ids = self._tokenizer.encode(text.strip())
        return all(token_id in self._tokenizer.control_ids for token_id in ids)

    def _before_content(self, end: int) -> bool:
        """Return True if the first `end` ids of the tail are the template's own, without new content."""
        length = len(self._tokenizer.decode(self.ids[:end]))
        # `seen` may be too early, since a content "m" also occurs inside <|im_end|>. Then `border` is the limit.
        return length <= self._tail.seen[0] or length <= self._tail.border


def _end_of_call(ending: str, said: str) -> int | None:
    """Return the length of the part of a call's `ending` that `said` contains; None if it is not known."""
    # A part must not begin inside a mark, since it could also occur in the mark that opens a call.
    borders = [0, *(match.end() for match in _MARK_BORDER.finditer(ending))]
    # Only the end of `said` is compared, since `said` may contain the closes of earlier calls.
    for last in (said[-len(ending) :], said.rstrip()[-len(ending) :]):
        partly = max(range(len(ending) + 1), key=lambda end: (_seen_ending(ending[:end], last, borders), end))
        if _seen_ending(ending[:partly], last, borders):
            return partly
    written = ending.rstrip()
    whole = next((written[begin:] for begin in borders if written[begin:] in said), "")
    if len(whole) < _MIN_END_CHARS:
        return None
    after = said[said.rindex(whole) + len(whole) :]
    space = ending[len(written) :]
    return len(written) + len(after) if space.startswith(after) else len(ending)


def _seen_ending(one: str, other: str, borders: Sequence[int]) -> int:
    """Return the length of the common end of both texts, from a border of `one` on; 0 if it is too short."""
    alike = len(one) - first_mismatch(one[::-1], other[::-1])
    begin = next((border for border in borders if border >= alike), len(one))
    return len(one) - begin if len(one[begin:].strip()) >= _MIN_END_CHARS else 0
