"""A model on token trees: logits, loss and every gradient are those of the padded batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runner.errors import BadBatch, BadModel
from runner.options import Sampling
from runner.tasks import Task
from runner.tokens.log import TokenLog
from runner.training.advantages import grpo
from runner.training.batch import TrainingBatch
from runner.training.grammar import UNCONSTRAINED, TokenMasks
from runner.training.rows import TrainingRow
from runner.training.tree import TokenTree
from runner.trajectory import Group, Trajectory, Turn
from tests.training.making import group as made_group
from tests.training.making import made, prompt, said

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from runner.training.grammar_torch import head_logprobs  # noqa: E402  # and this, too
from runner.training.tree_torch import (  # noqa: E402  # it imports torch, without which all this is skipped
    block_mask,
    tree_difference,
    tree_hidden,
    tree_inputs,
    tree_logits,
    tree_logprobs,
)

TRAJECTORY = Trajectory(id="episode", task=Task(id="task", prompt="Say"), index=0, agent="main", seed=0)
DOCS = Path(__file__).parents[2] / "docs"
VOCABULARY = 64
EXACT = 1e-9
CLOSE = {"sdpa": EXACT, "eager": 1e-4}  # transformers' eager attention has its softmax in float32 whatever the model's

Rows = list[TrainingRow]


def row(ids: Sequence[int], prompt: int, random: np.random.Generator) -> TrainingRow:
    """A row that samples in two turns behind its prompt, with a tool's answer between them."""
    mask = np.arange(len(ids)) >= prompt
    mask[prompt + 3 : prompt + 5] = False
    return TrainingRow(
        trajectory=TRAJECTORY,
        segment=0,
        ids=np.array(ids, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, random.uniform(-6, -2, len(ids)), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turns=(),
    )


def group(prompt: int, lengths: Sequence[int], *, seed: int = 0, begin: Sequence[int] = ()) -> Rows:
    """Rows that share `begin` and a prompt of `prompt` ids, of which every other also shares its first turn."""
    random = np.random.default_rng(seed)
    shared = [*begin, *random.integers(0, VOCABULARY, prompt).tolist()]
    turn = random.integers(0, VOCABULARY, 5).tolist()
    rows = []
    for number, length in enumerate(lengths):
        own = random.integers(0, VOCABULARY, length).tolist()
        ids = shared + (turn + own if number % 2 else own)
        rows.append(row(ids, len(shared), random))
    return rows


def repeated(rows: Rows) -> Rows:
    """Some rows twice, one of them cut short, each time with other log-probabilities."""
    random = np.random.default_rng(9)
    first, last = rows[0].ids.tolist(), rows[-1].ids.tolist()
    return [*rows, row(first, 10, random), row(first, 10, random), row(last[:-4], 10, random)]


GROUPS: dict[str, Rows] = {
    "a group": group(12, [9, 14, 7, 11]),
    "rows twice and cut short": repeated(group(12, [9, 14, 7, 11])),
    "several groups that share nothing": group(12, [9, 8], seed=1) + group(7, [9, 14, 3], seed=2),
    "several groups with one system prompt": group(5, [9, 8], seed=1, begin=range(6))
    + group(7, [9, 14, 3], seed=2, begin=range(6)),
    "one row": group(12, [9]),
}


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Models this small wait for their threads longer than they compute."""
    threads = torch.get_num_threads()
    if request.node.get_closest_marker("engine") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=GROUPS)
def rows(request: pytest.FixtureRequest) -> Rows:
    return GROUPS[request.param]


def llama(*, attention: str = "sdpa", kv_heads: int = 4, dtype: Any = torch.float64, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        vocab_size=VOCABULARY,
        initializer_range=0.4,  # so that attention matters
        attn_implementation=attention,
        **settings,
    )
    return in_its_own_dtype(transformers.LlamaForCausalLM(config).to(dtype))


def in_its_own_dtype(model: Any) -> Any:
    """The same model with torch's norms; those of transformers compute in float32, whatever the model's dtype."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = torch.nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon, dtype=model.dtype)
            model.set_submodule(name, norm)
    return model


def padded_logits(model: Any, rows: Rows) -> Any:
    """The logits of one padded batch, shape [rows, longest, vocabulary]."""
    longest = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.int64), torch.zeros(len(rows), longest, dtype=torch.int64)
    for index, one in enumerate(rows):
        ids[index, : len(one)] = torch.from_numpy(one.ids)
        mask[index, : len(one)] = 1
    return model(input_ids=ids, attention_mask=mask, use_cache=False).logits


