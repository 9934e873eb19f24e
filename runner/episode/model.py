"""What speaks for an agent: an engine with the template, the bridge and the tool format that a run uses with it.

One that takes messages has none of these.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, TypeAlias

import anyio

from runner.engines.base import Engine, FinishReason
from runner.engines.message_engine import MessageEngine
from runner.messages import Message
from runner.options import History
from runner.parsing.call_ids import with_fitting_ids
from runner.parsing.external_reader import ExternalReader
from runner.parsing.format_cache import cached_format
from runner.parsing.learning.learnt_format import LearntFormat
from runner.parsing.parser import TurnParser
from runner.parsing.turn_format import TurnFormat
from runner.tokens.bridging.bridge import Bridge, Bridger, PromptText
from runner.tokens.bridging.tail import Tail
from runner.tokens.system_support import SystemSupport, system_support
from runner.tokens.template import Renderer
from runner.tokens.tokenizer import Tokenizer
from runner.tokens.tool_support import IdUse, id_use
from runner.trajectory import Turn

__all__ = ["ChatModel", "Encoding", "MessageModel", "Model"]


class Encoding:
    """A prompt that is being encoded, for whoever wants the same meanwhile."""

    def __init__(self) -> None:
        self.done = anyio.Event()
        """Is set once nobody encodes it any more."""
        self.ids: array[int] | None = None
        """Its ids then; None where that was given up or failed."""


class ChatModel:
    """An engine with its template, which together speak for one or more agents of a run.

    Args:
        engine: where tokens are sampled.
        options: names that the template reads.
        now: the time that it sees.
        history: how the past of a conversation is kept.
        turns: how turns are written, where that is known from a run's header; else it is learnt.
        named: makes what reads calls of a vocabulary, where the user named a tool format.
        fit_tools: the schemas of tools are fitted to what the template shows, where that is known; else it is learnt.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        options: Mapping[str, Any],
        now: datetime,
        history: History | None = None,
        turns: LearntFormat | None = None,
        named: Callable[[Tokenizer], ExternalReader] | None = None,
        fit_tools: bool | None = None,
    ) -> None:
        self.engine = engine
        """Where its tokens are sampled."""
        self.history = history or History()
        """How the past of a conversation is kept."""
        self.tokenizer = engine.tokenizer
        """The engine's tokenizer, fitted to the template by the bridger."""
        self.renderer: Renderer = engine.template.renderer(options, now, fit_tools=fit_tools)
        """The engine's template, with the run's options and frozen clock."""
        self.stop_ids = tuple(engine.stop_ids)
        """The ids that end its turns."""
        self.bridger = self.trial_bridger()
        """Makes the ids of prompts and of appended messages."""
        # The bridger gives back one that treats words which the template writes as control tokens; it needed the first.
        self.tokenizer = self.bridger.tokenizer
        self.encoding: dict[PromptText, Encoding] = {}
        """The long prompts that are being encoded in threads."""
        self.learnt = turns or cached_format(self.renderer)
        """What was learnt of how its template writes a turn."""
        self.parser = TurnParser(
            self.learnt.format,
            _control_tokens(self.learnt.format, self.tokenizer),
            None if named is None else named(self.tokenizer),
            _texts_of(self.stop_ids, self.tokenizer),
        )
        """Reads its turns."""

    @cached_property
    def systems(self) -> SystemSupport:
        """What the template does with system messages."""
        return system_support(self.renderer)

    @cached_property
    def _id_use(self) -> IdUse:
        return id_use(self.renderer)

    def with_fitting_ids(self, messages: Sequence[Message], own: Callable[[], Collection[str]]) -> Sequence[Message]:
        """A history that is rendered from the start, with ids of calls as the template wants them.

        Args:
            messages: the history.
            own: tells the ids that turns of this episode wrote, which stay.
        """
        if not any(message.get("tool_calls") for message in messages) or self._id_use is IdUse.UNREAD:
            return messages
        return with_fitting_ids(self.learnt.format, messages, own(), by_turn=self._id_use is IdUse.COUNTED)

    def trial_bridger(self) -> Bridger:
        """A bridger that has learnt nothing from the run's conversations, to try appends on."""
        return Bridger(
            self.tokenizer,
            self.renderer,
            self.stop_ids,
            content_safe=self.history.content_safe,
            close_reasoning=self.history.close_reasoning,
        )

    def closing_stop(self, turn: Turn) -> int | None:
        """The sampled id that closed a turn, or None where it was cut.

        A stop string, or a stop id of the author's own, closes no turn of the template: such a turn is cut.
        """
        if turn.finish is FinishReason.STOP and isinstance(turn.stop, int) and turn.stop in self.stop_ids:
            return turn.stop
        return None

    def bridge(self, turn: Turn, tail: Tail) -> Bridge:
        """The bridge from a turn to what answers it."""
        return self.bridger.join(tail, sampled=turn.token_ids, stop=self.closing_stop(turn), thinking=turn.thinking)


class MessageModel:
    """An engine that takes messages and gives messages; template, vocabulary and tool format are its server's.

    Args:
        engine: what is asked.
    """

    def __init__(self, engine: MessageEngine) -> None:
        self.engine = engine
        """What is asked."""


Model: TypeAlias = ChatModel | MessageModel
"""What speaks for an agent."""


def _texts_of(ids: Sequence[int], tokenizer: Tokenizer) -> tuple[str, ...]:
    """The texts of those ids that are control tokens."""
    return tuple(tokenizer.decode([token_id]) for token_id in ids if token_id in tokenizer.control_ids)


def _control_tokens(form: TurnFormat, tokenizer: Tokenizer) -> dict[str, int]:
    """What of a format's texts is one control id each."""
    ids = {token_id for text in form.texts() for token_id in tokenizer.encode(text)} & tokenizer.control_ids
    return {tokenizer.decode([token_id]): token_id for token_id in sorted(ids)}
