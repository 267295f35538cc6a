"""What a user may bring: models that are not what the fast path assumes, tokenizers, templates, windows, answers."""
from dataclasses import replace

import pytest
import torch
from conftest import byte_level_tokenizer, settled, written
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, GraniteConfig, GraniteForCausalLM,
                          MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM)

import rollout
import train
from figures.report import agreement
from rollout import Question, Task, answer_tokens, encode, header, keeps_keys, least_window

SIZE = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, initializer_range=.3)


@pytest.fixture(scope="module")
def bpe():
    return byte_level_tokenizer()


@pytest.fixture
def folder(bpe, tmp_path):
    """A small Qwen3 as a hub would give it."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(bpe), head_dim=16, tie_word_embeddings=True, **SIZE))
    model.save_pretrained(tmp_path / "model")
    bpe.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def loaded(folder, *flags):
    """What a run of this model starts from."""
    args = train.parse_args(["--model", str(folder), "--out", str(folder.parent / "run"), *flags])
    tokenizer = train.load_tokenizer(args)
    return train.load_model(args, train.settle(args, tokenizer), tokenizer)


def refused(capsys, work):
    """The one line that says why some work ends with exit status 2."""
    with pytest.raises(SystemExit) as stop:
        work()
    error = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and "\n" not in error and "Traceback" not in error
    return error


def small(cls, config):
    torch.manual_seed(0)
    return cls(config).eval()


# ---------------------------------------------------------------- models

def test_a_plain_model_takes_the_fast_path(folder):
    assert keeps_keys(loaded(folder))


def test_eager_attention_is_read_plainly(bpe, folder, capsys):
    """It takes boolean masks for numbers: slots and trees would be off by nats, with exit status 0."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    train.check_model(model)
    assert not keeps_keys(model) and "read plainly" in capsys.readouterr().err
    attempts = rollout.sample_attempts(model, bpe, [Question("q", "anna", {"q": "anna"})] * 3, Task("compaction", 1200, 2, 16, True),
                                       torch.rand(3, 2, 16))
    for s in (s for t in attempts for s in t.sessions):
        logps = model(input_ids=torch.tensor([s.ids])).logits[0].log_softmax(-1)[:-1].gather(1, torch.tensor(s.ids)[1:, None])[:, 0]
        assert all(abs(a - b) < 1e-4 for a, b, mask in zip(s.logps[1:], logps.tolist(), s.mask[1:]) if mask)


def test_keys_and_values_of_different_sizes_are_read_plainly(capsys):
    config = DeepseekV3Config(vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
                              num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
                              topk_group=1, first_k_dense_replace=2, kv_lora_rank=12, q_lora_rank=8, qk_rope_head_dim=8,
                              qk_nope_head_dim=8, v_head_dim=12, n_shared_experts=1)
    model = small(DeepseekV3ForCausalLM, config)
    train.check_model(model)
    assert not keeps_keys(model) and "read plainly" in capsys.readouterr().err


def test_scaled_logits_are_refused():
    """Sampled and trained from the head alone, they would have the wrong temperature."""
    model = small(GraniteForCausalLM, GraniteConfig(vocab_size=64, logits_scaling=8., **SIZE))
    with pytest.raises(ValueError, match="scaled or capped"):
        train.check_model(model)


def test_a_sliding_window_without_layer_types_is_no_full_attention():
    model = small(MistralForCausalLM, MistralConfig(vocab_size=64, sliding_window=8, **SIZE))
    assert not keeps_keys(model)
    train.check_model(model)


def test_weights_that_are_no_numbers_are_refused(folder, capsys):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.base_model.layers[0].mlp.up_proj.weight.data[0, 0] = float("nan")
    model.save_pretrained(folder)
    assert "not finite" in refused(capsys, lambda: loaded(folder))


def test_truncated_weights_are_one_line(folder, capsys):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])
    assert "cannot be used" in refused(capsys, lambda: loaded(folder))


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_rows_without_a_token_are_left_out(bpe, folder, tied):
    """Sampled, they would vanish on decoding, so that an answer that holds two of them would be right."""
    model = small(Qwen3ForCausalLM, Qwen3Config(vocab_size=len(bpe) + 7, head_dim=16, tie_word_embeddings=tied, **SIZE))
    model.save_pretrained(folder)
    ids = torch.arange(9)[None]
    ours = loaded(folder)
    assert ours(input_ids=ids).logits.shape[-1] == len(bpe) == ours.config.vocab_size
    assert torch.allclose(ours(input_ids=ids).logits, model(input_ids=ids).logits[..., :len(bpe)], atol=1e-5)


