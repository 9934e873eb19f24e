"""Code that runs inside vLLM's own processes; it imports little.

Patches of vLLM 0.32 and xgrammar 0.2.8, when each can be removed, and the test that covers it:

| function | patched | remove when | test |
|---|---|---|---|
| `cpu_patches.patch_bitmasks` | xgrammar's masks | masks end at the vocabulary | `engines/vllm/test_bitmask_patch.py` |
| `cpu_patches.patch_generators` | seeds | CPU generators have offsets | `engines/vllm/test_generator_patch.py` |
| `cpu_patches.patch_lora_kernels` | LoRA kernels | vLLM merged pull request 48421 | `engines/test_adapters.py` |
| `cpu_patches.patch_rotary_embeddings` | rotary embeddings | it flattens heads | `engines/vllm/test_rotary_patch.py` |
| `cpu_patches.patch_routers` | routers | a bias counts without groups | `engines/vllm/test_router_patch.py` |
| `grammar_patch.patch_grammar_compiler` | grammars | ids are compared | `parsing/test_grammar_compiler.py` |
| `reload_patch.patch_reload` | reload on CPUs | 42821, 48284, 48312 are fixed | `engines/vllm/test_reload_patch.py` |
| `scoring_patches.patch_prompt_scores` | prompt scores | they use prompt rows' adapters | `engines/test_scoring.py` |
| `scoring_patches.patch_sampler` | sampler | vLLM scores ids as sampled | `engines/test_scoring.py` |
| `spin_wait_patch.patch_spin_wait` | polling | vLLM sleeps | `engines/vllm/test_spin_wait_patch.py` |
"""
