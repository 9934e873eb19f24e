"""Reader of added tokens from the files next to tokenizer.json in a model's folder, with the rules of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import tokenizers

__all__ = ["VocabularyFiles", "read_vocabulary_files"]

Named: TypeAlias = str | tokenizers.AddedToken
"""A token with its flags, or the name of a special token."""

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class VocabularyFiles:
    """Tokens listed in the files next to a model's tokenizer.json, which may lack some of these tokens."""

    listed: Mapping[int, tokenizers.AddedToken] = field(default_factory=dict)
    """The tokens by id.

    They come from added_tokens_decoder of tokenizer_config.json, or otherwise from added_tokens.json.
    """
    named: Mapping[str, Named] = field(default_factory=dict)
    """The special tokens by the names that a template uses, such as `bos_token`."""
    extra: Sequence[Named] = ()
    """The special tokens that have no such name."""
    legacy: bool = True
    """True if tokenizer_config.json lists no tokens.

    Then the tokens of tokenizer.json are used too, and replace `listed` tokens with the same ids.
    """

    @property
    def variables(self) -> dict[str, str]:
        """The special tokens that a template reads by name."""
        return {name: _content(token) for name, token in self.named.items()}

    def tokens(self, tokenizer: tokenizers.Tokenizer) -> list[tokenizers.AddedToken]:
        """Return the tokens to add to `tokenizer`, in order. Adding a token that it already has changes the flags."""
        own = tokenizer.get_added_tokens_decoder()
        listed = {**self.listed, **own} if self.legacy else self.listed
        tokens = [token for _, token in sorted(listed.items())]
        names = {token.content for token in (*own.values(), *tokens)}
        further = {_content(token): token for token in (*self.named.values(), *self.extra)}
        special = {*self.variables.values()}
        known = [_special(token) if token.content in special else token for token in tokens]
        return [*known, *(_special(token) for name, token in further.items() if name not in names)]


def read_vocabulary_files(folder: Path) -> VocabularyFiles:
    """Read tokenizer_config.json, special_tokens_map.json and added_tokens.json of `folder`; any may be missing.

    The last two files are read only if tokenizer_config.json has no `added_tokens_decoder`.

    Raises:
        ValueError: a file is not JSON, or lists a token without content.
    """
    settings = _read(folder / "tokenizer_config.json")
    if "added_tokens_decoder" in settings:
        listed = {int(token_id): _token(token) for token_id, token in settings["added_tokens_decoder"].items()}
        return VocabularyFiles(listed, _named(settings), _extra(settings), legacy=False)
    further = {name: _as_special(value) for name, value in _read(folder / "special_tokens_map.json").items()}
    extra = {"extra_special_tokens": _both_extra(settings, further), "additional_special_tokens": None}
    settings = {**settings, **further, **extra}
    special = {*map(_content, _extra(settings)), *(_content(t) for n, t in _named(settings).items() if n in NAMES)}
    listed = {
        token_id: tokenizers.AddedToken(name, special=name in special, normalized=name not in special)
        for name, token_id in _read(folder / "added_tokens.json").items()
    }
    return VocabularyFiles(listed, _named(settings), _extra(settings) or _extra(further))


def _both_extra(settings: Mapping[str, Any], further: Mapping[str, Any]) -> Any:
    """Return the extra special tokens of tokenizer_config.json and special_tokens_map.json.

    The result is a dict by name if one of the files names tokens, and otherwise a list.
    """
    given = [each.get("extra_special_tokens") for each in (settings, further)]
    named = {name: token for each in given if isinstance(each, dict) for name, token in each.items()}
    own = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
    return named or [token for each in (own, given[1]) if isinstance(each, list) for token in each]


def _named(settings: Mapping[str, Any]) -> dict[str, Named]:
    """Return the special tokens by name: bos_token and similar, then the model's own names, such as `image_token`."""
    own = [name for name in settings if name.endswith("_token") and name not in NAMES]
    values = {name: settings.get(name) for name in (*NAMES, *own)}
    further = settings.get("extra_special_tokens")
    values |= further if isinstance(further, dict) else {}
    return {name: token for name, value in values.items() if (token := _as_named(value)) is not None}


def _extra(settings: Mapping[str, Any]) -> list[Named]:
    listed = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
    values = listed if isinstance(listed, list) else ()
    return [token for value in values if (token := _as_named(value)) is not None]


def _as_named(value: Any) -> Named | None:
    if isinstance(value, str):
        return value
    return _token(value) if isinstance(value, dict) and "content" in value else None


def _token(value: Any) -> tokenizers.AddedToken:
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise ValueError(f"{value!r:.80} is listed as a token, but has no content")
    return tokenizers.AddedToken(value["content"], **{flag: bool(value[flag]) for flag in _FLAGS if flag in value})


def _as_special(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_special(each) for each in value]
    return {**value, "special": True} if isinstance(value, dict) and "content" in value else value


def _special(token: Named) -> tokenizers.AddedToken:
    """Return a token with the flag `special`; a name becomes a token."""
    if isinstance(token, str):
        return tokenizers.AddedToken(token, special=True)
    flags = {flag: getattr(token, flag) for flag in _FLAGS}
    return tokenizers.AddedToken(token.content, **{**flags, "special": True})


def _content(token: Named) -> str:
    return token if isinstance(token, str) else str(token.content)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}
