"""Scorers that compare the text of a reply with a reference answer."""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import logging
import re
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import anyio
import anyio.to_process
import anyio.to_thread

from runner.concurrency.user_code import describe_error
from runner.errors import BadOption, VerifierFailed
from runner.interop.packages import optional_package
from runner.scoring import Score
from runner.tasks import Task

__all__ = ["ScoreName", "ScoringFunction", "TextScorer", "scorer_of"]

ScoringFunction: TypeAlias = Callable[[str, Task], float | Awaitable[float | None] | None]
"""A sync or async function of the reply's text and the task. It returns the score; None if the score is unknown."""

MATH_SECONDS = 10.0
"""Time limit for the comparison of two mathematical expressions, in a worker process."""
REGEX_SECONDS = 5.0
"""Time limit for a search with a pattern of the user, in a worker process."""
MAX_NUMBER_CHARS = 64
"""Maximum number of characters of a number; a longer number is not equal to any other."""


class ScoreName(enum.StrEnum):
    """The names of the scorers for `score=`."""

    EXACT = "exact"
    """The reply equals the answer; white space at the beginning and end of both is ignored."""
    CONTAINS = "contains"
    """The answer occurs in the reply; upper and lower case are equal."""
    NUMBER = "number"
    """The last number of the reply equals the reference number. A number after #### or in \\boxed{} has precedence."""
    CHOICE = "choice"
    """The letter that the reply chooses is the answer."""
    REGEX = "regex"
    """`regex:PATTERN`: the last match of the pattern in the reply equals the answer. If the pattern has groups, the
    first group of the match is compared. For a task without an answer, any match scores 1.
    """
    MATH = "math"
    """Reply and answer are equal as mathematical expressions, by the library math-verify."""
    JSON = "json"
    """Reply and answer are the same JSON value. The value in the reply may be in a code block; an object or a list may
    also be inside other text.
    """


class TextScorer(Protocol):
    """Interface of a scorer of replies."""

    @property
    def needs_answer(self) -> bool:
        """True if each task needs a reference answer."""

    def check(self, answer: str) -> None:
        """Check that a reply could equal a reference answer.

        Raises:
            ValueError: no reply could equal this answer; the message has the reason.
        """

    async def score(self, text: str, task: Task) -> Score:
        """Return the score of a reply: 0 or 1, or the result of a scoring function."""


def scorer_of(score: Any) -> TextScorer:
    """Return the scorer for a name, `regex:PATTERN`, `module:function`, or a function.

    Raises:
        BadOption: there is no such scorer, or its function cannot be imported.
        BadEnvironment: the package of the scorer is missing.
    """
    if callable(score):
        return _FunctionScorer(score)
    if not isinstance(score, str):
        raise BadOption(f"score={score!r:.60}: give {_NAMES}, or a function of the reply and the task.")
    name, colon, rest = score.partition(":")
    if name == ScoreName.REGEX:
        return _RegexScorer.of(rest, score)
    if name == ScoreName.MATH and not colon:
        optional_package("math_verify", package="math-verify", extra="math", least="0.8")
        return _MathScorer()
    if name in _COMPARED and not colon:
        return _ComparisonScorer(*_COMPARED[ScoreName(name)])
    if not colon:
        raise BadOption(f"score={score!r:.60}: give {_NAMES}.")
    return _FunctionScorer(_function(name, rest, score))


@dataclass(frozen=True, slots=True)
class _ComparisonScorer:
    """A scorer that compares a reply with the answer by the function `equal`.

    `reference` returns None for an answer that cannot be compared. The error about such an answer contains `wanted`, a
    description of usable answers such as "a number".
    """

    equal: Callable[[str, str], bool]
    reference: Callable[[str], Any]
    wanted: str
    needs_answer: bool = True

    def check(self, answer: str) -> None:
        if self.reference(answer) is None:
            raise ValueError(f"the answer {answer!r:.60} is not {self.wanted}: {_FIX}")

    async def score(self, text: str, task: Task) -> Score:
        return float(self.equal(text, task.answer))


@dataclass(frozen=True, slots=True)
class _RegexScorer:
    pattern: re.Pattern[str]
    needs_answer: bool = False

    @classmethod
    def of(cls, pattern: str, score: str) -> _RegexScorer:
        if not pattern:
            raise BadOption(f"score={score!r}: give a pattern, such as regex:answer is (\\w+).")
        try:
            return cls(re.compile(pattern))
        except re.error as error:
            raise BadOption(f"score={score!r:.80}: not a regular expression ({error}): correct it.") from None

    def check(self, answer: str) -> None:
        return

    async def score(self, text: str, task: Task) -> Score:
        return await _in_process("regex", _match, REGEX_SECONDS, self.pattern.pattern, text, task.answer)


