"""A request that a client makes of an episode with its whole history, and the record of what it was found to be."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.errors import BadMessage
from runner.options import Sampling, ToolChoice

__all__ = ["Again", "ChatCall", "ChatRequest", "Delivery", "Tolerated", "UnknownReference", "Verdict"]


class UnknownReference(BadMessage):
    """A request names a turn by an id that its episode did not give out.

    Args:
        given: the id.
        is_item: whether it is that of an item; else it is that of an earlier response.
    """

    def __init__(self, given: str, *, is_item: bool) -> None:
        what = f"Item with id {given!r}" if is_item else f"Previous response with id {given!r}"
        fix = "give the item itself" if is_item else "give the whole history as input"
        super().__init__(f"{what} not found: no turn of this episode has it; {fix}.")
        self.is_item = is_item


class Verdict(enum.StrEnum):
    """What the history of a request is to the turns that the episode has."""

    APPEND = "append"
    """New messages follow a turn that nothing of its thread followed yet: its segment goes on.

    Those of a client of another label begin a thread of their own, from the ids up to that turn.
    """
    BRANCH = "branch"
    """New messages follow a turn that another one follows too: a new segment has the ids up to that turn."""
    REWOUND = "rewound"
    """The client left its last turns behind and goes on from an earlier one; they stay trained where they were sampled.

    A client that leaves even its first turn behind has its history rendered anew.
    """
    AGAIN = "again"
    """It ends exactly where the prompt of a turn ended; `Again` says what was done."""
    CONTINUED = "continued"
    """It ends with a turn that was cut at its length, which goes on."""
    FOREIGN = "foreign"
    """It holds an assistant message that nobody sampled: rendered anew, with mask 0."""
    RETOLD = "retold"
    """It has as many turns as were sampled, in other words: rendered anew at every turn."""
    EDITED = "edited"
    """Its ids name a turn of this thread, and the client changed what stands before that turn: rendered again."""
    TOOLS = "tools"
    """It offers other tools than its past was shown with: rendered anew."""
    NEW = "new"
    """Nothing of it is known: another thread begins."""


class Again(enum.StrEnum):
    """What is done with a request whose prompt was asked before."""

    NO = ""
    """It was not asked before."""
    SIBLING = "sibling"
    """The turn before is in flight or was delivered: another is sampled from the same ids, and both are trained."""
    TAKEN_BACK = "taken_back"
    """The turn before was cut, since whoever asked went away: it is not trained, and sampled anew from the same ids."""
    REPLAYED = "replayed"
    """The turn before was finished and never delivered: it is given now, and nothing is sampled."""


class Tolerated(enum.StrEnum):
    """A difference between what a client was given and what it sends back, which changes nothing."""

    REASONING_LEFT_OUT = "reasoning_left_out"
    """A turn's reasoning is missing; the model goes on seeing it."""
    REASONING_STRIPPED = "reasoning_stripped"
    """White space at the ends of a turn's reasoning."""
    REASONING_IN_CONTENT = "reasoning_in_content"
    """A turn's reasoning in front of its content, between `<think>` and `</think>` or marks like them."""
    REASONING_REWRITTEN = "reasoning_rewritten"
    """A turn's reasoning in other words, beside ids that name the turn; the model goes on seeing its own."""
    WHITE_SPACE = "white_space"
    """White space at the ends of a content."""
    TEXT_LEFT_OUT = "text_left_out"
    """A turn's text, or a part of it, is missing beside ids that name the turn; the model goes on seeing it."""
    TEXT_REFORMATTED = "text_reformatted"
    """The words of a turn's text with other white space, punctuation or markup, beside ids that name the turn."""
    CALLS_LEFT_OUT = "calls_left_out"
    """Some of a turn's calls are missing, beside others whose ids name the turn."""
    CALLS_RENAMED = "calls_renamed"
    """A call by another name of its tool, with an id that names the turn and the same arguments."""
    ARGUMENTS_CUT = "arguments_cut"
    """A call's arguments are not a JSON object any more; where its id names a turn, they are those of the turn."""
    ARGUMENTS_RESPELT = "arguments_respelt"
    """A call's arguments as other JSON of the same value."""
    CONTENT_NULL = "content_null"
    """No content, where it was empty."""
    CONTENT_PARTS = "content_parts"
    """A content as a list of parts of text."""
    CACHE_MARKS = "cache_marks"
    """`cache_control` on messages or parts."""
    EXTRA_KEYS = "extra_keys"
    """Further keys, which no template reads."""
    VOLATILE_LINES = "volatile_lines"
    """Lines of a system message that differ from request to request; they are taken out."""
    JOINED = "joined"
    """One turn as several messages, which are joined."""
    REORDERED = "reordered"
    """Results in another order than the calls, or calls of one turn as several messages with results between them."""
    CALL_IDS = "call_ids"
    """Other ids of calls than those that were given; results are matched by their position."""
    SYSTEM_JOINED = "system_joined"
    """Several system messages at the beginning, joined into one for a template that takes only one."""
    NOT_TEXT = "not_text"
    """Content of the past that is not text, such as an image; a note stands in its place."""
    REFERENCE = "reference"
    """A turn, or a whole earlier response, named by its id alone."""
    SYSTEM_AS_USER = "system_as_user"
    """System messages in mid-conversation, which were asked to be put before the model as a user's."""
    CUT_ITEMS = "cut_items"
    """Finished parts of a turn that was cut, which are left out."""


