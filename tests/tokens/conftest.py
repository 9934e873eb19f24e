"""Vocabularies and templates that the token tests share."""

from pathlib import Path

import pytest

from runner.tokens.bridging.bridge import Bridger
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.template import ChatTemplate, Renderer
from runner.tokens.tokenizer import Tokenizer, VocabularyTokenizer, load_tokenizer


@pytest.fixture(scope="session")
def vocabulary(demo_model_folder: Path) -> VocabularyTokenizer:
    return load_tokenizer(demo_model_folder)


@pytest.fixture(scope="session", params=["bytes", "smollm2"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "bytes":
        return ByteTokenizer()
    loaded: VocabularyTokenizer = request.getfixturevalue("vocabulary")
    return loaded


@pytest.fixture(scope="session", params=["pythonic", "hermes"])
def bundled(request: pytest.FixtureRequest) -> Renderer:
    return ChatTemplate.load(str(request.param)).renderer()


@pytest.fixture(scope="session")
def made(bundled: Renderer, tokenizer: Tokenizer) -> Bridger:
    """A bridger for each bundled template with each tokenizer."""
    assert tokenizer.eos_id is not None
    return Bridger(tokenizer, bundled, [tokenizer.eos_id])
