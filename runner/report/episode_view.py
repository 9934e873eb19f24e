"""One episode for a page: its transcript, tokens, branches and requests, with long texts cut."""

from __future__ import annotations

import base64
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from runner.attachments import Attachment, AttachmentKind
from runner.chat_requests import ChatRequest
from runner.messages import Message
from runner.report.labels import Label
from runner.store.json_values import encode_json
from runner.store.reader import EpisodeRow, RunFile
from runner.tokens.log import Source
from runner.trajectory import Segment, Trajectory, Turn
from runner.transcript import Decode, attachments_by_turn, messages_by_turn

__all__ = ["AgentView", "EpisodeView", "Vocabulary", "episode_view", "token_payload"]

MAX_TEXT_CHARS: Final = 8_000
"""Characters of a text that a page shows; the middle of a longer one is left out."""
MAX_SHOWN_TURNS: Final = 200
"""Turns of a segment that a page shows; those in the middle of a longer one are left out."""
MAX_TREE_DEPTH: Final = 9
MAX_IMAGE_BYTES: Final = 2_000_000
"""Size of the largest attached image that a page shows."""
MAX_PAYLOAD_IDS: Final = 100_000
"""Ids of an episode whose tokens a page has."""


Attached: TypeAlias = dict[int, list[Attachment]]
"""Attachments by the number of turns before them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A message, a sampled turn, or a note about what is left out."""

    kind: str
    """The role of a message, "sampled", "unseen", "attached" or "note"."""
    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str, str], ...] = ()
    """(name, arguments, error) of each tool call."""
    name: str = ""
    """The tool that a tool message comes from, or the number of a turn."""
    account: str = ""
    """Ids, finish reason and time of a turn."""
    junction: str = ""
    """The way in which the prompt of a turn was made from the turn before."""
    notable: bool = False
    """True if the junction began a new segment, or is not proven."""
    image: str = ""
    """The address of an attached image, with its data."""


@dataclass(frozen=True, slots=True)
class SegmentView:
    """The transcript of a segment."""

    number: int
    cause: str
    ids: int
    origin: str
    """The turn that it follows, or ""."""
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """A segment in the tree of an episode."""

    depth: int
    """The number of segments above it, at most 9."""
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
    """Attachments without a place in the segments."""
    requests: tuple[Mapping[str, str], ...]
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """One attempt at an episode, with all its agents."""

    id: str
    attempt: int
    task: str
    """The task's data beside its prompt, as JSON."""
    agents: tuple[AgentView, ...]
    tree: tuple[Branch, ...]
    """The segments as a tree; empty for an episode of one segment."""
    labels: tuple[str, ...]
    """Labels and notes of readers."""


def episode_view(
    run_file: RunFile, rows: Sequence[EpisodeRow], labels: Mapping[str, Sequence[Label]] | None = None
) -> EpisodeView:
    """The view of an episode.

    Args:
        run_file: the run file.
        rows: the rows of its agents, of one attempt.
        labels: the labels of readers by episode.
    """
    trajectories = [run_file.trajectory(row) for row in rows]
    task = trajectories[0].task
    data: dict[str, Any] = {}
    if task.answer:
        data["answer"] = task.answer
    if task.info:
        data["info"] = task.info
    return EpisodeView(
        id=rows[0].id,
        attempt=rows[0].attempt,
        task=cut(encode_json(data)) if data else "",
        agents=tuple(_agent_view(row, each) for row, each in zip(rows, trajectories, strict=True)),
        tree=_tree(trajectories),
        labels=tuple(each.words for each in (labels or {}).get(rows[0].id, ())),
    )


def cut(text: str) -> str:
    """The text without its middle, if it is too long for a page."""
    if len(text) <= MAX_TEXT_CHARS:
        return text
    half = MAX_TEXT_CHARS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"


def _agent_view(row: EpisodeRow, trajectory: Trajectory) -> AgentView:
    attached = attachments_by_turn(trajectory)
    before = attached.pop(0, [])
    segments = tuple(_segment_view(trajectory, number, attached) for number in range(len(trajectory.segments)))
    # Those of turns that are left out, or of another agent, come last.
    rest = [each for several in attached.values() for each in several]
    return AgentView(
        agent=row.agent,
        row=row,
        scores=tuple({**trajectory.rewards, **trajectory.metrics}.items()),
        before=tuple(map(_attached, before)),
        segments=segments,
        after=tuple(map(_attached, rest)),
        requests=tuple(map(_request, trajectory.requests)),
        trajectory=trajectory,
    )


