"""TRL's GRPOTrainer learns the calculator: its episodes are played here, and its weights go into the engine.

Run it with: pip install trl datasets, then python -m examples.train_trl --steps 20
"""

from __future__ import annotations

import typer
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from envs.calculator import Calculator
from runner import BackgroundPlayer, VllmEngine
from runner.models import resolve_model
from runner.trainers.trl import episode_reward, rollout_func


def main(model: str = "smollm2-135m", steps: int = 20, group_size: int = 8, seed: int = 0) -> None:
    """Train, and save the model in runs/trl."""
    tasks = list(Calculator(questions=512).tasks())
    with BackgroundPlayer(Calculator, VllmEngine(model, dtype="float32"), group_size=group_size, seed=seed) as player:
        trainer = GRPOTrainer(
            resolve_model(model).location,
            episode_reward,
            args=GRPOConfig(
                output_dir="runs/trl",
                num_generations=group_size,
                per_device_train_batch_size=2 * group_size,
                max_steps=steps,
                learning_rate=1e-5,
                beta=0.0,
                bf16=False,
                use_cpu=True,
                logging_steps=1,
                report_to="none",
                seed=seed,
                model_init_kwargs={"dtype": "float32"},
            ),
            train_dataset=Dataset.from_list([{"prompt": task.id} for task in tasks]),
            rollout_func=rollout_func(player, tasks=tasks),
        )
        trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    typer.run(main)
