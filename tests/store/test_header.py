"""The header: recorded fields, allowed changes, and hidden secrets."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from zoneinfo import ZoneInfo

import pytest

from runner.interop.mixture import Mixture
from runner.options import History, HistoryPolicy, Limits, Sampling
from runner.runs.options import RunOptions
from runner.runs.run_header import describe_run
from runner.scoring import Scorer, ScorerKind
from runner.store.header import Header, OnChange
from runner.store.secrets import hide_secrets, is_secret_name
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.template import ChatTemplate
from tests.store.building import CLOCK, header

SECRETS = [
    "api_key",
    "key",
    "apiKey",
    "OPENAI_API_KEY",
    "hf_token",
    "token",
    "access_token",
    "password",
    "clientSecret",
]
NO_SECRETS = [
    "max_tokens",
    "token_ids",
    "eos_token",
    "image_token",
    "keyboard",
    "monkey",
    "tokenizer",
    "secretary",
    "n",
]


@pytest.mark.parametrize("name", SECRETS)
def test_names_of_secrets_are_recognized(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", sorted({*NO_SECRETS} - {"token_ids"}))
def test_other_names_are_not_taken_for_secrets(name: str) -> None:
    assert not is_secret_name(name)


def test_text_under_a_secret_name_becomes_a_hash_at_any_depth() -> None:
    hidden = hide_secrets(
        {
            "api_key": "sk-1234567890",
            "judge": {"token": "t0p"},
            "keys": ["a", "b"],
            "many": [{"password": "p"}],
            "url": "u",
        }
    )
    assert "sk-1234567890" not in str(hidden)
    assert hidden["api_key"].startswith("sha256:")
    assert hidden["judge"]["token"].startswith("sha256:")
    assert all(item.startswith("sha256:") for item in [*hidden["keys"], hidden["many"][0]["password"]])
    assert hidden["url"] == "u"


def test_only_text_is_hidden() -> None:
    plain = {
        "token_ids": [1, 2],
        "use_key": True,
        "key": None,
        "max_tokens": 5,
        "eos_token": "<|im_end|>",
        "secret": "",
    }
    assert hide_secrets(plain) == plain


def test_equal_secrets_have_equal_hashes_so_runs_resume() -> None:
    assert hide_secrets({"key": "a"}) == hide_secrets({"key": "a"})
    assert hide_secrets({"key": "a"}) != hide_secrets({"key": "b"})


def test_a_header_comes_back_as_it_was() -> None:
    written = header(arguments={"highest": 20}, unrecorded=("model",), seed=7, git={"revision": "abc", "dirty": True})
    assert Header.from_json(written.to_json()) == written


def test_fields_of_other_versions_are_left_out() -> None:
    assert Header.from_json(header().to_json().replace('"seed"', '"mood":1,"seed"')) == header()


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [f"{change.meaning}: {change}" for change in header(**old).changes(header(**new))]


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        ({"seed": 1}, {"seed": 2}, "refuse: seed: 1 -> 2"),
        ({"arguments": {"a": 1}}, {"arguments": {"a": 1, "b": "x"}}, 'refuse: arguments.b: (not set) -> "x"'),
        ({"limits": {"turns": None}}, {"limits": {"turns": 4}}, "refuse: limits.turns: null -> 4"),
        ({"group_size": 1}, {"group_size": 8}, "refuse: group_size: 1 -> 8"),
        ({"weights": {"a": 1.0}}, {"weights": {"a": 0.0}}, "refuse: weights.a: 1.0 -> 0.0"),
        ({"wording": 1}, {"wording": 2}, "refuse: wording: 1 -> 2"),
        ({"engine": {"model": "a"}}, {"engine": {"model": "b"}}, 'refuse: engine.model: "a" -> "b"'),
        (
            {"engine": {"replies": {"list": 1}}},
            {"engine": {"replies": {"list": 2}}},
            "refuse: engine.replies.list: 1 -> 2",
        ),
        ({"engine": {"places": 8}}, {"engine": {"places": 16}}, "free: engine.places: 8 -> 16"),
        (
            {"engine": {"versions": {"vllm": "1"}}},
            {"engine": {"versions": {"vllm": "2"}}},
            'warn: engine.versions.vllm: "1" -> "2"',
        ),
        (
            {"engine": {"arguments": {"max_num_seqs": 8, "dtype": "float32"}}},
            {"engine": {"arguments": {"max_num_seqs": 8, "dtype": "bfloat16"}}},
            'refuse: engine.arguments.dtype: "float32" -> "bfloat16"',
        ),
        (
            {"engine": {"dtype": "float32"}},
            {"engine": {"dtype": "bfloat16"}},
            'refuse: engine.dtype: "float32" -> "bfloat16"',
        ),
        ({"engine": {}}, {"engine": {"dtype": "bfloat16"}}, 'free: engine.dtype: (not set) -> "bfloat16"'),
        (
            {"engine": {"dtype": "float32"}},
            {"engine": {"dtype": "float32", "arguments": {"dtype": "float32"}}},
            'free: engine.arguments.dtype: (not set) -> "float32"',
        ),
        (
            {"engines": {"judge": {"dtype": "float32"}}},
            {"engines": {"judge": {"dtype": "float16"}}},
            'refuse: engines.judge.dtype: "float32" -> "float16"',
        ),
        ({"arguments": {"dtype": 1}}, {"arguments": {"dtype": 2}}, "refuse: arguments.dtype: 1 -> 2"),
        (
            {"engines": {"judge": {"model": "a"}}},
            {"engines": {"judge": {"model": "b"}}},
            'refuse: engines.judge.model: "a" -> "b"',
        ),
        ({"concurrency": {"episodes": 8}}, {"concurrency": {"episodes": 64}}, "free: concurrency.episodes: 8 -> 64"),
        ({"git": {"revision": "a"}}, {"git": {"revision": "b"}}, 'warn: git.revision: "a" -> "b"'),
        ({"code": {"mine": "a"}}, {"code": {"mine": "b"}}, 'warn: code.mine: "a" -> "b"'),
        ({}, {"code": {"mine": "b"}}, 'free: code.mine: (not set) -> "b"'),
        ({"versions": {"python": "3.11"}}, {"versions": {"python": "3.12"}}, 'warn: versions.python: "3.11" -> "3.12"'),
        ({"clock": CLOCK}, {"clock": datetime(2027, 1, 1, tzinfo=UTC)}, "free: clock: "),
        ({"template": {"name": "a"}}, {"template": {"name": "b"}}, 'free: template.name: "a" -> "b"'),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_change_is_described_with_its_consequence(old: dict[str, Any], new: dict[str, Any], change: str) -> None:
    (found,) = changes(old, new)
    assert found.startswith(change)


def test_a_long_text_is_shown_by_its_first_line_that_differs() -> None:
    lines = [f"line {number} of a template" for number in range(20)]
    old, new = "\n".join(lines), "\n".join([*lines[:11], "another", *lines[12:]])
    (found,) = changes({"template": {"text": old}}, {"template": {"text": new}})
    assert found == 'refuse: template.text: differs from line 12 on: "line 11 of a template" -> "another"'


def test_longer_text_differs_in_its_first_extra_line() -> None:
    old = "\n".join(f"line {number} of a template" for number in range(5))
    (found,) = changes({"system_prompt": old}, {"system_prompt": f"{old}\nmore"})
    assert found == 'refuse: system_prompt: differs from line 6 on: "" -> "more"'


def test_refused_changes_prevent_a_resume() -> None:
    old, new = header(seed=1, concurrency={"a": 1}), header(seed=2, concurrency={"a": 2}, versions={"x": "1"})
    assert [change.path for change in old.refused(new)] == ["seed"]
    assert {change.meaning for change in old.changes(new)} == set(OnChange)


# --- the record of a run


@dataclass
class Account:
    user: str
    password: str


class ServerProbe:
    """The part of an environment that the header reads."""

    system_prompt = "Be kind."
    tool_choice = "auto"
    sampling = Sampling(temperature=0.5)
    limits = Limits()
    scorers = (Scorer("correct", ScorerKind.REWARD), Scorer("n", ScorerKind.METRIC))

    def construction(self) -> dict[str, Any]:
        account = Account("me", "hunter2")
        return {
            "highest": 20,
            "api_key": "sk-123",
            "account": account,
            "model": object(),
            "path": Path("a"),
            "b": (1, 2),
        }

    def parts(self) -> dict[str, Any]:
        return {"": self}

    def bound_tools(self) -> list[Any]:
        return [SimpleNamespace(name="add", as_openai=lambda: {"type": "function", "function": {"name": "add"}})]


def header_of(environment: object, now: datetime = CLOCK, reward: str = "correct") -> Header:
    template = ChatTemplate("{{ messages }}", name="pythonic", variables={"eos_token": "<|im_end|>"})
    engine = SimpleNamespace(
        describe=lambda: {"kind": "scripted", "arguments": {"hf_token": "hf_123"}},
        template=template,
        tokenizer=ByteTokenizer(["<|call|>"]),
        stop_ids=(257,),
    )
    options = RunOptions(
        sampling=Sampling(max_tokens=64),
        group_size=4,
        seed=3,
        template_options={"enable_thinking": False},
        weights={reward: 2.0},
        history=History(policy=HistoryPolicy.FORK),
        file=Path("run.db"),
    )
    object.__setattr__(options, "engines", {"judge": engine})
    return describe_run(cast("Any", environment), cast("Any", engine), options, now=now)


def test_header_has_the_whole_configuration() -> None:
    written = Header.from_json(header_of(ServerProbe()).to_json())
    assert written.environment.endswith(":ServerProbe")
    assert written.arguments["highest"] == 20
    assert written.arguments["path"] == "a"
    assert written.arguments["b"] == [1, 2]
    assert written.unrecorded == ("model",)
    assert written.tools["add"]["type"] == "function"
    assert written.template["text"] == "{{ messages }}"
    assert written.template["turns"]["format"]["calls"]["call"]
    assert written.template["variables"] == {"eos_token": "<|im_end|>"}
    assert written.template_options == {"enable_thinking": False}
    assert (written.sampling, written.environment_sampling) == ({"max_tokens": 64}, {"temperature": 0.5})
    assert written.limits["seconds"] == 600
    assert History(**written.history) == History(policy=HistoryPolicy.FORK)
    assert written.weights == {"correct": 2.0}
    assert written.versions["python"] == sys.version.split()[0]
    assert "anyio" in written.versions
    assert written.clock == CLOCK


def test_header_describes_every_vocabulary() -> None:
    written = Header.from_json(header_of(ServerProbe()).to_json())
    for engine in (written.engine, written.engines["judge"]):
        again = ByteTokenizer(engine["control_tokens"], eos_token=engine["eos_token"])
        assert again.fingerprint == engine["tokenizer"] == ByteTokenizer(["<|call|>"]).fingerprint
        assert engine["stop_ids"] == [257]


def test_clock_of_a_file_prints_like_the_clock_of_its_run() -> None:
    begun = header_of(ServerProbe(), now=datetime(2026, 3, 1, 12, tzinfo=ZoneInfo("America/New_York")))
    stored = Header.from_json(begun.to_json())
    assert begun.clock.strftime("%c %Z") == stored.clock.strftime("%c %Z")
    assert stored.clock.utcoffset() == timedelta(hours=-5)


OF_ALL = """
from runner import Environment, Task, reward

