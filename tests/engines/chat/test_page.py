"""The page on models of an API agrees with the code."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from runner import Sampling
from runner.engines.chat.wire import FIELDS, check_sampling
from runner.errors import BadOption
from runner.testing import play_many_async
from tests.engines.chat.api import asking, serving
from tests.playing import Plain
from tests.repository import DOCS

PAGE = (DOCS / "apis.md").read_text()


def test_every_field_that_can_be_left_out_is_on_the_page() -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith("| `leave_out")]
    assert set(re.findall(r"`(\w+)`", row.partition("does not support:")[2])) == set(FIELDS)


def test_page_lists_supported_and_refused_sampling() -> None:
    def refused(name: str) -> bool:
        other: dict[str, Any] = {"schema": {"type": "string"}, "regex": "a", "choice": ("a",), "adapter": "a"}
        other |= {"logit_bias": {1: 1}, "bad_words": ("a",), "stop": ("a",), "stop_ids": (1,), "ignore_eos": True}
        try:
            check_sampling(Sampling(**{name: other.get(name, 0.5 if "p" in name else 2)}).over(Sampling.defaults()))
        except BadOption:
            return True
        return False

    (some,) = re.findall(r"\*\*Fewer sampling options\.\*\*(.*?)\n- \*\*", PAGE, re.DOTALL)
    asked, _, never = some.partition("are sent.")
    names = {name for name in Sampling.defaults().given() if name not in ("top_k", "min_tokens", "logprobs")}
    for name in names:
        assert f"`{name}`" in (never if refused(name) else asked), name
    for name in ("top_k", "min_tokens", "logprobs"):
        assert f"`{name}`" in never


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), ids=["evaluation", "a judge"])
def test_the_examples_of_the_page_are_sound(block: str) -> None:
    exec(compile(block, "apis.md", "exec"), {"__name__": "example"})


@pytest.mark.asyncio_alone
@pytest.mark.anyio
async def test_the_query_of_the_page_adds_up_what_was_asked(tmp_path: Path) -> None:
    (query,) = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "run.db"
    async with serving("Yes") as api:
        await play_many_async(Plain, asking(api), group_size=3, file=file)
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute(query).fetchall() == [("model-2026-01-01", 3, 21, 9, None)]
