"""One episode for a page: its transcript, tokens, branches and requests, with long texts cut."""

from __future__ import annotations

import base64
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, TypeVar

from runner.attachments import Attachment, AttachmentKind
from runner.chat_requests import ChatRequest
from runner.messages import Message
from runner.report.labels import Labels
from runner.store.json_values import encode_json
from runner.store.reader import EpisodeRow, RunFile
from runner.tokens.log import Source, TokenLog
from runner.trajectory import Segment, Trajectory, Turn
from runner.transcript import Decode, attachments_by_turn, messages_by_turn

__all__ = ["AgentView", "EpisodeView", "Vocabulary", "episode_view", "token_payload"]

MAX_TEXT_CHARS: Final = 8_000
"""Maximum number of characters of a text in a page; the middle of a longer text is left out."""
MAX_SHOWN_ITEMS: Final = 400
"""Maximum number of messages and turns of a segment, and of segments and requests of an episode, in a page."""
MAX_SHOWN_CALLS: Final = 50
"""Maximum number of tool calls of a message or a turn in a page."""
MAX_EPISODE_CHARS: Final = 2_000_000
"""Maximum number of characters of an episode's texts in a page; further messages and turns are left out."""
MAX_EPISODE_IMAGE_CHARS: Final = 8_000_000
"""Maximum number of characters of an episode's images in a page, in base64; further images are only named."""
MAX_TREE_DEPTH: Final = 9
MAX_IMAGE_BYTES: Final = 2_000_000
"""Size of the largest attached image that a page shows."""
MAX_PAYLOAD_IDS: Final = 100_000
"""Maximum number of ids of an episode whose tokens are in a page. If an episode has more ids, the page has the tokens
at both ends of each segment.
"""
MIN_PAYLOAD_IDS: Final = 200
"""Minimum number of ids that a long episode keeps of each segment."""


Attached: TypeAlias = dict[int, list[Attachment]]
"""Attachments by the number of turns before them."""
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Entry:
    """A message, a sampled turn, an attachment, or a note about omitted entries."""

    kind: str
    """The role of a message, "sampled", "unseen", "attached" or "note"."""
    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str, str], ...] = ()
    """(name, arguments, error) of each tool call."""
    name: str = ""
    """The tool of a tool message, the number of a turn, the role of an unseen message, or an attachment's name."""
    account: str = ""
    """Ids, finish reason and time of a turn."""
    junction: str = ""
    """The way in which the prompt of a turn follows the previous turn."""
    notable: bool = False
    """True if the new messages were not simply appended to the previous turn, or the seam is not proven."""
    image: str = ""
    """The `data:` URL of an attached image; "" for other entries."""

    @property
    def size(self) -> int:
        """The number of characters of the entry's texts."""
        return len(self.text) + len(self.reasoning) + sum(sum(map(len, call)) for call in self.calls)


@dataclass(frozen=True, slots=True)
class SegmentView:
    """The transcript of a segment."""

    number: int
    cause: str
    ids: int
    origin: str
    """The turn that the segment follows, in words; "" for a first segment."""
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """A segment in the tree of an episode."""

    depth: int
    """The number of segments above this one, at most 9."""
    label: str


@dataclass(frozen=True, slots=True)
class AgentView:
    """One agent of an episode."""

    agent: str
    row: EpisodeRow
    scores: tuple[tuple[str, float | None], ...]
    before: tuple[Entry, ...]
    """Attachments before the first turn."""
    segments: tuple[SegmentView, ...]
    after: tuple[Entry, ...]
    """A note about omitted segments, and attachments without a place in the shown segments."""
    requests: tuple[Mapping[str, str], ...]
    more_requests: int
    """The number of requests that are left out."""
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """One attempt at an episode, with all its agents."""

    id: str
    attempt: int
    task: str
    """The task's answer and info, as JSON; "" if it has neither."""
    agents: tuple[AgentView, ...]
    tree: tuple[Branch, ...]
    """The segments as a tree; empty for an episode of one segment."""
    labels: tuple[str, ...]


