"""`deltarunner check-template`: the properties of a chat template, and the appends that are exact with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.cli.name_values import parse_values
from runner.cli.report import make_console, plain_table
from runner.cli.tool_format_check import ToolFormatCheck
from runner.cli.turn_view import turn_document, turn_lines
from runner.errors import BadInput, BadOption, BadTemplate
from runner.models import ResolvedModel, chat_template, resolve_model, stop_ids
from runner.options import HistoryPolicy, check_tool_format
from runner.parsing.learning.learnt_format import LearntFormat
from runner.template_probe import UnusableTemplate, bundled_templates, in_process, request_of
from runner.tokens.bridging.refusal import Property
from runner.tokens.probing.appends import Append, AppendVerdict, Exactness, ExamplePassage
from runner.tokens.probing.profile import TemplateProfile, TraitValue
from runner.tokens.template import ChatTemplate
from runner.transcript import printable

__all__ = ["check_template_command"]

PROBE_SECONDS = 30.0
"""Time limit of the probes, including one or two seconds to load the vocabulary."""

DEFAULT_CONTROL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
"""Control tokens for a template in a file, which has no vocabulary."""

MAX_VALUE_CHARS = 60
STYLES = {"prompt": "dim", "sampled": "bold green", "bridge": "yellow"}
RESULT_STYLES = {Exactness.EXACT: "green", Exactness.SOFT: "yellow", Exactness.UNSUPPORTED: "bold red"}


@dataclass(frozen=True, slots=True)
class CheckedTemplate:
    """The template to check, with its model if there is one."""

    template: ChatTemplate
    """The template, not compiled, because compiling may never end."""

    model: ResolvedModel | None = None
    """The model whose vocabulary is used; if None, the vocabulary is bytes and the template's control tokens."""


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """Result of the probes of a template."""

    profile: TemplateProfile
    """Properties of the template."""

    verdicts: Sequence[AppendVerdict]
    """The verdict on each kind of append: whether the append is possible, and how exactly."""

    example: Sequence[ExamplePassage]
    """The ids of a short conversation, as a run would record them."""

    stops: Mapping[str, int]
    """Ids that end a turn, by token."""

    turn: LearntFormat
    """The learnt format of calls and reasoning in a turn."""

    lacking: Sequence[str] = ()
    """Control tokens that the template writes and the vocabulary lacks."""

    named: ToolFormatCheck | None = None
    """Check of the tool format that the user named; None if the user named none, or the template shows no tools."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """`fitted`: True if schemas are rewritten; `unseen`: parts still omitted. Empty if the template shows no tools."""

    @property
    def missing(self) -> list[AppendVerdict]:
        """Appends that an environment with tools needs, but that are not exact."""
        return [each for each in self.verdicts if each.kind.needed and each.result is not Exactness.EXACT]

    @property
    def unstopped(self) -> list[str]:
        """Texts that end a turn in the template but contain no stop token."""
        closes = dict.fromkeys((self.profile.close_at_end, self.profile.close_after_call))
        return [close for close in closes if close and not any(stop in close for stop in self.stops)]

    @property
    def exit_code(self) -> int:
        wrong = self.missing or self.unstopped or not self.profile.carries_tools or self.misread
        return BadTemplate.exit_code if wrong else 0

    @property
    def misread(self) -> bool:
        """True if calls cannot be parsed, or a parsed call differs from the call that was given to the template."""
        return not (self.turn.reads_calls if self.named is None else self.named.reads_all)


def check_template_command(
    name: str, *, template: str | None, options: Sequence[str], tool_format: str | None = None, as_json: bool
) -> int:
    """Check a template, print the result, and return the exit code: `BadTemplate.exit_code` if anything is wrong.

    Raises:
        BadInput: the template cannot be used, or an option is invalid. With `as_json` the error is also printed as
            JSON.
    """
    console = make_console()
    given: dict[str, Any] = {}
    try:
        given = parse_values(options, "--template-option")
        subject = _subject(name, template)
        check_tool_format(tool_format)
        findings = _examine(subject, given, tool_format)
    except BadInput as error:
        if as_json:
            print(json.dumps(_failure(name, given, error)))
        raise
    if as_json:
        print(json.dumps(_document(name, subject, given, findings)))
    else:
        _print(console, subject, findings)
    return findings.exit_code


def _subject(name: str, template: str | None) -> CheckedTemplate:
    if template is None and (name in bundled_templates() or name.endswith(".jinja") or Path(name).is_file()):
        return CheckedTemplate(_template(name).with_variables(DEFAULT_CONTROL_TOKENS))
    model = resolve_model(name, say=lambda line: print(line, file=sys.stderr))
    own = None if template is None else _template(template)
    return CheckedTemplate(chat_template(model, own), model)


def _template(name: str) -> ChatTemplate:
    """A bundled template or the template of a file, not compiled."""
    path = Path(name)
    if name in bundled_templates() or not path.is_file():
        return ChatTemplate.load(name)
    with suppress(OSError, UnicodeDecodeError):  # `load` below raises the error with a message
        return ChatTemplate(path.read_text(encoding="utf-8"), name=name)
    return ChatTemplate.load(name)


def _examine(subject: CheckedTemplate, options: Mapping[str, Any], tool_format: str | None) -> TemplateReport:
    wanted, vocabulary, model = "", {}, subject.model
    if model is not None:
        wanted = _wanted_bos(model.folder)
        vocabulary = {"folder": str(model.folder), "stop_ids": stop_ids(model, None)}
    request = request_of(subject.template, options, datetime.now(), wanted_bos=wanted)
    answer = in_process({**request, "vocabulary": vocabulary}, seconds=PROBE_SECONDS)
    profile = TemplateProfile.from_json(answer["profile"])
    if unread := [name for name in options if name not in profile.options]:
        known = ", ".join(profile.options) or "none"
        raise BadOption(f"--template-option {unread[0]}: the template reads only these variables: {known}.")
    turn = LearntFormat.from_json(answer["turn"])
    named = None
    if tool_format is not None and profile.carries_tools:
        named = ToolFormatCheck.tried(tool_format, subject.template, options, model, profile, turn)
    return TemplateReport(
        profile,
        [AppendVerdict.from_json(values) for values in answer["appends"]],
        [ExamplePassage(p["source"], tuple(p["ids"]), tuple(p["texts"])) for p in answer["example"]],
        answer["stops"],
        turn,
        answer["lacking"],
        named,
        answer.get("arguments", {}),
    )


def _wanted_bos(folder: Path) -> str:
    """The token that the vocabulary's post-processor puts before every text, or ""."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        processor = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")).get("post_processor") or {}
        for step in processor.get("processors", [processor]):
            first = (step.get("single") or [{}])[0]
            if "SpecialToken" in first:
                return str(first["SpecialToken"]["id"])
    return ""


