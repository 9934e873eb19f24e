"""The bridge: the ids that a template puts between one sampled turn and the next turn. Sampled ids stay unchanged.

For the next prompt, a copy of the last assistant message with a sentinel in it is rendered, followed by the new
messages. The text after the sentinel is the *tail* (tail.py): the turn's close, the new messages, the generation
prompt. The text before the tail is neither compared nor encoded, so the template may render the model's words in any
way. If the template is proven not to look back, a short stand-in replaces the history (locality.py). The tail is
encoded, and searched for the sampled stop id (tail_ids.py). The ids after this stop are the bridge.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from runner.messages import Message
from runner.tokens.bridging.content_spans import FIELDS, Field, Rendering, Span, absent
from runner.tokens.bridging.locality import Locality
from runner.tokens.bridging.prompt_renderer import PromptRenderer
from runner.tokens.bridging.refusal import Property, Unbridgeable
from runner.tokens.bridging.tail import Tail
from runner.tokens.bridging.tail_ids import TailIds
from runner.tokens.bridging.turn_closers import TurnClosers
from runner.tokens.junction import Anchor, Close, Junction, Result, Seam
from runner.tokens.template import Renderer, ToolSchema
from runner.tokens.tokenizer import Tokenizer, for_template
from runner.tokens.turn_shape import AnsweredTurn, TurnShape

__all__ = ["Bridge", "Bridger", "Property", "Unbridgeable"]

# The cache of prompts is small, since episodes of a group begin with the same prompt, and start at almost the same
# time.
PROMPT_CACHE_SIZE = 16

MAX_CACHED_CHARS = 40
"""Maximum length, in characters, of a text whose check for control text is cached. Short texts occur repeatedly."""

CONTROL_TEXT_CACHE_SIZE = 4096
"""Maximum number of texts whose check for control text is cached."""

PromptText: TypeAlias = tuple[str, tuple[Span, ...]]
"""A render, and the spans in it that are encoded without control ids: whole contents, or only their control text."""


@dataclass(frozen=True, slots=True)
class Bridge:
    """The ids between the sampled ids of two turns."""

    ids: list[int]
    """The ids to append to the prompt and the sampled ids, with loss mask 0."""
    junction: Junction
    """The record of how the ids were found."""


@dataclass(frozen=True, slots=True)
class _BridgeStart:
    """The ids of a bridge, and the place in the tail where it begins."""

    ids: list[int]
    anchor: Anchor
    """The place in the tail after which the bridge begins."""
    close: Close
    """The origin of the turn's closing tokens."""
    cause: str = ""
    """The cause that the junction records, such as "closed_before_stop"; "" in the usual case."""