def padded_logprobs(model: Any, rows: Rows) -> Any:
    """The log-probability of each trained id of each row, as a padded batch gives it, shape [terms]."""
    logprobs = padded_logits(model, rows).log_softmax(-1)
    return torch.stack(
        [
            logprobs[index, position - 1, one.ids[position]]
            for index, one in enumerate(rows)
            for position in np.flatnonzero(one.loss_mask)
        ]
    )


def clipped_loss(new: Any, old: np.ndarray[Any, Any], advantages: np.ndarray[Any, Any]) -> Any:
    """The sum of PPO's clipped terms."""
    advantage = torch.from_numpy(advantages).to(new.dtype)
    ratio = (new - torch.from_numpy(old).to(new.dtype)).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()


def advantages_of(rows: Rows) -> np.ndarray[Any, Any]:
    return np.linspace(-1.5, 2.0, len(rows))


def padded_loss(model: Any, rows: Rows) -> float:
    """Of the padded batch; its gradient is added to the model's."""
    old = np.concatenate([one.logprobs[one.loss_mask] for one in rows])
    advantages = np.repeat(advantages_of(rows), [one.loss_mask.sum() for one in rows])
    loss = clipped_loss(padded_logprobs(model, rows), old, advantages) / len(old)
    loss.backward()
    return float(loss.detach())


def tree_loss(model: Any, rows: Rows, *, nodes: int, logits_of: Callable[..., Any] = tree_logits) -> float:
    """Of token trees, one after the other; its gradient is added to the model's."""
    trees = TokenTree.packs(rows, nodes=nodes)
    total, count = 0.0, sum(len(tree.terms) for tree in trees)
    for tree in trees:
        new = tree_logprobs(logits_of(model, tree), tree)
        loss = clipped_loss(new, tree.terms.logprobs, advantages_of(rows)[tree.terms.row]) / count
        loss.backward()
        total += float(loss.detach())
    return total


