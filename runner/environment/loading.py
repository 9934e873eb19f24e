"""Loading of environments by name (bundled, `module:Class`, `path.py:Class`), and of their settings from text."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

from runner.concurrency.user_code import describe_error
from runner.environment.environment import Environment
from runner.errors import BadEnvironment, BadOption, DeltarunnerError

__all__ = [
    "BundledEnvironment",
    "bundled_environments",
    "construct",
    "construct_named",
    "find_environment",
    "json_or_text",
    "settings_in_name",
    "short_name",
]

ENTRY_POINT_GROUP = "deltarunner.environments"


@dataclass(frozen=True, slots=True)
class BundledEnvironment:
    """An environment of an installed package."""

    name: str

    description: str
    """First line of the class's docstring, or the error of its import."""

    settings: str = ""

    usable: bool = True
    """False if the environment cannot be imported."""

    missing: str = ""
    """Command that installs the package that the environment needs; "" if nothing is missing."""


def bundled_environments() -> list[BundledEnvironment]:
    """Return the environments of installed packages (entry-point group `deltarunner.environments`), sorted by name."""
    return [_described(entry) for entry in sorted(_entries().values(), key=lambda entry: entry.name)]


def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}


def _described(entry: EntryPoint) -> BundledEnvironment:
    try:
        cls = _load_entry(entry)
    except DeltarunnerError as error:
        return BundledEnvironment(entry.name, str(error), usable=False)
    lines = (inspect.getdoc(cls) or "").strip().splitlines()
    needed = cls.package
    missing = needed is not None and importlib.util.find_spec(needed[0]) is None
    command = f"pip install 'deltarunner[{needed[1]}]'" if needed is not None and missing else ""
    return BundledEnvironment(entry.name, lines[0] if lines else "", _settings(cls), missing=command)


def find_environment(name: str) -> type[Environment[Any]]:
    """Return the class of an environment, given a bundled name, `module:Class`, or `path.py:Class`.

    A bundled name may be followed by a colon and a setting, which `settings_in_name` returns: `harbor:FOLDER`.
    `:Class` may be omitted if the module defines only one environment.

    Raises:
        BadEnvironment: no environment has this name, the name fits several, or its module cannot be loaded.
    """
    where, _, cls = name.partition(":")
    if where.endswith(".py"):
        return _class_in(_module_of_file(Path(where)), cls, name)
    entries = _entries()
    if where in entries:
        found = _load_entry(entries[where])
        if not cls or found.named_setting:
            return found
    if not cls and "." not in where:
        close = get_close_matches(where, entries, 1)
        meant = f" Did you mean {close[0]!r}?" if close else ""
        raise BadEnvironment(
            f"Unknown environment {name!r}.{meant} Bundled: {', '.join(sorted(entries)) or 'none'}. "
            f"Give your own as path.py:Class or module:Class."
        )
    # The current folder is searched, as with `python -m`. A console script does not search it by default.
    _look_in(Path.cwd())
    return _class_in(_imported(where, name), cls, name)


def short_name(name: str) -> str:
    """Return the environment's name for run files: a bundled name, or the name of the class, the file or the module.

    For a name with a setting, it is the last part of the setting: "tasks" for `harbor:data/tasks`.
    """
    where, _, cls = name.partition(":")
    return Path(cls).name or (Path(where).stem if where.endswith(".py") else where.rpartition(".")[2])


def settings_in_name(name: str) -> dict[str, str]:
    """Return the setting in a name: {"folder": "tasks/"} for `harbor:tasks/`; {} for a name without a setting."""
    where, _, value = name.partition(":")
    entries = _entries()
    setting = _load_entry(entries[where]).named_setting if value and where in entries else ""
    return {setting: value} if setting else {}


def _load_entry(entry: EntryPoint) -> type[Environment[Any]]:
    # The current folder is not searched, since a folder envs/ of the author would hide the bundled package envs.
    return _class_in(_imported(entry.module, entry.name), entry.attr, entry.name)


