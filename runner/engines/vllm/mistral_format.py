"""Folders that contain the same weights twice: in Hugging Face's format and in Mistral's.

vLLM reads the second copy, `consolidated*.safetensors`, if it may choose. Trainers and adapters use the names of the
first copy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from runner.engines.weights import INDEX, MISTRAL_FILES, WeightFolder
from runner.errors import BadWeights

__all__ = ["chosen_load_format", "needs_mistral_names", "require_own_reload"]

_READS_BOTH: Final = "MistralForCausalLM"
"""The class of vLLM that loads the names of both formats."""
_CHOSEN_BY_VLLM: Final = ("auto", "mistral")
"""Values of `load_format` with which vLLM reads `consolidated*.safetensors` if a folder has such files."""


def chosen_load_format(folder: Path) -> str | None:
    """Return the `load_format` that makes vLLM read the Hugging Face copy; None if vLLM may choose.

    A trainer writes new weights into this copy, and the other copy stays old. Without an index, vLLM would read the
    files of both copies, so it may choose.
    """
    copies = set(folder.glob(MISTRAL_FILES))
    if not copies or copies == set(folder.glob("*.safetensors")) or not (folder / INDEX).is_file():
        return None
    try:
        classes = json.loads((folder / "config.json").read_bytes()).get("architectures")
    except (OSError, ValueError, AttributeError):
        return None
    return "hf" if classes == [_READS_BOTH] else None


def needs_mistral_names(config: Any, folder: Path) -> bool:
    """Return True if the model of a `VllmConfig` loads only the names of Mistral's format.

    Args:
        config: the `VllmConfig`.
        folder: the folder of the model.
    """
    model = config.model_config
    given = str(getattr(model.config_format, "value", model.config_format))
    if given == "auto":
        has_both = (folder / "params.json").is_file() and any(folder.glob(MISTRAL_FILES))
        given = "mistral" if has_both else "hf"
    return given == "mistral" and list(model.architectures) != [_READS_BOTH]


def require_own_reload(config: Any, found: WeightFolder) -> None:
    """Check that vLLM's own reload reads the files of `found`.

    Raises:
        BadWeights: it would read `consolidated*.safetensors`, which are other files.
    """
    others = sorted(set(found.folder.glob(MISTRAL_FILES)) - set(found.files))
    if others and str(config.load_config.load_format) in _CHOSEN_BY_VLLM:
        raise BadWeights(
            f"{found.folder} has weights in two formats, and vLLM's own reload reads only {others[0].name}: remove "
            "the consolidated*.safetensors, or start the AsyncLLM with load_format='hf'."
        )
