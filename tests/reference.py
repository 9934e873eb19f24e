"""Writes docs/reference.md from the signatures and docstrings of the public names. Usage: python -m tests.reference."""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import docstring_parser
from docstring_parser import Docstring, DocstringStyle

from runner.options import UNSET
from tests.repository import DOCS

PAGE = DOCS / "reference.md"

PACKAGES = {
    "runner": "What environments and runs are made of. `from runner import ...`",
    "runner.testing": "What tests of environments are made of; [Test an environment](testing.md) shows it in use.",
    "runner.training": "Batches for a trainer; [Training batches](training-batches.md) shows them in use.",
    "runner.generation": "Padded batches in and out; [Batch generation](batch-generation.md) shows them in use.",
}
SECTIONS = (
    ("Environments", "Environment tool Tool ToolError reward metric group_reward Group Task TaskSource"),
    ("Episodes", "Episode Conversation Turn ToolCall Message Prompt Reply FinishReason EpisodeOver"),
    ("Runs", "run Run Limits Sampling Concurrency History HistoryPolicy Summary RunFile"),
    ("Records", "Trajectory Segment Outcome"),
)
# Public only within the library: what runs an episode calls them, and no author does.
UNSAID = {
    "Environment": ("fresh", "overrides", "bound_tools", "task_class", "construction"),
    "Episode": ("open_conversation",),
    "Conversation": ("logs", "into_trajectory"),
    "Run": ("fail", "flush", "engine_died"),
}
OTHERS = {"runner": "Engines, weights and tokens"}
ERRORS = "Errors"
WIDTH = 110


def page() -> str:
    """The whole page."""
    return "\n".join(_page()).rstrip() + "\n"


def _page() -> Iterator[str]:
    yield "# Reference"
    yield ""
    yield "Every public name, from its docstring. This page is made by `make reference`; what is wrong in it is mended"
    yield "in the code. [Write an environment](environments.md) and its neighbours show the names in use."
    for package, introduction in PACKAGES.items():
        yield from ("", f"## {package}", "", introduction)
        for title, names in _sections(package):
            if title:
                yield from ("", f"**{title}**")
            for name in names:
                yield from _entry(package, name)


def _sections(package: str) -> Iterator[tuple[str, list[str]]]:
    """The names of a package under their titles; what no title names comes after, errors last."""
    module = importlib.import_module(package)
    if package not in OTHERS:
        yield "", sorted(module.__all__, key=str.lower)
        return
    titled = [(title, names.split()) for title, names in SECTIONS]
    rest = set(module.__all__).difference(*(names for _, names in titled))
    errors = {name for name in rest if _is_error(getattr(module, name))}
    yield from titled
    yield OTHERS[package], sorted(rest - errors, key=str.lower)
    yield ERRORS, sorted(errors)


def _is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Exception)


def _entry(package: str, name: str) -> Iterator[str]:
    value = getattr(importlib.import_module(package), name)
    yield from ("", f"### {name}", "")
    if not inspect.isclass(value) and not inspect.isfunction(value):
        yield from _constant(package, name)
        return
    home = next((other for other in PACKAGES if other != package and _exports(other, value)), None)
    if home is not None and package != "runner":
        yield f"`{home}.{name}`, see there."
        return
    doc = _parsed(value)
    if inspect.isfunction(value):
        yield from _callable(name, value, doc, "async def " if inspect.iscoroutinefunction(value) else "")
    else:
        yield from _class(name, value, doc)


def _exports(package: str, value: Any) -> bool:
    module = importlib.import_module(package)
    return any(getattr(module, name) is value for name in module.__all__)


def _constant(package: str, name: str) -> Iterator[str]:
    """A name that is no class and no function: what is assigned to it, and the string below."""
    body = ast.parse(inspect.getsource(importlib.import_module(_home(package, name)))).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id == name:
                yield from ("```text", f"{name} = {ast.unparse(node.value)}", "```", _string(after))


def _home(package: str, name: str) -> str:
    """The module that a package takes a name from."""
    tree = ast.parse(inspect.getsource(importlib.import_module(package)))
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module)
    return next(str(node.module) for node in imports if name in (alias.name for alias in node.names))


