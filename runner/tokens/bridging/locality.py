"""Locality: if a template is proven not to look back, the tail is rendered without the earlier history.

The stand-in for a history is its beginning (a system message and the first user message) and the turn itself. A proof
from the template's source (`runner.tokens.lookback`) shows that the tail of the stand-in equals the tail of the whole
history, for all histories at once. Without a proof, the whole history is rendered at every turn. Decisions depend only
on the conversation itself, not on other conversations or their order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import cast

from runner.messages import Message, canonical_json
from runner.tokens.bridging.content_spans import words
from runner.tokens.bridging.prompt_renderer import PromptRenderer
from runner.tokens.bridging.refusal import Property, Unbridgeable
from runner.tokens.bridging.tail import Further, Tail
from runner.tokens.lookback.proof import Lookback, Proofs
from runner.tokens.probe_messages import QUESTION, SYSTEM, TOOL, call_id, calling, tool_named
from runner.tokens.template import Renderer, ToolSchema
from runner.tokens.turn_shape import AnsweredTurn, TurnShape

__all__ = ["Locality"]

# The cache has a limit, since environments may offer other tools in every episode, and each set of tools is another
# shape. The oldest shapes are dropped, and learnt again if needed.
SHAPE_CACHE_SIZE = 1000
PROOF_CACHE_SIZE = 4096


@dataclass(slots=True)
class _ShapeToProve:
    """The known properties of the turns of one shape."""

    past: Lookback
    """The proven effect of earlier messages on the tail."""
    words_matter: bool
    """True if the turn's words may change the text after the turn."""
    refusal: Unbridgeable | None = None
    """The reason why no turn of this shape can be bridged, or None."""
    asked: set[Further] = field(default_factory=set)
    """The further renders that tails of this shape have needed so far."""
    proven: dict[Further, bool] = field(default_factory=dict)
    """For each further render, True if earlier messages are proven not to change it."""


