"""Transcripts for people: the messages and turns of one agent, with sampled, template and message text marked."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.text import Text

from runner.attachments import Attachment
from runner.errors import DeltarunnerError
from runner.messages import Message, ToolCall
from runner.tokens.tokenizer import without_surrogates
from runner.trajectory import Segment, Trajectory, Turn

__all__ = [
    "Passage",
    "Span",
    "attachments_by_turn",
    "decoder",
    "headline",
    "messages_by_turn",
    "passages",
    "printable",
    "printable_line",
    "shown_line",
    "transcript",
]

Decode = Callable[[Sequence[int]], str]

TEMPLATE = "template"
SAMPLED = "sampled"

STYLES = {
    SAMPLED: "bold green",
    TEMPLATE: "dim",
    "system": "magenta",
    "user": "default",
    "assistant": "blue",
    "tool": "cyan",
}
GUTTER_WIDTH = 11
MAX_ATTACHED_CHARS = 2_000
"""Maximum number of characters of an attached text that a terminal shows."""


@dataclass(frozen=True, slots=True)
class Span:
    """Text of one kind."""

    kind: str
    """"sampled", "template", or the role of the message."""
    text: str
    """The text, unchanged."""


@dataclass(frozen=True, slots=True)
class Passage:
    """Consecutive ids of one source: a prompt, a bridge, or the samples of a turn."""

    start: int
    """The index of the first id in the segment's log."""
    end: int
    """The index after the last id."""
    spans: tuple[Span, ...]
    """The text of the ids, in order."""
    turn: Turn | None = None
    """The turn in which the ids were sampled; None for other ids."""


def passages(segment: Segment, turns: Sequence[Turn], decode: Decode | None) -> Iterator[Passage]:
    """Return the passages of a segment.

    Args:
        segment: the segment.
        turns: the turns that were sampled in it, in order.
        decode: function from ids to text; with None only the messages are shown, and nothing of the template.
    """
    position = 0
    given = messages_by_turn(segment, turns)
    for turn, messages in zip(turns, given, strict=True):
        if turn.start > position:
            text = None if decode is None else decode(segment.log.ids[position : turn.start])
            yield Passage(position, turn.start, tuple(_located(messages, text)))
        yield Passage(turn.start, turn.end, (Span(SAMPLED, _spoken(turn, decode)),), turn)
        position = turn.end


def messages_by_turn(segment: Segment, turns: Sequence[Turn]) -> list[list[Message]]:
    """The messages before each turn; an empty list for a turn that continued a cut turn."""
    seen = segment.messages[: len(segment.messages) - segment.unseen]
    ends = [0, *(turn.end for turn in turns)]
    fresh = [turn.start > end for turn, end in zip(turns, ends, strict=False)]
    assistants = sum(message["role"] == "assistant" for message in seen)
    given_assistants = assistants - sum(fresh)  # given: worked examples, or samples of an earlier segment
    groups: list[list[Message]] = [[]]
    for message in seen:
        if message["role"] == "assistant":
            given_assistants -= 1
            if given_assistants < 0:
                groups.append([])
                continue
        groups[-1].append(message)
    remaining = iter(groups)
    return [next(remaining, []) if new else [] for new in fresh]


def _located(messages: Sequence[Message], text: str | None) -> Iterator[Span]:
    """The contents of the messages and the template's text around them.

    Content that the template changed cannot be found, and counts as the template's text.
    """
    if text is None:
        for message in messages:
            yield Span(message["role"], message["content"] + _calls_text(message.get("tool_calls", ())))
        return
    position = 0
    for message in messages:
        content, found = _find(message["content"], text, position)
        if found < 0:
            continue
        if found > position:
            yield Span(TEMPLATE, text[position:found])
        yield Span(message["role"], content)
        position = found + len(content)
    if position < len(text):
        yield Span(TEMPLATE, text[position:])


