"""A data set and a scorer as an environment: sources, fields, selection, and errors."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runner import BadOption, BadTask, Outcome, Run, ScriptedEngine, Task, Trajectory
from runner.interop import Dataset, row_sources
from runner.testing import play_many_async
from tests.playing import until_end

ROWS = [
    {"question": f"What is {n} + {n}?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}", "level": n, "kind": "odd" * (n % 2)}
    for n in range(40)
]


def written(folder: Path, kind: str, rows: Iterable[Mapping[str, Any]] = ROWS) -> Path:
    """Write a data set file of this kind."""
    path, rows = folder / f"sums.{kind}", list(rows)
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    return path


def sums(tasks: Any, **options: Any) -> Dataset:
    return Dataset(tasks, **{"prompt": "{question}", "answer": "{answer}", "score": "number", **options})


def listed(tasks: Any, **options: Any) -> list[Task]:
    return list(sums(tasks, **options).tasks())


KINDS = ("jsonl", "csv", "parquet")


@pytest.mark.anyio
@pytest.mark.parametrize("kind", KINDS)
async def test_dataset_of_each_kind_plays_and_scores(tmp_path: Path, kind: str) -> None:
    environment = sums(written(tmp_path, kind), take=3, system="Be short.")
    played = await play_many_async(environment, ScriptedEngine("It is 2, I think."))
    assert [each.outcome for each in played] == [Outcome.COMPLETED] * 3
    rewards = {str(each.task.prompt): each.reward for each in played}
    assert rewards == {"What is 0 + 0?": 0.0, "What is 1 + 1?": 1.0, "What is 2 + 2?": 0.0}
    assert played[0].segments[0].messages[0] == {"role": "system", "content": "Be short."}


@pytest.mark.parametrize("kind", KINDS)
def test_shuffle_keeps_all_rows_and_follows_its_seed(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind)
    first, again, other, plain = ([str(task.prompt) for task in listed(path, shuffle=seed)] for seed in (1, 1, 2, None))
    assert first == again != other
    assert first != plain == [row["question"] for row in ROWS]
    assert sorted(first) == sorted(plain)


@pytest.mark.parametrize(("rows", "size"), [(8, 1 << 30), (8, 1)], ids=["groups", "parts"])
def test_shuffled_parquet_has_each_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, size: int
) -> None:
    monkeypatch.setattr(row_sources, "MIN_SHUFFLED_ROWS", rows)
    monkeypatch.setattr(row_sources, "MAX_SHUFFLED_BYTES", size)
    monkeypatch.setattr(row_sources, "BATCH_ROWS", 3)
    path = tmp_path / "sums.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=10)  # 4 row groups
    source = row_sources.source_of(path)
    first, again, other = (list(source.rows(["level"], seed)) for seed in (1, 1, 2))
    assert first == again != other
    for order in (first, other):
        assert all(row["level"] == number - 1 for number, row in order)  # the rows of ROWS, each with its number
        assert sorted(number for number, _ in order) == list(range(1, 41))
        groups = [(number - 1) // 10 for number, _ in order]
        # Groups that are larger than the limit are shuffled in consecutive parts, and others in windows of whole
        # groups.
        window = 20 if size > 1 else 10
        assert all(len(set(groups[start : start + window])) == window // 10 for start in range(0, 40, window))
        parts = [{number for number, _ in order[start : start + 3]} for start in (0, 3, 6)]
        begins = min(parts[0])
        assert (size == 1) == (parts == [set(range(begins + 3 * n, begins + 3 * n + 3)) for n in range(3)])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_selected_by_where_skip_and_take(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind)
    chosen = listed(path, where=["kind=odd", "question~[0-9] [+]", "level!=3"], skip=1, take=2)
    assert [str(task.prompt) for task in chosen] == ["What is 5 + 5?", "What is 7 + 7?"]
    assert [task.prompt for task in listed(path, where=["level>=38"])] == ["What is 38 + 38?", "What is 39 + 39?"]
    assert len(listed(path, where=["level<10"])) == 10
    assert len(listed(path, where=["kind>e"])) == 20


def test_ids_are_hashes_or_a_field(tmp_path: Path) -> None:
    by_hash, by_field = listed(ROWS), listed(ROWS, id="level")
    assert [task.id for task in by_field] == [str(n) for n in range(40)]
    assert len({task.id for task in by_hash}) == 40
    assert [task.id for task in by_hash] == [task.id for task in listed(written(tmp_path, "parquet"))]


def test_equal_rows_without_an_id_field_get_a_number() -> None:
    first, second, third = listed([ROWS[1], ROWS[1], ROWS[1]])
    assert (second.id, third.id) == (f"{first.id}-2", f"{first.id}-3")


def test_templates_format_lists_and_letters() -> None:
    rows = [{"q": {"text": "Which?"}, "choices": ["red", "blue"], "gold": 1}]
    (task,) = Dataset(rows, "{q.text}\n{choices:letters}", "{gold:letter}", "choice").tasks()
    assert (task.prompt, task.answer) == ("Which?\nA. red\nB. blue", "B")
    (task,) = Dataset(rows, "{{{choices[0]}}} {choices:lines}", "{gold}").tasks()
    assert task.prompt == "{red} red\nblue"


def test_list_with_more_items_than_letters_is_refused() -> None:
    rows = [{"choices": list(range(27)), "gold": "A"}]
    with pytest.raises(BadTask, match=r"has 27 items in 'choices', more than 26 letters: use the format lines"):
        list(Dataset(rows, "{choices:letters}", "gold", "choice").tasks())
    rows[0]["choices"] = list(range(26))
    (task,) = Dataset(rows, "{choices:letters}", "gold", "choice").tasks()
    assert str(task.prompt).splitlines()[-1] == "Z. 25"


def test_a_field_of_messages_is_the_prompt() -> None:
    messages = [{"role": "user", "content": "hello", "name": None}]
    (task,) = Dataset([{"prompt": messages, "answer": "hi"}], answer="answer").tasks()
    assert task.prompt == [{"role": "user", "content": "hello"}]


def test_parquet_reads_only_the_fields_in_use(tmp_path: Path) -> None:
    path = tmp_path / "wide.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": "a", "answer": "b", "blob": b"x" * 1000}]), path)
    (task,) = Dataset(path, answer="answer", info=["answer"]).tasks()
    assert task.info == {"answer": "b"}


def test_rows_are_read_as_they_are_needed(tmp_path: Path) -> None:
    path = written(tmp_path, "jsonl")
    with path.open("a") as file:
        file.write("not JSON\n")
    tasks = iter(sums(path).tasks())
    assert [str(next(tasks).prompt) for _ in range(40)] == [row["question"] for row in ROWS]
    with pytest.raises(BadTask, match=r"sums\.jsonl:41: this line is not JSON"):
        next(tasks)


@pytest.mark.anyio
async def test_a_bad_row_ends_the_run_and_keeps_the_rest(tmp_path: Path) -> None:
    path = written(tmp_path, "jsonl", ROWS[:2])
    with path.open("a") as file:
        file.write('{"question": "no answer?"}\n')
    played: list[Trajectory] = []
    with pytest.raises(BadTask, match="row 3 has no field 'answer'; its fields are question"):
        await until_end(Run(sums(path), ScriptedEngine("2")), played)
    assert [each.outcome for each in played] == [Outcome.COMPLETED] * 2


BAD_ROWS: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "missing field": ([{"answer": "1"}], {}, r"row 1 has no field 'question'; its fields are answer"),
    "null": ([{"question": None, "answer": "1"}], {}, r"row 1 has no value \(null\) in 'question'"),
    "empty prompt": ([{"question": " ", "answer": "1"}], {"prompt": "question"}, "row 1 has an empty prompt"),
    "image": ([{"question": {"bytes": b"", "path": None}, "answer": "1"}], {}, "row 1 has an image or sound"),
    "bytes": ([{"question": b"GIF", "answer": "1"}], {}, "row 1 has an image or sound in 'question'"),
    "image in messages": (
        [{"question": [{"role": "user", "content": [{"type": "image"}]}], "answer": "1"}],
        {"prompt": "question"},
        "an image or sound in its messages",
    ),
    "duplicate ids": ([{**ROWS[0], "id": 7}, {**ROWS[1], "id": 7}], {"id": "id"}, "row 2 has the same id '7' as row 1"),
    "answer without number": ([{"question": "a", "answer": "x"}], {}, "the answer 'x' is not a number: correct it, or"),
    "answer without letter": (
        [ROWS[1]],
        {"score": "choice"},
        r"is not a letter \(for a number, write \{answer:letter\}\): correct it",
    ),
    "answer without JSON": ([ROWS[1]], {"score": "json"}, "is not JSON"),
    "not a mapping": (["text"], {}, "row 1: 'text' is not a mapping"),
    "no rows": ([], {}, "the list: no rows"),
    "none left": ([ROWS[0]], {"where": ["level>3"]}, "no row is left after where, skip and take"),
    "where of a missing field": ([ROWS[0]], {"where": ["size=1"]}, "row 1 has no field 'size'"),
    "where of text with a number": (
        [{**ROWS[0], "level": "high"}],
        {"where": ["level>3"]},
        "has 'high' in 'level', comp",
    ),
    "where of a number with text": ([ROWS[0]], {"where": ["level>b"]}, "has a number in 'level', compared with 'b'"),
    "none above an empty text": ([{**ROWS[0], "level": ""}], {"where": ["level<3"]}, "no row is left after where"),
    "missing info": ([ROWS[0]], {"info": ["hint"]}, "has no field 'hint'"),
    "index past the end": (
        [{"question": ["a"], "answer": "1"}],
        {"prompt": "{question[3]}"},
        r"has no 'question\[3\]'",
    ),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_with_its_problem(name: str) -> None:
    rows, options, said = BAD_ROWS[name]
    with pytest.raises(BadTask, match=said):
        listed(rows, **options)


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown score": ({"score": "fuzzy"}, "score='fuzzy': give exact, contains, number"),
    "score without answer": ({"answer": ""}, r"score='number' compares with an answer: give answer="),
    "broken template": ({"prompt": "{question"}, "prompt='{question'"),
    "empty field": ({"prompt": "{}"}, "name a field between the braces"),
    "unknown format": ({"prompt": "{question:upper}"}, "the format 'upper' is unknown"),
    "broken pattern": ({"score": "regex:("}, "not a regular expression"),
    "no pattern": ({"score": "regex:"}, "give a pattern"),
    "missing module": ({"score": "no_such_module:f"}, "cannot be loaded .*no_such_module"),
    "not a function": ({"score": "os:sep"}, "sep is not a function"),
    "broken condition": ({"where": ["level"]}, "--where 'level': write a field"),
    "broken condition pattern": ({"where": ["level~("]}, "not a regular expression"),
    "one condition as text": ({"where": "level>3"}, "where='level>3': give a list of strings"),
    "negative take": ({"take": -1}, "take=-1: give a whole number from 0"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_a_bad_option_is_refused_before_anything_is_read(name: str) -> None:
    options, said = BAD_OPTIONS[name]
    with pytest.raises(BadOption, match=said):
        sums(ROWS, **options)


BAD_FILES: dict[str, tuple[str, bytes | None, str]] = {
    "missing": ("gone.jsonl", None, "'gone.jsonl' does not exist"),
    "unknown kind": ("data.xlsx", b"", "the kind '.xlsx' is unknown"),
    "list": ("data.jsonl", b'[{"question": 1}]', "a row must be a JSON object, not a list"),
    "opened list": ("data.json", b"[\n{}\n]", "without a list around them"),
    "not UTF-8": ("data.jsonl", b'{"a": "\xff"}', r"data.jsonl:1: this line is not JSON"),
    "not Parquet": ("data.parquet", b"PAR2", "this is not a Parquet file"),
    "ragged CSV": ("data.csv", b"question,answer\n1,2,3\n", "row 1 has 3 values for 2 fields"),
    "CSV of bytes": ("data.csv", b"question,answer\n\xff,1\n", "not CSV in UTF-8"),
    "CSV without fields": ("data.csv", b"", "the first line, with the names of the fields, is missing"),
    "CSV with a name twice": ("data.csv", b"a,a\n", "repeats a name: a, a"),
    "CSV without the field": ("data.csv", b"a,b\n1,2\n", "there is no field 'answer'; the fields are a, b"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named_with_the_fix(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file, content, said = BAD_FILES[name]
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(BadTask, match=said):
        listed(file)


def test_quoted_line_breaks_of_csv_survive_a_shuffle(tmp_path: Path) -> None:
    path = tmp_path / "quoted.csv"
    path.write_bytes('\ufeffquestion,answer\n"a\n""b"" é",1\nplain,2\n\n"x,\ny",3\n'.encode())
    expected = {'a\n"b" é': "1", "plain": "2", "x,\ny": "3"}
    for seed in (None, 1, 2, 3):
        assert {str(task.prompt): task.answer for task in listed(path, shuffle=seed)} == expected