class OfAll(Environment):
    right = 0

    def tasks(self):
        return [Task(prompt="")]

    @reward
    def correct(self):
        return float(self.right)
"""


def test_code_is_a_hash_of_each_file_that_defines_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_all.py").write_text(OF_ALL)
    source = tmp_path / "of_one.py"
    source.write_text("from of_all import OfAll\n\nclass OfOne(OfAll):\n    right = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    from of_one import OfOne  # type: ignore[import-not-found]  # this test writes the module

    first = header_of(OfOne()).code
    assert first.keys() == {"of_all", "of_one"}
    assert header_of(Mixture({"a": OfOne()}), reward="a.correct").code == first
    source.write_text(source.read_text().replace("right = 1", "right = 2"))
    second = header_of(OfOne()).code
    assert [module for module in first if first[module] != second[module]] == ["of_one"]


def test_no_secret_is_in_the_header_of_a_run() -> None:
    text = header_of(ServerProbe()).to_json()
    for secret in ("sk-123", "hunter2", "hf_123"):
        assert secret not in text


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, "-C", str(folder), *arguments], check=True, capture_output=True)


def test_the_revision_is_that_of_the_environments_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "info.py"
    source.write_text("from tests.store.test_header import ServerProbe\n\nclass Mine(ServerProbe):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import info  # type: ignore[import-not-found]  # this test writes the module

    assert header_of(info.Mine()).git == {}
    git(tmp_path, "init")
    git(tmp_path, "add", "info.py")
    git(tmp_path, "commit", "-m", "first")
    (tmp_path / ".gitignore").write_text("__pycache__\n.gitignore\n")
    clean = header_of(info.Mine()).git
    assert len(clean["revision"]) == 40
    assert clean["dirty"] is False
    source.write_text(source.read_text() + "# changed\n")
    assert header_of(info.Mine()).git == {"revision": clean["revision"], "dirty": True}
