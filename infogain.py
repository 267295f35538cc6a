"""Information gain: how much more probable a session made the correct answer, in the policy's own eyes.

    score(context) = mean log-probability per token of the gold answer after the context and an opening answer tag
    gain(session)  = score(state after) - score(state before)

A state is a context at which the agent is about to act, so a session's *after* lies just before its closing action: what
an answer, a fork or a compaction says is no part of what was learned. Sessions of the main line share their states (one's
after is the next one's before), hence their gains telescope to the last state's score minus the first's.

Gains of different kinds of session have different scales (a search gains nats, a good summary loses none), so they are
normalized per kind within the group. Run `python infogain.py` for one scripted trajectory, scored state by state.
"""
import math
import random

import torch
from torch.nn.utils.rnn import pad_sequence

from rollout import NAMES, Task, demonstrate, describe, encode, make_question, read, tiny_tokenizer


def pad(rows, dtype=torch.long):
    """A list of lists -> (S, T) tensor, padded with 0 on the right, where no causal model can see it."""
    return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)


def micro_batches(lengths, max_tokens):
    """Split rows into lists of row numbers, sorted by length, so that each batch pads to at most `max_tokens` tokens."""
    batches = [[]]
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if batches[-1] and lengths[batches[-1][0]] * (len(batches[-1]) + 1) > max_tokens:
            batches.append([])
        batches[-1].append(row)
    return [batch for batch in batches if batch]


def token_logprobs(model, ids, mask, temperature=1.):
    """Log-probability of every masked token given all tokens before it.

    ids: (S, T) int, padded on the right. mask: (S, T) bool, False in the first column. Logits are computed for masked
    tokens only, their log-softmax in float32. Returns (S, T) float32, 0 where mask is False.
    """
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state     # (S, T, H)
    logits = model.get_output_embeddings()(hidden[:, :-1][mask[:, 1:]])             # (M, V): token t is predicted at t - 1
    logps = (logits.float() / temperature).log_softmax(-1).gather(1, ids[mask][:, None])[:, 0]      # (M,)
    return torch.zeros(ids.shape, device=ids.device).masked_scatter(mask, logps)    # (S, T)


@torch.no_grad()
def answer_logprob(model, contexts, answers, max_tokens=16384):
    """score: mean log-probability per answer token, teacher-forced after each context (design, section 3.3).

    contexts, answers: N lists of token ids each, no answer empty (ValueError); a context ends with whatever opens the
    answer. Each distinct pair is scored once. Returns (N,) float32, raw (not floored).
    """
    if not all(answers):
        raise ValueError("an answer without tokens cannot be scored")
    pairs = {}                                                  # distinct (context, answer) -> its row
    place = [pairs.setdefault((tuple(c), tuple(a)), len(pairs)) for c, a in zip(contexts, answers)]
    rows = [c + a for c, a in pairs]
    masks = [[0] * len(c) + [1] * len(a) for c, a in pairs]
    scores = torch.zeros(len(rows))
    for batch in micro_batches([len(row) for row in rows], max_tokens):
        ids = pad([rows[i] for i in batch]).to(model.device)                        # (S, T)
        mask = pad([masks[i] for i in batch], torch.bool).to(model.device)          # (S, T)
        scores[batch] = (token_logprobs(model, ids, mask).sum(1) / mask.sum(1)).cpu()   # (S,)
    return scores[place]                                        # (N,)


def score_sessions(trajectories, tokenizer, score):
    """Fill in `scores` and `gain` of every session of some trajectories (design, section 3.3).

    score: a function (contexts, answers) -> (N,), such as `answer_logprob` of a model. A score below that of the question
    alone counts as that of the question alone. A session that is the final answer and nothing else has no gain: nan.
    """
    opening = list(encode(tokenizer, "<answer>"))
    states, answers = [], []
    for trajectory in trajectories:
        own = [trajectory.sessions[0].before]
        own += [state for session in trajectory.sessions for state in (session.before, session.after)]
        states += [state + opening for state in own]
        answers += [list(encode(tokenizer, trajectory.question.answer))] * len(own)
    scores = iter(score(states, answers).tolist())
    for trajectory in trajectories:
        floor = next(scores)
        for session in trajectory.sessions:
            session.scores = max(next(scores), floor), max(next(scores), floor)
            only_answers = session.stop == "answered" and session.after == session.before
            session.gain = float("nan") if only_answers else session.scores[1] - session.scores[0]


def normalize_by_kind(gains, kinds, clip=3.):
    """Per kind of session: minus the kind's mean, over its standard deviation, clipped to [-clip, clip], equation (4).

    gains: (N,) float, the sessions of one group; nan for a session without a gain, which stays out of the statistics.
    kinds: N strings. 0 where there is no gain, where the kind has one session, or no spread. Returns (N,) float32.

    >>> normalize_by_kind(torch.tensor([1., 3., 0., float("nan")]), ["ordinary", "ordinary", "subagent", "ordinary"])
    tensor([-1.,  1.,  0.,  0.])
    """
    normalized = torch.zeros(len(gains))
    for kind in set(kinds):
        chosen = torch.tensor([k == kind for k in kinds]) & ~gains.isnan()          # (N,)
        own = gains[chosen].double()
        if len(own) > 1 and own.std(correction=0) > 1e-5:       # nats: below lies the noise of float32 scores
            normalized[chosen] = ((own - own.mean()) / own.std(correction=0)).clamp(-clip, clip).float()
    return normalized


def demo():
    tokenizer, rng = tiny_tokenizer(), random.Random("demo 4")
    question = make_question(rng)
    trajectory = demonstrate(question, Task(), tokenizer, rng)

    def reader(contexts, answers):
        """Scores of a careful reader instead of a model: every name left is equally likely, any other one in 1,000."""
        left = [read(tokenizer.decode(context))[2] or NAMES for context in contexts]
        names = [tokenizer.decode(answer) for answer in answers]
        return torch.tensor([-math.log(len(l)) if name in l else -math.log(1000) for l, name in zip(left, names)])

    score_sessions([trajectory], tokenizer, reader)
    print(f"Who fits {question.question!r}? ({question.answer}). Scores of a careful reader: -log(names still possible).\n")
    sessions = trajectory.sessions
    normalized = normalize_by_kind(torch.tensor([s.gain for s in sessions]), [s.kind for s in sessions]).tolist()
    for session, value in zip(sessions, normalized):
        print(f"{session.kind:11}before {session.scores[0]:6.3f}  after {session.scores[1]:6.3f}  gain {session.gain:6.3f}"
              f"  normalized {value:6.3f}  {describe(session, tokenizer)[-70:]}")
    total = sum(s.gain for s in sessions if not math.isnan(s.gain))
    print(f"\nThe gains telescope: their sum {total:.3f} = {sessions[-1].scores[1]:.3f} - ({sessions[0].scores[0]:.3f})")


if __name__ == "__main__":
    demo()
