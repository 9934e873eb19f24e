"""Finds a template's traits: renders small conversations and looks at where their words come out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias, cast

import jinja2.ext
import jinja2.meta
import jinja2.nodes

from runner.messages import Message
from runner.tokens.control_text import special_tokens
from runner.tokens.marking import common_length
from runner.tokens.profile import (
    Arguments,
    Bos,
    Literals,
    NullContent,
    PromptReasoning,
    Reasoning,
    Results,
    SystemMidRun,
    TemplateProfile,
    ToolsPlace,
)
from runner.tokens.refusal import Property, Unbridgeable
from runner.tokens.tail import TailMaker
from runner.tokens.template import Renderer, TemplateRaised, ToolSchema
from runner.tokens.template import _Generation as GenerationTag

__all__ = ["QUESTION", "options_of", "profile_of"]

View: TypeAlias = Mapping[str, Any]

_ASKED, _ANSWERED, _AGAIN = "zqquestionz", "zqanswerz", "zqagainz"
_THOUGHT, _TOLD, _RETURNED = "zqthoughtz", "zqtoldz", "zqreturnedz"
_TOOL, _KEY, _VALUE = "zqtoolz", "zqkeyz", "zqvaluez"
_DESCRIBED = "zqdescribedz"

QUESTION: View = {"role": "user", "content": _ASKED}
_AGAIN_ASKED: View = {"role": "user", "content": _AGAIN}
_ANSWER: View = {"role": "assistant", "content": _ANSWERED}
_TOOLS: Sequence[ToolSchema] = [
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": _DESCRIBED,
            "parameters": {
                "type": "object",
                "properties": {_KEY: {"type": "string", "description": "A key."}},
                "required": [_KEY],
            },
        },
    },
]


def _calling(arguments: Any, *, count: int = 1, content: str | None = "") -> View:
    function = {"name": _TOOL, "arguments": arguments}
    # Mistral's templates want ids of nine letters and digits.
    calls = [{"id": f"probe{number:04}", "type": "function", "function": function} for number in range(count)]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _result(number: int = 0, content: str = _RETURNED) -> View:
    return {"role": "tool", "content": content, "tool_call_id": f"probe{number:04}", "name": _TOOL}


_CALL = _calling({_KEY: _VALUE})
_VARIED: Sequence[Sequence[View]] = (
    (QUESTION,),
    ({"role": "system", "content": _TOLD}, QUESTION, _CALL, _result()),
    (QUESTION, {**_ANSWER, "reasoning_content": _THOUGHT}, _AGAIN_ASKED, {**_CALL, "reasoning_content": _THOUGHT}),
)


class _Probe:
    """One template under examination."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer

    def text(self, *messages: View, tools: bool = False, asking: bool = False) -> str | None:
        """The render, or None where the template raises."""
        try:
            # Lists, since templates add lists to them.
            return self.renderer.render([*messages], tools=_TOOLS if tools else [], generation_prompt=asking)
        except TemplateRaised:
            return None

    def shows(self, word: str, *messages: View, tools: bool = False, asking: bool = False) -> bool:
        return word in (self.text(*messages, tools=tools, asking=asking) or "")

    def between(self, before: str, after: str, *messages: View, asking: bool = False) -> str:
        """What stands between two words, or behind the first where the second is ""; "" where it is not there."""
        rest = (self.text(*messages, asking=asking) or "").rpartition(before)
        if not rest[1]:
            return ""
        return rest[2].partition(after)[0] if after else rest[2]


def profile_of(renderer: Renderer, *, wanted_bos: str = "") -> TemplateProfile:
    """The profile of a template that renders a plain question.

    Args:
        renderer: the template with its options and its clock fixed.
        wanted_bos: the token that the vocabulary would begin every text with, or "".
    """
    probe = _Probe(renderer)
    close, at_end, separator, openers = _closes(probe)
    return TemplateProfile(
        bos=_bos(probe, wanted_bos),
        default_system=_default_system(probe),
        clock=_clock(probe),
        options=options_of(renderer),
        generation_prompt=TailMaker(renderer).generation_prompt,
        prompt_reasoning=_prompt_reasoning(probe),
        opened_twice=_opened_twice(renderer),
        close=close,
        close_at_end=at_end,
        close_after_call=_close_after_call(probe, at_end),
        separator=separator,
        stop_opens_next=openers,
        reasoning=_reasoning(probe, {**_ANSWER, "reasoning_content": _THOUGHT}),
        inline_reasoning=_reasoning(
            probe, {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWERED}"}
        ),
        tools=_tools_place(probe),
        calls_shown=_calls_shown(probe),
        results_shown=probe.shows(_RETURNED, QUESTION, _CALL, _result(), tools=True, asking=True),
        parallel_results=_parallel_results(probe),
        arguments=_arguments(probe),
        literals=_literals(probe),
        null_content=_null_content(probe),
        system_mid_run=_system_mid_run(probe),
        trimmed=_trimmed(probe),
    )


