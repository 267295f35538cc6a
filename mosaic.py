"""Mosaic's hierarchical advantage: one number per sampled token, from rewards, session counts and information gains.

An attempt at a question (a trajectory) may span several sessions. GRPO gives all its tokens the same advantage:
how much better the attempt did than the other attempts of its group. Mosaic refines that number twice:

1. Trajectory level. Among attempts with the same outcome, compare how many sessions each one used:
   successes with few sessions gain, failures that explored with many sessions are punished less.
2. Session level. Add to each session its information gain about the correct answer (see infogain.py), so that a
   session that found something is preferred over one that did not, whatever became of the attempt.

Everything here is a pure function of tensors; there is no model, tokenizer or file in this module. Equation numbers are
those of the README. Run `python mosaic.py` for one group worked step by step.
"""
import torch

METHODS = {"broadcast": (0, 0), "usage": (1, 0), "gain": (0, 1), "mosaic": (1, 1)}      # which of the two signals each has


def group_advantage(rewards):
    """GRPO's group-relative advantage, equation (1): A = (R - mean R) / std R, and 0 for all where std R = 0.

    rewards: (G,), the attempts at ONE question; an attempt counts once, however many sessions it has.
    Returns (G,) float32. The standard deviation is the population's.

    >>> group_advantage(torch.tensor([1., 0., 1., 0.]))
    tensor([ 1., -1.,  1., -1.])
    """
    rewards = rewards.double()
    if rewards.min() == rewards.max():      # asked of the rewards: rounding may leave a std of 1e-17 and blow it up to 1
        return torch.zeros_like(rewards).float()
    return ((rewards - rewards.mean()) / rewards.std(correction=0)).float()


def centered_rank(counts):
    """Ranks spread evenly over [-1, 1], equation (2): (2 rank - (N + 1)) / (N - 1), for ranks 1..N.

    counts: (N,), N >= 0. Ties share the middle rank; one attempt alone, or all equal, gives 0. Returns (N,) float32.

    >>> centered_rank(torch.tensor([1, 1, 3]))
    tensor([-0.5000, -0.5000,  1.0000])
    """
    _, place, size = counts.unique(return_inverse=True, return_counts=True)     # (N,), (distinct values,)
    rank = size.cumsum(0) - (size - 1) / 2          # (distinct values,): the middle of the ranks that a value occupies
    return (2 * rank[place] - (len(counts) + 1)) / max(len(counts) - 1, 1)      # (N,)


def trajectory_advantage(rewards, counts, usage):
    """The advantage modulated by session usage, equation (3): A' = A (1 - usage * rank), rank among the same outcome.

    rewards, counts: (G,), reward and number of sessions of each attempt of one group; a success is a reward > 0.5.
    usage: 0 <= usage < 1, so that no sign ever flips; else ValueError. Returns (G,) float32.

    >>> trajectory_advantage(torch.tensor([1., 1., 0., 0.]), torch.tensor([1, 3, 2, 4]), usage=.5)
    tensor([ 1.5000,  0.5000, -1.5000, -0.5000])
    """
    if not 0 <= usage < 1:
        raise ValueError(f"usage must be at least 0 and below 1, not {usage}")
    success = rewards > .5
    rank = torch.zeros(len(rewards))
    for outcome in (success, ~success):
        rank[outcome] = centered_rank(counts[outcome])
    return group_advantage(rewards) * (1 - usage * rank)


def session_advantage(advantage, gain, final_answer, gain_weight):
    """The advantage of every token of every session, equation (5): A' + gain_weight * normalized gain.

    advantage: (S,), A' of the attempt that each session belongs to. gain: (S,), the session's normalized gain.
    final_answer: (S, T) bool, the tokens of the attempt's final answer. They get A' alone: a gain is measured before
    the answer is given, so paying for it in the answer's tokens would teach when to answer by something else than
    its reward. Returns (S, T) float32.
    """
    shaping = gain_weight * gain[:, None] * ~final_answer       # (S, T)
    return advantage[:, None] + shaping                         # (S, T)


def demo():
    rewards, counts = torch.tensor([1., 1., 0., 0.]), torch.tensor([1, 3, 2, 4])
    print("Four attempts at one question: two succeed, two fail.\n")
    print("reward R                     ", rewards.tolist())
    print("sessions n                   ", counts.tolist())
    print("(1) A = (R - mean) / std     ", group_advantage(rewards).tolist())
    print("(2) rank of n, successes     ", centered_rank(counts[:2]).tolist(), " failures", centered_rank(counts[2:]).tolist())
    advantage = trajectory_advantage(rewards, counts, usage=.5)
    print("(3) A' = A (1 - .5 rank)     ", advantage.tolist())
    print("\nThe second attempt has three sessions of two tokens each; their normalized gains are 1, -1 and 0.")
    final_answer = torch.tensor([[0, 0], [0, 0], [0, 1]]).bool()
    tokens = session_advantage(advantage[1].expand(3), torch.tensor([1., -1., 0.]), final_answer, gain_weight=.3)
    print("(5) A' + .3 gain, per token  ", [[round(a, 3) for a in row] for row in tokens.tolist()])
    print("The last token is the final answer: it keeps A', whatever its session's gain.")


if __name__ == "__main__":
    demo()
