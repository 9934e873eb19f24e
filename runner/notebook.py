"""Rich displays of notebooks: trajectories, groups and summaries as HTML in which every text is escaped."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from runner.attachments import Attachment, AttachmentKind
from runner.quantities import counted

__all__ = ["group_html", "summary_html", "trajectory_html"]

MAX_MESSAGES: Final = 60
"""Maximum number of messages of a segment in a display; the messages in the middle of a longer segment are left out."""
MAX_TEXT_CHARS: Final = 2_000
MAX_IMAGE_BYTES: Final = 1_000_000
_COLOURS: Final = {"assistant": "#3fa35b", "tool": "#4a86d8", "user": "#999", "system": "#9a6bd0"}


def _escaped(text: str) -> str:
    """The text for HTML, without its middle if it is long; unpaired surrogates become question marks."""
    if len(text) > MAX_TEXT_CHARS:
        half = MAX_TEXT_CHARS // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"
    return html.escape(text.encode("utf-8", "replace").decode())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _table(rows: Iterable[Sequence[str]], names: Sequence[str] = ()) -> str:
    head = (
        "<tr>" + "".join(f"<th style='text-align:left'>{_escaped(name)}</th>" for name in names) + "</tr>"
        if names
        else ""
    )
    cells = ("".join(f"<td style='text-align:left'>{_escaped(cell)}</td>" for cell in row) for row in rows)
    return f"<table>{head}{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


# This module cannot import `Trajectory` and `Group` for annotations, since their module imports this one.


def trajectory_html(trajectory: Any) -> str:
    """HTML of a trajectory: outcome, scores, a collapsible section of messages for each segment, and attachments."""
    scores = {**trajectory.rewards, **trajectory.metrics}
    named = ", ".join(f"{name} {_number(value)}" for name, value in scores.items())
    limit = f" ({trajectory.limit})" if trajectory.limit else ""
    facts = f"{trajectory.agent}: {trajectory.outcome.value}{limit}, reward {_number(trajectory.reward)}"
    facts += f" ({named})" if named else ""
    facts += (
        f", {counted(len(trajectory.turns), 'turn')}, {trajectory.sampled:,} sampled ids, {trajectory.seconds:.1f} s"
    )
    parts = [f"<div><b>{_escaped(trajectory.id)}</b> {_escaped(facts)}</div>"]
    if trajectory.error:
        parts.append(f"<pre style='color:#b3261e'>{_escaped(trajectory.error)}</pre>")
    for number, segment in enumerate(trajectory.segments):
        size = f"{counted(len(segment.messages), 'message')}, {counted(len(segment.log), 'id')}"
        title = f"segment {number} ({segment.cause}): {size}"
        opened = " open" if number == len(trajectory.segments) - 1 else ""
        messages = "".join(map(_message, _shown(segment.messages)))
        parts.append(f"<details{opened}><summary>{_escaped(title)}</summary>{messages}</details>")
    parts += map(_attachment, trajectory.attachments)
    return "".join(parts)


def _shown(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if len(messages) <= MAX_MESSAGES:
        return list(messages)
    half = MAX_MESSAGES // 2
    note = {"role": "note", "content": f"{len(messages) - 2 * half:,} messages are left out"}
    return [*messages[:half], note, *messages[-half:]]


def _message(message: Mapping[str, Any]) -> str:
    calls = (call["function"] for call in message.get("tool_calls") or ())
    texts = [message.get("reasoning_content", ""), str(message.get("content") or "")]
    texts += [f"{call['name']}({call['arguments']})" for call in calls]
    body = _escaped("\n".join(text for text in texts if text))
    colour = _COLOURS.get(message["role"], "#999")
    style = f"white-space:pre-wrap;margin:2px 0;padding-left:6px;border-left:3px solid {colour}"
    return f"<pre style='{style}'><b>{_escaped(message['role'])}</b> {body}</pre>"


def _attachment(attachment: Attachment) -> str:
    name = f"<div>attached {_escaped(attachment.name)}, after {counted(attachment.turn, 'turn')}</div>"
    if attachment.kind is AttachmentKind.IMAGE and len(attachment.data) <= MAX_IMAGE_BYTES:
        data = base64.b64encode(attachment.data).decode()
        return f"{name}<img src='data:{_escaped(attachment.media_type)};base64,{data}' style='max-height:20em'>"
    return f"{name}<pre>{_escaped(attachment.text)}</pre>"


def group_html(group: Any) -> str:
    """HTML of a group, with a row for each trajectory."""
    state = "" if group.complete else ", not complete"
    rows = (
        (each.id, each.outcome.value, _number(each.reward), str(len(each.turns)), f"{each.sampled:,}", each.text)
        for each in group.trajectories
    )
    names = ("episode", "outcome", "reward", "turns", "sampled", "last text")
    head = f"<div><b>{_escaped(group.task.id)}</b> {_escaped(group.agent)}{state}</div>"
    return f"{head}{_table(rows, names)}"


def summary_html(summary: Mapping[str, Any]) -> str:
    """HTML of a summary: outcomes, rewards with their standard errors, pass@k and tokens."""
    means = {"reward": summary["reward"], **summary["rewards"], **summary["metrics"]}
    rows = [(name, str(count)) for name, count in summary["outcomes"].items()]
    for name, mean in means.items():
        error = mean["standard_error"]
        rows.append((name, _number(mean["mean"]) + (f" ± {_number(error)}" if error is not None else "")))
    if len(summary["pass_at"]) > 1:
        rows += [
            (f"pass@{k}, pass^{k}", f"{_number(value)}, {_number(summary['pass_all'][k])}")
            for k, value in summary["pass_at"].items()
        ]
    rows += [(f"ids {name}", f"{count:,}") for name, count in summary["tokens"].items()]
    return f"<div><b>{counted(summary['episodes'], 'episode')}</b></div>{_table(rows)}"