def _segment_view(trajectory: Trajectory, number: int, attached: Attached) -> SegmentView:
    segment = trajectory.segments[number]
    turns = [turn for turn in trajectory.turns if turn.segment == number]
    return SegmentView(
        number=number,
        cause=segment.cause,
        ids=len(segment.log),
        origin=_after(segment),
        entries=tuple(_entries(segment, turns, attached)),
    )


def _entries(segment: Segment, turns: Sequence[Turn], attached: Attached) -> Iterator[Entry]:
    given = messages_by_turn(segment, turns)
    middle = range(MAX_SHOWN_TURNS // 2, len(turns) - MAX_SHOWN_TURNS // 2)
    for number, (turn, messages) in enumerate(zip(turns, given, strict=True)):
        if number in middle:
            if number == middle.start:
                yield Entry("note", f"{len(middle):,} turns are left out here; `deltarunner show` has them.")
            continue
        yield from map(_message, messages)
        yield _turn(turn)
        yield from map(_attached, attached.pop(turn.number + 1, ()))
    for message in segment.messages[len(segment.messages) - segment.unseen :]:
        yield Entry("unseen", cut(message["content"]), name=message["role"])


def _attached(attachment: Attachment) -> Entry:
    # Its first bytes were checked; a browser that cannot show it shows the name.
    image = ""
    if attachment.kind is AttachmentKind.IMAGE and len(attachment.data) <= MAX_IMAGE_BYTES:
        image = f"data:{attachment.media_type};base64,{base64.b64encode(attachment.data).decode()}"
    return Entry("attached", "" if image else cut(attachment.text), name=attachment.name, image=image)


def _message(message: Message) -> Entry:
    calls = tuple(
        (call["function"]["name"], cut(encode_json(call["function"]["arguments"])), "")
        for call in message.get("tool_calls") or ()
    )
    return Entry(
        message["role"],
        cut(message["content"]),
        reasoning=cut(message.get("reasoning_content", "")),
        calls=calls,
        name=message.get("name", ""),
    )


def _turn(turn: Turn) -> Entry:
    calls = tuple((call.name, cut(encode_json(dict(call.arguments))), call.error or "") for call in turn.tool_calls)
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
    """The segments of all agents, each under the segment of the turn that it follows; the parents come first."""
    labels: dict[tuple[str, int], str] = {}
    by_turn: dict[tuple[str, int], tuple[str, int]] = {}
    for trajectory in trajectories:
        by_turn.update({(turn.agent, turn.number): (turn.agent, turn.segment) for turn in trajectory.turns})
        for number, segment in enumerate(trajectory.segments):
            turns = [turn.number + 1 for turn in trajectory.turns if turn.segment == number]
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
    return tuple(tree)


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
        """Add the texts of ids."""
        if self._decode is None:
            return
        for token_id in set(ids).difference(self.texts):
            self.texts[token_id] = self._decode([token_id])


_SOURCES: Final = {source.value: source.name.lower() for source in Source}


def token_payload(trajectory: Trajectory, vocabulary: Vocabulary) -> list[dict[str, Any]] | None:
    """The tokens of a trajectory as JSON values, one object per segment; None if there are none, or too many.

    `sources` and `versions` are runs. `logprobs` are those of sampled ids, in nats, rounded to 1/100; null for one
    that the engine did not return.
    """
    if not 0 < sum(len(segment.log) for segment in trajectory.segments) <= MAX_PAYLOAD_IDS:
        return None
    payload = []
    for number, segment in enumerate(trajectory.segments):
        log = segment.log
        vocabulary.add(log.ids)
        turns = [turn for turn in trajectory.turns if turn.segment == number]
        sampled = [
            logprob
            for logprob, source in zip(log.logprobs, log.sources, strict=True)
            if source in (Source.SAMPLED, Source.RETRIED)
        ]
        item: dict[str, Any] = {
            "ids": log.ids.tolist(),
            "sources": _runs(log.sources.tolist()),
            "logprobs": [None if math.isnan(value) else round(value, 2) for value in sampled],
            "versions": [[span.version, span.start, span.end] for span in log.versions],
            "turns": [[turn.number + 1, turn.start, turn.end, _turn(turn).junction] for turn in turns],
        }
        top = {}
        for turn in turns:
            if (likeliest := turn.top) is not None:
                vocabulary.add(likeliest.ids)
                scores = [round(value, 2) if math.isfinite(value) else None for value in likeliest.logprobs]
                top[str(turn.start)] = [likeliest.count, likeliest.ids.tolist(), scores]
        if top:
            item["top"] = top
        payload.append(item)
    return payload


def _runs(values: Sequence[int]) -> list[list[Any]]:
    runs: list[list[Any]] = []
    for value in values:
        name = _SOURCES[value]
        if runs and runs[-1][0] == name:
            runs[-1][1] += 1
        else:
            runs.append([name, 1])
    return runs