def options_of(renderer: Renderer) -> tuple[str, ...]:
    """Names that the template reads and nobody gives, sorted."""
    environment = jinja2.Environment(extensions=[GenerationTag, jinja2.ext.loopcontrols])
    tree = environment.parse(renderer.template.text)
    read = jinja2.meta.find_undeclared_variables(tree) - _GIVEN - renderer.template.variables.keys()
    # A name that is set in one branch and read after it counts as read, though it is the template's own.
    own = {name.name for name in tree.find_all(jinja2.nodes.Name) if name.ctx == "store"}
    return tuple(sorted(name for name in read if name not in own or _heeded(renderer, name)))


def _heeded(renderer: Renderer, name: str) -> bool:
    """Giving a value to a name that the template sets itself changes a text."""
    before = {**renderer.options}
    before.pop(name, None)
    texts: set[tuple[str | None, ...]] = set()
    for options in (before, *({**before, name: value} for value in (True, False, _TOLD))):
        probe = _Probe(renderer.template.renderer(options, renderer.now))
        texts.add(tuple(probe.text(*messages, tools=True, asking=True) for messages in _VARIED))
    return len(texts) > 1


_GIVEN = frozenset({
    "messages", "tools", "add_generation_prompt", "strftime_now", "raise_exception",
    "bos_token", "eos_token", "pad_token", "unk_token", "namespace", "range", "dict", "lipsum", "cycler", "joiner",
    "null", "undefined",  # which some authors take for words of jinja2
})  # fmt: skip


# --- how a text begins


def _bos(probe: _Probe, wanted: str) -> Bos:
    text = (probe.text(QUESTION, asking=True) or "").lstrip()
    known = (wanted, probe.renderer.template.variables.get("bos_token", ""), *_KNOWN_BOS)
    bos = next((token for token in known if token and text.startswith(token)), "")
    if not bos:
        return Bos.MISSING if wanted else Bos.NOT_WRITTEN
    return Bos.TWICE if text[len(bos) :].lstrip().startswith(bos) else Bos.WRITTEN


_KNOWN_BOS = (
    "<s>",
    "<bos>",
    "<BOS>",
    "<|begin_of_text|>",
    "<|startoftext|>",
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
)


def _default_system(probe: _Probe) -> str:
    """What stands before the first question and not before a second one, control tokens and role names left out."""
    first = (probe.text(QUESTION, asking=True) or "").partition(_ASKED)[0]
    second = probe.between(_ANSWERED, _AGAIN, QUESTION, _ANSWER, _AGAIN_ASKED)
    opener = common_length(first[::-1], second[::-1])
    words = first[: len(first) - opener]
    for token in special_tokens(words):
        words = words.replace(token, " ")
    words = re.sub(r"^\W*(?:system|SYSTEM|System|developer)\b\W?", "", words).strip()
    return words if re.search(r"[^\W_]{2,}\s+[^\W_]{2,}", words) else ""


def _clock(probe: _Probe) -> bool:
    renderer = probe.renderer
    now = renderer.now
    # Another year, month, day, weekday and hour.
    other = renderer.template.renderer(
        renderer.options, datetime(now.year - 3, now.month % 12 + 1, now.day % 27 + 2, 1)
    )
    return any(
        probe.text(QUESTION, tools=tools, asking=True) != _Probe(other).text(QUESTION, tools=tools, asking=True)
        for tools in (False, True)
    )


def _prompt_reasoning(probe: _Probe) -> PromptReasoning:
    asked = probe.between(_ASKED, "", QUESTION, asking=True).rstrip()
    if re.search(r"<think(?:ing)?>$|\[THINK\]$|<\|?seed:think>$|<\|inner_prefix\|>$", asked):
        return PromptReasoning.OPENED
    if re.search(r"<think>\s*</think>$|\[THINK\]\s*\[/THINK\]$", asked):
        return PromptReasoning.EMPTY
    return PromptReasoning.LEFT_OPEN