def _imported(module: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            raise BadEnvironment(
                f"Environment {name!r}: the module {error.name!r} is neither installed nor in this folder: "
                "install it, or correct the name."
            ) from None
        raise _unloadable(name, error) from error
    except (Exception, SystemExit) as error:
        raise _unloadable(name, error) from error


def _module_of_file(path: Path) -> ModuleType:
    """Load a file as a module. A file inside a package gets its dotted name, so that its imports work."""
    if not path.is_file():
        raise BadEnvironment(f"{str(path)!r} is not an existing file; give the path of a Python file, path.py:Class.")
    path = path.resolve()
    parts, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    _look_in(folder)
    name = ".".join(parts)
    module = sys.modules.get(name)
    if module is not None and Path(module.__file__ or "").resolve() == path:
        return module
    if module is not None:  # another loaded module has the name of this file
        name = f"{name}_environment"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _unloadable(str(path), error) from error
    return module


def _look_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _unloadable(name: str, error: BaseException) -> BadEnvironment:
    if isinstance(error, DeltarunnerError):
        return BadEnvironment(f"{name} cannot be loaded: {error}")
    return BadEnvironment(f"{name} cannot be loaded: {describe_error(error)}")


def _class_in(module: ModuleType, attribute: str, name: str) -> type[Environment[Any]]:
    own = {key: value for key, value in vars(module).items() if _is_environment(value)}
    if attribute:
        found = getattr(module, attribute, None)
        if _is_environment(found):
            return found
        what = "is not a subclass of runner.Environment" if found is not None else "does not exist"
        raise BadEnvironment(f"{name}: {attribute} {what}; {_has(module, own)}.")
    defined = [value for value in own.values() if value.__module__ == module.__name__]
    if len(defined) == 1:
        return defined[0]
    raise BadEnvironment(f"{name}: give the class as well, {name}:Class; {_has(module, own)}.")


def _is_environment(value: object) -> TypeGuard[type[Environment[Any]]]:
    return isinstance(value, type) and issubclass(value, Environment) and value is not Environment


def _has(module: ModuleType, own: Mapping[str, type]) -> str:
    return f"{module.__name__} has {', '.join(own)}" if own else f"{module.__name__} has no environment"


# --- settings


def construct(cls: type[Environment[Any]], settings: Mapping[str, str]) -> Environment[Any]:
    """Construct an environment from settings as text, each converted to the type of its parameter.

    Raises:
        BadOption: a name is unknown, a value does not fit, or a required value is missing.
        BadEnvironment: the constructor raised.
    """
    parameters = {p.name: p for p in _parameters(cls)}
    rest = next((parameters.pop(p.name) for p in _parameters(cls) if p.kind is p.VAR_KEYWORD), None)
    values = {}
    for name, text in settings.items():
        parameter = parameters.get(name, rest)
        if parameter is None:
            raise BadOption(_unknown_setting(cls, name, parameters))
        values[name] = _read(cls, name, parameter, text)
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in values]
    if missing:
        given = " ".join(f"--set {name}=VALUE" for name in missing)
        raise BadOption(f"{cls.__name__} needs {', '.join(missing)}: give {given}. Its settings: {_settings(cls)}.")
    try:
        return cls(**values)
    except DeltarunnerError:
        raise
    except (Exception, SystemExit) as error:
        call = ", ".join(f"{name}={value!r}" for name, value in values.items())
        raise BadEnvironment(f"{cls.__name__}({call}): {describe_error(error)}") from error


def construct_named(name: str, settings: Mapping[str, str]) -> Environment[Any]:
    """Find and construct an environment; its name may have a setting, as in `harbor:FOLDER`."""
    return construct(find_environment(name), {**settings_in_name(name), **settings})


def _parameters(cls: type[Environment[Any]]) -> Iterator[inspect.Parameter]:
    try:
        hints = typing.get_type_hints(cls.__init__)
    except Exception:  # evaluating annotations may raise any exception
        hints = {}
    signature = inspect.signature(cls.__init__)
    for name, parameter in list(signature.parameters.items())[1:]:
        if parameter.kind is not parameter.VAR_POSITIONAL:
            yield parameter.replace(annotation=hints.get(name, parameter.empty))


def _settings(cls: type[Environment[Any]]) -> str:
    shown = [str(parameter.replace(annotation=parameter.empty)) for parameter in _parameters(cls)]
    return f"{cls.__name__}({', '.join(shown)})"


def _unknown_setting(cls: type[Environment[Any]], name: str, parameters: Mapping[str, inspect.Parameter]) -> str:
    close = get_close_matches(name, parameters, 1)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    return f"--set {name}: {cls.__name__} has no such setting.{meant} Its settings: {_settings(cls)}."


def _read(cls: type[Environment[Any]], name: str, parameter: inspect.Parameter, text: str) -> Any:
    from pydantic import PydanticUserError, TypeAdapter, ValidationError

    hint = parameter.annotation
    if hint is parameter.empty and parameter.default not in (parameter.empty, None):
        hint = type(parameter.default)
    if hint is str:
        return text
    try:
        adapter = TypeAdapter(Any if hint is parameter.empty else hint)
    except PydanticUserError:  # a type that pydantic does not support
        if str in typing.get_args(hint):
            return text
        raise BadOption(
            f"--set {name}: {cls.__name__} takes {hint!r}, which cannot be given as text: construct it in Python."
        ) from None
    if hint is parameter.empty or hint is Any:
        return json_or_text(text)
    try:
        return adapter.validate_strings(text)
    except ValidationError as error:
        with contextlib.suppress(ValidationError):  # lists and dicts are JSON
            return adapter.validate_json(text)
        kind = getattr(hint, "__name__", str(hint)) if not typing.get_args(hint) else str(hint)
        raise BadOption(
            f"--set {name}={text}: {cls.__name__} takes {kind} ({error.errors()[0]['msg'].lower()})."
        ) from None


def json_or_text(text: str) -> Any:
    """Return the value of a JSON text, or the text itself if it is not JSON."""
    import orjson

    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