def _match(pattern: str, text: str, answer: str) -> float:
    matches = list(re.finditer(pattern, text))
    if not matches or not answer:
        return float(bool(matches))
    found = matches[-1]
    return float((found[1] if found.re.groups else found[0]) == answer)


@dataclass(frozen=True, slots=True)
class _MathScorer:
    needs_answer: bool = True

    def check(self, answer: str) -> None:
        if not answer.strip():
            raise ValueError(f"the answer {answer!r:.60} is empty: {_FIX}")
        # If the library cannot parse the answer, it returns only strings, or nothing.
        if all(isinstance(each, str) for each in _parsed_answer(_math_library(), answer)):
            raise ValueError(f"math-verify cannot read the answer {answer!r:.60} as a mathematical expression: {_FIX}")

    async def score(self, text: str, task: Task) -> Score:
        return await _in_process("math", _equal_math, MATH_SECONDS, text, task.answer)


async def _in_process(score: str, function: Callable[..., float], seconds: float, *arguments: str) -> float:
    """Call a function in a worker process, since in this process an endless search would block the event loop.

    Raises:
        VerifierFailed: the process was killed, at the time limit or because of its memory.
    """
    call = partial(_timed, function, seconds, *arguments)
    try:
        return await anyio.to_process.run_sync(call, cancellable=True)
    except anyio.BrokenWorkerProcess:
        raise VerifierFailed(
            f"score={score}: the scorer was killed: it took over {seconds:g} s or too much memory."
        ) from None


def _timed(function: Callable[..., float], seconds: float, *arguments: str) -> float:
    """Call a function in this worker process. A signal ends the process if the call takes more than `seconds`."""
    if function is _equal_math:
        _math_library()  # the time of the import does not count
    # The signal has its default action, since Python's handlers wait for the end of a long computation in C.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return function(*arguments)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _equal_math(text: str, answer: str) -> float:
    # The library's own time limits are off, since they also use signals.
    library = _math_library()
    found = library.parse(text, parsing_timeout=None)
    return float(library.verify(_parsed_answer(library, answer), found, timeout_seconds=None))


def _math_library() -> Any:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # the library warns that its own time limits are off
    return importlib.import_module("math_verify")


def _parsed_answer(library: Any, answer: str) -> Any:
    """The expressions of a reference answer, as math_verify parses them; an empty list if it cannot be parsed."""
    return library.parse(answer, parsing_timeout=None) or library.parse(f"${answer}$", parsing_timeout=None)


@dataclass(frozen=True, slots=True)
class _FunctionScorer:
    function: ScoringFunction
    needs_answer: bool = False

    def check(self, answer: str) -> None:
        return

    async def score(self, text: str, task: Task) -> Score:
        if inspect.iscoroutinefunction(self.function):
            result: Any = await self.function(text, task)
        else:
            result = await anyio.to_thread.run_sync(partial(self.function, text, task), abandon_on_cancel=True)
        return result  # type: ignore[no-any-return]  # checked as the result of a reward


def _function(module: str, name: str, score: str) -> ScoringFunction:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        function = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        raise BadOption(f"score={score!r:.80} cannot be loaded ({describe_error(error)}): give {_NAMES}.") from error
    if not callable(function):
        raise BadOption(f"score={score!r:.80}: {name} is not a function: give a function.")
    return function  # type: ignore[no-any-return]  # the result of the function is checked


# --- comparisons

_UNITS: Final = (
    "[kcmµ]?m|[kmµ]?g|lbs?|oz|ft|in|mi|[mµn]?s|sec|min|hrs?|h|[mc]?[lL]|k?Wh?|k?V|m?A|[kMG]?Hz|k?J|k?cal|[kKMGT]?i?B"
)
"""Units that may follow a number without a space. "3D" and "2nd" contain no number, since D and nd are not units."""

