"""The loss by hand; credit of whole trajectories; short real runs from the command line; bad input."""
import json
import math
import random
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, command, settled

import rollout
import train
from infogain import join_rows, token_logprobs
from mosaic import group_advantage
from rollout import Question, Session, Task, Trajectory, make_question

ARGS = settled()


def trajectory(reward, *sessions):
    """An attempt with hand-made sessions: (kind, ids, mask, gain)."""
    made = [Session(kind, ids, mask, [0.] * len(ids), [], [], closing=len(ids), gain=gain) for kind, ids, mask, gain in sessions]
    return Trajectory(Question("", "x", {}), made, "answered", "", reward)


# ---------------------------------------------------------------- loss

def test_grpo_loss_by_hand():
    """Two rows of two tokens, three of them the model's. Ratios 1, 1.5, .5 with A = 1, 1, -1; clip to [.8, 1.28]:
    min(1, 1) + min(1.5, 1.28) + min(-.5, -.8) = 1.48; over 3 tokens, negated: -.4933."""
    logps = torch.tensor([[0., math.log(1.5)], [0., math.log(.5)]])
    mask = torch.tensor([[True, True], [False, True]])
    advantages = torch.tensor([[1., 1.], [7., -1.]])
    loss, log_ratio = train.grpo_loss(logps, torch.zeros(2, 2), advantages, mask, 3)
    assert loss.item() == pytest.approx(-1.48 / 3, abs=1e-6)
    assert log_ratio.exp()[mask].tolist() == pytest.approx([1., 1.5, .5])


def test_kl_by_hand():
    """d = ref - logp = log 2: exp(d) - d - 1 = 2 - .6931 - 1 = .3069. At d = 0 it is 0."""
    logps, ref = torch.tensor([[0., 0.]]), torch.tensor([[math.log(2), 0.]])
    loss, _ = train.grpo_loss(logps, logps, torch.zeros(1, 2), torch.ones(1, 2).bool(), 2, ref, kl=.1)
    assert loss.item() == pytest.approx(.1 * .3068528 / 2, abs=1e-6)


def test_loss_ignores_padding_side_row_order_and_split():
    """faults 12, 17: padding on the left or right, rows in any order, one pass or one per row: the same loss and gradient."""
    g = torch.Generator().manual_seed(0)
    logps, old, advantages = (torch.randn(4, 7, generator=g) for _ in range(3))
    mask = torch.arange(7) < torch.tensor([[7], [3], [5], [1]])

    def loss_and_gradient(order, flip, split):
        leaf = logps.clone().requires_grad_(True)
        turn = lambda x: (x.flip(1) if flip else x)[order]
        total = 0.
        for rows in torch.arange(4).split(split):
            part = train.grpo_loss(*(turn(x)[rows] for x in (leaf, old, advantages, mask)), 16)[0]
            part.backward(retain_graph=True)
            total += part.item()
        return total, leaf.grad

    whole, gradient = loss_and_gradient([0, 1, 2, 3], False, 4)
    for order, flip, split in (([2, 0, 3, 1], False, 4), ([0, 1, 2, 3], True, 4), ([3, 2, 1, 0], True, 1)):
        again, grad = loss_and_gradient(order, flip, split)
        assert again == pytest.approx(whole, abs=1e-6) and torch.allclose(grad, gradient, atol=1e-7)
    assert gradient[~mask].abs().max() == 0 < gradient[mask].abs().max()


def test_empty_mask_gives_zero_and_finite_gradients():
    logps = torch.zeros(1, 2, requires_grad=True)
    loss, _ = train.grpo_loss(logps, torch.full((1, 2), -torch.inf), torch.ones(1, 2), torch.zeros(1, 2).bool(), 0)
    loss.backward()
    assert loss.item() == 0 and logps.grad.tolist() == [[0., 0.]]


# ---------------------------------------------------------------- credit

def test_credit_counts_attempts_not_sessions():
    """faults 8: one success with three sessions, one failure with one: A = +1, -1 (over sessions it would be .58, -1.7)."""
    one = ("ordinary", [1, 2], [0, 1], 0.)
    group = [trajectory(1., one, one, one), trajectory(0., one)]
    train.credit(group, 2, usage=0, gain_weight=0)
    assert [t.advantage for t in group] == [1., -1.]


