"""Locality: where a template is proven not to look back, its tail is rendered without what came in between.

The stand-in for a history is its beginning (a system message and the first question) and the turn itself. Whether its
tail is that of the whole history is read from the template's source (`runner.tokens.lookback`), for all histories at
once. Where that is not proven, the whole history is rendered at every turn. What is decided here depends on nothing
but the conversation itself: never on what others said, nor on which of them came first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import cast

from runner.messages import Message, ToolCallMessage, canonical_json
from runner.tokens.bridging.markers import absent, words
from runner.tokens.bridging.refusal import Property, Unbridgeable
from runner.tokens.bridging.tail import Further, Tail, TailMaker
from runner.tokens.lookback.proof import Lookback, Proofs
from runner.tokens.shape import Shape, beginning, is_plain
from runner.tokens.template import Renderer, ToolSchema

__all__ = ["Locality"]

KINDS_KEPT = 1000
PROOFS_KEPT = 4096


@dataclass(slots=True)
class _Kind:
    """What is known of one shape.

    Attributes:
        past: whether what came before can change the tail.
        words_matter: what the turn says may change what is written behind it.
        refusal: why it cannot be bridged at all, or None.
        asked: the further renders that its tails were asked for.
        proven: of each of those, whether what came before cannot change it.
    """

    past: Lookback
    words_matter: bool
    refusal: Unbridgeable | None = None
    asked: set[Further] = field(default_factory=set)
    proven: dict[Further, bool] = field(default_factory=dict)


class Locality:
    """Makes tails, from a stand-in for the history where that is proven to give the same one."""

    def __init__(self, maker: TailMaker) -> None:
        self._maker = maker
        self._proofs = _Proofs(maker.renderer)
        self._kinds: dict[Shape, _Kind] = {}
        self._learning = threading.Lock()

    def at_once(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[ToolSchema],
        turn: int,
        *,
        plain: bool | None = None,
    ) -> Tail | None:
        """What `tail` gives where it takes no longer than the new messages; None where it renders the whole.

        Raises:
            Unbridgeable: what is written behind the turn depends on what was said in it.
        """
        kind = self._kinds.get(Shape.of(history, new, tools))
        if kind is None or not all(kind.proven.values()) or not self._may_stand_in(kind, history, new, turn, plain):
            return None
        return self._short(kind, history, new, tools)

    def tail(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[ToolSchema],
        turn: int,
        *,
        plain: bool | None = None,
    ) -> Tail:
        """The tail of `new` behind the turn that `history` ends with. Any thread may call.

        Args:
            history: ends with the turn.
            new: the messages after it.
            tools: as shown to the model.
            turn: the turn's number. A template that some pasts make raise is asked for the whole at turns 1, 2, 4, 8
                and so on, so that what it refuses is found without growing work.
            plain: whether `is_plain` holds for the history; None looks.

        Raises:
            Unbridgeable: no history of this kind can be bridged, the template raises, or what it writes behind the
                turn depends on what was said in it.
        """
        kind = self._kind(history, new, tools)
        if kind.refusal is not None:
            raise Unbridgeable(kind.refusal.property, kind.refusal.explanation)
        if self._may_stand_in(kind, history, new, turn, plain):
            short = self._short(kind, history, new, tools)
            if short is not None:
                short.complete()
                return short
        tail = self._full(history, new, tools, kind.asked)
        if kind.words_matter:
            self._check_real(tail, history, new, tools)
        return tail

    def full(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSchema]) -> Tail:
        """The tail of the whole history."""
        return self._full(history, new, tools, set())

    def _full(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSchema], asked: set[Further]
    ) -> Tail:
        tail = Tail(self._maker, absent([*history, *new]), history, new, tools, asked=asked)
        tail.complete()
        return tail

    def is_local(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSchema]) -> bool:
        """The work for tails of this kind does not grow with the history.

        Raises:
            Unbridgeable: no history of this kind can be bridged.
        """
        kind = self._kind(history, new, tools)
        if kind.refusal is not None:
            raise kind.refusal
        return kind.past is not Lookback.POSSIBLE

    def _may_stand_in(
        self, kind: _Kind, history: Sequence[Message], new: Sequence[Message], turn: int, plain: bool | None
    ) -> bool:
        if kind.refusal is not None or kind.past is Lookback.POSSIBLE or not beginning(history):
            return False
        if kind.past is Lookback.REFUSES and (turn + 1) & turn == 0:
            return False
        if not (all(map(is_plain, history)) if plain is None else plain) or not all(map(is_plain, new)):
            return False
        if "name" in history[-1]:
            return False
        # An answer to an earlier call is looked up by its id in the history.
        ids = {call["id"] for call in history[-1].get("tool_calls") or ()}
        return all(message.get("tool_call_id") in ids for message in new if message["role"] == "tool")

    def _short(
        self, kind: _Kind, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> Tail | None:
        """The stand-in's tail; None where the template raises on it, or ends in a way that takes the whole to see.

        Raises:
            Unbridgeable: what is written behind the turn depends on what was said in it.
        """
        stand_in = [*beginning(history), history[-1]]
        proves = self._proving(kind, stand_in, new, tools)
        stem = absent([*stand_in, *new])
        try:
            tail = Tail(self._maker, stem, stand_in, new, tools, whole=history, proves=proves, asked=kind.asked)
            usual = self._maker.asks_as_usual(tail.text, new[-1])
        except Unbridgeable:
            return None
        if not usual:
            return None
        if kind.words_matter:
            self._check_real(tail, stand_in, new, tools)
        return tail

    def _proving(
        self, kind: _Kind, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> Callable[[Further], bool]:
        def proves(further: Further) -> bool:
            if further not in kind.proven:
                kind.proven[further] = self._proofs.further(further, Shape.of(history, new, tools), tools)
            return kind.proven[further]

        return proves

    def _check_real(
        self, tail: Tail, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> None:
        """The conversation as it is ends as it does with the sentinel in it.

        Raises:
            Unbridgeable: it does not.
        """
        try:
            real = self._maker.render([*history, *new], tools)
        except Unbridgeable:  # on the words themselves, and the sentinel stands in for them
            return
        # A tail that begins in a call begins behind other words than the call's own.
        expected = tail.text[tail.border or tail.seen[1] :] if tail.after_call else tail.text
        if not real.endswith(expected):
            raise Unbridgeable(
                Property.TURN_STAYS_BEHIND,
                f"what template {self._maker.renderer.template.name!r} writes behind a turn depends on what was said "
                f"in it: {real[-80:]!r} where {expected[-80:]!r} was expected",
            )

    # --- what is learnt of a shape

    def _kind(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSchema]) -> _Kind:
        shape = Shape.of(history, new, tools)
        kind = self._kinds.get(shape)
        if kind is None:
            with self._learning:
                kind = self._kinds.get(shape) or self._learn(shape, tools)
        return kind

    def _learn(self, shape: Shape, tools: Sequence[ToolSchema]) -> _Kind:
        refusal = self._hidden_message(shape, tools) or self._moved(shape, tools)
        past, words_matter = self._proofs.of(shape, tools)
        # Environments may offer other tools in every episode: what was learnt first is learnt again if need be.
        if len(self._kinds) >= KINDS_KEPT:
            del self._kinds[next(iter(self._kinds))]
        kind = self._kinds[shape] = _Kind(past, words_matter, refusal)
        return kind

    def _hidden_message(self, shape: Shape, tools: Sequence[ToolSchema]) -> Unbridgeable | None:
        """A new message that the template does not show: markers tell, where "u" or "0" would be found anywhere."""
        markers = words(len(shape.new))
        tail = self._attempt(shape, tools, markers)
        for each, word in zip(shape.new, markers, strict=True):
            if tail is not None and not each.empty and word not in tail.text:
                why = f"the template hides what a message of the {each.role} role says there"
                return Unbridgeable(Property.CONTENT_SHOWN, why)
        return None

    def _moved(self, shape: Shape, tools: Sequence[ToolSchema]) -> Unbridgeable | None:
        """Where the template prints tools or a system message behind the turn, which the prompt has before it."""
        name, *markers = words(1 + len(shape.new))
        if tools and self._moves(self._attempt(shape, [*tools, _tool(name)], markers), name):
            return self._misplaced(Property.TOOLS_STAY, "the tools")
        if shape.system and self._moves(self._attempt(shape, tools, markers, told=name), name):
            return self._misplaced(Property.SYSTEM_STAYS, "the system message")
        return None

    def _moves(self, tail: Tail | None, word: str) -> bool:
        try:
            return tail is not None and word in tail.text and not tail.stands_before(word)
        except Unbridgeable:
            return False

    def _misplaced(self, property: Property, what: str) -> Unbridgeable:
        return Unbridgeable(
            property,
            f"template {self._maker.renderer.template.name!r} prints {what} behind the turn, before the new messages, "
            "so that what the prompt has of it stands where the template would not have it",
        )

    def _attempt(
        self, shape: Shape, tools: Sequence[ToolSchema], markers: Sequence[str], *, told: str = "You answer questions."
    ) -> Tail | None:
        """The tail of plain messages of this shape, or None where the template raises."""
        system: list[Message] = [{"role": "system", "content": told}] if shape.system else []
        turn = _example_turn(shape, tools)
        history = [*system, _QUESTION, turn]
        try:
            return Tail(self._maker, absent(history), history, _example_new(shape, turn, markers), tools)
        except Unbridgeable:
            return None


class _Proofs:
    """Proofs of one template, each made once in a process."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        template = renderer.template
        self._key = (template.text, canonical_json([template.variables, renderer.options]), renderer.now)

    def of(self, shape: Shape, tools: Sequence[ToolSchema]) -> tuple[Lookback, bool]:
        """Whether the past can change tails of this shape, and whether the turn's words can."""
        return _proven((*self._key, shape), _Question(self._renderer, tools))

    def further(self, further: Further, shape: Shape, tools: Sequence[ToolSchema]) -> bool:
        """What came before cannot change this further render."""
        return _further_proven((*self._key, shape, further), _Question(self._renderer, tools))


