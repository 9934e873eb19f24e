"""Code that runs inside vLLM's own processes; it imports little.

Patches of vLLM and xgrammar. Each has the last version known to need it, the condition under which it can be removed,
and the test that covers it:

| function | patched | needed up to | remove when | test |
|---|---|---|---|---|
| `cpu_patches.patch_bitmasks` | xgrammar's masks | xgrammar 0.2.8 | its CPU kernel leaves bits after the last id alone | `engines/vllm/test_bitmask_patch.py` |
| `cpu_patches.patch_generators` | seeds | vLLM 0.32 | vLLM resets CPU generators without an offset | `engines/vllm/test_generator_patch.py` |
| `cpu_patches.patch_lora_kernels` | LoRA kernels | vLLM 0.32 | vLLM has merged pull request 48421 | `engines/test_adapters.py` |
| `cpu_patches.patch_rotary_embeddings` | rotary embeddings | vLLM 0.32 | the CPU kernel accepts [ids, heads, size] | `engines/vllm/test_rotary_patch.py` |
| `cpu_patches.patch_routers` | routers | vLLM 0.32 | the CPU router uses its bias without expert groups | `engines/vllm/test_router_patch.py` |
| `grammar_patch.patch_grammar_compiler` | grammars | xgrammar 0.2.8 | xgrammar's cache compares the token ids of rules | `parsing/test_grammar_compiler.py` |
| `parent_watch.patch_file_store` | workers' file store | vLLM 0.32 | vLLM puts the file into `VLLM_RPC_BASE_PATH` | `engines/vllm/test_parent_watch.py` |
| `reload_patch.patch_reload` | reload on CPUs | vLLM 0.32 | issues 42821, 48284 and 48312 of vLLM are fixed | `engines/vllm/test_reload_patch.py` |
| `scoring_patches.patch_prompt_scores` | prompt scores | vLLM 0.32 | prompt logits use the adapter of their own row | `engines/vllm/test_scoring_patches.py` |
| `scoring_patches.patch_sampler` | sampler | vLLM 0.32 | vLLM scores given ids as if it had sampled them | `engines/test_scoring.py` |
| `spin_wait_patch.patch_spin_wait` | polling | vLLM 0.32 | waiting processes sleep without polling first | `engines/vllm/test_spin_wait_patch.py` |
| `start_phases.patch_start_phases` | starts of workers | vLLM 0.32 | vLLM reports the phases of its start | `engines/vllm/test_start_phases.py` |
| `turn_hold.patch_engine_core_calls` | engine cores | vLLM 0.32 | a paused vLLM can score given ids | `engines/vllm/test_turn_hold.py` |
"""  # noqa: E501  # rows of a table