def episode_view(run_file: RunFile, rows: Sequence[EpisodeRow], labels: Labels | None = None) -> EpisodeView:
    """The view of an episode.

    Args:
        run_file: the run file.
        rows: the rows of its agents, of one attempt.
        labels: the labels of readers; None to show no labels.
    """
    trajectories = [run_file.trajectory(row) for row in rows]
    task = trajectories[0].task
    room = _Room()
    data: dict[str, Any] = {}
    if task.answer:
        data["answer"] = task.answer
    if task.info:
        data["info"] = task.info
    return EpisodeView(
        id=rows[0].id,
        attempt=rows[0].attempt,
        task=cut(encode_json(data)) if data else "",
        agents=tuple(_agent_view(row, each, room) for row, each in zip(rows, trajectories, strict=True)),
        tree=_tree(trajectories),
        labels=() if labels is None else (*(each.words for each in labels.of(rows[0].id)), *labels.problems),
    )


def cut(text: str) -> str:
    """The text without its middle, if it is too long for a page."""
    if len(text) <= MAX_TEXT_CHARS:
        return text
    half = MAX_TEXT_CHARS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"


def _ends(items: Sequence[Item]) -> tuple[Sequence[Item], int, Sequence[Item]]:
    """The first items, the number of items that are left out in the middle, and the last items."""
    half = MAX_SHOWN_ITEMS // 2
    if len(items) <= MAX_SHOWN_ITEMS:
        return items, 0, ()
    return items[:half], len(items) - 2 * half, items[-half:]


def _left_out(count: int, what: str) -> list[Entry]:
    return [Entry("note", f"{count:,} {what} are left out here; `deltarunner show` has them.")] if count else []


class _Room:
    """The room that an episode has left in a page."""

    def __init__(self) -> None:
        self._left = MAX_EPISODE_CHARS
        self._left_for_images = MAX_EPISODE_IMAGE_CHARS

    def fill(self, entries: Iterable[Entry]) -> tuple[Entry, ...]:
        """Return the first and the last entries that fit into the room, with a note at each cut."""
        first, count, last = _ends(list(entries))
        shown = [*map(self._image, first), *_left_out(count, "messages and turns"), *map(self._image, last)]
        for place, entry in enumerate(shown):
            self._left -= entry.size
            if self._left < 0:
                return (*shown[:place], *_left_out(len(shown) - place, "messages and turns"))
        return tuple(shown)

    def _image(self, entry: Entry) -> Entry:
        self._left_for_images -= len(entry.image)
        if self._left_for_images >= 0 or not entry.image:
            return entry
        text = "This image is left out here: the images of the episode are too large together."
        return replace(entry, image="", text=text)


def _agent_view(row: EpisodeRow, trajectory: Trajectory, room: _Room) -> AgentView:
    attached = attachments_by_turn(trajectory)
    before = room.fill(map(_attached, attached.pop(0, [])))
    turns: dict[int, list[Turn]] = defaultdict(list)
    for turn in trajectory.turns:
        turns[turn.segment].append(turn)
    first, count, last = _ends(range(len(trajectory.segments)))
    views = [_segment_view(trajectory, number, turns[number], attached, room) for number in (*first, *last)]
    # Attachments of omitted turns, or of turns of another agent, come last.
    rest = [_attached(each) for several in attached.values() for each in several]
    return AgentView(
        agent=row.agent,
        row=row,
        scores=tuple({**trajectory.rewards, **trajectory.metrics}.items())[:MAX_SHOWN_ITEMS],
        before=before,
        segments=tuple(views),
        after=room.fill([*_left_out(count, "segments"), *rest]),
        requests=tuple(map(_request, trajectory.requests[:MAX_SHOWN_ITEMS])),
        more_requests=max(0, len(trajectory.requests) - MAX_SHOWN_ITEMS),
        trajectory=trajectory,
    )


def _segment_view(
    trajectory: Trajectory, number: int, turns: Sequence[Turn], attached: Attached, room: _Room
) -> SegmentView:
    segment = trajectory.segments[number]
    return SegmentView(
        number=number,
        cause=segment.cause,
        ids=len(segment.log),
        origin=_after(segment),
        entries=room.fill(_entries(segment, turns, attached)),
    )


def _entries(segment: Segment, turns: Sequence[Turn], attached: Attached) -> Iterator[Entry]:
    for turn, messages in zip(turns, messages_by_turn(segment, turns), strict=True):
        yield from map(_message, messages)
        yield _turn(turn)
        yield from map(_attached, attached.pop(turn.number + 1, ()))
    for message in segment.messages[len(segment.messages) - segment.unseen :]:
        yield Entry("unseen", cut(message["content"]), name=message["role"])


def _attached(attachment: Attachment) -> Entry:
    # Only the first bytes of the image were checked. A browser that cannot show the image shows its name.
    image = ""
    if attachment.kind is AttachmentKind.IMAGE and len(attachment.data) <= MAX_IMAGE_BYTES:
        image = f"data:{attachment.media_type};base64,{base64.b64encode(attachment.data).decode()}"
    return Entry("attached", "" if image else cut(attachment.text), name=attachment.name, image=image)


