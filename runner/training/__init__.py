"""Training data: trajectories as padded or packed arrays or token trees, with the masks of their grammars.

`tree_torch` and `grammar_torch` import torch; the other modules import it only in calls that need it.
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
