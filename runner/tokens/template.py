"""Chat templates: loaded, compiled in a sandbox, and rendered with a frozen clock."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Self, TypeAlias

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import orjson

from runner.errors import BadTemplate
from runner.messages import canonical_json
from runner.tokens.probe_messages import CALL, QUESTION, TOOL, TOOLS, VALUE, result
from runner.tokens.shown_arguments import fitted, hidden_arguments, needs_fitting

__all__ = [
    "ChatTemplate",
    "Renderer",
    "TemplateRaised",
    "ToolSchema",
    "environment",
    "two_templates",
]

MessageView: TypeAlias = Mapping[str, Any]
"""A message as a template reads it, in OpenAI's shape."""

ToolSchema: TypeAlias = Mapping[str, Any]
"""A tool as a template reads it: {"type": "function", "function": {"name", "description", "parameters"}}."""


class TemplateRaised(BadTemplate):
    """The template refused these messages, or failed on them. The error text has the template's name and the cause."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The text of a chat template, and the names that it reads, such as `bos_token`."""

    text: str
    """The jinja2 source."""
    name: str
    """The template's name for people: a bundled name, a file, or the model to which the template belongs."""
    variables: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Strings that the template reads by name, mostly the vocabulary's control tokens."""
    response_template: Mapping[str, Any] | None = field(default=None, hash=False)
    """The checkpoint's rules for parsing answers ("response_template" in transformers); None if it has none."""

    @classmethod
    def load(cls, name_or_path: str | Path) -> Self:
        """Load the bundled template with this name, or the template in this file.

        Raises:
            BadTemplate: there is no such template, or it is not valid jinja2.
        """
        bundled = _bundled()
        path = bundled.get(name_or_path) if isinstance(name_or_path, str) else None
        file = path or Path(name_or_path)
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            names = ", ".join(sorted(bundled))
            raise BadTemplate(
                f"template {str(name_or_path)!r} cannot be read ({error}): "
                f"give one of the bundled names ({names}) or the path of a .jinja file"
            ) from error
        _compile(text, str(name_or_path))  # only a probe renders a new template, since rendering may never end
        return cls(text, name=str(name_or_path))

    @property
    def fingerprint(self) -> str:
        """A hash of the text, its variables and its response template."""
        further = [] if self.response_template is None else [self.response_template]
        content = canonical_json([self.text, sorted(self.variables.items()), *further])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def with_variables(self, variables: Mapping[str, str]) -> Self:
        """Return the same template for a vocabulary with these control tokens."""
        return replace(self, variables={**self.variables, **variables})

    def renderer(
        self,
        options: Mapping[str, Any] | None = None,
        now: datetime | None = None,
        *,
        fit_tools: bool | None = False,
    ) -> Renderer:
        """Return a renderer with fixed options and a fixed clock.

        Args:
            options: values of names that the template reads, such as `enable_thinking`.
            now: the time that the template reads; None for the present.
            fit_tools: True to rewrite the schemas of arguments that the template does not fully show; None to rewrite
                them only for a template that leaves out parts of usual schemas.

        Raises:
            BadTemplate: the template is not valid jinja2.
        """
        written = Renderer(self, dict(options or {}), now or datetime.now())
        fit = _needs_fitting(written) if fit_tools is None else fit_tools
        return replace(written, as_written=written) if fit else written


def two_templates(with_tools: str, without: str, *, name: str) -> ChatTemplate:
    """Return one template that renders as the first of two if there are tools, and otherwise as the second."""
    # Jinja drops one line break at the end of a template, and one after a tag. It also drops white space before a tag,
    # unless the tag has a plus.
    first, second = (text.removesuffix("\n") for text in (with_tools, without))
    return ChatTemplate("{%+ if tools %}\n" + first + "{%+ else %}\n" + second + "{%+ endif %}", name=name)


