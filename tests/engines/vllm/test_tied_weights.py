"""New weights of models whose output layer is their embedding: two different tensors are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.engines.vllm.tied_weights import equal_in_source
from runner.engines.vllm.weight_loading import VllmWeights
from runner.engines.weights import LocalTransfer
from runner.errors import BadWeights
from tests.engines.small_weights import Llm, Source, Tensors, saved

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # required by vLLM


SMALL: dict[str, dict[str, Any]] = {
    "GPT2Config": {"vocab_size": 96, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2},
    "BloomConfig": {"vocab_size": 96, "hidden_size": 16, "n_layer": 1, "n_head": 2},
    "LlamaConfig": {
        "vocab_size": 96,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize("kind", SMALL)
async def test_untied_output_layer_is_refused_by_name_in_any_source(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runner.engines.vllm.worker.file_transfer import FileTransferInfo

    transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setattr("runner.engines.vllm.tied_weights._PART_BYTES", 1000)
    trained = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**SMALL[kind]))
    trained.config.architectures = [type(trained).__name__]
    trained.save_pretrained(tmp_path / "the model")
    llm = Llm(tmp_path / "the model", transfer=True)
    llm.vllm_config.model_config.hf_config = trained.config
    weights = VllmWeights(llm, "the model")
    head, (embedding,) = "lm_head.weight", trained._tied_weights_keys.values()
    equal = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    assert head in equal
    other = equal[head].clone()
    other[-1, -1] += 1
    message = rf"'{head}' differs from '{embedding}', and in the model both are one tensor"

    def sources(given: Tensors, name: str) -> list[Any]:
        kept = {each: tensor for each, tensor in given.items() if each != head}
        transfer = LocalTransfer(FileTransferInfo(str(tmp_path), rank=0), Source(given))
        return [
            given,
            saved(tmp_path / name, given),
            saved(tmp_path / f"{name} 2", kept, {head: given[head]}),
            transfer,
        ]

    for source in sources({**equal, head: other}, "other"):
        with pytest.raises(BadWeights, match=message):
            await weights.check(source)
    assert llm.asked == []
    for source in sources(equal, "equal"):
        (await weights.check(source)).close()


async def test_a_source_of_several_processes_is_not_read_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    assert not equal_in_source(Source({}), "one", "other")