def test_fewer_embedding_rows_than_tokens_are_refused(bpe, folder, capsys):
    small(Qwen3ForCausalLM, Qwen3Config(vocab_size=len(bpe) - 3, head_dim=16, **SIZE)).save_pretrained(folder)
    assert "embeddings" in refused(capsys, lambda: loaded(folder))


def test_buffers_are_saved_with_the_parameters(folder, bpe, tmp_path):
    model = loaded(folder)
    model.base_model.register_buffer("expert_bias", torch.arange(3.))
    train.save(tmp_path / "saved", model, bpe, [torch.zeros_like(p) for p in model.parameters()])
    from safetensors.torch import load_file
    saved = load_file(tmp_path / "saved/model.safetensors")
    assert saved["model.expert_bias"].tolist() == [0., 1., 2.] and not saved["model.embed_tokens.weight"].any()
    assert len(saved) == len(list(model.parameters())) + 1


def test_the_tiny_model_can_be_bfloat16(tmp_path):
    args = settled("--dtype", "bfloat16", "--warm-start", 2, "--cache", tmp_path, "--device", "cpu")
    assert train.load_model(args, Task(), rollout.tiny_tokenizer()).dtype == torch.bfloat16


def test_log_probabilities_that_are_no_numbers_end_the_run(policy, tokenizer, tmp_path, capsys, monkeypatch):
    """A learning rate far too large: one line, not 'index 315 is out of bounds'."""
    broken = train.copy.deepcopy(policy)
    broken.base_model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(FloatingPointError):
        rollout.sample_attempts(broken, tokenizer, [rollout.make_question(train.seeded(0))], Task(), torch.rand(1, 20, 14))
    def raises(args):
        raise FloatingPointError("no longer numbers")
    monkeypatch.setattr(train, "main", raises)
    assert "smaller --lr" in refused(capsys, lambda: train.run_command(settled("--out", tmp_path)))
    assert "at most 1" in refused(capsys, lambda: train.parse_args(["--lr", "1e20"]))


def test_statistics_of_more_than_sixteen_million_tokens():
    assert agreement(torch.zeros(2 ** 24 + 2))["gap_p99"] == 0


# ---------------------------------------------------------------- tokenizers and templates

TEMPLATES = {"other words": "{{ messages[0].content }}<|assistant|>", "no generation prompt": "{% for m in messages %}{{ m.content }}{% endfor %}",
             "refuses": "{{ raise_exception('system message first') }}", "none": None}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_without_chatmls_opening_gives_the_plain_one(template):
    """Else the whole user message would land in every header, or a traceback."""
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = TEMPLATES[template]
    assert tokenizer.decode(header(tokenizer)) == "assistant\n"


