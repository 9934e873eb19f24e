"""Tokenizers: text to ids and back."""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from runner.errors import BadModel
from runner.tokens.content_encoding import (
    AddedTokens,
    Content,
    check_content,
    learnt_words,
    model_without_control_tokens,
    written,
)
from runner.tokens.token_bytes import Words, byte_pieces, words
from runner.tokens.vocabulary_files import VocabularyFiles, read_vocabulary_files

__all__ = [
    "Content",
    "Tokenizer",
    "VocabularyTokenizer",
    "check_round_trip",
    "for_template",
    "load_tokenizer",
    "without_surrogates",
]

MIN_SHARED_CHARS = 256
"""Minimum length of a part of a text that is cached: a shorter part is encoded faster than it is looked up."""

MAX_SHARED_CHARS = 65_536
"""Maximum length of a part of a text that is cached, since the ids of longer parts take much memory."""

MAX_SHARED_PARTS = 64
"""Maximum number of cached parts of texts for a vocabulary."""


class Tokenizer(Protocol):
    """The interface of a vocabulary."""

    eos_id: int | None
    """The id that ends a turn according to the vocabulary; None if the vocabulary has no such id."""
    special_ids: frozenset[int]
    """The ids of special tokens, such as "<|im_end|>". The vocabulary never makes them by merging other tokens."""
    control_ids: frozenset[int]
    """The special ids, and the ids of tokens that were only added, such as "<tool_call>" in some vocabularies.

    Content is never encoded to one of these ids. They include a word that the model learnt, such as a run of spaces,
    "<table>" or "<unused42>" in Gemma's vocabulary, only if the template writes this word.
    """
    size: int
    """Number of ids, without padding rows of the model."""
    longest_token: int
    """Upper bound of the number of bytes of text for one id. A text of n bytes has at least n / longest_token ids."""
    fingerprint: str
    """A hash of the vocabulary and its rules."""
    pieces: Sequence[bytes] | None
    """The bytes of each id, shape [size], if decoding only joins them (byte-level vocabularies).

    None if the text of an id depends on its neighbours.
    """
    words: Words | None
    """The words and single bytes of the ids, if decoding joins them (SentencePiece); otherwise None."""

    def encode(self, text: str, content: Content = ()) -> list[int]:
        """Return the ids of `text`. Control tokens in the text become control ids; no id is added, such as a BOS.

        Args:
            text: the text to encode.
            content: sorted, disjoint spans of `text` from users and tools. Control text that overlaps a span is encoded
                as ordinary text. Without such control text, spans do not change the ids.

        Raises:
            ValueError: the spans are not sorted, not disjoint, or not within the text.
        """
        ...

    def holds_control(self, text: str) -> bool:
        """Return True if `text` as content could form a control token, alone or with its neighbours.

        Any other text has the same ids inside and outside of content.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, control tokens included; ids past the vocabulary decode to ""."""
        ...

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its exact name, such as "<|im_end|>"; None if there is no such token."""
        ...

    def normalize(self, text: str) -> str:
        """Return decode(encode(`text`)): the text as changed by the vocabulary's normaliser, such as NFC."""
        ...


