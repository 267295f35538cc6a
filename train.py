"""The GRPO update: sample groups of attempts, credit every token, take one clipped policy-gradient step. Repeat.

    python train.py                                             # the main job: broadcast and Mosaic, side by side
    python train.py --scenario subagent --method mosaic         # one method, the other scenario
    python train.py --model runs/compaction/mosaic/model --method mosaic --out runs/longer      # go on from a saved model

One step: `rollout` attempts each question `group_size` times; `score_sessions` measures what each session gained;
`credit` turns rewards, session counts and gains into one advantage per token; `update` takes the step. The four methods
are one code with two weights: broadcast has usage = gain_weight = 0, `usage` and `gain` keep one of them, `mosaic` both.
"""
import argparse
import copy
import gc
import hashlib
import inspect
import json
import math
import random
import shutil
import signal
import sys
import tempfile
import time
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, get_cosine_schedule_with_warmup
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import tqdm

import rollout as rollout_module
from figures.plot import plot_curves, table
from figures.report import gains_by_case, mean, summarize, valid_actions, write_trajectories
from infogain import answer_logprob, micro_batches, normalize_by_kind, score_sessions, share_prefixes, token_logprobs
from mosaic import METHODS, session_advantage, trajectory_advantage
from rollout import (PLAIN, PLAIN_WINDOWS, WINDOWS, Task, control, demonstrate, encode, keeps_keys, make_question, pad, read_tasks, rollout, show,
                     space, tiny_tokenizer)

DEFAULTS = {"tiny": {"limit": 14, "questions": 32, "eval_questions": 64, "lr": 4e-3, "batch_tokens": 2048},
            "pretrained": {"limit": 48, "questions": 8, "eval_questions": 16, "lr": 2e-6, "batch_tokens": 4096}}


def seeded(*purpose):
    """A random generator for one purpose, such as (seed, "questions", step): the same purpose, the same numbers."""
    return random.Random(" ".join(map(str, purpose)))


def uniforms(attempts, task, *purpose):
    """The (attempts, turns, limit) uniform numbers that some attempts sample with, from a generator of their own."""
    generator = torch.Generator().manual_seed(seeded(*purpose).getrandbits(63))
    return torch.rand(attempts, task.turns, task.limit, generator=generator)


# ---------------------------------------------------------------- the model

def tiny_model(tokenizer, seed):
    """A Qwen3 of 0.1 million parameters with random weights; as large as the toy task needs (design, section 5)."""
    start, end = control(tokenizer)
    config = Qwen3Config(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True,
                         initializer_range=.1, rope_parameters={"rope_type": "default", "rope_theta": 1000.},
                         max_position_embeddings=1024, bos_token_id=None, eos_token_id=end,
                         pad_token_id=tokenizer.pad_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeded(seed, "weights").getrandbits(63))
        return Qwen3ForCausalLM(config).eval()      # no dropout, in training as in sampling


def adamw(model, lr):
    """AdamW on float32 copies of the parameters: in bfloat16, steps as small as reinforcement's would be rounded away.

    The copies, its masters, are `optimizer.param_groups[0]["params"]`; of a float32 model they are its parameters' own memory.
    """
    return torch.optim.AdamW([p.detach().float() for p in model.parameters()], lr, betas=(.9, .95), weight_decay=0., fused=True)


