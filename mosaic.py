"""Mosaic's hierarchical advantage: one number per sampled token, from rewards, session counts and gains.

An attempt at a question (a trajectory) may span several sessions. GRPO gives all its tokens the same number,
how much better the attempt did than the others of its group. Mosaic refines that number twice:

1. Trajectory level. Among attempts with the same outcome, compare how many sessions each one used: successes
   with few sessions gain, and so do failures that explored with many.
2. Session level. Add to each action the information gain about the correct answer that came of it (see
   infogain.py), so that what found something is preferred over what did not, whatever became of the attempt.

Everything here is a pure function of tensors; there is no model, tokenizer or file in this module. Equation
numbers are those of the README. `python figures/walk.py` puts one group through all of them, step by step.
"""
import torch


def group_advantage(rewards):
    """GRPO's group-relative advantage, equation (1): A = (R - mean R) / std R, and 0 for all where std R = 0.

    rewards: (G,), the attempts at ONE question; an attempt counts once, however many sessions it has.
    Returns (G,) float32. The standard deviation is the population's.

    >>> group_advantage(torch.tensor([1., 0., 1., 0.]))
    tensor([ 1., -1.,  1., -1.])
    """
    rewards = rewards.double()
    if rewards.min() == rewards.max():      # asked of the rewards: rounding may leave a std of 1e-17, not 0
        return torch.zeros_like(rewards).float()
    return ((rewards - rewards.mean()) / rewards.std(correction=0)).float()


def centered_rank(counts):
    """Ranks spread evenly over [-1, 1], equation (2): (2 rank - (N + 1)) / (N - 1), for ranks 1..N.

    counts: (N,), N >= 0. Ties share the middle rank; one attempt alone, or all equal, gives 0. Returns (N,)
    float32.

    >>> centered_rank(torch.tensor([1, 1, 3]))
    tensor([-0.5000, -0.5000,  1.0000])
    """
    _, place, size = counts.unique(return_inverse=True, return_counts=True)     # (N,), (distinct values,)
    # (distinct values,): the middle of the ranks that a value occupies
    rank = size.cumsum(0) - (size - 1) / 2
    return (2 * rank[place] - (len(counts) + 1)) / max(len(counts) - 1, 1)      # (N,)


def trajectory_advantage(rewards, counts, usage):
    """The advantage with the usage signal, equation (3): A - usage * rank, and A + usage * rank for failures.

    The rank is among the attempts of the same outcome: successes are drawn to fewer sessions, failures to
    more, even where a whole group succeeds or fails and A = 0. Both sum to zero, so the group's advantages
    do, too. Why a sum: a product A (1 - usage * rank) raises a success and lowers a failure by the same
    factor, and where success does not depend on the sessions that cancels, whatever `usage` is. What is given
    up: a small A may change its sign.

    rewards, counts: (G,), reward and number of sessions of each attempt of one group; a success is a reward >
    0.5. usage: at least 0. Returns (G,) float32.

    >>> trajectory_advantage(torch.tensor([1., 1., 0., 0.]), torch.tensor([1, 3, 2, 4]), usage=.3)
    tensor([ 1.3000,  0.7000, -1.3000, -0.7000])
    """
    success = rewards > .5
    signal = torch.zeros(len(rewards))                          # (G,)
    signal[success] = -centered_rank(counts[success])
    signal[~success] = centered_rank(counts[~success])
    return group_advantage(rewards) + usage * signal


def normalize_by_kind(gains, kinds, clip=3., noise=.1):
    """Gains over the root mean square of their kind's gains, clipped to [-clip, clip], equation (4).

    gains: (N,) float, in nats, the sessions of one step; nan for a session without a gain, which stays out.
    kinds: N strings. The mean is not subtracted: a session that learns nothing counts 0, and later sessions,
    which have less left to learn, are not punished for it. `noise` nats are added to the root mean square, so
    that gains which differ by less are treated alike, whatever their scale. Returns (N,) float32, 0 where
    there is no gain.

    >>> normalize_by_kind(torch.tensor([1., 7., 3.]), ["ordinary", "ordinary", "subagent"], noise=0.)
    tensor([0.2000, 1.4000, 1.0000])
    """
    normalized = torch.zeros(len(gains))                                            # (N,)
    for kind in set(kinds):
        chosen = torch.tensor([k == kind for k in kinds]) & ~gains.isnan()          # (N,)
        own = gains[chosen]                                                         # (sessions of the kind,)
        scale = own.square().mean().sqrt() + noise
        normalized[chosen] = (own / scale).clamp(-clip, clip).nan_to_num()
    return normalized


def session_advantage(advantage, normalized_gain, gain_weight):
    """The advantage of a token, equation (5): A' + gain_weight * normalized gain of what came after it.

    That is the gain of the token's own session; but of the next session for a closing action, such as a fork
    or a search that no longer fitted, since a session's gain is measured before its closing action was
    chosen. The final answer is followed by nothing and gets A' alone (`train.credit` says which is which).

    >>> session_advantage(.5, 1., gain_weight=.3)
    0.8
    """
    return advantage + gain_weight * normalized_gain