def gradients(model: Any, loss: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """What `loss` returns, and the gradients it leaves."""
    model.zero_grad(set_to_none=True)
    return loss(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def largest_difference(first: dict[str, Any], second: dict[str, Any]) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize(("attention", "kv_heads"), [("sdpa", 4), ("sdpa", 2), ("eager", 1)])
def test_the_logits_at_every_position_are_the_padded_ones(rows: Rows, attention: str, kv_heads: int) -> None:
    model = llama(attention=attention, kv_heads=kv_heads)
    padded, tree = padded_logits(model, rows), TokenTree.of(rows)
    logits = model(**tree_inputs(tree, torch.float64), use_cache=False).logits[0]
    for one, path, expected in zip(rows, tree.row_nodes, padded, strict=True):
        assert (logits[torch.from_numpy(path)] - expected[: len(one)]).abs().max() < CLOSE[attention]


@pytest.mark.parametrize(
    ("attention", "kv_heads", "nodes"),
    [("sdpa", 4, 10_000), ("sdpa", 2, 10_000), ("sdpa", 2, 40), ("eager", 1, 10_000)],
    ids=["one tree", "grouped queries", "packs", "eager"],
)
def test_loss_and_every_gradient_are_those_of_the_padded_batch(
    rows: Rows, attention: str, kv_heads: int, nodes: int
) -> None:
    model = llama(attention=attention, kv_heads=kv_heads)
    expected, padded = gradients(model, lambda: padded_loss(model, rows))
    loss, tree = gradients(model, lambda: tree_loss(model, rows, nodes=nodes))
    assert loss == pytest.approx(expected, abs=CLOSE[attention])
    assert largest_difference(padded, tree) < CLOSE[attention]
    assert max(float(gradient.abs().max()) for gradient in padded.values()) > 1e-3


def test_tied_embeddings_have_the_padded_gradient() -> None:
    rows, model = GROUPS["a group"], llama(tie_word_embeddings=True)
    _, padded = gradients(model, lambda: padded_loss(model, rows))
    _, tree = gradients(model, lambda: tree_loss(model, rows, nodes=10_000))
    assert "lm_head.weight" not in padded
    assert largest_difference(padded, tree) < EXACT


def test_gradients_stay_the_padded_ones_under_checkpointing() -> None:
    rows, model = GROUPS["a group"], llama().train()
    _, padded = gradients(model, lambda: padded_loss(model, rows))
    model.gradient_checkpointing_enable()
    _, tree = gradients(model, lambda: tree_loss(model, rows, nodes=10_000))
    assert largest_difference(padded, tree) < EXACT


def test_float32_is_as_close_as_float32_is() -> None:
    rows, model = GROUPS["rows twice and cut short"], llama(dtype=torch.float32)
    _, padded = gradients(model, lambda: padded_loss(model, rows))
    _, tree = gradients(model, lambda: tree_loss(model, rows, nodes=10_000))
    assert largest_difference(padded, tree) < 1e-4


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("attention_mask", lambda tree: torch.ones(len(tree), len(tree)).tril().bool()[None, None]),
        ("position_ids", lambda tree: torch.arange(len(tree))[None]),
    ],
    ids=["causal mask only", "positions counted through"],
)
def test_a_wrong_mask_or_position_would_be_seen(name: str, wrong: Callable[[TokenTree], Any]) -> None:
    def wrong_logits(model: Any, tree: TokenTree) -> Any:
        inputs = {**tree_inputs(tree), name: wrong(tree)}
        return model(**inputs, use_cache=False).logits[0, torch.from_numpy(tree.logit_nodes)]

    rows, model = GROUPS["a group"], llama()
    _, padded = gradients(model, lambda: padded_loss(model, rows))
    _, tree = gradients(model, lambda: tree_loss(model, rows, nodes=10_000, logits_of=wrong_logits))
    assert largest_difference(padded, tree) > 1e-3


# --- what models are given, and what is asked of them


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
    assert tree_logits(model, tree).shape == (len(tree.logit_nodes), VOCABULARY)
    assert seen == [len(tree.logit_nodes)]
    assert len(tree.logit_nodes) < len(tree) / 1.3


class Wrapped:
    """As data parallel wrappers do it: any argument, passed on."""

    def __init__(self, module: Any) -> None:
        self.module, self.parameters = module, module.parameters

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    __call__ = forward


class WholeHead:
    """A model that cannot be told where to run its head, and, if `blind`, looks past its mask."""

    def __init__(self, inner: Any, *, blind: bool = False) -> None:
        self.inner, self.blind = inner, blind
        self.config, self.dtype, self.parameters = inner.config, inner.dtype, inner.parameters

    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, **_: Any) -> Any:
        return self.inner(input_ids, None if self.blind else attention_mask, position_ids, use_cache=False)

    __call__ = forward


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrapper", [Wrapped, WholeHead, compiled])
def test_a_wrapped_model_gives_the_same_logits(wrapper: Callable[[Any], Any]) -> None:
    model, tree = llama(), TokenTree.of(GROUPS["a group"])
    assert torch.equal(tree_logits(wrapper(model), tree), tree_logits(model, tree))


