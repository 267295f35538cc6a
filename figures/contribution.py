"""What did each session truly contribute, and which way of crediting sessions agrees with that?

    python figures/contribution.py RUN [RUN ...]        # a minute or two per run and model

The value V of a state is the share of successes when the policy goes on from it: from each state between sessions the
attempt's own actions are replayed through the harness, and the policy plays on, many times. A session's contribution is
V(after) - V(before), in probability of success; after an attempt that ended without an answer, V is 0. Measured for the
starting policy of each run and for every trained model in it. Prints the correlation of credit and contribution, with
95 % intervals from resampling the questions (runs of one scenario, such as several seeds, are pooled), and how well the
starting policy reads; writes contribution.png beside the first run.
"""
import argparse
import math
import random
import sys
from pathlib import Path

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import torch    # noqa: E402

sys.path.insert(0, str(Path(__file__).parent.parent))

import train    # noqa: E402
from figures.plot import KIND_COLOUR  # noqa: E402
from figures.report import spans  # noqa: E402
from infogain import answer_logprob  # noqa: E402
from mosaic import session_advantage  # noqa: E402
from rollout import CAREFUL, Attempt, answer_tokens, demonstrate, make_question, play, read  # noqa: E402

GROUP, CONTINUATIONS = 8, 16


def states_of(trajectory):
    """How many actions lead to each of its states, one more than sessions; None for one from which nothing follows."""
    states, done = [0], 0
    for session in trajectory.sessions:
        acted = len(spans(session.mask))
        closes = session.kind == "ordinary" and session.closing < len(session.ids)
        states.append(done + acted - closes)
        done += acted
    if trajectory.stop != "answered":
        states[-1] = None
    return states


def values(model, run, trajectories):
    """V of the states of every trajectory: lists as `states_of` gives them. Equal states are played on from once."""
    states, prefixes = [], {}           # per trajectory, the keys of its states; key -> (question, actions so far)
    for t in trajectories:
        actions = [session.ids[begin:end] for session in t.sessions for begin, end in spans(session.mask)]
        keys = [None if n is None else (t.question.question, str(actions[:n])) for n in states_of(t)]
        for key, n in zip(keys, states_of(t)):
            if key is not None:
                prefixes.setdefault(key, (t.question, actions[:n]))
        states.append(keys)
    attempts = [replayed(*prefix, run) for prefix in prefixes.values() for _ in range(CONTINUATIONS)]
    numbers = train.uniforms(len(attempts), run.task, run.args.seed, "contribution")
    for i in range(0, len(attempts), run.args.batch_attempts):
        part = slice(i, i + run.args.batch_attempts)
        play(model, run.tokenizer, attempts[part], run.task, numbers[part], run.args.temperature)
    rewards = torch.tensor([attempt.trajectory().reward for attempt in attempts]).view(-1, CONTINUATIONS)   # (states, k)
    found = dict(zip(prefixes, rewards.mean(1).tolist()))
    return [[found.get(key, 0.) for key in keys] for keys in states]


def replayed(question, actions, run):
    """An attempt in which some actions have been taken already."""
    attempt = Attempt(question, run.task, run.tokenizer)
    for ids in actions:
        attempt.act(ids, [0.] * len(ids))
    return attempt


def measure(model, run, questions):
    """One dict per session that has a gain: its kind, gain, contribution and what the ways of crediting say."""
    trajectories, _ = train.collect(model, run, questions, "contribution")
    train.credit(trajectories, GROUP, 0., 0.)
    rows = []
    for i, (t, v) in enumerate(zip(trajectories, values(model, run, trajectories))):
        own = [{"question": i // GROUP, "kind": s.kind, "gain": s.gain, "normalized": s.normalized_gain, "A": t.advantage,
                "contribution": after - before, "closing": None}
               for s, before, after in zip(t.sessions, v, v[1:])]
        for row, following, session in zip(own, own[1:], t.sessions):
            if session.kind == "ordinary" and not math.isnan(following["gain"]):
                row["closing"] = following              # the session that its closing action opened
        rows += own
    return [row for row in rows if not math.isnan(row["gain"])], sum(t.reward for t in trajectories) / len(trajectories)


def correlation(pairs):
    """Pearson's, of an (N, 2) array; nan where there are few pairs or one side does not vary."""
    x, y = np.array(pairs).T if len(pairs) > 4 else (np.zeros(2), np.zeros(2))
    return float(np.corrcoef(x, y)[0, 1]) if x.std() > 0 and y.std() > 0 else math.nan


def interval(rows, pairs_of):
    """'.56 (.47 to .64)': the correlation of the pairs and its 95 % interval, from 300 resamples of the questions."""
    questions, rng = {}, random.Random(0)
    for row in rows:
        questions.setdefault(row["question"], []).extend(pairs_of(row))
    names = list(questions)
    samples = [correlation([pair for name in rng.choices(names, k=len(names)) for pair in questions[name]])
               for _ in range(300)]
    samples = [value for value in samples if not math.isnan(value)]
    whole = correlation([pair for name in names for pair in questions[name]])
    if math.isnan(whole) or not samples:
        return ""
    low, high = np.quantile(samples, [.025, .975])
    return f"{whole:.2f} ({low:.2f} to {high:.2f})"


