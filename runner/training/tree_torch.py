"""Token trees for torch: inputs of a transformers model, its logits and log-probabilities."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from runner.errors import BadBatch, BadModel
from runner.training.grammar_torch import head_logprobs, masked_logprobs
from runner.training.tree import TokenTree

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from runner.training.token_masks import TokenMasks

__all__ = [
    "block_mask",
    "tree_difference",
    "tree_head_logprobs",
    "tree_hidden",
    "tree_inputs",
    "tree_logits",
    "tree_logprobs",
]

# Kinds of layers in transformers' configurations for which a mask is enough to separate branches.
_MASKED = ("global", "full_attention", "sliding_attention", "chunked_attention")
# Settings in transformers' configurations that change the logits after the head.
_AFTER_THE_HEAD = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")
_ATTENTIONS = ("sdpa", "eager", "flex_attention", "token_tree")  # the last kind is in runner.training.tree_attention


def tree_inputs(tree: TokenTree, dtype: Any = None, *, device: Any = None) -> dict[str, Any]:
    """Return the inputs of a transformers model for a tree as one sequence.

    Args:
        tree: the rows.
        dtype: dtype of the mask: None for a bool mask, for sdpa; a floating type for a mask that is added to the
            attention's scores, for eager and sdpa.
        device: the device of the tensors; None for torch's default.

    Returns:
        `input_ids` and `position_ids`, shape [1, nodes], int64, and `attention_mask`, shape [1, 1, nodes, nodes].
    """
    mask = torch.from_numpy(tree.mask()).to(device)[None, None]
    if dtype is not None:
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
    return _inputs(tree, mask, device)


def block_mask(tree: TokenTree, device: Any = None) -> Any:
    """Return the mask for flex_attention, which skips blocks without any visible key."""
    from torch.nn.attention.flex_attention import create_block_mask

    leave, nodes = _indices(tree.leave, device), len(tree)

    def sees(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (query < leave[key])

    return create_block_mask(sees, None, None, nodes, nodes, device=leave.device)


def tree_logits(model: Any, tree: TokenTree) -> Any:
    """Return the logits at `tree.logit_nodes`; other logits are not computed if the model's head can skip them.

    Args:
        model: a causal model of transformers, bare or inside a wrapper that forwards its arguments (PEFT, DDP, FSDP,
            torch.compile).
        tree: the rows.

    Returns:
        The model's logits, shape [logits, vocabulary], with gradients.

    Raises:
        BadModel: the model does not support trees: it has a recurrent state, no `position_ids`, an attention kernel
            without masks, or an attention window shorter than a row.
        BadBatch: the tree has no nodes.
    """
    inputs, wanted = _asked(model, tree)
    if "logits_to_keep" in _arguments(model):
        return model(**inputs, use_cache=False, logits_to_keep=wanted).logits[0]
    return model(**inputs, use_cache=False).logits[0, wanted]


def tree_hidden(model: Any, tree: TokenTree) -> Any:
    """Return the input of the model's head at `tree.logit_nodes`, to compute only some logits with `head_logprobs`.

    Args:
        model: as for `tree_logits`, bare or in PEFT's wrapper; other wrappers need to run the forward pass.
        tree: the rows.

    Returns:
        The last hidden states, shape [logits, width], with gradients.

    Raises:
        BadModel: the model is inside a wrapper that has to run its forward passes, such as DDP; or as for
            `tree_logits`.
        BadBatch: the tree has no nodes.
    """
    if hasattr(model, "module"):
        raise BadModel(
            f"{type(model).__name__} has to run the forward pass, but this call bypasses it: use tree_logits, "
            f"or give {type(model).__name__}.module and reduce the gradients yourself."
        )
    inputs, wanted = _asked(model, tree)
    return _bare(model).base_model(**inputs, use_cache=False).last_hidden_state[0, wanted]


def tree_logprobs(logits: Any, tree: TokenTree, masks: TokenMasks | None = None) -> Any:
    """Return the log-probability of each term's id, at the temperature of its sampling.

    Args:
        logits: the result of `tree_logits`, shape [logits, vocabulary].
        tree: the rows.
        masks: masks of `GrammarMasks.masks_for_terms`; None without constraints. They are per term, not per node, since
            rows that share a node may have different grammars.

    Returns:
        Log-probabilities in nats, aligned with `tree.terms`, shape [terms], float32; float64 if the logits are float64.

    Raises:
        BadBatch: the masks do not fit the terms or the vocabulary.
    """
    terms = tree.terms
    node, target = _indices(terms.logit, logits.device), _indices(terms.target_id, logits.device)
    if masks is not None:
        return masked_logprobs(logits[node], target, masks, terms.temperatures)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    temperature = torch.from_numpy(terms.temperatures).to(logits)
    if (terms.temperatures != terms.temperatures[:1]).any():  # rows that share a node may have different temperatures
        logits, node = logits[node] / temperature[:, None], torch.arange(len(terms), device=logits.device)
    elif len(terms):
        logits = logits / temperature[0]
    return logits[node, target] - logits.logsumexp(-1)[node]


def tree_head_logprobs(model: Any, tree: TokenTree, masks: TokenMasks) -> Any:
    """Return `tree_logprobs(tree_logits(model, tree), tree, masks)`, but compute fewer logits.

    For terms whose masks allow few ids, only the logits of these ids are computed. The head runs in its weight's dtype,
    under autocast too.

    Args:
        model: as for `tree_hidden`; its head is one matrix, with a bias or without.
        tree: the rows.
        masks: as for `tree_logprobs`.

    Returns:
        The log-probabilities, as `tree_logprobs` returns them.

    Raises:
        BadModel: the model changes its logits after the head; or as for `tree_hidden`.
    """
    config = _bare(model).config.get_text_config()
    if changes := [name for name in _AFTER_THE_HEAD if getattr(config, name, None) not in (None, 1)]:
        raise BadModel(
            f"{type(_bare(model)).__name__} changes its logits after the head ({', '.join(changes)}): "
            "use tree_logprobs(tree_logits(model, tree), tree, masks)."
        )
    head, terms = _bare(model).get_output_embeddings(), tree.terms
    hidden = tree_hidden(model, tree).to(head.weight.dtype)
    logit, target = _indices(terms.logit, hidden.device), _indices(terms.target_id, hidden.device)
    bias = getattr(head, "bias", None)
    with torch.autocast(hidden.device.type, enabled=False):
        return head_logprobs(hidden[logit], head.weight, target, masks, terms.temperatures, bias=bias)


def tree_difference(model: Any, tree: TokenTree) -> float:
    """Return the largest difference between the tree's logits and the logits of each row alone, to test a model.

    This takes one forward pass for each row. Call `model.eval()` first: dropout differs from pass to pass. Errors are
    as for `tree_logits`.
    """
    with torch.no_grad():
        logits = tree_logits(model, tree)
        return max((_row_difference(model, tree, logits, index) for index in range(len(tree.rows))), default=0.0)


def _row_difference(model: Any, tree: TokenTree, logits: Any, index: int) -> float:
    of_row = tree.terms.row == tree.rows[index]
    if not of_row.any():
        return 0.0
    device = logits.device
    ids = _indices(tree.ids[tree.row_nodes[index]], device)[None]
    alone = model(input_ids=ids, use_cache=False).logits[0, _indices(tree.terms.position[of_row] - 1, device)]
    return float((logits[_indices(tree.terms.logit[of_row], device)] - alone).abs().max())


def _asked(model: Any, tree: TokenTree) -> tuple[dict[str, Any], Any]:
    """Return the inputs of the model, and the nodes whose outputs are needed."""
    if not len(tree):
        raise BadBatch("the tree has no nodes, since there are no rows with ids: give at least one such row.")
    _check(model, tree)
    device = next(model.parameters()).device
    return _inputs_for(_bare(model), tree, device), _indices(tree.logit_nodes, device)


def _inputs(tree: TokenTree, mask: Any, device: Any) -> dict[str, Any]:
    return {
        "input_ids": _indices(tree.ids, device)[None],
        "position_ids": _indices(tree.positions, device)[None],
        "attention_mask": mask,
    }


def _inputs_for(bare: Any, tree: TokenTree, device: Any) -> dict[str, Any]:
    match _attention(bare):
        case "flex_attention":
            return _inputs(tree, block_mask(tree, device), device)
        case "token_tree":  # the mask has four dimensions, so that transformers does not change it
            return _inputs(tree, _indices(tree.leave, device)[None, None, None], device)
        case "sdpa":  # a bool mask works with every dtype, even under autocast
            return tree_inputs(tree, device=device)
        case _:
            return tree_inputs(tree, bare.dtype, device=device)


def _indices(array: NDArray[np.int32], device: Any) -> Any:
    return torch.from_numpy(array.astype(np.int64)).to(device)


def _bare(model: Any) -> Any:
    """Return the model inside its wrappers, whose own signatures accept any argument."""
    while (inner := getattr(model, "module", None) or getattr(model, "_orig_mod", None)) is not None:
        model = inner
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _arguments(model: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(_bare(model).forward).parameters


def _attention(bare: Any) -> str:
    return getattr(bare.config, "_attn_implementation", None) or "eager"


def _check(model: Any, tree: TokenTree) -> None:
    bare = _bare(model)
    name, config = type(bare).__name__, bare.config.get_text_config()
    if _attention(bare) not in _ATTENTIONS:
        raise BadModel(
            f"{name} attends with {_attention(bare)!r}, which does not support tree masks. "
            f"Load it with attn_implementation={' or '.join(map(repr, _ATTENTIONS))}."
        )
    if _attention(bare) == "token_tree" and not bare._can_set_attn_implementation():
        raise BadModel(f"{name} has a custom attention: load it with attn_implementation='eager'.")
    layers = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "attention_layers", None) or ())}
    if getattr(bare, "_is_stateful", False) or layers - {*_MASKED}:
        raise BadModel(
            f"{name} has layers that a mask cannot restrict to a branch, such as recurrent ones: "
            "train it on padded batches."
        )
    if "position_ids" not in _arguments(model):
        raise BadModel(f"{name} has no position_ids for a tree's nodes: train it on padded batches.")
    window, longest = _window(config), int(tree.positions.max()) + 1
    if window is not None and longest > window:
        raise BadModel(
            f"{name} has an attention window of {window} ids, and a tree's mask would disable this window for a row of "
            f"{longest} ids: train such rows on padded batches."
        )


def _window(config: Any) -> int | None:
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min((window for window in windows if window), default=None)