# --- consequence and fix

_ANOTHER = "another template: --template, checked with this command"
_FIXES: Mapping[Property, str] = {
    Property.TEMPLATE_RENDERS: "append other messages at this point, or use " + _ANOTHER,
    Property.SENTINEL_SHOWN: "let the model make one call at a time (parallel_tool_calls=False), or use " + _ANOTHER,
    Property.TURN_STAYS_BEFORE: "use " + _ANOTHER,
    Property.TOOLS_STAY: "use one user message per episode, or a template that writes the tools first (mistral_nemo)",
    Property.SYSTEM_STAYS: "put the text in the first user message, or use one user message per episode",
    Property.CONTENT_LOCATED: "remove the control text from the content, or use History(content_safe=False)",
    Property.CONTENT_SHOWN: "put the text in a user message, or use " + _ANOTHER,
    Property.STOP_IN_TAIL: "add the template's end of turn to the model's stop ids (generation_config.json)",
    Property.STOP_OPENS_NEXT: "first append a message of the role that the stop token opened",
    Property.CLOSE_KNOWN: "raise max_tokens, so that fewer turns are cut off",
    Property.REASONING_CLOSED: "raise max_tokens, or History(close_reasoning=True)",
    Property.TEXT_KEPT: "use the tokenizer.json that the model was published with",
    Property.PROMPTS_ANSWER: "use a template that writes its generation prompt after such a message",
    Property.OPENED_ONCE: "remove one of the two openings from the template",
    Property.TURNS_SAMPLED: "let the model sample the text, or replace() the history",
}
_NEVER_FORKED = (Property.REASONING_CLOSED, Property.TEXT_KEPT)