class Bridger:
    """Builder of prompts for one template and one vocabulary. It does not store conversations.

    `History` documents `content_safe` and `close_reasoning`.
    """

    locality: Locality
    """The source of tails. It proves that some tails do not depend on the messages before the last turn."""
    closes: TurnClosers
    """The control tokens that end a turn."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        renderer: Renderer,
        stop_ids: Sequence[int],
        *,
        content_safe: bool = True,
        close_reasoning: bool = False,
    ) -> None:
        self.tokenizer = tokenizer = for_template(tokenizer, renderer.written)
        self.renderer = renderer
        self.stop_ids = frozenset(stop_ids)
        self.content_safe = content_safe
        self.close_reasoning = close_reasoning
        self._prompts = PromptRenderer(renderer)
        self.locality = Locality(self._prompts)
        self.closes = TurnClosers(tokenizer, self._prompts)
        self._latest: OrderedDict[PromptText, array[int]] = OrderedDict()
        self._early: dict[TurnShape, bool] = {}
        self._word_holds = lru_cache(CONTROL_TEXT_CACHE_SIZE)(tokenizer.holds_control)

    # --- bridges

    def bridge(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        sampled: Sequence[int],
        stop: int | None,
        thinking: bool = False,
        turn: int = 0,
    ) -> Bridge:
        """Return the bridge after the turn at the end of `history`: this calls `tail`, then `join`.

        Raises:
            Unbridgeable: there is no exact bridge; the error names the missing property.
            ValueError: `history` does not end with an assistant message, `new` is empty, or `stop` is not the last id
                of `sampled`.
        """
        if not new or not history or history[-1]["role"] != "assistant":
            raise ValueError(
                "a bridge needs a history that ends with an assistant message, and at least one new message"
            )
        tail = self.tail(AnsweredTurn(history, new, tools, turn))
        return self.join(tail, sampled=sampled, stop=stop, thinking=thinking)

    def tail(self, answered: AnsweredTurn) -> Tail:
        """Return the text after the words of a turn. This only renders, so any thread may call it.

        Raises:
            Unbridgeable: no turn of this shape can be bridged, the template raises, or it does not show the turn.
        """
        tail = self.locality.tail(answered)
        if not tail.local:
            # These checks render the whole history once more, so they do not run on the event loop.
            self._control_text(tail)
            if tail.shape in self._early:
                _ = tail.own_text
        return tail

    def join(self, tail: Tail, *, sampled: Sequence[int], stop: int | None, thinking: bool = False) -> Bridge:
        """Return the ids that append the tail's new messages to a sampled turn and begin the next turn.

        Args:
            tail: the turn's tail.
            sampled: the turn's ids, including the stop.
            stop: the id that ended the turn; None if the turn was cut.
            thinking: True if the turn was cut inside its reasoning.

        Raises:
            Unbridgeable: there is no exact bridge; the error names the missing property.
            ValueError: `stop` is not the last sampled id.
        """
        if stop is not None and (not sampled or sampled[-1] != stop):
            last = sampled[-1] if sampled else None
            raise ValueError(f"the turn's last id, {last}, is not the stop id {stop}: give its last id, or None")
        if any(message["role"] == "assistant" for message in tail.new):
            raise Unbridgeable(
                Property.TURNS_SAMPLED,
                "an assistant message among the new messages has no sampled ids: replace() the history",
            )
        tail.check()
        spans = self._control_text(tail)
        tail_ids = TailIds(tail, self.tokenizer, self.closes, spans or ())
        tail_ids.check_text()
        if stop is not None:
            start = self._after_stop(tail, tail_ids, sampled, stop)
        elif thinking:
            start = self._after_reasoning(tail, tail_ids)
        else:
            start = self._after_cut(tail, tail_ids, sampled)
        if not start.ids:
            raise Unbridgeable(Property.PROMPTS_ANSWER, "the template writes nothing after the sampled stop")
        text = self.tokenizer.decode(start.ids)
        if tail.holds_marker(text) or self._repeats(tail):
            raise Unbridgeable(Property.TURN_STAYS_BEFORE, "the template repeats the turn's words after its end")
        if tail.real is not None:
            self._check_real(
                tail, tail.real, tail.text if thinking else self._with_close(tail, tail_ids.ids, start.ids)
            )
        # If contents cannot be distinguished from the template's own words, control ids may replace a user's text.
        seam = Seam.UNVERIFIED if spans is None else self._seam(sampled, start.ids)
        junction = Junction(Result.APPENDED, start.anchor, start.close, seam, len(start.ids), cause=start.cause)
        return Bridge(start.ids, junction)

    def _with_close(self, tail: Tail, ids: Sequence[int], bridge: list[int]) -> str:
        """Return the text of the turn's close and of the bridge, from the last control token before the bridge on.

        If no control token is before the bridge, return the whole tail, or, after a call, only the bridge. If the tail
        does not end with the ids of the bridge, return only the text of the bridge.
        """
        begin = len(ids) - len(bridge)
        # If the sampled stop replaces the template's close, the bridge may have other ids than the end of the tail.
        if begin < 0 or ids[begin:] != bridge:
            return self.tokenizer.decode(bridge)
        closes = [index for index in range(begin) if ids[index] in self.tokenizer.control_ids]
        first = closes[-1] if closes else begin if tail.after_call else 0
        return self.tokenizer.decode(ids[first:])

    def _repeats(self, tail: Tail) -> bool:
        """Return True if a stop occurs between the first and the last copy of the turn's words."""
        return bool(tail.repeated) and any(self.tokenizer.decode([each]) in tail.repeated for each in self.stop_ids)

    def _ends_early(self, tail: Tail) -> bool:
        """Return True if the template writes a stop before the last words of the turn, or may do so."""
        shape = tail.shape
        if not tail.local or shape not in self._early:
            stops = [self.tokenizer.decode([each]) for each in self.stop_ids]
            self._early[shape] = any(tail.own_text.count(stop) > tail.words.count(stop) for stop in stops)
        return self._early[shape]

    def _check_real(self, tail: Tail, real: str, text: str) -> None:
        """Check that a render with the turn's own words ends as the render with the sentinel.

        Args:
            tail: the turn's tail.
            real: the render with the turn's own words.
            text: the text that the render must end with.

        Raises:
            Unbridgeable: the render ends differently.
        """
        if self.tokenizer.normalize(real).endswith(self.tokenizer.normalize(text)):
            return
        # The vocabulary may have changed white space in `text`. The tail's own text is compared without this change.
        if not tail.after_call and real.endswith(tail.text):
            return
        # SentencePiece writes a space after each control token, so the render is also encoded and decoded here.
        if self.tokenizer.decode(self.tokenizer.encode(real)).endswith(text):
            return
        raise Unbridgeable(
            Property.TURN_STAYS_BEFORE,
            f"the text that template {self.renderer.template.name!r} writes after a turn depends on the turn's words: "
            f"it is {real[-80:]!r} and not {text[-80:]!r}",
        )

    def _after_stop(self, tail: Tail, tail_ids: TailIds, sampled: Sequence[int], stop: int) -> _BridgeStart:
        index = tail_ids.find_in_close({stop})
        if index is not None:
            # Text between the turn's words and the stop may be the beginning of the next message. Then this stop
            # belongs to the next message.
            if not tail.after_call and self.tokenizer.decode(tail_ids.ids[:index]).strip() and self._ends_early(tail):
                raise _words_after_end()
            return _BridgeStart(tail_ids.ids[index + 1 :], Anchor.STOP, Close.SAMPLED)
        # If a model wrote the template's close and then stopped with another token, the close is not added again.
        closed = tail_ids.end_of_sampled_close(sampled[:-1])
        if closed is not None:
            return _BridgeStart(tail_ids.ids[closed:], Anchor.STOP, Close.SAMPLED, cause="closed_before_stop")
        name = self.tokenizer.decode([stop])
        # GLM's turns end with the token that opens the next message. The token fits only before a message of the role
        # that it opens.
        if self.closes.opens_a_role(stop):
            raise Unbridgeable(
                Property.STOP_OPENS_NEXT,
                f"the turn ended with {name!r}, which opens a message of another role than {tail.new[0]['role']!r}",
            )
        ids = tail_ids.ids_after_close()
        if ids is None:
            raise Unbridgeable(
                Property.STOP_IN_TAIL,
                f"the turn ended with {name!r}, and the template closes the turn with {tail.text[:40]!r}",
            )
        # `find_in_close` may have missed a stop in the template's close: `seen` may be too early for a blank content,
        # and `border` is 0 if the template alters the content.
        if name in self.tokenizer.decode(ids) and (not tail.border or name in tail.text[: tail.border]):
            raise Unbridgeable(
                Property.STOP_IN_TAIL,
                f"the turn ended with {name!r}, and the end of the template's close in {tail.text[:40]!r} is not known",
            )
        if self._ends_early(tail):
            raise _words_after_end()
        # gpt-oss stops with <|return|>, but the history has <|end|>. The sampled stop stays and counts as the close.
        return _BridgeStart(ids, Anchor.COMMON_PREFIX, Close.REPLACED)

    def _after_cut(self, tail: Tail, tail_ids: TailIds, sampled: Sequence[int]) -> _BridgeStart:
        closed = tail_ids.end_of_sampled_close(sampled)
        if closed is not None:
            return _BridgeStart(tail_ids.ids[closed:], Anchor.NONE, Close.SAMPLED)
        if not tail.after_call:
            return _BridgeStart(tail_ids.ids, Anchor.NONE, Close.MASKED)
        ids = tail_ids.ids_after_call(sampled, self.stop_ids)
        if ids is None:
            raise Unbridgeable(
                Property.CLOSE_KNOWN,
                f"the turn was cut after a call, and nothing shows where the call ends in {tail.text[:40]!r}",
            )
        return _BridgeStart(ids, Anchor.NONE, Close.MASKED)

    def _after_reasoning(self, tail: Tail, tail_ids: TailIds) -> _BridgeStart:
        if not self.close_reasoning:
            raise Unbridgeable(
                Property.REASONING_CLOSED,
                "the turn was cut inside its reasoning: give History(close_reasoning=True) to close the reasoning with "
                "ids of loss mask 0",
            )
        between = tail.end_of_reasoning
        if between is None:
            raise Unbridgeable(
                Property.REASONING_CLOSED, "the template shows no reasoning, so the end of the reasoning is not known"
            )
        ids = [*self.tokenizer.encode(between), *tail_ids.ids]
        return _BridgeStart(ids, Anchor.NONE, Close.MASKED, cause="reasoning_closed")

    def _seam(self, sampled: Sequence[int], bridge: Sequence[int]) -> Seam:
        control = self.tokenizer.control_ids
        # Text never merges with a control token. If neither neighbour is a control token, the texts of both sides are
        # encoded together, to find whether the neighbours merge.
        if bridge[0] in control or (sampled and sampled[-1] in control):
            return Seam.SPECIAL
        if not sampled:  # the left neighbour is the generation prompt, which is not available here
            return Seam.UNVERIFIED
        said, follows = self.tokenizer.decode(sampled), self.tokenizer.decode(bridge)
        whole = self.tokenizer.encode(said + follows)
        return Seam.VERIFIED if whole == [*self.tokenizer.encode(said), *bridge] else Seam.UNVERIFIED

    # --- whole prompts

    def first_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> array[int]:
        """Return the ids of the whole render, shape [prompt], int32. Only the template adds a BOS.

        Raises:
            Unbridgeable: the template cannot render the prompt, or control text of a content would become control ids.
        """
        return self.prompt_ids(self.prompt_text(messages, tools))

    def prompt_text(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> PromptText:
        """Return the whole render, and its spans to encode without control ids. Any thread may call this.

        Raises:
            Unbridgeable: the template raises, hides a message, or does not write exactly one generation prompt at the
                end; or control text of a content cannot be distinguished from the template's own control text.
        """
        text = self._prompts.prompt(messages, tools)
        wanted = self._unsafe(messages)
        if not wanted:
            return text, ()
        whole = Rendering(text, messages, lambda new: self._prompts.render(new, tools))
        spans = whole.locate(wanted, absent(messages), self._control_names)
        if spans is None:
            index, name = wanted[0]
            raise Unbridgeable(
                Property.CONTENT_LOCATED,
                f"the {name} of message {index} ({messages[index]['role']}) contains control text, which would become "
                f"control ids, since its place in the render of template {self.renderer.template.name!r} is not known",
            )
        return text, tuple(spans)

    def prompt_ids(self, prompt: PromptText) -> array[int]:
        """Return the ids of a render, shape [prompt], int32.

        The ids of recent renders are cached, since episodes of a group begin with the same prompt.
        """
        ids = self.known_prompt(prompt)
        if ids is None:
            ids = self._encoded(*prompt)
            self._latest[prompt] = ids[:]
            while len(self._latest) > PROMPT_CACHE_SIZE:
                self._latest.popitem(last=False)
        return ids

    def known_prompt(self, prompt: PromptText) -> array[int] | None:
        """Return the ids of a recently encoded render; None if the render has to be encoded first."""
        ids = self._latest.pop(prompt, None)
        if ids is None:
            return None
        self._latest[prompt] = ids  # the last entry is the most recently used
        return ids[:]  # a copy, since the cached array is shared and arrays are mutable

    def _encoded(self, text: str, spans: tuple[Span, ...]) -> array[int]:
        return array("i", self.tokenizer.encode(text, spans))

    # --- control text in contents

    def _control_text(self, tail: Tail) -> Sequence[Span] | None:
        """Return the spans of the new messages that are encoded without control ids; None if they cannot be found."""
        wanted = self._unsafe(tail.new)
        return tail.locate(wanted, self._control_names) if wanted else ()

    def _unsafe(self, messages: Sequence[Message]) -> list[Field]:
        """Return the fields with control text that must not become control ids."""
        if not self.content_safe:
            return []
        return [
            (index, name)
            for index, message in enumerate(messages)
            if message["role"] not in _TRUSTED
            for name in FIELDS
            if (value := message.get(name)) and self._holds_control(str(value))
        ]

    def _holds_control(self, text: str) -> bool:
        return self._word_holds(text) if len(text) <= MAX_CACHED_CHARS else self.tokenizer.holds_control(text)

    def _control_names(self, text: str) -> list[str]:
        ids = set(self.tokenizer.encode(text)) & self.tokenizer.control_ids
        return [self.tokenizer.decode([token_id]) for token_id in ids]


def _words_after_end() -> Unbridgeable:
    return Unbridgeable(Property.TURN_STAYS_BEFORE, "the template writes words of the turn after its end")


# Control text in these roles may become control ids: the author writes system messages, and the model sampled the
# control tokens of its turns as control ids.
_TRUSTED = frozenset({"system", "developer", "assistant"})
