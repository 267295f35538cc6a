"""One step after another on a GPU: a random model of Qwen3-0.6B's shape in bfloat16, then the tiny model against the CPU.

    python tests/gpu.py                 # on a GPU: under 8 minutes, most of it the first part
    python tests/gpu.py --shrunken      # the same path on a CPU, with a small shape

Prints, for three steps of each scenario: seconds, tokens per second and peak gigabytes of each phase, the rate of floating-point
operations over the machine's own (a matrix product in the same precision), and the gap between the log-probabilities at
sampling and in training. A random model acts at random, so every action runs to its limit: the costs are those of a bad case.
"""
import argparse
import random
import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parent))

from benchmark import computed, machine_rate  # noqa: E402
from conftest import byte_level_tokenizer, train  # noqa: E402
from figures.report import cost  # noqa: E402
from rollout import WINDOWS, make_question  # noqa: E402

QWEN = dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
SMALL = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
FLAGS = ["--window", "1200", "--lr", "1e-6"]        # the small vocabulary makes more tokens of a text than Qwen's


def three_steps(model, tokenizer, args, peak):
    device = model.device.type
    task = train.settle(args, tokenizer)
    run = train.Run(args, task, tokenizer, model)
    optimizer, counts, phase = train.adamw(model, args.lr), {}, ["rollout"]
    weights = sum(p.numel() for p in model.parameters())
    hook = model.base_model.register_forward_pre_hook(computed(counts, phase), with_kwargs=True)
    plain = train.score_sessions
    train.score_sessions = lambda *rest: phase.__setitem__(0, "scoring") or plain(*rest)
    for step in range(3):
        counts.clear()
        rng, phase[0] = random.Random(step), "rollout"
        questions = [make_question(rng, task.says["question"]) for _ in range(args.questions)]
        trajectories, costs = train.collect(model, run, questions, "gpu", step)
        phase[0], begin = "update", train.time.perf_counter()
        train.credit(trajectories, args.group_size, args.usage, args.gain_weight)
        metrics = train.update(model, optimizer, trajectories, args)
        costs |= cost("update", begin)
        line = [f"step {step}: {metrics['tokens']:,} sampled tokens, gap {metrics['gap_mean']:.5f} (99th percentile {metrics['gap_p99']:.5f})"]
        for name, flops in (("rollout", 2), ("scoring", 2), ("update", 6)):
            seconds = costs[f"seconds_{name}"]
            line.append(f"{name} {seconds:.2f} s, {counts[name] / seconds:,.0f} tokens/s, {flops * weights * counts[name] / seconds / peak:.1%} "
                        f"of the machine's rate" + (f", {costs[f'gigabytes_{name}']:.1f} GB" if device == "cuda" else ""))
        print("\n  ".join(line), flush=True)
    hook.remove()
    train.score_sessions = plain


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shrunken", action="store_true")
    shrunken = parser.parse_args().shrunken
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16
    peak = machine_rate(device, 1024 if shrunken else 8192, dtype)
    print(f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}: {peak / 1e12:,.2f} TFLOP/s in a bfloat16 matrix product")
    tokenizer = byte_level_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=1000 if shrunken else 151936, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
                         **(SMALL if shrunken else QWEN))
    model = Qwen3ForCausalLM(config).to(device, dtype).eval()
    if device == "cuda":
        model.activation_checkpointing_enable({"use_reentrant": False})
    for scenario in WINDOWS:
        print(f"\n### {scenario}, {sum(p.numel() for p in model.parameters()):,} parameters in bfloat16")
        flags = [*FLAGS, "--scenario", scenario, "--device", device, *(["--questions", "1", "--group-size", "4"] if shrunken else [])]
        three_steps(model, tokenizer, train.parse_args(flags), peak)
    del model
    for where in dict.fromkeys([device, "cpu"]):
        print(f"\n### the tiny model on {where}")
        tokenizer = train.tiny_tokenizer()
        three_steps(train.tiny_model(tokenizer, 0).to(where), tokenizer, train.parse_args(["--device", where]), machine_rate(where))


if __name__ == "__main__":
    main()
