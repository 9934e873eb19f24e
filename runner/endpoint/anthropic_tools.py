"""Schemas of the client-side tools that Anthropic's API names by type: shell, editor and memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["known_function"]

_TYPE: Final = re.compile(r"(bash|text_editor|memory)_(\d{8})")


def known_function(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the function for a tool that is given only by its type; None for an unknown type.

    The descriptions are our own, since Anthropic does not publish the descriptions that its models receive.
    """
    kind = tool.get("type")
    found = _TYPE.fullmatch(kind) if isinstance(kind, str) else None
    if found is None:
        return None
    family, version = found[1], int(found[2])
    name, description, parameters = {"bash": _bash, "text_editor": _text_editor, "memory": _memory}[family](version)
    given = tool.get("name")
    if isinstance(given, str) and given:
        name = given
    most = tool.get("max_characters")
    if family == "text_editor" and isinstance(most, int):
        description += f" It shows at most {most} characters of a file."
    return {"name": name, "description": description, "parameters": parameters}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def _string(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _integer(description: str) -> dict[str, Any]:
    return {"type": "integer", "description": description}


def _range(description: str) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "integer"}, "description": description}


def _commands(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names), "description": "What to do."}


def _bash(_: int) -> tuple[str, str, dict[str, Any]]:
    # No field is required, since a restart has no command.
    parameters = _object(
        [],
        command=_string("The command to run; needed unless the shell is restarted."),
        restart={"type": "boolean", "description": "Whether to restart the shell in place of running a command."},
    )
    return "bash", "Run a command in a bash shell that keeps its state from one call to the next.", parameters


def _text_editor(version: int) -> tuple[str, str, dict[str, Any]]:
    commands = ["view", "create", "str_replace", "insert"]
    if version < 20250429:
        commands.append("undo_edit")
    inserted = "new_str" if version < 20250429 else "insert_text"
    new = "The text that replaces old_str" + (" or is inserted." if inserted == "new_str" else ".")
    properties: dict[str, Any] = {
        "command": _commands(*commands),
        "path": _string("The absolute path of the file or directory."),
        "file_text": _string("The content of a file that is created."),
        "old_str": _string("The text to be replaced, which stands once in the file."),
        "new_str": _string(new),
        "insert_line": _integer("The number of the line after which to insert; 0 for the beginning."),
    }
    if inserted == "insert_text":
        properties["insert_text"] = _string("The text to be inserted.")
    properties["view_range"] = _range("The first and the last line to view; -1 as the last for the end of the file.")
    name = "str_replace_editor" if version < 20250429 else "str_replace_based_edit_tool"
    return name, "View, create and edit files.", _object(["command", "path"], **properties)


def _memory(_: int) -> tuple[str, str, dict[str, Any]]:
    parameters = _object(
        ["command"],
        command=_commands("view", "create", "str_replace", "insert", "delete", "rename"),
        path=_string("The path of the file or directory, which begins with /memories; not for a rename."),
        view_range=_range("The first and the last line to view."),
        file_text=_string("The content of a file that is created."),
        old_str=_string("The text to be replaced."),
        new_str=_string("The text that replaces it."),
        insert_line=_integer("The number of the line at which to insert."),
        insert_text=_string("The text to be inserted."),
        old_path=_string("The path of what is renamed."),
        new_path=_string("Its new path."),
    )
    return "memory", "Read and write files under /memories that last from one task to the next.", parameters