def warm_start(model, tokenizer, task, seed, steps, attempts, lr):
    """Supervised training on demonstrations by the imperfect teacher, so that reinforcement has something to reinforce."""
    optimizer = adamw(model, lr)
    schedule = get_cosine_schedule_with_warmup(optimizer, min(50, steps // 4), steps)
    rng, bar = seeded(seed, "demonstrations"), tqdm(range(steps), desc=f"warm start ({task.scenario})", mininterval=1)
    for _ in bar:
        shown = [demonstrate(make_question(rng, task.says["question"]), task, tokenizer, rng) for _ in range(attempts)]
        rows = [row[:2] for trajectory in shown for row in merge_sessions(trajectory.sessions)]
        count = sum(sum(mask) for _, mask in rows)
        loss, _ = descend(model, optimizer, rows, (torch.long, torch.bool), 4096,
                          lambda ids, mask, *tree: -token_logprobs(model, ids, mask, 1., *tree).sum() / count)
        schedule.step()
        bar.set_postfix(loss=loss, refresh=False)


def warm_tiny_model(task, seed, steps, device, cache, fresh):
    """The warmed-up tiny model, from the cache folder if it was built before by the same code."""
    code = inspect.getsource(rollout_module) + inspect.getsource(tiny_model) + inspect.getsource(warm_start) + inspect.getsource(descend)
    key = hashlib.sha256(f"{task} {seed} {steps} {code}".encode()).hexdigest()[:12]
    tokenizer, folder = tiny_tokenizer(), Path(cache) / f"tiny-{task.scenario}-seed{seed}-{key}"
    if folder.exists() and not fresh:
        return AutoModelForCausalLM.from_pretrained(folder).to(device)
    model = tiny_model(tokenizer, seed).to(device)
    warm_start(model, tokenizer, task, seed, steps, attempts=24, lr=1e-2)
    save(folder, model, tokenizer)
    return model


def save(folder, model, tokenizer, optimizer=None):
    """Write a model in Hugging Face format with its tokenizer; OSError says what could not be written.

    optimizer: its state is saved too, and the weights are its float32 copies. All goes to a hidden folder first, which takes
    its name when it is whole: a kill, a full disk or a second run at the same time never leaves half a folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    hidden = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
    try:
        masters = optimizer.param_groups[0]["params"] if optimizer else model.parameters()
        model.save_pretrained(hidden / "whole", state_dict={name: p for (name, _), p in zip(model.named_parameters(), masters)})
        tokenizer.save_pretrained(hidden / "whole")
        if optimizer:
            torch.save(optimizer.state_dict(), hidden / "whole" / "optimizer.pt")
        try:
            (hidden / "whole").rename(folder)
        except OSError:             # it holds an older one, or another run was faster: that one makes way
            folder.rename(hidden / "old")
            (hidden / "whole").rename(folder)
    except Exception as error:      # safetensors and torch have classes of their own for a full disk
        raise OSError(f"cannot write {folder}: {error}") from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


# ---------------------------------------------------------------- credit: from trajectories to one advantage per token

def collect(model, tokenizer, questions, task, args, purpose, usage):
    """Attempt every question `group_size` times, score and credit the sessions. Returns (trajectories, costs by phase).

    purpose: what the samples are for, such as (seed, "rollout", step); seeds them.
    """
    attempts = [question for question in questions for _ in range(args.group_size)]
    numbers, begin = uniforms(len(attempts), task, *purpose), time.perf_counter()
    trajectories = sample(model, tokenizer, attempts, task, args, numbers, args.temperature)
    costs, begin = cost("rollout", begin), time.perf_counter()
    within_memory(args, "batch_tokens", lambda most: score_sessions(
        trajectories, tokenizer, partial(answer_logprob, model, max_tokens=most)))
    for i in range(0, len(trajectories), args.group_size):
        credit(trajectories[i:i + args.group_size], usage)
    return trajectories, costs | cost("scoring", begin)


def sample(model, tokenizer, questions, task, args, numbers, temperature):
    """`rollout`, so many attempts at a time as fit into memory. What an attempt samples does not depend on the others."""
    return within_memory(args, "batch_attempts", lambda most: [
        trajectory for i in range(0, len(questions), most)
        for trajectory in rollout(model, tokenizer, questions[i:i + most], task, numbers[i:i + most], temperature)])


def within_memory(args, limit, work):
    """work(args.limit); whenever memory does not suffice, again with half of the limit, from there on."""
    while True:
        try:
            return work(getattr(args, limit))
        except torch.OutOfMemoryError:
            if getattr(args, limit) == 1:
                raise
        setattr(args, limit, getattr(args, limit) // 2)
        torch.cuda.empty_cache()
        print(f"out of memory: --{limit.replace('_', '-')} is {getattr(args, limit)} from here on", file=sys.stderr)


def cost(phase, begin):
    """Metrics of a phase: its seconds and, on a GPU, the gigabytes that tensors took at most since the last phase."""
    costs = {f"seconds_{phase}": time.perf_counter() - begin}
    if torch.cuda.is_available():
        costs[f"gigabytes_{phase}"] = torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.reset_peak_memory_stats()
    return costs


def credit(group, usage):
    """Fill in `advantage` of the attempts of one group and `normalized_gain` of all their sessions."""
    rewards = torch.tensor([trajectory.reward for trajectory in group])                     # (G,)
    counts = torch.tensor([len(trajectory.sessions) for trajectory in group])               # (G,)
    for trajectory, advantage in zip(group, trajectory_advantage(rewards, counts, usage).tolist()):
        trajectory.advantage = advantage
    sessions = [session for trajectory in group for session in trajectory.sessions]
    gains = torch.tensor([session.gain for session in sessions])                            # (N,)
    for session, gain in zip(sessions, normalize_by_kind(gains, [session.kind for session in sessions]).tolist()):
        session.normalized_gain = gain


def token_advantages(trajectories, gain_weight):
    """One list of advantages per session, as long as its ids (0 where the model did not write the token)."""
    sessions = [session for trajectory in trajectories for session in trajectory.sessions]
    advantage = torch.tensor([t.advantage for t in trajectories for _ in t.sessions])       # (S,)
    gain = torch.tensor([session.normalized_gain for session in sessions])                  # (S,)
    mask = pad([session.mask for session in sessions], torch.bool)                          # (S, T)
    closing = torch.tensor([s.closing if s.stop == "answered" else len(s.ids) for s in sessions])       # (S,)
    final_answer = torch.arange(mask.shape[1]) >= closing[:, None]                          # (S, T)
    tokens = session_advantage(advantage, gain, final_answer, gain_weight) * mask           # (S, T)
    return [row[:len(session.ids)] for row, session in zip(tokens.tolist(), sessions)]


def merge_sessions(sessions, advantages=None):
    """Rows (ids, mask, logps, advantages) to train on: sessions that continue one context share one row.

    The model then reads a fork's parent context once, not once per session; each sampled token is still trained once, and
    what comes after the last one is left out.
    """
    rows = []
    for session, advantage in zip(sessions, advantages or [session.logps for session in sessions]):
        new = [session.ids, session.mask, session.logps, advantage]
        for row in rows:
            if session.ids[:len(row[0])] == row[0] and not any(map(min, row[1], session.mask)):
                row[1:] = [[a + b for a, b in zip_longest(old, add, fillvalue=0)] for old, add in zip(row[1:], new[1:])]
                row[0] = session.ids
                break
        else:
            rows.append(new)
    return [[part[:len(row[1]) - row[1][::-1].index(1)] for part in row] for row in rows]


# ---------------------------------------------------------------- the update

def grpo_loss(logps, old_logps, advantages, mask, denominator, clip_low=.2, clip_high=.28, ref_logps=None, kl=0.):
    """The clipped surrogate, equation (6): -sum over the model's tokens of min(ratio A, clip(ratio) A), over denominator.

    logps, old_logps, advantages: (S, T); mask: (S, T) bool. denominator: the number of the model's tokens of the WHOLE
    step, so that the loss summed over micro-batches does not depend on how the step is split. ref_logps: (S, T), adds
    kl times the unbiased estimate exp(d) - d - 1 of the divergence from the reference, d = ref_logps - logps.
    Returns (loss, log_ratio): a scalar, and (S, T) without gradient for the statistics.
    """
    log_ratio = torch.where(mask, logps - old_logps, 0.)                                    # (S, T)
    ratio = log_ratio.exp()
    surrogate = torch.min(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if ref_logps is not None:
        away = torch.where(mask, ref_logps - logps, 0.)                                     # (S, T)
        surrogate = surrogate - kl * (away.exp() - away - 1)
    return -torch.where(mask, surrogate, 0.).sum() / max(denominator, 1), log_ratio.detach()


def descend(model, optimizer, rows, dtypes, max_tokens, loss):
    """One optimizer step on rows of lists, in micro-batches of at most `max_tokens` padded tokens. Returns (loss, gradient norm).

    rows: their second list is the mask. dtypes: of a row's lists. loss: a function of the lists' (S, T) tensors, and of `place` and
    `until` where rows were joined into trees, -> a scalar; the micro-batches' losses add up. Gradients add up in float32,
    whatever the model's precision. A loss or gradient that is not finite changes nothing and returns None, None.
    """
    free = [row[1].index(1) - 1 for row in rows]        # nothing that was sampled is shared, nor what predicts it
    if keeps_keys(model) and 2 * sum(free) > sum(len(row[0]) for row in rows):      # else the trees' mask costs more than they save
        most = min(max_tokens, 4 * max(len(row[0]) for row in rows))
        rows, dtypes = share_prefixes(rows, free, most), [*dtypes, torch.long, torch.long]
    masters, total = optimizer.param_groups[0]["params"], 0.
    optimizer.zero_grad()
    model.zero_grad()
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    for batch in micro_batches([len(row[0]) for row in rows], max_tokens):
        for layer in layers:        # this alone switches gradient checkpointing, where it is enabled; all dropout stays off
            layer.training = True
        part = loss(*(pad(lists, dtype).to(model.device) for lists, dtype in zip(zip(*(rows[i] for i in batch)), dtypes)))
        part.backward()
        for layer in layers:
            layer.training = False
        total += part.item()
        for master, p in zip(masters, model.parameters()):
            if p.grad is not None:
                master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
                p.grad = None
    norm = torch.nn.utils.clip_grad_norm_(masters, 1.).item()
    if not (math.isfinite(total) and math.isfinite(norm)):
        return None, None
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, model.parameters()):
            p.copy_(master)
    return total, norm


def update(model, optimizer, trajectories, args, gain_weight, reference=None):
    """One optimizer step on all sampled tokens of a step's trajectories. Returns its statistics."""
    advantages = iter(token_advantages(trajectories, gain_weight))
    rows = [row for t in trajectories for row in merge_sessions(t.sessions, [next(advantages) for _ in t.sessions])]
    denominator, ratios = sum(sum(row[1]) for row in rows), []

    def loss(ids, mask, old_logps, advantage, *tree):
        logps = token_logprobs(model, ids, mask, args.temperature, *tree)                   # (S, T)
        with torch.no_grad():
            ref_logps = token_logprobs(reference, ids, mask, args.temperature, *tree) if reference else None     # (S, T)
        value, log_ratio = grpo_loss(logps, old_logps, advantage, mask, denominator, ref_logps=ref_logps, kl=args.kl)
        ratios.append(log_ratio[mask])                                                      # (M,)
        return value

    def attempt(most):
        ratios.clear()
        return descend(model, optimizer, rows, (torch.long, torch.bool, torch.float, torch.float), most, loss)

    total, norm = within_memory(args, "batch_tokens", attempt)
    gap = torch.cat(ratios)                                                                 # (tokens of the step,)
    ratio = gap.exp()
    return {"loss": total, "grad_norm": norm, "skipped": int(total is None), "tokens": denominator,
            "ratio_mean": ratio.mean().item(), "ratio_max": ratio.max().item(),
            "clip_share": ((ratio < .8) | (ratio > 1.28)).float().mean().item(),
            "gap_mean": gap.abs().mean().item(), "gap_p99": gap.abs().quantile(.99).item()}


def evaluate(model, tokenizer, questions, task, args, usage):
    """Held-out questions, the same at every call, sampled and greedy. Returns (metrics, the sampled trajectories)."""
    sampled, _ = collect(model, tokenizer, questions, task, args, (args.seed, "evaluation"), usage)
    greedy = sample(model, tokenizer, questions, task, args, uniforms(len(questions), task, "greedy"), temperature=0)
    metrics = {**summarize(sampled, args.group_size, tokenizer), "valid_actions": valid_actions(sampled, tokenizer),
               "success_greedy": mean(t.reward for t in greedy), "valid_actions_greedy": valid_actions(greedy, tokenizer)}
    return {f"eval_{name}": value for name, value in metrics.items()}, sampled


# ---------------------------------------------------------------- the training loop

def train(method, start, tokenizer, task, args, folder, tasks=()):
    """Train a copy of the model `start` with one method, in its folder, from the last checkpoint if there is one.

    tasks: the user's own questions; without, questions of the toy world are drawn.
    """
    usage, gain_weight = (on * weight for on, weight in zip(METHODS[method], (args.usage, args.gain_weight)))
    reference = start.requires_grad_(False) if args.kl else None
    model = copy.deepcopy(start).requires_grad_(True)
    optimizer = adamw(model, args.lr)
    held_out, training = draw_questions(args, task, tasks, "held-out questions"), partial(draw_questions, args, task, tasks, "questions")
    first, skipped, stop = resume(folder, model, optimizer), 0, []
    signal.signal(signal.SIGINT, lambda *_: (stop.append(True), signal.signal(signal.SIGINT, signal.default_int_handler)))
    bar = tqdm(range(first, args.steps + 1), desc=f"{method:9}", initial=first, total=args.steps + 1, mininterval=1)
    for step in bar:
        line, begin = {"step": step}, time.perf_counter()
        if step % args.eval_every == 0 or step == args.steps:
            metrics, sampled = evaluate(model, tokenizer, held_out, task, args, usage)
            shown = sampled[:args.group_size]
            write_trajectories(folder / "trajectories.jsonl", step, shown, token_advantages(shown, gain_weight), tokenizer)
            line |= metrics | {"eval_gains_by_case": gains_by_case(sampled, tokenizer)}
            line |= cost("evaluation", begin)
        if step < args.steps:
            trajectories, costs = collect(model, tokenizer, training(step), task, args, (args.seed, "rollout", step), usage)
            begin = time.perf_counter()
            line |= update(model, optimizer, trajectories, args, gain_weight, reference) | summarize(trajectories, args.group_size, tokenizer)
            line |= costs | cost("update", begin)
            skipped = skipped + 1 if line["skipped"] else 0
            for note in notes(line, step == first):
                bar.write(f"step {step}: {note}")
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        bar.set_postfix(success=f"{line.get('success', 0):.2f}", sessions=f"{line.get('sessions', 0):.2f}", refresh=False)
        if step < args.steps and ((step + 1) % args.save_every == 0 or stop or skipped == 3):
            save(folder / f"checkpoint-{step + 1}", model, tokenizer, optimizer)
            for old in checkpoints(folder)[:-2]:
                shutil.rmtree(old)
        if skipped == 3:
            torch.save([[s.__dict__ for s in t.sessions] for t in trajectories], folder / "offending.pt")
            sys.exit(f"three steps in a row were not finite; {folder} holds a checkpoint and, in offending.pt, the step's sessions")
        if stop and step < args.steps:
            sys.exit(f"stopped after step {step}, with a checkpoint; go on with: python train.py --resume --out {args.out}")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    save(folder / "model", model, tokenizer)
    if stop:
        sys.exit(f"stopped when {method} was finished; go on with: python train.py --resume --out {args.out}")


def notes(line, first):
    """What a person should know of a step's metrics at once."""
    if first:
        yield ", ".join(f"{name} {value:.2f}" for name, value in line.items() if name.startswith(("seconds", "gigabytes")))
    if first and line["gap_mean"] > .05:
        yield (f"warning: log-probabilities at sampling and in training differ by {line['gap_mean']:.3f} on average (99th percentile "
               f"{line['gap_p99']:.3f}), so the ratios of equation (6) mean little; try --dtype float32")
    if line["groups_without_variance"] == 1:
        yield "every group's rewards are equal, so there is no trajectory-level gradient"
    if line["skipped"]:
        yield "loss or gradient is not finite; the step is skipped"


def draw_questions(args, task, tasks, purpose, *step):
    """Questions of the toy world, or of the user's tasks, of which the last tenth (at most eval-questions) is held out."""
    rng, count = seeded(args.seed, purpose, *step), args.questions if step else args.eval_questions
    if not tasks:
        return [make_question(rng, task.says["question"]) for _ in range(count)]
    held_out = min(args.eval_questions, max(1, len(tasks) // 10))
    return rng.sample(tasks[:-held_out], min(count, len(tasks) - held_out)) if step else tasks[-held_out:]


def checkpoints(folder):
    """A method's checkpoints, oldest first; checkpoint-N is the state before step N."""
    return sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))


def resume(folder, model, optimizer):
    """Load the newest sound checkpoint whose steps are all in metrics.jsonl, cut both logs back to it, return its step.

    All that is random is seeded by its purpose and step, so this is the whole state. Without a checkpoint: step 0.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for hidden in folder.glob(".*"):                                    # what a killed run was writing
        shutil.rmtree(hidden)
    lines = {path: intact(path) for path in (folder / "metrics.jsonl", folder / "trajectories.jsonl")}
    step, logged = 0, len(lines[folder / "metrics.jsonl"])
    for path in reversed([path for path in checkpoints(folder) if int(path.name.split("-")[1]) <= logged]):
        try:
            saved = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            optimizer.load_state_dict(torch.load(path / "optimizer.pt", weights_only=True))
            with torch.no_grad():
                for master, p, weight in zip(optimizer.param_groups[0]["params"], model.parameters(), saved.parameters(), strict=True):
                    p.copy_(master.copy_(weight))
            step = int(path.name.split("-")[1])
            break
        except Exception as error:      # whatever a damaged file makes torch, safetensors or json raise
            print(f"{path} is damaged ({str(error).splitlines()[0][:80]}), so the one before it is used", file=sys.stderr)
    for path, kept in lines.items():
        path.with_suffix(".new").write_text("".join(line for line in kept if json.loads(line)["step"] < step))
        path.with_suffix(".new").rename(path)
    return step


def intact(path):
    """The lines of a JSONL file, up to the first that is cut short or damaged."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    for i, line in enumerate(lines):
        try:
            json.loads(line if line.endswith("\n") else "")
        except ValueError:
            print(f"{path}: line {i + 1} is damaged; the run goes on from before it", file=sys.stderr)
            return lines[:i]
    return lines


# ---------------------------------------------------------------- the command line

def fail(message):
    """Bad input: one line, exit status 2."""
    print(f"train.py: {message}", file=sys.stderr)
    sys.exit(2)


def number(kind, low, below=math.inf, above=-math.inf):
    """An argparse type: a number of at least `low`, `below` one bound and `above` another."""
    def parse(text):
        value = kind(text)
        if not (low <= value < below and value > above):
            least = f"above {above}" if above == low else f"at least {low}"
            raise argparse.ArgumentTypeError(f"{text} is not {least} and below {below}")
        return value
    parse.__name__ = kind.__name__
    return parse


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.error = fail
    positive, weight = number(int, 1), number(float, 0)

    def add(flag, default=None, help="", **rest):
        name = flag[2:].replace("-", "_")
        if name in DEFAULTS["tiny"]:
            help += f" (default: {DEFAULTS['tiny'][name]} for the tiny model, {DEFAULTS['pretrained'][name]} for others)"
        parser.add_argument(flag, default=default, help=help + (f" (default: {default})" if default not in (None, False) else ""), **rest)

    add("--scenario", choices=list(WINDOWS), default="compaction", help="how a context that grows too long is handled")
    add("--method", choices=list(METHODS), nargs="+", default=["broadcast", "mosaic"], help="one or more, each from the same start")
    add("--model", default="tiny", help="tiny, or a folder or hub name of a causal language model with a ChatML tokenizer")
    add("--tasks", help="a JSONL file of your own questions (see README); default: questions of the toy world")
    add("--window", type=positive, help=f"tokens of a context (default: {WINDOWS} for the tiny model, {PLAIN_WINDOWS} for others)")
    add("--turns", type=positive, default=12, help="actions per attempt, of all its agents together")
    add("--limit", type=positive, help="tokens of an action")
    add("--steps", type=number(int, 0), default=60, help="GRPO steps")
    add("--questions", type=positive, help="questions per step")
    add("--group-size", type=positive, default=8, help="attempts per question")
    add("--usage", type=number(float, 0, below=1), default=.5, help="weight of the session-usage signal (trajectory level)")
    add("--gain-weight", type=weight, default=.15, help="weight of the normalized information gain (session level)")
    add("--lr", type=weight, help="learning rate")
    add("--kl", type=weight, default=0., help="weight of the divergence from the starting policy")
    add("--temperature", type=number(float, 0, above=0), default=1., help="of sampling, in rollouts and update alike")
    add("--warm-start", type=number(int, 0), help="steps of supervised training on demonstrations before all else (default: 2000 for tiny, else 0)")
    add("--eval-questions", type=positive, help="held-out questions, each attempted group-size times")
    add("--eval-every", type=positive, default=10, help="steps between evaluations")
    add("--save-every", type=positive, default=20, help="steps between checkpoints")
    add("--batch-tokens", type=positive, help="padded tokens per micro-batch of scoring and update")
    add("--batch-attempts", type=positive, default=512, help="attempts sampled side by side")
    add("--dtype", choices=["float32", "bfloat16"], help="of weights and activations (default: bfloat16 for a pretrained model on a GPU, else float32)")
    add("--seed", type=int, default=0, help="of everything that is random")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1, mps, ...")
    add("--cache", default=str(Path(__file__).parent / ".cache"), help="where the warmed-up tiny model is kept")
    add("--fresh", default=False, action="store_true", help="warm up the tiny model anew")
    add("--out", help="the run's folder (default: runs/SCENARIO)")
    add("--overwrite", default=False, action="store_true", help="replace the run that --out holds")
    add("--resume", default=False, action="store_true", help="go on with the run that --out holds, with its own settings")
    args = parser.parse_args(argv)
    args.out = args.out or f"runs/{args.scenario}"
    if args.resume:
        try:
            saved = json.loads((Path(args.out) / "config.json").read_text())
        except (OSError, ValueError) as error:
            fail(f"--resume: {args.out} holds no run that could go on ({error})")
        parser.set_defaults(**saved)
        args = parser.parse_args(argv)
        changed = [f"--{key.replace('_', '-')}" for key in saved if key != "steps" and getattr(args, key) != saved[key]]
        if changed:
            fail(f"--resume goes on with the run's own settings; leave out {', '.join(changed)}, or start anew with --overwrite")
    return args


def settle(args, tokenizer):
    """Fill in the settings that depend on the kind of model, which its tokenizer tells. Returns the Task."""
    plain = tokenizer.unk_token_id is None or tokenizer.unk_token_id not in encode(tokenizer, PLAIN["compaction"][0])
    defaults = {**DEFAULTS["pretrained" if plain else "tiny"], "warm_start": 2000 if args.model == "tiny" else 0,
                "window": (PLAIN_WINDOWS if plain else WINDOWS)[args.scenario],
                "dtype": "bfloat16" if plain and args.device.startswith("cuda") else "float32"}
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return Task(args.scenario, args.window, args.turns, args.limit, plain)


def load_tokenizer(args):
    """The model's tokenizer. Here and in the next two functions, bad input ends the run before anything is written."""
    if args.model == "tiny":
        return tiny_tokenizer()
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        if None in control(tokenizer) or tokenizer.unk_token_id in control(tokenizer):
            raise ValueError("its tokenizer lacks ChatML's <|im_start|> and <|im_end|>")
    except (OSError, ValueError) as error:
        fail(f"--model {args.model} is no causal language model with a ChatML tokenizer: {str(error).splitlines()[0]}")
    return tokenizer


def load_tasks(args, task, tokenizer):
    """The questions of --tasks, each of which must fit the window with any one of its pages."""
    if args.tasks and not task.plain:
        fail("--tasks needs a pretrained --model: the tiny one knows no words but those of its toy world")
    try:
        tasks = read_tasks(args.tasks) if args.tasks else []
        for line, question in enumerate(tasks, 1):
            longest = max(len(show(tokenizer, [None], page)) for page in question.pages.values())
            need = len(show(tokenizer, [], question.question, task.says[task.scenario])) + task.limit + longest
            if need > space(task, tokenizer):
                raise ValueError(f"{args.tasks}, line {line}: the question, a search and its longest page may take {need} tokens, "
                                 f"but the window has room for {space(task, tokenizer)}; shorten the page or use "
                                 f"--window {task.window + need - space(task, tokenizer)} or more")
    except (OSError, ValueError) as error:
        fail(f"--tasks: {error}")
    if args.tasks and len(tasks) < 2:
        fail(f"--tasks: {args.tasks} holds fewer than two questions, but one is held out")
    return tasks


def load_model(args, task, tokenizer):
    """The starting policy, on the device."""
    try:
        torch.zeros(1, device=args.device)
    except (RuntimeError, AssertionError, ValueError) as error:
        fail(f"--device {args.device} is not available here ({str(error).splitlines()[0]}); try --device cpu")
    if args.model == "tiny":
        return warm_tiny_model(task, args.seed, args.warm_start, args.device, args.cache, args.fresh)
    warmed = Path(args.out) / "start"
    try:
        model = AutoModelForCausalLM.from_pretrained(warmed if args.resume and warmed.exists() else args.model, dtype=getattr(torch, args.dtype))
    except (OSError, ValueError) as error:
        fail(f"--model {args.model} is no causal language model with a ChatML tokenizer: {str(error).splitlines()[0]}")
    if task.plain and args.device != "cpu":
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model.to(args.device).eval()


def main(args):
    out = Path(args.out)
    if out.exists() and any(out.iterdir()) and not args.resume:
        if not (out / "config.json").exists():
            fail(f"--out {out} holds files that are no run's: name a folder that is new or empty")
        if not args.overwrite:
            fail(f"--out {out} already holds a run: name another folder, or use --overwrite to replace it, --resume to go on with it")
    if args.group_size == 1:
        print("warning: in a group of one there is nothing to compare, so every advantage A is 0; use --group-size 2 or more")
    tokenizer = load_tokenizer(args)
    task = settle(args, tokenizer)
    tasks = load_tasks(args, task, tokenizer)
    model = load_model(args, task, tokenizer)
    if not args.resume:
        for part in (*METHODS, "start") if out.exists() else ():
            shutil.rmtree(out / part, ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
        config = {key: value for key, value in vars(args).items()
                  if key not in ("out", "cache", "device", "fresh", "overwrite", "resume")}
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if args.model != "tiny" and args.warm_start and not (out / "start").exists():
        warm_start(model, tokenizer, task, args.seed, args.warm_start, attempts=4, lr=2e-4)
        save(out / "start", model, tokenizer)
    for method in dict.fromkeys(args.method):
        if not (out / method / "model").exists():
            train(method, model, tokenizer, task, args, out / method, tasks)
    plot_curves(out)
    print(f"\n{table(out)}\n\nEverything is in {out}: curves.png, and a folder per method with its metrics and model.")


if __name__ == "__main__":
    gc.freeze()         # what the libraries made on import stays: Python need not search it for garbage again and again
    try:
        main(parse_args())
    except OSError as error:
        fail(f"{error}; what was saved before is whole, and --resume goes on from it")
    except torch.OutOfMemoryError:
        fail("memory does not suffice for a single attempt: use a smaller --window or model; --resume goes on from what was saved")
    except KeyboardInterrupt:
        sys.exit("stopped; what was saved before is whole, and --resume goes on from it")
