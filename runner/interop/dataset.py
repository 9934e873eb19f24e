"""An environment made of a data set and a scorer, so that no class has to be written."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from runner.environment.environment import Environment
from runner.errors import BadOption, BadTask
from runner.interop.judging import JUDGE, JUDGE_PREFIX, Judge, JudgeCost, judge_of_option
from runner.interop.row_fields import Row, RowCondition, RowTemplate, RowValueError
from runner.interop.row_sources import source_of
from runner.interop.scorers import scorer_of
from runner.messages import Prompt, as_messages
from runner.scoring import metric, reward
from runner.tasks import Task

__all__ = ["Dataset", "ScoreOption"]

ScoreOption: TypeAlias = str | Judge | Callable[[str, Task], Any]
"""The name of a scorer, a judge made by `judge()`, or a function of the reply's text and the task."""

HASH_CHARS = 16
"""Length of an id that is a hash of a row's prompt and answer."""


class Dataset(Environment):
    """A data set (`--tasks FILE`) with a scorer (`--score number`): one prompt, one reply, one score per row."""

    def __init__(
        self,
        tasks: str | Path | Iterable[Mapping[str, Any]],
        prompt: str = "prompt",
        answer: str = "",
        score: ScoreOption = "exact",
        id: str = "",
        system: str = "",
        info: Sequence[str] = (),
        where: Sequence[str] = (),
        shuffle: int | None = None,
        skip: int = 0,
        take: int | None = None,
        cache: str = "",
    ) -> None:
        """Choose the rows and the score. The data set is not read yet.

        Args:
            tasks: a JSONL, CSV or Parquet file, `hf:NAME[SPLIT]`, or an iterable of mappings.
            prompt: a field, or a text with fields, such as "Question: {question}". The value of a single field may
                also be a list of messages.
            answer: the field of the reference answer, or a text with fields; "" if tasks have no answer.
            score: exact, contains, number, choice, math, json, regex:PATTERN, judge:RUBRIC, judge:@FILE or
                module:function; in Python also a function of the reply's text and the task, or `judge()`.
            id: a field, or a text with fields, whose value is unique; by default a hash of prompt and answer.
            system: the system message.
            info: further fields that `task.info` holds for the scorer.
            where: conditions such as "level>=4"; a row must fulfil all of them.
            shuffle: the seed of a shuffled order; None for the order of the data set.
            skip: the number of rows to leave out at the beginning, after `where` and `shuffle` are applied.
            take: the number of rows to keep after the skipped ones; None for all.
            cache: with score="judge:...", a file that keeps the scores of the judge for later runs.

        Raises:
            BadOption: an argument is invalid.
            BadEnvironment: the package for the scorer is missing.
        """
        for name, count in (("skip", skip), ("take", take), ("shuffle", shuffle)):
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
                raise BadOption(f"{name}={count!r:.60}: give a whole number from 0.")
        for name, texts in (("where", where), ("info", info)):
            if isinstance(texts, str):
                raise BadOption(f"{name}={texts!r:.60}: give a list of strings.")
        self._tasks = tasks
        self._prompt = RowTemplate.of(prompt, "prompt")
        self._answer = RowTemplate.of(answer, "answer") if answer else None
        self._id = RowTemplate.of(id, "id") if id else None
        self._info = tuple(info)
        self._where = [RowCondition.of(each) for each in where]
        self._shuffle, self._skip, self._take = shuffle, skip, take
        if isinstance(score, str) and score.startswith(JUDGE_PREFIX):
            score = judge_of_option(score, cache)
        elif cache:
            raise BadOption(f"cache={cache!r:.60}: a cache keeps the scores of a judge: give score='judge:RUBRIC'.")
        self._judge = score if isinstance(score, Judge) else None
        self._scorer = None if self._judge is not None else scorer_of(score)
        if self._scorer is not None and self._scorer.needs_answer and self._answer is None:
            raise BadOption(f"score={score!r:.60} compares with an answer: give answer= (--answer FIELD).")
        if self._judge is not None and self._judge.engine is not None:
            self.engines = {JUDGE: self._judge.engine}
        self.system_prompt = system or None
        self._cost = JudgeCost()

    def tasks(self) -> Iterator[Task]:
        """One task for each row that `where`, `skip` and `take` keep. Rows are read as they are needed.

        Raises:
            BadTask: the data set cannot be read, a field is missing, a row cannot be used, two rows have the same value
                of `id`, or no row is left.
            BadOption: `tasks` is not a data set.
            BadEnvironment: the package `datasets`, which `hf:NAME` needs, is missing.
        """
        source = source_of(self._tasks)
        templates = [each for each in (self._prompt, self._answer, self._id) if each is not None]
        needed = {*self._info, *(each.column for each in self._where)}.union(*(each.columns for each in templates))
        source.check_columns(needed)
        numbered = source.rows(sorted(needed), self._shuffle)
        stop = None if self._take is None else self._skip + self._take
        kept = itertools.islice(self._kept(numbered, source.name), self._skip, stop)
        return self._built(kept, source.name)

    def _kept(self, numbered: Iterator[tuple[int, Row]], name: str) -> Iterator[tuple[int, Row]]:
        for number, row in numbered:
            try:
                if all(each.holds(row) for each in self._where):
                    yield number, row
            except RowValueError as error:
                raise BadTask(f"{name}: row {number} {error}.") from None

    def _built(self, rows: Iterator[tuple[int, Row]], name: str) -> Iterator[Task]:
        # Only a hash of eight bytes is stored for each id, since whole ids would need too much memory.
        seen: dict[bytes, int] = {}
        copies: dict[bytes, int] = {}
        for number, row in rows:
            task = self._task(row, f"{name}: row {number}")
            key = hashlib.blake2b(task.id.encode(errors="surrogatepass"), digest_size=8).digest()
            first = seen.setdefault(key, number)
            if first == number:
                yield task
            elif self._id is not None:
                raise BadTask(f"{name}: row {number} has the same id {task.id!r:.80} as row {first}: give another id.")
            else:
                copies[key] = copies.get(key, 1) + 1
                yield Task(f"{task.id}-{copies[key]}", task.prompt, task.answer, task.info)
        if not seen:
            raise BadTask(
                f"{name}: no row is left after where, skip and take: choose other values."
                if self._selects
                else f"{name}: no rows: give a data set with rows."
            )

    @property
    def _selects(self) -> bool:
        return bool(self._where or self._skip or self._take is not None)

    def _task(self, row: Row, where: str) -> Task:
        try:
            prompt = _as_prompt(self._prompt.value(row))
            answer = "" if self._answer is None else self._answer(row)
            if self._scorer is not None and self._answer is not None:
                self._scorer.check(answer)
            made_id = self._hash(prompt, answer) if self._id is None else self._id(row)
            missing = next((name for name in self._info if name not in row), None)
            if missing is not None:
                raise RowValueError(f"has no field {missing!r}; its fields are {', '.join(map(str, row))}")
        except RowValueError as error:
            raise BadTask(f"{where} {error}.") from None
        except ValueError as error:
            raise BadTask(f"{where}: {error}.") from None
        return Task(made_id, prompt, answer, {name: row[name] for name in self._info})

    def _hash(self, prompt: Prompt, answer: str) -> str:
        text = json.dumps([prompt, answer], sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(errors="surrogatepass")).hexdigest()[:HASH_CHARS]

    @reward
    async def correct(self) -> float | None:
        """The score of the reply; None if a scoring function returns None."""
        if self._judge is not None:
            return await self._judge.score(self.episode, self.task, self._cost)
        assert self._scorer is not None
        return await self._scorer.score(self.episode.text, self.task)

    @metric
    def judged(self) -> dict[str, float]:
        """The cost of the judge, as the fields of `JudgeCost` by name; empty without a judge."""
        return {} if self._judge is None else self._cost.as_metrics()


def _as_prompt(value: Any) -> Prompt:
    """Return the prompt of a row: messages if the value of its field is a list of messages, otherwise text.

    Raises:
        RowValueError: the text is empty, or the messages are invalid or contain something other than text.
    """
    if isinstance(value, str):
        if not value.strip():
            raise RowValueError("has an empty prompt")
        return value
    if not _is_messages(value):
        return str(value)
    messages: Any = [{key: part for key, part in each.items() if part is not None} for each in value]
    for each in messages:
        content = each.get("content")
        if isinstance(content, list) and any(part.get("type") != "text" for part in content):
            raise RowValueError("has an image or sound in its messages: only text is supported; leave the row out")
    try:
        return as_messages(messages)
    except TypeError as error:
        raise RowValueError(f"has messages that cannot be used ({error})") from None


def _is_messages(value: Any) -> bool:
    rows = isinstance(value, list | tuple)
    return rows and bool(value) and all(isinstance(each, Mapping) and "role" in each for each in value)
