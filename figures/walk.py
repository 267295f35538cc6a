"""One group of four attempts at a question through all equations, step by step.

    python figures/walk.py [--scenario subagent]                        # scripted attempts; takes seconds
    python figures/walk.py --model runs/compaction/mosaic/model         # watch a trained model work
    python figures/walk.py --model FOLDER --tasks tasks.jsonl           # on a question of your own

Scripted attempts are an imperfect teacher's, scored as a careful reader would: each name still possible is equally
likely. With --model the model samples them there and then, and scores its own states; other flags are train.py's, such
as --tasks, --window and --temperature. --seed draws another question.
"""
import argparse
import math
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import train    # noqa: E402
from figures.report import spans  # noqa: E402
from infogain import score_sessions  # noqa: E402
from mosaic import centered_rank, group_advantage  # noqa: E402
from rollout import CAREFUL, KINDS, NAMES, WINDOWS, Task, demonstrate, make_question, read, tiny_tokenizer  # noqa: E402

GROUP = 4


def scripted(scenario, seed):
    """(trajectories, tokenizer) of the teacher's attempts at a question on which some succeed and some fail."""
    tokenizer, rng, rewards = tiny_tokenizer(), random.Random(f"walk {seed}"), set()
    while len(rewards) < 2:
        question, task = make_question(rng, clues=3), Task(scenario, WINDOWS[scenario])
        group = [demonstrate(question, task, tokenizer, rng, CAREFUL._replace(guess=.4)) for _ in range(GROUP)]
        rewards = {t.reward for t in group if len(t.sessions) > 1 or t.reward == 0}

    def reader(contexts, answers):
        left = [read(tokenizer.decode(context))[2] or NAMES for context in contexts]
        names = [tokenizer.decode(answer) for _, answer in answers]
        return torch.tensor([-math.log(len(own)) if name in own else -math.log(1000) for own, name in zip(left, names)])

    score_sessions(group, tokenizer, reader, reader)
    return group, tokenizer


def sampled(args):
    """The same, sampled and scored by a saved model."""
    run = train.prepare(args)
    question = train.seeded(args.seed, "walk").choice(train.held_out_questions(run))
    return train.collect(run.start, run, [question], "walk")[0], run.tokenizer


def lines_of(session, tokenizer):
    """(who, text) of what was shown and written in a session, without what stood in its context before."""
    done = len(session.before) if session.ids[:len(session.before)] == session.before else 0
    for begin, end in spans(session.mask):
        if begin > done:
            yield "shown", tokenizer.decode(session.ids[done:begin])
        yield "wrote", tokenizer.decode(session.ids[begin:end])
        done = end
    if done < len(session.ids):
        yield "shown", tokenizer.decode(session.ids[done:])


def readable(text, width=150):
    """A text in one line, without the chat format's tokens; of a long one its end."""
    for token in ("<|im_start|>", "<|im_end|>", "<think>", "</think>"):
        text = text.replace(token, " ")
    text = " ".join(text.split()).removeprefix("user ").removesuffix("assistant").strip()
    return text if len(text) <= width else "... " + text[-width:]


def rounded(values):
    return "  ".join(f"{value:+.2f}" for value in values)


def show_attempts(group, tokenizer):
    question = group[0].question
    print(f"Question: {question.question}\nAnswer: {question.answer}")
    for query, page in question.pages.items():
        print(f"  page {query}: {readable(page)}")
    for i, t in enumerate(group, 1):
        answer = f" {t.answer!r}" if t.answer else ""
        print(f"\n--- Attempt {i}: {t.stop}{answer}, reward {t.reward:.0f}, sessions {len(t.sessions)}")
        for number, session in enumerate(t.sessions, 1):
            print(f"  session {number}, {session.kind}, ended by: {session.stop}")
            for who, text in lines_of(session, tokenizer):
                print(f"    {who}: {readable(text)}")
            gain = "no gain: only its closing action" if math.isnan(session.gain) else f"gain {session.gain:+.2f}"
            print(f"    score of the answer before {session.scores[0]:.2f}, after {session.scores[1]:.2f}: {gain}")


def show_equations(group, tokenizer, usage, gain_weight):
    rewards, counts = torch.tensor([t.reward for t in group]), torch.tensor([len(t.sessions) for t in group])
    success = rewards > .5
    ranks = torch.zeros(GROUP)
    ranks[success], ranks[~success] = centered_rank(counts[success]), centered_rank(counts[~success])
    print("\n=== The attempts, side by side")
    print("    reward R                            ", rounded(rewards.tolist()))
    print("    sessions n                          ", rounded(counts.tolist()))
    print("(1) A = (R - mean R) / std R            ", rounded(group_advantage(rewards).tolist()))
    print("(2) rank of n within the same outcome   ", rounded(ranks.tolist()))
    print(f"(3) A' = A -/+ {usage:g} rank                 ", rounded(t.advantage for t in group))
    print("\n=== The sessions, kind by kind")
    sessions = [session for t in group for session in t.sessions]
    for kind in KINDS:
        own = [session for session in sessions if session.kind == kind and not math.isnan(session.gain)]
        if own:
            print(f"    gains of {kind:10}                 ", rounded(session.gain for session in own))
            print("(4) over their root mean square (+ .1)  ", rounded(session.normalized_gain for session in own))
    print(f"\n=== (5) The advantage of each action: A' + {gain_weight:g} * normalized gain of what came after it")
    for i, t in enumerate(group, 1):
        for number, session in enumerate(t.sessions, 1):
            for begin, end in spans(session.mask):
                action = readable(tokenizer.decode(session.ids[begin:end]), 60)
                paid = (session.advantages[begin] - t.advantage) / gain_weight
                print(f"    attempt {i}, session {number} {session.kind:10}  {t.advantage:+.2f} + {gain_weight:g} * {paid:+.2f} "
                      f"= {session.advantages[begin]:+.2f}  {action}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--model", help="a saved model's folder; without, the attempts are scripted")
    parser.add_argument("--scenario", choices=list(WINDOWS), default="compaction")
    parser.add_argument("--seed", type=int, default=0, help="draws the question and the attempts")
    flags, others = parser.parse_known_args()
    if others and not flags.model:
        parser.error(f"{others[0]} is for a --model; without one, there is --scenario and --seed")
    train.transformers.utils.logging.disable_progress_bar()
    args = train.parse_args([*sys.argv[1:], "--group-size", str(GROUP)])
    group, tokenizer = sampled(args) if flags.model else scripted(args.scenario, args.seed)
    train.credit(group, GROUP, args.usage, args.gain_weight)
    show_attempts(group, tokenizer)
    show_equations(group, tokenizer, args.usage, args.gain_weight)


if __name__ == "__main__":
    main()
