"""What a trainer takes: trajectories as arrays, padded, packed or as token trees, with the grammar's masks.

What needs torch is in `tree_torch` and `grammar_torch`; nothing else here loads it.
"""

from runner.training.advantages import AdvantageRule, dr_grpo, grpo, rloo
from runner.training.batch import TrainingBatch, TrainingTensors
from runner.training.grammar import GrammarMasks
from runner.training.selection import Selection, grouped
from runner.training.token_masks import TokenMasks
from runner.training.tree import Saving, TokenTree

__all__ = [
    "AdvantageRule",
    "GrammarMasks",
    "Saving",
    "Selection",
    "TokenMasks",
    "TokenTree",
    "TrainingBatch",
    "TrainingTensors",
    "dr_grpo",
    "grouped",
    "grpo",
    "rloo",
]
