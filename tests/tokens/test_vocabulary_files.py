"""A model's folder is read as transformers reads it: the same tokens, ids and first prompts."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from runner.errors import BadModel
from runner.models import ResolvedModel, chat_template
from runner.tokens.bridging.bridge import Bridger
from runner.tokens.tokenizer import VocabularyTokenizer, load_tokenizer
from tests import sweeps
from tests.tokens.vocabularies import NAMES, spoken, vocabulary

pytestmark = [pytest.mark.slow, pytest.mark.sample_cases(5)]

FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
TURNS = (
    "{{{{ bos_token }}}}{{% for m in messages %}}{0}{{{{ m.role }}}}\n{{{{ m.content }}}}{1}\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}{0}assistant\n{{% endif %}}"
)


def written(folder: Path, name: str, moved: int = 0, **files: object) -> list[dict[str, Any]]:
    """Write a vocabulary of `NAMES`, and return its last `moved` added tokens, which tokenizer.json then lacks."""
    settings = json.loads(vocabulary(name)._tokenizer.to_str())
    added: list[dict[str, Any]] = settings["added_tokens"]
    kept = len(added) - moved
    (folder / "tokenizer.json").write_text(json.dumps({**settings, "added_tokens": added[:kept]}))
    for file, content in files.items():
        (folder / f"{file}.json").write_text(json.dumps(content))
    return added[kept:]


def listed(tokens: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in tokens}


def transformers_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def tokens_of(tokenizer: Any) -> dict[int, str]:
    own = tokenizer._tokenizer.get_added_tokens_decoder() if isinstance(tokenizer, VocabularyTokenizer) else None
    return {token_id: repr(token) for token_id, token in (own or tokenizer.added_tokens_decoder).items()}


def check_same(folder: Path) -> VocabularyTokenizer:
    """Check that tokens and ids equal those of transformers, and return our tokenizer."""
    ours, theirs, rng = load_tokenizer(folder), transformers_of(folder), random.Random(7)
    assert tokens_of(ours) == tokens_of(theirs)
    assert ours.eos_id == theirs.eos_token_id
    names = [token.content for token in ours._tokenizer.get_added_tokens_decoder().values()]
    for text in (spoken(rng, names[-40:]) for _ in range(200)):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text
    return ours


@pytest.mark.parametrize("name", sweeps.part(NAMES, 3))
def test_tokens_that_only_the_settings_list_are_tokens(tmp_path: Path, name: str) -> None:
    moved = written(tmp_path, name, moved=7)
    eos = vocabulary(name)._tokenizer.id_to_token(vocabulary(name).eos_id or 0)
    first, last = moved[0]["content"], moved[-1]["content"]
    config = {"added_tokens_decoder": listed(moved), "eos_token": eos, "bos_token": first}
    config["chat_template"] = TURNS.format(first, last)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = check_same(tmp_path)
    assert [ours.encode(token["content"]) for token in moved] == [[token["id"]] for token in moved]
    template = chat_template(ResolvedModel("a model", "", tmp_path))
    bridger = Bridger(ours, template.renderer(), [ours.eos_id or 0])
    history = [{"role": "user", "content": "What is 1 + 1?"}, {"role": "system", "content": "Briefly."}]
    theirs = transformers_of(tmp_path).apply_chat_template(history, add_generation_prompt=True, return_dict=False)
    assert list(bridger.first_prompt(history)) == theirs  # type: ignore[arg-type]  # as parsed from JSON


LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "legacy": {
        "special_tokens_map": {
            "eos_token": {"content": "<unused98>", "lstrip": True},
            "bos_token": "<start>",
            "additional_special_tokens": ["<more>", "<most>"],
        },
        "added_tokens": {"<more>": 32197, "<start>": 32198, "<think>": 32199, "[over]": 5},
        "tokenizer_config": {"eos_token": "</s>", "unk_token": "<unk>"},
    },
    "legacy beside a list": {
        "special_tokens_map": {"eos_token": "<unused98>"},
        "added_tokens": {"<think>": 32197},
        "tokenizer_config": {"added_tokens_decoder": {}, "eos_token": "</s>"},
    },
    "extra list": {"tokenizer_config": {"extra_special_tokens": ["<end_of_turn>", "<call>"], "eos_token": "<eos>"}},
    "extra names": {
        "tokenizer_config": {
            "extra_special_tokens": {"image_token": "<image>"},
            "audio_token": "<audio>",
            "eos_token": "<eos>",
            "pad_token": "[PAD]",
        }
    },
    "additional": {"tokenizer_config": {"additional_special_tokens": ["<call>", "<b>"], "sep_token": "<sep>"}},
    "flags": {
        "tokenizer_config": {
            "added_tokens_decoder": {
                "5": {"content": "<pad>", "special": True, **FLAGS, "rstrip": True},
                "115": {"content": "<unused1>", "special": True, **FLAGS},
                "40000": {"content": "<far>", "special": False, **FLAGS, "normalized": True},
            },
            "eos_token": {"__type": "AddedToken", "content": "<stop>", **FLAGS, "normalized": True},
        }
    },
    "nothing": {},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_file_that_transformers_reads_is_read(tmp_path: Path, layout: str) -> None:
    written(tmp_path, "gemma", **LAYOUTS[layout])
    check_same(tmp_path)


def test_templates_read_the_models_own_names_of_its_tokens(tmp_path: Path) -> None:
    written(tmp_path, "gemma", **LAYOUTS["extra names"])
    (tmp_path / "chat_template.jinja").write_text("{{ image_token }}{{ pad_token }}{{ eos_token }}")
    template = chat_template(ResolvedModel("a model", "", tmp_path))
    assert template.variables == {"image_token": "<image>", "pad_token": "[PAD]", "eos_token": "<eos>"}
    history = [{"role": "user", "content": "A question."}]
    theirs = transformers_of(tmp_path).apply_chat_template(history, tokenize=False)
    assert template.renderer().render(history) == theirs


def test_a_folder_whose_files_add_nothing_keeps_the_fingerprint(tmp_path: Path) -> None:
    written(tmp_path, "gemma", tokenizer_config={"eos_token": "<eos>"})
    plain = load_tokenizer(tmp_path).fingerprint
    assert plain == VocabularyTokenizer((tmp_path / "tokenizer.json").read_text()).fingerprint
    written(tmp_path, "gemma", tokenizer_config={"eos_token": "<stop>"})
    assert load_tokenizer(tmp_path).fingerprint != plain


@pytest.mark.parametrize("content", ['{"added_tokens_decoder": {"1": "<s>"}}', "{"], ids=["no token", "no JSON"])
def test_malformed_tokenizer_config_is_refused(tmp_path: Path, content: str) -> None:
    written(tmp_path, "gemma")
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(BadModel, match=r"'<s>' is listed as a token|tokenizer_config.json is not JSON"):
        load_tokenizer(tmp_path)