def _string(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return inspect.cleandoc(node.value.value)
    return ""


# --- classes and functions


def _class(name: str, value: type, doc: Docstring) -> Iterator[str]:
    bases = [base.__name__ for base in value.__bases__ if base.__name__ in importlib.import_module("runner").__all__]
    parameters = [param for param in doc.params if param.args[0] == "param"]
    signature = _signature(value) if parameters else ""
    yield from _fenced(f"class {name}", signature, f" ({', '.join(bases)})" if bases and not signature else "")
    yield from _text(doc)
    yield from _listed(value, parameters)
    attributes = [param for param in doc.params if param.args[0] == "attribute"]
    if attributes:
        yield from ("", "Attributes:")
        yield from _listed(value, attributes)
    yield from _endings(doc)
    if issubclass(value, enum.Enum):
        yield from _members_of(value)
    for member, function in _methods(value):
        yield from _method(name, member, function)


def _methods(value: type) -> Iterator[tuple[str, Any]]:
    """Its public methods and properties with a docstring, those of bases that are not public themselves included."""
    public = importlib.import_module("runner").__all__
    seen = set(UNSAID.get(value.__name__, ()))
    for base in value.__mro__:
        if not base.__module__.startswith("runner") or (base is not value and base.__name__ in public):
            continue
        for name, member in vars(base).items():
            inner = _function(member)
            if not name.startswith("_") and name not in seen and inner is not None and inner.__doc__:
                seen.add(name)
                yield name, member


def _function(member: Any) -> Any:
    if isinstance(member, property):
        return member.fget
    if isinstance(member, classmethod | staticmethod):
        return member.__func__
    if isinstance(member, functools.cached_property):
        return member.func
    return member if inspect.isfunction(member) else None


def _method(owner: str, name: str, member: Any) -> Iterator[str]:
    function = _function(member)
    of_class = isinstance(member, classmethod | staticmethod)
    where = owner if of_class else re.sub(r"(?<=[a-z])(?=[A-Z])", "_", owner).lower()
    doc = _parsed(function)
    if isinstance(member, property | functools.cached_property):
        kind = _short(function.__annotations__.get("return", ""))
        text = " ".join(_paragraphs(doc))
        yield from ("", f"**`{where}.{name}`** `{kind}`: {text}")
        return
    context = hasattr(function, "__wrapped__")
    kind = ("async with " if inspect.isasyncgenfunction(function.__wrapped__) else "with ") if context else ""
    yield from ("", f"**`{kind or _awaited(function)}{where}.{name}{_signature(function, bound=True)}`**")
    yield from ("", *_text(doc))
    yield from _listed(function, doc.params)
    yield from _endings(doc)


def _awaited(function: Any) -> str:
    return "await " if inspect.iscoroutinefunction(function) else ""


def _callable(name: str, value: Any, doc: Docstring, prefix: str) -> Iterator[str]:
    yield from _fenced(f"{prefix}{name}", _signature(value))
    yield from _text(doc)
    yield from _listed(value, doc.params)
    yield from _endings(doc)


# --- pieces


def _parsed(value: Any) -> Docstring:
    return docstring_parser.parse(inspect.getdoc(value) or "", style=DocstringStyle.GOOGLE)


def _fenced(head: str, signature: str, tail: str = "") -> Iterator[str]:
    line = f"{head}{signature}{tail}"
    if len(line) > WIDTH and signature:
        inside, _, result = signature[1:].rpartition(")")
        arguments = "".join(f"    {argument},\n" for argument in _split(inside))
        line = f"{head}(\n{arguments}){result}"
    yield from ("```text", line, "```")


def _split(arguments: str) -> list[str]:
    """Arguments apart, those of a type's brackets left together."""
    parts, depth = [""], 0
    for character in arguments:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _signature(value: Any, *, bound: bool = False) -> str:
    signature = inspect.signature(value)
    parameters = [parameter for name, parameter in signature.parameters.items() if name != "self" or not bound]
    if bound and parameters and parameters[0].name == "cls":
        parameters = parameters[1:]
    return _short(str(signature.replace(parameters=parameters)))


def _short(text: Any) -> str:
    """As it stands in the source; and nobody needs to know that a method returns None."""
    text = re.sub(r"(?<=: )'([^']*)'|(?<=-> )'([^']*)'", r"\1\2", str(text))  # annotations are strings
    text = re.sub(r"ForwardRef\('([^']*)'[^)]*\)", r"\1", text)
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)
    return re.sub(r"<function [^<]*(<lambda>)? at 0x\w+>", "...", text).removesuffix(" -> None")


def _paragraphs(doc: Docstring) -> list[str]:
    # The parser takes the indentation of a block of code that comes first.
    text = re.sub(r"\A(\S.*)(?=\n {8}\S)", r"    \1", doc.long_description or "")
    return [part for part in (doc.short_description, text) if part]


def _text(doc: Docstring) -> Iterator[str]:
    yield "\n\n".join(_paragraphs(doc))


def _listed(value: Any, described: list[Any]) -> Iterator[str]:
    if described:
        yield ""
    types = _types(value) if inspect.isclass(value) else {}
    for one in described:
        name = one.arg_name
        kind = f" `{types[name]}`" if name in types and one.args[0] == "attribute" else ""
        yield f"- `{name}`{kind}: {' '.join((one.description or '').split())}"


def _types(value: type) -> dict[str, str]:
    types: dict[str, str] = {}
    for base in reversed(value.__mro__):
        types |= {name: _short(kind) for name, kind in vars(base).get("__annotations__", {}).items()}
        types |= {
            name: _short(_function(member).__annotations__.get("return", ""))
            for name, member in vars(base).items()
            if isinstance(member, property)
        }
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.default not in (dataclasses.MISSING, UNSET):
                types[field.name] += f" = {_plain(field.default)}"
    return types


def _plain(value: Any) -> str:
    return repr(value.value) if isinstance(value, enum.Enum) else repr(value)


def _endings(doc: Docstring) -> Iterator[str]:
    if doc.returns and doc.returns.description:
        yield from ("", f"Returns: {' '.join(doc.returns.description.split())}")
    if doc.raises:
        yield from ("", "Raises:", "")
        for one in doc.raises:
            yield f"- `{one.type_name}`: {' '.join((one.description or '').split())}"


def _members_of(value: type[enum.Enum]) -> Iterator[str]:
    """The values, with what the source says of each beside it."""
    yield ""
    source = inspect.getsource(value)
    for member in value:
        said = re.search(rf"^    {member.name} = [^#\n]*#\s*(.*)$", source, flags=re.MULTILINE)
        yield f"- `{member.value}`" + (f": {said[1]}" if said else "")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE}: {len(page().splitlines())} lines")
