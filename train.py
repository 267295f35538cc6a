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
from transformers.utils.logging import tqdm

import rollout as rollout_module
from figures.plot import plot_curves, table
from figures.report import gains_by_case, mean, summarize, write_trajectories
from infogain import answer_logprob, micro_batches, normalize_by_kind, pad, score_sessions, token_logprobs
from mosaic import METHODS, session_advantage, trajectory_advantage
from rollout import WINDOWS, Task, control, demonstrate, make_question, rollout, tiny_tokenizer


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


def warm_start(model, tokenizer, task, seed, steps, attempts=24, lr=1e-2):
    """Supervised training on demonstrations by the imperfect teacher, so that reinforcement has something to reinforce."""
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(.9, .95), weight_decay=0., fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, 50, steps)
    rng, bar = seeded(seed, "demonstrations"), tqdm(range(steps), desc=f"warm start ({task.scenario})", mininterval=1)
    for _ in bar:
        shown = [demonstrate(make_question(rng), task, tokenizer, rng) for _ in range(attempts)]
        ids, mask = zip(*[row[:2] for trajectory in shown for row in merge_sessions(trajectory.sessions)])
        ids, mask = pad(ids).to(model.device), pad(mask, torch.bool).to(model.device)       # (S, T)
        loss = -token_logprobs(model, ids, mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.)
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


def warm_tiny_model(task, seed, steps, device, cache, fresh):
    """The warmed-up tiny model and its tokenizer, from the cache folder if it was built before by the same code."""
    code = inspect.getsource(rollout_module) + inspect.getsource(tiny_model) + inspect.getsource(warm_start)
    key = hashlib.sha256(f"{task} {seed} {steps} {code}".encode()).hexdigest()[:12]
    tokenizer, folder = tiny_tokenizer(), Path(cache) / f"tiny-{task.scenario}-seed{seed}-{key}"
    if folder.exists() and not fresh:
        return AutoModelForCausalLM.from_pretrained(folder).to(device), tokenizer
    model = tiny_model(tokenizer, seed).to(device)
    warm_start(model, tokenizer, task, seed, steps)
    save(folder, model, tokenizer)
    return model, tokenizer


