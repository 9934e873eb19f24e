"""Token trees for torch: what a transformers model is given, and the logits and log-probabilities that come back."""

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

# The kinds of layers that a mask alone holds to a branch, as configurations of transformers name them.
_MASKED = ("global", "full_attention", "sliding_attention", "chunked_attention")
# What such configurations call a change of the logits behind the head.
_BEHIND_THE_HEAD = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")
_ATTENTIONS = ("sdpa", "eager", "flex_attention", "token_tree")  # the last is ours: runner.training.tree_attention


def tree_inputs(tree: TokenTree, dtype: Any = None, *, device: Any = None) -> dict[str, Any]:
    """What a transformers model is called with to compute a tree as one sequence.

    Args:
        tree: the rows.
        dtype: the mask's: None for a bool mask, as sdpa takes it; a floating type for one that is added to the
            attention's scores, as eager and sdpa take it.
        device: the device of the tensors; None for torch's default.

    Returns:
        `input_ids` and `position_ids`, shape [1, nodes], int64, and `attention_mask`, shape [1, 1, nodes, nodes].
    """
    mask = torch.from_numpy(tree.mask()).to(device)[None, None]
    if dtype is not None:
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
    return _inputs(tree, mask, device)


def block_mask(tree: TokenTree, device: Any = None) -> Any:
    """The mask as flex_attention takes it: blocks that nobody sees are skipped."""
    from torch.nn.attention.flex_attention import create_block_mask

    leave, nodes = _indices(tree.leave, device), len(tree)

    def sees(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (query < leave[key])

    return create_block_mask(sees, None, None, nodes, nodes, device=leave.device)


def tree_logits(model: Any, tree: TokenTree) -> Any:
    """The logits at `tree.logit_nodes`, and at no other node where the model's head can be told so.

    Args:
        model: a causal model of transformers, bare or inside a wrapper that passes its arguments on (PEFT, DDP, FSDP,
            torch.compile).
        tree: the rows.

    Returns:
        Logits as the model gives them, shape [logits, vocabulary], with gradients as usual.

    Raises:
        BadModel: the model cannot see a tree: it keeps a state, has no positions to be told, attends through a kernel
            that takes no mask, or looks back less far than a row is long.
        BadBatch: the tree has no nodes.
    """
    inputs, wanted = _asked(model, tree)
    if "logits_to_keep" in _arguments(model):
        return model(**inputs, use_cache=False, logits_to_keep=wanted).logits[0]
    return model(**inputs, use_cache=False).logits[0, wanted]


def tree_hidden(model: Any, tree: TokenTree) -> Any:
    """What the model's head is given at `tree.logit_nodes`, for who needs only some of the logits: `head_logprobs`.

    Args:
        model: as for `tree_logits`, bare or in PEFT's wrapper: others would not see this pass.
        tree: the rows.

    Returns:
        The last hidden states, shape [logits, width], with gradients as usual.

    Raises:
        BadModel: the model is inside a wrapper that has to see its passes, such as DDP.
    """
    if hasattr(model, "module"):
        raise BadModel(
            f"{type(model).__name__} has to see the pass, and would not see this one: use tree_logits, "
            f"or give {type(model).__name__}.module and bring the gradients together yourself."
        )
    inputs, wanted = _asked(model, tree)
    return _bare(model).base_model(**inputs, use_cache=False).last_hidden_state[0, wanted]


def tree_logprobs(logits: Any, tree: TokenTree, masks: TokenMasks | None = None) -> Any:
    """The log-probability of each term's id, at the temperature it was sampled at.

    Args:
        logits: what `tree_logits` gave, shape [logits, vocabulary].
        tree: the rows.
        masks: what was allowed at each term, of `GrammarMasks.masks_for_terms`; None where everything was. They are the
            terms', not the nodes': rows that share a node may have been held to different grammars.

    Returns:
        Log-probabilities in nats, aligned with `tree.terms`, shape [terms], float32, or float64 where the logits are.
    """
    terms = tree.terms
    node, target = _indices(terms.logit, logits.device), _indices(terms.target_id, logits.device)
    if masks is not None:
        return masked_logprobs(logits[node], target, masks, terms.temperatures)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    temperature = torch.from_numpy(terms.temperatures).to(logits)
    if (terms.temperatures != terms.temperatures[:1]).any():  # rows that share a node may have sampled differently
        logits, node = logits[node] / temperature[:, None], torch.arange(len(terms), device=logits.device)
    elif len(terms):
        logits = logits / temperature[0]
    return logits[node, target] - logits.logsumexp(-1)[node]


def tree_head_logprobs(model: Any, tree: TokenTree, masks: TokenMasks) -> Any:
    """What `tree_logprobs(tree_logits(model, tree), tree, masks)` gives, from those logits alone that a mask leaves.

    The head runs in its weight's dtype, under autocast too.

    Args:
        model: as for `tree_hidden`; its head is one matrix, with a bias or without.
        tree: the rows.
        masks: as for `tree_logprobs`.

    Returns:
        As `tree_logprobs`.

    Raises:
        BadModel: the model changes its logits behind the head.
    """
    config = _bare(model).config.get_text_config()
    if changes := [name for name in _BEHIND_THE_HEAD if getattr(config, name, None) not in (None, 1)]:
        raise BadModel(
            f"{type(_bare(model)).__name__} changes its logits behind the head ({', '.join(changes)}): "
            "use tree_logprobs(tree_logits(model, tree), tree, masks)."
        )
    head, terms = _bare(model).get_output_embeddings(), tree.terms
    hidden = tree_hidden(model, tree).to(head.weight.dtype)
    logit, target = _indices(terms.logit, hidden.device), _indices(terms.target_id, hidden.device)
    bias = getattr(head, "bias", None)
    with torch.autocast(hidden.device.type, enabled=False):
        return head_logprobs(hidden[logit], head.weight, target, masks, terms.temperatures, bias=bias)


def tree_difference(model: Any, tree: TokenTree) -> float:
    """The largest difference between a logit on the tree and the same of its row alone: does this model see trees?

    Costs one forward pass for each row. Call `model.eval()` first: dropout differs from pass to pass.
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
    """What the model is called with, and the nodes whose outputs are needed."""
    if not len(tree):
        raise BadBatch("The tree has no nodes, so it has no logits: its rows have no ids. Leave such rows out.")
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
        case "token_tree":  # four dimensions, so that transformers passes it on as it is
            return _inputs(tree, _indices(tree.leave, device)[None, None, None], device)
        case "sdpa":  # a bool mask fits every dtype, under autocast too
            return tree_inputs(tree, device=device)
        case _:
            return tree_inputs(tree, bare.dtype, device=device)


def _indices(array: NDArray[np.int32], device: Any) -> Any:
    return torch.from_numpy(array.astype(np.int64)).to(device)


def _bare(model: Any) -> Any:
    """The model inside wrappers, which take any argument and pass it on."""
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
            f"{name} attends with {_attention(bare)!r}, which takes no mask of a tree. "
            f"Load it with attn_implementation={' or '.join(map(repr, _ATTENTIONS))}."
        )
    if _attention(bare) == "token_tree" and not bare._can_set_attn_implementation():
        raise BadModel(f"{name} has an attention of its own: load it with attn_implementation='eager'.")
    layers = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "attention_layers", None) or ())}
    if getattr(bare, "_is_stateful", False) or layers - {*_MASKED}:
        raise BadModel(
            f"{name} has layers that no mask holds to a branch, such as a state that goes from id to id: "
            "train it on padded batches."
        )
    if "position_ids" not in _arguments(model):
        raise BadModel(f"{name} cannot be told the positions of a tree's nodes: train it on padded batches.")
    window, longest = _window(config), int(tree.positions.max()) + 1
    if window is not None and longest > window:
        raise BadModel(
            f"{name} looks back {window} ids in some layers, which a tree's mask would undo for a row of {longest}: "
            "train rows that long on padded batches."
        )


def _window(config: Any) -> int | None:
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min((window for window in windows if window), default=None)
