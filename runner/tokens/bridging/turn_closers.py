"""The control tokens that end the turns of a template, and the control tokens that open the next turn."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Final

from runner.messages import Message
from runner.tokens.bridging.content_spans import words
from runner.tokens.bridging.prompt_renderer import PromptRenderer
from runner.tokens.bridging.refusal import Unbridgeable
from runner.tokens.bridging.tail import Tail
from runner.tokens.probe_messages import AGAIN_ASKED, ANSWER, CALL, QUESTION, SYSTEM, result
from runner.tokens.tokenizer import Tokenizer
from runner.tokens.turn_shape import AnsweredTurn

__all__ = ["TurnClosers"]


class TurnClosers:
    """The tokens that close and open the turns of a template, found on first use by rendering plain conversations."""

    def __init__(self, tokenizer: Tokenizer, renderer: PromptRenderer) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._opening: dict[int, bool] = {}

    @cached_property
    def generation_prompt(self) -> frozenset[int]:
        """Ids of the generation prompt."""
        return frozenset(self._tokenizer.encode(self._renderer.generation_prompt))

    @cached_property
    def of_turn(self) -> list[int]:
        """Ids after a final answer, from the first control token on; [] if there are none."""
        with suppress(Unbridgeable):
            ids = self._tokenizer.encode(self._tail(ANSWER).alone or "")
            special = self._tokenizer.special_ids
            return ids[next((index for index, token_id in enumerate(ids) if token_id in special), len(ids)) :]
        return []

    @cached_property
    def of_user(self) -> int | None:
        """The first control token after a user's text; None if no control token follows, or the template raises."""
        with suppress(Unbridgeable):
            text = self._renderer.render([QUESTION], (), generation_prompt=False)
            ids = self._tokenizer.encode(text.rpartition(QUESTION["content"])[2])
            return next((token_id for token_id in ids if token_id in self._tokenizer.control_ids), None)
        return None

    @cached_property
    def _first_openers(self) -> frozenset[int]:
        """The control tokens before the first user message, except a token that ends a user's text or a turn."""
        with suppress(Unbridgeable):
            text = self._renderer.render([QUESTION], ()).partition(QUESTION["content"])[0]
            ids = self._tokenizer.control_ids.intersection(self._tokenizer.encode(text))
            return ids.difference(self.of_turn, () if self.of_user is None else (self.of_user,))
        return frozenset()

    def opens_a_role(self, token_id: int) -> bool:
        """Return True if renders begin the messages of some role with the token, and do not close turns with it.

        A GLM model ends its turn with such a token: with the token that opens the next message.
        """
        if token_id not in self._opening:
            following: Sequence[Message] = (AGAIN_ASKED, result(), SYSTEM)
            pasts: Sequence[Sequence[Message]] = ((QUESTION,), _LONG_PAST)
            self._opening[token_id] = any(
                self._opens(token_id, message, past) for message in following for past in pasts
            )
        return self._opening[token_id]

    def _opens(self, token_id: int, message: Message, past: Sequence[Message] = (QUESTION,)) -> bool:
        """Return True if the token opens this message: it precedes the message and is not a close."""
        turn = CALL if message["role"] == "tool" else ANSWER
        with suppress(Unbridgeable):
            tail = self._tail(turn, message, past=past)
            before = tail.text.partition(message["content"])[0]
            if tail.alone is not None:
                opens = not self._holds(tail.alone, token_id)
            else:
                before_user = self._before_user_message(turn, past)
                opens = token_id in self._first_openers or not self._holds(before_user, token_id)
            if opens and self._holds(before, token_id):
                return True
            second: Message = {**message, "content": words(1)[0]}
            rest = self._tail(turn, message, second, past=past).text.partition(message["content"])[2]
            between, _, after = rest.partition(second["content"])
            return self._holds(between, token_id) and not self._holds(after, token_id)
        return False

    def _before_user_message(self, turn: Message, past: Sequence[Message]) -> str:
        """Return the text that the template writes between a turn and the next user message; "" if unknown."""
        with suppress(Unbridgeable):
            return self._tail(turn, AGAIN_ASKED, past=past).text.partition(AGAIN_ASKED["content"])[0]
        return ""

    def _tail(self, turn: Message, *new: Message, past: Sequence[Message] = (QUESTION,)) -> Tail:
        return Tail(self._renderer, AnsweredTurn([*past, turn], new))

    def _holds(self, text: str, token_id: int) -> bool:
        return token_id in self._tokenizer.encode(text)


_LONG_PAST: Final[Sequence[Message]] = (QUESTION, *(ANSWER, AGAIN_ASKED) * 3)
"""A history of many messages, since a template may write other text if there are few messages."""