@dataclass(frozen=True, slots=True)
class Renderer:
    """A template with fixed options and a fixed clock, so that one conversation always renders to one text."""

    template: ChatTemplate
    """The template to render."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Values of names that the template reads, such as `enable_thinking`."""
    now: datetime = field(default_factory=datetime.now)
    """The time that the template reads with `strftime_now`."""
    as_written: Renderer | None = None
    """The same renderer with unchanged schemas of tools; None if this renderer does not change them."""
    text_arguments: bool = field(init=False, default=False)
    """True if the template needs the arguments of a tool call as JSON text, not as an object; found by rendering."""
    null_content: bool = field(init=False, default=False)
    """True if the template shows calls only if the content is null, not if it is empty; found by rendering."""
    _compiled: jinja2.Template = field(init=False, repr=False, compare=False)
    context: dict[str, Any] = field(init=False, repr=False, compare=False)
    """Variables of the template besides the messages, the tools and `add_generation_prompt`."""

    def __post_init__(self) -> None:
        context = {**self.template.variables, **self.options, "strftime_now": self.now.strftime}
        object.__setattr__(self, "_compiled", _compile(self.template.text, self.template.name))
        object.__setattr__(self, "context", context)
        # The instance is frozen, and changes only here: trial renders find the form of messages that the template
        # needs.
        for text_arguments, null_content in _FORMS:
            object.__setattr__(self, "text_arguments", text_arguments)
            object.__setattr__(self, "null_content", null_content)
            if _shows_arguments(self):
                return
        object.__setattr__(self, "text_arguments", False)
        object.__setattr__(self, "null_content", False)

    def render(
        self, messages: Sequence[MessageView], *, tools: Sequence[ToolSchema] = (), generation_prompt: bool = True
    ) -> str:
        """Return the text of `messages`; the template receives None for empty `tools`.

        Raises:
            TemplateRaised: the template refuses these messages, or fails on them.
        """
        # This is a copy, since templates may append to the list. They cannot change any other argument.
        messages = [*messages]
        if self.text_arguments:
            messages = [_with_text_arguments(message) for message in messages]
        if self.null_content:
            messages = [_with_null_content(message) for message in messages]
        try:
            # As in transformers, None replaces an empty list, since some templates write a block of tools for any list.
            return self._compiled.render(
                self.context,
                messages=messages,
                tools=self.shown(tools) or None,
                add_generation_prompt=generation_prompt,
            )
        except RecursionError as error:
            raise TemplateRaised(
                f"template {self.template.name!r} calls itself without end on these messages: correct its macros"
            ) from error
        except MemoryError:
            raise
        # A template raises its own refusals, and its expressions may raise any error.
        except Exception as error:
            raise TemplateRaised(f"template {self.template.name!r} raised: {error}") from error

    def shown(self, tools: Sequence[ToolSchema]) -> list[ToolSchema]:
        """Return the tools in the form that the template receives."""
        written = self.as_written
        if written is None:
            return [*tools]
        return [_fitted_tool(written, _as_key(tool)) for tool in tools]

    def render_tool(self, parameters: Mapping[str, Any]) -> str | None:
        """Render a user message with a tool whose arguments have this schema; None if the template raises."""
        function = {"name": TOOL, "description": "zqdescribedz", "parameters": parameters}
        try:
            return self.render([QUESTION], tools=[{"type": "function", "function": function}])
        except TemplateRaised:
            return None

    @property
    def fits_tools(self) -> bool:
        """True if schemas of tools are rewritten, since the template would not show some parts of the arguments."""
        return self.as_written is not None

    def written(self) -> str:
        """Return the template's own text: its source, the values of its variables, and a render.

        The render contains texts that the source does not contain as a whole, such as "<|" + role + "|>".
        """
        values = (value for value in self.context.values() if isinstance(value, str))
        return "\n".join([self.template.text, *values, self.rendered()])

    def rendered(self) -> str:
        """Return the renders of a user message, a call and its result, with and without tools, joined by line breaks.

        A render on which the template raises is left out.
        """
        parts: list[str] = []
        for tools in (TOOLS, []):
            with suppress(TemplateRaised):
                parts.append(self.render(_PROBE, tools=tools))
        return "\n".join(parts)


_fitting: dict[str, bool] = {}


