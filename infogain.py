"""Information gain: how much more probable a session made the correct answer, in the policy's own eyes.

    score(context) = mean log-probability per token of the gold answer after the context and an opening answer tag
    gain(session)  = score(state after) - score(state before)

A state is a context at which the agent is about to act, so a session's *after* lies just before its closing action: what
an answer, a fork or a compaction says is no part of what was learned. Sessions of the main line share their states (one's
after is the next one's before), hence their gains telescope to the last state's score minus the first's.

Gains of different kinds of session have different scales (a search gains nats, a good summary loses none), so they are
scaled per kind within the group. Run `python infogain.py` for one scripted trajectory, scored state by state.
"""
import math
import random
from os.path import commonprefix

import torch

from rollout import NAMES, Task, demonstrate, describe, encode, keeps_keys, make_question, pad, read, tiny_tokenizer


def micro_batches(lengths, max_tokens):
    """Split rows into lists of row numbers, sorted by length, so that each batch pads to at most `max_tokens` tokens."""
    batches = [[]]
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if batches[-1] and lengths[batches[-1][0]] * (len(batches[-1]) + 1) > max_tokens:
            batches.append([])
        batches[-1].append(row)
    return [batch for batch in batches if batch]


def share_prefixes(rows, free, most):
    """Join rows that begin alike into trees, in which what they have in common stands once, to be computed once.

    rows: each a list of equally long lists, the first of which holds its ids. free: how many of a row's first tokens it may share.
    Returns trees: rows with two more lists, `place`, the position that a token has in its row, and `until`, where in the tree the
    tokens end that come after it in some row. As rows are joined in the order of their ids, these stand together: token i sees
    token j where j <= i < until[j]. A row joins where a quarter of it is there already and the tree has `most` tokens at most,
    since attention costs their number squared.
    """
    trees, last = [], None
    for i in sorted(range(len(rows)), key=lambda i: rows[i][0]):
        ids = rows[i][0]
        n = min(len(commonprefix([ids, rows[last][0]])), free[i], free[last]) if trees else 0
        if not trees or 4 * n < len(ids) or len(trees[-1][0]) + len(ids) - n > most:
            n, path = 0, []                             # path: where the row's tokens stand in the tree
            trees.append([[] for _ in (*rows[i], "place", "until")])
        tree, last = trees[-1], i
        path = path[:n] + list(range(len(tree[0]), len(tree[0]) + len(ids) - n))
        for part, new in zip(tree, [*(part[n:] for part in rows[i]), range(n, len(ids)), [0] * (len(ids) - n)]):
            part += new
        for position in path:
            tree[-1][position] = len(tree[0])
    return trees


def token_logprobs(model, ids, mask, temperature=1., place=None, until=None):
    """Log-probability of every masked token given all tokens before it.

    ids: (S, T) int, padded on the right. mask: (S, T) bool, False in the first column. Logits are computed for masked tokens
    only, their log-softmax in float32. place, until: (S, T), where rows are trees of `share_prefixes`.
    Returns (S, T) float32, 0 where mask is False.
    """
    inputs = {}
    if until is not None:
        at = torch.arange(ids.shape[1], device=ids.device)                      # (T,)
        visible = (at <= at[:, None]) & (at[:, None] < until.maximum(at + 1)[:, None])          # (S, T, T); padding sees itself
        inputs = {"position_ids": place, "attention_mask": visible[:, None]}    # (S, 1, T, T)
    hidden = model.base_model(input_ids=ids, use_cache=False, **inputs).last_hidden_state       # (S, T, H)
    logits = model.get_output_embeddings()(hidden[:, :-1][mask[:, 1:]])         # (M, V): token t is predicted at t - 1
    logps = (logits.float() / temperature).log_softmax(-1).gather(1, ids[mask][:, None])[:, 0]  # (M,)
    return torch.zeros(ids.shape, device=ids.device).masked_scatter(mask, logps)                # (S, T)


