"""Protection of secrets in run files: values under secret names are stored as hashes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["hide_secrets", "is_secret_name"]

_SECRETS: Final = frozenset(
    {"apikey", "credential", "credentials", "key", "keys", "passphrase", "password", "passwords", "passwd", "secret"}
    | {"secrets", "token"}
)
# Tokens of a vocabulary are not secrets: eos_token, image_token, stop_token.
_VOCABULARY: Final = frozenset(
    {
        "audio",
        "begin",
        "bos",
        "cls",
        "end",
        "eos",
        "image",
        "mask",
        "pad",
        "sep",
        "start",
        "stop",
        "tool",
        "unk",
        "video",
    }
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def is_secret_name(name: str) -> bool:
    """Return True for the name of a secret: `api_key`, `hfToken`, `PASSWORD`; not `max_tokens`, `eos_token`."""
    words = [word.lower() for word in _WORD.findall(name)]
    for before, word in zip(["", *words], words, strict=False):
        if word in _SECRETS and not (word == "token" and before in _VOCABULARY):
            return True
    return False


def hide_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with the text under every secret name replaced by a hash, at any depth.

    Only text is hidden: numbers and flags (`token_ids`, `use_key=True`) are not secrets.
    """
    # A secret is replaced by a hash instead of a fixed word, so that another secret counts as another configuration.
    return {name: _hidden(value) if is_secret_name(name) else _searched(value) for name, value in values.items()}


def _searched(value: Any) -> Any:
    if isinstance(value, Mapping):
        return hide_secrets(value)
    return [_searched(item) for item in value] if isinstance(value, list | tuple) else value


def _hidden(value: Any) -> Any:
    if isinstance(value, str) and value:
        return f"sha256:{hashlib.sha256(value.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
    if isinstance(value, Mapping):
        return {name: _hidden(inner) for name, inner in value.items()}
    return [_hidden(item) for item in value] if isinstance(value, list | tuple) else value
