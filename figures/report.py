"""What a run writes for people to read: metrics of a batch of attempts, gains by case, whole attempts session by session."""
import json
import time
from collections import Counter
from statistics import stdev

import numpy as np
import torch

from rollout import KINDS, read_action


def mean(values):
    """The mean of some numbers; None (null in JSON) where there are none."""
    values = list(values)
    return sum(values) / len(values) if values else None


def interval_95(values):
    """Half the width of the normal 95 % interval of a mean, of one value per question; None for a single one."""
    return 1.96 * stdev(values) / len(values) ** .5 if len(values) > 1 else None


def spans(mask):
    """The stretches of 1 in a mask: [0, 1, 1, 0, 1] -> [[1, 3], [4, 5]]."""
    edges = [i for i, (a, b) in enumerate(zip([0, *mask], [*mask, 0])) if a != b]
    return [list(pair) for pair in zip(edges[0::2], edges[1::2])]


def describe(session, tokenizer):
    """A session as text, what the model wrote in it between [ and ]."""
    text, done = "", 0
    for begin, end in spans(session.mask):
        text += f"{tokenizer.decode(session.ids[done:begin])} [{tokenizer.decode(session.ids[begin:end])}] "
        done = end
    return (text + tokenizer.decode(session.ids[done:])).strip()


def summarize(trajectories, group_size, tokenizer):
    """Metrics of a batch of credited trajectories; the README's glossary explains each."""
    sessions = [session for t in trajectories for session in t.sessions]
    wins = [t for t in trajectories if t.reward > .5]
    tokens = sum(sum(s.mask) for s in sessions)
    asked = sum(s.stop == "compact" and read_action(tokenizer, tuple(s.ids[s.closing:]))[0] == "compact" for s in sessions)
    groups = [trajectories[i:i + group_size] for i in range(0, len(trajectories), group_size)]
    return {"reward": mean(t.reward for t in trajectories), "success": len(wins) / len(trajectories),
            "success_interval": interval_95([mean(t.reward > .5 for t in group) for group in groups]),
            "sessions": len(sessions) / len(trajectories), "sessions_per_success": mean(len(t.sessions) for t in wins),
            "tokens_per_success": tokens / len(wins) if wins else None, "compactions_asked": asked / len(trajectories),
            "attempts_by_sessions": Counter(len(t.sessions) for t in trajectories), **by_pages(trajectories),
            **{f"sessions_{kind}": sum(s.kind == kind for s in sessions) / len(trajectories) for kind in KINDS},
            **{f"gain_{kind}": mean(s.gain for s in sessions if s.kind == kind and s.gain == s.gain) for kind in KINDS},
            **{stop.replace(" ", "_"): mean(t.stop == stop for t in trajectories)
               for stop in ("answered", "out of turns", "out of window")},
            "groups_without_variance": mean(len({t.reward for t in group}) == 1 for group in groups),
            "entropy": -mean(logp for s in sessions for logp, mask in zip(s.logps, s.mask) if mask)}


def by_pages(trajectories):
    """Success and sessions per attempt by how many pages a question has; in the toy task, by its number of clues."""
    counts = sorted({len(t.question.pages) for t in trajectories})
    own = {count: [t for t in trajectories if len(t.question.pages) == count] for count in counts}
    return {"success_by_pages": {count: mean(t.reward > .5 for t in part) for count, part in own.items()},
            "sessions_by_pages": {count: mean(len(t.sessions) for t in part) for count, part in own.items()}}


def valid_actions(trajectories, tokenizer):
    """Share of the model's turns that end in exactly one action tag."""
    return mean(read_action(tokenizer, tuple(s.ids[begin:end]))[0] != "" for t in trajectories for s in t.sessions for begin, end in spans(s.mask))


