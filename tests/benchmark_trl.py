"""The same work by the field's own trainer, TRL's GRPOTrainer, and by this project, in one run. Not collected by pytest.

    python3 -m venv /tmp/trl && /tmp/trl/bin/pip install -r requirements.txt trl datasets && /tmp/trl/bin/python tests/benchmark_trl.py

The same random tiny Qwen3, 32 prompts x 8 completions of at most 12 tokens, one turn, one update; prints seconds per step
and generated tokens per second of rollout and of update, medians of several steps.
"""
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import rollout  # noqa: E402
import train    # noqa: E402
from conftest import credited  # noqa: E402

PROMPTS, GROUP, COMPLETION, STEPS = 32, 8, 12, 12


def ours(model, tokenizer, questions):
    """(rollout seconds, update seconds, sampled tokens) of each step; an attempt has one turn."""
    task, args = rollout.Task("subagent", window=64, turns=1, limit=COMPLETION), train.parse_args(["--batch-tokens", "8192"])
    train.settle(args, tokenizer)
    optimizer = train.adamw(model, 1e-3)
    seconds = []
    for step in range(STEPS):
        begin = time.perf_counter()
        attempts = [question for question in questions for _ in range(GROUP)]
        trajectories = rollout.sample_attempts(model, tokenizer, attempts, task, train.uniforms(len(attempts), task, step))
        middle = time.perf_counter()
        for i, trajectory in enumerate(trajectories):
            credited(trajectory, 1. - 2 * (i % 2))
        metrics = train.update(model, optimizer, trajectories, args)
        seconds.append((middle - begin, time.perf_counter() - middle, metrics["tokens"]))
    return seconds


def theirs(model, tokenizer, prompts):
    """The same of TRL's trainer, read off its own methods."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    rng, tokens = random.Random(0), []

    def reward(completion_ids, **_):
        tokens.append(sum(map(len, completion_ids)))
        return [float(rng.random() < .5) for _ in completion_ids]

    config = GRPOConfig(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP,
                        max_completion_length=COMPLETION, max_steps=STEPS, beta=0., learning_rate=1e-3, report_to=[], use_cpu=True,
                        bf16=False, gradient_checkpointing=False, save_strategy="no", logging_steps=1000, disable_tqdm=True)
    trainer = GRPOTrainer(model, reward_funcs=reward, args=config, processing_class=tokenizer, train_dataset=Dataset.from_dict({"prompt": prompts}))
    spent, marks, generate = [], [], trainer._generate_and_score_completions

    def timed_generate(*args, **kwargs):
        begin = time.perf_counter()
        result = generate(*args, **kwargs)
        spent.append(time.perf_counter() - begin)
        return result

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.begin = time.perf_counter()

        def on_step_end(self, *_, **__):
            marks.append(time.perf_counter() - self.begin)

    trainer._generate_and_score_completions = timed_generate
    trainer.add_callback(Clock())
    trainer.train()
    return [(g, whole - g, n) for g, whole, n in zip(spent, marks, tokens)]


if __name__ == "__main__":
    tokenizer = rollout.tiny_tokenizer()
    questions = [rollout.make_question(random.Random(i), clues=3) for i in range(PROMPTS)]
    prompts = [tokenizer.decode(rollout.message(tokenizer, question.question)) for question in questions]    # the same 8 tokens
    for name, seconds in (("TRL", theirs(train.tiny_model(tokenizer, 0), tokenizer, prompts)),
                          ("ours", ours(train.tiny_model(tokenizer, 0), tokenizer, questions))):
        generation, update, tokens = (statistics.median(column) for column in zip(*seconds[2:]))
        print(f"{name:5} {tokens:.0f} tokens a step: rollout {generation:.3f} s, {tokens / generation:,.0f} tokens/s; "
              f"update {update:.3f} s, {tokens / update:,.0f} tokens/s")
