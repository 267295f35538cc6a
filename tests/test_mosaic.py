"""Worked examples for mosaic.py: every number here can be checked by hand."""
import random

import pytest
import torch

from mosaic import centered_rank, group_advantage, session_advantage, trajectory_advantage


def close(tensor, expected):
    return torch.allclose(tensor, torch.tensor(expected), atol=1e-6)


@pytest.mark.parametrize("rewards, expected", [
    ([1., 0., 1., 0.], [1., -1., 1., -1.]),             # faults 9: one group of four, not four groups of one
    ([1., 0.], [1., -1.]),                              # faults 8: the mean is over attempts, whatever their sessions
    ([1., 0., 0., 0.], [3 ** .5, *[-(3 ** -.5)] * 3]),  # mean 1/4, std sqrt(3)/4
    ([1., 1., 1.], [0., 0., 0.]),                       # faults 10, 13: no spread, no advantage
    ([.3, .3, .3], [0., 0., 0.]),                       # .3 has no exact binary form: the std is rounding noise, not 0
    ([1.], [0.]),
])
def test_group_advantage(rewards, expected):
    assert close(group_advantage(torch.tensor(rewards)), expected)


@pytest.mark.parametrize("counts, expected", [
    ([1, 2, 3], [-1., 0., 1.]), ([3, 1, 2], [1., -1., 0.]), ([1, 1, 3], [-.5, -.5, 1.]), ([4], [0.]), ([2, 2], [0., 0.]),
    ([5, 7], [-1., 1.]), ([1, 2, 2, 9], [-1., 0., 0., 1.]), ([], []),
])
def test_centered_rank(counts, expected):
    assert close(centered_rank(torch.tensor(counts)), expected)


def test_trajectory_advantage():
    advantage = trajectory_advantage(torch.tensor([1., 1., 0., 0.]), torch.tensor([1, 3, 2, 4]), usage=.5)
    assert close(advantage, [1.5, .5, -1.5, -.5])


def test_rank_is_among_the_same_outcome():
    """Ranked among all four, the failure with 2 sessions (A = -1) would have rank -1/3 and get -1.17."""
    advantage = trajectory_advantage(torch.tensor([1., 1., 0., 0.]), torch.tensor([3, 4, 2, 1]), usage=.5)
    assert close(advantage, [1.5, .5, -.5, -1.5])


@pytest.mark.parametrize("usage", [-.1, 1., 2.])
def test_usage_out_of_range(usage):
    with pytest.raises(ValueError, match="usage must be at least 0 and below 1"):
        trajectory_advantage(torch.tensor([1., 0.]), torch.tensor([1, 1]), usage)


def test_session_advantage():
    """A' = .5 and -1; normalized gains 1 and -2; weight .3. The final answer (the second session's last token) keeps A'."""
    final_answer = torch.tensor([[False, False, False], [False, False, True]])
    tokens = session_advantage(torch.tensor([.5, -1.]), torch.tensor([1., -2.]), final_answer, gain_weight=.3)
    assert close(tokens, [[.8, .8, .8], [-1.6, -1.6, -1.]])


def test_modulation_properties():
    """For random groups with 0/1 rewards: no sign flips, the group still sums to zero, usage 0 is plain GRPO."""
    rng = random.Random(0)
    for _ in range(300):
        size = rng.randint(1, 12)
        rewards = torch.tensor([float(rng.random() < .4) for _ in range(size)])
        counts = torch.tensor([rng.randint(1, 6) for _ in range(size)])
        plain, usage = group_advantage(rewards), rng.random() * .99
        modulated = trajectory_advantage(rewards, counts, usage)
        assert torch.equal(plain.sign(), modulated.sign())
        assert abs(modulated.sum()) < 1e-4
        assert torch.equal(trajectory_advantage(rewards, counts, 0.), plain)
        order = torch.randperm(size)
        assert close(trajectory_advantage(rewards[order], counts[order], usage), modulated[order].tolist())


def test_a_large_group():
    """Counting ranks pair by pair would need 10^10 comparisons here; the result is checked against its definition."""
    counts = torch.arange(100_000).flip(0)
    rank = trajectory_advantage(torch.ones(100_000), counts, .5)
    assert not rank.any()
    rank = centered_rank(counts)
    assert rank[0] == 1 and rank[-1] == -1 and abs(rank.mean()) < 1e-6
