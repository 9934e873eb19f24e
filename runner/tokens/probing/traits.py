"""Detection of a template's traits, mainly by searching renders of small conversations for their words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import jinja2.ext
import jinja2.meta
import jinja2.nodes

from runner.tokens.bridging.prompt_renderer import PromptRenderer
from runner.tokens.bridging.refusal import Property, Unbridgeable
from runner.tokens.control_text import special_tokens
from runner.tokens.probe_messages import (
    AGAIN,
    AGAIN_ASKED,
    ANSWER,
    ANSWERED,
    ASKED,
    CALL,
    INSTRUCTED,
    KEY,
    QUESTION,
    RETURNED,
    SYSTEM,
    THOUGHT,
    TOOL,
    TOOLS,
    VALUE,
    VARIED,
    View,
    calling,
    result,
)
from runner.tokens.probing.profile import (
    Arguments,
    Bos,
    Literals,
    NullContent,
    ParallelResults,
    PromptReasoning,
    Reasoning,
    SystemMidRun,
    SystemPosition,
    TemplateProfile,
    ToolsPosition,
)
from runner.tokens.template import GenerationTag, Renderer, TemplateRaised
from runner.tokens.token_diff import first_mismatch
from runner.tokens.tool_support import shows_calls, shows_results, shows_tools

__all__ = ["options_of", "profile_of"]


class ProbeRenderer:
    """Renderer of test conversations for one template."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer

    def text(self, *messages: View, tools: bool = False, asking: bool = False) -> str | None:
        """Return the render, or None if the template raises; `asking` adds the generation prompt."""
        try:
            return self.renderer.render(messages, tools=TOOLS if tools else [], generation_prompt=asking)
        except TemplateRaised:
            return None

    def shows(self, word: str, *messages: View, tools: bool = False, asking: bool = False) -> bool:
        return word in (self.text(*messages, tools=tools, asking=asking) or "")

    def between(self, before: str, after: str, *messages: View, asking: bool = False) -> str:
        """Return the text from the last `before` to the next `after`, or to the end if `after` is "" or missing.

        The result is "" if `before` is missing.
        """
        _, found, rest = (self.text(*messages, asking=asking) or "").rpartition(before)
        if not found:
            return ""
        return rest.partition(after)[0] if after else rest


def profile_of(renderer: Renderer, *, wanted_bos: str = "") -> TemplateProfile:
    """Return the profile of a template that passed `usable_renderer`; `wanted_bos` is the tokenizer's BOS, or ""."""
    probe = ProbeRenderer(renderer)
    close, at_end, separator, openers = _closes(probe)
    return TemplateProfile(
        bos=_bos(probe, wanted_bos),
        default_system=_default_system(probe),
        clock=_clock(probe),
        options=options_of(renderer),
        generation_prompt=PromptRenderer(renderer).generation_prompt,
        prompt_reasoning=_prompt_reasoning(probe),
        opened_twice=_opened_twice(renderer),
        close=close,
        close_at_end=at_end,
        close_after_call=_close_after_call(probe, at_end),
        separator=separator,
        stop_opens_next=openers,
        reasoning=_reasoning(probe, {**ANSWER, "reasoning_content": THOUGHT}),
        inline_reasoning=_reasoning(
            probe, {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWERED}"}
        ),
        tools=_tools_position(probe),
        calls_shown=shows_calls(renderer),
        results_shown=shows_results(renderer),
        parallel_results=_parallel_results(probe),
        arguments=_arguments(probe),
        literals=_literals(probe),
        null_content=_null_content(probe),
        system=_system_position(probe),
        system_mid_run=_system_mid_run(probe),
        trimmed=_trimmed(probe),
    )


