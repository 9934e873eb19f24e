"""Artefacts that an author attaches to an episode: texts, JSON, images and files, limited in size."""

from __future__ import annotations

import enum
import io
import mimetypes
import os
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from runner.errors import BadOption

__all__ = [
    "MAX_ATTACHED_BYTES",
    "MAX_ATTACHMENTS",
    "MAX_ATTACHMENT_BYTES",
    "Attachment",
    "AttachmentKind",
    "image_type",
    "make_attachment",
]

MAX_ATTACHMENT_BYTES: Final = 8 * 2**20
MAX_ATTACHED_BYTES: Final = 32 * 2**20
"""Maximum size of all attachments of an episode together."""
MAX_ATTACHMENTS: Final = 1_000
MAX_NAME_CHARS: Final = 200


class AttachmentKind(enum.StrEnum):
    """The form of an attachment's content."""

    TEXT = "text"
    """Text in UTF-8; unpaired surrogates are kept."""
    JSON = "json"
    """A JSON document in UTF-8."""
    IMAGE = "image"
    """PNG, JPEG, GIF or WebP."""
    FILE = "file"
    """Other bytes."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """An artefact that an author attached to an episode for readers. It is not used in training."""

    name: str
    """The name for readers."""
    kind: AttachmentKind
    """The kind of the content."""
    media_type: str
    """The type of the data, such as `image/png`."""
    turn: int
    """Number of turns of the agent `main` before the attachment: 0 if it was attached before the first turn."""
    data: bytes
    """The content; text and JSON are encoded in UTF-8."""

    @property
    def text(self) -> str:
        """The content of a text or of JSON; for other kinds, the media type and the size."""
        if self.kind in (AttachmentKind.TEXT, AttachmentKind.JSON):
            return self.data.decode("utf-8", "surrogatepass")
        return f"{self.media_type}, {len(self.data):,} bytes"

    def __repr__(self) -> str:
        return f"<Attachment {self.name!r}: {self.media_type}, {len(self.data)} bytes>"


_SIGNATURES: Final = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)


def image_type(data: bytes) -> str | None:
    """Return the media type of an image by its first bytes; None if it is not a PNG, JPEG, GIF or WebP image."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for signature, kind in _SIGNATURES if data.startswith(signature)), None)


def make_attachment(name: str, turn: int, **content: Any) -> Attachment:
    """Return an attachment with one content.

    Args:
        name: its name for readers.
        turn: the number of turns so far.
        content: `text`, `json`, `image` or `file`, by name; None stands for a content that was not given.

    Raises:
        BadOption: the name is invalid, there is not exactly one content, or the content has a wrong type, is too large
            or cannot be read.
    """
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise BadOption(f"attach({name!r:.60}): give a name of 1 to {MAX_NAME_CHARS} characters.")
    given = {kind: value for kind, value in content.items() if value is not None}
    if len(given) != 1:
        raise BadOption(f"attach({name!r:.60}): give one of text=, json=, image= and file=, got {len(given)}.")
    ((kind, value),) = given.items()
    where = f"attach({name!r:.60}, {kind}={reprlib.repr(value):.60})"
    media_type, data = _READERS[AttachmentKind(kind)](value, where)
    if len(data) > MAX_ATTACHMENT_BYTES:
        raise BadOption(
            f"{where}: {len(data):,} bytes; at most {MAX_ATTACHMENT_BYTES:,} are kept. Attach a part of it."
        )
    return Attachment(name, AttachmentKind(kind), media_type, turn, data)


def _text(value: Any, where: str) -> tuple[str, bytes]:
    if not isinstance(value, str):
        raise BadOption(f"{where}: give text as a str, got {type(value).__name__}.")
    return "text/plain", value.encode("utf-8", "surrogatepass")


def _json(value: Any, where: str) -> tuple[str, bytes]:
    try:
        return "application/json", orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise BadOption(
            f"{where}: the value is not JSON ({error}): give dicts, lists, strings, numbers, booleans or None."
        ) from error


def _image(value: Any, where: str) -> tuple[str, bytes]:
    save = getattr(value, "save", None)
    if callable(save):  # an image object of Pillow
        buffer = io.BytesIO()
        save(buffer, format="PNG")
        value = buffer.getvalue()
    data = _bytes(value, where)
    kind = image_type(data)
    if kind is None:
        raise BadOption(f"{where}: the data is not a PNG, JPEG, GIF or WebP image; give file= for other data.")
    return kind, data


def _file(value: Any, where: str) -> tuple[str, bytes]:
    guessed = mimetypes.guess_type(value)[0] if isinstance(value, str | Path) else None
    return guessed or "application/octet-stream", _bytes(value, where)


def _bytes(value: Any, where: str) -> bytes:
    """Return the given bytes, or the bytes of the file at a path. A file that is too large is read only in part."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if not isinstance(value, str | os.PathLike):
        raise BadOption(f"{where}: give bytes or a path, got {type(value).__name__}.")
    try:
        with Path(value).open("rb") as file:
            return file.read(MAX_ATTACHMENT_BYTES + 1)
    except (OSError, ValueError) as error:
        raise BadOption(f"{where}: the file cannot be read ({error}): give a readable path, or the bytes.") from error


_READERS: Final = {
    AttachmentKind.TEXT: _text,
    AttachmentKind.JSON: _json,
    AttachmentKind.IMAGE: _image,
    AttachmentKind.FILE: _file,
}
