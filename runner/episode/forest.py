"""The forest of a conversation's turns: what it takes to go on from any of them by its very ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from runner.messages import Message
from runner.tools.tool import Tool
from runner.trajectory import Origin, Segment, Turn

__all__ = ["Head", "Node"]


@dataclass(slots=True, eq=False)
class Node:
    """A turn, and what a prompt is made of that goes on from it."""

    turn: Turn
    """The turn."""
    segment: Segment
    """The segment in which it was sampled."""
    parent: Node | None
    """The turn that it follows, of this conversation or of the one that it branched from; None for a first."""
    answered: int
    """How many messages of its segment stand before those that it was asked; 0 where its prompt was rendered whole."""
    start: int
    """How many of the segment's messages its message stands behind."""
    reply: Message
    """Its message: what was said from `begin` on, of a turn that was cut as far as it came."""
    begin: int
    """The first sampled id of its message, which may have begun in a turn that was cut."""
    calls_before: int
    """How many calls the turns before its message made on its path."""
    calls: int
    """The same with its own."""
    plain: bool
    """Whether every message up to it is plain, and gives a template nothing special to look back at (`is_plain`)."""
    extended: bool = False
    """A later turn has the end of its segment, so that what else goes on from it begins a segment of its own."""

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
    def spoken(self) -> Node:
        """The turn that its message began in."""
        node = self
        while node.turn.start != node.begin and node.parent is not None:
            node = node.parent
        return node

    def line(self) -> Iterator[Node]:
        """The turns whose ids its own come behind, itself first; their messages stand in its segment."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent if node.answered or node.turn.start != node.begin else None

    def path(self) -> Iterator[Node]:
        """The turns on its path, itself first."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass(slots=True, eq=False)
class Head:
    """Where a conversation speaks next, and what is put before it there."""

    tools: list[Tool]
    """What may be called."""
    queued: list[Message] = field(default_factory=list)
    """Messages that were added and not put before the model yet; all of them where nothing is gone on from."""
    node: Node | None = None
    """The turn that it goes on from."""
    whole: str = ""
    """Why everything is rendered anew, whatever stands in `node`; "" where the ids of `node` stay."""
    again: Node | None = None
    """The turn whose prompt is sampled once more, as long as what is queued is what that was asked."""
    takes_back: bool = False
    """Whether that turn is not trained on then."""

    @property
    def seen(self) -> list[Message]:
        """The messages that what is queued comes behind."""
        return [] if self.node is None or self.whole else self.node.messages

    @property
    def origin(self) -> Origin | None:
        """The turn that a segment follows which begins here; None where no turn stands before."""
        return None if self.node is None else self.node.origin

    def copied(self) -> Head:
        """A head at the same point, for another turn that is asked there."""
        return replace(self, queued=list(self.queued))

    def schemas(self) -> list[dict[str, object]]:
        """The tools in OpenAI's form, as templates read them."""
        return [tool.as_openai() for tool in self.tools]
