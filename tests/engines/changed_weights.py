"""Other weights of a model, for tests that exchange them."""

import shutil
from pathlib import Path

__all__ = ["changed_weights"]


def changed_weights(folder: Path, source: Path, *, layer: int = 2, factor: float = 3.0) -> Path:
    """A copy in `folder` of the model in `source`, one layer of which says other things; of the same names and shapes.

    What later layers make of a prompt is other as well, so that keys and values of the first weights show.
    """
    from safetensors.torch import load_file, save_file

    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder / path.name)
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith(f"layers.{layer}.mlp.down_proj.weight"):
                tensor *= factor
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
    return folder
