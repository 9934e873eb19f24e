"""The bridge: exactly the ids that a template puts between one sampled turn and the next, sampled ids left alone.

The last assistant message is copied with a sentinel in it and rendered with the new messages behind. What follows the
sentinel is the tail: the turn's close, the new messages, the generation prompt. Nothing before it is compared or
encoded, so it does not matter what the template makes of the model's words. The stop id that was sampled is looked
for in the tail, and the bridge is what follows it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias, cast

from runner.messages import Message
from runner.tokens.junction import Anchor, Close, Junction, Result, Seam
from runner.tokens.locality import Locality
from runner.tokens.marking import Span, Stems, common_length, locate
from runner.tokens.refusal import Property, Unbridgeable
from runner.tokens.tail import Tail, TailMaker
from runner.tokens.template import Renderer, ToolSchema
from runner.tokens.tokenizer import Tokenizer

__all__ = ["Bridge", "Bridger", "Property", "Unbridgeable"]

PROMPTS_KEPT = 16

PromptText: TypeAlias = tuple[str, tuple[Span, ...]]
"""A render, and where contents in it hold control text that must not become control ids."""


@dataclass(frozen=True, slots=True)
class Bridge:
    """What goes between the sampled ids and the next ones.

    Attributes:
        ids: appended to prompt and sampled ids, with loss mask 0.
        junction: how it was found.
        local: the tail is that of a stand-in for the history.
    """

    ids: list[int]
    junction: Junction
    local: bool = False


@dataclass(frozen=True, slots=True)
class _Start:
    """Where in the tail the bridge begins, and why there.

    Attributes:
        ids: the bridge.
        anchor: what it was hung on.
        close: where the turn's closing tokens came from.
        cause: what else there is to tell.
    """

    ids: list[int]
    anchor: Anchor
    close: Close
    cause: str = ""


class Bridger:
    """Makes the prompts of one template and one vocabulary. It keeps no conversation.

    Args:
        tokenizer: the vocabulary.
        renderer: the template, with its options and its clock fixed.
        stop_ids: ids that end a turn of the model.
        content_safe: control text in what users and tools say is ordinary text, never control ids.
        close_reasoning: a turn that was cut inside its reasoning is closed as masked context; else it is refused.

    Attributes:
        locality: which tails depend on nothing before the last turn.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        renderer: Renderer,
        stop_ids: Sequence[int],
        *,
        content_safe: bool = True,
        close_reasoning: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.stop_ids = frozenset(stop_ids)
        self.content_safe = content_safe
        self.close_reasoning = close_reasoning
        self._maker = TailMaker(renderer)
        self.locality = Locality(self._maker)
        self._stems = Stems()
        self._opens: dict[int, bool] = {}
        self._encode_prompt = lru_cache(PROMPTS_KEPT)(self._encoded)

    # --- the first prompt

    def first_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> array[int]:
        """Ids of the whole render, shape [prompt], int32; a BOS is the template's own, none is added.

        Raises:
            Unbridgeable: the template raises, or does not ask for an answer.
        """
        return self.prompt_ids(self.prompt_text(messages, tools))

    def prompt_text(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> PromptText:
        """The whole render, for `prompt_ids`: any thread may call.

        Raises:
            Unbridgeable: the template raises, or does not ask for an answer.
        """
        text = self._maker.prompt(messages, tools)
        wanted = self._unsafe(messages)
        if not wanted:
            return text, ()
        stem = self._stems.absent(messages)
        spans = locate(text, lambda copy: self._maker.render(copy, tools), messages, wanted, stem)
        return text, tuple(spans or ())

    def prompt_ids(self, prompt: PromptText) -> array[int]:
        """Ids of a render, shape [prompt], int32. Those of the latest are kept, since siblings begin alike."""
        return self._encode_prompt(*prompt)[:]

    def _encoded(self, text: str, spans: tuple[Span, ...]) -> array[int]:
        return array("i", self.tokenizer.encode(text, spans))

    def _unsafe(self, messages: Sequence[Message]) -> list[int]:
        """Indices of the messages whose content holds control text that must not become control ids."""
        if not self.content_safe:
            return []
        holds = self.tokenizer.holds_control
        return [i for i, m in enumerate(messages) if m["role"] not in _TRUSTED and m["content"] and holds(m["content"])]

    # --- bridges

    def tail_at_hand(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSchema], *, turn: int
    ) -> bool:
        """Making the tail takes no longer than rendering the new messages; else let a worker thread make it."""
        return self.locality.at_hand(history, new, tools, turn)

    def tail(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSchema], *, turn: int
    ) -> tuple[Tail, bool]:
        """What `bridge` takes as `tail`: only renders, so any thread may call.

        Raises:
            Unbridgeable: the template raises, or no history of this kind can be bridged.
        """
        return self.locality.tail(history, new, tools, turn)

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
        tail: tuple[Tail, bool] | None = None,
    ) -> Bridge:
        """The ids that put `new` behind a sampled turn and ask for the next one.

        Args:
            history: ends with the assistant message of the turn.
            new: the appended messages, at least one.
            tools: in OpenAI's form, the same as for the turn.
            sampled: the turn's ids, its stop included.
            stop: the id that ended the turn, or None for a turn that was cut.
            thinking: the turn was cut inside its reasoning.
            turn: its number in the conversation.
            tail: what `tail` gave for the same messages; None makes it here.

        Raises:
            Unbridgeable: there is no exact bridge; names the property that is missing.
        """
        _check_arguments(history, new, sampled, stop)
        made, local = tail or self.tail(history, new, tools, turn=turn)
        tail_ids = _TailIds(self, made)
        tail_ids.check()
        if stop is not None:
            start = self._after_stop(tail_ids, history[-1], tools, sampled, stop)
        elif thinking:
            start = self._after_reasoning(tail_ids)
        else:
            start = self._after_cut(tail_ids, sampled)
        if not start.ids:
            raise Unbridgeable(Property.PROMPTS_ANSWER, "nothing follows the stop that was sampled")
        if made.holds_marker(self.tokenizer.decode(start.ids)):
            raise Unbridgeable(Property.TURN_STAYS_BEHIND, "the template repeats what was said after the turn's end")
        seam = self._seam(sampled, start.ids) if tail_ids.located else Seam.UNVERIFIED
        junction = Junction(Result.APPENDED, start.anchor, start.close, seam, len(start.ids), cause=start.cause)
        return Bridge(start.ids, junction, local)

    def _after_stop(
        self, tail: _TailIds, turn: Message, tools: Sequence[ToolSchema], sampled: Sequence[int], stop: int
    ) -> _Start:
        index = tail.find_in_close({stop})
        if index is not None:
            return _Start(tail.ids[index + 1 :], Anchor.STOP, Close.SAMPLED)
        closed = tail.end_of_sampled_close(sampled[:-1])
        if closed is not None:
            return _Start(tail.ids[closed:], Anchor.STOP, Close.SAMPLED, cause="closed_before_stop")
        name = self.tokenizer.decode([stop])
        if self._opens_a_role(stop):
            raise Unbridgeable(
                Property.STOP_OPENS_NEXT,
                f"the turn ended with {name!r}, which opens no {tail.tail.new[0]['role']} message",
            )
        ids = tail.behind_close()
        if ids is None:
            raise Unbridgeable(
                Property.STOP_IN_TAIL,
                f"the turn ended with {name!r}, and the template closes it with {tail.text[:40]!r}",
            )
        return _Start(ids, Anchor.COMMON_PREFIX, Close.REPLACED)

    def _after_cut(self, tail: _TailIds, sampled: Sequence[int]) -> _Start:
        closed = tail.end_of_sampled_close(sampled)
        if closed is not None:
            return _Start(tail.ids[closed:], Anchor.NONE, Close.SAMPLED)
        if not tail.tail.after_call:
            return _Start(tail.ids, Anchor.NONE, Close.MASKED)
        ids = tail.behind_call(sampled, self.stop_ids)
        if ids is None:
            raise Unbridgeable(
                Property.CLOSE_KNOWN,
                f"the turn was cut after a call, and nothing shows where the call ends in {tail.text[:40]!r}",
            )
        return _Start(ids, Anchor.NONE, Close.MASKED)

    def _after_reasoning(self, tail: _TailIds) -> _Start:
        if not self.close_reasoning:
            raise Unbridgeable(
                Property.REASONING_CLOSED,
                "the turn was cut inside its reasoning: History(close_reasoning=True) would close it, masked",
            )
        between = tail.tail.end_of_reasoning()
        if between is None:
            raise Unbridgeable(
                Property.REASONING_CLOSED, "the template shows no reasoning, so nothing tells how it ends"
            )
        return _Start([*self.tokenizer.encode(between), *tail.ids], Anchor.NONE, Close.MASKED, cause="reasoning_closed")

    def _opens_a_role(self, stop: int) -> bool:
        """The id opens messages of some role, as those of GLM do: it may only be followed by one of that role."""
        if stop not in self._opens:
            self._opens[stop] = any(self._opens_role(stop, message) for message in _FOLLOWING)
        return self._opens[stop]

    def _opens_role(self, stop: int, message: Message) -> bool:
        said: Message = {"role": "assistant", "content": "An answer."}
        calls = cast("Message", {"role": "assistant", "content": "", "tool_calls": [_CALL]})
        turn = calls if message["role"] == "tool" else said
        try:
            tail = Tail(self._maker, self._stems.absent([]), [_QUESTION, turn], [message], ())
            alone = tail.alone
        except Unbridgeable:
            return False
        ids = _TailIds(self, tail)
        try:
            return ids.find_in_close({stop}) is not None and stop not in self.tokenizer.encode(alone or "")
        except Unbridgeable:
            return False

    def _seam(self, sampled: Sequence[int], bridge: Sequence[int]) -> Seam:
        control = self.tokenizer.control_ids
        if bridge[0] in control or (sampled and sampled[-1] in control):
            return Seam.SPECIAL
        if not sampled:  # the neighbour is the generation prompt, which is not at hand
            return Seam.UNVERIFIED
        said, follows = self.tokenizer.decode(sampled), self.tokenizer.decode(bridge)
        whole = self.tokenizer.encode(said + follows)
        return Seam.VERIFIED if whole == [*self.tokenizer.encode(said), *bridge] else Seam.UNVERIFIED

    @cached_property
    def generation_prompt_ids(self) -> frozenset[int]:
        """Ids in what asks the model to speak."""
        return frozenset(self.tokenizer.encode(self._maker.generation_prompt))

    @cached_property
    def turn_close(self) -> list[int]:
        """What the template writes behind an answer that nothing follows, from its first control token on."""
        said: Message = {"role": "assistant", "content": "An answer."}
        with suppress(Unbridgeable):
            alone = Tail(self._maker, self._stems.absent([]), [_QUESTION, said], (), ()).alone
            ids = self.tokenizer.encode(alone or "")
            first = next((i for i, token_id in enumerate(ids) if token_id in self.tokenizer.special_ids), len(ids))
            return ids[first:]
        return []

    @cached_property
    def user_close(self) -> int | None:
        """The control token behind what a user says, or None."""
        said: Message = {"role": "user", "content": "Some words."}
        with suppress(Unbridgeable):
            text = self._maker.render([said], (), generation_prompt=False)
            ids = self.tokenizer.encode(text.rpartition(said["content"])[2])
            return next((token_id for token_id in ids if token_id in self.tokenizer.control_ids), None)
        return None

    def encode(self, tail: Tail) -> tuple[list[int], list[Span], bool]:
        """The ids of a tail, the spans of contents in it that hold control text, and whether all were located."""
        wanted = self._unsafe(tail.new)
        if not wanted:
            return self.tokenizer.encode(tail.text), [], True
        spans = tail.locate(wanted)
        return self.tokenizer.encode(tail.text, spans or ()), spans or [], spans is not None


