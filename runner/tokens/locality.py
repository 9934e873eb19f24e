"""Locality: where a tail depends on nothing before the last turn, a short stand-in is rendered for the history.

A stand-in is one user message and the last turn itself. A kind of append is local when histories with earlier tool
rounds, two user turns, a system message, reasoning, text beside a call and two calls all give the stand-in's tail.
Simpler probes are wrong for templates that count tool rounds or write something only once. Since no probe sees every
history, some uses are compared with the full render; a difference ends all trust in stand-ins.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import orjson

from runner.messages import Message, ToolCallMessage
from runner.tokens.marking import SWITCHES, Stems
from runner.tokens.refusal import Property, Unbridgeable
from runner.tokens.tail import Tail, TailMaker
from runner.tokens.template import ToolSchema

__all__ = ["Locality", "Shape"]

CHECKED_ONE_IN = 64
NAMES_KEPT = 1000
KINDS_KEPT = 1000


@dataclass(frozen=True, slots=True)
class Shape:
    """What the probes of one kind of append have in common.

    Attributes:
        calls: how many the last turn made.
        reasoning: the last turn thought.
        text: it said something.
        new: role and whether it is empty, of each new message; contents are strings.
        tools: a hash of their schemas.
    """

    calls: int
    reasoning: bool
    text: bool
    new: tuple[tuple[str, bool], ...]
    tools: bytes

    @classmethod
    def of(cls, turn: Message, new: Sequence[Message], tools: Sequence[ToolSchema]) -> Shape:
        return cls(
            calls=len(turn.get("tool_calls") or ()),
            reasoning=bool(turn.get("reasoning_content")),
            text=bool(turn["content"]),
            new=tuple((message["role"], not message["content"]) for message in new),
            tools=hashlib.blake2b(_as_json(tools), digest_size=16).digest(),
        )


def _as_json(tools: Sequence[ToolSchema]) -> bytes:
    return orjson.dumps(tools, option=orjson.OPT_NON_STR_KEYS, default=str)


@dataclass(slots=True)
class _Kind:
    """What is known of one shape.

    Attributes:
        local: the probes agree.
        refusal: why it cannot be bridged at all, or None.
        turns: numbers of the turns at which it was compared with a full render.
        uses: since the last comparison.
        asked: names of the further renders that its tails were asked for.
    """

    local: bool
    refusal: Unbridgeable | None = None
    turns: set[int] = field(default_factory=set)
    uses: int = 0
    asked: set[str] = field(default_factory=set)


class Locality:
    """Makes tails, from a stand-in where that is proven to give the same one.

    Attributes:
        revoked: how a stand-in's tail was seen to differ from the full one; "" while none did.
        relied: names of what was finished with tails of stand-ins, the latest thousand.
        relied_count: how many.
    """

    def __init__(self, maker: TailMaker) -> None:
        self.revoked = ""
        self.relied: deque[str] = deque(maxlen=NAMES_KEPT)
        self.relied_count = 0
        self._maker = maker
        self._stems = Stems()
        self._kinds: dict[Shape, _Kind] = {}
        self._probing = threading.Lock()

    def at_once(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSchema], turn: int
    ) -> tuple[Tail, bool] | None:
        """What `tail` gives where it takes no longer than the new messages; None where it renders the whole."""
        kind = self._kinds.get(Shape.of(history[-1], new, tools))
        if kind is None or turn not in kind.turns or kind.uses + 1 >= CHECKED_ONE_IN:
            return None
        if not self._may_stand_in(kind, history[-1], new):
            return None
        kind.uses += 1
        return self._tail([*_STAND_IN, history[-1]], new, tools, kind.asked), True

    def tail(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSchema], turn: int
    ) -> tuple[Tail, bool]:
        """The tail, and whether it is a stand-in's. Any thread may call.

        Args:
            history: ends with the turn.
            new: the messages after it.
            tools: as shown to the model.
            turn: the turn's number; the first use at each number is compared with the full render.

        Raises:
            Unbridgeable: no history of this kind can be bridged, or the template raises.
        """
        kind = self._kind(history[-1], new, tools)
        if kind.refusal is not None:
            raise Unbridgeable(kind.refusal.property, kind.refusal.explanation)
        if not self._may_stand_in(kind, history[-1], new):
            return self._full(history, new, tools, kind.asked), False
        kind.uses += 1
        due = turn not in kind.turns or kind.uses >= CHECKED_ONE_IN
        short = self._tail([*_STAND_IN, history[-1]], new, tools, kind.asked)
        if not due:
            return short, True
        kind.turns.add(turn)
        kind.uses = 0
        try:
            full = self._full(history, new, tools, kind.asked)
        except Unbridgeable as raised:
            self._revoke(short.text, str(raised))
            raise
        self._check_real(full, kind, history, new, tools)
        if full.plain == short.plain:
            return short, True
        self._revoke(short.text, full.text)
        return full, False

    def _check_real(
        self,
        full: Tail,
        kind: _Kind,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> None:
        """The conversation as it is ends as it does with the sentinel in it.

        Raises:
            Unbridgeable: it does not, so no conversation of this kind is bridged any more.
        """
        try:
            real = self._maker.render([*history, *new], tools)
        except Unbridgeable:  # on the words themselves, and the sentinel stands in for them
            return
        # A tail that begins in a call begins behind other words than the call's own.
        if not real.endswith(full.text[full.border or full.seen[1] :] if full.after_call else full.text):
            kind.refusal = self._depends(full.text[-80:], real[-80:])
            raise Unbridgeable(kind.refusal.property, kind.refusal.explanation)

    def _depends(self, one: str, other: str) -> Unbridgeable:
        return Unbridgeable(
            Property.TURN_STAYS_BEHIND,
            f"what template {self._maker.renderer.template.name!r} writes behind a turn depends on what was said in "
            f"it: {other!r} where {one!r} was expected",
        )

    def full(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSchema]) -> Tail:
        """The tail of the whole history."""
        return self._full(history, new, tools, set())

    def is_local(self, turn: Message, new: Sequence[Message], tools: Sequence[ToolSchema]) -> bool:
        """Tails of this kind are a stand-in's.

        Raises:
            Unbridgeable: no history of this kind can be bridged.
        """
        kind = self._kind(turn, new, tools)
        if kind.refusal is not None:
            raise kind.refusal
        return self._may_stand_in(kind, turn, new)

    def finished(self, name: str) -> None:
        """Remember that what bears this name was finished with tails of stand-ins."""
        self.relied.append(name)
        self.relied_count += 1

    def _may_stand_in(self, kind: _Kind, turn: Message, new: Sequence[Message]) -> bool:
        if not kind.local or kind.refusal is not None or self.revoked:
            return False
        # An answer to an earlier call is looked up by its id in the history.
        ids = {call["id"] for call in turn.get("tool_calls") or ()}
        return all(message.get("tool_call_id") in ids for message in new if message["role"] == "tool")

    def _full(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSchema], asked: set[str]
    ) -> Tail:
        tail = self._tail(history, new, tools, asked)
        tail.complete()
        return tail

    def _tail(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[ToolSchema],
        asked: set[str] | None = None,
    ) -> Tail:
        return Tail(self._maker, self._stems.absent([*history, *new]), history, new, tools, asked)

    def _kind(self, turn: Message, new: Sequence[Message], tools: Sequence[ToolSchema]) -> _Kind:
        shape = Shape.of(turn, new, tools)
        kind = self._kinds.get(shape)
        if kind is None:
            with self._probing:
                kind = self._kinds.get(shape) or self._learn(shape, self._probe(turn, new, tools))
        return kind

    def _learn(self, shape: Shape, kind: _Kind) -> _Kind:
        # Environments may offer other tools in every episode: what was learnt first is learnt again if need be.
        if len(self._kinds) >= KINDS_KEPT:
            del self._kinds[next(iter(self._kinds))]
        self._kinds[shape] = kind
        return kind

    def _probe(self, turn: Message, new: Sequence[Message], tools: Sequence[ToolSchema]) -> _Kind:
        tails = [self._attempt([*before, turn], new, tools) for before in (_STAND_IN, *_histories())]
        shown = [tail for tail in tails if tail is not None]
        other = self._attempt([*_STAND_IN, turn], new, tools, stem=self._stems.unlike())
        if tails[0] is not None and other is not None and other != tails[0]:
            return _Kind(local=False, refusal=self._depends(tails[0][-80:], other[-80:]))
        hidden = self._hidden_message(turn, new, tools)
        if hidden is not None:
            return _Kind(local=False, refusal=hidden)
        moved = self._moved_tool(turn, new, tools)
        if moved:
            return _Kind(local=False, refusal=Unbridgeable(Property.TOOLS_STAY, moved))
        return _Kind(local=tails[0] is not None and len(shown) > 1 and all(tail == tails[0] for tail in shown))

    def _attempt(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSchema], stem: str | None = None
    ) -> str | None:
        try:
            return Tail(self._maker, stem or self._stems.absent([*history, *new]), history, new, tools).plain
        except Unbridgeable:
            return None

    def _hidden_message(
        self, turn: Message, new: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> Unbridgeable | None:
        """A new message that the template does not show: markers tell, where "u" or "0" would be found anywhere."""
        words = [self._stems.absent([]) if message["content"] else "" for message in new]
        copies = [cast("Message", {**message, "content": word}) for message, word in zip(new, words, strict=True)]
        tail = self._attempt([*_STAND_IN, turn], copies, tools)
        for message, word in zip(new, words, strict=True):
            if tail is not None and word not in tail:
                why = f"the template hides what a message of the {message['role']} role says there"
                return Unbridgeable(Property.CONTENT_SHOWN, why)
        return None

    def _moved_tool(self, turn: Message, new: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
        """Words for it where the template prints the tools behind the turn, else ""."""
        if not tools:
            return ""
        name = self._stems.absent([])
        extra: ToolSchema = {
            "type": "function",
            "function": {"name": name, "description": "A tool.", "parameters": {"type": "object", "properties": {}}},
        }
        try:
            tail = self._tail([*_STAND_IN, turn], new, [*tools, extra])
            if name not in tail.text or tail.stands_before(name):
                return ""
        except Unbridgeable:
            return ""
        return (
            f"template {self._maker.renderer.template.name!r} prints the tools behind the turn, before the new "
            "messages, so that the tools in the prompt stand where it would not have them"
        )

    def _revoke(self, short: str, full: str) -> None:
        self.revoked = self.revoked or (
            f"template {self._maker.renderer.template.name!r} was taken to write the same after a turn whatever came "
            f"before it, and wrote {full[:80]!r} where {short[:80]!r} was expected"
        )


_STAND_IN: Sequence[Message] = ({"role": "user", "content": "Go on."},)


def _histories() -> Iterator[Sequence[Message]]:
    """What may stand before a turn, beyond a plain question."""
    system: Message = {"role": "system", "content": "You answer questions."}
    first: Message = {"role": "user", "content": "The first question."}
    second: Message = {"role": "user", "content": "The second question."}
    said: Message = {"role": "assistant", "content": "An answer."}
    thought: Message = {"role": "assistant", "content": "An answer.", "reasoning_content": "A thought."}
    one_call, two_calls = [_call(0)], [_call(0), _call(1)]
    round_: list[Message] = [{"role": "assistant", "content": "", "tool_calls": one_call}, _result(0)]
    spoken: list[Message] = [
        {"role": "assistant", "content": "I look.", "reasoning_content": "A thought.", "tool_calls": one_call},
        _result(0),
    ]
    parallel: list[Message] = [
        {"role": "assistant", "content": "", "tool_calls": two_calls},
        _result(0),
        _result(1),
    ]
    yield [system, first]
    yield [first, said, second]
    yield [first, *round_]
    yield [first, *round_, *round_]
    yield [first, *round_, said, second]
    yield [first, thought, second]
    yield [first, *spoken]
    yield [first, *parallel]
    yield [system, first, *spoken, thought, second, *parallel, *round_]
    for switch in SWITCHES:
        switched: Message = {"role": "system", "content": f"You answer questions. {switch}"}
        asked: Message = {"role": "user", "content": f"The first question. {switch}"}
        yield [switched, first]
        yield [asked, said, second]


def _call(number: int) -> ToolCallMessage:
    return {"id": f"probe{number:04}", "type": "function", "function": {"name": "probe", "arguments": {"key": "value"}}}


def _result(number: int) -> Message:
    return cast(
        "Message", {"role": "tool", "content": "A result.", "tool_call_id": f"probe{number:04}", "name": "probe"}
    )
