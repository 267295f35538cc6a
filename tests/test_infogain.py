"""Worked examples for infogain.py."""
import random

import pytest
import torch
from conftest import random_attempts

import infogain
from infogain import answer_logprob, join_rows, micro_batches, score_sessions, token_logprobs
from rollout import Question, Session, Task, Trajectory, make_question

NAN = float("nan")


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
    one, two, both = answer_logprob(policy, [[1, 2], [1, 2, 3, 4], [1, 2]], [((3,), (4,)), ((3,), (5,)), ((3,), (4, 5))])
    logps = policy(input_ids=torch.tensor([[1, 2, 3, 4, 5]])).logits.log_softmax(-1)[0].detach()
    assert one.item() == pytest.approx(logps[2, 4].item(), abs=1e-5)
    assert both.item() == pytest.approx((logps[2, 4] + logps[3, 5]).item() / 2, abs=1e-5)
    assert two.item() == pytest.approx(policy(input_ids=torch.tensor([[1, 2, 3, 4, 3]])).logits.log_softmax(-1)[0, 4, 5].item(), abs=1e-5)


def row(ids, wanted, letters):
    """A row whose last tokens, from index `wanted` on, are to be predicted."""
    return [ids, [int(i >= wanted) for i in range(len(ids))], list(letters)]


def test_joined_rows_as_a_literal_tree():
    """1 2 3 wants its 3, so 1 2 5 may share 1, less the 2 that predicts its 5. 1 2 3 4 6 wants 6: it shares 1 2 3, sampled 3
    included, and goes on from there. 7 8 9 begins otherwise and is a tree of its own. In the first tree, 1 2 3 4 6 2 5, the
    second 2 (index 5) stands at place 1, after 1, and sees tokens with index <= 5 < until: 1 and itself."""
    rows = [row([1, 2, 5], 2, "abx"), row([7, 8, 9], 1, "yzw"), row([1, 2, 3], 2, "abc"), row([1, 2, 3, 4, 6], 4, "abcde")]
    assert join_rows(rows, 100, branch=True) == [
        [[1, 2, 3, 4, 6, 2, 5], [0, 0, 1, 0, 1, 0, 1], list("abcdebx"), [0, 1, 2, 3, 4, 1, 2], [7, 5, 5, 5, 5, 7, 7]],
        [[7, 8, 9], [0, 1, 1], list("yzw"), [0, 1, 2], [3, 3, 3]]]


def test_without_branches_a_row_only_goes_on_from_anothers_end():
    """1 2 3 4 6 continues 1 2 3 whole; 1 2 5 would leave it in its middle. What needs no mask has no place and until either."""
    rows = [row([1, 2, 5], 2, "abx"), row([1, 2, 3], 2, "abc"), row([1, 2, 3, 4, 6], 4, "abcde")]
    assert join_rows(rows, 100, branch=False) == [
        [[1, 2, 3, 4, 6], [0, 0, 1, 0, 1], list("abcde")], [[1, 2, 5], [0, 0, 1], list("abx")]]


def test_the_same_sample_twice_is_trained_twice():
    """Two rows that sampled the same tokens after the same context: the context less its last token is shared, no sample is."""
    assert join_rows([row([1, 2, 3, 50], 3, "abcd"), row([1, 2, 3, 50], 3, "abcd")], 100, branch=True) == [
        [[1, 2, 3, 50, 3, 50], [0, 0, 0, 1, 0, 1], list("abcdcd"), [0, 1, 2, 3, 2, 3], [6, 6, 4, 4, 6, 6]]]


def test_a_tree_has_a_greatest_size():
    rows = [row([1, 2, 3, 50], 3, "abcd"), row([1, 2, 3, 51], 3, "abcd")]
    assert len(join_rows(rows, 6, branch=True)) == 1 and len(join_rows(rows, 5, branch=True)) == 2


def test_neither_padding_nor_sharing_changes_a_score(policy):
    """Every score alone, against all in one batch and in small ones; some contexts begin others, one has two answers."""
    contexts = [[1, 2, 3], [1, 2], [1, 2, 3, 4, 5], [7] * 40, list(range(20)), [1, 2], list(range(7))]
    answers = [[4], [4], [4], [5, 6, 7], [8], [9, 3], [8, 8]]
    pairs = [((3,), tuple(a)) for a in answers]
    alone = [answer_logprob(policy, [c], [pair]).item() for c, pair in zip(contexts, pairs)]
    plain = [token_logprobs(policy, torch.tensor([c + [3] + a]), torch.tensor([[0] * len(c) + [0] + [1] * len(a)]).bool()).sum().item()
             / len(a) for c, a in zip(contexts, answers)]
    assert alone == pytest.approx(plain, abs=1e-5)
    assert answer_logprob(policy, contexts, pairs).tolist() == pytest.approx(alone, abs=1e-5)
    assert answer_logprob(policy, contexts, pairs, max_tokens=50).tolist() == pytest.approx(alone, abs=1e-5)
    assert max(alone) - min(alone) > .5


