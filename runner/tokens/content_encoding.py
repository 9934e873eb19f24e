"""Encoding in which the content of users and tools never becomes a control token.

A tokenizer searches the whole text for its added tokens, in contents too. This module masks the contents. The
`tokenizers` library then searches the masked text, so that its own rules apply (longest first, white space swallowed,
single words, normalised forms). A mark that no text contains replaces each token found. A twin tokenizer then encodes
the marked text in one pass. The twin has the same model, normaliser and pre-tokenizer, but its only added tokens are
the marks and the words.

Words: the added tokens of some vocabularies include words that the model learnt, such as runs of spaces, HTML tags, and
reserved names. Such words have no control function, and are encoded in the same way in contents and elsewhere.
"""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import accumulate
from operator import itemgetter
from typing import Any

import tokenizers

__all__ = [
    "AddedTokens",
    "Borders",
    "Content",
    "check_content",
    "learnt_words",
    "masked",
    "model_without_control_tokens",
    "written",
]

Content = Sequence[tuple[int, int]]
"""Spans of users' and tools' text, sorted and disjoint, as indices into the whole text."""


def check_content(text: str, content: Content) -> None:
    """Check that `content` are valid spans of `text`.

    Raises:
        ValueError: the spans are not sorted, not disjoint, or not within the text.
    """
    end = 0
    for start, stop in content:
        if not end <= start <= stop <= len(text):
            raise ValueError(
                f"content spans must be sorted, disjoint and within {len(text)} characters, not {content!r:.80}"
            )
        end = stop


def masked(text: str, content: Content, mask: Callable[[str], str]) -> str:
    """Return `text` with each span of content replaced by the result of `mask`, which has the length of the span."""
    check_content(text, content)
    parts: list[str] = []
    end = 0
    for start, stop in content:
        parts += text[end:start], mask(text[start:stop])
        end = stop
    return "".join((*parts, text[end:]))


class Borders:
    """The borders of names, to test whether a text could form a part of a name together with adjacent text."""

    def __init__(self, names: Iterable[str]) -> None:
        names = [name for name in names if name]
        self._joined = "\0".join(names)
        # The end of a text is compared from right to left, so the beginnings of names are reversed.
        self._heads = frozenset(name[:end][::-1] for name in names for end in range(1, len(name)))
        self._tails = frozenset(name[start:] for name in names for start in range(1, len(name)))
        self._longest = max(map(len, names), default=1)

    def touched_by(self, text: str) -> bool:
        """Return True if `text` is inside a name, begins with the end of a name, or ends with the beginning of a name.

        The text is compared both with and without the white space at its ends.
        """
        bare = text.strip()
        if any(form and form in self._joined for form in (text, bare)):
            return True
        return any(map(self._begins, {text, text.lstrip()})) or any(map(self._ends, {text, text.rstrip()}))

    def _begins(self, text: str) -> bool:
        return not self._tails.isdisjoint(accumulate(text[: self._longest]))

    def _ends(self, text: str) -> bool:
        return not self._heads.isdisjoint(accumulate(text[-self._longest :][::-1]))


