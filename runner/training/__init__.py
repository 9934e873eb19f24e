"""What a trainer takes: trajectories as arrays, padded, packed or as token trees, with the grammar's masks.

What needs torch is in `tree_torch` and `grammar_torch`; nothing else here loads it before it is called.
"""

from runner.training.advantages import AdvantageRule, dr_grpo, grpo, rloo
from runner.training.batch import TrainingBatch, TrainingTensors
from runner.training.grammar import GrammarMasks
from runner.training.selection import Selection, grouped
from runner.training.token_masks import TokenMasks
from runner.training.tree import Saving, TokenTree
from runner.training.weight_check import CheckedTensor, Verdict, Way, WeightReport, check_weights
from runner.training.weight_proof import weight_proof

__all__ = [
    "AdvantageRule",
    "CheckedTensor",
    "GrammarMasks",
    "Saving",
    "Selection",
    "TokenMasks",
    "TokenTree",
    "TrainingBatch",
    "TrainingTensors",
    "Verdict",
    "Way",
    "WeightReport",
    "check_weights",
    "dr_grpo",
    "grouped",
    "grpo",
    "rloo",
    "weight_proof",
]
