"""Reduction of an agent program's requests to a test's needs: each text becomes filler of the same length.

The structure stays: keys, roles, numbers, the places and number of texts, white space at the ends of lines, and the
spacing of JSON. Equal texts become equal filler. If a line begins with another whole line, so does its filler. Handles
of our turns become placeholders: `call_$3$_0` is the first call of the turn that answered request 3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from runner.endpoint.request_body import _LABELS
from runner.episode.client_messages import VOLATILE
from tests.filler import filler
from tests.recorded_words import IDENTIFIER, KEPT, STAYS

__all__ = ["SentRequest", "as_text", "reduced"]

MAX_TEXT_CHARS: Final = 400
"""Maximum length of a text in characters: the ids of longer texts cost time and test nothing more."""

MAX_DESCRIPTION_CHARS: Final = 40
"""Maximum length of a tool's description, in characters."""

_MIN_PREFIX_CHARS: Final = 4
"""Minimum length, in characters, of a line whose filler may begin the filler of longer lines."""

_CODEX: Final = "x-codex-turn-metadata"
_HANDLE: Final = re.compile(r"([a-z]+_)([0-9a-f]{12})((?:_\d+j?)?)")
_WORD: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_STRING: Final = re.compile(r'"((?:[^"\\]|\\.)*)"(\s*:)?')
_SAID: Final = re.compile(r"(<think>|</think>|<tool_call>|</tool_call>)")
_CALLED: Final = re.compile(r'<tool_call>\s*\{"name": "([^"]+)"')
_LISTS: Final = ("system", "tools", "messages", "input")
_DESCRIBES: Final = frozenset({"description", "title", "definition", "pattern"})


@dataclass(slots=True, kw_only=True)
class SentRequest:
    """A request as a client sent it, and its result."""

    form: str
    """The name of its wire format."""
    headers: Mapping[str, str]
    """The request's headers."""
    body: Mapping[str, Any]
    """The request's body."""
    says: str
    """The sampled text of its answer, with all marks, or "" if nothing was sampled."""
    handle: str
    """The handle of the turn that answered it."""
    ends: str
    """Delivery of the answer: `delivered`, `cut` or `undelivered`."""
    trained: bool
    """True if its thread is trained."""
    verdict: str
    """The verdict on it."""
    again: str
    """Handling of a repeated request."""
    tolerated: Sequence[str]
    """The tolerated changes of the request."""
    parent: int | None
    """The index of the request whose turn it continues."""
    cause: str
    """The cause of the segment that contains its turn."""