class AddedTokens:
    """The added tokens of one tokenizer, and its twin (see the module). The tokenizer is not changed.

    Args:
        tokenizer: the library's tokenizer.
        model: the model of the twin tokenizer; None to use the tokenizer's own model, if this model never encodes plain
            text as control tokens.
        visible: function that normalises a text, without the changes that decoding reverts.
        words: names of added tokens without a control function: white space, and words that the model learnt.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        model: tokenizers.models.Model | None,
        visible: Callable[[str], str],
        words: Set[str],
    ) -> None:
        added = sorted(tokenizer.get_added_tokens_decoder().items())
        self._control = [(token_id, token) for token_id, token in added if token.content not in words]
        self.control_ids = frozenset(token_id for token_id, _ in self._control)
        """The ids of all added tokens except words, which have no control function."""
        self._visible = visible
        names = [token.content for _, token in self._control]
        self._normalizer = tokenizer.normalizer
        # Added tokens with `normalized` are matched in normalised text, so text is normalised before the twin encodes
        # it.
        self._normalizes_first = _changes_text(self._normalizer) and any(token.normalized for _, token in self._control)
        matched = [self._normalizer.normalize_str(name) for name in names] if self._normalizes_first else []
        self._borders = Borders({*names, *map(visible, names), *matched})
        self._finder = _finder(tokenizer, [token for _, token in added])
        self._indices = {self._finder.token_to_id(name): index for index, name in enumerate(names)}
        self._single_words = any(token.single_word for _, token in added)
        self._word, self._other = _mask_characters("".join((*names, *words, *map(visible, names))))
        # No name contains the first letter of the stem, so no added token begins before the stem and ends inside it.
        self._stem = f"{self._word}{secrets.token_hex(12)}n"
        self._tokenizer, self._model = tokenizer, model
        plain = [(token_id, token) for token_id, token in added if token.content in words]
        cut = self._normalizes_first or any(token.single_word for _, token in plain)
        self._cut = [(token_id, token) for token_id, token in plain if cut and not token.normalized]
        self._kept = [(token_id, token) for token_id, token in plain if not cut or token.normalized]
        self._marks = [*self._control, *self._cut]

    def near(self, text: str) -> bool:
        """Return True if `text` contains a control token, or a part of one that adjacent text may complete."""
        return any(self._found(form) or self._borders.touched_by(form) for form in {text, self._visible(text)})

    def encode(self, text: str, content: Content) -> list[int]:
        """Return the ids of `text`, with control ids only for control tokens outside `content`."""
        twin, ids = self._twin
        found = list(self._scaffold(text, content))
        if self._cut:
            found = sorted([*found, *self._between(text, found)], key=itemgetter(1))
        marked = self._marked(text, found)
        return [ids.get(token_id, token_id) for token_id in twin.encode(marked, add_special_tokens=False).ids]

    def _found(self, text: str) -> list[tuple[int, int, int]]:
        """Return the control tokens in `text` as (index, start, stop), including the white space that they swallow."""
        found = self._finder.encode(text, add_special_tokens=False)
        # The finder treats the text between two tokens as one word, so it encodes a text without tokens as a single id.
        if len(found.ids) < 2 and not set(found.ids) & self._indices.keys():
            return []
        indices = self._indices
        return [(indices[i], *span) for i, span in zip(found.ids, found.offsets, strict=True) if i in indices]

    def _scaffold(self, text: str, content: Content) -> Iterator[tuple[int, int, int]]:
        """Yield the control tokens outside `content`, as (index, start, stop).

        A token's range includes the white space that the token swallows, which may be in `content`.
        """
        said = list(self._without_words(text, content)) if self._cut else content
        for index, start, stop in self._found(masked(text, said, self._mask)):
            token = self._control[index][1]
            name = text[start:stop]
            first = stop - len(name.lstrip(_SPACES)) if token.lstrip or self._is_normalized(token) else start
            last = start + len(name.rstrip(_SPACES)) if token.rstrip else stop
            if not any(begin < last and first < end for begin, end in content if begin < end):
                yield index, start, stop

    def _without_words(self, text: str, content: Content) -> Iterator[tuple[int, int]]:
        """Yield the parts of `content` without the words that are cut out, since such a word changes its neighbours."""
        words = [(start, stop) for _, start, stop in self._between(text, ())]
        for begin, end in content:
            for start, stop in words:
                if begin <= start and stop <= end:
                    yield begin, start
                    begin = stop
            yield begin, end

    def _between(self, text: str, found: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
        """Yield the words to cut out of the text between the control tokens `found`, as (index, start, stop)."""
        taken: list[tuple[int, int]] = []
        for _, start, stop in found:  # two neighbours may have swallowed the same white space
            begin = max(start, taken[-1][1]) if taken else start
            taken.append((begin, max(begin, stop)))
        finder, indices = self._word_finder
        seen = finder.encode(masked(text, taken, self._mask), add_special_tokens=False)
        for token_id, (start, stop) in zip(seen.ids, seen.offsets, strict=True):
            if token_id in indices and not any(begin < stop and start < end for begin, end in taken):
                yield indices[token_id], start, stop

    def _mask(self, said: str) -> str:
        """Return a text of the length of `said` without control tokens, with the same effect on adjacent tokens.

        It keeps the white space at both ends, and has a letter or a sign where `said` begins and ends with one.
        """
        words = said.strip(_SPACES)
        if not words:
            return said
        begin = said.index(words[0])
        before, after = said[:begin], said[begin + len(words) :]
        mask = self._other * len(words)
        if self._single_words:
            first, last = (self._word if _is_word(char) else self._other for char in (words[0], words[-1]))
            mask = (first + mask[1:-1] + last)[-len(words) :]
        return before + mask + after

    def _marked(self, text: str, found: Sequence[tuple[int, int, int]]) -> str:
        """Return `text` with a mark in place of each token found, normalised if the twin does not normalise."""
        parts: list[str] = []
        stretch, before, end = "", "", 0
        for index, start, stop in found:
            stretch += text[end:start]
            if self._is_normalized(self._marks[index][1]):
                before = before if stretch else self._before_first(index, text[start:stop])
                stretch += self._mark(index)
            else:
                parts += self._normalized(stretch, before), self._mark(index)
                stretch = before = ""
            end = max(end, stop)
        return "".join((*parts, self._normalized(stretch + text[end:], before)))

    def _normalized(self, stretch: str, before: str) -> str:
        """Return `stretch`, normalised if the twin does not normalise.

        Normalising may add text before a mark at the beginning of `stretch`. `before` replaces this added text.
        """
        if not self._normalizes_first or not stretch:
            return stretch
        text: str = self._normalizer.normalize_str(stretch)
        return before + text[text.index(self._stem) :] if stretch.startswith(self._stem) else text

    def _before_first(self, index: int, found: str) -> str:
        """Return the text that normalising adds before a normalised token at the start of a stretch."""
        token = self._marks[index][1]
        name: str = self._normalizer.normalize_str(token.content)
        before: str = self._normalizer.normalize_str(found).partition(name)[0]
        return before.rstrip(_SPACES) if token.lstrip else before

    def _is_normalized(self, token: tokenizers.AddedToken) -> bool:
        return self._normalizes_first and bool(token.normalized)

    def _mark(self, index: int) -> str:
        # The stem ends in digits, which do not combine with a following accent.
        return f"{self._stem}{index:06}"

    @functools.cached_property
    def _twin(self) -> tuple[tokenizers.Tokenizer, dict[int | None, int]]:
        """The twin tokenizer, and a map from the twin's ids of added tokens to the original tokenizer's ids."""
        twin = tokenizers.Tokenizer(self._model or self._tokenizer.model)
        twin.pre_tokenizer = self._tokenizer.pre_tokenizer
        if not self._normalizes_first:
            twin.normalizer = self._tokenizer.normalizer
        # The library numbers added tokens from the number of learnt tokens on. If learnt ids have gaps, this number may
        # be a learnt id, so further names fill the gaps first.
        learnt = twin.get_vocab(with_added_tokens=False)
        gaps = max(learnt.values(), default=-1) + 1 - len(learnt)
        marks = {self._mark(index): token_id for index, (token_id, _) in enumerate(self._marks)}
        names = [*(f"{self._stem}gap{index}" for index in range(gaps)), *marks]
        kept = {token_id: self._as_seen(token) for token_id, token in self._kept}
        twin.add_tokens([*(tokenizers.AddedToken(name, normalized=False) for name in names), *kept.values()])
        ids = {twin.token_to_id(mark): token_id for mark, token_id in marks.items()}
        return twin, ids | {twin.token_to_id(token.content): token_id for token_id, token in kept.items()}

    @functools.cached_property
    def _word_finder(self) -> tuple[tokenizers.Tokenizer, dict[int | None, int]]:
        """The tokenizer that finds the words to cut out, and a map from its ids to indices of `_marks`."""
        finder = _finder(self._tokenizer, [token for _, token in self._cut])
        first = len(self._control)
        return finder, {finder.token_to_id(token.content): first + i for i, (_, token) in enumerate(self._cut)}

    def _as_seen(self, token: tokenizers.AddedToken) -> tokenizers.AddedToken:
        if self._is_normalized(token):
            return _copy(token, content=self._normalizer.normalize_str(token.content), normalized=False)
        return _copy(token)


def learnt_words(tokenizer: tokenizers.Tokenizer, visible: Callable[[str], str]) -> frozenset[str]:
    """Return the names of the added tokens that are words: white space, and learnt tokens that are not special."""
    learnt = tokenizer.get_vocab(with_added_tokens=False)
    names = ((token.content, token.special) for token in tokenizer.get_added_tokens_decoder().values())
    return frozenset(name for name, special in names if _is_white(name, visible) or (name in learnt and not special))


def written(words: Iterable[str], text: str, visible: Callable[[str], str]) -> frozenset[str]:
    """Return the `words` that occur in a template's own text and contain a sign, like control tokens."""
    signed = (name for name in words if any(not char.isalnum() and not char.isspace() for char in name))
    return frozenset(name for name in signed if name in text and not _is_white(name, visible))