def _opened_twice(renderer: Renderer) -> bool:
    maker = TailMaker(renderer)
    conversations = ([QUESTION], [QUESTION, _ANSWER, _AGAIN_ASKED], [QUESTION, _CALL, _result()])
    for conversation in conversations:
        try:
            maker.asks_as_usual(maker.render(cast("list[Message]", conversation), _TOOLS))
        except Unbridgeable as refusal:
            if refusal.property is Property.OPENED_ONCE:
                return True
    return False


# --- how a turn ends


def _closes(probe: _Probe) -> tuple[str, str, str, tuple[str, ...]]:
    """The close once something follows, the one while nothing does, the separator, and openers that end a turn."""
    followed = probe.between(_ANSWERED, _AGAIN, QUESTION, _ANSWER, _AGAIN_ASKED, asking=True)
    alone = _without_opening(probe, probe.between(_ANSWERED, "", QUESTION, _ANSWER))
    opener = (probe.text(QUESTION) or "").partition(_ASKED)[0]
    first = _first_special(followed)
    at_end = _through_last_special(alone)
    if first and not special_tokens(alone) and opener.rstrip().endswith(_from(followed, first).rstrip()):
        openers = {first, *_opening_results(probe)}
        return "", at_end, "", tuple(sorted(openers))
    if at_end and followed.lstrip().startswith(at_end):
        close = at_end
    else:
        close = followed[: followed.index(first) + len(first)].strip() if first else ""
    return close, at_end or close, _separator(followed, close, alone, opener), ()


def _without_opening(probe: _Probe, alone: str) -> str:
    """What ends a turn, without what asks for the next one where the template always writes that."""
    if TailMaker(probe.renderer).generation_prompt:
        return alone
    opening = special_tokens(probe.between(_ASKED, _ANSWERED, QUESTION, _ANSWER))
    cut = alone.rfind(opening[-1]) if opening else -1
    return alone if cut < 0 or special_tokens(alone)[-1] != opening[-1] else alone[:cut]


def _opening_results(probe: _Probe) -> Iterable[str]:
    tail = probe.between(_VALUE, _RETURNED, QUESTION, _CALL, _result(), asking=True)
    found = special_tokens(probe.between(_VALUE, "", QUESTION, _CALL))
    return [token for token in special_tokens(tail) if token not in found][:1]


def _separator(followed: str, close: str, alone: str, opener: str) -> str:
    """What stands behind the close and before what opens a message."""
    behind = followed.partition(close)[2] if close else followed
    left = alone.partition(close)[2] if close and close in alone else ""
    if left and not left.strip() and behind.startswith(left):
        return left
    shared = common_length(behind[::-1], opener[::-1])
    rest = behind[: len(behind) - shared]
    return rest if not special_tokens(rest) and rest.strip() == "" else ""


def _close_after_call(probe: _Probe, at_end: str) -> str:
    alone = probe.between(_VALUE, "", QUESTION, _CALL)
    if at_end and alone.rstrip().endswith(at_end):
        return at_end
    tokens = special_tokens(alone)
    return tokens[-1] if tokens else ""


def _first_special(text: str) -> str:
    return next(iter(special_tokens(text)), "")


def _from(text: str, token: str) -> str:
    return text[text.index(token) :]


def _through_last_special(text: str) -> str:
    tokens = special_tokens(text)
    if not tokens:
        return text.strip()
    end = max(text.rindex(token) + len(token) for token in tokens)
    return text[:end].strip()


# --- what is shown


def _reasoning(probe: _Probe, turn: View) -> Reasoning:
    if probe.shows(_THOUGHT, QUESTION, turn, _AGAIN_ASKED, asking=True):
        return Reasoning.KEPT
    return Reasoning.ONLY_LAST if probe.shows(_THOUGHT, QUESTION, turn) else Reasoning.NOT_SHOWN


def _tools_place(probe: _Probe) -> ToolsPlace:
    if not probe.shows(_TOOL, QUESTION, tools=True, asking=True):
        return ToolsPlace.NOT_SHOWN
    text = probe.text(QUESTION, _ANSWER, _AGAIN_ASKED, tools=True, asking=True) or ""
    answer = text.find(_ANSWERED)
    return ToolsPlace.MOVES if 0 <= answer < text.rfind(_TOOL) else ToolsPlace.FIRST