def _consequence(verdict: AppendVerdict) -> str:
    if verdict.result is Exactness.SOFT:
        return "the ids at the seam may differ from those of the whole text; counted as seam=unverified"
    if verdict.refusal in _NEVER_FORKED:
        return "the episode ends with token_error"
    if verdict.refusal is Property.TEMPLATE_RENDERS:
        return "no prompt can be built: the episode ends with token_error under every policy"
    append, refuse = HistoryPolicy.APPEND.value, HistoryPolicy.REFUSE.value
    return (
        f"{append}: a new segment begins here, rendered again with loss mask 0, and is counted; "
        f"{refuse}: the episode ends with token_error"
    )


def _fix(verdict: AppendVerdict) -> str:
    return _FIXES[verdict.refusal] if verdict.refusal is not None else "use " + _ANOTHER


# --- JSON


def _document(
    name: str, subject: CheckedTemplate, options: Mapping[str, Any], findings: TemplateReport
) -> dict[str, Any]:
    return {
        "checked": name,
        "template": subject.template.name,
        "fingerprint": subject.template.fingerprint,
        "vocabulary": "bytes" if subject.model is None else str(subject.model.folder),
        "options": options,
        "stops": findings.stops,
        "profile": {
            trait: {"value": findings.profile.as_json()[trait], "explanation": sentence}
            for trait, _, sentence in findings.profile.traits()
        },
        "turn": turn_document(findings.turn),
        "tool_format": findings.named.document() if findings.named is not None else None,
        "arguments": findings.arguments or None,
        "unstopped": findings.unstopped,
        "lacking": findings.lacking,
        "appends": [_verdict_document(verdict) for verdict in findings.verdicts],
        "example": [{"source": p.source, "mask": p.mask, "ids": p.ids, "texts": p.texts} for p in findings.example],
        "error": None,
        "exit_code": findings.exit_code,
    }


def _verdict_document(verdict: AppendVerdict) -> dict[str, Any]:
    exact = verdict.result is Exactness.EXACT
    return {
        "kind": verdict.kind,
        "needed": verdict.kind.needed,
        **asdict(verdict),
        "consequence": "" if exact else _consequence(verdict),
        "fix": "" if exact else _fix(verdict),
    }


def _failure(name: str, options: Mapping[str, Any], error: BadInput) -> dict[str, Any]:
    fault = error.fault.value if isinstance(error, UnusableTemplate) else None
    kind = {"kind": type(error).__name__, "fault": fault, "message": str(error)}
    return {"checked": name, "options": options, "error": kind, "exit_code": error.exit_code}


# --- text


