"""What a run writes for people to read: metrics of a batch of attempts, gains by case, whole attempts session by session."""
import json
from collections import Counter

from rollout import KINDS, describe, read_action, spans


def mean(values):
    """The mean of some numbers; None (null in JSON) where there are none."""
    values = list(values)
    return sum(values) / len(values) if values else None


def summarize(trajectories, group_size, tokenizer):
    """Metrics of a batch of credited trajectories; the README's glossary explains each."""
    sessions = [session for t in trajectories for session in t.sessions]
    wins = [t for t in trajectories if t.reward > .5]
    tokens = sum(sum(s.mask) for s in sessions)
    asked = sum(s.stop == "compact" and read_action(tokenizer, tuple(s.ids[s.closing:]))[0] == "compact" for s in sessions)
    groups = [trajectories[i:i + group_size] for i in range(0, len(trajectories), group_size)]
    return {"reward": mean(t.reward for t in trajectories), "success": len(wins) / len(trajectories),
            "sessions": len(sessions) / len(trajectories), "sessions_per_success": mean(len(t.sessions) for t in wins),
            "tokens_per_success": tokens / len(wins) if wins else None, "compactions_asked": asked / len(trajectories),
            "attempts_by_sessions": Counter(len(t.sessions) for t in trajectories),
            **{f"sessions_{kind}": sum(s.kind == kind for s in sessions) / len(trajectories) for kind in KINDS},
            **{f"gain_{kind}": mean(s.gain for s in sessions if s.kind == kind and s.gain == s.gain) for kind in KINDS},
            **{stop.replace(" ", "_"): mean(t.stop == stop for t in trajectories)
               for stop in ("answered", "out of turns", "out of window")},
            "groups_without_variance": mean(len({t.reward for t in group}) == 1 for group in groups),
            "entropy": -mean(logp for s in sessions for logp, mask in zip(s.logps, s.mask) if mask)}


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


def write_trajectories(path, step, trajectories, advantages, tokenizer):
    """Append whole trajectories, session by session, as a person would want to read them; one JSON object per line."""
    advantages = iter(advantages)
    with open(path, "a") as file:
        for t in trajectories:
            sessions = [{"kind": s.kind, "stop": s.stop, "tokens": len(s.ids), "spans": spans(s.mask), "text": describe(s, tokenizer),
                         "score_before": s.scores[0], "score_after": s.scores[1],
                         "gain": s.gain if s.gain == s.gain else None, "normalized_gain": s.normalized_gain,
                         "advantages": [round(a, 4) for a, m in zip(next(advantages), s.mask) if m]} for s in t.sessions]
            line = {"step": step, "question": t.question.question, "answer": t.question.answer, "pages": t.question.pages,
                    "answered": t.answer, "stop": t.stop, "reward": t.reward, "advantage": t.advantage, "sessions": sessions}
            file.write(json.dumps(line) + "\n")
