"""The GRPO update: sample groups of attempts, credit every token, take one clipped policy-gradient step.

    python train.py                                             # the main job: broadcast and Mosaic
    python train.py --scenario subagent --method mosaic         # one method, the other scenario
    python train.py --model runs/compaction/mosaic/model --out runs/longer      # go on from a saved model

One step: `collect` samples attempts and measures what each session gained; `credit` turns rewards, session
counts and gains into one advantage per token; `update` takes the step on `grpo_loss`. The four methods are
one code with two weights: broadcast has usage = gain_weight = 0, `usage` and `gain` keep one of them, Mosaic
both. That is the whole method, and the first half of this file. Then: checkpoints, models, the command line.
"""
import argparse
import copy
import hashlib
import inspect
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import transformers
from tqdm import tqdm
from transformers import (AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM,
                          get_cosine_schedule_with_warmup)
from transformers.modeling_layers import GradientCheckpointingLayer

import infogain
import rollout
from figures.plot import plot_curves, table
from figures.report import (agreement, cost, files_of, gains_by_case, mean, notes, summarize, valid_actions,
                            write_trajectories)
from infogain import answer_logprob, batches, score_sessions, token_logprobs
from mosaic import normalize_by_kind, session_advantage, trajectory_advantage
from rollout import (CAREFUL, HABITS, PLAIN, WINDOWS, SlotCache, Task, TurnCache, control, demonstrate,
                     encode, keeps_keys, least_window, make_question, read_action, read_tasks,
                     sample_attempts, tiny_tokenizer)

METHODS = ("broadcast", "usage", "gain", "mosaic")


@dataclass
class Run:
    """What stays the same during a run."""
    args: argparse.Namespace    # the settings
    task: Task                  # the limits of an attempt
    tokenizer: object
    start: torch.nn.Module      # the policy that training starts from
    tasks: list = ()            # the user's questions; without, questions of the toy world are drawn


# ---------------------------------------------------------------- one step: sample, score, credit, update

def collect(model, run, questions, *purpose):
    """Attempt every question `group_size` times, score the sessions. Returns (trajectories, costs by phase).

    purpose: what the samples are for, such as "rollout" and the step; with the run's seed, it seeds them.
    """
    begin = time.perf_counter()
    attempts = [question for question in questions for _ in range(run.args.group_size)]
    trajectories = sample(model, run, attempts, run.args.temperature, *purpose)
    costs, begin = cost("rollout", begin), time.perf_counter()
    score = partial(answer_logprob, max_tokens=run.args.batch_tokens)
    score_sessions(trajectories, run.tokenizer, partial(score, model), partial(score, run.start))
    return trajectories, costs | cost("scoring", begin)


def sample(model, run, questions, temperature, *purpose):
    """`sample_attempts`, so many at a time as fit into memory; attempts do not depend on each other."""
    numbers, most = uniforms(len(questions), run.task, run.args.seed, *purpose), run.args.batch_attempts
    parts = [slice(i, i + most) for i in range(0, len(questions), most)]
    return [trajectory for part in parts for trajectory in sample_attempts(
        model, run.tokenizer, questions[part], run.task, numbers[part], temperature)]


def credit(trajectories, group_size, usage, gain_weight):
    """From rewards, session counts and gains to advantages: equations (1) to (5).

    Fills in `advantage` of every attempt, group by group, `normalized_gain` and `advantages` of all sessions
    of the step.
    """
    for i in range(0, len(trajectories), group_size):
        group = trajectories[i:i + group_size]
        rewards = torch.tensor([t.reward for t in group])                                   # (G,)
        # to run out of turns is no exploration: an attempt without an answer ranks as if it had no session
        counts = torch.tensor([len(t.sessions) * (t.stop == "answered") for t in group])    # (G,)
        for t, advantage in zip(group, trajectory_advantage(rewards, counts, usage).tolist()):
            t.advantage = advantage
    sessions = [session for t in trajectories for session in t.sessions]
    gains = torch.tensor([session.gain for session in sessions])                            # (N,)
    for session, gain in zip(sessions, normalize_by_kind(gains, [s.kind for s in sessions]).tolist()):
        session.normalized_gain = gain
    for t in trajectories:
        for session, following in zip(t.sessions, [*t.sessions[1:], None]):
            credit_tokens(session, following, t.advantage, gain_weight)