def options_of(renderer: Renderer) -> tuple[str, ...]:
    """Return the options of a template, sorted: the names that it reads, and that are not set in every render."""
    environment = jinja2.Environment(extensions=[GenerationTag, jinja2.ext.loopcontrols])
    tree = environment.parse(renderer.template.text)
    read = jinja2.meta.find_undeclared_variables(tree) - _GIVEN - renderer.template.variables.keys()
    # jinja2 also returns a name that the template sets in one branch and reads later, which need not be an option.
    own = {name.name for name in tree.find_all(jinja2.nodes.Name) if name.ctx == "store"}
    return tuple(sorted(name for name in read if name not in own or _changes_text(renderer, name)))


def _changes_text(renderer: Renderer, name: str) -> bool:
    """Return True if an option with this name changes a render, although the template sets the name itself."""
    before = {**renderer.options}
    before.pop(name, None)
    texts: set[tuple[str | None, ...]] = set()
    for options in (before, *({**before, name: value} for value in (True, False, INSTRUCTED))):
        probe = ProbeRenderer(renderer.template.renderer(options, renderer.now))
        texts.add(tuple(probe.text(*messages, tools=True, asking=True) for messages in VARIED))
    return len(texts) > 1


_GIVEN = frozenset({
    "messages", "tools", "add_generation_prompt", "strftime_now", "raise_exception",
    "bos_token", "eos_token", "pad_token", "unk_token", "namespace", "range", "dict", "lipsum", "cycler", "joiner",
    "null", "undefined",  # some authors mistake these names for keywords of jinja2
})  # fmt: skip


# --- how a text begins


def _bos(probe: ProbeRenderer, wanted: str) -> Bos:
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


def _default_system(probe: ProbeRenderer) -> str:
    """Return the text that is only before the first user message, without control tokens and role names.

    The result is "" if the text contains no two words.
    """
    first = (probe.text(QUESTION, asking=True) or "").partition(ASKED)[0]
    second = probe.between(ANSWERED, AGAIN, QUESTION, ANSWER, AGAIN_ASKED)
    opener = first_mismatch(first[::-1], second[::-1])
    words = first[: len(first) - opener]
    for token in special_tokens(words):
        words = words.replace(token, " ")
    words = re.sub(r"^\W*(?:system|SYSTEM|System|developer)\b\W?", "", words).strip()
    return words if re.search(r"[^\W_]{2,}\s+[^\W_]{2,}", words) else ""


def _clock(probe: ProbeRenderer) -> bool:
    renderer = probe.renderer
    now = renderer.now
    # The other time has another year, month, day, weekday and hour. Two years are tried, since a date that has the
    # weekday of `now` in one year has another weekday in the next year.
    others = [
        datetime(year, now.month % 12 + 1, now.day % 27 + 2, (now.hour + 1) % 24)
        for year in (now.year - 3, now.year - 4)
    ]
    other = renderer.template.renderer(
        renderer.options, next(each for each in others if each.weekday() != now.weekday())
    )
    return any(
        probe.text(QUESTION, tools=tools, asking=True) != ProbeRenderer(other).text(QUESTION, tools=tools, asking=True)
        for tools in (False, True)
    )


def _prompt_reasoning(probe: ProbeRenderer) -> PromptReasoning:
    asked = probe.between(ASKED, "", QUESTION, asking=True).rstrip()
    if re.search(r"<think(?:ing)?>$|\[THINK\]$|<\|?seed:think>$|<\|inner_prefix\|>$", asked):
        return PromptReasoning.OPENED
    if re.search(r"<think>\s*</think>$|\[THINK\]\s*\[/THINK\]$", asked):
        return PromptReasoning.EMPTY
    return PromptReasoning.LEFT_OPEN


def _opened_twice(renderer: Renderer) -> bool:
    prompts = PromptRenderer(renderer)
    conversations = ([QUESTION], [QUESTION, ANSWER, AGAIN_ASKED], [QUESTION, CALL, result()])
    for messages in conversations:
        try:
            prompts.asks_as_usual(prompts.render(messages, TOOLS), messages[-1])
        except Unbridgeable as refusal:
            if refusal.property is Property.OPENED_ONCE:
                return True
    return False


# --- how a turn ends