def _message(message: Message) -> Entry:
    calls = _calls(
        [(call["function"]["name"], call["function"]["arguments"], "") for call in message.get("tool_calls") or ()]
    )
    return Entry(
        message["role"],
        cut(message["content"]),
        reasoning=cut(message.get("reasoning_content", "")),
        calls=calls,
        name=message.get("name", ""),
    )


def _calls(calls: Sequence[tuple[str, Any, str]]) -> tuple[tuple[str, str, str], ...]:
    shown = [(name, cut(encode_json(arguments)), error) for name, arguments, error in calls[:MAX_SHOWN_CALLS]]
    more = len(calls) - len(shown)
    return (*shown, *([(f"[... {more:,} calls left out ...]", "", "")] if more > 0 else []))


def _turn(turn: Turn) -> Entry:
    calls = _calls(
        [(call.name, dict(call.arguments), call.error or ("failed" if call.failed else "")) for call in turn.tool_calls]
    )
    parts = [f"prompt {turn.prompt_tokens:,}", f"sampled {turn.tokens:,}"]
    parts.append(f"{turn.finish.value}{'' if turn.stop is None else f' {turn.stop}'}")
    timings = turn.timings
    parts.append(f"{timings.queued + timings.first_token + timings.decode:.2f} s")
    if timings.environment:
        parts.append(f"environment {timings.environment:.2f} s")
    if turn.reward:
        parts.append(f"turn reward {turn.reward:g}")
    if turn.retried:
        parts.append("withdrawn")
    if turn.left_out:
        parts.append("left out")
    junction, notable = "", False
    if turn.junction is not None:
        j = turn.junction
        junction = f"{j.result.value}: {j.inserted} ids bridged, anchor {j.anchor.value}, close {j.close.value}, "
        junction += f"seam {j.seam.value}{f', because of {j.cause}' if j.cause else ''}"
        notable = bool(j.cause) or j.seam.value == "unverified"
    return Entry(
        "sampled",
        cut(turn.text),
        reasoning=cut(turn.reasoning),
        calls=calls,
        name=str(turn.number + 1),
        account=" · ".join(parts),
        junction=junction,
        notable=notable,
    )


def _request(request: ChatRequest) -> dict[str, str]:
    return {
        "number": str(request.number),
        "form": request.form,
        "client": request.client.partition(" ")[0],
        "label": request.label,
        "verdict": request.verdict.value + (f" ({request.again})" if request.again else ""),
        "continues": "" if request.parent_turn is None else f"{request.parent_agent} {request.parent_turn + 1}",
        "turn": "" if request.turn is None else str(request.turn + 1),
        "delivery": request.delivery.value,
        "notes": ", ".join([*(each.value for each in request.tolerated), *([request.error] if request.error else [])]),
    }


def _tree(trajectories: Sequence[Trajectory]) -> tuple[Branch, ...]:
    """The segments of all agents as a tree: a segment that follows a turn is below the segment of that turn.

    Parents come before their children. The tree is empty for fewer than two segments.
    """
    labels: dict[tuple[str, int], str] = {}
    by_turn: dict[tuple[str, int], tuple[str, int]] = {}
    for trajectory in trajectories:
        by_turn.update({(turn.agent, turn.number): (turn.agent, turn.segment) for turn in trajectory.turns})
        numbers: dict[int, list[int]] = defaultdict(list)
        for turn in trajectory.turns:
            numbers[turn.segment].append(turn.number + 1)
        for number, segment in enumerate(trajectory.segments):
            turns = numbers[number]
            which = f"turns {turns[0]} to {turns[-1]}" if len(turns) > 1 else f"turn {turns[0]}" if turns else "no turn"
            after = "" if segment.origin is None else f", {_after(segment)}"
            labels[trajectory.agent, number] = f"{trajectory.agent}, segment {number} ({segment.cause}): {which}{after}"
    if len(labels) < 2:
        return ()
    children: dict[tuple[str, int] | None, list[tuple[str, int]]] = defaultdict(list)
    for trajectory in trajectories:
        for number, segment in enumerate(trajectory.segments):
            own, origin = (trajectory.agent, number), segment.origin
            parent = None if origin is None else by_turn.get((origin.agent, origin.number))
            children[parent if parent != own else None].append(own)
    tree: list[Branch] = []
    waiting = [(0, own) for own in reversed(children[None])]
    while waiting:
        depth, own = waiting.pop()
        tree.append(Branch(min(depth, MAX_TREE_DEPTH), labels[own]))
        waiting += [(depth + 1, child) for child in reversed(children[own])]
    first, count, last = _ends(tree)
    return (*first, *([Branch(0, f"{count:,} segments are left out here")] if count else []), *last)


