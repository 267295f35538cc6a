"""What a run reports and what the evidence is computed from: small numbers by hand."""
import json
import math
import random
import sys
from functools import partial

import pytest
import torch
import train
from conftest import ROOT, random_attempts, settled
from infogain import answer_logprob

sys.path.insert(0, str(ROOT / "figures"))

import ablate       # noqa: E402
import contribution  # noqa: E402
import evidence     # noqa: E402
import walk         # noqa: E402
from report import notes, spans, summarize, valid_actions  # noqa: E402
from rollout import WINDOWS, Task, make_question  # noqa: E402


def test_summary_of_two_attempts(tokenizer, run_script):
    """One compacts because it asks to and then answers right: 3 sessions, 6 + 2 + 6 tokens, say. One is forced to: its third
    page does not fit; it never gets further than an error in its summary's place."""
    question = make_question(random.Random(0))
    a, b, c = question.pages
    asked = [f"<search>{a}</search>", "<compact/>", f"<summary>{a} : {question.answer}</summary>", f"<answer>{question.answer}</answer>"]
    forced = [f"<search>{a}</search>", f"<search>{b}</search>", f"<search>{c}</search>", "no summary", f"<search>{c}</search>"]
    made = [run_script(question, Task(turns=turns), script)[1].trajectory() for turns, script in ((12, asked), (5, forced))]
    for t in made:
        for s in t.sessions:
            s.gain = 1.
    summary = summarize(made, 2, tokenizer)
    assert summary["success"] == .5 and summary["answered"] == .5 and summary["out_of_turns"] == .5
    assert summary["sessions"] == 3 and summary["attempts_by_sessions"] == {3: 2} and summary["sessions_per_success"] == 3
    assert summary["sessions_compaction"] == 1 and summary["compactions_asked"] == .5
    assert summary["tokens_per_success"] == sum(sum(s.mask) for t in made for s in t.sessions)      # one success: all tokens are its cost
    assert valid_actions(made, tokenizer) == 8 / 9


def test_interval_by_hand():
    """1, 2, 3: standard deviation 1, three seeds: t = 4.30, so 2 +- 4.30 / sqrt 3."""
    assert evidence.interval([1., 2., 3.]) == (2., pytest.approx(4.30 / math.sqrt(3)))