class VocabularyTokenizer:
    """A `Tokenizer` from the text of a tokenizer.json.

    Args:
        text: the file's content.
        eos_token: the name of the token that ends a turn; None if it is not known.
        files: the tokens that are listed in the other files of the model's folder; None to add no tokens.

    Raises:
        ValueError: the text is not a tokenizer.
    """

    def __init__(self, text: str, *, eos_token: str | None = None, files: VocabularyFiles | None = None) -> None:
        try:
            tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing more precise
            raise ValueError(str(error)) from error
        # A tokenizer.json may request truncation or padding, as for training.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        settings = json.loads(text)
        changed = _add(tokenizer, files) if files is not None else ()
        self.fingerprint = hashlib.sha256("\0".join((text, *changed)).encode()).hexdigest()[:16]
        self._normalizer = _visible_normalizer(settings.get("normalizer"))
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values(), default=-1) + 1
        self.pieces: Sequence[bytes] | None = byte_pieces(settings.get("decoder"), vocabulary, self.size)
        self.words = words(settings.get("decoder"), vocabulary, self.size) if self.pieces is None else None
        longest = max(map(len, self.pieces if self.pieces is not None else (name.encode() for name in vocabulary)))
        # A normaliser that composes characters makes a text up to three times shorter before the text becomes tokens.
        self.longest_token = longest * (1 if self._normalizer is None else 3)
        self._learnt = learnt_words(tokenizer, self.normalize)
        self._without_control = model_without_control_tokens(settings["model"], _other_names(tokenizer, self._learnt))
        self._by_template: dict[frozenset[str], VocabularyTokenizer] = {}
        self._use(tokenizer, eos_token)

    def _use(self, tokenizer: tokenizers.Tokenizer, eos_token: str | None) -> None:
        self._tokenizer = tokenizer
        self.eos_id: int | None = self.token_id(eos_token) if eos_token is not None else None
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added = AddedTokens(tokenizer, self._without_control, self.normalize, self._learnt)
        self.control_ids = self._added.control_ids
        self._split = _splitter(added.values())
        self._shared = lru_cache(MAX_SHARED_PARTS)(self._library_ids)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the cache, since a fleet cannot send a cache to its worker processes."""
        return {name: value for name, value in vars(self).items() if name != "_shared"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._shared = lru_cache(MAX_SHARED_PARTS)(self._library_ids)

    def for_template(self, text: Callable[[], str]) -> VocabularyTokenizer:
        """Return this vocabulary, in which words that a template writes are control tokens; `self` if it writes none.

        Args:
            text: returns the template's own text; not called if no added token is a word.
        """
        names = written(self._learnt, text(), self.normalize) if self._learnt else frozenset()
        if not names:
            return self
        if names not in self._by_template:
            other = copy.copy(self)
            other._learnt = self._learnt - names
            model = json.loads(self._tokenizer.to_str())["model"]
            other._without_control = model_without_control_tokens(model, _other_names(self._tokenizer, other._learnt))
            other._added = AddedTokens(self._tokenizer, other._without_control, self.normalize, other._learnt)
            other.control_ids = other._added.control_ids
            other._by_template = {}
            self._by_template[names] = other
        return self._by_template[names]

    def extended(self, special_tokens: Sequence[str], *, eos_token: str | None = None) -> VocabularyTokenizer:
        """Return this vocabulary with further special tokens after its last id; learnt tokens are shared, not copied.

        Args:
            special_tokens: the names of the tokens; a token that was added before is unchanged.
            eos_token: the token that ends a turn; None for this vocabulary's own token.

        Raises:
            ValueError: a name is an ordinary word of the vocabulary, `eos_token` is not one of its tokens, or there are
                gaps before the ids of its added tokens.
        """
        added = dict(sorted(self._tokenizer.get_added_tokens_decoder().items()))
        known = {token.content for token in added.values()}
        new = [name for name in dict.fromkeys(special_tokens) if name not in known]
        words = [name for name in new if self.token_id(name) is not None]
        if words:
            raise ValueError(
                f"{words[0]!r:.60} is an ordinary word of this vocabulary and cannot be a special token: "
                "give another name"
            )
        tokenizer = tokenizers.Tokenizer(self._tokenizer.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            setattr(tokenizer, part, getattr(self._tokenizer, part))
        further = [tokenizers.AddedToken(name, special=True, normalized=False) for name in new]
        # The library numbers added tokens in this order after the learnt tokens, so the old tokens come first.
        tokenizer.add_tokens([*added.values(), *further])
        return self._with(tokenizer, added, new, eos_token)

    def _with(
        self,
        tokenizer: tokenizers.Tokenizer,
        added: Mapping[int, tokenizers.AddedToken],
        new: Sequence[str],
        eos_token: str | None,
    ) -> VocabularyTokenizer:
        """Return a copy with another library tokenizer, which has the added tokens and then the new ones."""
        if any(tokenizer.token_to_id(token.content) != token_id for token_id, token in added.items()):
            raise ValueError(
                f"the added tokens of this vocabulary leave out ids below {max(added) + 1}, so {list(new)!r:.60} "
                "cannot be added: give no special tokens"
            )
        other = copy.copy(self)
        other._by_template = {}
        other.size = max([self.size, *(token_id + 1 for token_id in tokenizer.get_added_tokens_decoder())])
        if self.pieces is not None:
            other.pieces = [*self.pieces, *(name.encode() for name in new)]
        if self.words is not None:
            other.words = dataclasses.replace(self.words, texts=[*self.words.texts, *new])
        other.longest_token = max([self.longest_token, *(len(name.encode()) for name in new)])
        other.fingerprint = hashlib.sha256("\0".join((self.fingerprint, *new)).encode()).hexdigest()[:16]
        own = self._tokenizer.id_to_token(self.eos_id) if self.eos_id is not None else None
        other._use(tokenizer, eos_token or own)
        if eos_token is not None and other.eos_id is None:
            raise ValueError(
                f"eos_token={eos_token!r:.60} is not a token of this vocabulary: give one of its tokens, or add the "
                "token to special_tokens"
            )
        return other

    def encode(self, text: str, content: Content = ()) -> list[int]:
        check_content(text, content)
        if any(self.holds_control(text[start:stop]) for start, stop in content):
            return self._added.encode(without_surrogates(text), content)
        try:
            return self._encoded(text)
        except TypeError:  # lone surrogates cause this error; they are rare, so they are replaced only after it
            return self._encoded(without_surrogates(text))

    def _encoded(self, text: str) -> list[int]:
        """Return the ids of a text. Ids of long parts are cached, since prompts share system messages and tools."""
        if self._split is None or len(text) < MIN_SHARED_CHARS:
            return self._library_ids(text)
        ids: list[int] = []
        pending = ""
        for part in self._split(text):
            if MIN_SHARED_CHARS <= len(part) <= MAX_SHARED_CHARS:
                if pending:
                    ids += self._library_ids(pending)
                    pending = ""
                ids += self._shared(part)
            else:
                pending += part
        return ids + self._library_ids(pending) if pending else ids

    def _library_ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def holds_control(self, text: str) -> bool:
        return self._added.near(without_surrogates(text))

    def decode(self, ids: Sequence[int]) -> str:
        # Control tokens are part of the text, since callers search it for the end of a turn.
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def normalize(self, text: str) -> str:
        kept = without_surrogates(text)
        if self._normalizer is not None:
            kept = self._normalizer.normalize_str(kept)
        for old, new in self.words.rewritten if self.words is not None else ():
            kept = kept.replace(old, new)
        return kept


@dataclasses.dataclass(frozen=True, slots=True)
class _Splitter:
    """Callable that splits a text before control tokens. Unlike a closure, it can be sent to other processes."""

    names: frozenset[str]
    sizes: Mapping[str, Sequence[int]]
    """Lengths of the names, by their first one or two characters."""
    beginnings: re.Pattern[str]

    def __call__(self, text: str) -> list[str]:
        begins = [(match.start(), self.sizes[match[0]]) for match in self.beginnings.finditer(text)]
        cuts = [start for start, sized in begins if any(text[start : start + size] in self.names for size in sized)]
        return [text[start:stop] for start, stop in pairwise([0, *cuts, len(text)])]


def _splitter(added: Iterable[tokenizers.AddedToken]) -> _Splitter | None:
    """Return a function that splits a text before control tokens, so that its parts are encoded by themselves.

    The text is split only before tokens that the library always cuts out before it reads the adjacent text. Such a
    token is matched exactly, does not take white space, and neither is part of another token nor overlaps one. It
    begins with a sign, since the previous token may take white space, or may not be found if a letter follows. The
    result is None if the vocabulary has no such token.
    """
    plain = {token.content: _is_plain(token) for token in added}
    # Names are not compared in pairs, since some vocabularies have a thousand tokens.
    tails = {name[start:] for name, is_plain in plain.items() for start in range(is_plain, len(name))}
    insides = "\0".join(name[is_plain:] for name, is_plain in plain.items())
    names = frozenset(
        name
        for name, is_plain in plain.items()
        if is_plain and name not in insides and tails.isdisjoint(accumulate(name))
    )
    if not names:
        return None
    # Beginnings of two characters come first, since a beginning of one character may also begin them.
    beginnings = sorted({name[:2] for name in names}, key=len, reverse=True)
    sizes = {each: sorted({len(name) for name in names if each.startswith(name[:2])}) for each in beginnings}
    return _Splitter(names, sizes, re.compile("|".join(map(re.escape, beginnings))))


def _is_plain(token: tokenizers.AddedToken) -> bool:
    looks_around = token.normalized or token.lstrip or token.rstrip or token.single_word
    return not looks_around and re.match(r"[^\w\s]", token.content) is not None


def for_template(tokenizer: Tokenizer, text: Callable[[], str]) -> Tokenizer:
    """Return the vocabulary for one template, in which words that the template writes are control tokens.

    Args:
        tokenizer: the vocabulary; only a `VocabularyTokenizer` has such words.
        text: returns the template's own text.
    """
    return tokenizer.for_template(text) if isinstance(tokenizer, VocabularyTokenizer) else tokenizer


def load_tokenizer(folder: Path) -> VocabularyTokenizer:
    """Load the tokenizer of the model in `folder`: a new instance, which must stay in one thread.

    The tokenizer is read from tokenizer.json, with the tokens that the folder's other files add. No class of
    transformers is used, since classes that rebuild a tokenizer from the model's type change some vocabularies.

    Raises:
        BadModel: there is no usable tokenizer.json, or a text changes when it is encoded and decoded.
    """
    path = folder / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
        files = read_vocabulary_files(folder)
        tokenizer = VocabularyTokenizer(text, eos_token=files.variables.get("eos_token"), files=files)
    except (OSError, ValueError) as error:
        raise BadModel(
            f"no tokenizer can be read from {path}: {error}. "
            f"Save one there with AutoTokenizer.from_pretrained(...).save_pretrained({str(folder)!r})."
        ) from error
    check_round_trip(tokenizer, name=str(path))
    return tokenizer


def check_round_trip(tokenizer: Tokenizer, *, name: str = "the vocabulary") -> None:
    """Check that encoding and decoding do not change ordinary text of several scripts, with spaces and line breaks.

    Raises:
        BadModel: a text changes; the message has the text and the result.
    """
    for text in _ORDINARY:
        kept = tokenizer.decode(tokenizer.encode(text))
        if kept != tokenizer.normalize(text):
            raise BadModel(
                f"{name} changes text: {text!r} becomes {kept!r} after encoding and decoding. transformers may have "
                "rebuilt the tokenizer as a wrong type: restore the published tokenizer.json, or save one with "
                "PreTrainedTokenizerFast(tokenizer_file=...)."
            )


_ORDINARY = (
    "What is 12 + 345.6? It's 357.6, isn't it:  yes.",
    "one\ntwo\n\n  three\tfour",
    "def add(a, b):\n    return {'sum': a + b}  # \"x\" <= 10 && !y\n",
    "Ça va, größer, naïve, España, İstanbul",
    "Привет, мир. Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم.",  # noqa: RUF001  # letters of other scripts are meant
    "你好，世界。こんにちは世界。안녕하세요 세계. नमस्ते दुनिया. สวัสดี",  # noqa: RUF001  # likewise
)


def _add(tokenizer: tokenizers.Tokenizer, files: VocabularyFiles) -> Sequence[str]:
    """Add the tokens of the files beside tokenizer.json.

    Return all added tokens with their ids, or () if nothing has changed.
    """
    before = tokenizer.get_added_tokens_decoder()
    tokenizer.add_tokens(files.tokens(tokenizer))
    after = tokenizer.get_added_tokens_decoder()
    return () if after == before else [f"{token_id} {token!r}" for token_id, token in sorted(after.items())]


def _other_names(tokenizer: tokenizers.Tokenizer, words: frozenset[str]) -> list[str]:
    return [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.content not in words]


def without_surrogates(text: str) -> str:
    """Return `text` with U+FFFD for each lone surrogate, which has no id in any vocabulary."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