def _is_white(name: str, visible: Callable[[str], str]) -> bool:
    return not name.strip() or not visible(name).replace(_SPACE_WRITTEN, " ").strip()


_SPACE_WRITTEN = "\u2581"
"""The character for a space in vocabularies made by SentencePiece."""


def model_without_control_tokens(settings: Mapping[str, Any], names: Iterable[str]) -> tokenizers.models.Model | None:
    """Return a model with the same ids that never encodes plain text as one of `names`.

    A model that learnt control tokens as words, such as a Unigram model, encodes their names in plain text as control
    ids, even without added tokens. `settings` are the model's part of a tokenizer.json. The result is None if this
    model needs no change.
    """
    vocabulary = settings["vocab"]
    learnt = vocabulary if isinstance(vocabulary, dict) else {name for name, _ in vocabulary}
    inside = {name for name in names if name in learnt and name != settings.get("unk_token")}
    if not inside:
        return None
    is_bpe = "merges" in settings
    merges = [
        tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in settings.get("merges", ())
    ]
    kept = [merge for merge in merges if "".join(merge) not in inside and not inside.intersection(merge)]
    if is_bpe and len(kept) == len(merges) and not settings.get("ignore_merges"):
        return None
    renamed_by = f"zq{secrets.token_hex(12)}"
    renamed: Any = (
        {renamed_by + name if name in inside else name: token_id for name, token_id in vocabulary.items()}
        if isinstance(vocabulary, dict)
        else [[renamed_by + name if name in inside else name, score] for name, score in vocabulary]
    )
    changed = {**settings, "vocab": renamed} | ({"merges": kept} if is_bpe else {})
    model: tokenizers.models.Model = tokenizers.Tokenizer.from_str(
        json.dumps({"version": "1.0", "model": changed})
    ).model
    return model


