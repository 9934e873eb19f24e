"""Conversion of a transformers model's tensors to the names and shapes of its checkpoint.

Transformers 5 fuses experts and renames tensors when it loads a checkpoint, and reverts this when it saves a
checkpoint. A trainer's `state_dict()` has the fused form, but vLLM loads the form of the checkpoint. The conversion
uses the tables of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from runner.engines.weights import Checkpoint, TensorForm, compare
from runner.errors import BadWeights

__all__ = ["CheckpointSource", "compare_with_checkpoint", "tied_names", "to_checkpoint_names"]

_TIED = {"lm_head.weight": "model.embed_tokens.weight"}  # the names in most models


def to_checkpoint_names(config: Any, tensors: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the tensors as transformers would save them, mostly as views.

    The result is None if no name changes, or if transformers cannot create the model.

    Args:
        config: transformers' configuration of the model.
        tensors: state dict of the model, in any dtype.
    """
    import torch

    model = _skeleton(_Once(config))
    if model is None:
        return None
    from transformers.core_model_loading import revert_weight_conversion

    given = {name: torch.as_tensor(tensor) for name, tensor in tensors.items()}
    converted: dict[str, Any] = revert_weight_conversion(model, dict(given))
    return None if converted.keys() == given.keys() else converted


def compare_with_checkpoint(
    forms: Mapping[str, TensorForm], model: Checkpoint, config: Any, *, given_as: str, remedy: str
) -> None:
    """Check that weights fit a checkpoint. If they have the names of transformers' own model, the error has the remedy.

    Args:
        forms: forms of the given tensors.
        model: the checkpoint of the engine's model.
        config: transformers' configuration of the model.
        given_as: description of the given weights, for the error.
        remedy: how the caller can give the tensors under the names of the checkpoint, for the error.

    Raises:
        BadWeights: the weights do not fit.
    """
    import torch

    try:
        compare(forms, model, given_as=given_as)
    except BadWeights as error:
        if forms.keys() <= model.forms.keys():
            raise
        dtypes = {name: getattr(torch, form.dtype, torch.float32) for name, form in forms.items()}
        empty = {name: torch.empty(form.shape, dtype=dtypes[name], device="meta") for name, form in forms.items()}
        converted = to_checkpoint_names(config, empty)
        if converted is None or not converted.keys() <= model.forms.keys():
            raise
        raise BadWeights(f"{error} These are the names of transformers' own model: {remedy}.") from None


def tied_names(config: Any) -> list[tuple[str, str]]:
    """Return pairs of names: of an output layer, and of the embedding tied to it.

    For each such layer, one pair has the names in the model. If the names in its checkpoint differ, a second pair has
    those.

    Args:
        config: transformers' configuration of a model that ties such layers.
    """
    import torch

    tied = getattr(_skeleton(_Once(config)), "_tied_weights_keys", None)
    pairs = list((tied if isinstance(tied, dict) and tied else _TIED).items())

    def saved(name: str) -> str:
        return next(iter(to_checkpoint_names(config, {name: torch.empty(1, 1, device="meta")}) or (name,)))

    return list(dict.fromkeys([*pairs, *((saved(head), saved(embedding)) for head, embedding in pairs)]))


class CheckpointSource:
    """`WeightSource` for vLLM that sends the tensors of another source under the names of the checkpoint.

    Optional tensors that the checkpoint does not have, such as a tied output layer, are not sent, since some models of
    vLLM cannot load them (Bloom).

    Args:
        config: transformers' configuration of the model.
        source: the trainer's source.
        model: the checkpoint.
    """

    def __init__(self, config: Any, source: Any, model: Checkpoint) -> None:
        self._config, self._source, self._model = config, source, model

    def metadata(self) -> list[Any]:
        """Return name, dtype and shape of each tensor."""
        import torch

        kinds = list(self._source.metadata())
        empty = {one.name: torch.empty(tuple(one.shape), dtype=one.dtype, device="meta") for one in kinds}
        converted = self._converted(empty)
        return [type(kinds[0])(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in converted.items()]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from self._converted(dict(iter(self._source))).items()

    def _converted(self, tensors: dict[str, Any]) -> dict[str, Any]:
        named = to_checkpoint_names(self._config, tensors) or tensors
        return {
            name: tensor
            for name, tensor in named.items()
            if name in self._model.forms or not self._model.optional(name)
        }


class _Once:
    """Cache key for a configuration, compared by identity."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __hash__(self) -> int:
        return id(self.config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Once) and other.config is self.config


@lru_cache(4)
def _skeleton(key: _Once) -> Any:
    """Return the model on the meta device, which selects the conversion tables; None if it cannot be made."""
    import torch
    import transformers

    config = key.config
    name = next(iter(getattr(config, "architectures", None) or ()), "")
    kind = getattr(transformers, name, None)
    try:
        with torch.device("meta"):
            return kind(config) if kind is not None else transformers.AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError, AttributeError, ImportError, KeyError, RuntimeError):  # a model with custom code
        return None
