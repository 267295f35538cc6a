"""How close to the machine's limit is a step? Not collected by pytest; takes four to five minutes on two cores.

    python tests/benchmark.py [--model FOLDER] [--device cuda] [--brief]

For each scenario, one step of 32 questions x 8 attempts: seconds, share and tokens per second of each phase, its floating-
point rate over the machine's own (a matrix product that fills it, measured in the same run), padding waste, and ratios
against (a) `model.generate` called once per turn for the same contexts, (b) the same update with one session per forward.
All are medians of alternating repeats, so that a busy machine slows both sides alike.
"""
import argparse
import random
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import infogain     # noqa: E402
import rollout      # noqa: E402
import train        # noqa: E402

REPEATS = 7


def timed(function):
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    result = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin, result


def medians(*functions, repeats=REPEATS):
    """The median seconds of each function, called in turn."""
    seconds = [[timed(function)[0] for function in functions] for _ in range(repeats)]
    return [statistics.median(column) for column in zip(*seconds)]


def machine_rate(device, size=2048, dtype=torch.float32):
    """Floating-point operations per second of a matrix product that fills the machine."""
    a = torch.rand(size, size, device=device, dtype=dtype)
    seconds, = medians(lambda: [a @ a for _ in range(4)])
    return 4 * 2 * size ** 3 / seconds


def generate_turn(model, tokenizer, contexts, task):
    """Reference (a): one turn with transformers' own generate, on the whole contexts, padded on the left, with the
    log-probabilities of what it sampled, which the update needs."""
    width, pad = max(map(len, contexts)), tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(c)) + c for c in contexts], device=model.device)
    mask = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in contexts], device=model.device)
    out = model.generate(ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=task.limit, pad_token_id=pad,
                         eos_token_id=rollout.control(tokenizer)[1], return_dict_in_generate=True, output_logits=True)
    logits = torch.stack(out.logits, 1).float().log_softmax(-1)                         # (B, N, V)
    return logits.gather(2, out.sequences[:, width:, None])[..., 0].tolist()


def contexts_by_turn(run):
    """turn -> the contexts that the attempts of a rollout are in."""
    turns, plain = {}, rollout.Attempt.act

    def recorded(attempt, ids, logps):
        turns.setdefault(attempt.turns, []).append(attempt.context)
        plain(attempt, ids, logps)

    rollout.Attempt.act = recorded
    run()
    rollout.Attempt.act = plain
    return turns


def computed(counts, name):
    """A hook before a model's base_model.forward that counts padded tokens computed and calls, by phase."""
    def hook(module, args, kwargs):
        counts[name[0]] = counts.get(name[0], 0) + kwargs["input_ids"].numel()
        counts[name[0], "forwards"] = counts.get((name[0], "forwards"), 0) + 1
    return hook


def step(model, tokenizer, questions, task, args, optimizer):
    """The pieces of one step, as functions that can be timed, with what they work on."""
    attempts = [question for question in questions for _ in range(args.group_size)]
    run = lambda: rollout.sample_attempts(model, tokenizer, attempts, task, train.uniforms(len(attempts), task, "benchmark"))
    trajectories = run()
    scorer = partial(infogain.answer_logprob, model)
    score = lambda: infogain.score_sessions(trajectories, tokenizer, scorer, scorer)
    score()
    train.credit(trajectories, args.group_size, .5, .3)
    return trajectories, run, score, lambda: train.update(model, optimizer, trajectories, args)


def scenario_table(scenario, model, tokenizer, task, args, peak, optimizer):
    rng = random.Random(0)
    questions = [rollout.make_question(rng, task.says["question"]) for _ in range(32)]
    trajectories, run, score, update = step(model, tokenizer, questions, task, args, optimizer)
    turns = contexts_by_turn(run)
    alone = argparse.Namespace(**{**vars(args), "batch_tokens": 1})
    plain_join = infogain.join_rows

    def one_by_one():
        infogain.join_rows = lambda rows, most, branch: rows
        train.update(model, optimizer, trajectories, alone)
        infogain.join_rows = plain_join

    rollout_seconds, generate_seconds = medians(run, lambda: [generate_turn(model, tokenizer, turn, task) for turn in turns.values()], repeats=25)
    update_seconds, plain_seconds = medians(update, one_by_one)
    seconds = medians(run, score, update, repeats=25)
    counts, phase = {}, [""]
    hook = model.base_model.register_forward_pre_hook(computed(counts, phase), with_kwargs=True)
    padding, plain_pad = [], rollout.pad                # of what is read together
    rollout.pad = lambda rows, *rest: padding.append(len(rows) * max(map(len, rows)) - sum(map(len, rows))) or plain_pad(rows, *rest)
    needed, joined = {}, []
    infogain.join_rows = lambda *rest: joined.extend(plain_join(*rest)) or [*joined]
    for phase[0], function in (("rollout", run), ("scoring", score), ("update", update)):
        joined.clear()
        function()
        needed[phase[0]] = sum(len(row[0]) for row in joined)
    needed["rollout"] = counts["rollout"] - sum(padding)
    hook.remove()
    rollout.pad, infogain.join_rows = plain_pad, plain_join
    sessions = [s for t in trajectories for s in t.sessions]
    sampled = sum(sum(s.mask) for s in sessions)
    weights = sum(p.numel() for p in model.parameters())        # the head is tied to the embedding and counts once
    print(f"\n### {scenario}: {len(trajectories)} attempts, {len(sessions)} sessions, {sampled} sampled tokens\n")
    print("| phase | seconds | share | tokens per second | of the machine's rate | padding |\n|---|---|---|---|---|---|")
    for name, s, done, flops in zip(("rollout", "scoring", "update"), seconds, (sampled, needed["scoring"], needed["update"]), (2, 2, 6)):
        print(f"| {name} | {s:.3f} | {s / sum(seconds):.0%} | {done / s:,.0f} | {flops * weights * counts[name] / s / peak:.1%} | {1 - needed[name] / counts[name]:.0%} |")
    print(f"\nrollout over (a) one `generate` per turn: {generate_seconds / rollout_seconds:.1f}x;  "
          f"update over (b) one session per forward: {plain_seconds / update_seconds:.1f}x")
    longest = max(sum(sum(s.mask) for s in t.sessions) for t in trajectories)
    print(f"the rollout took {counts['rollout', 'forwards']} forwards; its longest attempt wrote {longest} tokens, so that it could not take fewer")


