"""Ready-made environments, such as data sets, sandboxes, and tasks of other libraries."""

from runner.interop.bfcl_tasks import Bfcl
from runner.interop.dataset import Dataset, ScoreOption
from runner.interop.gymnasium_games import Gymnasium
from runner.interop.harbor import Harbor
from runner.interop.judging import Judge, judge
from runner.interop.mcp_servers import McpDataset, McpServers, ServerOption
from runner.interop.mixture import Mixture, MixturePart
from runner.interop.openenv_servers import OpenEnv
from runner.interop.sandboxed_program import SandboxedProgram
from runner.interop.scorers import ScoreName, ScoringFunction
from runner.interop.tau2_bench import Tau2
from runner.interop.terminal import Terminal
from runner.interop.textarena_games import TextArena
from runner.interop.verifiers_tasks import Verifiers

__all__ = [
    "Bfcl",
    "Dataset",
    "Gymnasium",
    "Harbor",
    "Judge",
    "McpDataset",
    "McpServers",
    "Mixture",
    "MixturePart",
    "OpenEnv",
    "SandboxedProgram",
    "ScoreName",
    "ScoreOption",
    "ScoringFunction",
    "ServerOption",
    "Tau2",
    "Terminal",
    "TextArena",
    "Verifiers",
    "judge",
]