def test_tables_of_a_made_up_sweep(tmp_path, capsys, monkeypatch):
    """Two seeds; Mosaic is .1 and .3 better than broadcast: +.20 +- 12.71 * .1414 / sqrt 2 = 1.27. In success per seed: the last
    evaluation, or the mean of all but the first."""
    keys = ("success_greedy sessions_per_success tokens_per_success out_of_turns gain_ordinary gain_compaction gain_subagent "
            "sessions_subagent compactions_asked sessions_compaction").split()
    for seed in (1, 2):
        for method in evidence.STYLE:
            for folder in (tmp_path / f"subagent-{seed}", tmp_path / f"ablation/raw/subagent-{seed}", tmp_path / f"starts/hasty/subagent-{seed}"):
                better = (.1, .3)[seed - 1] if method == "mosaic" and "raw" not in str(folder) else 0.
                lines = [{"step": step, "eval_success": .2 + better * step / 2, "eval_sessions": 3. - step,
                          **{f"eval_{key}": 1. for key in keys}, "eval_attempts_by_sessions": {"2": 1, "7": 3},
                          **{f"eval_{key}_by_pages": {"2": .25, "3": .5, "4": .75} for key in ("success", "sessions")}}
                         for step in (0, 1, 2)]
                (folder / method).mkdir(parents=True)
                (folder / method / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(sys, "argv", ["evidence.py", str(tmp_path)])
    evidence.main()
    rows = capsys.readouterr().out.splitlines()
    assert "| subagent, mosaic | 2 | 0.40 | 1.00 | 0.35 | 1.00 | 1.00 | 1.00 | 1 | 1.00 |" in rows
    assert any(row.startswith("| subagent, mosaic | 2 | +0.20 ± 1.27 | +0.00 ± 0.00 | +0.15 ± 0.95 |") for row in rows)
    assert "| subagent, mosaic | 0.25 | 0.50 | 0.75 | 0.25 | 0.50 | 0.75 |" in rows and "| subagent, fewest |  |  |  | 1 | 3 | 5 |" in rows
    assert "| hasty, subagent-2 | 0.20 | 0.50 | 3.00 | 1.00 | 1.00 |" in rows
    assert any(row.startswith("| subagent, raw | 2 | -0.20 ± 1.27 | +0.00 ± 0.00 | -0.15 ± 0.95 |") for row in rows)
    assert any("| 0% | 25% | 0% | 0% | 0% | 75% |" in row for row in rows)
    assert all((tmp_path.parent / name).stat().st_size > 10_000 for name in ("sweep.png", "utility.png", "ablation.png"))


def advantages(policy, tokenizer):
    """Of all tokens of thirty-two random attempts, in groups of eight, where two of three that answer are said to be right."""
    group = [attempt.trajectory() for _, _, attempt in random_attempts(tokenizer, 32)]
    for i, t in enumerate(group):
        t.reward = float(t.stop == "answered" and i % 3 > 0)
    score = partial(answer_logprob, policy, max_tokens=4096)
    train.score_sessions(group, tokenizer, score, score)
    train.credit(group, 8, usage=.5, gain_weight=.5)
    return [advantage for t in group for session in t.sessions for advantage in session.advantages]


@pytest.mark.parametrize("variant", ablate.VARIANTS)
def test_every_variant_changes_the_credit(policy, tokenizer, monkeypatch, variant):
    """A variant is a text replaced in today's source, where it stands exactly once; it runs, and the same attempts get other advantages."""
    module, function, _, _ = ablate.VARIANTS[variant]
    usual = advantages(policy, tokenizer)
    for owner in (module, train):       # put back after the test
        monkeypatch.setattr(owner, function, getattr(module, function))
    ablate.apply(variant)
    changed = advantages(policy, tokenizer)
    assert len(changed) == len(usual) and torch.tensor(changed).isfinite().all() and changed != pytest.approx(usual, abs=1e-3)
    monkeypatch.undo()
    assert advantages(policy, tokenizer) == usual


def test_spans():
    assert spans([0, 1, 1, 0, 1]) == [[1, 3], [4, 5]] and spans([1]) == [[0, 1]] and spans([0]) == []


def test_notes():
    """What a step tells a person at once: costs and a large gap in the first step; no variance and a skipped step in any."""
    line = {"seconds_rollout": 1.5, "gap_mean": .06, "gap_p99": .2, "groups_without_variance": .5, "skipped": 0}
    costs, gap = notes(line, first=True, failed=0)
    assert costs == "seconds_rollout 1.50" and ".060" in gap and "--dtype float32" in gap
    assert list(notes(line, first=False, failed=0)) == []
    silent, skipped = notes({**line, "groups_without_variance": 1, "skipped": 1}, first=False, failed=0)
    assert "no trajectory-level gradient" in silent and "skipped" in skipped


def test_steps_without_any_success_are_said():
    """Every fifth, in place of the line about groups that are all equal."""
    line = {"groups_without_variance": 1, "skipped": 0}
    assert ["no attempt has succeeded for 5 steps" in note for note in notes(line, False, failed=5)] == [True]
    assert ["no trajectory-level gradient" in note for note in notes(line, False, failed=6)] == [True]


# ---------------------------------------------------------------- contributions and the walk-through

ACTIONS = ["<search>{}</search>", "<search>{}</search>", "<compact/>", "<summary>x : anna</summary>", "<search>{}</search>"]


def scripted(run_script, last, turns=20):
    question = make_question(random.Random(0), clues=3)
    pages, made = iter(question.pages), []
    for action in [*ACTIONS, last]:
        made.append(action.format(next(pages)) if "{}" in action else action)
    return run_script(question, Task(turns=turns), made)[1].trajectory()


def test_states_by_the_actions_that_lead_to_them(run_script):
    """Two searches, a compaction asked for, its summary, a search, the answer: states after 0, 2, 4 and 5 actions. Without an answer
    nothing follows from the last one."""
    assert contribution.states_of(scripted(run_script, "<answer>anna</answer>")) == [0, 2, 4, 5]
    assert contribution.states_of(scripted(run_script, "nothing", turns=6)) == [0, 2, 4, None]


def test_values_replay_the_attempts_own_actions(run_script, tokenizer, monkeypatch):
    """A policy that is right if two actions have been taken, of which one was a search that it remembers: V = 0 at the start, then 1.
    Equal states of two attempts are played on from once."""
    played = []

    def play(model, tokenizer, attempts, *_):
        played.extend(attempts)
        for attempt in attempts:
            attempt.answer = attempt.question.answer if attempt.turns >= 2 else ""
            attempt.end("answered")
    monkeypatch.setattr(contribution, "play", play)
    run = train.Run(settled(), Task(), tokenizer, None)
    both = [scripted(run_script, "<answer>anna</answer>"), scripted(run_script, "nothing", turns=6)]
    assert contribution.values(None, run, both) == [[0., 1., 1., 1.], [0., 1., 1., 0.]]
    assert len(played) == 4 * contribution.CONTINUATIONS and max(attempt.turns for attempt in played) == 5


def test_correlation_by_hand():
    """1 2 3 against 2 4 6.. is 1, against its negative -1; a side that does not vary has none; few pairs have none."""
    assert contribution.correlation([(x, 2 * x) for x in range(5)]) == pytest.approx(1)
    assert contribution.correlation([(x, -x) for x in range(5)]) == pytest.approx(-1)
    assert math.isnan(contribution.correlation([(x, 1) for x in range(5)])) and math.isnan(contribution.correlation([(0, 1), (1, 0)]))


@pytest.mark.parametrize("scenario", ["compaction", "subagent"])
def test_what_a_careful_reader_would_score(tokenizer, monkeypatch, scenario):
    """One page leaves 6 names, two of three pages 3, three of four 2, and all of them the answer, also after summaries and reports."""
    monkeypatch.setattr(contribution, "answer_logprob", lambda model, contexts, answers: torch.full((len(contexts),), -.5))
    run = train.Run(settled("--scenario", scenario), Task(scenario, WINDOWS[scenario]), tokenizer, None)
    rows = contribution.reading(run)
    left = {(clues, known): round(math.exp(-careful)) for clues, known, _, careful in rows}
    assert left == {(clues, known): 1 if known == clues else {1: 6, 2: 3, 3: 2}[known] for clues, known in left}
    assert {(2, 2), (3, 3), (4, 4)} <= set(left)
    assert f"| {scenario}, 2 | -0.50 (-1.79) | -0.50 (0.00) |  |  |" in contribution.reading_table({scenario: rows})


def test_contributions_of_a_run(policy, tokenizer, tmp_path, monkeypatch, capsys):
    """From the command line, for the start and one method: a row each, and the figure."""
    train.save(tmp_path / "start", policy, tokenizer)
    args = train.parse_args(["--model", str(tmp_path / "start"), "--steps", "0", "--eval-questions", "2", "--out", str(tmp_path / "run"),
                             "--method", "mosaic"])
    train.main(args)
    monkeypatch.setattr(sys, "argv", ["contribution.py", str(tmp_path / "run"), "--questions", "2"])
    contribution.main()
    rows = capsys.readouterr().out.splitlines()
    for row in ("| compaction, start |", "| compaction, mosaic |", "| compaction, 2 |"):       # the last one: how well the start reads
        assert any(line.startswith(row) for line in rows)
    assert (tmp_path / "contribution.png").stat().st_size > 10_000


@pytest.mark.parametrize("scenario", ["compaction", "subagent"])
def test_the_walk_through_shows_every_equation(scenario, policy, tokenizer, tmp_path, monkeypatch, capsys):
    """Scripted, and with a saved model; what it prints as the advantage of the first action is what `credit` gave it."""
    train.save(tmp_path / "model", policy, tokenizer)
    for flags in (["--scenario", scenario], ["--scenario", scenario, "--model", str(tmp_path / "model"), "--seed", "1"]):
        monkeypatch.setattr(sys, "argv", ["walk.py", *flags])
        walk.main()
        said = capsys.readouterr().out
        assert all(f"({number})" in said for number in (1, 2, 3, 4, 5)) and said.count("--- Attempt") == 4
    group, words = walk.scripted(scenario, 0)
    train.credit(group, 4, train.parse_args([]).usage, train.parse_args([]).gain_weight)
    first = group[0].sessions[0]
    walk.show_equations(group, words, train.parse_args([]).usage, train.parse_args([]).gain_weight)
    line = next(line for line in capsys.readouterr().out.splitlines() if "attempt 1, session 1" in line)
    assert f"= {first.advantages[spans(first.mask)[0][0]]:+.2f}" in line
