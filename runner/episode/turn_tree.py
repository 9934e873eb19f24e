"""The forest of a conversation's turns: what it takes to go on from any of them by its very ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from runner.messages import Message
from runner.tools.tool import Tool
from runner.trajectory import Origin, Segment, Turn

__all__ = ["Cursor", "TurnNode"]


@dataclass(slots=True, eq=False)
class TurnNode:
    """A turn, and what a prompt is made of that goes on from it."""

    turn: Turn
    """The turn."""
    segment: Segment
    """The segment in which it was sampled."""
    parent: TurnNode | None
    """The turn that it follows, of this conversation or of the one that it branched from; None for a first."""
    answered: int
    """The index, in its segment, of the first message that this turn answers; 0 where the whole prompt was rendered."""
    start: int
    """The index of its own message in the segment."""
    reply: Message
    """The assistant message, read from the ids at `begin` on; a cut turn's message is as long as it got."""
    begin: int
    """The first sampled id of its message, which may have begun in a turn that was cut."""
    calls_before: int
    """The number of calls on the path before the message."""
    calls: int
    """The number of calls on the path up to and with the message."""
    plain: bool
    """Whether every message up to it is plain, and gives a template nothing special to look back at (`is_plain`)."""
    extended: bool = False
    """Whether a later turn extends this segment; any other turn that follows then begins a segment of its own."""

    @property
    def messages(self) -> list[Message]:
        """The messages up to it and with it."""
        return [*self.segment.messages[: self.start], self.reply]

    @property
    def ends_segment(self) -> bool:
        """Whether nothing stands behind it in its segment, nor is about to."""
        return not self.extended and self.turn.end == len(self.segment.log)

    @property
    def asked(self) -> Sequence[Message]:
        """The messages that it was asked: those between the turn before it and its own."""
        return self.segment.messages[self.answered : self.start]

    @property
    def origin(self) -> Origin:
        """The turn, as a segment names it that follows."""
        return Origin(self.turn.agent, self.turn.number, self.turn)

    @property
    def spoken(self) -> TurnNode:
        """The turn that its message began in."""
        node = self
        while node.turn.start != node.begin and node.parent is not None:
            node = node.parent
        return node

    def line(self) -> Iterator[TurnNode]:
        """The turns whose ids its own come behind, itself first; their messages stand in its segment."""
        node: TurnNode | None = self
        while node is not None:
            yield node
            node = node.parent if node.answered or node.turn.start != node.begin else None

    def path(self) -> Iterator[TurnNode]:
        """The turns on its path, itself first."""
        node: TurnNode | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass(slots=True, eq=False)
class Cursor:
    """Where a conversation speaks next, and what is put before it there."""

    tools: list[Tool]
    """What may be called."""
    queued: list[Message] = field(default_factory=list)
    """Messages that were added and not put before the model yet; all of them where nothing is gone on from."""
    node: TurnNode | None = None
    """The turn that it goes on from."""
    whole: str = ""
    """Why everything is rendered anew, whatever stands in `node`; "" where the ids of `node` stay."""
    again: TurnNode | None = None
    """The turn to sample again; it applies only while `queued` equals the messages that this turn was asked."""
    takes_back: bool = False
    """Whether the turn in `again` is not trained on any more once it is sampled again."""

    @property
    def seen(self) -> list[Message]:
        """The messages in front of the queued ones."""
        return [] if self.node is None or self.whole else self.node.messages

    @property
    def origin(self) -> Origin | None:
        """The turn that a segment follows which begins here; None where no turn stands before."""
        return None if self.node is None else self.node.origin

    def copied(self) -> Cursor:
        """A head at the same point, for another turn that is asked there."""
        return replace(self, queued=list(self.queued))

    def schemas(self) -> list[dict[str, object]]:
        """The tools in OpenAI's form, as templates read them."""
        return [tool.as_openai() for tool in self.tools]
