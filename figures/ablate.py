"""What if? One line of the method replaced, then train.py as usual: the README's ablation and the answers to its exercises.

    python figures/ablate.py centered --scenario subagent --out runs/centered

Each variant below is the change that a reader would make by hand: in which function, which text, by which other text.
"""
import inspect
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import infogain     # noqa: E402
import mosaic       # noqa: E402
import train        # noqa: E402

SCALED, OF_KIND = "(own / own.square().mean().sqrt())", "[session.kind for session in sessions]"
VARIANTS = {
    # the ablation: choices that keep faith with the sources
    "centered": (infogain, "normalize_by_kind", SCALED, "((own - own.mean()) / own.std(correction=0))"),
    "raw": (infogain, "score_sessions", "max(next(scores), floor), max(next(scores), floor)", "next(scores), next(scores)"),
    "batch": (train, "collect", "    return trajectories, costs", f"""    sessions = [session for t in trajectories for session in t.sessions]
    gains = torch.tensor([session.gain for session in sessions])
    for session, gain in zip(sessions, normalize_by_kind(gains, {OF_KIND}).tolist()):
        session.normalized_gain = gain
    return trajectories, costs"""),
    "closing": (train, "token_advantages", 's.closing if s.stop == "answered"', 's.closing if s.kind == "ordinary"'),
    "answered": (train, "token_advantages", "[session.normalized_gain for session in sessions]",
                 '[s.normalized_gain * (t.stop == "answered") for t in trajectories for s in t.sessions]'),
    "double": (train, "parse_args", "default=.15", "default=.3"),       # the other candidate for --gain-weight
    # the exercises
    "count": (mosaic, "trajectory_advantage", "centered_rank(counts[outcome])", "counts[outcome] - counts[outcome].float().mean()"),
    "together": (mosaic, "trajectory_advantage", "(success, ~success)", "(success | ~success,)"),
    "unscaled": (infogain, "normalize_by_kind", SCALED, "own"),
    "shaped": (train, "token_advantages", "torch.arange(mask.shape[1]) >= closing[:, None]", "torch.zeros_like(mask)"),
    "wrong": (infogain, "score_sessions", "trajectory.question.answer", "random.Random(trajectory.question.question).choice(NAMES)"),
}


def apply(variant):
    """Replace the text in the function's source and put the new function wherever the old one was known."""
    module, function, old, new = VARIANTS[variant]
    source = inspect.getsource(getattr(module, function))
    if source.count(old) != 1:
        raise ValueError(f"{variant}: {function} does not hold {old!r} once")
    exec(source.replace(old, new), vars(module))
    setattr(train, function, getattr(module, function))


if __name__ == "__main__":
    if sys.argv[1:2] == [] or sys.argv[1] not in VARIANTS:
        sys.exit(f"usage: python figures/ablate.py VARIANT [train.py's flags], VARIANT one of {', '.join(VARIANTS)}")
    apply(sys.argv.pop(1))
    train.main(train.parse_args())
