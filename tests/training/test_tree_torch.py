"""Token trees with models: inputs, refused models, outputs, and the page."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runner.errors import BadBatch, BadModel
from runner.options import Sampling
from runner.tokens.log import TokenLog
from runner.training.advantages import grpo
from runner.training.batch import TrainingBatch
from runner.training.rows import TrainingRow
from runner.training.selection import Selection
from runner.training.token_masks import UNCONSTRAINED_INDEX, TokenMasks
from runner.training.tree import TokenTree
from runner.trajectory import Group, Turn
from tests.repository import DOCS
from tests.training.making import group as made_group
from tests.training.making import made, prompt, said
from tests.training.tiny import (
    EXACT_TOLERANCE,
    GROUPS,
    VOCABULARY_SIZE,
    gradients,
    group,
    in_its_own_dtype,
    largest_difference,
    llama,
    on_one_thread,
    row,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from runner.training.grammar_torch import head_logprobs  # noqa: E402  # it imports torch
from runner.training.tree_torch import (  # noqa: E402  # imports torch, which the tests need
    block_mask,
    tree_difference,
    tree_head_logprobs,
    tree_hidden,
    tree_inputs,
    tree_logits,
    tree_logprobs,
)

one_thread = pytest.fixture(autouse=True)(on_one_thread)


def test_the_inputs_are_what_transformers_takes() -> None:
    tree = TokenTree.of(GROUPS["a group"])
    inputs = tree_inputs(tree)
    assert inputs["input_ids"].tolist() == [tree.ids.tolist()]
    assert inputs["position_ids"].tolist() == [tree.positions.tolist()]
    assert np.array_equal(inputs["attention_mask"][0, 0].numpy(), tree.mask())
    added = tree_inputs(tree, torch.bfloat16)["attention_mask"]
    assert added.shape == (1, 1, len(tree), len(tree))
    assert added.dtype == torch.bfloat16
    assert np.array_equal(added[0, 0].float().numpy() == 0, tree.mask())
    assert added.min() == torch.finfo(torch.bfloat16).min


def test_the_block_mask_of_flex_attention_shows_the_same() -> None:
    tree = TokenTree.of(GROUPS["several groups with one system prompt"])
    mask = block_mask(tree)
    query, key = np.indices((len(tree), len(tree)))
    shown = mask.mask_mod(0, 0, torch.from_numpy(query), torch.from_numpy(key))
    assert np.array_equal(shown.numpy(), tree.mask())
    assert mask.shape == (1, 1, len(tree), len(tree))


def test_the_head_is_run_where_an_id_is_trained_and_nowhere_else() -> None:
    rows, model = GROUPS["a group"], llama()
    tree = TokenTree.of(rows)
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda _module, given, _result: seen.append(given[0].shape[1]))
    assert tree_logits(model, tree).shape == (len(tree.logit_nodes), VOCABULARY_SIZE)
    assert seen == [len(tree.logit_nodes)]
    assert len(tree.logit_nodes) < len(tree) / 1.3


class Wrapped:
    """Wrapper like those of data parallelism, which passes on any argument."""

    def __init__(self, module: Any) -> None:
        self.module, self.parameters = module, module.parameters

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    __call__ = forward


class WholeHead:
    """Model that cannot limit its head to some positions, and that ignores its mask if `blind` is set."""

    def __init__(self, inner: Any, *, blind: bool = False) -> None:
        self.inner, self.blind = inner, blind
        self.config, self.dtype, self.parameters = inner.config, inner.dtype, inner.parameters

    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, **_: Any) -> Any:
        return self.inner(input_ids, None if self.blind else attention_mask, position_ids, use_cache=False)

    __call__ = forward


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrapper", [Wrapped, WholeHead, compiled])
def test_wrapped_model_has_the_same_logits(wrapper: Callable[[Any], Any]) -> None:
    model, tree = llama(), TokenTree.of(GROUPS["a group"])
    assert torch.equal(tree_logits(wrapper(model), tree), tree_logits(model, tree))


def test_autocast_takes_the_tree_of_a_float32_model() -> None:
    model, tree = llama(dtype="float32"), TokenTree.of(GROUPS["a group"])
    with torch.autocast("cpu", torch.bfloat16):
        logits = tree_logits(model, tree)
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - tree_logits(model, tree)).abs().mean() < 0.1


def sampled_at(one: TrainingRow, temperature: float) -> TrainingRow:
    """Return the same row, sampled completely in one turn."""
    log = TokenLog()
    log.append_sampled(one.ids.tolist(), None)
    turn = Turn("main", 0, log, 0, len(one), sampling=Sampling(temperature=temperature))
    return replace(one, turns=(turn,))


@pytest.mark.parametrize("colder", [0.7, 0.2], ids=["one temperature", "two temperatures"])
def test_logits_are_divided_by_the_temperature_of_each_row(colder: float) -> None:
    rows = [sampled_at(one, 0.7) for one in group(12, [9, 14])] + [sampled_at(group(12, [9])[0], colder)]
    model, tree = llama(), TokenTree.of(rows)
    logits, terms = tree_logits(model, tree), tree.terms
    temperatures = torch.tensor([0.7, 0.7, colder], dtype=torch.float64)[terms.row]
    expected = (logits[terms.logit] / temperatures[:, None]).log_softmax(-1)[torch.arange(len(terms)), terms.target_id]
    assert (tree_logprobs(logits, tree) - expected).abs().max() < 1e-6  # temperatures are float32


def test_rows_that_share_a_node_may_be_held_to_different_grammars() -> None:
    random = np.random.default_rng(0)
    rows = [row([1, 2, 3], 2, random), sampled_at(row([1, 2, 3], 2, random), 0.5), row([1, 2, 3], 2, random)]
    model, tree = llama(), TokenTree.of(rows)
    table = np.array([[1 << 3, 0], [1 << 3 | 1 << 4, 0]], dtype=np.int32)
    masks = TokenMasks(table, np.array([0, 1, UNCONSTRAINED_INDEX], dtype=np.int32), VOCABULARY_SIZE)
    logits = tree_logits(model, tree)
    first, second, third = tree_logprobs(logits, tree, masks).tolist()
    assert first == 0
    assert second == pytest.approx(float((logits[0, 3:5] / 0.5).log_softmax(-1)[0].detach()))
    assert third == pytest.approx(float(logits[0].log_softmax(-1)[3].detach()))


def test_hidden_states_and_head_give_the_same_log_probabilities() -> None:
    model, tree = llama(), TokenTree.of(GROUPS["rows twice and cut short"])
    terms, masks = tree.terms, unmasked(tree)
    hidden = tree_hidden(model, tree)
    assert hidden.shape == (len(tree.logit_nodes), 32)
    logprobs = head_logprobs(hidden[terms.logit], model.lm_head.weight, terms.target_id, masks, terms.temperatures)
    assert (logprobs - tree_logprobs(tree_logits(model, tree), tree)).abs().max() < EXACT_TOLERANCE


def unmasked(tree: TokenTree) -> TokenMasks:
    return TokenMasks(
        np.empty((0, 2), dtype=np.int32), np.full(len(tree.terms), UNCONSTRAINED_INDEX, np.int32), VOCABULARY_SIZE
    )


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "under autocast"])
def test_head_with_a_bias_has_equal_logprobs(autocast: bool) -> None:
    tree, model = TokenTree.of(GROUPS["rows twice and cut short"]), llama(dtype="float32")
    model.lm_head.bias = torch.nn.Parameter(torch.randn(VOCABULARY_SIZE))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logprobs = tree_head_logprobs(model, tree, unmasked(tree))
    assert logprobs.dtype == torch.float32
    exact = tree_logprobs(tree_logits(model, tree), tree)
    assert (logprobs - exact).abs().max() < (0.5 if autocast else 1e-4)
    model.lm_head.bias = None
    assert (tree_logprobs(tree_logits(model, tree), tree) - exact).abs().max() > 0.5


def small(family: str, **settings: Any) -> Any:
    config = getattr(transformers, f"{family}Config")(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY_SIZE,
        **settings,
    )
    return getattr(transformers, f"{family}ForCausalLM")(config)


def test_model_that_changes_logits_after_the_head_is_refused() -> None:
    tree = TokenTree.of(GROUPS["a group"])
    with pytest.raises(BadModel, match=r"GraniteForCausalLM changes its logits after the head \(logits_scaling\): use"):
        tree_head_logprobs(small("Granite", logits_scaling=2.0), tree, unmasked(tree))


def test_wrapper_that_needs_the_forward_pass_is_not_bypassed() -> None:
    wrapper, tree = torch.nn.Module(), TokenTree.of(GROUPS["a group"])
    wrapper.module = llama()
    with pytest.raises(
        BadModel, match="Module has to run the forward pass, but this call bypasses it: use tree_logits"
    ):
        tree_hidden(wrapper, tree)


def test_log_probabilities_of_half_precision_are_float32() -> None:
    tree = TokenTree.of(GROUPS["a group"])
    logits = torch.randn(len(tree.logit_nodes), VOCABULARY_SIZE, dtype=torch.bfloat16)
    assert tree_logprobs(logits, tree).dtype == torch.float32


def mamba() -> Any:
    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=VOCABULARY_SIZE, state_size=4)
    return transformers.MambaForCausalLM(config)


def griffin() -> Any:
    config = transformers.RecurrentGemmaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, lru_width=32, vocab_size=64
    )
    return transformers.RecurrentGemmaForCausalLM(config)


def bloom() -> Any:
    return transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=64))


def flash() -> Any:
    model = llama()
    model.config._attn_implementation = "flash_attention_2"
    return model


def neo() -> Any:
    config = transformers.GPTNeoConfig(
        hidden_size=32, num_layers=2, num_heads=2, vocab_size=64, attention_types=[[["global", "local"], 1]]
    )
    return transformers.GPTNeoForCausalLM(config)


def codegen() -> Any:
    config = transformers.CodeGenConfig(n_embd=32, n_layer=1, n_head=4, rotary_dim=4, vocab_size=64)
    model = transformers.CodeGenForCausalLM(config)
    model.config._attn_implementation = "token_tree"
    return model


def sparse() -> Any:
    model = llama()
    model.config.layer_types = ["full_attention", "linear_attention"]
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (flash, "LlamaForCausalLM attends with 'flash_attention_2', which does not support tree masks. Load it with"),
        (mamba, "MambaForCausalLM has layers that a mask cannot restrict to a branch"),
        (sparse, "LlamaForCausalLM has layers that a mask cannot restrict to a branch"),
        (griffin, "RecurrentGemmaForCausalLM has layers that a mask cannot restrict to a branch"),
        (neo, "GPTNeoForCausalLM has layers that a mask cannot restrict to a branch"),
        (codegen, "CodeGenForCausalLM has a custom attention: load it with attn_implementation='eager'"),
        (bloom, "BloomForCausalLM has no position_ids"),
        (
            lambda: small("Mistral", sliding_window=8),
            "MistralForCausalLM has an attention window of 8 ids, .* a row of 31",
        ),
    ],
    ids=[
        "flash attention",
        "a state",
        "a layer with a state",
        "a state between windows",
        "local layers",
        "an attention of its own",
        "no positions",
        "a window",
    ],
)
def test_a_model_that_cannot_see_a_tree_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(BadModel, match=message):
        tree_logits(make(), TokenTree.of(GROUPS["a group"]))


def test_a_window_as_long_as_the_rows_does_no_harm() -> None:
    model = in_its_own_dtype(small("Mistral", sliding_window=31).double()).eval()
    assert tree_difference(model, TokenTree.of(GROUPS["a group"])) < EXACT_TOLERANCE


def test_a_tree_without_nodes_has_no_logits() -> None:
    with pytest.raises(BadBatch, match="the tree has no nodes"):
        tree_logits(llama(), TokenTree.of([]))


def test_untrained_row_has_no_terms() -> None:
    rows = group(12, [9, 14])
    untrained = row(rows[0].ids.tolist(), len(rows[0]), np.random.default_rng(0))
    tree = TokenTree.of([untrained])
    logits = tree_logits(llama(), tree)
    assert logits.shape == (0, VOCABULARY_SIZE)
    assert tree_logprobs(logits, tree).shape == (0,)
    assert tree_difference(llama().eval(), TokenTree.of([*rows, untrained])) < EXACT_TOLERANCE


def test_the_difference_shows_a_model_that_does_not_see_trees() -> None:
    tree, model = TokenTree.of(GROUPS["a group"]), llama().eval()
    assert tree_difference(model, tree) < EXACT_TOLERANCE
    assert tree_difference(WholeHead(model, blind=True), tree) > 0.1


# --- the page


def names_of(page: str) -> dict[str, Any]:
    """Return the names that a page's Python blocks define."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL):
        exec(compile(block, page, "exec"), names)
    return names


