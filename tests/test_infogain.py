"""Worked examples for infogain.py."""
import math
import random

import pytest
import torch
from conftest import random_attempts

import infogain
from infogain import answer_logprob, micro_batches, normalize_by_kind, score_sessions, share_prefixes, token_logprobs
from rollout import Question, Session, Task, Trajectory, finish, make_question, segment

NAN = float("nan")


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


def test_micro_batches():
    """Sorted by length, no batch over 12 padded tokens, each row once; a row longer than that stands alone."""
    batches = micro_batches([3, 6, 1, 20, 4], 12)
    assert batches == [[3], [1, 4], [0, 2]]
    assert micro_batches([], 12) == []


def test_token_logprobs_are_the_models(policy):
    """Against the plain definition: log-softmax of the logits one position earlier (faults 7: not off by one)."""
    ids = torch.tensor([[1, 5, 9, 2, 7], [4, 3, 8, 0, 0]])
    mask = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 1, 0, 0]]).bool()
    logps = policy(input_ids=ids).logits.log_softmax(-1).detach()
    expected = [[0, logps[0, 0, 5], 0, logps[0, 2, 2], logps[0, 3, 7]], [0, 0, logps[1, 1, 8], 0, 0]]
    assert torch.allclose(token_logprobs(policy, ids, mask), torch.tensor(expected), atol=1e-5)


def test_temperature_divides_the_logits():
    """Logits [2, 1, 0]: the first has log-probability -.4076 at temperature 1 and -.1429 at .5 (faults 16)."""
    class Fixed:
        def base_model(self, input_ids, use_cache):
            return type("Output", (), {"last_hidden_state": torch.tensor([2., 1., 0.]).expand(*input_ids.shape, 3)})
        def get_output_embeddings(self):
            return torch.nn.Identity()
    for temperature, expected in ((1., -.4076), (.5, -.1429)):
        logps = token_logprobs(Fixed(), torch.tensor([[0, 0]]), torch.tensor([[False, True]]), temperature)
        assert logps[0, 1].item() == pytest.approx(expected, abs=1e-4)


def test_answer_logprob_is_a_mean_per_token(policy):
    one, two, both = answer_logprob(policy, [[1, 2], [1, 2, 3, 4], [1, 2]], [[4], [5], [4, 5]], [3])
    logps = policy(input_ids=torch.tensor([[1, 2, 3, 4, 5]])).logits.log_softmax(-1)[0].detach()
    assert one.item() == pytest.approx(logps[2, 4].item(), abs=1e-5)
    assert both.item() == pytest.approx((logps[2, 4] + logps[3, 5]).item() / 2, abs=1e-5)
    assert two.item() == pytest.approx(policy(input_ids=torch.tensor([[1, 2, 3, 4, 3]])).logits.log_softmax(-1)[0, 4, 5].item(), abs=1e-5)


def test_shared_prefixes_as_a_literal_tree():
    """Rows 1 2 3 and 1 2 5 share 1 2; 1 2 3 4 shares 1 2 3 with the first; 7 8 begins otherwise and is a tree of its own.
    The tree is 1 2 3 4 5: token 5 (index 4) stands at place 2, after 1 2, and sees tokens with index <= 4 < until, so 1 and 2."""
    rows = [[[1, 2, 5], "abx"], [[7, 8], "yz"], [[1, 2, 3], "abc"], [[1, 2, 3, 4], "abcd"]]
    rows = [[ids, list(letters)] for ids, letters in rows]
    assert share_prefixes(rows, [3, 2, 3, 3], 100) == [
        [[1, 2, 3, 4, 5], list("abcdx"), [0, 1, 2, 3, 2], [5, 5, 4, 4, 5]], [[7, 8], list("yz"), [0, 1], [2, 2]]]


def test_what_may_not_be_shared_is_not():
    """The second row may share one token only, or the tree would have more than six tokens: two copies of 2 3."""
    rows = [[[1, 2, 3]], [[1, 2, 3, 4]]]
    assert share_prefixes(rows, [3, 1], 100) == [[[1, 2, 3, 2, 3, 4], [0, 1, 2, 1, 2, 3], [6, 3, 3, 6, 6, 6]]]
    assert share_prefixes(rows, [3, 1], 5) == [[[1, 2, 3], [0, 1, 2], [3, 3, 3]], [[1, 2, 3, 4], [0, 1, 2, 3], [4, 4, 4, 4]]]


