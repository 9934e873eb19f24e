"""A check that a trace contains exactly the ids that the template wrote and the engine sampled.

A prompt that continues an earlier call must begin with the unchanged ids of that call. If the trace has messages, the
first prompt of a conversation and each seam are also compared with what the template writes. A seam is the ids between
a sampled turn and the next one.
"""

from __future__ import annotations

import enum
import json
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Self, TypeAlias, cast

from runner.errors import BadMessage
from runner.messages import Message, as_messages, canonical_json
from runner.models import load_language, resolve_model
from runner.tokens.bridging.bridge import Bridger
from runner.tokens.bridging.refusal import Unbridgeable
from runner.tokens.template import ChatTemplate
from runner.tokens.token_diff import first_mismatch, token_diff
from runner.tokens.tokenizer import Tokenizer
from runner.trainers.traced_call import TracedCall

__all__ = ["TraceFault", "TraceFinding", "TraceModel", "TraceReport", "verify_trace"]

_Tools: TypeAlias = list[dict[str, Any]]


class TraceFault(enum.StrEnum):
    """The kind of a finding."""

    REENCODED = "reencoded"
    """A later prompt contains the text of sampled ids, but as other ids."""
    SEAM = "seam"
    """The ids between a sampled turn and the next one differ from the ids that the template writes."""
    FIRST_PROMPT = "first_prompt"
    """The prompt differs from the template's render of its messages."""
    CONTROL_TEXT = "control_text"
    """Text of a message became control ids, which may end a turn or begin a message of another role."""
    AFTER_STOP = "after_stop"
    """There are ids after the stop id of the turn, although the request has no `ignore_eos`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFinding:
    """One place where the ids of a trace differ from the expected ids."""

    fault: TraceFault
    """The kind of the finding."""
    turn: int
    """Number of the call in the trace, from 0."""
    node_id: str
    """Id of the call in the trace."""
    index: int
    """Index of the first id that differs, in the prompt or, for AFTER_STOP, in the sampled ids."""
    explanation: str
    """The cause in words."""
    found: tuple[int, ...]
    """The compared ids of the trace: the whole prompt, or for AFTER_STOP all sampled ids of the call."""
    expected: tuple[int, ...]
    """The ids that were expected in place of `found`."""
    shown: str
    """Found and expected ids around the first difference, as text and ids, for display."""


@dataclass(slots=True)
class TraceReport:
    """The result of checking one trace."""

    calls: int = 0
    """Number of calls of the trace."""
    ids: int = 0
    """Number of prompt ids and sampled ids of all calls, including calls that were not compared completely."""
    findings: list[TraceFinding] = field(default_factory=list)
    """The findings, at most one of each kind for each call."""
    unchecked: Counter[str] = field(default_factory=Counter)
    """Number of calls by the reason why a part of them was not compared."""


class TraceModel:
    """The vocabulary, the chat template and the stop ids that traces are compared with.

    Args:
        tokenizer: the vocabulary.
        template: the chat template.
        stop_ids: the ids that end a turn.
        options: variables of the template, such as `enable_thinking`. Variables of a request take precedence.
        now: the time that the template reads; None for the time in the metadata of a call, or else the current time.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        stop_ids: Sequence[int],
        options: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        """The vocabulary."""
        self.template = template
        """The chat template."""
        self.stop_ids = tuple(stop_ids)
        """The ids that end a turn."""
        self.options = dict(options or {})
        """Variables of the template."""
        self.now = now
        """The time that the template reads; None for the time in the metadata of a call, or else the current time."""
        self._made: dict[str, _Bridgers] = {}

    @classmethod
    def of(
        cls,
        model: str | os.PathLike[str],
        *,
        template: str | Path | ChatTemplate | None = None,
        options: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> Self:
        """Load the tokenizer, the template and the stop ids of a model.

        Args:
            model: a folder, a Hugging Face id, or the demo model's name.
            template: a template in place of the model's own: a bundled name, a file, or a `ChatTemplate`.
            options: variables of the template.
            now: the time that the template reads; None as in `TraceModel`.

        Raises:
            BadModel: there is no such model, or its vocabulary cannot be read.
            BadTemplate: there is no template, or it cannot be read.
        """
        tokenizer, found, stop_ids = load_language(resolve_model(model), template)
        return cls(tokenizer, found, stop_ids=stop_ids, options=options, now=now)

    def clock(self, call: TracedCall) -> datetime | None:
        """Return the time that the template read in a call: `now`, or "clock" in its metadata; None if unknown."""
        recorded = call.metadata.get("clock")
        return self.now or (datetime.fromisoformat(recorded) if isinstance(recorded, str) else None)

    def _bridgers(self, call: TracedCall) -> _Bridgers:
        """Return the bridgers for the template variables that a call's request set."""
        clock = self.clock(call)
        key = canonical_json([call.template_options, str(clock)])
        if key not in self._made:
            self._made[key] = _Bridgers.of(self, {**self.options, **call.template_options}, clock)
        return self._made[key]


@dataclass(frozen=True, slots=True)
class _Bridgers:
    exact: Sequence[Bridger]
    """A bridger with unchanged tools, and, if a run rewrites tools for the template, a bridger with rewritten tools.
    These bridgers encode all text of messages as text, even the text of control tokens.
    """
    unsafe: Bridger
    """A bridger with unchanged tools that encodes control text of messages as control ids."""

    @classmethod
    def of(cls, model: TraceModel, options: Mapping[str, Any], clock: datetime | None) -> _Bridgers:
        now = clock or datetime.now()
        plain, fitted = (model.template.renderer(options, now, fit_tools=fit) for fit in (False, None))
        renderers = [plain, fitted] if fitted.fits_tools else [plain]
        make = model.tokenizer, model.stop_ids
        exact = [Bridger(make[0], each, make[1], close_reasoning=True) for each in renderers]
        return cls(exact, Bridger(make[0], plain, make[1], content_safe=False, close_reasoning=True))


def verify_trace(calls: Sequence[TracedCall], model: TraceModel) -> TraceReport:
    """Check that the calls of one trace contain exactly the ids that the template wrote and the engine sampled.

    Sampled ids must be unchanged in later prompts. If the trace has messages, the first prompt and the ids between two
    turns are compared with those of the template. Log-probabilities are not compared. Sampled ids that the trace left
    out cannot be found.

    Args:
        calls: the calls in order, as `read_traces` returns them.
        model: the model that sampled the calls.
    """
    return _TraceCheck(calls, model).run()


class _TraceCheck:
    def __init__(self, calls: Sequence[TracedCall], model: TraceModel) -> None:
        self._calls = calls
        self._model = model
        self._decode = lru_cache(maxsize=8)(model.tokenizer.decode)
        self._report = TraceReport(calls=len(calls), ids=sum(len(call.ids) for call in calls))

    def run(self) -> TraceReport:
        for number, call in enumerate(self._calls):
            self._check_stop(number, call)
            before = self._continued(number, call)
            if before is not None:
                self._check_seam(number, call, self._calls[before])
            else:
                self._check_start(number, call)
        return self._report

    # --- the ids that a prompt follows

    def _continued(self, number: int, call: TracedCall) -> int | None:
        """The number of the earlier call whose ids are the longest prefix of this prompt; None without such a call."""
        best: int | None = None
        for earlier, other in enumerate(self._calls[:number]):
            length = len(other.ids)
            longer = best is None or length >= len(self._calls[best].ids)
            if other.token_ids and longer and call.prompt_ids[:length] == other.ids:
                best = earlier
        return best

    def _check_start(self, number: int, call: TracedCall) -> None:
        """Check a prompt that does not begin with the ids of an earlier call."""
        for earlier in self._followed(number, call):
            other = self._calls[earlier]
            closed = other.token_ids and other.token_ids[-1] in self._model.stop_ids
            said = other.ids[:-1] if closed else other.ids
            text = self._decode(said)
            if self._decode(call.prompt_ids).startswith(text):
                why = f"the ids of turn {earlier} are encoded again: the same text, other ids than were sampled"
                # The expected prompt begins with the ids of the earlier call. Then it has the ids of this prompt that
                # follow the same text.
                places = range(len(call.prompt_ids) + 1)
                rest = bisect_left(places, len(text), key=lambda end: len(self._decode(call.prompt_ids[:end])))
                self._find(TraceFault.REENCODED, number, why, call.prompt_ids, said + call.prompt_ids[rest:])
                return
        messages = self._messages(call)
        if messages is None:
            return
        bridgers = self._model._bridgers(call)
        self._compare_prompt(number, call, bridgers, messages)

    def _followed(self, number: int, call: TracedCall) -> list[int]:
        """The numbers of earlier calls whose messages and reply begin the messages of a call, longest first.

        For a call without messages, this is the number of the previous call, if there is one.
        """
        if not call.messages:
            return [number - 1] if number else []
        found = []
        for earlier, other in enumerate(self._calls[:number]):
            if other.reply is not None and len(other.messages) < len(call.messages):
                path = [*other.messages, other.reply]
                if all(_same(one, two) for one, two in zip(path, call.messages, strict=False)):
                    found.append(earlier)
        return sorted(found, key=lambda earlier: -len(self._calls[earlier].messages))

    def _compare_prompt(self, number: int, call: TracedCall, bridgers: _Bridgers, messages: list[Message]) -> None:
        made = _Made()
        for tools in _tool_lists(call):
            first_prompt = partial(_first_prompt, messages=messages, tools=tools)
            made.add(bridgers.exact, first_prompt)
            if call.prompt_ids in made.ids:
                return
            if _or_none(bridgers.unsafe, first_prompt) == call.prompt_ids:
                expected = (made.ids or [()])[0]
                self._find(TraceFault.CONTROL_TEXT, number, _CONTROL_TEXT, call.prompt_ids, expected)
                return
        if not made.ids:
            self._report.unchecked[f"first prompt: {made.refusal}"] += 1
            return
        dated = "strftime_now" in self._model.template.text and self._model.clock(call) is None
        date = "; the template writes a date: give the date of the trace" if dated else ""
        why = f"the prompt is not what template {self._model.template.name!r} writes for these messages{date}"
        self._find(TraceFault.FIRST_PROMPT, number, why, call.prompt_ids, made.closest(call.prompt_ids))

    # --- between two turns

    def _check_seam(self, number: int, call: TracedCall, before: TracedCall) -> None:
        seam = call.prompt_ids[len(before.ids) :]
        messages = self._messages(call) if seam else None
        if messages is None:  # no ids were inserted, or the trace has no messages
            return
        last = max((n for n, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        history, new = messages[: last + 1], messages[last + 1 :]
        if not history or not new or not _ends_with(messages[last], before.reply):
            self._report.unchecked["seam: the messages do not continue the messages of the previous turn"] += 1
            return
        bridgers = self._model._bridgers(call)
        made = _Made()
        for tools, (stop, thinking) in product(_tool_lists(call), self._ends(before)):

            def bridge(
                bridger: Bridger, tools: _Tools = tools, stop: int | None = stop, thinking: bool = thinking
            ) -> tuple[int, ...]:
                ids = before.token_ids
                return tuple(bridger.bridge(history, new, tools, sampled=ids, stop=stop, thinking=thinking).ids)

            made.add(bridgers.exact, bridge)
            if seam in made.ids:
                return
            if _or_none(bridgers.unsafe, bridge) == seam:
                expected = before.ids + (made.ids or [()])[0]
                self._find(TraceFault.CONTROL_TEXT, number, _CONTROL_TEXT, call.prompt_ids, expected)
                return
        whole = _Made()
        for tools in _tool_lists(call):
            whole.add(bridgers.exact, partial(_first_prompt, messages=messages, tools=tools))
        if call.prompt_ids in whole.ids:
            return
        if not made.ids:
            self._report.unchecked[f"seam: {made.refusal}"] += 1
            return
        why = f"between the previous turn and this one, template {self._model.template.name!r} writes other ids"
        self._find(TraceFault.SEAM, number, why, call.prompt_ids, before.ids + made.closest(seam))

    def _ends(self, call: TracedCall) -> Iterator[tuple[int | None, bool]]:
        """Yield (stop id, thinking) for each way in which a turn may have ended.

        The stop id is None for a cut turn; `thinking` is True for a turn that was cut in its reasoning.
        """
        last = call.token_ids[-1]
        if last in self._model.stop_ids:
            yield last, False
            return
        if last in self._model.tokenizer.control_ids:  # the producer of the trace may have stopped at this id
            yield last, False
        yield None, False
        yield None, True

    # --- inside a turn

    def _check_stop(self, number: int, call: TracedCall) -> None:
        if call.ignores_stops:
            return
        stops, control = self._model.stop_ids, self._model.tokenizer.control_ids
        at = next((place for place, token_id in enumerate(call.token_ids) if token_id in stops), None)
        # Some models sample the id with which the template closes a turn, and then another stop id.
        if at is not None and not set(call.token_ids[at:]) <= control:
            name = self._decode((call.token_ids[at],))
            why = f"{len(call.token_ids) - at - 1} ids follow {name!r}, which ends a turn"
            self._find(TraceFault.AFTER_STOP, number, why, call.token_ids, call.token_ids[: at + 1])

    def _messages(self, call: TracedCall) -> list[Message] | None:
        """The messages of a prompt as templates read them; None if there are no messages, or one is invalid."""
        if not call.messages:
            self._report.unchecked["the trace has no messages: only ids were compared"] += 1
            return None
        try:
            return as_messages(list(map(_without_nulls, call.messages)))
        except BadMessage as error:
            self._report.unchecked[f"messages: {error}"] += 1
            return None

    def _find(
        self, fault: TraceFault, number: int, why: str, found: tuple[int, ...], expected: tuple[int, ...]
    ) -> None:
        self._report.findings.append(
            TraceFinding(
                fault=fault,
                turn=number,
                node_id=self._calls[number].node_id,
                index=first_mismatch(found, expected),
                explanation=why,
                found=found,
                expected=expected,
                shown=token_diff(found, expected, self._model.tokenizer, ("trace", "expected")),
            )
        )


_CONTROL_TEXT = "text of a message became control ids, as if the template had written it"


@dataclass(slots=True)
class _Made:
    """The ids that bridgers produce for one place."""

    ids: list[tuple[int, ...]] = field(default_factory=list)
    refusal: str = ""

    def add(self, bridgers: Sequence[Bridger], make: Callable[[Bridger], tuple[int, ...]]) -> None:
        for bridger in bridgers:
            try:
                self.ids.append(make(bridger))
            except Unbridgeable as refusal:
                self.refusal = self.refusal or str(refusal)

    def closest(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        return max(self.ids, key=lambda each: first_mismatch(each, ids))


def _first_prompt(bridger: Bridger, messages: Sequence[Message], tools: _Tools) -> tuple[int, ...]:
    return tuple(bridger.first_prompt(messages, tools))


def _tool_lists(call: TracedCall) -> list[_Tools]:
    """The tools of the request and, if they differ, the tools as vLLM's server passes them to a template."""
    given = [dict(tool) for tool in call.tools]
    served = [
        {"type": "function", "function": _as_served(tool["function"])} if "function" in tool else tool for tool in given
    ]
    return [given] if json.dumps(given) == json.dumps(served) else [given, served]


def _as_served(function: Mapping[str, Any]) -> dict[str, Any]:
    optional = {name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None}
    return {**{name: function.get(name) for name in ("name", "description", "parameters")}, **optional}


def _or_none(bridger: Bridger, make: Callable[[Bridger], tuple[int, ...]]) -> tuple[int, ...] | None:
    try:
        return make(bridger)
    except Unbridgeable:
        return None


def _without_nulls(message: Mapping[str, Any]) -> Message:
    """A message without the null fields that some clients send, since templates may test whether a field exists."""
    shown = {name: value for name, value in message.items() if value is not None or name == "content"}
    if "reasoning" in shown and "reasoning_content" not in shown:  # newer servers use this name
        shown["reasoning_content"] = shown.pop("reasoning")
    return cast("Message", shown)  # `as_messages` checks the message


def _said(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the parts of a message that clients send back: role, text, calls. Raise BadMessage if it is invalid."""
    (read,) = as_messages([_without_nulls(message)])
    calls = [call["function"] for call in read.get("tool_calls") or ()]
    return read["role"], read["content"].strip(), [(each["name"], dict(each["arguments"])) for each in calls]


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    try:
        return _said(one) == _said(other)
    except BadMessage:
        return False


def _ends_with(message: Message, reply: Mapping[str, Any] | None) -> bool:
    """Return True if a message is the reply, or if the reply is unknown.

    The reply may continue a cut turn. Therefore the result is also True if the message has the same calls, and its text
    ends with the text of the reply.
    """
    if reply is None or _same(message, reply):
        return True
    try:
        _, text, calls = _said(message)
        _, end, own = _said(reply)
    except BadMessage:
        return False
    return bool(text.endswith(end)) and calls == own