def two_groups() -> list[Group]:
    """Return groups of three and two that share a system prompt. The second group also shares its first words."""
    system = prompt(*range(1, 21))
    first = [made([system, prompt(30), said(*ids)], id=f"a#{ids[0]}", reward=ids[0]) for ids in [(0, 7), (1, 9), (2,)]]
    second = [made([system, prompt(31), said(5, *ids)], id=f"b#{ids[0]}", reward=ids[0]) for ids in [(0, 7, 8), (1,)]]
    return [made_group(*first), made_group(*second)]


def test_page_gradients_equal_those_of_the_padded_page(capsys: pytest.CaptureFixture[str]) -> None:
    model, groups, page = llama().eval(), two_groups(), names_of("shared-prefixes.md")
    batch = TrainingBatch.padded(groups, pad_id=0, advantages=grpo, drop_flat=True)
    padded_names = names_of("training-batches.md")
    _, padded = gradients(model, lambda: padded_names["loss"](model, batch).backward())
    _, tree = gradients(model, lambda: page["gradients"](model, groups))
    assert largest_difference(padded, tree) < 1e-5  # the pages compute log-probabilities in float32
    assert max(float(gradient.abs().max()) for gradient in padded.values()) > 1e-2
    assert capsys.readouterr().out == "5 rows as 1 tree: 32 nodes for 116 ids (3.6x), 125 padded (3.9x); logits at 7\n"
    assert page["proven"](model, groups) < EXACT_TOLERANCE