class Locality:
    """Source of tails, which renders a stand-in for the history if the tail is proven to be equal.

    Any thread may use it.
    """

    def __init__(self, renderer: PromptRenderer) -> None:
        self._renderer = renderer
        self._template = _key_of(renderer.renderer)
        self._kinds: dict[TurnShape, _ShapeToProve] = {}
        self._learning = threading.Lock()

    def tail_at_once(self, answered: AnsweredTurn) -> Tail | None:
        """Return the tail if renders of the stand-in and the new messages are known to be enough; otherwise None.

        If the result is None, call `tail` in a worker thread, since `tail` may render the whole history.
        """
        kind = self._kinds.get(answered.shape)
        # A further render without a proof is computed from the whole history.
        if kind is None or not all(kind.proven.values()):
            return None
        return self._short(kind, answered, answered.stand_in())

    def tail(self, answered: AnsweredTurn) -> Tail:
        """Return the tail after a turn.

        Raises:
            Unbridgeable: no turn of this shape can be bridged, the template raises, or it does not show the turn.
        """
        kind = self._bridgeable_kind(answered)
        stand_in = answered.stand_in()
        short = self._short(kind, answered, stand_in)
        if short is not None:
            short.complete()
            return short
        tail = self.whole_tail(answered, kind.asked)
        # Without a stand-in, messages may have other fields than the usual ones. The proof that words do not matter
        # does not cover these fields.
        if kind.words_matter or stand_in is None:
            tail.real = self._real(answered.history, answered)
        return tail

    def whole_tail(self, answered: AnsweredTurn, asked: set[Further] | None = None, *, real: bool = False) -> Tail:
        """Return the tail of the whole history, without proofs.

        The further renders in `asked` are made too. With `real`, `Tail.real` is set.

        Raises:
            Unbridgeable: the template raises, or does not show the turn.
        """
        tail = Tail(self._renderer, answered, asked=asked)
        tail.complete()
        if real:
            tail.real = self._real(answered.history, answered)
        return tail

    def is_local(self, answered: AnsweredTurn) -> bool:
        """Return True if earlier messages are proven not to change the text of tails of the turn's shape.

        Raises:
            Unbridgeable: no turn of this shape can be bridged.
        """
        return self._bridgeable_kind(answered).past is not Lookback.POSSIBLE

    # --- tails

    def _short(self, kind: _ShapeToProve, answered: AnsweredTurn, stand_in: Sequence[Message] | None) -> Tail | None:
        """Return the tail of the stand-in; None if there is no stand-in, or the tail needs the whole history."""
        if kind.refusal is not None or kind.past is Lookback.POSSIBLE:
            return None
        # If earlier messages may make the template raise, the whole history is rendered at turns 1, 2, 4, 8 and so on,
        # to find such refusals with little work.
        if kind.past is Lookback.REFUSES and (answered.number + 1) & answered.number == 0:
            return None
        if stand_in is None:
            return None
        proves = self._proving(kind, answered)
        try:
            tail = Tail(self._renderer, answered, stand_in=stand_in, proves=proves, asked=kind.asked)
            if not self._renderer.asks_as_usual(tail.text, answered.new[-1]):
                return None
        except Unbridgeable:
            return None
        if kind.words_matter:
            tail.real = self._real(stand_in, answered)
        return tail

    def _proving(self, kind: _ShapeToProve, answered: AnsweredTurn) -> Callable[[Further], bool]:
        def proves(further: Further) -> bool:
            if further not in kind.proven:
                kind.proven[further] = _further_proven(further, self._question(answered))
            return kind.proven[further]

        return proves

    def _real(self, rendered: Sequence[Message], answered: AnsweredTurn) -> str | None:
        """Return the render of a conversation without a sentinel; None if the template raises on its words."""
        try:
            return self._renderer.render([*rendered, *answered.new], answered.tools)
        except Unbridgeable:  # in this case, `Tail` leaves the words out of its render
            return None

    def _question(self, answered: AnsweredTurn) -> _Question:
        return _Question(self._template, answered.shape, self._renderer.renderer, answered.tools)

    # --- properties of a shape

    def _bridgeable_kind(self, answered: AnsweredTurn) -> _ShapeToProve:
        shape = answered.shape
        kind = self._kinds.get(shape)
        if kind is None:
            with self._learning:
                kind = self._kinds.get(shape) or self._learn(answered)
        if kind.refusal is not None:
            # A new error is raised, since one refusal serves many turns, and an exception collects the frames of every
            # raise.
            raise Unbridgeable(kind.refusal.property, kind.refusal.explanation)
        return kind

    def _learn(self, answered: AnsweredTurn) -> _ShapeToProve:
        shape, tools = answered.shape, answered.tools
        refusal = self._hidden_message(shape, tools) or self._moved(shape, tools)
        past, words_matter = _proven(self._question(answered))
        if len(self._kinds) >= SHAPE_CACHE_SIZE:
            del self._kinds[next(iter(self._kinds))]
        kind = self._kinds[shape] = _ShapeToProve(past, words_matter, refusal)
        return kind

    def _hidden_message(self, shape: TurnShape, tools: Sequence[ToolSchema]) -> Unbridgeable | None:
        """Return a refusal if the template does not show a new message; else None.

        Each content of the example is a marker, since content such as "0" may also occur elsewhere in the render.
        """
        markers = words(len(shape.new))
        tail = self._example(shape, tools, markers)
        for each, word in zip(shape.new, markers, strict=True):
            if tail is not None and not each.empty and word not in tail.text:
                why = f"the template hides the content of a {each.role} message after such a turn"
                return Unbridgeable(Property.CONTENT_SHOWN, why)
        return None

    def _moved(self, shape: TurnShape, tools: Sequence[ToolSchema]) -> Unbridgeable | None:
        """Return a refusal if the template prints tools or a system message after the turn, not before it; else None.

        Mistral-Nemo prints the tools before the last user message, so that they move with each new user message.
        """
        name, *markers = words(1 + len(shape.new))
        if tools and self._moves(self._example(shape, [*tools, tool_named(name)], markers), name):
            return self._misplaced(Property.TOOLS_STAY, "the tools")
        system: Message = {**SYSTEM, "content": name}
        if shape.system and self._moves(self._example(shape, tools, markers, system=system), name):
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
            f"template {self._renderer.renderer.template.name!r} prints {what} after the turn, but the prompt, which "
            f"can only be extended, has {what} before the turn",
        )

    def _example(
        self, shape: TurnShape, tools: Sequence[ToolSchema], markers: Sequence[str], *, system: Message = SYSTEM
    ) -> Tail | None:
        """Return the tail of plain messages of this shape; None if the template raises, or does not show the turn."""
        turn = _example_turn(shape, tools)
        history = [*([system] if shape.system else ()), QUESTION, turn]
        try:
            return Tail(self._renderer, AnsweredTurn(history, _example_new(shape, turn, markers), tools))
        except Unbridgeable:
            return None