def credit_tokens(session, following, advantage, gain_weight):
    """Fill in `advantages` of a session: every action is paid for what came after it, by equation (5)."""
    own = session_advantage(advantage, session.normalized_gain, gain_weight)
    if session.kind != "ordinary":  # a summary or a report is what the session's own gain measures
        closing = own
    elif session.stop == "answered":            # the final answer: nothing comes after it
        closing = advantage
    elif following:                             # a fork, or a compaction, asked for or forced: what it opened
        closing = session_advantage(advantage, following.normalized_gain, gain_weight)
    else:                                       # the attempt ended without an answer
        closing = own
    tokens = [own] * session.closing + [closing] * (len(session.ids) - session.closing)
    session.advantages = [advantage * mask for advantage, mask in zip(tokens, session.mask)]


def grpo_loss(logps, old_logps, advantages, mask, denominator, ref_logps=None, kl=0., low=.2, high=.28):
    """The clipped surrogate, equation (6): -sum of min(ratio A, clip(ratio) A) over the denominator.

    logps, old_logps, advantages: (S, T); mask: (S, T) bool. denominator: the number of the model's tokens of
    the WHOLE step, so that the loss summed over micro-batches does not depend on how the step is split.
    ref_logps: (S, T), adds kl times the unbiased estimate exp(d) - d - 1 of the divergence from the
    reference, d = ref_logps - logps. Returns (loss, log_ratio): a scalar, and (S, T) without gradient for the
    statistics.
    """
    log_ratio = torch.where(mask, logps - old_logps, 0.)                                    # (S, T)
    ratio = log_ratio.exp()
    surrogate = torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if ref_logps is not None:
        away = torch.where(mask, ref_logps - logps, 0.)                                     # (S, T)
        surrogate = surrogate - kl * (away.exp() - away - 1)
    return -torch.where(mask, surrogate, 0.).sum() / max(denominator, 1), log_ratio.detach()


def update(model, optimizer, trajectories, args, reference=None):
    """One optimizer step on all sampled tokens of a step's credited trajectories. Returns its statistics."""
    sessions = [session for t in trajectories for session in t.sessions]
    rows = [up_to_last_sampled(s.ids, s.mask, s.logps, s.advantages) for s in sessions]
    denominator, ratios = sum(sum(session.mask) for session in sessions), []

    def loss(ids, mask, old_logps, advantages, *tree):
        logps = token_logprobs(model, ids, mask, args.temperature, *tree)                   # (S, T)
        ref_logps = None
        if reference:
            with torch.no_grad():
                ref_logps = token_logprobs(reference, ids, mask, args.temperature, *tree)   # (S, T)
        value, log_ratio = grpo_loss(logps, old_logps, advantages, mask, denominator, ref_logps, args.kl)
        ratios.append(log_ratio[mask])                                                      # (M,)
        return value

    dtypes = torch.long, torch.bool, torch.float, torch.float
    total, norm = descend(model, optimizer, rows, dtypes, args.batch_tokens, loss)
    return {"loss": total, "grad_norm": norm, "skipped": int(total is None), "tokens": denominator,
            **agreement(torch.cat(ratios))}


def up_to_last_sampled(ids, mask, *rest):
    """A row to train on: what comes after the last sampled token predicts nothing that is trained."""
    end = len(mask) - mask[::-1].index(1)
    return [part[:end] for part in (ids, mask, *rest)]


def descend(model, optimizer, rows, dtypes, max_tokens, loss):
    """One optimizer step on rows of lists, in micro-batches of at most `max_tokens` padded tokens.

    rows, dtypes: see `infogain.batches`. loss: a function of a micro-batch's (S, T) tensors -> a scalar; the
    micro-batches' losses add up, and their gradients in float32, whatever the model's precision. Returns
    (loss, gradient norm); where one of them is not finite, nothing changes and both are None.
    """
    total = 0.
    optimizer.zero_grad()
    for batch in batches(rows, max_tokens, keeps_keys(model), dtypes):
        part = backward(model, loss, [tensor.to(model.device) for tensor in batch])
        total += part
        for master, p in zip(masters(optimizer), model.parameters()):
            if p.grad is not None:
                master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
                p.grad = None
    norm = torch.nn.utils.clip_grad_norm_(masters(optimizer), 1.).item()
    if not (math.isfinite(total) and math.isfinite(norm)):
        return None, None
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters(optimizer), model.parameters()):
            p.copy_(master)
    return total, norm


def backward(model, loss, batch):
    """The loss of one micro-batch, its gradient added to the parameters'.

    Layers alone are in training mode meanwhile, which switches gradient checkpointing where it is enabled,
    and no dropout, as this sits in modules below them.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    try:
        for layer in layers:
            layer.training = True
        value = loss(*batch)
        value.backward()
    finally:
        for layer in layers:
            layer.training = False
    return value.item()


def adamw(model, lr):
    """AdamW on float32 copies of the parameters: in bfloat16, small steps would be rounded away.

    The copies of a float32 model are its parameters' own memory.
    """
    copies = [p.detach().float() for p in model.parameters()]
    return torch.optim.AdamW(copies, lr, betas=(.9, .95), weight_decay=0., fused=True)


def masters(optimizer):
    """The float32 copies of the parameters that an optimizer works on, in the model's order."""
    return optimizer.param_groups[0]["params"]