def test_page_model_computes_one_tree_and_is_saved(tmp_path: Path) -> None:
    llama(dtype="float32").save_pretrained(tmp_path)
    page = names_of("shared-prefixes.md")
    model = page["loaded"](tmp_path).eval()
    (tree,) = page["one_tree"](Selection.of(two_groups()))
    assert model.config._attn_implementation == page["TREE_ATTENTION"]
    assert tree_difference(model, tree) < 1e-4
    model.save_pretrained(tmp_path / "again")
    assert page["TREE_ATTENTION"] not in (tmp_path / "again" / "config.json").read_text()


def test_the_two_ways_to_constrained_turns_of_the_page_agree() -> None:
    model, rows, page = llama().eval(), GROUPS["a group"], names_of("shared-prefixes.md")
    tree = TokenTree.of(rows)
    index = np.arange(len(tree.terms), dtype=np.int32) % 2 - 1  # every other term is unconstrained
    masks = TokenMasks(np.array([[-1, 0]], dtype=np.int32), index, VOCABULARY_SIZE)
    grammars = SimpleNamespace(masks_for_terms=lambda _rows, _terms: masks)
    logits_first, hidden_first = (
        page[name](model, tree, rows, grammars) for name in ("constrained", "constrained_and_fast")
    )
    assert torch.allclose(logits_first, hidden_first, atol=1e-6)
    assert (logits_first != tree_logprobs(tree_logits(model, tree), tree)).any()