def _closes(probe: ProbeRenderer) -> tuple[str, str, str, tuple[str, ...]]:
    """Return `close`, `close_at_end`, `separator` and `stop_opens_next` of the profile."""
    followed = probe.between(ANSWERED, AGAIN, QUESTION, ANSWER, AGAIN_ASKED, asking=True)
    alone = _without_opening(probe, probe.between(ANSWERED, "", QUESTION, ANSWER))
    opener = (probe.text(QUESTION) or "").partition(ASKED)[0]
    first = next(iter(special_tokens(followed)), "")
    at_end = _through_last_special(alone)
    # If the turn has no end of its own, as in GLM's templates, a model stops with the opener of the next message.
    if first and not special_tokens(alone) and opener.rstrip().endswith(followed[followed.index(first) :].rstrip()):
        openers = {first, *_opening_results(probe)}
        return "", at_end, "", tuple(sorted(openers))
    if at_end and followed.lstrip().startswith(at_end):
        close = at_end
    else:
        close = followed[: followed.index(first) + len(first)].strip() if first else ""
    return close, at_end or close, _separator(followed, close, alone, opener), ()


def _without_opening(probe: ProbeRenderer, alone: str) -> str:
    """Return `alone`, the text after an answer, without an opener of the next turn that the template always writes."""
    if PromptRenderer(probe.renderer).generation_prompt:
        return alone
    opening = special_tokens(probe.between(ASKED, ANSWERED, QUESTION, ANSWER))
    cut = alone.rfind(opening[-1]) if opening else -1
    return alone if cut < 0 or special_tokens(alone)[-1] != opening[-1] else alone[:cut]


def _opening_results(probe: ProbeRenderer) -> Iterable[str]:
    tail = probe.between(VALUE, RETURNED, QUESTION, CALL, result(), asking=True)
    found = special_tokens(probe.between(VALUE, "", QUESTION, CALL))
    return [token for token in special_tokens(tail) if token not in found][:1]


def _separator(followed: str, close: str, alone: str, opener: str) -> str:
    """Return the white space between the close of a message and the opener of the next; "" if other text is there."""
    after = followed.partition(close)[2] if close else followed
    left = alone.partition(close)[2] if close and close in alone else ""
    if left and not left.strip() and after.startswith(left):
        return left
    shared = first_mismatch(after[::-1], opener[::-1])
    rest = after[: len(after) - shared]
    return rest if not special_tokens(rest) and rest.strip() == "" else ""


def _close_after_call(probe: ProbeRenderer, at_end: str) -> str:
    alone = probe.between(VALUE, "", QUESTION, CALL)
    if at_end and alone.rstrip().endswith(at_end):
        return at_end
    tokens = special_tokens(alone)
    return tokens[-1] if tokens else ""


def _through_last_special(text: str) -> str:
    tokens = special_tokens(text)
    if not tokens:
        return text.strip()
    end = max(text.rindex(token) + len(token) for token in tokens)
    return text[:end].strip()


# --- what is shown


def _reasoning(probe: ProbeRenderer, turn: View) -> Reasoning:
    if probe.shows(THOUGHT, QUESTION, turn, AGAIN_ASKED, asking=True):
        return Reasoning.KEPT
    return Reasoning.ONLY_LAST if probe.shows(THOUGHT, QUESTION, turn) else Reasoning.NOT_SHOWN


def _tools_position(probe: ProbeRenderer) -> ToolsPosition:
    if not shows_tools(probe.renderer):
        return ToolsPosition.NOT_SHOWN
    text = probe.text(QUESTION, ANSWER, AGAIN_ASKED, tools=True, asking=True) or ""
    answer = text.find(ANSWERED)
    return ToolsPosition.MOVES if 0 <= answer < text.rfind(TOOL) else ToolsPosition.FIRST