@torch.inference_mode()
def answer_logprob(model, contexts, answers, opening, max_tokens=2048):
    """score: mean log-probability per answer token, teacher-forced after each context (design, section 3.3).

    contexts, answers: N lists of token ids each; opening: the ids of the answer tag, put between the two, not scored.
    No answer and no opening may be empty (ValueError). Each distinct pair is scored once, shared prefixes are computed
    once. Returns (N,) float32, raw (not floored).
    """
    if not all(answers) or not opening:
        raise ValueError("an answer without tokens, or without a tag before it, cannot be scored")
    number = {}                                         # distinct (context, answer) -> its number, from 1
    places = [number.setdefault((tuple(c), tuple(a)), len(number) + 1) for c, a in zip(contexts, answers)]
    rows = [[[*c, *opening, *a], [0] * (len(c) + len(opening)) + [i] * len(a)] for (c, a), i in number.items()]
    if keeps_keys(model):                               # else a branch would see the others through the layers' running state
        most = min(max_tokens, 2 * max(len(ids) for ids, _ in rows))
        rows = share_prefixes(rows, [len(context) for context, _ in number], most)
    sums = torch.zeros(len(number) + 1, device=model.device)
    for batch in micro_batches([len(row[0]) for row in rows], max_tokens):
        ids, pair, *tree = (pad(lists).to(model.device) for lists in zip(*(rows[i] for i in batch)))        # (S, T)
        logps = token_logprobs(model, ids, pair > 0, 1., *tree)                 # (S, T)
        sums.index_add_(0, pair.flatten(), logps.flatten())
    return sums[places].cpu() / torch.tensor([len(answer) for answer in answers])       # (N,)


def score_sessions(trajectories, tokenizer, score):
    """Fill in `scores` and `gain` of every session of some trajectories (design, section 3.3).

    score: a function (contexts, answers, opening) -> (N,), such as `answer_logprob` of a model. A score below that of the question
    alone counts as that of the question alone. A session that is the final answer and nothing else has no gain: nan.
    """
    opening = list(encode(tokenizer, "<answer>"))
    states, answers = [], []
    for trajectory in trajectories:
        own = [trajectory.sessions[0].before]
        own += [state for session in trajectory.sessions for state in (session.before, session.after)]
        states += own
        answers += [list(encode(tokenizer, trajectory.question.answer))] * len(own)
    scores = iter(score(states, answers, opening).tolist())
    for trajectory in trajectories:
        floor = next(scores)
        for session in trajectory.sessions:
            session.scores = max(next(scores), floor), max(next(scores), floor)
            only_answers = session.stop == "answered" and session.after == session.before
            session.gain = float("nan") if only_answers else session.scores[1] - session.scores[0]


def normalize_by_kind(gains, kinds, clip=3.):
    """Per kind of session: over the root mean square of the kind's gains, clipped to [-clip, clip], equation (4).

    The mean is not subtracted: gains of later sessions are smaller by nature, so that to go on, or to fork, would be below
    average and punished; a session that learns nothing should count 0 (measured in the README).

    gains: (N,) float, the sessions of one group; nan for a session without a gain, which stays out of the statistics.
    kinds: N strings. 0 where there is no gain, where the kind has one session, or no spread. Returns (N,) float32.

    >>> normalize_by_kind(torch.tensor([1., 7., 3., float("nan")]), ["ordinary", "ordinary", "subagent", "ordinary"])
    tensor([0.2000, 1.4000, 0.0000, 0.0000])
    """
    normalized = torch.zeros(len(gains))
    for kind in set(kinds):
        chosen = torch.tensor([k == kind for k in kinds]) & ~gains.isnan()          # (N,)
        own = gains[chosen].double()
        if len(own) > 1 and own.std(correction=0) > 1e-5:       # nats: below lies the noise of float32 scores
            normalized[chosen] = (own / own.square().mean().sqrt()).clamp(-clip, clip).float()
    return normalized


def demo():
    tokenizer, rng = tiny_tokenizer(), random.Random("demo 100")
    question = make_question(rng)
    trajectory = demonstrate(question, Task(), tokenizer, rng)

    def reader(contexts, answers, opening):
        """Scores of a careful reader instead of a model: every name left is equally likely, any other one in 1,000."""
        left = [read(tokenizer.decode(context))[2] or NAMES for context in contexts]
        names = [tokenizer.decode(answer) for answer in answers]
        return torch.tensor([-math.log(len(l)) if name in l else -math.log(1000) for l, name in zip(left, names)])

    score_sessions([trajectory], tokenizer, reader)
    print(f"Who fits {question.question!r}? ({question.answer}). Scores of a careful reader: -log(names still possible).\n")
    sessions = trajectory.sessions
    normalized = normalize_by_kind(torch.tensor([s.gain for s in sessions]), [s.kind for s in sessions]).tolist()
    print("session      before   after    gain  normalized  what the agent wrote last")
    for session, value in zip(sessions, normalized):
        print(f"{session.kind:11} {session.scores[0]:7.3f} {session.scores[1]:7.3f} {session.gain:7.3f} {value:11.3f}"
              f"  {describe(session, tokenizer).rpartition('[')[2].removesuffix(' <|im_end|>]')}")
    total = sum(s.gain for s in sessions if not math.isnan(s.gain))
    print(f"\nThe gains telescope: their sum {total:.3f} = {sessions[-1].scores[1]:.3f} - ({sessions[0].scores[0]:.3f})")


if __name__ == "__main__":
    demo()