def _needs_fitting(renderer: Renderer) -> bool:
    """Return True if the template leaves out parts of tools' arguments; computed once per process."""
    key = canonical_json([renderer.template.fingerprint, renderer.options])
    if key not in _fitting:
        _fitting[key] = needs_fitting(renderer.render_tool)
    return _fitting[key]


def _as_key(tool: ToolSchema) -> bytes | str:
    """Return a tool as JSON text."""
    try:
        return orjson.dumps(tool)
    except TypeError:  # the schema has Python objects, or integers above 64 bits
        return json.dumps(tool, default=str)


@functools.lru_cache(maxsize=2048)
def _fitted_tool(renderer: Renderer, text: bytes | str) -> ToolSchema:
    """Return a tool, given as JSON, in the form for the template. `renderer` must not change tools itself."""
    tool: dict[str, Any] = json.loads(text)
    function = tool["function"]
    if not function.get("parameters"):
        return tool
    made = {**function, "parameters": fitted(renderer.render_tool, function["parameters"])}
    if hidden := hidden_arguments(renderer.render_tool, made["parameters"]):
        written = f"Further arguments, as JSON schema: {json.dumps(hidden, ensure_ascii=False)}"
        made["description"] = f"{function.get('description') or ''} {written}".strip()
    return {**tool, "function": made}


def _shows_arguments(renderer: Renderer) -> bool:
    try:
        return VALUE in renderer.render(_PROBE, tools=TOOLS)
    except TemplateRaised:
        return False


_PROBE: Sequence[MessageView] = (QUESTION, CALL, result())


_FORMS = ((False, False), (True, False), (False, True), (True, True))
"""Forms of a call: (arguments as text, empty content as null). The first form that a template shows is used."""


def _with_null_content(message: MessageView) -> MessageView:
    return {**message, "content": None} if message.get("tool_calls") and not message["content"] else message


def _with_text_arguments(message: MessageView) -> MessageView:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_text(call) for call in calls]} if calls else message


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else canonical_json(arguments)
    return {**call, "function": {**function, "arguments": text}}


class GenerationTag(jinja2.ext.Extension):
    """Jinja extension that ignores the tags `{% generation %}`, which mark assistant text for some trainers."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as an instance variable

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


_PLAIN_JSON = json.JSONEncoder(ensure_ascii=False)
# `_PLAIN_JSON.encode` would create such an encoder at every call. This encoder does not check for values that contain
# themselves, since these raise an error in any case.
_encode_json = json.encoder.c_make_encoder(  # type: ignore[attr-defined]  # missing in the type stubs
    None, _PLAIN_JSON.default, json.encoder.encode_basestring, None, ": ", ", ", False, False, True
)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if not ensure_ascii and indent is None and separators is None and not sort_keys:
        return "".join(_encode_json(value, 0))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, with a fast path for frequent reads: keys of dicts and attributes of `loop`."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        if kind is jinja2.runtime.LoopContext and attribute in _LOOP_ATTRIBUTES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


_DICT_ATTRIBUTES = frozenset(dir(dict))
_LOOP_ATTRIBUTES = frozenset({"first", "last", "index", "index0", "length", "previtem", "nextitem"})


@functools.cache
def environment() -> jinja2.Environment:
    """Return a sandbox with the settings of transformers, so that templates render as in `apply_chat_template`."""
    environment = _TemplateEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


@functools.lru_cache(maxsize=64)
def _compile(text: str, name: str) -> jinja2.Template:
    try:
        template = environment().from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise BadTemplate(
            f"template {name!r} is not valid jinja2, line {error.lineno}: {error.message}; correct it there"
        ) from error
    # jinja2 copies the globals at every render, and copying a chain of mappings takes as long as rendering a turn.
    template.globals = dict(template.globals)
    return template


def _bundled() -> dict[str, Path]:
    """Return the paths of the bundled templates by name; {} if their folder is missing.

    The folder is inside the package in a wheel, and beside the package in a checkout.
    """
    package = Path(__file__).parent.parent
    folder = next((f for f in (package / "templates", package.parent / "templates") if f.is_dir()), None)
    return {path.stem: path for path in folder.glob("*.jinja")} if folder else {}