def _print(console: Console, subject: CheckedTemplate, findings: TemplateReport) -> None:
    stops = " ".join(f"{token} ({token_id})" for token, token_id in findings.stops.items())
    vocabulary = subject.model.name if subject.model is not None else "bytes, and the template's control tokens"
    console.print(Text.assemble(("template    ", "dim"), (subject.template.name, "bold")), soft_wrap=True)
    console.print(Text.assemble(("vocabulary  ", "dim"), vocabulary), soft_wrap=True)
    console.print(Text.assemble(("stops       ", "dim"), printable(stops)), soft_wrap=True)
    console.print()
    console.print(_traits(findings.profile))
    console.print()
    console.print(_turn(findings))
    console.print()
    console.print(_appends(findings.verdicts))
    if any(verdict.rewrites for verdict in findings.verdicts):
        console.print(Text(_REWRITES, "dim"), soft_wrap=not console.is_terminal)
    for line in _problems(findings):
        console.print(line, soft_wrap=not console.is_terminal)
    console.print()
    for line in _example(findings.example, bytes_alone=subject.model is None):
        console.print(line, soft_wrap=not console.is_terminal)
    console.print()
    console.print(_conclusion(findings), soft_wrap=True)


_REWRITES = (
    "rewrites: the template itself would write earlier messages differently from the sampled ids or "
    "from the prompt.\n  append keeps the sampled ids, fork follows the template in a new segment. A server that "
    "renders each request again follows the template."
)


def _traits(profile: TemplateProfile) -> Table:
    table = plain_table()
    for column in ("property", "value", "meaning"):
        table.add_column(column, overflow="fold", min_width=20)
    for trait, value, sentence in profile.traits():
        table.add_row(Text(trait, "bold"), Text(_shown(value)), Text(sentence, "dim"))
    return table


def _turn(findings: TemplateReport) -> Table:
    table = plain_table()
    for column in ("turns", "format", "meaning"):
        table.add_column(column, overflow="fold", min_width=16)
    named = findings.named.lines() if findings.named is not None else ()
    for label, text, sentence in (*turn_lines(findings.turn), *named, *_arguments(findings)):
        table.add_row(Text(label, "bold"), Text(printable(text).replace("\n", "⏎")), Text(sentence, "dim"))
    return table


def _arguments(findings: TemplateReport) -> Iterator[tuple[str, str, str]]:
    """Rows about the schemas of tools in prompts, as (label, text, meaning); empty without tools."""
    if findings.arguments.get("fitted"):
        sentence = (
            "Parts that the template omits are rewritten: references inlined, X or null as X, notes as descriptions."
        )
        yield "schemas", "fitted", sentence
    elif findings.arguments:
        yield "schemas", "as they are", "Prompts contain the schemas of arguments as their author wrote them."


def _shown(value: TraitValue) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = " ".join(value) if isinstance(value, tuple) else printable(str(value)).replace("\n", "⏎")
    return (text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 1] + "…") or "none"


def _appends(verdicts: Sequence[AppendVerdict]) -> Table:
    table = plain_table()
    for column in ("append", "bridge", "attached after", "close", "work follows", ""):
        table.add_column(column)
    for verdict in verdicts:
        exact = verdict.result is not Exactness.UNSUPPORTED
        table.add_row(
            Text(verdict.kind.value),
            Text(verdict.result.value, RESULT_STYLES[verdict.result]),
            Text(verdict.refusal or verdict.anchor),
            Text(verdict.close),
            Text(("the new messages" if verdict.local else "the whole history") if exact else ""),
            Text("rewrites" if verdict.rewrites else "", "yellow"),
        )
    return table


_TOKENS_FIX = (
    "use all files of the tokenizer that the model was published with (tokenizer_config.json, added_tokens.json ...), "
    "or a template with tokens of this vocabulary: --template"
)


_NO_FORMAT = "leave out --tool-format if the template's calls can be parsed without it"
_READ_FIX = "another template (--template), or a tool parser of vLLM: --tool-format vllm:NAME"


