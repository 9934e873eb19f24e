"""Training data: trajectories as padded or packed arrays or token trees, with the masks of their grammars.

`tree_torch`, `tree_attention` and `grammar_torch` import torch; the other modules import it only in calls that need it.
"""

from runner.training.advantages import (
    AdvantageRule,
    dr_grpo,
    grpo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
)
from runner.training.batch import TrainingBatch, TrainingTensors
from runner.training.corrections import Mismatch, SequenceMean, icepop, mismatch, ratios, sequence_mask, tis
from runner.training.credit import by_turn, gae, shared_credit, turn_returns
from runner.training.grammar import GrammarMasks
from runner.training.pools import Pool, Pools
from runner.training.sample_rows import InexactRows, SampleRow, SegmentChoice, sample_rows
from runner.training.selection import Selection, grouped
from runner.training.token_masks import RecordedMasks, TokenMasks
from runner.training.tree import Saving, TokenTree
from runner.training.weight_check import CheckedTensor, TensorVerdict, Way, WeightReport, check_weights
from runner.training.weight_proof import weight_proof

__all__ = [
    "AdvantageRule",
    "CheckedTensor",
    "GrammarMasks",
    "InexactRows",
    "Mismatch",
    "Pool",
    "Pools",
    "RecordedMasks",
    "SampleRow",
    "Saving",
    "SegmentChoice",
    "Selection",
    "SequenceMean",
    "TensorVerdict",
    "TokenMasks",
    "TokenTree",
    "TrainingBatch",
    "TrainingTensors",
    "Way",
    "WeightReport",
    "by_turn",
    "check_weights",
    "dr_grpo",
    "gae",
    "grouped",
    "grpo",
    "icepop",
    "mismatch",
    "ratios",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
    "sample_rows",
    "sequence_mask",
    "shared_credit",
    "tis",
    "turn_returns",
    "weight_proof",
]
