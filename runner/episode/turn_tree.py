"""The tree of a conversation's turns. A later turn can continue from any of them, with the exact ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from runner.messages import Message
from runner.tools.tool import Tool
from runner.trajectory import Origin, Segment, Turn

__all__ = ["Cursor", "TurnNode"]


@dataclass(slots=True, eq=False)
class TurnNode:
    """A turn, with the data that the prompt of a following turn needs."""

    turn: Turn
    segment: Segment
    """Segment in which the turn was sampled."""
    parent: TurnNode | None
    """The previous turn, in this conversation or in the conversation that it branched from; None for a first turn."""
    answered: int
    """Index, in the segment, of the first message that the turn answers; 0 if the whole prompt was rendered."""
    start: int
    """Index of the turn's own message in the segment."""
    reply: Message
    """The assistant message, parsed from the ids from `begin` on. A cut turn has the sampled part."""
    begin: int
    """Index of the first sampled id of the turn's message, which may have begun in an earlier turn that was cut."""
    calls_before: int
    """Number of calls on the path before the message."""
    calls: int
    """Number of calls on the path, including the calls of the message."""
    plain: bool
    """True if every message up to this turn is plain: a template has no reason to change it later (see `is_plain`)."""
    extended: bool = False
    """True if a following turn extends the segment. Any other turn that follows this turn then begins a new segment."""

    @property
    def messages(self) -> list[Message]:
        """The messages of the segment before the turn's message, followed by that message."""
        return [*self.segment.messages[: self.start], self.reply]

    @property
    def ends_segment(self) -> bool:
        """True if nothing follows the turn in its segment, and no turn in flight extends the segment."""
        return not self.extended and self.turn.end == len(self.segment.log)

    @property
    def prompt_messages(self) -> Sequence[Message]:
        """The messages that the turn answers: all messages between the previous turn and its own message."""
        return self.segment.messages[self.answered : self.start]

    @property
    def origin(self) -> Origin:
        """The `origin` of a segment that follows this turn."""
        return Origin(self.turn.agent, self.turn.number, self.turn)

    @property
    def spoken(self) -> TurnNode:
        """The turn in which this turn's message began."""
        node = self
        while node.turn.start != node.begin and node.parent is not None:
            node = node.parent
        return node

    def line(self) -> Iterator[TurnNode]:
        """Yield the turn itself, and the earlier turns whose ids precede its ids in the log.

        The messages of these turns are in the same segment.
        """
        node: TurnNode | None = self
        while node is not None:
            yield node
            node = node.parent if node.answered or node.turn.start != node.begin else None

    def path(self) -> Iterator[TurnNode]:
        """Yield the turns from this one back to the first."""
        node: TurnNode | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass(slots=True, eq=False)
class Cursor:
    """The position from which a conversation continues, and the messages to add before its next turn."""

    tools: list[Tool]
    queued: list[Message] = field(default_factory=list)
    """Messages to add to the prompt; all messages if `node` is None or `whole` is set."""
    node: TurnNode | None = None
    """The turn to continue from; None at the beginning."""
    whole: str = ""
    """Cause for rendering the whole prompt again, even if there is a `node`; "" if the ids of `node` are kept."""
    again: TurnNode | None = None
    """The turn to sample again. It applies only while `queued` equals the messages that this turn answered."""
    takes_back: bool = False
    """True if the turn in `again` is no longer trained on once it is sampled again."""

    @property
    def seen(self) -> list[Message]:
        """The messages before the queued ones."""
        return [] if self.node is None or self.whole else self.node.messages

    @property
    def origin(self) -> Origin | None:
        """The turn before a segment that begins at this position; None for a first segment."""
        return None if self.node is None else self.node.origin

    def copied(self) -> Cursor:
        """Return a cursor at the same point, for another turn."""
        return replace(self, queued=list(self.queued))

    def schemas(self) -> list[dict[str, object]]:
        """Return the tools in OpenAI's form, as templates read them."""
        return [tool.as_openai() for tool in self.tools]
