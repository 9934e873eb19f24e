"""Proof of a torch model's weights by one forward pass. torch is imported only in the call."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

from runner.engines.proofs import MIN_SCORES, WeightProof
from runner.errors import BadModel, BadWeights

__all__ = ["PROOF_SIZE", "Encodes", "weight_proof"]

PROOF_SIZE: Final = 256
"""Default number of ids of a proof."""

_TEXT: Final = """The river had risen in the night, and by morning the lower road was gone. Anna counted 17 boats,
4 carts and a piano. "Who brings a piano?" she asked. Nobody answered.
def area(width: float, height: float) -> float:
    return width * height  # square metres
Die Brücke hielt, obwohl niemand mehr darauf gewettet hätte. {"name": "ferry", "seats": [12, 40, 8], "open": true}
Le capitaine regarda sa montre : il était presque midi. If 3x + 5 = 20, then x = 5, since 20 - 5 = 15 and 15 / 3 = 5.
川の水は少しずつ引いていった。 She wrote the list twice, first by price, then by weight, and burned both.
SELECT town, COUNT(*) FROM floods GROUP BY town ORDER BY 2 DESC;
"""


class Encodes(Protocol):
    """A tokenizer: of transformers, or of this package."""

    def encode(self, text: str, /) -> Sequence[int]: ...


def weight_proof(
    model: Any,
    tokenizer: Encodes | None = None,
    *,
    ids: Sequence[int] | None = None,
    size: int = PROOF_SIZE,
    dtype: Any = None,
) -> WeightProof:
    """Compute a proof of a torch model's weights, for `update_weights(proof=)`, by one forward pass without gradients.

    Compute it with the weights that are sent: between two steps of the optimizer. The model is in `eval()` during the
    pass, since dropout would change its output.

    Args:
        model: a torch module that takes ids of shape [1, n] and returns logits of shape [1, n, vocabulary], directly or
            as `.logits`.
        tokenizer: encodes the scored text; without it the ids are drawn at random from the vocabulary.
        ids: the ids, such as a trajectory's; then no tokenizer is needed.
        size: number of ids if `ids` is not given, at least 9. More ids find smaller faults: docs/weights.md has the
            figures.
        dtype: the engine's number type, as a name or a torch dtype; by default the model's. A copy of the weights is
            rounded to it, as in the engine. Give this type if it is coarser than the model's, to detect changes smaller
            than the rounding.

    Raises:
        BadModel: torch is not installed, this is not a torch model, the number type does not exist, or the logits have
            another shape.
        BadWeights: the model computes NaN or infinity, it does not have the ids, or there are too few ids.
    """
    try:
        import torch
    except ImportError:
        raise BadModel("weight_proof() needs torch, which is not installed: pip install torch") from None

    first = next(model.parameters(), None) if isinstance(model, torch.nn.Module) else None
    if first is None:
        raise BadModel(
            f"weight_proof(): {type(model).__name__} is not a torch model with parameters: give a torch module that "
            "has parameters."
        )
    weights_dtype = first.dtype if dtype is None else getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(weights_dtype, torch.dtype) or not weights_dtype.is_floating_point:
        raise BadModel(
            f"weight_proof(dtype={dtype!r:.60}): torch has no such floating-point type: give one, such as 'bfloat16'."
        )
    weights_dtype = min(first.dtype, weights_dtype, key=lambda each: each.itemsize)
    chosen = _checked_ids(model, _ids(model, tokenizer, size) if ids is None else ids)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            given = torch.tensor([chosen], device=first.device)
            with _autocast_types(model, first.device.type) as types:
                output = torch.func.functional_call(model, _rounded(model, weights_dtype), (given,))
            logits = getattr(output, "logits", output)
            if logits.shape[:2] != given.shape:
                raise BadModel(
                    f"weight_proof(): the model returns logits of shape {tuple(logits.shape)} for ids of shape "
                    f"{tuple(given.shape)}: give a model that returns logits for each id."
                )
            scores = torch.log_softmax(logits[0, :-1].float(), dim=-1)
            logprobs = scores.gather(1, given[0, 1:, None])[:, 0].tolist()
    finally:
        model.train(was_training)
    types.update(each.dtype for each in (logits, *model.parameters()) if each.is_floating_point())
    coarsest = max(types, key=lambda each: float(torch.finfo(each).eps))
    return WeightProof(chosen, logprobs, str(coarsest), str(weights_dtype))


@contextmanager
def _autocast_types(model: Any, device: str) -> Iterator[set[Any]]:
    """Collect the number types of autocast in a model's forward pass. Accelerate, for example, enables it there."""
    import torch

    types: set[Any] = set()

    def note(*_: Any) -> None:
        if torch.is_autocast_enabled(device):
            types.add(torch.get_autocast_dtype(device))

    hooks = [module.register_forward_pre_hook(note) for module in model.modules()]
    try:
        yield types
    finally:
        for hook in hooks:
            hook.remove()


def _rounded(model: Any, dtype: Any) -> dict[str, Any]:
    """Return the parameters that a narrower number type would change, rounded to it, in their own type."""
    return {
        name: parameter.to(dtype).to(parameter.dtype)
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and parameter.dtype.itemsize > dtype.itemsize
    }


def _ids(model: Any, tokenizer: Encodes | None, size: int) -> list[int]:
    rng = random.Random(0)
    if tokenizer is not None:
        words, text, found = _TEXT.split(), _TEXT, list[int]()
        while len(found) < size:
            found = list(tokenizer.encode(text))
            text += " ".join(rng.sample(words, len(words)))  # a repeated text is too easy to predict
        return found[:size]
    count = _id_count(model)
    if count is None:
        raise BadModel(
            f"weight_proof(): {type(model).__name__} has no config with a vocab_size: give a tokenizer, or ids=."
        )
    return [rng.randrange(count) for _ in range(size)]


def _checked_ids(model: Any, ids: Sequence[int]) -> list[int]:
    try:
        plain = [operator.index(token_id) for token_id in ids]
    except TypeError as error:
        raise BadWeights(f"weight_proof(ids=): {error}; give token ids, whole numbers.") from None
    if len(plain) <= MIN_SCORES:
        raise BadWeights(
            f"weight_proof(): {len(plain)} ids are too few for a proof; give a few hundred, at least {MIN_SCORES + 1}."
        )
    count = _id_count(model)
    wrong = next((each for each in plain if each < 0 or (count is not None and each >= count)), None)
    if wrong is not None:
        last = "" if count is None else f"; its ids are 0 to {count - 1}"
        raise BadWeights(f"weight_proof(): the model does not have the id {wrong}{last}. Give ids of this model.")
    return plain


def _id_count(model: Any) -> int | None:
    """Return the number of ids that a model takes; None if it does not report it."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = getattr(text, "vocab_size", None)
    return count if isinstance(count, int) else None