def _find(content: str, text: str, start: int) -> tuple[str, int]:
    """Return a message's content and its position in `text`; -1 if not found.

    Ids cannot encode unpaired surrogates, and templates strip white space. So the content is searched for with U+FFFD
    in place of surrogates, and then also without white space at its ends. The returned content is stripped, unless it
    was found without stripping.
    """
    sayable = without_surrogates(content)
    for written in (sayable, sayable.strip()):
        found = text.find(written, start) if written else -1
        if found >= 0:
            return (content if len(written) == len(content) else content.strip()), found
    return content.strip(), -1


def _spoken(turn: Turn, decode: Decode | None) -> str:
    if decode is not None:
        return decode(turn.token_ids)
    reasoning = f"<think>{turn.reasoning}</think>\n" if turn.reasoning else ""
    return reasoning + turn.text + _calls_text([call.as_message() for call in turn.tool_calls if call.error is None])


def _calls_text(calls: Sequence[Any]) -> str:
    made = (ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls)
    shown = (f"{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})" for call in made)
    return "".join(f"[{call}]" for call in shown)


def decoder(engine: Mapping[str, Any]) -> Decode | None:
    """Return the function from ids to text for the field `engine` of a run's header.

    The result is None if the engine takes messages, or if the vocabulary cannot be loaded.
    """
    if engine.get("takes") == "messages":
        return None
    if engine.get("kind") == "scripted":
        from runner.tokens.byte_tokenizer import ByteTokenizer

        own = ByteTokenizer()
        return own.decode if engine.get("tokenizer") == own.fingerprint else None
    model = engine.get("model")
    if not isinstance(model, str):
        return None
    from runner.models import resolve_model
    from runner.tokens.tokenizer import load_tokenizer

    try:
        return load_tokenizer(resolve_model(model).folder).decode
    except DeltarunnerError:
        return None


# --- for people


def transcript(
    trajectory: Trajectory, decode: Decode | None, *, brief: bool = False, tokens: bool = False
) -> Iterator[Text | Labelled]:
    """Return the lines of a transcript. Each passage begins with its kind, so that it can be read without colours.

    Args:
        trajectory: the trajectory.
        decode: function from ids to text; with None only the messages are shown, and nothing of the template.
        brief: True to leave out the template's text, the numbers of each turn, and all of the first prompt but its last
            message.
        tokens: True to show the ids too.
    """
    yield headline(trajectory)
    if trajectory.error:
        yield Labelled("error", trajectory.error, "red")
    attached = attachments_by_turn(trajectory)
    yield from map(_attached, attached.pop(0, ()))
    for number, segment in enumerate(trajectory.segments):
        turns = [turn for turn in trajectory.turns if turn.segment == number]
        if len(trajectory.segments) > 1:
            yield Text(f"  segment {number} ({segment.cause}), {len(segment.log)} ids", style="yellow")
        for passage in passages(segment, turns, decode):
            first = brief and passage.turn is None and passage.start == 0
            yield from _first_prompt(passage, segment, turns) if first else _shown(passage, brief)
            if tokens:
                yield Labelled("ids", " ".join(map(str, segment.log.ids[passage.start : passage.end])), "dim")
            if passage.turn is not None:
                if not brief:
                    yield Labelled("", _accounts(passage.turn), "dim italic")
                yield from map(_attached, attached.pop(passage.turn.number + 1, ()))
        for message in segment.messages[len(segment.messages) - segment.unseen :]:
            yield Labelled(message["role"], f"{message['content']} (the model did not see it)", "dim")
    yield from (_attached(each) for rest in attached.values() for each in rest)


def attachments_by_turn(trajectory: Trajectory) -> dict[int, list[Attachment]]:
    """The attachments by the number of turns before them."""
    attached: dict[int, list[Attachment]] = defaultdict(list)
    for each in trajectory.attachments:
        attached[each.turn].append(each)
    return attached


def _attached(attachment: Attachment) -> Labelled:
    text = attachment.text
    if len(text) > MAX_ATTACHED_CHARS:
        text = f"{text[:MAX_ATTACHED_CHARS]} [... of {len(text):,} characters; `Trajectory.attachments` has all]"
    return Labelled("attached", f"{attachment.name}: {text}", "blue")