def save(folder, model, tokenizer, **states):
    """Write a model in Hugging Face format with its tokenizer and further states; OSError says what could not be written.

    All goes to a hidden folder first, which takes its name when it is whole: a kill, a full disk or a second run at the
    same time never leaves half a folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    hidden = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
    try:
        model.save_pretrained(hidden / "whole")
        tokenizer.save_pretrained(hidden / "whole")
        for name, state in states.items():
            torch.save(state, hidden / "whole" / f"{name}.pt")
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
    """Attempt every question `group_size` times, score and credit the sessions. Returns (trajectories, seconds by phase).

    purpose: what the samples are for, such as (seed, "rollout", step); seeds them.
    """
    times = [time.perf_counter()]
    attempts = [question for question in questions for _ in range(args.group_size)]
    trajectories = rollout(model, tokenizer, attempts, task, uniforms(len(attempts), task, *purpose), args.temperature)
    times.append(time.perf_counter())
    score_sessions(trajectories, tokenizer, partial(answer_logprob, model, max_tokens=args.batch_tokens))
    for i in range(0, len(trajectories), args.group_size):
        credit(trajectories[i:i + args.group_size], usage)
    times.append(time.perf_counter())
    return trajectories, {"rollout": times[1] - times[0], "scoring": times[2] - times[1]}


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

    The model then reads a fork's parent context once, not once per session; each sampled token is still trained once.
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
    return rows


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


def update(model, optimizer, trajectories, args, gain_weight, reference=None):
    """One optimizer step on all sampled tokens of a step's trajectories, in micro-batches. Returns its statistics.

    A loss or gradient that is not finite changes nothing: `skipped` is then 1 and both are None.
    """
    advantages = iter(token_advantages(trajectories, gain_weight))
    rows = [row for t in trajectories for row in merge_sessions(t.sessions, [next(advantages) for _ in t.sessions])]
    denominator = sum(sum(row[1]) for row in rows)
    optimizer.zero_grad()
    total, ratios = 0., []
    for batch in micro_batches([len(row[0]) for row in rows], args.batch_tokens):
        ids, mask, old_logps, advantage = (pad([rows[i][k] for i in batch], dtype).to(model.device)     # (S, T)
                                           for k, dtype in enumerate((torch.long, torch.bool, torch.float, torch.float)))
        logps = token_logprobs(model, ids, mask, args.temperature)                          # (S, T)
        with torch.no_grad():
            ref_logps = token_logprobs(reference, ids, mask, args.temperature) if reference else None
        loss, log_ratio = grpo_loss(logps, old_logps, advantage, mask, denominator, ref_logps=ref_logps, kl=args.kl)
        loss.backward()
        total += loss.item()
        ratios.append(log_ratio[mask])                                                      # (M,)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.).item()
    finite = math.isfinite(total) and math.isfinite(norm)
    if finite:
        optimizer.step()
    ratio = torch.cat(ratios).exp()                                                         # (tokens of the step,)
    return {"loss": total if finite else None, "grad_norm": norm if finite else None, "skipped": int(not finite),
            "tokens": denominator, "ratio_mean": ratio.mean().item(), "ratio_max": ratio.max().item(),
            "clip_share": ((ratio < .8) | (ratio > 1.28)).float().mean().item()}


def evaluate(model, tokenizer, task, args, usage):
    """Held-out questions, the same at every call, sampled and greedy. Returns (metrics, the sampled trajectories)."""
    rng = seeded(args.seed, "held-out questions")
    questions = [make_question(rng) for _ in range(args.eval_questions)]
    sampled, _ = collect(model, tokenizer, questions, task, args, (args.seed, "evaluation"), usage)
    greedy = rollout(model, tokenizer, questions, task, uniforms(len(questions), task, "greedy"), temperature=0)
    metrics = {**summarize(sampled, args.group_size), "success_greedy": mean(t.reward for t in greedy)}
    return {f"eval_{name}": value for name, value in metrics.items()}, sampled


# ---------------------------------------------------------------- the training loop

def train(method, start, tokenizer, task, args, folder):
    """Train a copy of the model `start` with one method, in its folder, from the last checkpoint if there is one."""
    usage, gain_weight = (on * weight for on, weight in zip(METHODS[method], (args.usage, args.gain_weight)))
    reference = start.requires_grad_(False) if args.kl else None
    model = copy.deepcopy(start).requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(.9, .95), weight_decay=0., fused=True)
    first, skipped, stop = resume(folder, model, optimizer), 0, []
    signal.signal(signal.SIGINT, lambda *_: (stop.append(True), signal.signal(signal.SIGINT, signal.default_int_handler)))
    bar = tqdm(range(first, args.steps + 1), desc=f"{method:9}", initial=first, total=args.steps + 1, mininterval=1)
    for step in bar:
        line, begin = {"step": step}, time.perf_counter()
        if step % args.eval_every == 0 or step == args.steps:
            metrics, sampled = evaluate(model, tokenizer, task, args, usage)
            shown = sampled[:args.group_size]
            write_trajectories(folder / "trajectories.jsonl", step, shown, token_advantages(shown, gain_weight), tokenizer)
            line |= metrics | {"eval_gains_by_case": gains_by_case(sampled, tokenizer)}
            line["seconds_evaluation"] = time.perf_counter() - begin
        if step < args.steps:
            rng = seeded(args.seed, "questions", step)
            questions = [make_question(rng) for _ in range(args.questions)]
            trajectories, seconds = collect(model, tokenizer, questions, task, args, (args.seed, "rollout", step), usage)
            begin = time.perf_counter()
            line |= update(model, optimizer, trajectories, args, gain_weight, reference) | summarize(trajectories, args.group_size)
            line |= {f"seconds_{phase}": s for phase, s in seconds.items()} | {"seconds_update": time.perf_counter() - begin}
            skipped = skipped + 1 if line["skipped"] else 0
            if line["groups_without_variance"] == 1:
                bar.write(f"step {step}: every group's rewards are equal, so there is no trajectory-level gradient")
            if line["skipped"]:
                bar.write(f"step {step}: loss or gradient is not finite; the step is skipped")
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        bar.set_postfix(success=f"{line.get('success', 0):.2f}", sessions=f"{line.get('sessions', 0):.2f}", refresh=False)
        if step < args.steps and ((step + 1) % args.save_every == 0 or stop or skipped == 3):
            save(folder / f"checkpoint-{step + 1}", model, tokenizer, optimizer=optimizer.state_dict())
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
            weights = AutoModelForCausalLM.from_pretrained(path).state_dict()
            optimizer.load_state_dict(torch.load(path / "optimizer.pt", weights_only=True))
            model.load_state_dict(weights)
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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = fail
    add, positive, weight = parser.add_argument, number(int, 1), number(float, 0)
    add("--scenario", choices=list(WINDOWS), default="compaction", help="how a context that grows too long is handled")
    add("--method", choices=list(METHODS), nargs="+", default=["broadcast", "mosaic"], help="one or more, each from the same start")
    add("--model", default="tiny", help="tiny, or a folder or hub name of a causal language model with a ChatML tokenizer")
    add("--steps", type=number(int, 0), default=60, help="GRPO steps")
    add("--questions", type=positive, default=32, help="questions per step")
    add("--group-size", type=positive, default=8, help="attempts per question")
    add("--usage", type=number(float, 0, below=1), default=.5, help="weight of the session-usage signal (trajectory level)")
    add("--gain-weight", type=weight, default=.3, help="weight of the normalized information gain (session level)")
    add("--lr", type=weight, default=1e-3, help="learning rate")
    add("--kl", type=weight, default=0., help="weight of the divergence from the starting policy")
    add("--temperature", type=number(float, 0, above=0), default=1., help="of sampling, in rollouts and update alike")
    add("--warm-steps", type=number(int, 0), default=2000, help="steps of the tiny model's supervised warm start")
    add("--eval-questions", type=positive, default=64, help="held-out questions, each attempted group-size times")
    add("--eval-every", type=positive, default=10, help="steps between evaluations")
    add("--save-every", type=positive, default=20, help="steps between checkpoints")
    add("--batch-tokens", type=positive, default=2048, help="padded tokens per micro-batch of scoring and update")
    add("--seed", type=int, default=0, help="of everything that is random")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1, mps, ...")
    add("--cache", default=str(Path(__file__).parent / ".cache"), help="where the warmed-up tiny model is kept")
    add("--fresh", action="store_true", help="warm up the tiny model anew")
    add("--out", help="the run's folder (default: runs/SCENARIO)")
    add("--overwrite", action="store_true", help="replace the run that --out holds")
    add("--resume", action="store_true", help="go on with the run that --out holds, with its own settings")
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


def load(args, task):
    """The starting policy and its tokenizer, on the device; bad input ends here, before anything is written."""
    try:
        torch.zeros(1, device=args.device)
    except (RuntimeError, AssertionError, ValueError) as error:
        fail(f"--device {args.device} is not available here ({str(error).splitlines()[0]}); try --device cpu")
    if args.model == "tiny":
        return warm_tiny_model(task, args.seed, args.warm_steps, args.device, args.cache, args.fresh)
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        if None in control(tokenizer) or tokenizer.unk_token_id in control(tokenizer):
            raise ValueError("its tokenizer lacks ChatML's <|im_start|> and <|im_end|>")
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    except (OSError, ValueError) as error:
        fail(f"--model {args.model} is no causal language model with a ChatML tokenizer: {str(error).splitlines()[0]}")
    return model.to(args.device).eval(), tokenizer


def main():
    args = parse_args()
    out, task = Path(args.out), Task(args.scenario, WINDOWS[args.scenario])
    if out.exists() and any(out.iterdir()) and not args.resume:
        if not (out / "config.json").exists():
            fail(f"--out {out} holds files that are no run's: name a folder that is new or empty")
        if not args.overwrite:
            fail(f"--out {out} already holds a run: name another folder, or use --overwrite to replace it, --resume to go on with it")
    if args.group_size == 1:
        print("warning: in a group of one there is nothing to compare, so every advantage A is 0; use --group-size 2 or more")
    model, tokenizer = load(args, task)
    if not args.resume:
        for method in METHODS if out.exists() else ():
            shutil.rmtree(out / method, ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
        config = {key: value for key, value in vars(args).items()
                  if key not in ("out", "cache", "device", "fresh", "overwrite", "resume")}
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for method in dict.fromkeys(args.method):
        if not (out / method / "model").exists():
            train(method, model, tokenizer, task, args, out / method)
    plot_curves(out)
    print(f"\n{table(out)}\n\nEverything is in {out}: curves.png, and a folder per method with its metrics and model.")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        fail(f"{error}; what was saved before is whole, and --resume goes on from it")
    except KeyboardInterrupt:
        sys.exit("stopped; what was saved before is whole, and --resume goes on from it")