def test_added_tokens_in_a_text_stay_text(bpe):
    """Special or not: `<think>` in a page is no thought of the model's."""
    for text in ("<think>", "</think>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        ids = encode(bpe, f"a {text} b")
        assert bpe.convert_tokens_to_ids(text) not in ids and bpe.decode(ids) == f"a {text} b"


def merging_tokenizer():
    """A byte-level tokenizer that has merged `>d`, as Qwen's has."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    core.train_from_iterator([">d", ">d", "avid", "avid"] * 9, trainers.BpeTrainer(
        vocab_size=262, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=["<|im_start|>"])


def test_the_answers_tokens_are_those_that_the_model_would_write():
    """`<answer>david` is `...`, `>d`, `avid` to the model: these two are scored, not `>`, `d`, `avid`, which it never writes."""
    tokenizer = merging_tokenizer()
    opening, answer = answer_tokens(tokenizer, "david")
    assert [tokenizer.decode([i]) for i in answer] == [">d", "avid"] and tokenizer.decode(opening) == "<answer"
    whole = encode(tokenizer, "<answer>david</answer>")
    assert whole[:len(opening) + len(answer)] == opening + answer


# ---------------------------------------------------------------- answers that no action can give

def composing_tokenizer():
    tokenizer = byte_level_tokenizer()
    core = tokenizer.backend_tokenizer
    core.normalizer = normalizers.NFC()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=["<|im_start|>"])


@pytest.mark.parametrize("answer, word", [
    ("cafe\u0301", "no action can give"), ("<answer>", "no action can give"), ("lone \ud800", "no action can give"),
    ("anna " * 60, "more than --limit")])
def test_an_answer_that_no_action_can_give_is_an_error(answer, word, capsys):
    tokenizer = composing_tokenizer()
    question = Question("q", " ".join(answer.split()), {"q": "text"})
    assert word in refused(capsys, lambda: train.check_answer(question, "question 1", 48, tokenizer))
    train.check_answer(replace(question, answer="caf\u00e9"), "question 1", 48, tokenizer)


# ---------------------------------------------------------------- windows

@pytest.mark.parametrize("scenario", rollout.WINDOWS)
def test_the_default_window_suits_the_tokenizer(bpe, scenario, capsys):
    """Whatever a pretrained model's tokenizer makes of the texts, a faultless agent can answer; a smaller window is refused."""
    args = train.parse_args(["--scenario", scenario, "--model", "any", "--limit", "110"])
    task, rng = train.settle(args, bpe), train.seeded("any")
    assert task.window == args.window
    for _ in range(20):
        question = rollout.make_question(rng, task.says["question"])
        assert rollout.demonstrate(question, task, bpe, rng, rollout.Habits(0, 0, 0, 0, 0, 0)).reward == 1
    args.window -= 1
    assert f"use --window {task.window} or more" in refused(capsys, lambda: train.settle(args, bpe))


@pytest.mark.parametrize("scenario", rollout.WINDOWS)
def test_the_default_window_suits_the_users_questions(bpe, scenario, capsys):
    """Of two questions, the one with the longer page decides; one token less is refused, and the message names that question."""
    args = train.parse_args(["--scenario", scenario, "--model", "any", "--tasks", "mine.jsonl"])
    tasks = [Question("Which river?", "Daugava", {"Riga": "on the Daugava " * n}) for n in (2, 9)]
    task = train.settle(args, bpe, tasks)
    assert task.own and task.window == args.window == least_window(tasks[1], task, bpe) > least_window(tasks[0], task, bpe)
    attempt = rollout.Attempt(tasks[1], task, bpe)
    attempt.act(written(bpe, "<search>Riga</search>"), [0.] * len(written(bpe, "<search>Riga</search>")))
    assert attempt.log[-1][0] == "observe" and not attempt.stop
    args.window -= 1
    error = refused(capsys, lambda: train.settle(args, bpe, tasks))
    assert "question 2 of mine.jsonl" in error and f"use --window {task.window} or more" in error


@pytest.mark.parametrize("scenario", rollout.WINDOWS)
@pytest.mark.parametrize("flags", [["--window", "30"], ["--limit", "70"]])
def test_a_window_without_room_for_a_page_is_refused(tmp_path, scenario, flags, capsys):
    """And the one that the message names does: also after the longest summary, a search shows its page."""
    tokenizer = rollout.tiny_tokenizer()
    error = refused(capsys, lambda: settled("--scenario", scenario, *flags))
    args = settled("--scenario", scenario, *flags, "--window", error.split("use --window ")[1].split()[0])
    task = Task(scenario, args.window, args.turns, args.limit)
    question = rollout.make_question(train.seeded("any"), clues=4)
    first, attempt = list(question.pages)[0], rollout.Attempt(question, task, tokenizer)
    actions = [f"<search>{first}</search>"]
    if scenario == "compaction":
        summary = written(tokenizer, "<summary>" + "anna " * (args.limit - 3) + "</summary>")
        actions = ["<compact/>", summary, *actions]
        assert len(summary) == args.limit
    else:
        actions = [written(tokenizer, "<fork>" + "anna " * (args.limit - 3) + "</fork>"), *actions]
    for action in actions:
        ids = action if isinstance(action, list) else written(tokenizer, action)
        attempt.act(ids, [0.] * len(ids))
    assert attempt.log[-1][0] == "observe" and not attempt.stop


def test_the_default_windows_have_room_for_every_question():
    for scenario, window in rollout.WINDOWS.items():
        for i in range(50):
            assert least_window(rollout.make_question(train.seeded(i)), Task(scenario, window), rollout.tiny_tokenizer()) <= window
