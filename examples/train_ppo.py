"""PPO on one machine: `python examples/train_ppo.py --model models/smollm2 --gpus 0 --steps 20`.

Starts the three services, trains actor and critic on the built-in sums (or your own prompts and reward), and prints where the model went.
"""

from __future__ import annotations

import argparse
import sys

import headrace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2", help="Hugging Face folder or hub id")
    parser.add_argument("--gpus", type=int, default=0, help="0: CPU")
    parser.add_argument("--batch-size", type=int, default=64, help="samples a step")
    parser.add_argument("--sequence-length", type=int, default=128, help="tokens of prompt and completion together, at most")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", help="JSONL file of your own")
    parser.add_argument("--reward", help='what scores it: a built-in name or "module:function"')
    options = parser.parse_args()
    try:
        result = train(options)
    except (ValueError, RuntimeError) as error:  # a mistake in what was given, or a run that failed: both say what to do
        sys.exit(f"train_ppo: {error}")
    rewards = [step["reward_mean"] for step in result.metrics]
    print(f"mean reward of the first and the last step: {rewards[0]:.3f} {rewards[-1]:.3f}; the model is in {result.model}")


def train(options: argparse.Namespace) -> headrace.Result:
    return headrace.PPOTrainer(
        model_name=options.model,
        num_gpus=options.gpus,
        batch_size=options.batch_size,
        sequence_length=options.sequence_length,
        prompts=options.prompts,
        reward=options.reward,
        steps=options.steps,
        sampling={"max_new_tokens": min(16, options.sequence_length // 2)} if options.prompts is None else {},  # sums have short answers
        optimizer={"lr": 5e-6, "warmup_updates": 2},
        critic={"warmup_steps": max(0, min(2, options.steps - 1)), "optimizer": {"lr": 2e-5}},
    ).train()


if __name__ == "__main__":
    main()
