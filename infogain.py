"""Information gain: how much more probable a session made the correct answer, in the policy's own eyes.

    score(context) = mean log-probability per token of the gold answer after the context and an answer tag
    gain(session)  = score(state after) - score(state before)

A state is a context at which the agent is about to act, so a session's *after* lies just before its closing
action: what an answer, a fork or a compaction says is no part of what was learned. One session's after is the
next one's before, hence the gains of an attempt telescope to the last state's score minus the first's.

First what is scored (`score_sessions`), then how (`answer_logprob`), last how it is computed fast: rows that
begin alike are joined into trees, in which what they share stands once. The update uses the same trees.
"""
from os.path import commonprefix

import torch

from rollout import answer_tokens, keeps_keys, pad


def score_sessions(trajectories, tokenizer, score, score_at_start):
    """Fill in `scores` and `gain` of every session of some trajectories (design, section 3.3).

    score, score_at_start: functions (contexts, answers) -> (N,), such as `answer_logprob` of the policy and
    of the one that training started from. No score is below the floor, what the starting policy says of the
    question alone: nobody knows less than that. An attempt that ends without an answer ends at the floor:
    nothing that it learned was of use, so its gains add up to nothing. A session that is a closing action and
    nothing else (an answer, a fork, a compaction asked for at once) has no gain: nan.
    """
    answers = [answer_tokens(tokenizer, t.question.answer) for t in trajectories]
    floors = score_at_start([t.sessions[0].before for t in trajectories], answers)      # (trajectories,)
    # one session's state after is the next one's state before
    states = [[t.sessions[0].before, *(s.after for s in t.sessions)] for t in trajectories]
    contexts = [context for own in states for context in own]
    scores = score(contexts, [answer for own, answer in zip(states, answers) for _ in own])             # (N,)
    for t, floor, own in zip(trajectories, floors, scores.split([len(own) for own in states])):
        own = own.clamp(min=floor)                                                      # (sessions + 1,)
        if t.stop != "answered":
            own[-1] = floor
        own = own.tolist()
        for session, before, after in zip(t.sessions, own, own[1:]):
            only_closes = session.kind == "ordinary" and session.after == session.before
            session.scores, session.gain = (before, after), float("nan") if only_closes else after - before
        if t.stop != "answered":
            t.sessions[-1].gain = own[-1] - own[-2]


@torch.inference_mode()
def answer_logprob(model, contexts, answers, max_tokens=2048):
    """score: mean log-probability per answer token, teacher-forced after each context (design, section 3.3).

    contexts: N lists of token ids; answers: N pairs (opening, answer) of ids, the opening, such as an answer
    tag, put between context and answer and not scored. None of the two may be empty (ValueError). Each
    distinct pair of context and answer is scored once, shared prefixes are computed once. Returns (N,)
    float32, raw (not floored).
    """
    if not all(opening and answer for opening, answer in answers):
        raise ValueError("an answer without tokens, or without a tag before it, cannot be scored")
    pairs = [(tuple(context), answer) for context, answer in zip(contexts, answers)]
    number = {pair: i for i, pair in enumerate(dict.fromkeys(pairs), 1)}
    # a row's ids, and whose answer each one belongs to
    rows = [[[*context, *opening, *answer], [0] * (len(context) + len(opening)) + [i] * len(answer)]
            for (context, (opening, answer)), i in number.items()]
    sums = torch.zeros(len(number) + 1, device=model.device)
    for batch in batches(rows, max_tokens, keeps_keys(model)):
        ids, belongs, *tree = (part.to(model.device) for part in batch)                         # (S, T)
        logps = token_logprobs(model, ids, belongs > 0, 1., *tree)                              # (S, T)
        sums.index_add_(0, belongs.flatten(), logps.flatten())
    lengths = torch.tensor([len(answer) for _, answer in answers])                              # (N,)
    return sums[[number[pair] for pair in pairs]].cpu() / lengths                               # (N,)


