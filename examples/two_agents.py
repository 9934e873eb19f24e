"""Two agents in one episode: a simulated user has its own conversation and is not trained."""

from collections.abc import Iterator

import anyio

from runner import Conversation, Engine, Environment, Limits, Run, Sampling, Task, VllmEngine, reward


class SmallTalk(Environment):
    """Keep a simulated customer talking."""

    system_prompt = "You are a friendly shop assistant."
    limits = Limits(turns=3)
    sampling = Sampling(max_tokens=32)

    def tasks(self) -> Iterator[Task]:
        for number, thing in enumerate(("a red scarf", "a bicycle", "running shoes")):
            yield Task(id=f"customer-{number}", prompt="Good morning.", answer=thing)

    async def rollout(self, conversation: Conversation) -> None:
        customer = self.episode.conversation(
            "customer",
            system_prompt=f"You are a customer who is looking for {self.task.answer}. Answer in one sentence.",
        )
        while True:
            turn = await conversation.generate()
            customer.add(turn.text or "...")
            said = await customer.generate()
            conversation.add(said.text or "...")

    @reward
    def words_of_the_assistant(self) -> float:
        return min(1.0, sum(len(turn.text.split()) for turn in self.episode.turns) / 50)


async def main(engine: Engine) -> None:
    async with Run(SmallTalk(), engine) as run:
        async for trajectory in run:
            print(trajectory.outcome, trajectory.reward, trajectory.text)


if __name__ == "__main__":  # vLLM starts processes of its own, which import this file
    anyio.run(main, VllmEngine("smollm2-135m"))
