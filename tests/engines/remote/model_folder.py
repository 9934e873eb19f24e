"""The model folder of a server, whose vocabulary is the bytes and ChatML's control tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from runner.tokens.byte_tokenizer import ByteTokenizer
from tests.repository import ROOT

__all__ = ["byte_model"]


def byte_model(folder: Path, *, further: Sequence[str] = ()) -> Path:
    """Create a folder with everything but weights. Its ids are the ids of a `ByteTokenizer`."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {_sign(byte): byte for byte in range(256)}
    special = [*ByteTokenizer.CHATML, *further]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": 256 + number, "content": name, **flags} for number, name in enumerate(special)],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 257}))
    shutil.copy(ROOT / "templates" / "pythonic.jinja", folder / "chat_template.jinja")
    return folder


def _sign(byte: int) -> str:
    """Return the character that represents a byte in vocabularies of GPT-2's kind."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in plain:
        return chr(byte)
    return chr(256 + [other for other in range(256) if other not in plain].index(byte))