# --- proofs, each computed once per process


@dataclass(frozen=True, slots=True)
class _Question:
    """The input of a proof. Two inputs are equal if their templates and shapes are equal."""

    template: tuple[object, ...]
    """Identity of the template, its options and its clock."""
    shape: TurnShape
    """The shape of the turn and its answers, which also identifies the tools."""
    renderer: Renderer = field(compare=False)
    tools: Sequence[ToolSchema] = field(compare=False)


def _key_of(renderer: Renderer) -> tuple[object, ...]:
    template = renderer.template
    now = renderer.now if "strftime_now" in template.text else None  # without the time, runs can share proofs
    return template.text, canonical_json([template.variables, renderer.options, renderer.fits_tools]), now


@lru_cache(PROOF_CACHE_SIZE)
def _proven(asked: _Question) -> tuple[Lookback, bool]:
    """Return the effect of earlier messages on tails of a shape, and True if the turn's words can change the tails."""
    proofs = Proofs(asked.renderer)
    past, words_matter = proofs.past(asked.shape, asked.tools), proofs.words_matter(asked.shape, asked.tools)
    # `past` was proven with the sentinel in place of the turn's words. If the words matter, the bridge is also compared
    # with a render of the stand-in with the real words. That render ends as the render of the whole history only if
    # earlier messages do not change the text after any words.
    if words_matter and past is not Lookback.POSSIBLE and proofs.past_matters_to_words(asked.shape, asked.tools):
        past = Lookback.POSSIBLE
    return past, words_matter


@lru_cache(PROOF_CACHE_SIZE)
def _further_proven(further: Further, asked: _Question) -> bool:
    """Return True if earlier messages are proven not to change a further render."""
    shape = further.shape(asked.shape)
    return Proofs(asked.renderer).past(shape, asked.tools, asking=further.asking) is not Lookback.POSSIBLE


# --- plain messages of a shape


def _example_turn(shape: TurnShape, tools: Sequence[ToolSchema]) -> Message:
    content = "Some words." if shape.text else ""
    turn: Message = {"role": "assistant", "content": content}
    if shape.calls:
        name = tools[0]["function"]["name"] if tools else TOOL
        turn = calling({}, count=shape.calls, content=content, name=name)
    if shape.reasoning:
        turn["reasoning_content"] = "A thought."
    return turn


def _example_new(shape: TurnShape, turn: Message, markers: Sequence[str]) -> list[Message]:
    calls = iter(turn.get("tool_calls") or ())
    messages = []
    for each, word in zip(shape.new, markers, strict=True):
        message = {"role": each.role, "content": "" if each.empty else word}
        call = next(calls, None) if each.role == "tool" else None
        if each.role == "tool":
            message["tool_call_id"] = call["id"] if call is not None else call_id(0)
        if each.named:
            message["name"] = call["function"]["name"] if call is not None else TOOL
        messages.append(cast("Message", message))
    return messages