def headline(trajectory: Trajectory) -> Text:
    """One line about a trajectory: its id, outcome, reward, scores, and numbers of turns and ids."""
    line = Text.assemble((printable_line(trajectory.id), "bold"))
    if trajectory.agent != "main":
        line.append(f" {printable_line(trajectory.agent)}", "bold")
    if trajectory.attempt:
        line.append(f" (attempt {trajectory.attempt + 1})")
    outcome = trajectory.outcome.value + (f" ({trajectory.limit})" if trajectory.limit else "")
    line.append(f"  {outcome}", "green" if trajectory.outcome.scored else "red")
    line.append(f"  reward {_number(trajectory.reward)}", "bold")
    scores = {**trajectory.rewards, **trajectory.metrics}
    if scores:
        line.append(f" ({', '.join(f'{printable_line(name)} {_number(value)}' for name, value in scores.items())})")
    turns = len(trajectory.turns)
    counted = [turn.tokens for turn in trajectory.turns if turn.usage is not None]
    length = f"{sum(counted)} tokens by the server's count" if counted else f"{trajectory.sampled} ids sampled"
    line.append(f"  {turns} {'turn' if turns == 1 else 'turns'}, {length}")
    return line


def _first_prompt(passage: Passage, segment: Segment, turns: Sequence[Turn]) -> Iterator[Labelled]:
    messages = messages_by_turn(segment, turns)[0]
    if not messages:
        return
    *before, last = messages
    if before:
        roles = Counter(message["role"] for message in before)
        counted = ", ".join(f"{count} {role}" for role, count in roles.items())
        yield Labelled("prompt", f"{passage.end} ids; before this message {counted}", "dim")
    yield Labelled(last["role"], last["content"], STYLES[last["role"]])


def _shown(passage: Passage, brief: bool) -> Iterator[Labelled]:
    for span in passage.spans:
        if brief and span.kind == TEMPLATE:
            continue
        text = span.text.replace("\n", "⏎") if span.kind == TEMPLATE else span.text
        yield Labelled(span.kind, text, STYLES[span.kind])


@dataclass(frozen=True, slots=True)
class Labelled:
    """Text with a label in the margin, its further lines aligned with the first."""

    label: str
    text: str
    """The text, of one line or several."""
    style: str
    """Rich's style of the text."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        text = Text(printable(self.text), style=self.style)
        lines = text.wrap(console, options.max_width - GUTTER_WIDTH) if console.is_terminal else text.split("\n")
        label = Text(self.label.ljust(GUTTER_WIDTH), style="dim" if self.label in (TEMPLATE, "", "ids") else "bold")
        for line in lines:
            yield Text.assemble(label, line)
            label = Text(" " * GUTTER_WIDTH)


def printable(text: str) -> str:
    """Return `text` with escape codes for characters that a terminal would obey or could not write."""
    return text if text.isascii() and text.isprintable() else _UNPRINTABLE.sub(_code, text)


def printable_line(text: str) -> str:
    """Return `printable(text)` with line breaks and tabs as escapes, for a table or a list."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def shown_line(text: str) -> str:
    """Return the first line of a text, in the form of `printable`."""
    return printable(text.partition("\n")[0])


def _code(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


# Control characters of ASCII and Latin-1 (except tab and line feed); characters that mark or override the direction of
# text; separators of lines and paragraphs; surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def _accounts(turn: Turn) -> str:
    """One line about a turn: the numbers and sources of its ids, how it ended, and its times."""
    cached = "" if turn.cached_tokens is None else f", {turn.cached_tokens} cached"
    parts = [f"turn {turn.number + 1}", f"prompt {turn.start}{cached}", f"sampled {turn.end - turn.start}"]
    stop = "" if turn.stop is None else f" {turn.stop}"
    parts.append(f"finish {turn.finish.value}{stop}")
    if turn.junction is not None:
        j = turn.junction
        how = f"{j.result.value}, anchor {j.anchor.value}, close {j.close.value}, seam {j.seam.value}"
        parts.append(f"{j.inserted} bridged ({how})")
    if turn.reward:
        parts.append(f"turn reward {turn.reward:g}")
    timings = turn.timings
    parts.append(f"{timings.queued + timings.first_token + timings.decode:.2f} s, {timings.environment:.2f} s answered")
    return " · ".join(parts)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
