"""A task set of verifiers v1: letters of words, with tools of a task and shared tools."""

import verifiers.v1 as vf

__all__ = ["WordTaskset"]


class WordData(vf.TaskData):
    word: str
    letter: str


class WordState(vf.State):
    looked: int = 0


class WordTools(vf.Toolset[vf.ToolsetConfig, WordState]):
    TOOL_PREFIX = "word"

    async def setup_task(self, task):
        self.word = task.word

    @vf.tool
    async def letter(self, place: int) -> str:
        """Return the letter at a place, from 0."""
        self.state.looked += 1
        return self.word[place]

    @vf.tool(name="spell")
    def spelled(self) -> list[str]:
        """Return all letters."""
        self.state.looked += len(self.word)
        return list(self.word)


class Alphabet(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    TOOL_PREFIX = None
    starts = 0

    async def setup(self):
        Alphabet.starts += 1

    @vf.tool
    def alphabet(self) -> dict:
        """Return the vowels."""
        return {"vowels": "aeiou", "starts": Alphabet.starts}


class WordTask(vf.Task[WordData, WordState]):
    async def setup(self, trace, runtime):
        trace.info["folder"] = (await runtime.run(["pwd"], {})).stdout.strip()

    @vf.stop
    async def too_curious(self, trace: vf.Trace) -> bool:
        return trace.state.looked > 10

    async def finalize(self, trace, runtime):
        trace.info["folder at the end"] = (await runtime.run(["pwd"], {})).stdout.strip()

    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == str(task.word.count(task.letter)))

    @vf.reward
    async def brief(self, trace) -> dict:
        return {"few turns": float(trace.num_turns <= 2), "few ids": float(trace.num_output_tokens < 1000)}

    @vf.metric
    async def looked(self, trace) -> float:
        return trace.state.looked

    @vf.metric
    async def same_folder(self, trace) -> float:
        return float(trace.info["folder"] == trace.info["folder at the end"] != "")

    @vf.metric
    async def tool_messages(self, trace) -> float:
        return len(trace.tool_messages)

    @classmethod
    def toolsets(cls, config):
        return [WordTools(vf.ToolsetConfig())]


class WordConfig(vf.TasksetConfig):
    letter: str = "r"
    broken: bool = False


class WordTaskset(vf.Taskset[WordTask, WordConfig]):
    def load(self):
        for number, word in enumerate(["strawberry", "raspberry", "pear", "plum"]):
            prompt = None if self.config.broken and number == 1 else f"How many {self.config.letter} are in the word?"
            data = WordData(name=word, word=word, letter=self.config.letter, prompt=prompt, system_prompt="Count.")
            yield WordTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Alphabet(vf.SharedToolsetConfig())]
