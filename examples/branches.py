"""Best of n, tree search and retries from the middle: branches continue from the exact ids of a turn."""

import anyio

from runner import Conversation, Engine, Environment, Limits, Run, Sampling, Task, Turn, VllmEngine, reward


class Rhymes(Environment):
    """Write lines that end alike."""

    system_prompt = "You write poems. Answer with one line."
    limits = Limits(turns=24)
    sampling = Sampling(max_tokens=24)

    def tasks(self) -> list[Task]:
        return [Task(id=word, prompt=f"Write a line that ends with {word!r}.", answer=word) for word in ("sea", "tree")]

    def score(self, turn: Turn) -> float:
        return self.task.answer in turn.text.lower()

    @reward
    def rhymes(self) -> bool | dict[str, float]:
        return self.task.answer in self.episode.text.lower()


class BestOfN(Rhymes):
    """Three times, try a line four times and continue from the best try. The other tries are not trained."""

    async def rollout(self, conversation: Conversation) -> None:
        for _ in range(3):
            tries = await conversation.tries(4)
            conversation.keep(max(tries, key=self.score))
            conversation.add("Another line that ends in the same way.")


class TreeSearch(Rhymes):
    """Beam search with two beams: each beam continues in two ways, and the best two are kept. Each branch is a
    trajectory.
    """

    async def rollout(self, conversation: Conversation) -> None:
        beam = [conversation]
        for depth in range(2):
            ways = [one.branch(f"{one.name}.{depth}{way}") for one in beam for way in "ab"]
            async with anyio.create_task_group() as group:
                for one in ways:
                    group.start_soon(one.generate)
            beam = sorted(ways, key=lambda one: self.score(one.turns[-1]), reverse=True)[:2]
            for one in beam:
                one.add("Another line that ends in the same way.")

    @reward
    def rhymes(self) -> dict[str, float]:
        spoke = [one for one in self.episode.conversations.values() if one.turns]
        return {one.name: self.score(one.turns[-1]) for one in spoke}


class RetryFromTheMiddle(Rhymes):
    """Play to the end. If the last line is wrong, go back to the second turn and play from there once more."""

    async def rollout(self, conversation: Conversation) -> None:
        await self.lines(conversation, 4)
        if not self.score(conversation.turns[-1]):
            conversation.keep(conversation.turns[1], train_others=True)
            conversation.add("Another line that ends in the same way.")
            await self.lines(conversation, 2)

    async def lines(self, conversation: Conversation, count: int) -> None:
        for _ in range(count):
            await conversation.generate()
            conversation.add("Another line that ends in the same way.")


async def main(engine: Engine) -> None:
    for environment in (BestOfN(), TreeSearch(), RetryFromTheMiddle()):
        async with Run(environment, engine) as run:
            async for trajectory in run:
                causes = [segment.cause for segment in trajectory.segments]
                print(f"{trajectory.id} {trajectory.agent}: {len(trajectory.turns)} turns, {causes}")


async def on_the_demo_model() -> None:
    async with VllmEngine("smollm2-135m") as engine:
        await main(engine)


if __name__ == "__main__":  # vLLM starts processes of its own, which import this file
    anyio.run(on_the_demo_model)
