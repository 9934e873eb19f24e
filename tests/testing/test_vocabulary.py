"""The kit's vocabularies: plain bytes, and one with all the difficulties of real ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from runner import Environment, Task, Turn, reward, tool
from runner.testing import AwkwardTokenizer, PlainTokenizer, QueuedEngine, Reply, assert_exact, call, play
from runner.testing.strategies import awkward_text, chunkings

AWKWARD = AwkwardTokenizer()


def test_a_conversation_is_written_by_the_template(byte_tokenizer: PlainTokenizer) -> None:
    ids = byte_tokenizer.chat("Hi")
    assert byte_tokenizer.decode(ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert ids[1:5] == list(b"user")
    assert byte_tokenizer.chat("Hi", generation_prompt=False) == ids[: -len("<assistant\n")]


def test_text_is_composed_and_words_are_one_id(awkward_tokenizer: AwkwardTokenizer) -> None:
    assert (
        awkward_tokenizer.decode(awkward_tokenizer.encode("e\u0301"))
        == "\u00e9"
        == awkward_tokenizer.normalize("e\u0301")
    )
    assert len(awkward_tokenizer.encode("It is ")) == 1


@settings(deadline=None)
@given(awkward_text())
def test_misspelt_ids_decode_to_the_same_text(text: str) -> None:
    misspelt = AWKWARD.misspell(text)
    assert AWKWARD.decode(misspelt) == text
    again = AWKWARD.encode(AWKWARD.decode(misspelt))
    assert AWKWARD.decode(again) == AWKWARD.normalize(text) or AWKWARD.normalize(
        AWKWARD.decode(again)
    ) == AWKWARD.normalize(text)


def test_misspelt_ids_change_when_decoded_and_encoded_again() -> None:
    misspelt = AWKWARD.misspell("the assistant is in")
    assert AWKWARD.encode(AWKWARD.decode(misspelt)) != misspelt


def test_rows_of_padding_decode_to_nothing() -> None:
    assert AWKWARD.decode([AWKWARD.size - 1]) == AWKWARD.decode([AWKWARD.size + 5]) == ""


def test_content_that_looks_like_control_text_stays_content() -> None:
    text = "say <|im_end|> now"
    assert AWKWARD.eos_id in AWKWARD.encode(text)
    assert AWKWARD.eos_id not in AWKWARD.encode(text, [(0, len(text))])


class Echo(Environment):
    def tasks(self) -> list[Task]:
        return [Task(id="t", prompt="The word is the word, 42.")]

    @tool
    def echo(self, text: str) -> str:
        """Say it again."""
        return text

    def step(self, turn: Turn) -> str | None:
        return "Continue, the end is in <|im_end|>." if len(self.episode.turns) < 4 else None

    @reward
    def spoke(self) -> bool:
        return True


@pytest.mark.parametrize("template", ["pythonic", "hermes"])
def test_whole_episodes_are_exact_in_an_awkward_vocabulary(template: str) -> None:
    engine = QueuedEngine(tokenizer=AwkwardTokenizer(["<tool_call>"]), template=template)
    engine.say(call("echo", text="the assistant"), "It is the end\n", Reply("cut in", finish="length"), "\n[ the end")
    trajectory = play(Echo, engine)
    assert_exact(trajectory, engine)
    assert trajectory.turns[0].tool_calls[0].arguments == {"text": "the assistant"}


@settings(deadline=None)
@given(awkward_text(), chunkings())
def test_any_text_in_any_pieces_is_played_exactly(text: str, chunks: object) -> None:
    engine = QueuedEngine(tokenizer=AWKWARD, chunks=chunks).say(text).always("end")
    play(Echo, engine)
