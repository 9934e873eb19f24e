"""Environments and tasks that exist elsewhere: data sets, and environments of other libraries."""

from runner.interop.dataset import Dataset, ScoreOption
from runner.interop.judging import Judge, judge
from runner.interop.scorers import ScoreName, ScoringFunction

__all__ = ["Dataset", "Judge", "ScoreName", "ScoreOption", "ScoringFunction", "judge"]