# ---------------------------------------------------------------- the training loop

def train(method, run, folder):
    """Train a copy of the starting policy in the method's folder, from its last checkpoint if any."""
    args = run.args
    weights = args.usage * (method in ("usage", "mosaic")), args.gain_weight * (method in ("gain", "mosaic"))
    model = copy.deepcopy(run.start)
    optimizer = adamw(model, args.lr)
    first, skipped, failed, interrupted = resume(folder, model, optimizer), 0, 0, catch_interrupt()
    latest = {}                                                         # what the progress bar shows
    bar = tqdm(range(first, args.steps + 1), method, initial=first, total=args.steps + 1, mininterval=1)
    for step in bar:
        line, last = {"step": step}, step == args.steps
        if last or step % args.eval_every == 0:
            line |= within_memory(args, lambda: evaluate(model, run, weights, folder, step))
        if not last:
            line |= within_memory(args, lambda: one_step(model, optimizer, run, weights, folder, step))
            skipped = skipped + 1 if line["skipped"] else 0
            failed = failed + 1 if line["success"] == 0 else 0
            for note in notes(line, step == first, failed):
                bar.write(f"step {step}: {note}")
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        latest |= line
        figures = [key for key in ("success", "sessions", "eval_success") if key in latest]
        bar.set_postfix({key: f"{latest[key]:.2f}" for key in figures}, refresh=False)
        if not last and ((step + 1) % args.save_every == 0 or interrupted or skipped == 3):
            checkpoint(folder, model, run.tokenizer, optimizer, step + 1)
        if skipped == 3:
            sys.exit("three steps in a row were not finite; a checkpoint and the last one's sessions, "
                     f"offending.pt, are in {folder}")
        if interrupted and not last:
            sys.exit(f"stopped after step {step}, with a checkpoint; {how_to_go_on(args)}")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    save(folder / "model", model, run.tokenizer)
    if interrupted:
        sys.exit(f"stopped when {method} was finished; {how_to_go_on(args)}")


def how_to_go_on(args):
    return f"go on with: python train.py --resume --out {args.out}"


def one_step(model, optimizer, run, weights, folder, step):
    """One training step; returns its metrics. One that is not finite leaves its sessions in offending.pt."""
    trajectories, costs = collect(model, run, draw_questions(run, step), "rollout", step)
    begin = time.perf_counter()
    credit(trajectories, run.args.group_size, *weights)
    line = update(model, optimizer, trajectories, run.args, run.start if run.args.kl else None)
    if line["skipped"]:
        torch.save([[vars(session) for session in t.sessions] for t in trajectories], folder / "offending.pt")
    return line | summarize(trajectories, run.args.group_size, run.tokenizer) | costs | cost("update", begin)


def evaluate(model, run, weights, folder, step):
    """Metrics on held-out questions, the same every time; one group is written out in full."""
    questions, begin = held_out_questions(run), time.perf_counter()
    sampled, _ = collect(model, run, questions, "evaluation")
    greedy = sample(model, run, questions, 0, "greedy")
    credit(sampled, run.args.group_size, *weights)
    write_trajectories(folder / "trajectories.jsonl", step, sampled[:run.args.group_size], run.tokenizer)
    metrics = summarize(sampled, run.args.group_size, run.tokenizer)
    metrics |= {"gains_by_case": gains_by_case(sampled, run.tokenizer),
                "success_greedy": mean(t.reward for t in greedy),
                "valid_actions": valid_actions(sampled, run.tokenizer),
                "valid_actions_greedy": valid_actions(greedy, run.tokenizer)}
    return {f"eval_{name}": value for name, value in metrics.items()} | cost("evaluation", begin)


def draw_questions(run, step):
    """The questions of a training step: of the toy world, or from the user's tasks that are not held out."""
    rng, count = seeded(run.args.seed, "questions", step), run.args.questions
    if run.tasks:
        training = training_tasks(run)
        return rng.sample(training, min(count, len(training)))
    return [make_question(rng, run.task.says["question"]) for _ in range(count)]