_SURROGATES = re.compile("[\ud800-\udfff]")


def _visible_normalizer(settings: Mapping[str, Any] | None) -> tokenizers.normalizers.Normalizer | None:
    """Return the part of a normaliser that decoding does not undo: writing spaces as "▁" is undone, NFC is not."""
    if settings is None:
        return None
    steps = settings["normalizers"] if settings["type"] == "Sequence" else [settings]
    kept = [step for step in steps if step["type"] != "Prepend" and step.get("content") != "\u2581"]
    return _normalizer_of({"type": "Sequence", "normalizers": kept}) if kept else None


def _normalizer_of(settings: Mapping[str, Any]) -> tokenizers.normalizers.Normalizer:
    """Return a normaliser from its part of a tokenizer.json."""
    carrier = {"version": "1.0", "normalizer": settings, "model": {"type": "BPE", "vocab": {}, "merges": []}}
    normalizer: tokenizers.normalizers.Normalizer = tokenizers.Tokenizer.from_str(json.dumps(carrier)).normalizer
    return normalizer


def _reduced(normalizer: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return _normalizer_of, (json.loads(normalizer.__getstate__()),)


# The library cannot unpickle these normalisers, since their constructors need arguments.
for _kind in (tokenizers.normalizers.Precompiled, tokenizers.normalizers.Replace):
    copyreg.pickle(_kind, _reduced)
