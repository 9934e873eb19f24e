"""Messages about an error in the author's code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import runner
from runner.concurrency.user_code import describe_error


def failing(file: str, source: str, **names: Any) -> BaseException:
    """Return the error of the function `fail` of a file with this name, without the frames of this test file."""
    exec(compile(source, file, "exec"), names)
    with pytest.raises(Exception) as raised:  # noqa: PT011  # the source raises errors of any class
        names["fail"]()
    return raised.value.with_traceback(raised.tb.tb_next)


@pytest.mark.parametrize(
    ("library", "shown"),
    [
        ("/venv/lib/python3.12/site-packages/games/board.py", "games/board.py"),
        ("/usr/lib/python3/dist-packages/games/board.py", "games/board.py"),
        ("/usr/lib/python3.11/json/decoder.py", "json/decoder.py"),
        ("uvloop/handles/process.pyx", "uvloop/handles/process.pyx"),
    ],
)
def test_error_in_a_library_names_the_authors_line_first(library: str, shown: str) -> None:
    inside: dict[str, Any] = {}
    exec(compile("def move():\n    raise KeyError('x')\n", library, "exec"), inside)
    error = failing("/home/me/game.py", "def fail():\n    move()\n", move=inside["move"])
    assert describe_error(error) == f"KeyError: 'x' (in fail, /home/me/game.py:2; raised in move, {shown}:2)"


def test_an_error_of_an_installed_environment_still_has_a_place() -> None:
    error = failing("/venv/lib/python3.12/site-packages/chess_envs/chess.py", "def fail():\n    1 / 0\n")
    assert describe_error(error) == "ZeroDivisionError: division by zero (raised in fail, chess_envs/chess.py:2)"


def test_a_folder_whose_name_begins_like_ours_is_the_authors() -> None:
    file = f"{Path(runner.__file__).parent}_envs/game.py"
    error = failing(file, "def fail():\n    raise ValueError('lost')\n")
    assert describe_error(error) == f"ValueError: lost (in fail, {file}:2)"
