"""Mosaic's hierarchical advantage: one number per sampled token, from rewards, session counts and information gains.

An attempt at a question (a trajectory) may span several sessions. GRPO gives all its tokens the same advantage:
how much better the attempt did than the other attempts of its group. Mosaic refines that number twice:

1. Trajectory level. Among attempts with the same outcome, compare how many sessions each one used:
   successes with few sessions gain, failures that explored with many sessions are punished less.
2. Session level. Add to each session its information gain about the correct answer (see infogain.py), so that
   a session that found something is preferred over one that did not, whatever became of the attempt.

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


def normalize_by_kind(gains, kinds, clip=3.):
    """Per kind of session: over the root mean square of the kind's gains, clipped to [-clip, clip], equation (4).

    The mean is not subtracted: gains of later sessions are smaller by nature, so that to go on, or to fork, would be
    below average and punished; a session that learns nothing should count 0 (measured in figures/README.md).

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


def session_advantage(advantage, normalized_gain, gain_weight):
    """The advantage of a session's tokens, equation (5): A' + gain_weight * normalized gain.

    The attempt's final answer is excepted, its tokens keep A': a gain is measured before the answer is given, so
    paying for it in the answer's tokens would teach when to answer by something else than its reward.

    >>> session_advantage(.5, 1., gain_weight=.3)
    0.8
    """
    return advantage + gain_weight * normalized_gain