class _Question:
    """What a proof is made of, which tells no two of one key apart."""

    def __init__(self, renderer: Renderer, tools: Sequence[ToolSchema]) -> None:
        self.renderer = renderer
        self.tools = tools

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Question)

    def __hash__(self) -> int:
        return 0


@lru_cache(PROOFS_KEPT)
def _proven(key: tuple[object, ...], asked: _Question) -> tuple[Lookback, bool]:
    shape = cast("Shape", key[-1])
    proofs = Proofs(asked.renderer)
    return proofs.past(shape, asked.tools), proofs.words_matter(shape, asked.tools)


@lru_cache(PROOFS_KEPT)
def _further_proven(key: tuple[object, ...], asked: _Question) -> bool:
    shape, further = cast("tuple[Shape, Further]", key[-2:])
    proofs = Proofs(asked.renderer)
    return proofs.past(further.shape(shape), asked.tools, asking=further.asking) is not Lookback.POSSIBLE


# --- plain messages of a shape

_QUESTION: Message = {"role": "user", "content": "Go on."}


def _tool(name: str) -> ToolSchema:
    parameters = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


def _example_turn(shape: Shape, tools: Sequence[ToolSchema]) -> Message:
    name = tools[0]["function"]["name"] if tools else "probe"
    turn: Message = {"role": "assistant", "content": "Some words." if shape.text else ""}
    if shape.reasoning:
        turn["reasoning_content"] = "A thought."
    if shape.calls:
        turn["tool_calls"] = [_example_call(name, number) for number in range(shape.calls)]
    return turn


def _example_call(name: str, number: int) -> ToolCallMessage:
    # Mistral's templates want ids of nine letters and digits.
    return {"id": f"probe{number:04}", "type": "function", "function": {"name": name, "arguments": {}}}


def _example_new(shape: Shape, turn: Message, markers: Sequence[str]) -> list[Message]:
    calls = iter(turn.get("tool_calls") or ())
    messages = []
    for each, word in zip(shape.new, markers, strict=True):
        message = {"role": each.role, "content": "" if each.empty else word}
        if each.role == "tool":
            call = next(calls, None)
            message["tool_call_id"] = call["id"] if call is not None else "probe0000"
        if each.named:
            message["name"] = call["function"]["name"] if each.role == "tool" and call is not None else "probe"
        messages.append(cast("Message", message))
    return messages