def test_credit_end_to_end_by_hand():
    """Four attempts: R = 1 1 0 0, n = 1 3 2 4, usage .3 -> A' = 1.3 .7 -1.3 -.7. Ordinary gains 5, 1 1, 1, 2 2: root mean square
    sqrt(36 / 6); compaction -1, 0, 1, 0: sqrt(2 / 4); each + .1. With weight .2, by attempt and session."""
    def o(gain): return ("ordinary", [1, 2, 3], [0, 1, 1], gain)
    def c(gain): return ("compaction", [1, 2], [0, 1], gain)
    group = [trajectory(1., o(5.)), trajectory(1., o(1.), c(-1.), o(1.)), trajectory(0., o(1.), c(0.)),
             trajectory(0., o(2.), c(1.), o(2.), c(0.))]
    train.credit(group, 4, usage=.3, gain_weight=.2)
    assert [t.advantage for t in group] == pytest.approx([1.3, .7, -1.3, -.7])
    a, b = .2 / (math.sqrt(6) + .1), .2 / (math.sqrt(.5) + .1)
    expected = [[1.3 + 5 * a], [.7 + a, .7 - b, .7 + a], [-1.3 + a, -1.3], [-.7 + 2 * a, -.7 + b, -.7 + 2 * a, -.7]]
    sessions = [session for t in group for session in t.sessions]
    assert [s.advantages[-1] for s in sessions] == pytest.approx(sum(expected, []), abs=1e-5)
    assert [s.advantages[0] for s in sessions] == [0.] * 10      # the prompt is not the model's


def test_to_run_out_of_turns_is_no_exploration():
    """Three failures with 1, 3 and 11 sessions: ranks -1, 0, 1. The last one never answered: it ranks below the others, as with
    no session at all, and where all attempts fail they are drawn to more sessions only if these end in an answer."""
    def o(count): return [("ordinary", [1, 2], [0, 1], 0.)] * count
    group = [trajectory(0., *o(1)), trajectory(0., *o(3)), trajectory(0., *o(11))]
    train.credit(group, 3, usage=.3, gain_weight=0.)
    assert [t.advantage for t in group] == pytest.approx([-.3, 0., .3])
    group[2].stop = "out of turns"
    train.credit(group, 3, usage=.3, gain_weight=0.)
    assert [t.advantage for t in group] == pytest.approx([0., .3, -.3])


def test_every_action_is_paid_for_what_came_after_it():
    """A' = .5, weight 1. The first ordinary session (normalized gain 1) ends with a fork, which gets the subagent's 2; the report
    is what the subagent's gain measures; the last ordinary session (3) ends with the answer, which gets A' alone, whatever was
    learned before: paying for that in the answer's tokens would teach when to answer by something else than its reward."""
    first = Session("ordinary", [1, 50, 9, 51, 52], [0, 1, 0, 1, 1], [], [], closing=3, stop="fork", normalized_gain=1.)
    subagent = Session("subagent", [8, 60, 9, 61], [0, 1, 0, 1], [], [], closing=3, stop="report", normalized_gain=2.)
    last = Session("ordinary", [1, 70, 9, 71], [0, 1, 0, 1], [], [], closing=3, stop="answered", normalized_gain=3.)
    for session, following in ((first, subagent), (subagent, last), (last, None)):
        train.credit_tokens(session, following, .5, gain_weight=1.)
    assert first.advantages == [0., 1.5, 0., 2.5, 2.5]
    assert subagent.advantages == [0., 2.5, 0., 2.5]
    assert last.advantages == [0., 3.5, 0., .5]
    last.stop = "out of window"         # a search that never brought anything: paid by its session, which ended at the floor
    train.credit_tokens(last, None, .5, gain_weight=1.)
    assert last.advantages == [0., 3.5, 0., 3.5]


def collected(policy, tokenizer, scenario, usage=.5, gain_weight=.3, seed=0):
    rng = random.Random(seed)
    task = Task(scenario, rollout.WINDOWS[scenario])
    run = train.Run(settled("--group-size", 4, "--seed", seed), task, tokenizer, policy)
    trajectories, _ = train.collect(policy, run, [make_question(rng) for _ in range(6)])
    train.credit(trajectories, 4, usage, gain_weight)
    return trajectories


@pytest.mark.parametrize("scenario", rollout.WINDOWS)
def test_both_weights_zero_is_broadcast(policy, tokenizer, scenario):
    """faults 11: every model token of an attempt, in every session, has the attempt's own A; the others have 0."""
    trajectories = collected(policy, tokenizer, scenario, usage=0., gain_weight=0.)
    assert any(len(t.sessions) > 1 for t in trajectories)
    for i in range(0, len(trajectories), 4):
        plain = group_advantage(torch.tensor([t.reward for t in trajectories[i:i + 4]])).tolist()
        for t, a in zip(trajectories[i:i + 4], plain):
            for session in t.sessions:
                assert session.advantages == [a * mask for mask in session.mask]