def _problems(findings: TemplateReport) -> Iterator[Text]:
    if not findings.profile.carries_tools:
        yield Text.assemble(("\nno tools    ", "bold red"), "definitions, calls or results are not shown (see above)")
    elif findings.named is not None and findings.misread:
        why = f"{findings.named.name} does not parse the template's calls: {findings.named.misreads}"
        yield from _problem("calls", "yellow", why, then="right only for models with another format", fix=_NO_FORMAT)
    elif findings.misread:
        why = f"calls cannot be parsed ({findings.turn.missing}): {findings.turn.why}"
        yield from _problem("calls", "bold red", why, then="no environment with tools can be played", fix=_READ_FIX)
    if unseen := findings.arguments.get("unseen"):
        what = f"the model is not shown {', '.join(unseen)}"
        fix = "describe it in the docstrings of such tools, or use " + _ANOTHER
        yield from _problem("arguments", "yellow", what, then="the model has to guess it", fix=fix)
    for close in findings.unstopped:
        has = not any(token in close for token in findings.lacking)
        fix = "add it to eos_token_id in the model's generation_config.json" if has else _TOKENS_FIX
        what = f"the template ends turns with {close}, but the model has no stop id for it"
        yield from _problem("stops", "bold red", what, then="turns continue after it up to max_tokens", fix=fix)
    if findings.lacking:
        what = f"the vocabulary has no token for {' '.join(findings.lacking)}, which the template writes"
        then = "the model receives them as plain text; this is right only if it was trained that way"
        yield from _problem("tokens", "yellow", what, then=then, fix=_TOKENS_FIX)
    for verdict in findings.verdicts:
        if verdict.result is not Exactness.EXACT and (findings.profile.carries_tools or not verdict.kind.calls):
            name = verdict.refusal.value if verdict.refusal is not None else "seam"
            why = printable(verdict.explanation or "no control token at the seam")
            then, fix = _consequence(verdict), _fix(verdict)
            style = RESULT_STYLES[verdict.result]
            yield from _problem(verdict.kind.value, style, name, why=why, then=then, fix=fix)


def _problem(name: str, style: str, what: str, **more: str) -> Iterator[Text]:
    yield Text.assemble((f"\n{name}", style), f": {what}")
    for label, text in more.items():
        yield Text.assemble((f"  {label:12}", "dim"), text)


def _example(passages: Sequence[ExamplePassage], *, bytes_alone: bool) -> Iterator[Text]:
    yield Text("a conversation, id by id: │ separates two ids", "dim")
    if bytes_alone:
        yield Text("(in this vocabulary every other character is an id as well)", "dim")
    for passage in passages:
        pieces = _joined_bytes(passage) if bytes_alone else list(passage.texts)
        text = "│".join(printable(piece).replace("\n", "⏎") for piece in pieces)
        label = f"{passage.source:8} mask {passage.mask}  {len(passage.ids):5} ids  "
        yield Text.assemble((label, "bold"), (f"│{text}│", STYLES[passage.source]))


def _joined_bytes(passage: ExamplePassage) -> list[str]:
    """The texts of the ids, with consecutive bytes joined."""
    pieces: list[str] = []
    plain = bytearray()
    for token_id, text in zip(passage.ids, passage.texts, strict=True):
        if token_id < 256:
            plain.append(token_id)
            continue
        pieces += [plain.decode(errors="replace")] if plain else []
        pieces.append(text)
        plain.clear()
    return [*pieces, plain.decode(errors="replace")] if plain else pieces


def _conclusion(findings: TemplateReport) -> Text:
    if findings.exit_code == 0:
        return Text("ok: all appends of an environment with tools are exact", "bold green")
    usable = all(v.result is Exactness.EXACT for v in findings.verdicts if v.kind.needed and not v.kind.calls)
    if findings.named is not None and findings.profile.carries_tools and findings.misread:
        return Text(f"{findings.named.name} parses other calls than the template writes", "bold red")
    if not findings.profile.carries_tools or findings.misread:
        ending = "; without tools everything is exact" if usable else ""
        return Text(f"no environment with tools can be played{ending}", "bold red")
    if not findings.missing:
        return Text("the model does not stop at the end of its turns", "bold red")
    needed = sum(kind.needed for kind in Append)
    return Text(
        f"{len(findings.missing)} of {needed} appends that environments with tools make are not exact", "bold red"
    )