def _after(segment: Segment) -> str:
    return "" if segment.origin is None else f"after turn {segment.origin.number + 1} of {segment.origin.agent}"


# --- tokens


class Vocabulary:
    """The texts of the ids that a page shows, each once."""

    def __init__(self, decode: Decode | None) -> None:
        self._decode = decode
        self.texts: dict[int, str] = {}
        """Text by id; empty if the vocabulary is not on this machine."""

    def add(self, ids: Sequence[int]) -> None:
        """Decode ids, and store their texts."""
        if self._decode is None:
            return
        for token_id in set(ids).difference(self.texts):
            self.texts[token_id] = self._decode([token_id])


_SOURCES: Final = {source.value: source.name.lower() for source in Source}


def token_payload(
    trajectory: Trajectory, vocabulary: Vocabulary, *, most: int = MAX_PAYLOAD_IDS
) -> list[dict[str, Any]] | None:
    """The tokens of a trajectory as JSON values, one object per segment; None if the trajectory has no ids.

    If there are more than `most` ids, each long segment has only its first and last ids. `gap` then has two numbers:
    the ids before the gap and the ids that are left out. All other positions count from the beginning of the segment.
    Each item of `sources` and `versions` stands for adjacent ids with one value. `logprobs` has the log-probabilities
    of the sampled ids, in nats, rounded to 1/100; null if the engine returned none. `top` has the most likely ids of
    turns: each key is a first position, and its value is [number of ids at each position, ids, log-probabilities].
    """
    total = sum(len(segment.log) for segment in trajectory.segments)
    if not total:
        return None
    room = total if total <= most else max(MIN_PAYLOAD_IDS, most // len(trajectory.segments))
    turns: dict[int, list[Turn]] = defaultdict(list)
    for turn in trajectory.turns:
        turns[turn.segment].append(turn)
    return [
        _segment_payload(segment.log, turns[number], room, vocabulary)
        for number, segment in enumerate(trajectory.segments)
    ]


def _segment_payload(log: TokenLog, turns: Sequence[Turn], room: int, vocabulary: Vocabulary) -> dict[str, Any]:
    count = len(log)
    parts = [range(count)] if count <= room else [range(room // 2), range(count - room // 2, count)]
    ids = [token_id for part in parts for token_id in log.ids[part.start : part.stop].tolist()]
    sources = [source for part in parts for source in log.sources[part.start : part.stop]]
    logprobs = [value for part in parts for value in log.logprobs[part.start : part.stop]]
    vocabulary.add(ids)
    item: dict[str, Any] = {
        "ids": ids,
        "sources": _runs(sources),
        "logprobs": [
            None if math.isnan(value) else round(value, 2)
            for value, source in zip(logprobs, sources, strict=True)
            if source in (Source.SAMPLED, Source.RETRIED)
        ],
        "versions": [[span.version, span.start, span.end] for span in log.versions],
        "turns": [[turn.number + 1, turn.start, turn.end, _turn(turn).junction] for turn in turns],
    }
    if len(parts) > 1:
        item["gap"] = [parts[0].stop, parts[1].start - parts[0].stop]
    top: dict[str, Any] = {}
    for turn in turns:
        top_logprobs = turn.top
        for part in parts if top_logprobs is not None else ():
            start, stop = max(part.start, turn.start), min(part.stop, turn.end)
            if top_logprobs is None or start >= stop:
                continue
            of_part = slice((start - turn.start) * top_logprobs.count, (stop - turn.start) * top_logprobs.count)
            vocabulary.add(top_logprobs.ids[of_part])
            scores = [round(value, 2) if math.isfinite(value) else None for value in top_logprobs.logprobs[of_part]]
            top[str(start)] = [top_logprobs.count, top_logprobs.ids[of_part].tolist(), scores]
    return {**item, "top": top} if top else item


def _runs(values: Sequence[int]) -> list[list[Any]]:
    runs: list[list[Any]] = []
    for value in values:
        name = _SOURCES[value]
        if runs and runs[-1][0] == name:
            runs[-1][1] += 1
        else:
            runs.append([name, 1])
    return runs