def table(measured, gain_weight):
    """Markdown: a row per scenario and policy, a column per way of crediting."""
    def all_of(credit):
        return lambda row: [(credit(row), row["contribution"])]

    def of(kind, credit):
        return lambda row: [(credit(row), row["contribution"])] if row["kind"] == kind else []

    def closing(credit):
        return lambda row: [(credit(row, row["closing"]), row["closing"]["contribution"])] if row["closing"] else []

    columns = {
        "A": all_of(lambda row: row["A"]), "gain": all_of(lambda row: row["gain"]),
        f"A + {gain_weight:g} normalized": all_of(lambda row: session_advantage(row["A"], row["normalized"], gain_weight)),
        "A + normalized": all_of(lambda row: session_advantage(row["A"], row["normalized"], 1.)),
        **{f"{kind}: {name}": of(kind, lambda row, name=name: row[name]) for kind in KIND_COLOUR for name in ("A", "gain")},
        "closing: A": closing(lambda row, following: row["A"]),
        "closing: own gain": closing(lambda row, following: row["normalized"]),
        "closing: next gain": closing(lambda row, following: following["normalized"])}
    head = ["scenario, policy", "success", "sessions", *columns]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, (rows, success) in measured.items():
        cells = [name, f"{np.mean(success):.2f}", str(len(rows)), *(interval(rows, pairs) for pairs in columns.values())]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def reading(run):
    """How well the starting policy reads: its score of the right answer where a faultless teacher's sessions end.

    Beside it a careful reader's, to whom each name still possible is equally likely. Returns rows (clues of the
    question, clues that pages, summaries and reports have covered so far, score, careful reader's score).
    """
    rng, rows, contexts, answers = train.seeded(run.args.seed, "reading"), [], [], []
    faultless = CAREFUL._replace(forget=0, repeat=0, guess=0, blind=0)
    for _ in range(100):
        question = make_question(rng)
        for session in demonstrate(question, run.task, run.tokenizer, rng, faultless).sessions:
            (_, last), known, left, _ = read(run.tokenizer.decode(session.after))
            if last != run.task.says["compact"] and known:
                rows.append((len(question.pages), len(known), -math.log(len(left))))
                contexts.append(session.after)
                answers.append(answer_tokens(run.tokenizer, question.answer))
    scores = answer_logprob(run.start, contexts, answers).tolist()
    return [(clues, known, score, careful) for (clues, known, careful), score in zip(rows, scores)]


def reading_table(readings):
    """Markdown: mean score (careful reader's) by scenario and clues, and by how many clues are covered."""
    lines = ["| scenario, clues | 1 clue covered | 2 | 3 | 4 |", "|---|---|---|---|---|"]
    for scenario, rows in readings.items():
        for clues in sorted({row[0] for row in rows}):
            own = [[row[2:] for row in rows if row[:2] == (clues, known)] for known in range(1, 5)]
            cells = ["{:.2f} ({:.2f})".format(*np.mean(pairs, axis=0) + 0.) if pairs else "" for pairs in own]
            lines.append(f"| {scenario}, {clues} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(measured, path):
    """Gain against contribution of every session, with the mean of each fifth of the gains; a panel per policy."""
    figure, axes = plt.subplots(1, len(measured), figsize=(5.5 * len(measured), 4.2), layout="constrained", squeeze=False)
    for ax, (name, (rows, _)) in zip(axes[0], measured.items()):
        for kind, colour in KIND_COLOUR.items():
            own = sorted((row["gain"], row["contribution"]) for row in rows if row["kind"] == kind)
            if own:
                gains, contributions = np.array(own).T
                ax.scatter(gains, contributions, s=6, color=colour, alpha=.25, linewidth=0)
                fifths = [part.mean(0) for part in np.array_split(np.array(own), 5) if len(part)]
                ax.plot(*zip(*fifths), color=colour, marker="o", label=f"{kind} ({correlation(own):.2f})")
        ax.set(title=name, xlabel="information gain of the session, nats", ylabel="its contribution to success")
        ax.axhline(0, color="grey", linewidth=.5)
        ax.legend(title="mean of each fifth (correlation)", frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def policies(folder):
    """(name, model, run) of the starting policy and the trained ones of a run's folder."""
    args = train.parse_args(["--resume", "--out", str(folder)])
    args.group_size = GROUP
    run = train.prepare(args)
    yield f"{args.scenario}, start", run.start, run
    for method in train.METHODS:
        if (folder / method / "model").exists():
            model = train.AutoModelForCausalLM.from_pretrained(folder / method / "model", dtype=run.start.dtype)
            yield f"{args.scenario}, {method}", model.to(args.device).eval(), run


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs")
    parser.add_argument("--questions", type=int, default=24, help="per run and model, each attempted 8 times")
    flags = parser.parse_args()
    train.transformers.utils.logging.disable_progress_bar()
    measured, readings = {}, {}
    for number, folder in enumerate(flags.runs):
        for name, model, run in policies(folder):
            rng = train.seeded(run.args.seed, "contribution questions")
            questions = train.held_out_questions(run)[:flags.questions] if run.tasks else [
                make_question(rng, run.task.says["question"]) for _ in range(flags.questions)]
            rows, success = measure(model, run, questions)
            pooled = measured.setdefault(name, ([], []))
            pooled[0].extend({**row, "question": (number, row["question"])} for row in rows)
            pooled[1].append(success)
            if model is run.start and not run.task.plain:       # the tiny one's names are single tokens
                readings.setdefault(run.args.scenario, []).extend(reading(run))
            print(f"{folder} {name}: done", file=sys.stderr)
    print(table(measured, run.args.gain_weight))
    if readings:
        print(f"\nThe start's score of the right answer (a careful reader's):\n\n{reading_table(readings)}")
    trained = {name: pooled for name, pooled in measured.items() if not name.endswith("start")}
    plot(trained or measured, flags.runs[0].parent / "contribution.png")


if __name__ == "__main__":
    main()