class _TailIds:
    """A tail as ids, and the places in it where a bridge may begin.

    Attributes:
        tail: the text.
        ids: its ids.
        located: contents that hold control text were told from what the template writes.
    """

    def __init__(self, bridger: Bridger, tail: Tail) -> None:
        self._bridger = bridger
        self._tokenizer = bridger.tokenizer
        self.tail = tail
        self.text = tail.text
        self.ids, self._spans, self.located = bridger.encode(tail)

    def check(self) -> None:
        """Everything that can be seen to be wrong with the tail.

        Raises:
            Unbridgeable: by name.
        """
        self.tail.check()
        decoded = self._tokenizer.decode(self.ids)
        if decoded != self.text and self._tokenizer.normalize(decoded) != self._tokenizer.normalize(self.text):
            at = common_length(self.text, decoded)
            raise Unbridgeable(
                Property.TEXT_KEPT,
                f"the vocabulary has no ids for {self.text[at : at + 20]!r}, which becomes {decoded[at : at + 20]!r}",
            )

    def find_in_close(self, wanted: Iterable[int]) -> int | None:
        """The first place of a wanted id in what the template writes before any new content."""
        index = min((self.ids.index(token_id) for token_id in wanted if token_id in self.ids), default=None)
        return index if index is not None and self._before_content(index + 1) else None

    def end_of_sampled_close(self, sampled: Sequence[int]) -> int | None:
        """Where the tail goes on after a close that the model wrote itself at the end of `sampled`, or None.

        The close is looked for from the tail's first control token on: before it stands the rest of a call.
        """
        special = self._tokenizer.special_ids
        first = next((index for index, token_id in enumerate(self.ids) if token_id in special), None)
        if first is None:
            return None
        last = list(sampled[-len(self.ids) :])
        # The close is short, and begins at one of the few control tokens near the end of what was sampled.
        for begin in (index for index, token_id in enumerate(last) if token_id == self.ids[first]):
            end = first + len(last) - begin
            if last[begin:] == self.ids[first:end] and self._before_content(end):
                return end
        return None

    def behind_close(self) -> list[int] | None:
        """The ids behind the template's own close, where a stop was sampled that does not stand there, or None.

        The close is what the same render ends with when nothing follows, and a control token that every turn gets
        once something does.
        """
        alone = self.tail.alone
        if alone is None:
            return None
        cut = min(common_length(self.text, alone), self.tail.border)
        cut = self._token_border(cut)
        rest = self._encode_from(cut)
        if rest and self._is_close(rest[0], cut):
            return rest[1:]
        left = alone[cut:]
        return rest if self._only_control(left) else None

    def behind_call(self, sampled: Sequence[int], stop_ids: Iterable[int]) -> list[int] | None:
        """The ids behind what the model wrote of its last call, in whose middle the tail begins, or None.

        The turn's close is where a stop id stands, or where the tail begins that the turn would have if it had called
        nothing. What the model has not written of the text before it is in the bridge.
        """
        index = self.find_in_close(stop_ids)
        if index is not None:
            close = len(self._tokenizer.decode(self.ids[:index]))
        else:
            plain = self._plain_text()
            if plain is None:
                return None
            close = len(self.text) - len(plain)
        said = self._tokenizer.decode(sampled[-close - 1 :])
        ends = range(close, -1, -1)
        return self._encode_from(max(ends, key=lambda end: _common_ending(self.text[:end], said)))

    def _plain_text(self) -> str | None:
        with suppress(Unbridgeable):
            plain = self.tail.after_text().text
            ids = self._tokenizer.encode(plain)
            # Without a control token in front, where the call ends would be guesswork.
            if self.text.endswith(plain) and self.text != plain and ids[0] in self._tokenizer.special_ids:
                return plain
        return None

    def _encode_from(self, begin: int) -> list[int]:
        spans = [(one - begin, other - begin) for one, other in self._spans if one >= begin]
        return self._tokenizer.encode(self.text[begin:], spans)

    def _token_border(self, cut: int) -> int:
        """The last place at or before `cut` that is not inside a control token."""
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
        """A control token that stands there whatever follows, and is not what opens the next turn."""
        if token_id not in self._tokenizer.control_ids or token_id in self._bridger.generation_prompt_ids:
            return False
        if token_id == self._bridger.user_close:
            return True
        asking = self.tail.alone_asking
        if asking is None or not asking.startswith(self.text[:at]):
            return False
        return self._tokenizer.encode(asking[at:])[:1] == [token_id]

    def _only_control(self, text: str) -> bool:
        ids = self._tokenizer.encode(text.strip())
        return all(token_id in self._tokenizer.control_ids for token_id in ids)

    def _before_content(self, end: int) -> bool:
        """The first `end` ids of the tail are the template's own: no new content is among them."""
        length = len(self._tokenizer.decode(self.ids[:end]))
        # What was seen may be too early: a content "m" is found inside <|im_end|>. Then the place is looked up.
        return length <= self.tail.seen[0] or length <= self.tail.border


_TRUSTED = frozenset({"system", "developer", "assistant"})
_QUESTION: Message = {"role": "user", "content": "A question."}
_CALL = {"id": "probe0000", "type": "function", "function": {"name": "probe", "arguments": {"key": "value"}}}
_FOLLOWING = (
    cast("Message", {"role": "user", "content": "Some words."}),
    cast("Message", {"role": "tool", "content": "Some words.", "tool_call_id": "probe0000", "name": "probe"}),
    cast("Message", {"role": "system", "content": "Some words."}),
)


def _common_ending(one: str, other: str) -> int:
    return common_length(one[::-1], other[::-1])


def _check_arguments(
    history: Sequence[Message], new: Sequence[Message], sampled: Sequence[int], stop: int | None
) -> None:
    if not new or not history or history[-1]["role"] != "assistant":
        raise ValueError("a bridge leads from an assistant message to at least one new message")
    if stop is not None and (not sampled or sampled[-1] != stop):
        raise ValueError(f"the turn's last id is not the stop id {stop}")
    if any(message["role"] == "assistant" for message in new):
        raise Unbridgeable(
            Property.TURNS_SAMPLED, "an assistant message among the new ones has no sampled ids; replace() it"
        )