def token_logprobs(model, ids, mask, temperature=1., place=None, until=None):
    """Log-probability of every masked token given all tokens before it.

    ids: (S, T) int, padded on the right. mask: (S, T) bool, False in the first column. Logits are computed
    for masked tokens only, their log-softmax in float32. place, until: (S, T), where rows are trees of
    `join_rows`. Returns (S, T) float32, 0 where mask is False.
    """
    inputs = {}
    if until is not None:
        column = torch.arange(ids.shape[1], device=ids.device)                                  # (T,)
        seen_until = until.maximum(column + 1)  # (S, T); padding sees itself
        visible = (column <= column[:, None]) & (column[:, None] < seen_until[:, None])         # (S, T, T)
        inputs = {"position_ids": place, "attention_mask": visible[:, None]}                    # (S, 1, T, T)
    hidden = model.base_model(input_ids=ids, use_cache=False, **inputs).last_hidden_state       # (S, T, H)
    predicting = hidden[:, :-1][mask[:, 1:]]  # (M, H): token t is predicted at t - 1
    logits = model.get_output_embeddings()(predicting)                                          # (M, V)
    logps = (logits.float() / temperature).log_softmax(-1).gather(1, ids[mask][:, None])[:, 0]  # (M,)
    return torch.zeros(ids.shape, device=ids.device).masked_scatter(mask, logps)                # (S, T)


# ---------------------------------------------------------------- batches and trees

def batches(rows, max_tokens, branch, dtypes=(torch.long, torch.long)):
    """Rows as micro-batches of at most `max_tokens` padded tokens: tensors (S, T), one per list of a row.

    rows, branch: as in `join_rows`, which joins them first. dtypes: of a row's lists. Where rows may branch,
    the last two tensors of a batch are `place` and `until`.
    """
    joined = join_rows(rows, min(max_tokens, 2 * max(len(row[0]) for row in rows)), branch)
    for batch in micro_batches([len(row[0]) for row in joined], max_tokens):
        lists = zip(*(joined[i] for i in batch))
        # (S, T) each
        yield [pad(part, dtype) for part, dtype in zip(lists, [*dtypes, torch.long, torch.long])]


def micro_batches(lengths, max_tokens):
    """Lists of row numbers, longest rows first, each of which pads to at most `max_tokens` tokens."""
    lists = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if lists and lengths[lists[-1][0]] * (len(lists[-1]) + 1) <= max_tokens:
            lists[-1].append(row)
        else:
            lists.append([row])
    return lists


def join_rows(rows, most, branch):
    """Join rows that begin alike into trees, in which what they share stands once, to be computed once.

    rows: each a list of equally long lists; the first holds its ids, the second a mask, not 0 where a token's
    log-probability is wanted. A row may share what stands before its first such token, less the token that
    predicts it. It joins where a quarter of it is there already and the tree then has at most `most` tokens,
    since attention costs their number squared. branch: whether a tree may branch; else a row only ever
    continues another one's end. Returns rows with two more lists if trees may branch: `place`, the position
    that a token has in its row, and `until`, where in the tree the tokens end that come after it in some row.
    As rows are joined in the order of their ids, these stand together: token i sees token j where j <= i <
    until[j].
    """
    trees, path, previous = [], [], []  # path: where the tokens of the previous row stand in the tree
    for row in sorted(rows, key=lambda row: row[0]):
        ids, mask = row[:2]
        wanted = next(i for i, value in enumerate(mask) if value)
        n = min(len(commonprefix([ids, previous])), wanted - 1)
        size = len(trees[-1][0]) if trees else 0
        if not trees or 4 * n < len(ids) or size + len(ids) - n > most or not (branch or n == size):
            trees.append([[] for _ in range(len(row) + 2)])
            n = size = 0
        tree, end = trees[-1], size + len(ids) - n
        path = path[:n] + list(range(size, end))
        for part, new in zip(tree, [*(part[n:] for part in row), range(n, len(ids)), [end] * (len(ids) - n)]):
            part.extend(new)
        for position in path[:n]:
            tree[-1][position] = end
        previous = ids
    return trees if branch else [tree[:-2] for tree in trees]