def _parallel_results(probe: ProbeRenderer) -> ParallelResults:
    before = (QUESTION, calling({KEY: VALUE}, count=2), result(0))
    last = "zqsecondz"
    # If results share a block, the block is closed after the first result only if no second result follows.
    one, both = probe.text(*before, tools=True), probe.text(*before, result(1, last), tools=True)
    if both is None or last not in both or RETURNED not in both:
        return ParallelResults.NOT_SHOWN
    return ParallelResults.ONE_BY_ONE if one is not None and both.startswith(one) else ParallelResults.TOGETHER


def _arguments(probe: ProbeRenderer) -> Arguments:
    if probe.renderer.text_arguments:
        return Arguments.STRING
    if not probe.shows(VALUE, QUESTION, CALL, result(), tools=True):
        return Arguments.NEITHER
    written = json.dumps({KEY: VALUE})
    text = probe.text(QUESTION, calling(written), result(), tools=True) or ""
    return Arguments.EITHER if VALUE in text and json.dumps(written)[1:-1] not in text else Arguments.OBJECT


def _literals(probe: ProbeRenderer) -> Literals:
    turn = calling({KEY: VALUE, "flag": True, "nothing": None})
    text = probe.text(QUESTION, turn) or probe.text(QUESTION, turn, tools=True) or ""
    call = text[text.rfind(VALUE) :] if VALUE in text else ""
    if re.search(r"\bTrue\b|\bNone\b", call):
        return Literals.PYTHON
    return Literals.JSON if call else Literals.NOT_SHOWN


def _null_content(probe: ProbeRenderer) -> NullContent:
    # Two renders are compared, since a template may write the word None by itself.
    shown = probe.text(QUESTION, CALL, result(), tools=True)
    null = calling({KEY: VALUE}, content=None)
    if probe.renderer.null_content:
        return NullContent.NEEDED
    if shown is None:
        null, shown = {"role": "assistant", "content": None}, ""
        text = probe.text(QUESTION, null, AGAIN_ASKED)
    else:
        text = probe.text(QUESTION, null, result(), tools=True)
    if text is None:
        return NullContent.RAISES
    written = len(re.findall(r"\bNone\b", text)) > len(re.findall(r"\bNone\b", shown))
    return NullContent.WRITTEN if written else NullContent.ACCEPTED


def _system_position(probe: ProbeRenderer) -> SystemPosition:
    text = probe.text(SYSTEM, QUESTION, ANSWER, AGAIN_ASKED, asking=True)
    if text is None:
        return SystemPosition.REFUSED
    if INSTRUCTED not in text:
        return SystemPosition.DROPPED
    return SystemPosition.MOVES if 0 <= text.find(ANSWERED) < text.index(INSTRUCTED) else SystemPosition.FIRST


def _system_mid_run(probe: ProbeRenderer) -> SystemMidRun:
    text = probe.text(QUESTION, ANSWER, SYSTEM, AGAIN_ASKED, asking=True)
    if text is None:
        return SystemMidRun.REFUSED
    if INSTRUCTED not in text:
        return SystemMidRun.DROPPED
    return SystemMidRun.KEPT if text.index(INSTRUCTED) > text.find(ANSWERED) else SystemMidRun.MOVED


def _trimmed(probe: ProbeRenderer) -> tuple[str, ...]:
    def padded(message: View, word: str) -> View:
        return {**message, "content": f" \n {word} \n "}

    conversations: Mapping[str, tuple[str, Sequence[View]]] = {
        "system": (INSTRUCTED, [padded(SYSTEM, INSTRUCTED), QUESTION]),
        "user": (ASKED, [padded(QUESTION, ASKED)]),
        "assistant": (ANSWERED, [QUESTION, padded(ANSWER, ANSWERED), AGAIN_ASKED]),
        "tool": (RETURNED, [QUESTION, CALL, padded(result(), RETURNED)]),
    }
    found = []
    for role, (word, messages) in conversations.items():
        text = probe.text(*messages, tools=role == "tool", asking=True) or ""
        quoted = json.dumps(f" \n {word} \n ")[1:-1]
        if word in text and f" \n {word} \n " not in text and quoted not in text:
            found.append(role)
    return tuple(found)
