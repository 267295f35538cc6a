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

SCALED, OWN_GAIN = "(own / own.square().mean().sqrt())", "s.normalized_gain, gain_weight"
VARIANTS = {
    # the ablation: choices that keep faith with the sources
    "centered": (mosaic, "normalize_by_kind", SCALED, "((own - own.mean()) / own.std(correction=0))"),
    "raw": (infogain, "score_sessions", "own.clamp(min=own[0])", "own"),
    "batch": (train, "credit", "    for t in trajectories:\n", """    sessions = [session for t in trajectories for session in t.sessions]
    gains = torch.tensor([session.gain for session in sessions])
    for session, gain in zip(sessions, normalize_by_kind(gains, [s.kind for s in sessions]).tolist()):
        session.normalized_gain = gain
    for t in trajectories:
"""),
    "closing": (train, "credit", 's.closing if s.stop == "answered"', 's.closing if s.kind == "ordinary"'),
    "answered": (train, "credit", OWN_GAIN, 's.normalized_gain * (t.stop == "answered"), gain_weight'),
    "double": (train, "parse_args", '"--gain-weight", .15', '"--gain-weight", .3'),      # the other candidate
    # the exercises
    "count": (mosaic, "trajectory_advantage", "centered_rank(counts[outcome])", "counts[outcome] - counts[outcome].float().mean()"),
    "together": (mosaic, "trajectory_advantage", "(success, ~success)", "(success | ~success,)"),
    "unscaled": (mosaic, "normalize_by_kind", SCALED, "own"),
    "shaped": (train, "credit", 's.closing if s.stop == "answered" else len(s.ids)', "len(s.ids)"),
    "wrong": (infogain, "score_sessions", "t.question.answer", "random.Random(t.question.question).choice(NAMES)"),
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