class Delivery(enum.StrEnum):
    """How far the answer to a request came."""

    IN_FLIGHT = "in_flight"
    """It is being sampled."""
    DELIVERED = "delivered"
    """Whoever asked has it."""
    UNDELIVERED = "undelivered"
    """It was finished, and whoever asked had gone away."""
    CUT = "cut"
    """Whoever asked went away, or the episode ended, while it was sampled."""
    REFUSED = "refused"
    """There is none: a limit was reached, or no prompt could be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """What a client asks."""

    messages: Sequence[Any]
    """The whole history."""
    tools: Sequence[Any] = ()
    """The tools that may be called, in OpenAI's form."""
    sampling: Sampling | None = None
    """How it would have the turn sampled."""
    tool_choice: ToolChoice | None = None
    """Whether the turn may, must or must not call a tool."""
    label: str = ""
    """The client's own name for who asks."""
    train: bool | None = None
    """Whether a thread that begins with it is trained; None trains those that are offered tools."""
    handles: Sequence[str] = ()
    """What it sends back beside call ids that names a turn."""
    previous: str = ""
    """The id of an earlier answer, whose history and answer stand before the messages; "" where these are all."""
    own_system: bool = False
    """Whether the first message is a system message of this request alone, and not of those that go on from it."""
    system_as_user: bool = False
    """Whether system messages in mid-conversation are put before the model as a user's."""
    as_sent: bool = False
    """Whether its history is put before the model as the client sends it, rendered anew at every request."""
    form: str = "messages"
    """The form in which it came."""
    client: str = ""
    """What the client's program calls itself."""
    purpose: str = ""
    """What the client says that it asks for, in its own word."""
    not_granted: Mapping[str, Any] = field(default_factory=dict)
    """What it asks besides and does not get."""


@dataclass(slots=True, repr=False)
class ChatRequest:
    """One request of `Episode.chat` or of an endpoint, and what became of it."""

    number: int
    """The number of the request among those of its episode, from 0."""
    verdict: Verdict
    """What its history was to the turns that there were."""
    again: Again = Again.NO
    """What was done where its prompt had been asked before."""
    label: str = ""
    """The client's own name for who asks, such as a session or an agent; "" where it has none."""
    form: str = "messages"
    """The form in which it came."""
    client: str = ""
    """What the client's program calls itself; "" where nothing says so."""
    purpose: str = ""
    """What the client says that it asks for, in its own word, such as `compaction`; "" where it says nothing."""
    turn: int | None = None
    """The number of the turn that answered it; None where nothing was sampled for it."""
    parent_agent: str = ""
    """The agent of the turn that it goes on from; "" where it goes on from none."""
    parent_turn: int | None = None
    """The number of that turn."""
    tolerated: tuple[Tolerated, ...] = ()
    """The differences that changed nothing, by name."""
    volatile: int = 0
    """How many lines were taken out of system messages."""
    not_granted: Mapping[str, Any] = field(default_factory=dict)
    """The sampling that it asked for and did not get."""
    messages: int = 0
    """How many messages it had."""
    size: int = 0
    """How many bytes its messages have as JSON."""
    align_seconds: float = 0.0
    """How long it took to find where it stands."""
    seconds: float = 0.0
    """How long it took from the moment at which it was there until its answer was given, or there was to be none."""
    delivery: Delivery = Delivery.IN_FLIGHT
    """How far its answer came."""
    error: str = ""
    """Why there is no answer, or ""."""

    def __repr__(self) -> str:
        return f"<ChatRequest {self.number}: {self.verdict}, {self.delivery}>"