def test_autocast_takes_the_tree_of_a_float32_model() -> None:
    model, tree = llama(dtype=torch.float32), TokenTree.of(GROUPS["a group"])
    with torch.autocast("cpu", torch.bfloat16):
        logits = tree_logits(model, tree)
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - tree_logits(model, tree)).abs().mean() < 0.1


def sampled_at(one: TrainingRow, temperature: float) -> TrainingRow:
    """The same row, all of it sampled in one turn."""
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
    masks = TokenMasks(table, np.array([0, 1, UNCONSTRAINED], dtype=np.int32), VOCABULARY)
    logits = tree_logits(model, tree)
    first, second, third = tree_logprobs(logits, tree, masks).tolist()
    assert first == 0
    assert second == pytest.approx(float((logits[0, 3:5] / 0.5).log_softmax(-1)[0].detach()))
    assert third == pytest.approx(float(logits[0].log_softmax(-1)[3].detach()))


def test_hidden_states_and_head_give_the_same_log_probabilities() -> None:
    model, tree = llama(), TokenTree.of(GROUPS["rows twice and cut short"])
    terms = tree.terms
    masks = TokenMasks(np.empty((0, 2), dtype=np.int32), np.full(len(terms), UNCONSTRAINED, np.int32), VOCABULARY)
    hidden = tree_hidden(model, tree)
    assert hidden.shape == (len(tree.logit_nodes), 32)
    logprobs = head_logprobs(hidden[terms.logit], model.lm_head.weight, terms.target_id, masks, terms.temperatures)
    assert (logprobs - tree_logprobs(tree_logits(model, tree), tree)).abs().max() < EXACT


def test_log_probabilities_of_half_precision_are_float32() -> None:
    tree = TokenTree.of(GROUPS["a group"])
    logits = torch.randn(len(tree.logit_nodes), VOCABULARY, dtype=torch.bfloat16)
    assert tree_logprobs(logits, tree).dtype == torch.float32


def mistral(**settings: Any) -> Any:
    config = transformers.MistralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        **settings,
    )
    return transformers.MistralForCausalLM(config)


def mamba() -> Any:
    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=VOCABULARY, state_size=4)
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


def sparse() -> Any:
    model = llama()
    model.config.layer_types = ["full_attention", "linear_attention"]
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (flash, "LlamaForCausalLM attends with 'flash_attention_2', which takes no mask of a tree. Load it with"),
        (mamba, "MambaForCausalLM has layers that no mask holds to a branch"),
        (sparse, "LlamaForCausalLM has layers that no mask holds to a branch"),
        (griffin, "RecurrentGemmaForCausalLM has layers that no mask holds to a branch"),
        (bloom, "BloomForCausalLM cannot be told the positions"),
        (lambda: mistral(sliding_window=8), "MistralForCausalLM looks back 8 ids in some layers, .* a row of 31"),
    ],
    ids=["flash attention", "a state", "a layer with a state", "a state between windows", "no positions", "a window"],
)
def test_a_model_that_cannot_see_a_tree_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(BadModel, match=message):
        tree_logits(make(), TokenTree.of(GROUPS["a group"]))


def test_a_window_as_long_as_the_rows_does_no_harm() -> None:
    model = in_its_own_dtype(mistral(sliding_window=31).double()).eval()
    assert tree_difference(model, TokenTree.of(GROUPS["a group"])) < EXACT


def test_a_tree_without_nodes_has_no_logits() -> None:
    with pytest.raises(BadBatch, match="The tree has no nodes"):
        tree_logits(llama(), TokenTree.of([]))


def test_a_row_in_which_nothing_is_trained_has_no_terms_and_does_no_harm() -> None:
    rows = group(12, [9, 14])
    untrained = row(rows[0].ids.tolist(), len(rows[0]), np.random.default_rng(0))
    tree = TokenTree.of([untrained])
    logits = tree_logits(llama(), tree)
    assert logits.shape == (0, VOCABULARY)
    assert tree_logprobs(logits, tree).shape == (0,)
    assert tree_difference(llama().eval(), TokenTree.of([*rows, untrained])) < EXACT