def _calls_shown(probe: _Probe) -> bool:
    """Shown as the last turn, or, where that is dropped, with its result behind."""
    return any(
        probe.shows(_VALUE, QUESTION, _CALL, *answered, tools=tools)
        for answered in ((), (_result(),))
        for tools in (False, True)
    )


def _parallel_results(probe: _Probe) -> Results:
    before = (QUESTION, _calling({_KEY: _VALUE}, count=2), _result(0))
    last = "zqsecondz"
    one, both = probe.text(*before, tools=True), probe.text(*before, _result(1, last), tools=True)
    if both is None or last not in both or _RETURNED not in both:
        return Results.NOT_SHOWN
    return Results.ONE_BY_ONE if one is not None and both.startswith(one) else Results.TOGETHER


def _arguments(probe: _Probe) -> Arguments:
    if probe.renderer.text_arguments:
        return Arguments.STRING
    if not probe.shows(_VALUE, QUESTION, _CALL, _result(), tools=True):
        return Arguments.NEITHER
    written = json.dumps({_KEY: _VALUE})
    text = probe.text(QUESTION, _calling(written), _result(), tools=True) or ""
    return Arguments.EITHER if _VALUE in text and json.dumps(written)[1:-1] not in text else Arguments.OBJECT


def _literals(probe: _Probe) -> Literals:
    turn = _calling({_KEY: _VALUE, "flag": True, "nothing": None})
    text = probe.text(QUESTION, turn) or probe.text(QUESTION, turn, tools=True) or ""
    call = text[text.rfind(_VALUE) :] if _VALUE in text else ""
    if re.search(r"\bTrue\b|\bNone\b", call):
        return Literals.PYTHON
    return Literals.JSON if call else Literals.NOT_SHOWN


def _null_content(probe: _Probe) -> NullContent:
    shown = probe.text(QUESTION, _CALL, _result(), tools=True)
    null = _calling({_KEY: _VALUE}, content=None)
    forms = (null, _calling(json.dumps({_KEY: _VALUE}), content=None))
    if not _calls_shown(probe) and any(probe.shows(_VALUE, QUESTION, form, _result()) for form in forms):
        return NullContent.NEEDED
    if shown is None:
        null, shown = {"role": "assistant", "content": None}, ""
        text = probe.text(QUESTION, null, _AGAIN_ASKED)
    else:
        text = probe.text(QUESTION, null, _result(), tools=True)
    if text is None:
        return NullContent.RAISES
    written = len(re.findall(r"\bNone\b", text)) > len(re.findall(r"\bNone\b", shown))
    return NullContent.WRITTEN if written else NullContent.ACCEPTED


def _system_mid_run(probe: _Probe) -> SystemMidRun:
    text = probe.text(QUESTION, _ANSWER, {"role": "system", "content": _TOLD}, _AGAIN_ASKED, asking=True)
    if text is None:
        return SystemMidRun.REFUSED
    if _TOLD not in text:
        return SystemMidRun.DROPPED
    return SystemMidRun.KEPT if text.index(_TOLD) > text.find(_ANSWERED) else SystemMidRun.MOVED


def _trimmed(probe: _Probe) -> tuple[str, ...]:
    def padded(message: View, word: str) -> View:
        return {**message, "content": f" \n {word} \n "}

    system: View = {"role": "system", "content": ""}
    conversations: Mapping[str, tuple[str, Sequence[View]]] = {
        "system": (_TOLD, [padded(system, _TOLD), QUESTION]),
        "user": (_ASKED, [padded(QUESTION, _ASKED)]),
        "assistant": (_ANSWERED, [QUESTION, padded(_ANSWER, _ANSWERED), _AGAIN_ASKED]),
        "tool": (_RETURNED, [QUESTION, _CALL, padded(_result(), _RETURNED)]),
    }
    found = []
    for role, (word, messages) in conversations.items():
        text = probe.text(*messages, tools=role == "tool", asking=True) or ""
        quoted = json.dumps(f" \n {word} \n ")[1:-1]
        if word in text and f" \n {word} \n " not in text and quoted not in text:
            found.append(role)
    return tuple(found)