# White space as the library defines it; Python's definition also has U+001C to U+001F.
_SPACES = "".join(map(chr, (*range(9, 14), 32, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F)))
_SPACES += "\u205f\u3000"


def _finder(tokenizer: tokenizers.Tokenizer, added: Sequence[tokenizers.AddedToken]) -> tokenizers.Tokenizer:
    """Return a tokenizer that finds the same added tokens, and encodes the text between two tokens as one word."""
    word = secrets.token_hex(12)
    finder = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab={word: 0}, unk_token=word))
    finder.normalizer = tokenizer.normalizer
    finder.add_tokens([_copy(token) for token in added])
    return finder


def _changes_text(normalizer: tokenizers.normalizers.Normalizer | None) -> bool:
    if isinstance(normalizer, tokenizers.normalizers.Sequence):
        return len(normalizer) > 0
    return normalizer is not None


def _copy(token: tokenizers.AddedToken, **changed: Any) -> tokenizers.AddedToken:
    names = ("content", "single_word", "lstrip", "rstrip", "normalized")
    return tokenizers.AddedToken(**({name: getattr(token, name) for name in names} | changed))


def _mask_characters(names: str) -> tuple[str, str]:
    """Return a letter and a sign that none of the names contain and no normaliser changes."""
    letters = ["ж", "щ", "ы", "э", "ю", *map(chr, range(0x1200, 0x1249))]  # Cyrillic and Ethiopic
    signs = ["☃", "☎", "♞", "⚓", *map(chr, range(0x2680, 0x2690))]
    return next(char for char in letters if char not in names), next(char for char in signs if char not in names)


@functools.cache
def _is_word(char: str) -> bool:
    """Return True if the library counts `char` as part of a word."""
    probe = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab={"a": 0}, unk_token="a"))
    probe.add_tokens([tokenizers.AddedToken("b", single_word=True, normalized=False)])
    return 1 not in probe.encode(char + "b", add_special_tokens=False).ids
