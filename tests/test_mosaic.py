"""Worked examples for mosaic.py: every number here can be checked by hand."""
import math
import random

import pytest
import torch

from mosaic import centered_rank, group_advantage, normalize_by_kind, session_advantage, trajectory_advantage

NAN = float("nan")


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


def test_normalize_by_kind():
    """Ordinary 1 and 7: root mean square sqrt(50 / 2) = 5. Compaction -4, 0, -2: sqrt(20 / 3). One subagent alone: 0. nan stays out."""
    gains = torch.tensor([1., -4., 7., 0., 7., -2., NAN])
    kinds = ["ordinary", "compaction", "ordinary", "compaction", "subagent", "compaction", "ordinary"]
    a = math.sqrt(20 / 3)
    assert torch.allclose(normalize_by_kind(gains, kinds), torch.tensor([.2, -4 / a, 1.4, 0., 0., -2 / a, 0.]))


def test_normalized_gains_are_clipped():
    """Fifteen gains of 0 and one of -1: the one is 1 / sqrt(1 / 16) = 4 times the root mean square."""
    normalized = normalize_by_kind(torch.tensor([0.] * 15 + [-1.]), ["ordinary"] * 16)
    assert torch.allclose(normalized, torch.tensor([0.] * 15 + [-3.]))


@pytest.mark.parametrize("gains", [[], [2.], [NAN], [NAN, NAN], [.5, .5, .5], [1., 1. + 1e-6]])
def test_no_spread_is_zero(gains):
    """The last: two equal gains that float32 scores tell apart by 1e-6 must not become -1 and +1 (faults 13)."""
    assert normalize_by_kind(torch.tensor(gains), ["subagent"] * len(gains)).tolist() == [0.] * len(gains)


def test_normalization_ignores_the_scale_of_one_kind():
    rng = random.Random(0)
    for _ in range(100):
        gains = torch.tensor([rng.gauss(0, 1) for _ in range(12)])
        kinds = [rng.choice(["ordinary", "compaction", "subagent"]) for _ in gains]
        own = torch.tensor([kind == "compaction" for kind in kinds])
        moved = torch.where(own, gains * rng.uniform(.5, 5), gains)
        assert torch.allclose(normalize_by_kind(gains, kinds), normalize_by_kind(moved, kinds), atol=1e-5)


def test_session_advantage():
    """A' = .5 and -1; normalized gains 1 and -2; weight .3."""
    assert session_advantage(.5, 1., gain_weight=.3) == .8 and session_advantage(-1., -2., gain_weight=.3) == -1.6


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