# ---------------------------------------------------------------- rows and the update

def rows_of(trajectories):
    return [train.up_to_last_sampled(s.ids, s.mask, s.logps, s.advantages) for t in trajectories for s in t.sessions]


def test_rows_of_a_fork():
    """Parent [1 50] fork, subagent [8 70], parent again [1 50 9 51] and what it was shown last, 6: two rows, each sampled token in
    exactly one place, and without the 6, which predicts nothing that is trained."""
    sessions = [Session("ordinary", [1, 50], [0, 1], [0., -.1], [], advantages=[0., 1.]),
                Session("subagent", [8, 70], [0, 1], [0., -.2], [], advantages=[0., 2.]),
                Session("ordinary", [1, 50, 9, 51, 6], [0, 0, 0, 1, 0], [0., 0., 0., -.3, 0.], [], advantages=[0., 0., 0., 3., 0.])]
    rows = rows_of([Trajectory(None, sessions, "", "", 0.)])
    assert join_rows(rows, 100, branch=False) == [
        [[1, 50, 9, 51], [0, 1, 0, 1], [0., -.1, 0., -.3], [0., 1., 0., 3.]], [[8, 70], [0, 1], [0., -.2], [0., 2.]]]


@pytest.mark.parametrize("branch", [True, False])
@pytest.mark.parametrize("scenario", rollout.WINDOWS)
def test_rows_hold_every_sampled_token_with_its_advantage(policy, tokenizer, scenario, branch):
    """faults 24, on real rollouts: joining keeps the multiset of (token, log-probability, advantage) of the model's tokens."""
    rows = rows_of(collected(policy, tokenizer, scenario))
    pieces = lambda rows: sorted(piece[0::2] + piece[3:] for row in rows for piece in zip(*row[:4]) if piece[1])
    joined = join_rows(rows, 400, branch)
    assert pieces(joined) == pieces(rows) and sum(len(row[0]) for row in joined) < sum(len(row[0]) for row in rows)


@pytest.fixture
def dropout(policy):
    """The same policy, built with dropout in its configuration, which training mode would switch on."""
    config = train.copy.deepcopy(policy.config)
    config.attention_dropout = .3
    model = train.Qwen3ForCausalLM(config).eval()
    model.load_state_dict(policy.state_dict())
    assert model.base_model.layers[0].self_attn.attention_dropout == .3
    return model


@pytest.mark.parametrize("scenario", rollout.WINDOWS)
def test_ratio_is_one_before_the_first_step(dropout, tokenizer, scenario):
    """faults 7, 18: |log ratio| < 1e-5 at every trained token, in the update as in single rows; fails if the mask is shifted by one."""
    trajectories, worst, shifted = collected(dropout, tokenizer, scenario), 0., 0.
    for ids, mask, logps, _ in rows_of(trajectories):
        ids, mask, logps = torch.tensor([ids]), torch.tensor([mask]).bool(), torch.tensor([logps])
        worst = max(worst, (token_logprobs(dropout, ids, mask) - logps).abs().max().item())
        shifted = max(shifted, (token_logprobs(dropout, ids, mask.roll(-1, 1)).roll(1, 1) - logps).abs().max().item())
    assert worst < 1e-5 < .1 < shifted
    metrics = train.update(dropout, train.adamw(dropout, 0.), trajectories, ARGS)
    assert metrics["gap_p99"] < 1e-5 and abs(metrics["ratio_max"] - 1) < 1e-5


def gradient(policy, trajectories, batch_tokens):
    """Loss and gradient of one update, whose step itself changes nothing (learning rate 0)."""
    args = settled("--batch-tokens", batch_tokens)
    optimizer = torch.optim.SGD([p.detach() for p in policy.parameters()], lr=0.)
    metrics = train.update(policy, optimizer, trajectories, args)
    return metrics["loss"], torch.cat([master.grad.flatten() for master in optimizer.param_groups[0]["params"]])


def test_gradient_does_not_depend_on_the_split(policy, tokenizer):
    """faults 12: one micro-batch, many, and the trajectories in another order: the same loss and gradient."""
    trajectories = collected(policy, tokenizer, "compaction")
    loss, whole = gradient(policy, trajectories, 10 ** 6)
    for split, order in ((60, trajectories), (300, trajectories[::-1])):
        again, grad = gradient(policy, order, split)
        assert again == pytest.approx(loss, abs=1e-6) and torch.allclose(grad, whole, atol=1e-6)
    assert whole.abs().max() > 1e-4