def scaling(model, tokenizer, task, args, optimizer):
    print("\n| questions x 8 | seconds | per attempt, over that of 32 |\n|---|---|---|")
    whole = {}
    for count in (8, 32, 128):
        rng = random.Random(1)
        _, *pieces = step(model, tokenizer, [rollout.make_question(rng, task.says["question"]) for _ in range(count)], task, args, optimizer)
        whole[count] = sum(medians(*pieces))
    for count, seconds in whole.items():
        print(f"| {count} | {seconds:.2f} | {seconds / count / (whole[32] / 32):.2f} |")


def session_scaling(model, tokenizer, task, args, optimizer):
    """The same questions by a teacher that compacts, or forks, more and more often: seconds of scoring and update per session."""
    print("\n| sessions per attempt | scoring + update, seconds | per session, over the first |\n|---|---|---|")
    first, score = None, partial(infogain.answer_logprob, model)
    for waste in (0., .4, .8):
        habits, rng = rollout.CAREFUL._replace(compact=waste, fork=waste, guess=0.), random.Random(2)
        questions = [rollout.make_question(rng, task.says["question"]) for _ in range(256)]
        trajectories = [rollout.demonstrate(question, task, tokenizer, rng, habits) for question in questions]
        train.credit(trajectories, 256, 0., 0.)
        sessions = sum(len(t.sessions) for t in trajectories)
        seconds = sum(medians(lambda: infogain.score_sessions(trajectories, tokenizer, score, score),
                              lambda: train.update(model, optimizer, trajectories, args)))
        first = first or seconds / sessions
        print(f"| {sessions / 256:.1f} | {seconds:.3f} | {seconds / sessions / first:.2f} |")


def brief(model, tokenizer, task, args, optimizer):
    """Eight attempts, everything once: rollouts over one `generate` per turn; trees over one row per context."""
    rng, plain, seconds = random.Random(3), train.keeps_keys, {}
    attempts = [question for question in (rollout.make_question(rng, task.says["question"]) for _ in range(2)) for _ in range(4)]
    run = lambda: rollout.sample_attempts(model, tokenizer, attempts, task, train.uniforms(8, task, "benchmark"), args.temperature)
    turns, (rollout_seconds, trajectories) = contexts_by_turn(run), timed(run)
    generate_seconds, _ = timed(lambda: [generate_turn(model, tokenizer, turn, task) for turn in turns.values()])
    train.credit(trajectories, 4, 0., 0.)
    score = partial(infogain.answer_logprob, model, max_tokens=args.batch_tokens)
    for trees in (True, False):
        train.keeps_keys = infogain.keeps_keys = plain if trees else lambda model: False
        seconds[trees] = [timed(lambda: infogain.score_sessions(trajectories, tokenizer, score, score))[0],
                          timed(lambda: train.update(model, optimizer, trajectories, args))[0]]
    train.keeps_keys = infogain.keeps_keys = plain
    print(f"{task.scenario}: rollout {rollout_seconds:.1f} s, {generate_seconds / rollout_seconds:.1f}x as fast as one `generate` per turn; " +
          "; ".join(f"{name} {once:.1f} s, as trees {rows / once:.1f}x as fast as one row per context"
                    for name, once, rows in zip(("scoring", "update"), *seconds.values())))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--brief", action="store_true", help="everything once, on eight attempts: for a large model on a small machine")
    flags = parser.parse_args()
    peak = machine_rate(flags.device)
    print(f"machine: {peak / 1e9:,.0f} GFLOP/s in a float32 matrix product, {torch.get_num_threads()} threads")
    for scenario in rollout.WINDOWS:
        args = train.parse_args(["--scenario", scenario, "--model", flags.model, "--device", flags.device])
        tokenizer = train.load_tokenizer(args)
        task = train.settle(args, tokenizer)
        model = train.load_model(args, task, tokenizer)
        optimizer = torch.optim.SGD([p.detach() for p in model.parameters()], lr=0.)    # the policy stays as it is, so that repeats are equal
        if flags.brief:
            brief(model, tokenizer, task, args, optimizer)
            continue
        scenario_table(scenario, model, tokenizer, task, args, peak, optimizer)
        scaling(model, tokenizer, task, args, optimizer)
        session_scaling(model, tokenizer, task, args, optimizer)


if __name__ == "__main__":
    main()
