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

SCALED, FOLLOWING = "own / scale", "following.normalized_gain"
VARIANTS = {
    # the ablation: choices that keep faith with the sources
    "centered": (mosaic, "normalize_by_kind", SCALED, "(own - own.mean()) / ((own - own.mean()).square().mean().sqrt() + noise)"),
    "raw": (infogain, "score_sessions", "own.clamp(min=floor)", "own.clone()"),
    "turns": (infogain, "score_sessions", 't.stop != "answered":\n            own[-1] = floor', "False:\n            own[-1] = floor"),
    "group": (train, "credit", "    sessions = [session for t in trajectories for session in t.sessions]", """    for i in range(0, len(trajectories), group_size):
        own = [session for t in trajectories[i:i + group_size] for session in t.sessions]
        gains = torch.tensor([session.gain for session in own])
        for session, gain in zip(own, normalize_by_kind(gains, [s.kind for s in own]).tolist()):
            session.normalized_gain = gain
    sessions = []"""),
    "probability": (infogain, "score_sessions", "own = own.tolist()", "own = own.exp().tolist()"),
    # the exercises
    "product": (mosaic, "trajectory_advantage", "group_advantage(rewards) + usage * signal",
                "group_advantage(rewards) * (1 + usage * torch.where(success, signal, -signal))"),
    "own": (train, "credit_tokens", FOLLOWING, "session.normalized_gain"),
    "count": (mosaic, "trajectory_advantage", "-centered_rank(counts[success])", "counts[success].float().mean() - counts[success]"),
    "quiet": (mosaic, "trajectory_advantage", "signal[~success] = centered_rank(counts[~success])", "pass"),
    "unscaled": (mosaic, "normalize_by_kind", SCALED, "own"),
    "shaped": (train, "credit_tokens", "closing = advantage", "closing = own"),
    "wrong": (infogain, "score_sessions", "t.question.answer", "min(t.question.pages.values()).split()[0]"),
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
