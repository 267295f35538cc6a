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
    """A = 1 1 -1 -1, ranks -1 1 and -1 1: the quick success and the failure that tried longer gain .3, the others lose it."""
    advantage = trajectory_advantage(torch.tensor([1., 1., 0., 0.]), torch.tensor([1, 3, 2, 4]), usage=.3)
    assert close(advantage, [1.3, .7, -1.3, -.7])


def test_rank_is_among_the_same_outcome():
    """Ranked among all four, the success with 3 sessions would have rank 1/3 and get .9."""
    advantage = trajectory_advantage(torch.tensor([1., 1., 0., 0.]), torch.tensor([3, 4, 2, 1]), usage=.3)
    assert close(advantage, [1.3, .7, -.7, -1.3])


def test_groups_that_all_succeed_or_all_fail_still_learn_about_sessions():
    """A = 0, so the signal alone is left; the product A (1 - usage * rank) would be 0 here."""
    counts = torch.tensor([1, 3, 3, 5])
    assert close(trajectory_advantage(torch.ones(4), counts, usage=.3), [.3, 0., 0., -.3])
    assert close(trajectory_advantage(torch.zeros(4), counts, usage=.3), [-.3, 0., 0., .3])


def test_usage_pulls_where_success_does_not_depend_on_sessions():
    """Attempts of 1, 3 or 5 sessions, each right nine times in ten: the mean advantage of the short ones is above that of the
    long ones by about 2 * usage * (share of successes - share of failures) * (mean rank), and 0 for the product. 2,000 groups of 8;
    the standard error of each mean is below .02."""
    rng, total = random.Random(0), {1: [], 3: [], 5: []}
    product = {1: [], 3: [], 5: []}
    for _ in range(2000):
        counts = [rng.choice((1, 3, 5)) for _ in range(8)]
        rewards = torch.tensor([float(rng.random() < .9) for _ in counts])
        sums = trajectory_advantage(rewards, torch.tensor(counts), usage=.3)
        plain = group_advantage(rewards)
        rank = torch.where(rewards > .5, plain - sums, sums - plain) / .3
        for n, a, p in zip(counts, sums.tolist(), (plain * (1 - .3 * rank)).tolist()):
            total[n].append(a)
            product[n].append(p)
    mean = {n: sum(values) / len(values) for n, values in total.items()}
    assert mean[1] > .12 and abs(mean[3]) < .05 and mean[5] < -.12
    assert all(abs(sum(values) / len(values)) < .08 for values in product.values())


def test_normalize_by_kind():
    """Ordinary 1 and 7: root mean square sqrt(50 / 2) = 5. Compaction -4, 0, -2: sqrt(20 / 3). One subagent, 7: 1. nan stays out."""
    gains = torch.tensor([1., -4., 7., 0., 7., -2., NAN])
    kinds = ["ordinary", "compaction", "ordinary", "compaction", "subagent", "compaction", "ordinary"]
    a = math.sqrt(20 / 3)
    assert close(normalize_by_kind(gains, kinds, noise=0.), [.2, -4 / a, 1.4, 0., 1., -2 / a, 0.])
    assert close(normalize_by_kind(gains[[0, 2]], ["ordinary"] * 2), [1 / 5.1, 7 / 5.1])        # .1 nats are added


def test_normalized_gains_are_clipped():
    """Fifteen gains of 0 and one of -1: the one is 1 / sqrt(1 / 16) = 4 times the root mean square."""
    normalized = normalize_by_kind(torch.tensor([0.] * 15 + [-1.]), ["ordinary"] * 16, noise=0.)
    assert close(normalized, [0.] * 15 + [-3.])


@pytest.mark.parametrize("gains", [[], [NAN], [NAN, NAN], [0., 0.], [1e-6, -1e-6, NAN]])
def test_nothing_learned_is_zero(gains):
    """The last: rounding noise of float32 scores must not become -1 and +1 (faults 13)."""
    assert normalize_by_kind(torch.tensor(gains), ["subagent"] * len(gains)).tolist() == pytest.approx([0.] * len(gains), abs=2e-5)


@pytest.mark.parametrize("gains", [[2., 2.], [2., 2.0001], [0., 1e-4], [-.5, -.5003]])
def test_nearly_equal_gains_are_treated_alike(gains):
    first, second = normalize_by_kind(torch.tensor(gains), ["ordinary"] * 2).tolist()
    assert abs(first - second) < 2e-3


def test_normalization_ignores_the_scale_of_one_kind():
    """Where gains are much larger than the noise: those of one kind, times any factor, count the same."""
    rng = random.Random(0)
    for _ in range(100):
        gains = torch.tensor([rng.gauss(0, 1) for _ in range(12)])
        kinds = [rng.choice(["ordinary", "compaction", "subagent"]) for _ in gains]
        own = torch.tensor([kind == "compaction" for kind in kinds])
        moved = torch.where(own, gains * rng.uniform(.5, 5), gains)
        assert torch.allclose(normalize_by_kind(gains, kinds, noise=0.), normalize_by_kind(moved, kinds, noise=0.), atol=1e-5)


def test_session_advantage():
    """A' = .5 and -1; normalized gains 1 and -2; weight .3."""
    assert session_advantage(.5, 1., gain_weight=.3) == .8 and session_advantage(-1., -2., gain_weight=.3) == -1.6


def test_properties_of_the_usage_signal():
    """For random groups: it sums to zero within each outcome, is at most `usage`, falls with the sessions of successes and rises
    with those of failures; usage 0 is plain GRPO; the order of the attempts does not matter."""
    rng = random.Random(0)
    for _ in range(300):
        size = rng.randint(1, 12)
        rewards = torch.tensor([float(rng.random() < .4) for _ in range(size)])
        counts = torch.tensor([rng.randint(1, 6) for _ in range(size)])
        plain, usage = group_advantage(rewards), rng.random() * 2
        advantage = trajectory_advantage(rewards, counts, usage)
        signal = advantage - plain
        assert signal.abs().max() <= usage + 1e-5
        for outcome, sign in ((rewards > .5, -1), (rewards < .5, 1)):
            assert abs(signal[outcome].sum()) < 1e-4
            order = counts[outcome].argsort()
            assert (sign * signal[outcome][order].diff() >= -1e-5).all()
        assert torch.equal(trajectory_advantage(rewards, counts, 0.), plain)
        order = torch.randperm(size)
        assert close(trajectory_advantage(rewards[order], counts[order], usage), advantage[order].tolist())


def test_a_large_group():
    """Counting ranks pair by pair would need 10^10 comparisons here; the result is checked against its definition."""
    counts = torch.arange(100_000).flip(0)
    rank = centered_rank(counts)
    assert rank[0] == 1 and rank[-1] == -1 and abs(rank.mean()) < 1e-6