def test_each_distinct_pair_is_scored_once(policy, monkeypatch):
    scored, plain = [], infogain.token_logprobs
    monkeypatch.setattr(infogain, "token_logprobs", lambda model, ids, mask, *rest: scored.append(int(mask.sum())) or
                        plain(model, ids, mask, *rest))
    scores = answer_logprob(policy, [[1, 2], [3], [1, 2], [1, 2]], [((6,), (4,))] * 3 + [((6,), (5,))])
    assert sum(scored) == 3 and scores[0] == scores[2]


@pytest.mark.parametrize("answer, opening", [([], [1]), ([1], [])])
def test_an_empty_answer_is_an_error(policy, answer, opening):
    with pytest.raises(ValueError, match="without tokens"):
        answer_logprob(policy, [[1]], [(opening, answer)])


def test_gains_by_the_table(tokenizer, run_script):
    """One compaction, scores by hand: question -3, after two pages -1, after the summary -2, after the last page -.5.

    Gains +2 (ordinary), -1 (compaction), +1.5 (ordinary), 2.5 in all = -.5 - (-3).
    """
    question = Question("paris cat tea", "anna", {"paris": "anna boris", "cat": "anna clara", "tea": "anna paul"})
    _, attempt = run_script(question, Task(), ["<search>paris</search>", "<search>cat</search>", "<compact/>",
                                "<summary>paris cat : anna</summary>", "<search>tea</search>", "<answer>anna</answer>"])
    trajectory = attempt.trajectory()
    first, summary, last = trajectory.sessions
    by_hand = {tuple(first.before): -3., tuple(first.after): -1., tuple(summary.after): -2., tuple(last.after): -.5}
    scores = lambda contexts, answers: torch.tensor([by_hand[tuple(c)] for c in contexts])
    score_sessions([trajectory], tokenizer, scores, scores)
    assert [s.gain for s in trajectory.sessions] == [2., -1., 1.5]
    assert [s.scores for s in trajectory.sessions] == [(-3., -1.), (-1., -2.), (-2., -.5)]


def made(stop, *states):
    """An attempt that went through some states, numbers for contexts, in ordinary sessions."""
    sessions = [Session("ordinary", [1], [1], [0.], before=[a], after=[b]) for a, b in zip(states, states[1:])]
    return Trajectory(Question("", "anna", {}), sessions, stop, "", 0.)


def by_state(*scores):
    return lambda contexts, answers: torch.tensor([scores[c[0]] for c in contexts])


def test_no_score_is_below_what_the_starting_policy_says_of_the_question(tokenizer):
    """A summary that drops the answer is scored -7, the question alone -3 by the starting policy: the loss is -2 from -1, not -6.
    By now the policy itself gives the bare question -9: the floor does not drift with it, and the first session gains 2, not 8."""
    trajectory = made("answered", 0, 1, 2, 1)
    score_sessions([trajectory], tokenizer, by_state(-9., -1., -7.), by_state(-3.))
    assert [s.gain for s in trajectory.sessions] == [2., -2., 2.]


@pytest.mark.parametrize("stop", ["out of turns", "out of window"])
def test_an_attempt_without_an_answer_ends_knowing_nothing(tokenizer, stop):
    """-3, -1, -.5: the first session gains 2, the last one loses them again. So the gains of an attempt that never answers sum to
    0, and searching on and on is not paid for: with gains that are never negative, one start learned never to answer."""
    trajectory = made(stop, 0, 1, 2)
    score_sessions([trajectory], tokenizer, by_state(-3., -1., -.5), by_state(-3.))
    assert [s.gain for s in trajectory.sessions] == [2., -2.]


def test_a_closing_action_alone_has_no_gain(tokenizer, run_script):
    """An answer, a fork or a compaction without any action before it: what it brings is the next session's gain. If it counted as
    a session of its kind that gained 0, searching would seem to gain more than it does, next to a fork."""
    question = make_question(random.Random(0))
    zeros = lambda contexts, answers: torch.zeros(len(contexts))
    for task, actions, expected in (
            (Task(), ["<answer>anna</answer>"], [NAN]),
            (Task(), ["<compact/>", "<summary>:</summary>", "<answer>anna</answer>"], [NAN, 0., NAN]),
            (Task("subagent", 60), ["<fork>paris</fork>", "<report>anna</report>", "<answer>anna</answer>"], [NAN, 0., NAN]),
            (Task(turns=1), ["paris"], [0.])):
        trajectory = run_script(question, task, actions)[1].trajectory()
        score_sessions([trajectory], tokenizer, zeros, zeros)
        assert str([s.gain for s in trajectory.sessions]) == str(expected)


def test_gains_telescope(tokenizer):
    """Whatever happens in an attempt, its gains add up to the last state's score minus the first's (random scores)."""
    rng, scores = random.Random(0), {}
    def score(contexts, answers):
        return torch.tensor([scores.setdefault(tuple(c), rng.random()) for c in contexts])
    for _, _, attempt in random_attempts(tokenizer, 300):
        trajectory = attempt.trajectory()
        score_sessions([trajectory], tokenizer, score, score)
        total, known = sum(s.gain for s in trajectory.sessions if s.gain == s.gain), trajectory.sessions[-1].scores[1]
        assert total == pytest.approx(known - trajectory.sessions[0].scores[0], abs=1e-5)
        assert attempt.stop == "answered" or total == pytest.approx(0., abs=1e-5)
