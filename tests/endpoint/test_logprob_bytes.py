"""The bytes of each token in log-probabilities: joined, they are the text, even if a token is half a character."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner import Endpoint
from runner.endpoint.wire_form import logprob_rows
from runner.testing import AwkwardTokenizer, PlainTokenizer, Reply
from runner.tokens.decode import text_of_token
from runner.tokens.tokenizer import Tokenizer, load_tokenizer
from tests.endpoint.serving import openai_client, served, user
from tests.playing import recording

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone]

TEXTS = [
    "Plain words.",
    "größe",
    "日本語",
    "\U0001f600 \U0001f468\u200d\U0001f469",
    " leading",
    "a\n\n  b",
    "ä€𝄞\u0301",
]


def rows_of(tokenizer: Tokenizer, ids: list[int]) -> list[dict[str, Any]]:
    def text_of(given: Any, /) -> str:
        return "".join(text_of_token(tokenizer, each) for each in given)

    return logprob_rows(text_of, ids, [-1.0] * len(ids), None, count=0)


def assert_bytes(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    rows = rows_of(tokenizer, ids)
    assert bytes(byte for row in rows for byte in row["bytes"]).decode() == text
    for row in rows:
        raw = bytes(row["bytes"])
        try:
            assert row["token"] == raw.decode()
        except UnicodeDecodeError:
            assert row["token"].encode().decode("unicode_escape").encode("latin-1") == raw or "\\x" in row["token"]
        assert "\ufffd" not in row["token"]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_single_byte_tokens_joined_are_the_text(text: str) -> None:
    for tokenizer in (PlainTokenizer(), AwkwardTokenizer()):
        assert_bytes(tokenizer, tokenizer.normalize(text), tokenizer.encode(tokenizer.normalize(text)))


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_a_byte_level_vocabulary_joined_are_the_text(text: str, demo_model_folder: Path) -> None:
    tokenizer = load_tokenizer(demo_model_folder)
    assert_bytes(tokenizer, text, tokenizer.encode(text))


def test_half_a_character_is_written_as_openai_writes_it() -> None:
    tokenizer = PlainTokenizer()
    rows = rows_of(tokenizer, tokenizer.encode("é!"))
    assert [(row["token"], row["bytes"]) for row in rows] == [("\\xc3", [0xC3]), ("\\xa9", [0xA9]), ("!", [0x21])]


@pytest.mark.parametrize("stream", [False, True])
async def test_openais_client_gets_bytes_that_are_the_text(stream: bool) -> None:
    said = "größe 日本 \U0001f600"

    async def loop(endpoint: Endpoint) -> None:
        asked: Any = {"model": "any", "messages": [user("One.")], "logprobs": True, "top_logprobs": 2}
        rows: list[Any] = []
        async with openai_client(endpoint) as client:
            if stream:
                async for chunk in await client.chat.completions.create(**asked, stream=True):
                    for choice in chunk.choices:
                        rows += choice.logprobs.content or [] if choice.logprobs else []
            else:
                choice = (await client.chat.completions.create(**asked)).choices[0]
                rows = (choice.logprobs.content or []) if choice.logprobs else []
            response = await client.responses.create(
                model="any", input="One.", include=["message.output_text.logprobs"], top_logprobs=1
            )
        assert bytes(byte for row in rows for byte in row.bytes or ()).decode().startswith(said)
        (content,) = (part for item in response.output for part in getattr(item, "content", None) or ())
        content_bytes = [byte for row in content.logprobs or () for byte in row.bytes]
        assert bytes(content_bytes).decode().startswith(said)

    await served(loop, recording([Reply(said)] * 2, template="hermes"), serve={"train": True})