@dataclass(slots=True)
class _Marks:
    """Replaces texts by marks. Only lines that were `seen` before `settle` get a mark in order of length."""

    seen: set[str] = field(default_factory=set)
    """The lines to be marked, without white space at their ends."""
    known: dict[str, str] = field(default_factory=dict)
    """Marks by line."""
    settled: bool = False
    _tails: dict[tuple[int, str], str] = field(default_factory=dict)
    _used: set[str] = field(default_factory=set)
    _next: int = 0

    def settle(self) -> None:
        """Give every line its mark, in order of length."""
        self.settled = True
        for line in sorted(self.seen, key=lambda each: (len(each), each)):
            self.line(line)

    def line(self, line: str) -> str:
        """Return the mark of a line, or the mark of a known line that it begins with and marks of its rest."""
        if not self.settled:
            self.seen.add(line)
            return line
        if line not in self.known:
            ends = range(len(line) - 1, _MIN_PREFIX_CHARS - 1, -1)
            whole = next((line[:end] for end in ends if line[:end] in self.known), "")
            self.known[line] = self.known[whole] + self.text(line[len(whole) :]) if whole else self._new(len(line))
        return self.known[line]

    def _tail(self, text: str, length: int) -> str:
        """Return a unique mark for the end of a text that is too long."""
        key = length, text
        if self.settled and key not in self._tails:
            self._tails[key] = self._new(length)
        return self._tails.get(key, "")

    def _new(self, length: int) -> str:
        # Filler of one or two characters has few different values, so the search begins at 0.
        for number in range(self._next if length > 2 else 0, self._next + 400):
            if filler(number, length) not in self._used:
                break
        else:
            raise ValueError(f"there is no filler left of {length} characters")
        self._next = max(self._next, number + 1)
        self._used.add(filler(number, length))
        return f"«{number}:{length}»"

    def text(self, text: str, cap: int = MAX_TEXT_CHARS) -> str:
        """Mark a text, line by line. A text that is too long keeps its beginning, followed by a unique mark."""
        if len(text) > cap:
            end = text[len(text.rstrip()) :][:cap]
            return self.text(text[: cap - cap // 4], cap) + self._tail(text.strip(), cap // 4) + end
        return "".join(self._of_line(each) for each in re.split(r"(\n)", text))

    def _of_line(self, line: str) -> str:
        volatile = next((mark for mark in VOLATILE if line.startswith(mark)), "")
        rest = line.removeprefix(volatile)
        core = rest.strip()
        begin, _, end = rest.partition(core) if core else (rest, "", "")
        return volatile + begin + (self.line(core) if core else "") + end

    def name(self, name: str) -> str:
        """Mark a tool name, word by word, so that a name made of other names remains one."""
        if re.fullmatch(r"[\w.-]+", name, re.ASCII) is None:
            return self.text(name)
        return _WORD.sub(self._of_word, name)

    def _of_word(self, word: re.Match[str]) -> str:
        mark = self.line(word[0].lower())
        return mark.replace("»", "^»", 1) if self.settled and word[0][0].isupper() else mark


class _Reducer:
    """Reducer of the requests of one recording, in two passes: the first collects all texts, the second marks them."""

    def __init__(self, sent: Sequence[SentRequest], marks: _Marks) -> None:
        self._marks = marks
        self._sent = sent
        self._handles: dict[str, int] = {}
        for place, request in enumerate(sent):
            self._handles.setdefault(request.handle.removeprefix("call_"), place)
        self._called = {name for request in sent for name in _CALLED.findall(request.says)}

    def requests(self) -> list[dict[str, Any]]:
        return [self._request(each) for each in self._sent]

    def _request(self, sent: SentRequest) -> dict[str, Any]:
        body = {key: self._tools(each) if key == "tools" else self._value(each, key) for key, each in sent.body.items()}
        return {
            "form": sent.form,
            "headers": self._headers(sent.headers),
            "body": body,
            "says": self._said(sent.says),
            "ends": sent.ends,
            "trained": sent.trained,
            "verdict": sent.verdict,
            "again": sent.again,
            "tolerated": sorted(sent.tolerated),
            "parent": sent.parent,
            "cause": sent.cause,
        }

    def _headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        kept = {name: self._marks.text(headers[name]) for name in _LABELS if headers.get(name)}
        if _CODEX in headers:
            metadata = json.loads(headers[_CODEX])
            kept[_CODEX] = json.dumps(
                {key: self._string(metadata[key], key) for key in ("thread_id", "request_kind") if key in metadata},
                ensure_ascii=False,
            )
        return kept

    def _value(self, value: Any, key: str) -> Any:
        match value:
            case dict():
                return {self._key(name): self._value(each, name) for name, each in value.items()}
            case list():
                return [self._value(each, key) for each in value]
            case str():
                return self._string(value, key)
            case _:
                return value

    def _key(self, key: str) -> str:
        return key if IDENTIFIER.fullmatch(key) else self._marks.text(key)

    def _string(self, text: str, key: str) -> str:
        named = _HANDLE.fullmatch(text)
        if named is not None and named[2] in self._handles:
            return f"{named[1]}${self._handles[named[2]]}${named[3]}"
        if text in KEPT.get(key, ()):
            return text
        if key in ("name", "namespace"):
            return self._marks.name(text)
        if key == "arguments":
            return self._json(text)
        return self._marks.text(text, MAX_DESCRIPTION_CHARS if key in _DESCRIBES else MAX_TEXT_CHARS)

    def _json(self, text: str) -> str:
        """Reduce JSON with its own keys and spacing. Text that is not JSON is reduced as text."""
        try:
            json.loads(text)
        except ValueError:
            return self._marks.text(text)
        last = ""

        def put(found: re.Match[str]) -> str:
            nonlocal last
            value = json.loads(f'"{found[1]}"')
            if found[2] is not None:
                last = value
                return json.dumps(self._key(value), ensure_ascii=False) + found[2]
            return json.dumps(self._string(value, last), ensure_ascii=False)

        return _STRING.sub(put, text)

    def _said(self, text: str) -> str:
        """Reduce the output of a model. Its tags stay, and the text between call tags is reduced as JSON."""
        parts, kept = _SAID.split(text), list[str]()
        for place, part in enumerate(parts):
            if place % 2:
                kept.append(part)
                continue
            core = part.strip()
            begin, _, end = part.partition(core) if core else (part, "", "")
            is_call = place > 0 and parts[place - 1] == "<tool_call>"
            kept.append(begin + (self._json(core) if is_call else self._marks.text(core)) + end)
        return "".join(kept)

    # --- tools

    def _tools(self, tools: Any) -> Any:
        return [self._tool(each) for each in tools] if isinstance(tools, list) else self._value(tools, "tools")

    def _tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        inner = tool.get("function", tool)
        name = inner.get("name", "")
        called = any(each == name or each.endswith(f"__{name}") for each in self._called)
        made: dict[str, Any] = {}
        for key, value in tool.items():
            if key == "function":
                made[key] = self._tool(value)
            elif key == "tools":  # tools of a namespace
                made[key] = self._tools(value)
            elif key in ("parameters", "input_schema") and isinstance(value, dict):
                made[key] = self._schema(value if called else _outline(value))
            else:
                made[key] = self._value(value, key)
        return made

    def _schema(self, schema: Any, key: str = "") -> Any:
        """Reduce a schema: examples, defaults and other hints at values are removed."""
        if isinstance(schema, list):
            return [self._schema(each, key) for each in schema]
        if not isinstance(schema, dict):
            stays = STAYS.get(key)
            is_kept = not isinstance(schema, str) or (stays is not None and stays.fullmatch(schema))
            return schema if is_kept else self._string(schema, key)
        if key == "properties":
            return {self._key(name): self._schema(each) for name, each in schema.items()}
        left_out = ("$schema", "default", "examples", "format", "pattern")
        return {self._key(name): self._schema(each, name) for name, each in schema.items() if name not in left_out}


def _outline(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters, with their types, in the schema of a tool that is never called."""
    taken = schema.get("properties", {})
    types = {name: of.get("type") for name, of in taken.items() if isinstance(of, dict)}
    properties = {name: {"type": kind} for name, kind in types.items() if isinstance(kind, str)}
    required = [name for name in schema.get("required", ()) if name in properties]
    return {"type": "object", "properties": properties, "required": required}


def reduced(client: str, version: str, scenario: str, sent: Sequence[SentRequest]) -> dict[str, Any]:
    """Return the recording of one play in the form that a file contains.

    Content that several requests share is stored once, as one of the `parts`.
    """
    marks = _Marks()
    _Reducer(sent, marks).requests()
    marks.settle()
    requests = _Reducer(sent, marks).requests()
    parts: dict[str, int] = {}
    for request in requests:
        body = request["body"]
        for key in _LISTS:
            if isinstance(body.get(key), list):
                body[key] = [_shared(each, parts) for each in body[key]]
    return {
        "client": client,
        "version": version,
        "scenario": scenario,
        "parts": [json.loads(each) for each in parts],
        "requests": requests,
    }


def _shared(part: Any, parts: dict[str, int]) -> int:
    return parts.setdefault(json.dumps(part, ensure_ascii=False), len(parts))


def as_text(recording: Mapping[str, Any]) -> str:
    """Format a recording as file text: a line for each part and each request."""

    def lines(values: Iterable[Any]) -> str:
        return ",\n".join(f"  {json.dumps(each, ensure_ascii=False)}" for each in values)

    head = [f' "{key}": {json.dumps(recording[key])},\n' for key in ("client", "version", "scenario")]
    lists = [f' "{key}": [\n{lines(recording[key])}\n ]' for key in ("parts", "requests")]
    return "{\n" + "".join(head) + ",\n".join(lists) + "\n}\n"