def gains_by_case(trajectories, tokenizer):
    """Mean scores and gain by kind of session and by whether its states, before -> after, mention the answer at all."""
    cases = {}
    for t in trajectories:
        for s in t.sessions:
            if s.gain == s.gain:
                known = ["present" if t.question.answer in tokenizer.decode(state) else "absent" for state in (s.before, s.after)]
                cases.setdefault(f"{s.kind}: {' -> '.join(known)}", []).append((*s.scores, s.gain))
    return {case: {"count": len(rows), **{name: mean(column) for name, column in zip(("before", "after", "gain"), zip(*rows))}}
            for case, rows in sorted(cases.items())}


def write_trajectories(path, step, trajectories, tokenizer):
    """Append whole credited trajectories, session by session, for a person to read; one JSON object per line."""
    with open(path, "a") as file:
        for t in trajectories:
            sessions = [{"kind": s.kind, "stop": s.stop, "tokens": len(s.ids), "spans": spans(s.mask), "text": describe(s, tokenizer),
                         "score_before": s.scores[0], "score_after": s.scores[1],
                         "gain": s.gain if s.gain == s.gain else None, "normalized_gain": s.normalized_gain,
                         "advantages": [round(a, 4) for a, m in zip(s.advantages, s.mask) if m]} for s in t.sessions]
            line = {"step": step, "question": t.question.question, "answer": t.question.answer, "pages": t.question.pages,
                    "answered": t.answer, "stop": t.stop, "reward": t.reward, "advantage": t.advantage, "sessions": sessions}
            file.write(json.dumps(line) + "\n")


def agreement(log_ratio):
    """How far sampling and training agree on the sampled tokens: statistics of the log ratios, (tokens of the step,)."""
    ratio, gap = log_ratio.exp(), log_ratio.abs()
    return {"ratio_mean": ratio.mean().item(), "ratio_max": ratio.max().item(),
            "clip_share": ((ratio < .8) | (ratio > 1.28)).float().mean().item(),
            "gap_mean": gap.mean().item(), "gap_p99": float(np.quantile(gap.cpu().numpy(), .99))}      # torch.quantile takes at most 2^24 numbers


def cost(phase, begin):
    """Metrics of a phase: its seconds and, on a GPU, the gigabytes that tensors took at most since the last phase."""
    costs = {f"seconds_{phase}": time.perf_counter() - begin}
    if torch.cuda.is_available():
        costs[f"gigabytes_{phase}"] = torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.reset_peak_memory_stats()
    return costs


def notes(line, first, failed):
    """What a person should know of a step's metrics at once. failed: steps in a row in which no attempt succeeded."""
    if first:
        yield ", ".join(f"{key} {value:.2f}" for key, value in line.items() if key.startswith(("seconds", "gigabytes")))
    if first and line["gap_mean"] > .05:
        yield (f"warning: log-probabilities at sampling and in training differ by {line['gap_mean']:.3f} on average (99th "
               f"percentile {line['gap_p99']:.3f}), so the ratios of equation (6) mean little; try --dtype float32")
    if failed and failed % 5 == 0:
        yield f"warning: no attempt has succeeded for {failed} steps, so that only the sessions' signals teach"
    elif line["groups_without_variance"] == 1:
        yield "every group's rewards are equal, so there is no trajectory-level gradient"
    if line["skipped"]:
        yield "loss or gradient is not finite; the step is skipped"


def files_of(run, method, args):
    """Where a finished run's results are, and what to try next."""
    flags = f"--scenario {args.scenario} --window {args.window} --temperature {args.temperature:g}"
    if args.tasks:
        flags += f" --tasks {args.tasks}"
    return f"""{run}/config.json  all settings
{run}/curves.png  learning curves of every method
{run}/{method}/metrics.jsonl  a line per step (so for each method)
{run}/{method}/trajectories.jsonl  one group of attempts per evaluation, session by session
{run}/{method}/model  the trained model, in Hugging Face format
Watch it work: python figures/walk.py --model {run}/{method}/model {flags}"""
