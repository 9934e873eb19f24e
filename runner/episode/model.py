"""The model of an agent: an engine with the template, the bridge and the tool format that a run uses with it.

An engine that takes messages has no template, bridge or tool format.
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
from runner.errors import BadTemplate
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
from runner.tokens.tool_support import IdUse, id_use, require_tools
from runner.trajectory import Turn

__all__ = ["ChatModel", "Encoding", "MessageModel", "Model"]


class Encoding:
    """A prompt that is being encoded, shared by all requests with that prompt."""

    def __init__(self) -> None:
        self.done = anyio.Event()
        """Set when the encoding is over."""
        self.ids: array[int] | None = None
        """The ids; None if the encoding failed or was cancelled."""


class ChatModel:
    """An engine with its template, as the model of one or more agents of a run.

    Args:
        engine: samples the tokens.
        options: values of names that the template reads, such as `enable_thinking`.
        now: the time that the template reads with `strftime_now`.
        history: policy for the earlier messages of a conversation.
        turns: the format of turns, if it is known from a run's header; None to learn it.
        named: creates the reader of the tool format that the user chose, for a tokenizer; None without a choice.
        fit_tools: True to fit the tools' schemas to the fields that the template shows; None to fit them only for a
            template that leaves out parts of usual schemas.
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
        self.history = history or History()
        """Policy for the earlier messages of a conversation."""
        self.tokenizer = engine.tokenizer
        """The engine's tokenizer, which the bridger may have adapted to the template."""
        self.renderer: Renderer = engine.template.renderer(options, now, fit_tools=fit_tools)
        """The engine's template, with the run's options and frozen clock."""
        self.stop_ids = tuple(engine.stop_ids)
        self.bridger = self.trial_bridger()
        """The bridger, which creates the ids of prompts and of appended messages."""
        # The bridger is created with the engine's tokenizer, and may replace it: in the new tokenizer, the words that
        # the template writes as control tokens are control tokens.
        self.tokenizer = self.bridger.tokenizer
        self.encoding: dict[PromptText, Encoding] = {}
        """Long prompts that threads are now encoding, by text."""
        self.learnt = turns or cached_format(self.renderer)
        """The learnt format in which the template writes a turn."""
        self.parser = TurnParser(
            self.learnt.format,
            _control_tokens(self.learnt.format, self.tokenizer),
            None if named is None else named(self.tokenizer),
            _texts_of(self.stop_ids, self.tokenizer),
        )
        """The parser of this model's turns."""

    @cached_property
    def systems(self) -> SystemSupport:
        """The template's support for system messages."""
        return system_support(self.renderer)

    def require_calls(self) -> None:
        """Check that the template prints tools, and writes calls that can be parsed.

        Raises:
            BadTemplate: the template does not support tools, or writes calls that cannot be parsed.
        """
        if self._calls_refused is not None:
            raise BadTemplate(self._calls_refused)

    @cached_property
    def _calls_refused(self) -> str | None:
        try:
            require_tools(self.renderer)
        except BadTemplate as error:
            return str(error)
        if self.parser.reads_calls:
            return None
        return (
            f"template {self.renderer.template.name!r} writes tool calls that cannot be parsed "
            f"({self.learnt.missing}): {self.learnt.why}. Give --template pythonic or hermes, or a file with another "
            "format; or a tool parser of vLLM: --tool-format vllm:NAME; or put a response_template for this format "
            "into the model's tokenizer_config.json."
        )

    @cached_property
    def _id_use(self) -> IdUse:
        return id_use(self.renderer)

    def with_fitting_ids(self, messages: Sequence[Message], own: Callable[[], Collection[str]]) -> Sequence[Message]:
        """Return a history to render from the start, with call ids that the template accepts.

        Args:
            messages: the history.
            own: returns the call ids that turns of this episode sampled; these ids are kept.
        """
        if not any(message.get("tool_calls") for message in messages) or self._id_use is IdUse.UNREAD:
            return messages
        return with_fitting_ids(self.learnt.format, messages, own(), by_turn=self._id_use is IdUse.COUNTED)

    def trial_bridger(self) -> Bridger:
        """Return a bridger for trials of appends, without the learnt state of the run's conversations."""
        return Bridger(
            self.tokenizer,
            self.renderer,
            self.stop_ids,
            content_safe=self.history.content_safe,
            close_reasoning=self.history.close_reasoning,
        )

    def closing_stop(self, turn: Turn) -> int | None:
        """Return the sampled id that closed a turn, or None if the turn was cut.

        A stop string or the author's own stop id does not close a turn of the template. A turn that ended with one of
        these counts as cut.
        """
        if turn.finish is FinishReason.STOP and isinstance(turn.stop, int) and turn.stop in self.stop_ids:
            return turn.stop
        return None

    def bridge(self, turn: Turn, tail: Tail) -> Bridge:
        """Return the bridge from a turn to the messages that answer it."""
        return self.bridger.join(tail, sampled=turn.token_ids, stop=self.closing_stop(turn), thinking=turn.thinking)


class MessageModel:
    """An engine that takes and returns messages. Its server has the template, the vocabulary and the tool format."""

    def __init__(self, engine: MessageEngine) -> None:
        self.engine = engine


Model: TypeAlias = ChatModel | MessageModel


def _texts_of(ids: Sequence[int], tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the texts of those ids that are control tokens."""
    return tuple(tokenizer.decode([token_id]) for token_id in ids if token_id in tokenizer.control_ids)


def _control_tokens(form: TurnFormat, tokenizer: Tokenizer) -> dict[str, int]:
    """Return the control tokens in the texts of a format: the id of each, by its text."""
    ids = {token_id for text in form.texts() for token_id in tokenizer.encode(text)} & tokenizer.control_ids
    return {tokenizer.decode([token_id]): token_id for token_id in sorted(ids)}
