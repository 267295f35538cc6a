"""The same work by the field's own trainer, TRL's GRPOTrainer, and by this project, in one run. Not collected by pytest.

    python3 -m venv /tmp/trl && /tmp/trl/bin/pip install -r requirements.txt trl datasets && /tmp/trl/bin/python tests/benchmark_trl.py

The same random tiny Qwen3, 32 prompts x 8 completions of the same length, one turn, one update; prints seconds per step and
tokens per second of generation and update, medians of several steps.
"""
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import rollout  # noqa: E402
import train    # noqa: E402

PROMPTS, GROUP, COMPLETION, STEPS = 32, 8, 12, 12


def ours(model, tokenizer, questions):
    """Seconds of rollout and update; every action runs to the limit and ends the attempt: one turn, one session."""
    task, args = rollout.Task("subagent", window=64, turns=1, limit=COMPLETION), train.parse_args([])
    rollout.control = lambda tokenizer, plain=rollout.control(tokenizer): [plain[0], -1]    # no token ends an action early
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    seconds = []
    for step in range(STEPS):
        begin = time.perf_counter()
        attempts = [question for question in questions for _ in range(GROUP)]
        trajectories = rollout.rollout(model, tokenizer, attempts, task, train.uniforms(len(attempts), task, step))
        middle = time.perf_counter()
        for i, trajectory in enumerate(trajectories):
            trajectory.advantage = 1. - 2 * (i % 2)
        train.update(model, optimizer, trajectories, args, gain_weight=0.)
        seconds.append((middle - begin, time.perf_counter() - middle))
    return seconds


def theirs(model, tokenizer, prompts):
    """Seconds of generation and update of TRL's trainer, read off its own methods."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    rewards = random.Random(0)
    config = GRPOConfig(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP,
                        max_completion_length=COMPLETION, max_steps=STEPS, beta=0., learning_rate=1e-3, report_to=[], use_cpu=True,
                        bf16=False, gradient_checkpointing=False, save_strategy="no", logging_steps=1000, disable_tqdm=True)
    trainer = GRPOTrainer(model, reward_funcs=lambda completions, **_: [float(rewards.random() < .5) for _ in completions],
                          args=config, processing_class=tokenizer, train_dataset=Dataset.from_dict({"prompt": prompts}))
    spent, marks = [], []
    generate, step = trainer._generate_and_score_completions, trainer.training_step

    def timed_generate(*args, **kwargs):
        begin = time.perf_counter()
        result = generate(*args, **kwargs)
        spent.append(time.perf_counter() - begin)
        return result

    def timed_step(*args, **kwargs):
        begin = time.perf_counter()
        result = step(*args, **kwargs)
        marks.append(time.perf_counter() - begin)
        return result

    trainer._generate_and_score_completions, trainer.training_step = timed_generate, timed_step
    trainer.train()
    return [(g, whole - g) for g, whole in zip(spent, marks)]


if __name__ == "__main__":
    tokenizer = rollout.tiny_tokenizer()
    questions = [rollout.make_question(random.Random(i)) for i in range(PROMPTS)]
    prompts = [question.question for question in questions]
    for name, seconds in (("TRL", theirs(train.tiny_model(tokenizer, 0), tokenizer, prompts)),
                          ("ours", ours(train.tiny_model(tokenizer, 0), tokenizer, questions))):
        generation, update = (statistics.median(column) for column in zip(*seconds[2:]))
        tokens = PROMPTS * GROUP * COMPLETION
        print(f"{name:5} rollout {generation:.3f} s, {tokens / generation:8,.0f} tokens/s;  update {update:.3f} s, {tokens / update:8,.0f} tokens/s")