_NUMBER: Final = re.compile(
    # (?<!\d,) prevents a match after "1,". Otherwise a search could begin at each digit of a long number.
    r"(?<![\w.])(?<!\d,)[-+]?\$?\d[\d,]*+(?:\.\d+)?(?:[eE][-+]?\d{1,3})?(?:/\d+)?"
    rf"(?=(?:(?:{_UNITS})[²³]?)?(?!\w))|(?<!\w)-?\.\d+"
)
_BOXED: Final = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_HASHES: Final = re.compile(r"####\s*([^\n]+)")
_CHOSEN: Final = re.compile(
    # "a" and "i" are also words, and "Option A is wrong" chooses nothing.
    r"(?i:answer|choice|option)\b\W*+(?i:is)?\W*+\b([A-Zb-hj-z]\b(?!')|[ai]\b(?=[\s.)*]*$))"
    r"(?!\s+(?i:is|was)\s+(?i:wrong|incorrect|not|false)\b)",
    re.MULTILINE,
)
_LETTER: Final = re.compile(r"\(([A-Z])\)|\b([A-Z])\b(?=[.):*]|\s*$)|(?<=\*\*)([A-Z])(?=\*\*)", re.MULTILINE)
_FRACTION: Final = re.compile(r"\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_FENCED: Final = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


def _exact(text: str, answer: str) -> bool:
    return text.strip() == answer.strip()


def _contains(text: str, answer: str) -> bool:
    return answer.strip().casefold() in text.casefold()


def _equal_numbers(text: str, answer: str) -> bool:
    found, wanted = number_in(text), number_in(answer)
    return found is not None and found == wanted


def number_in(text: str) -> Fraction | None:
    """The last number of a text; a number after #### or in a LaTeX box has precedence.

    The result is None if there is no number, if the number is too long, or if its denominator is 0.
    """
    text = _FRACTION.sub(r"\1/\2", text)
    marked = [*_HASHES.findall(text), *_BOXED.findall(text)]
    for part in (*reversed(marked), text):
        numbers = _NUMBER.findall(part)
        if numbers:
            return _fraction(numbers[-1])
    return None


def _fraction(text: str) -> Fraction | None:
    plain = text.replace(",", "").replace("$", "")
    if len(plain) > MAX_NUMBER_CHARS:
        return None
    upper, _, lower = plain.partition("/")
    return None if lower and not int(lower) else Fraction(upper) / Fraction(lower or 1)


def _equal_choices(text: str, answer: str) -> bool:
    return choice_in(text) == answer.strip().strip("().").upper()


def choice_in(text: str) -> str | None:
    """The letter that a reply chooses, in upper case; None if the reply chooses no letter."""
    boxed = [each.strip() for each in _BOXED.findall(text) if len(each.strip()) == 1]
    if boxed:
        return str(boxed[-1]).upper()
    bare = text.strip().strip("().*")
    if len(bare) == 1 and bare.isalpha():
        return bare.upper()
    if chosen := _CHOSEN.findall(text):
        return str(chosen[-1]).upper()
    letters = ["".join(each) for each in _LETTER.findall(text)]
    return letters[-1] if letters else None


def _reference_letter(answer: str) -> str | None:
    letter: str = answer.strip().strip("().")
    return letter if len(letter) == 1 and letter.isalpha() else None


def _equal_json(text: str, answer: str) -> bool:
    wanted = _json_text(answer)
    candidates = [text.strip(), *reversed(_FENCED.findall(text)), *_braced(text)]
    return next((found == wanted for each in candidates if (found := _json_text(each)) is not None), False)


def _braced(text: str) -> list[str]:
    """The text from the first { or [ to the last } or ] of the same kind; an empty list for a text without { and [."""
    starts = [place for place in (text.find("{"), text.find("[")) if place >= 0]
    if not starts:
        return []
    start = min(starts)
    end = text.rfind("}" if text[start] == "{" else "]")
    return [text[start : end + 1]]


def _json_text(text: str) -> str | None:
    """Return a JSON value as canonical text: equal for 1 and 1.0, different for 1 and true; None if not JSON."""
    try:
        text = json.dumps(_canonical(json.loads(text)), sort_keys=True)
    except (ValueError, RecursionError):
        return None
    return text


def _canonical(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _canonical(each) for name, each in value.items()}
    return [_canonical(each) for each in value] if isinstance(value, list) else value


_COMPARED: Final[dict[ScoreName, tuple[Callable[[str, str], bool], Callable[[str], Any], str]]] = {
    ScoreName.EXACT: (_exact, lambda answer: answer.strip() or None, "a text"),
    ScoreName.CONTAINS: (_contains, lambda answer: answer.strip() or None, "a text"),
    ScoreName.NUMBER: (_equal_numbers, number_in, "a number"),
    ScoreName.CHOICE: (_equal_choices, _reference_letter, "a letter (for a number, write {answer:letter})"),
    ScoreName.JSON: (_equal_json, _json_text, "JSON"),
}
_FIX: Final = "correct it, or choose another value for score"
_NAMES: Final = "exact, contains, number, choice, math, json, regex:PATTERN, judge:RUBRIC or module:function"
