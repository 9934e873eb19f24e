"""Code that runs inside vLLM's own processes; it imports little.

Patches of vLLM 0.32 and xgrammar 0.2.8, when each can be removed, and the test that covers it:

| module | patched | remove when | test |
|---|---|---|---|
| `bitmask_patch` | xgrammar's masks on CPUs | masks end at the vocabulary | `engines/vllm/test_bitmask_patch.py` |
| `generator_patch` | seeds on CPUs | CPU generators have offsets | `engines/vllm/test_generator_patch.py` |
| `grammar_patch` | grammar compiler | xgrammar's cache compares token ids | `parsing/test_grammar_compiler.py` |
| `lora_kernel_patch` | LoRA kernels on CPUs | vLLM merged pull request 48421 | `engines/test_adapters.py` |
| `prompt_score_patch` | prompt scores with adapters | vLLM uses prompt rows' adapters | `engines/test_scoring.py` |
| `reload_patch` | reload on CPUs | vLLM fixed 42821, 48284 and 48312 | `engines/vllm/test_reload_patch.py` |
| `rotary_patch` | rotary embeddings on CPUs | vLLM flattens queries of heads | `engines/vllm/test_rotary_patch.py` |
| `scored_ids_patch` | sampler | vLLM scores ids as sampled | `engines/test_scoring.py` |
| `spin_wait_patch` | polling on CPUs | vLLM sleeps by itself on CPUs | `engines/vllm/test_spin_wait_patch.py` |
"""
