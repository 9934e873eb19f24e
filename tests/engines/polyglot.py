"""Small models with the control tokens of every family, none of which they have learnt."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from runner.tokens.tokenizer import load_tokenizer
from tests.conformance.corpus import VARIABLES, control_tokens, is_special
from tests.parsing.families import FAMILIES, Family, family

__all__ = ["family_folder", "polyglot_model"]


def polyglot_model(folder: Path, small: Path) -> Path:
    """The small model with the control tokens of every family, and random rows for them."""
    import torch
    from safetensors.torch import load_file, save_file

    for path in small.iterdir():
        shutil.copy(path, folder / path.name)
    vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    known = {**vocabulary["model"]["vocab"], **{token["content"]: token["id"] for token in vocabulary["added_tokens"]}}
    size = max(known.values()) + 1
    for name in _names():
        if name not in known:
            token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            vocabulary["added_tokens"].append({"id": size, "content": name, "special": is_special(name), **token})
            size += 1
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    tensors = load_file(folder / "model.safetensors")
    rows = tensors["model.embed_tokens.weight"]
    more = torch.randn(size - len(rows), rows.shape[1], generator=torch.Generator().manual_seed(0)) * rows.std()
    tensors["model.embed_tokens.weight"] = torch.cat([rows, more.to(rows.dtype)])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": size}), encoding="utf-8")
    return folder


def _names() -> Iterable[str]:
    texts = (family(name).template.renderer().written() for name in FAMILIES)
    return dict.fromkeys([*VARIABLES.values(), *(token for text in texts for token in control_tokens(text))])


def family_folder(folder: Path, polyglot: Path, of: Family) -> Path:
    """Create the same model as a repository of this family contains it: chat template, marks and stop ids."""
    for path in polyglot.iterdir():
        put = os.link if path.suffix == ".safetensors" else shutil.copy
        put(path, folder / path.name)
    (folder / "chat_template.jinja").write_text(of.template.text, encoding="utf-8")
    _change(folder / "tokenizer_config.json", {**VARIABLES, "eos_token": of.ends[0]})
    tokenizer = load_tokenizer(folder)
    stops = [tokenizer.token_id(name) for name in dict.fromkeys(of.ends)]
    _change(folder / "generation_config.json", {"eos_token_id": stops})
    return folder


def _change(path: Path, values: Mapping[str, object]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **values}), encoding="utf-8")