def held_out_questions(run):
    """The questions of evaluations: of the toy world, or the user's last tenth (all at --steps 0)."""
    rng, count = seeded(run.args.seed, "held-out questions"), run.args.eval_questions
    if run.tasks and run.args.steps == 0:
        return run.tasks
    if run.tasks:
        return run.tasks[-min(count, max(1, len(run.tasks) // 10)):]
    return [make_question(rng, run.task.says["question"]) for _ in range(count)]


def training_tasks(run):
    """The user's tasks, without those that ask the same as one that is held out."""
    held_out = {task.question for task in held_out_questions(run)}
    return [task for task in run.tasks if task.question not in held_out]


def seeded(*purpose):
    """A random generator for one purpose, such as (seed, "questions", step)."""
    return random.Random(" ".join(map(str, purpose)))


def uniforms(attempts, task, *purpose):
    """The uniform numbers that some attempts sample with, (attempts, turns, limit)."""
    generator = torch.Generator().manual_seed(seeded(*purpose).getrandbits(63))
    return torch.rand(attempts, task.turns, task.limit, generator=generator)


def within_memory(args, work):
    """work(), again in half as large batches if memory does not suffice: all is seeded, nothing changes."""
    while True:
        try:
            return work()
        except torch.OutOfMemoryError:
            if args.batch_tokens == args.batch_attempts == 1:
                raise
        args.batch_tokens = max(args.batch_tokens // 2, 1)
        args.batch_attempts = max(args.batch_attempts // 2, 1)
        torch.cuda.empty_cache()
        print(f"out of memory: from here on, --batch-tokens is {args.batch_tokens} and --batch-attempts "
              f"{args.batch_attempts}", file=sys.stderr)


def catch_interrupt():
    """A list that Ctrl-C fills, so that the step is finished first; a second Ctrl-C ends the run at once."""
    pressed = []

    def press(*_):
        pressed.append(True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGINT, press)
    return pressed


# ---------------------------------------------------------------- checkpoints

LOGS = ("metrics.jsonl", "trajectories.jsonl")


def save(folder, model, tokenizer, weights=None, state=None):
    """Write a model in Hugging Face format with its tokenizer; OSError says what could not be written.

    weights: of its parameters, if others than its own; state: of the training, beside it. All goes to a
    hidden folder first, which takes its name when it is whole and on the disk: a kill, a full disk or a
    second run at the same time never leaves half a folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    hidden = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))
    whole = hidden / folder.name
    try:
        named = dict(zip(dict(model.named_parameters()), weights or model.parameters()))
        shared = dict(model.named_parameters(remove_duplicate=False))       # tied weights are saved once
        buffers = {name: value for name, value in model.state_dict().items() if name not in shared}
        model.save_pretrained(whole, state_dict=named | buffers)
        tokenizer.save_pretrained(whole)
        if state:
            torch.save(state, whole / "training.pt")
        for path in whole.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        if folder.exists():             # an older one, or that of another run, which was faster, makes way
            folder.rename(hidden / "old")
        whole.rename(folder)
    except Exception as error:          # safetensors and torch have classes of their own for a full disk
        raise OSError(f"cannot write {folder}: {error}") from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def checkpoint(folder, model, tokenizer, optimizer, step):
    """Save the state before a step, with the lengths of the logs; keep the checkpoint before it."""
    lengths = {name: (folder / name).stat().st_size for name in LOGS}
    state = {"step": step, "lengths": lengths, "optimizer": optimizer.state_dict()}
    save(folder / "checkpoint-new", model, tokenizer, masters(optimizer), state)
    if (folder / "checkpoint").exists():
        shutil.rmtree(folder / "checkpoint-before", ignore_errors=True)
        (folder / "checkpoint").rename(folder / "checkpoint-before")
    (folder / "checkpoint-new").rename(folder / "checkpoint")


def resume(folder, model, optimizer):
    """Load the newest sound checkpoint and cut the logs back to it; returns its step, 0 without one.

    All that is random is seeded by its purpose and step, so this is the whole state.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for hidden in folder.glob(".unfinished-*"):                         # what a killed run was writing
        shutil.rmtree(hidden)
    step, lengths = 0, dict.fromkeys(LOGS, 0)
    for path in [folder / name for name in ("checkpoint-new", "checkpoint", "checkpoint-before")]:
        try:
            if path.exists():
                step, lengths = load(path, model, optimizer)
                break
        except Exception as error:      # whatever a damaged file makes torch, safetensors or json raise
            reason = str(error).splitlines()[0][:80]
            print(f"{path} is damaged ({reason}), so the one before it is used", file=sys.stderr)
    for name, length in lengths.items():
        (folder / name).touch()
        os.truncate(folder / name, length)
    return step


def finished(folder, steps):
    """Whether a method has been trained to its last step; whatever its folder holds otherwise."""
    try:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
        done = [line["step"] for line in lines]             # also fails where a line is no object
        return (folder / "model").exists() and done[-1] == steps
    except (OSError, ValueError, LookupError, TypeError):
        return False


def load(path, model, optimizer):
    """Put a checkpoint into a model and its optimizer; returns its step and the lengths of its logs."""
    saved = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    state = torch.load(path / "training.pt", weights_only=True)
    for name, length in state["lengths"].items():
        log = (path.parent / name).read_bytes()[:length]
        if len(log) < length or not all(isinstance(json.loads(line), dict) for line in log.splitlines()):
            raise ValueError(f"{name} is not what it was then")
    optimizer.load_state_dict(state["optimizer"])
    with torch.no_grad():
        for master, p, weight in zip(masters(optimizer), model.parameters(), saved.parameters(), strict=True):
            p.copy_(master.copy_(weight))
    return state["step"], state["lengths"]


# ---------------------------------------------------------------- models

def tiny_model(tokenizer, seed):
    """A Qwen3 of 0.1 million parameters with random weights; as large as the toy task needs."""
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True,
        initializer_range=.1, rope_parameters={"rope_type": "default", "rope_theta": 1000.},
        max_position_embeddings=1024, bos_token_id=None, eos_token_id=control(tokenizer)[1],
        pad_token_id=tokenizer.pad_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeded(seed, "weights").getrandbits(63))
        return Qwen3ForCausalLM(config).eval()      # no dropout, in training as in sampling


def warm_start(model, task, tokenizer, args, attempts, lr):
    """Supervised training on the imperfect teacher's demonstrations: something to reinforce.

    Three quarters of them are careful, the last quarter has the habits that reinforcement then has to change.
    """
    optimizer, steps, rng = adamw(model, lr), args.warm_start, seeded(args.seed, "demonstrations")
    schedule = get_cosine_schedule_with_warmup(optimizer, min(50, steps // 4), steps)
    bar = tqdm(range(steps), f"warm start ({args.scenario})", mininterval=1)
    for step in bar:
        habits = CAREFUL if step < .75 * steps else HABITS[args.habits]
        clues = 2 if step < .2 * steps else None  # to compare two pages is learned first, and soonest alone
        questions = [make_question(rng, task.says["question"], clues) for _ in range(attempts)]
        shown = [demonstrate(question, task, tokenizer, rng, habits) for question in questions]
        rows = [up_to_last_sampled(s.ids, s.mask) for t in shown for s in t.sessions]
        count = sum(sum(mask) for _, mask in rows)
        loss, _ = descend(model, optimizer, rows, (torch.long, torch.bool), 4096,
                          lambda ids, mask, *tree: -token_logprobs(model, ids, mask, 1., *tree).sum() / count)
        schedule.step()
        bar.set_postfix(loss=f"{loss:.3f}", refresh=False)


def warm_tiny_model(task, args):
    """The warmed-up tiny model, from the cache if the same code and libraries have built it before."""
    parts = (rollout, infogain, tiny_model, warm_start, up_to_last_sampled, descend, backward, adamw, masters,
             seeded)
    settings = [task, args.habits, args.seed, args.warm_start, torch.__version__, transformers.__version__]
    key = hashlib.sha256(repr([*settings, *map(inspect.getsource, parts)]).encode()).hexdigest()[:12]
    folder = Path(args.cache) / f"tiny-{task.scenario}-{args.habits}-seed{args.seed}-{key}"
    if folder.exists() and not args.fresh:
        date = time.strftime("%Y-%m-%d %H:%M", time.localtime(folder.stat().st_mtime))
        print(f"the warm start of {date} is used, kept in {folder}; --fresh makes it anew")
        return AutoModelForCausalLM.from_pretrained(folder).to(args.device)
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, args.seed).to(args.device)
    warm_start(model, task, tokenizer, args, attempts=24, lr=1e-2)
    save(folder, model, tokenizer)
    return model


def load_tokenizer(args):
    """The model's tokenizer. Here and below, bad input ends the run before anything is written."""
    if args.model == "tiny":
        return tiny_tokenizer()
    with refusing(f"--model {args.model} is no causal language model with a ChatML tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        if None in control(tokenizer) or tokenizer.unk_token_id in control(tokenizer):
            raise ValueError("its tokenizer lacks ChatML's <|im_start|> and <|im_end|>")
        return tokenizer


def load_tasks(args):
    """The questions of --tasks; none without."""
    if not args.tasks:
        return []
    with refusing("--tasks"):
        tasks = read_tasks(args.tasks)
        if len({question.question for question in tasks}) < 2 and args.steps:
            raise ValueError(f"{args.tasks} holds fewer than two different questions, but one is held out")
        digest = hashlib.sha256(Path(args.tasks).read_bytes()).hexdigest()
        if args.tasks_digest not in (None, digest):
            raise ValueError(f"{args.tasks} has changed since the run began")
        args.tasks_digest = digest
    return tasks


def check_answer(question, where, limit, tokenizer):
    """The answer of a question must be one that an action can give."""
    ids = (*encode(tokenizer, f"<answer>{question.answer}</answer>"), control(tokenizer)[1])
    if len(ids) > limit:
        fail(f"{where}: to answer takes {len(ids)} tokens, more than --limit {limit}")
    if read_action(tokenizer, ids) != ("answer", question.answer):
        fail(f"{where}: no action can give the answer {question.answer!r}: it holds a tag, or characters "
             "that the tokenizer changes")


def load_model(args, task, tokenizer):
    """The starting policy, on the device."""
    dtype = getattr(torch, args.dtype)
    with refusing(f"--device {args.device} is not available here; try --device cpu"):
        torch.zeros(1, device=args.device)
    if args.model == "tiny":
        return warm_tiny_model(task, args).to(dtype)
    warmed = Path(args.out) / "start"
    with refusing(f"--model {args.model} cannot be used"):
        source = warmed if args.resume and warmed.exists() else args.model
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(args.device).eval()
        rows = model.get_input_embeddings().num_embeddings
        if rows < len(tokenizer):
            raise ValueError(f"it has {rows} embeddings, but its tokenizer {len(tokenizer)} tokens")
        # a row without a token would be sampled and decode to nothing
        model.resize_token_embeddings(len(tokenizer))
        check_model(model)
    if task.plain and args.device != "cpu":
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


@torch.inference_mode()
def check_model(model):
    """Try a model on three short contexts: sampling and scoring must say what its own plain forwards say.

    Where slots or trees do not, it is read plainly (`rollout.TurnCache`); where that fails, too: ValueError.
    """
    contexts = [[3, 1, 4, 1, 5, 9, 2, 6], [3, 1, 4, 1, 8, 2], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]]
    rows = [torch.tensor([context], device=model.device) for context in contexts]           # (1, T) each
    plain = [model(input_ids=row).logits[0].float().log_softmax(-1).cpu() for row in rows]  # (T, V) each
    if not all(logps.isfinite().all() for logps in plain):
        raise ValueError("its logits are not finite")
    near = 1e-3 if model.dtype == torch.float32 else .3                                     # nats

    def agrees(cache):
        cache.read(model, range(3), [context[:-1] for context in contexts])
        logits = model.get_output_embeddings()(cache.read(model, range(3), contexts))       # (3, V)
        sampled = logits.float().log_softmax(-1).cpu() - torch.stack([logps[-1] for logps in plain])
        answers = [((context[-2],), (context[-1],)) for context in contexts]
        scored = answer_logprob(model, [context[:-2] for context in contexts], answers)     # (3,)
        scored -= torch.stack([logps[-2, context[-1]] for logps, context in zip(plain, contexts)])
        return max(sampled.abs().max(), scored.abs().max()) < near

    try:
        fast = keeps_keys(model) and agrees(SlotCache(3, 16))
    except Exception:                           # whatever a model raises whose layers take no slots
        fast = False
    if not fast:
        model.reads_plainly = True
        print("this model is read plainly, which is slower: its layers keep no keys, or other ones, or "
              "ignore masks", file=sys.stderr)
        if not agrees(TurnCache()):
            raise ValueError("its logits are not its output embedding of its last hidden state: they are "
                             "scaled or capped, or depend on what stands beside a context")


# ---------------------------------------------------------------- the command line

def fail(message):
    """Bad input: one line, exit status 2."""
    print(f"train.py: {message}", file=sys.stderr)
    sys.exit(2)


@contextmanager
def refusing(what):
    """Whatever goes wrong within is bad input: says what, and the first line of the reason."""
    try:
        yield
    except Exception as error:  # libraries have classes of their own for damaged files and missing devices
        fail(f"{what}: {(str(error).splitlines() or [type(error).__name__])[0]}")


def number(kind, low, high=10 ** 9):
    """An argparse type: a number from `low` to `high`."""
    def parse(text):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not at least {low} and at most {high}")
        return value
    parse.__name__ = kind.__name__
    return parse


def parse_args(argv=None):
    """Flags -> settings. A default that is a pair (tiny model, others) stays one until `settle`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False,
                                     argument_default=argparse.SUPPRESS)
    parser.error = fail
    count, weight, defaults = number(int, 1), number(float, 0), {}

    def add(flag, default, help, **rest):
        defaults[flag[2:].replace("-", "_")] = default
        pair = isinstance(default, tuple)
        shown = f"{default[0]} for the tiny model, {default[1]} for others" if pair else default
        parser.add_argument(flag, help=f"{help} (default: {shown})" if shown else help, **rest)

    add("--scenario", "compaction", "how a context that grows too long is handled", choices=list(WINDOWS))
    add("--method", ["broadcast", "mosaic"], "one or more, from the same start", choices=METHODS, nargs="+")
    add("--model", "tiny", "tiny, or a folder or hub name of a causal language model with a ChatML tokenizer")
    add("--tasks", None, "a JSONL file of your own questions (see README) instead of the toy world's")
    add("--window", None, "tokens of a context (default: 74 with compaction and 60 with subagents for the "
        "tiny model, for others the least in which every page of all questions can be seen)", type=count)
    add("--turns", 20, "actions per attempt, of all its agents together", type=count)
    add("--limit", (14, 48), "tokens of an action", type=count)
    add("--steps", 60, "GRPO steps", type=number(int, 0))
    add("--questions", (32, 8), "questions per step", type=count)
    add("--group-size", 8, "attempts per question", type=count)
    add("--usage", .5, "weight of the session-usage signal (trajectory level)", type=weight)
    add("--gain-weight", .5, "weight of the normalized information gain (session level)", type=weight)
    add("--lr", (1e-3, 2e-6), "learning rate", type=number(float, 0, 1))
    add("--kl", 0., "weight of the divergence from the starting policy", type=weight)
    add("--temperature", 1., "of sampling, in rollouts and update alike", type=number(float, .01))
    add("--warm-start", (2000, 0), "steps of training on demonstrations before all else", type=number(int, 0))
    add("--habits", "careless", "what the last quarter of the demonstrations is like", choices=list(HABITS))
    add("--eval-questions", (64, 16), "held-out questions, each attempted group-size times", type=count)
    add("--eval-every", 10, "steps between evaluations", type=count)
    add("--save-every", 20, "steps between checkpoints", type=count)
    add("--batch-tokens", (2048, 4096), "padded tokens per micro-batch of scoring and update", type=count)
    add("--batch-attempts", 512, "attempts sampled side by side", type=count)
    add("--dtype", None, "of weights and activations (default: bfloat16 for a pretrained model on a GPU, "
        "else float32)", choices=["float32", "bfloat16"])
    add("--seed", 0, "of everything that is random", type=int)
    add("--device", "cuda" if torch.cuda.is_available() else "cpu", "cpu, cuda, cuda:1, mps, ...")
    add("--cache", str(Path(__file__).parent / ".cache"), "where the warmed-up tiny model is kept")
    add("--fresh", False, "warm up the tiny model anew", action="store_true")
    add("--out", None, "the run's folder (default: runs/SCENARIO)")
    add("--overwrite", False, "replace the run that --out holds", action="store_true")
    add("--resume", False, "go on with the run that --out holds, with its own settings", action="store_true")
    given = vars(parser.parse_args(argv))
    settings = defaults | {"tasks_digest": None} | given
    settings["out"] = settings["out"] or f"runs/{settings['scenario']}"
    if settings["resume"]:
        settings |= saved_settings(settings["out"], given)
    return argparse.Namespace(**settings)


def saved_settings(out, given):
    """The settings of the run in `out`, of which the command line may change none but --steps."""
    with refusing(f"--resume: {out} holds no run that could go on"):
        saved = json.loads((Path(out) / "config.json").read_text())
        if not isinstance(saved, dict) or "steps" not in saved:
            raise ValueError("its config.json holds no settings")
    if given.get("steps", saved["steps"]) < saved["steps"]:
        fail(f"--resume: the run in {out} has --steps {saved['steps']}; it can be given more, but not fewer")
    changed = [f"--{key.replace('_', '-')}" for key in given
               if key in saved and key != "steps" and given[key] != saved[key]]
    if changed:
        fail(f"--resume goes on with the run's own settings; leave out {', '.join(changed)}, or start anew "
             "with --overwrite")
    return saved | given


def settle(args, tokenizer, tasks=()):
    """Fill in the settings that depend on the tokenizer and on the user's questions. Returns the Task."""
    known = encode(tokenizer, PLAIN["compaction"][0])
    plain = tokenizer.unk_token_id is None or tokenizer.unk_token_id not in known
    if args.model != "tiny" and isinstance(args.warm_start, tuple):
        args.warm_start = 0
    for name, value in vars(args).items():
        if isinstance(value, tuple):
            setattr(args, name, value[plain])
    if args.dtype is None:
        args.dtype = "bfloat16" if plain and args.device.startswith("cuda") else "float32"
    if tasks and not plain:
        fail("--tasks needs a pretrained --model: the tiny one knows no words but those of its toy world")
    task = Task(args.scenario, 0, args.turns, args.limit, plain, own=bool(tasks))
    needs = [least_window(question, task, tokenizer) for question in tasks or long_questions(task)]
    need = max(needs)
    if args.window is None:
        args.window = need if plain else WINDOWS[args.scenario]
    if need > args.window:
        which = f"question {needs.index(need) + 1} of {args.tasks}" if tasks else "the toy world's longest"
        fail(f"--window {args.window} has no room for {which}, with a summary or fork, a search and its "
             f"longest page; use --window {need} or more")
    return replace(task, window=args.window)


def long_questions(task):
    """A hundred questions of the toy world with four clues; they differ in how many tokens they are."""
    rng = seeded("the longest")
    return [make_question(rng, task.says["question"], clues=4) for _ in range(100)]


def check_out(args):
    """A new run needs a folder that is free, or a run there that makes way, and places where it may write."""
    out = Path(args.out)
    for flag, folder in (("--out", out), ("--cache", Path(args.cache))):
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            fail(f"{flag}: {folder} is no folder that can be written to")
    if args.resume or not out.exists() or not any(out.iterdir()):
        return
    if not (out / "config.json").exists():
        fail(f"--out {out} holds files that are no run's: name a folder that is new or empty")
    if not args.overwrite:
        fail(f"--out {out} already holds a run: name another folder, or use --overwrite to replace it, "
             "--resume to go on with it")
    for flag, path in (("--model", args.model), ("--tasks", args.tasks)):
        if path and out.resolve() in Path(path).resolve().parents:
            fail(f"{flag} {path} lies in the run that --overwrite would replace: name another --out")


def begin_run(args, out):
    """The run's folder: empty, unless it is resumed, but for its settings in config.json."""
    out.mkdir(parents=True, exist_ok=True)
    for part in () if args.resume else (*METHODS, "start"):
        shutil.rmtree(out / part, ignore_errors=True)
    elsewhere = ("out", "cache", "device", "fresh", "overwrite", "resume")
    config = {key: value for key, value in vars(args).items() if key not in elsewhere}
    (out / "config.json.new").write_text(json.dumps(config, indent=2) + "\n")
    (out / "config.json.new").rename(out / "config.json")
    args.begun = True


def prepare(args):
    """From settings to a Run: tokenizer, questions, limits, starting policy. Bad input ends it here."""
    tokenizer, tasks = load_tokenizer(args), load_tasks(args)
    task = settle(args, tokenizer, tasks)
    for number, question in enumerate(tasks, 1):
        check_answer(question, f"question {number} of {args.tasks}", args.limit, tokenizer)
    return Run(args, task, tokenizer, load_model(args, task, tokenizer), tasks)


def main(args):
    transformers.utils.logging.disable_progress_bar()       # none of the library's between ours
    transformers.utils.logging.set_verbosity_error()
    check_out(args)
    if args.group_size == 1:
        print("warning: in a group of one there is nothing to compare, so A is 0; use --group-size 2 or more")
    run, out = prepare(args), Path(args.out)
    begin_run(args, out)
    if args.model != "tiny" and args.warm_start and not (out / "start").exists():
        warm_start(run.start, run.task, run.tokenizer, args, attempts=4, lr=2e-4)
        save(out / "start", run.start, run.tokenizer)
    unused = len(run.tasks) - len(training_tasks(run)) - len(held_out_questions(run)) if run.tasks else 0
    if unused > 0:
        print(f"{unused} of {len(run.tasks)} tasks ask the same as one that is held out: not trained on")
    for method in dict.fromkeys(args.method):
        if not finished(out / method, args.steps):
            train(method, run, out / method)
    plot_curves(out)
    print(f"\n{table(out)}\n\n{files_of(out, args.method[-1], args)}")


def run_command(args):
    """main, and one line for what may end it early."""
    def saved():
        return "--resume goes on from what was saved" if "begun" in args else "nothing of a run was written"
    try:
        main(args)
    except OSError as error:
        fail(f"{error}; {saved()}")
    except FloatingPointError as error:
        fail(f"{error}: use a smaller --lr; {saved()}")
    except torch.OutOfMemoryError:
        fail(f"memory does not suffice for a single attempt: use a smaller --window or model; {saved()}")
    except KeyboardInterrupt:
        sys.exit(f"stopped; {saved()}")


if __name__ == "__main__":
    run_command(parse_args())