def test_rewards_that_never_vary_leave_the_policy_alone(policy, tokenizer):
    trajectories = collected(policy, tokenizer, "compaction")
    for t in trajectories:
        t.reward = 0.
    train.credit(trajectories, 4, usage=0., gain_weight=0.)
    metrics = train.update(policy, torch.optim.SGD([p.detach() for p in policy.parameters()], lr=0.), trajectories, ARGS)
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0


def test_sampling_ignores_the_models_generation_config(policy, tokenizer):
    """faults 15: transformers would fill in top_k = 1 from the model's own settings."""
    policy.generation_config.top_k, policy.generation_config.do_sample = 1, True
    question = make_question(random.Random(0))
    attempts = rollout.sample_attempts(policy, tokenizer, [question] * 8, Task(), train.uniforms(8, Task(), "test"))
    policy.generation_config.top_k, policy.generation_config.do_sample = 50, False
    assert len({str([s.ids for s in t.sessions]) for t in attempts}) > 1


def test_a_step_improves_what_it_rewards(policy, tokenizer):
    """A sanity check of the sign: reward attempts by how soon they end; after five steps attempts are shorter on average."""
    model = train.copy.deepcopy(policy)
    optimizer = train.adamw(model, 3e-3)
    lengths = []
    for step in range(6):
        trajectories = collected(model, tokenizer, "compaction", seed=step)
        lengths.append(sum(sum(s.mask) for t in trajectories for s in t.sessions) / len(trajectories))
        for i in range(0, len(trajectories), 4):
            group = trajectories[i:i + 4]
            size = [sum(sum(s.mask) for s in t.sessions) for t in group]
            for t, n in zip(group, size):
                t.reward = float(n <= sorted(size)[1])
        train.credit(trajectories, 4, usage=0., gain_weight=0.)
        train.update(model, optimizer, trajectories, ARGS)
    assert lengths[-1] < .8 * lengths[0]


# ---------------------------------------------------------------- the command line

def process(*args):
    """The same as `command`, in a process of its own, as a user starts it."""
    return subprocess.run([sys.executable, str(ROOT / "train.py"), *map(str, args)], capture_output=True, text=True)


SMALL = ["--steps", 2, "--questions", 3, "--group-size", 3, "--eval-questions", 3, "--eval-every", 1, "--warm-start", 30]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("scenario", rollout.WINDOWS)
def test_a_short_real_run(tmp_path, cache, scenario):
    """Both scenarios from the command line: files complete, numbers finite, the saved model goes on with --model."""
    out = tmp_path / "run"
    done = command("--scenario", scenario, "--out", out, "--cache", cache, *SMALL)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in out.iterdir()) == ["broadcast", "config.json", "curves.png", "mosaic"]
    assert json.load(open(out / "config.json"))["usage"] == train.parse_args([]).usage
    assert "| broadcast |" in done.stdout and "| mosaic    |" in done.stdout
    for method in ("broadcast", "mosaic"):
        folder = out / method
        assert {path.name for path in folder.iterdir()} == {"metrics.jsonl", "trajectories.jsonl", "model"}
        lines = [json.loads(line) for line in open(folder / "metrics.jsonl")]
        assert [line["step"] for line in lines] == [0, 1, 2]
        assert all(math.isfinite(line[key]) for line in lines[:2] for key in ("loss", "grad_norm", "entropy", "success", "ratio_max"))
        attempts = [json.loads(line) for line in open(folder / "trajectories.jsonl")]
        assert len(attempts) == 3 * 3 and all(
            len(s["advantages"]) == sum(end - start for start, end in s["spans"]) for t in attempts for s in t["sessions"])
    first = [json.loads(open(out / method / "metrics.jsonl").readline()) for method in ("broadcast", "mosaic")]
    assert first[0]["success"] == first[1]["success"] and first[0]["eval_entropy"] == first[1]["eval_entropy"]  # the same start
    done = command("--scenario", scenario, "--model", out / "mosaic/model", "--method", "gain", "--out", tmp_path / "on", *SMALL, "--warm-start", 0)
    assert done.returncode == 0, done.stderr
    again = [json.loads(line) for line in open(tmp_path / "on/gain/metrics.jsonl")]
    assert again[0]["eval_entropy"] == pytest.approx(lines[-1]["eval_entropy"], abs=1e-5)   # it starts where the saved one ended