def test_the_difference_shows_a_model_that_does_not_see_trees() -> None:
    tree, model = TokenTree.of(GROUPS["a group"]), llama().eval()
    assert tree_difference(model, tree) < EXACT
    assert tree_difference(WholeHead(model, blind=True), tree) > 0.1


# --- the page


def names_of(page: str) -> dict[str, Any]:
    """What a page's Python blocks define."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL):
        exec(compile(block, page, "exec"), names)
    return names


def two_groups() -> list[Group]:
    """Groups of three and two, that share a system prompt; the second one also shares its first words."""
    system = prompt(*range(1, 21))
    first = [made([system, prompt(30), said(*ids)], id=f"a#{ids[0]}", reward=ids[0]) for ids in [(0, 7), (1, 9), (2,)]]
    second = [made([system, prompt(31), said(5, *ids)], id=f"b#{ids[0]}", reward=ids[0]) for ids in [(0, 7, 8), (1,)]]
    return [made_group(*first), made_group(*second)]


def test_the_gradients_of_the_page_are_those_of_the_padded_batchs_page(capsys: pytest.CaptureFixture[str]) -> None:
    model, groups, page = llama().eval(), two_groups(), names_of("shared-prefixes.md")
    batch = TrainingBatch.padded(groups, pad_id=0, advantages=grpo, drop_flat=True)
    padded_names = names_of("training-batches.md")
    _, padded = gradients(model, lambda: padded_names["loss"](model, batch).backward())
    _, tree = gradients(model, lambda: page["gradients"](model, groups))
    assert largest_difference(padded, tree) < 1e-5  # the pages take log-probabilities in float32
    assert max(float(gradient.abs().max()) for gradient in padded.values()) > 1e-2
    assert capsys.readouterr().out == "5 rows as 1 tree: 32 nodes for 116 ids (3.6x), 125 padded (3.9x); logits at 7\n"
    assert page["proven"](model, groups) < EXACT


def test_the_two_ways_to_constrained_turns_of_the_page_agree() -> None:
    model, rows, page = llama().eval(), GROUPS["a group"], names_of("shared-prefixes.md")
    tree = TokenTree.of(rows)
    index = np.arange(len(tree.terms), dtype=np.int32) % 2 - 1  # every other one is unconstrained
    masks = TokenMasks(np.array([[-1, 0]], dtype=np.int32), index, VOCABULARY)
    grammars = SimpleNamespace(masks_for_terms=lambda _rows, _terms: masks)
    logits_first, hidden_first = (
        page[name](model, tree, rows, grammars) for name in ("constrained", "constrained_and_fast")
    )
    assert torch.allclose(logits_first, hidden_first, atol=1e-6)
    assert (logits_first != tree_logprobs(tree_logits(model, tree), tree)).any()


# --- the demo model


def answers(folder: Path) -> Rows:
    """Eight answers of different lengths to one prompt of 300 ids."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    system = " ".join(
        f"Tool {number} takes two numbers, a and b, and returns a + {number} * b." for number in range(40)
    )
    prompt = tokenizer.encode(system, add_special_tokens=False).ids[:300]
    said = [
        f"I call tool {number}. " + f"The sum of {number} and 17 is {number + 17}. " * number for number in range(1, 9)
    ]
    random = np.random.default_rng(0)
    return [row(prompt + tokenizer.encode(text, add_special_tokens=False).ids, len(prompt), random) for text in said]


@pytest.mark.engine
def test_the_demo_model_sees_the_tree_of_eight_answers(demo_model_folder: Path) -> None:
    rows = answers(demo_model_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_model_folder, dtype=torch.float32).eval()
    tree = TokenTree.of(rows)
    assert tree_difference(model, tree) < 1e-3
    assert tree.saving.ratio > 2, str(tree.saving)