def test_neither_padding_nor_sharing_changes_a_score(policy):
    """Every score alone, against all in one batch and in small ones; some contexts begin others, one has two answers."""
    contexts = [[1, 2, 3], [1, 2], [1, 2, 3, 4, 5], [7] * 40, list(range(20)), [1, 2], list(range(7))]
    answers = [[4], [4], [4], [5, 6, 7], [8], [9, 3], [8, 8]]
    alone = [answer_logprob(policy, [c], [a], [3]).item() for c, a in zip(contexts, answers)]
    plain = [token_logprobs(policy, torch.tensor([c + [3] + a]), torch.tensor([[0] * len(c) + [0] + [1] * len(a)]).bool()).sum().item()
             / len(a) for c, a in zip(contexts, answers)]
    assert alone == pytest.approx(plain, abs=1e-5)
    assert answer_logprob(policy, contexts, answers, [3]).tolist() == pytest.approx(alone, abs=1e-5)
    assert answer_logprob(policy, contexts, answers, [3], max_tokens=50).tolist() == pytest.approx(alone, abs=1e-5)
    assert max(alone) - min(alone) > .5


def test_each_distinct_pair_is_scored_once(policy, monkeypatch):
    scored, plain = [], infogain.token_logprobs
    monkeypatch.setattr(infogain, "token_logprobs", lambda model, ids, mask, *rest: scored.append(int(mask.sum())) or
                        plain(model, ids, mask, *rest))
    scores = answer_logprob(policy, [[1, 2], [3], [1, 2], [1, 2]], [[4], [4], [4], [5]], [6])
    assert sum(scored) == 3 and scores[0] == scores[2]


@pytest.mark.parametrize("answer, opening", [([], [1]), ([1], [])])
def test_an_empty_answer_is_an_error(policy, answer, opening):
    with pytest.raises(ValueError, match="without tokens"):
        answer_logprob(policy, [[1]], [answer], opening)


def test_gains_by_the_table(tokenizer, run_script):
    """One compaction, scores by hand: question -3, after two pages -1, after the summary -2, after the last page -.5.

    Gains +2 (ordinary), -1 (compaction), +1.5 (ordinary), 2.5 in all = -.5 - (-3).
    """
    question = Question("paris cat tea", "anna", {"paris": "anna boris", "cat": "anna clara", "tea": "anna paul"})
    _, log, answer = run_script(question, Task(), ["<search>paris</search>", "<search>cat</search>", "<compact/>",
                                "<summary>paris cat : anna</summary>", "<search>tea</search>", "<answer>anna</answer>"])
    trajectory = finish(question, log, answer)
    first, summary, last = trajectory.sessions
    by_hand = {tuple(first.before): -3., tuple(first.after): -1., tuple(summary.after): -2., tuple(last.after): -.5}
    score_sessions([trajectory], tokenizer, lambda contexts, answers, opening: torch.tensor([by_hand[tuple(c)] for c in contexts]))
    assert [s.gain for s in trajectory.sessions] == [2., -1., 1.5]
    assert [s.scores for s in trajectory.sessions] == [(-3., -1.), (-1., -2.), (-2., -.5)]


def test_scores_below_the_questions_own_count_as_it(tokenizer):
    """A summary that drops the answer is scored -7, the question alone -3: the loss is -2 from -1, not -6."""
    sessions = [Session("ordinary", [1], [1], [0.], before=[1], after=[2]), Session("compaction", [1], [1], [0.], [2], after=[3]),
                Session("ordinary", [1], [1], [0.], before=[3], after=[2])]
    trajectory = Trajectory(Question("", "anna", {}), sessions, "out of turns", "", 0.)
    score_sessions([trajectory], tokenizer, lambda contexts, answers, opening: torch.tensor([{1: -3., 2: -1., 3: -7.}[c[0]] for c in contexts]))
    assert [s.gain for s in sessions] == [2., -2., 2.]


def test_a_final_answer_alone_has_no_gain(tokenizer, run_script):
    """And an idle session that is no answer has the gain 0, so that it counts among its kind."""
    question = make_question(random.Random(0))
    for actions, expected in ((["<answer>anna</answer>"], [NAN]),
                              (["<compact/>", "<summary>:</summary>", "<answer>anna</answer>"], [0., 0., NAN])):
        _, log, answer = run_script(question, Task(), actions)
        trajectory = finish(question, log, answer)
        score_sessions([trajectory], tokenizer, lambda contexts, answers, opening: torch.zeros(len(contexts)))
        assert str([s.gain for s in trajectory.sessions]) == str(expected)


def test_gains_telescope(tokenizer):
    """Whatever happens in an attempt, its gains add up to the last state's score minus the first's (random scores)."""
    rng, scores = random.Random(0), {}
    for _, _, log, answer in random_attempts(tokenizer, 300):
        trajectory = Trajectory(Question("", "anna", {}), segment(log), "", answer, 0.)
        score_sessions([trajectory], tokenizer,
                       lambda contexts, answers, opening: torch.tensor([scores.setdefault(tuple(c), rng.random()) for c in contexts]))
        total = sum(s.gain for s in trajectory.sessions if s.gain == s.gain)
        assert total == pytest.approx(trajectory.sessions[-1].scores[1] - trajectory.sessions[0].scores[0], abs=1e-5)