def test_the_same_seed_gives_the_same_run(tmp_path, cache):
    for name, start in (("a", command), ("b", process)):
        done = start("--method", "mosaic", "--out", tmp_path / name, "--cache", cache, *SMALL)
        assert done.returncode == 0, done.stderr
        assert "Writing model shards" not in done.stderr and "Loading weights" not in done.stderr     # only our own bars
    a, b = ([{k: v for k, v in json.loads(line).items() if not k.startswith("seconds")} for line in
             open(tmp_path / name / "mosaic/metrics.jsonl")] for name in ("a", "b"))
    assert a == b


def test_bad_input_is_one_line_exit_2_and_nothing_written(tmp_path, tokenizer, monkeypatch, capfd):
    """In this process, one row after the other, and the last once more as a command."""
    held, other, no_tokenizer = tmp_path / "held", tmp_path / "other", tmp_path / "no-tokenizer"
    (held / "mosaic").mkdir(parents=True)
    (held / "config.json").write_text("{}")
    other.mkdir()
    (other / "letter.txt").write_text("keep me")
    (other / "tasks.jsonl").write_text("".join('{"question": "%d", "answer": "it", "pages": {"x": "it"}}\n' % i for i in range(2)))
    train.tiny_model(tokenizer, 0).save_pretrained(no_tokenizer)
    new, before = ["--out", tmp_path / "new"], sorted(tmp_path.rglob("*"))
    capfd.readouterr()
    for row, word in [(["--model", tmp_path / "nothing-here", *new], "--model"), (["--model", no_tokenizer, *new], "--model"),
                      (["--device", "cuda:7", *new], "--device cpu"), (["--device", "abacus", *new], "--device cpu"),
                      (["--resume", *new], "--resume"), (["--out", other], "no run"), (["--overwrite", "--out", other], "no run"),
                      (["--tasks", other / "letter.txt", *new], "line 1"), (["--tasks", other / "tasks.jsonl", *new], "pretrained"),
                      (["--out", held], "--overwrite")]:
        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, [*row, "--cache", tmp_path / "cache", *SMALL])])
        with pytest.raises(SystemExit) as stop:
            train.main(train.parse_args())
        error = capfd.readouterr().err
        assert stop.value.code == 2 and error.strip().count("\n") == 0 and word in error
        assert sorted(tmp_path.rglob("*")) == before
    done = process("--out", held)
    assert done.returncode == 2 and done.stderr == error and done.stdout == ""


@pytest.mark.parametrize("row, word", [
    (["--scenario", "chess"], "compaction"), (["--method", "ppo"], "broadcast"), 
    (["--usage", "-0.1"], "at least 0"), (["--usage", "nan"], "at least 0"), (["--gain-weight", "much"], "float"), (["--steps", "-1"], "at least 0"),
    (["--temperature", "0"], "at least 0.01"), (["--lr", "-1"], "at least 0"), (["--group-size", "0"], "at least 1"), (["--speed", "9"], "--speed"),
    (["--steps", "1.5"], "int"),
])
def test_bad_flags(capsys, row, word):
    with pytest.raises(SystemExit) as stop:
        train.parse_args(row)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.strip().count("\n") == 0 and word in error


def test_a_group_of_one_is_warned_about(tmp_path, cache):
    done = command("--out", tmp_path / "run", "--cache", cache, *SMALL, "--group-size", 1, "--method", "mosaic")
    assert done.returncode == 0 and "group of one" in done.stdout


def test_a_kept_warm_start_is_announced_and_belongs_to_its_code(tmp_path, monkeypatch, capsys):
    """The second run uses it, and says from when it is and how to make it anew; another version of anything it runs does not."""
    args = settled("--warm-start", 2, "--cache", tmp_path)
    task = Task()
    train.warm_tiny_model(task, args)
    assert "is used" not in capsys.readouterr().out and len(list(tmp_path.iterdir())) == 1
    train.warm_tiny_model(task, args)
    said = capsys.readouterr().out
    assert "the warm start of 20" in said and "--fresh makes it anew" in said and len(list(tmp_path.iterdir())) == 1
    plain = train.inspect.getsource
    for part in (rollout, train.infogain, train.descend, train.backward, train.adamw, train.masters, train.warm_start, train.tiny_model):
        before = len(list(tmp_path.iterdir()))
        monkeypatch.setattr(train.inspect, "getsource", lambda other: plain(other) + "# edited" * (other is part))
        train.warm_tiny_model(task, args)
        assert len(list(tmp_path.iterdir())) == before + 1
