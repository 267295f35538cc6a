"""What several test files need: the source files on the path, the command line, a small random policy, scripted attempts."""
import contextlib
import io
import os
import random
import runpy
import subprocess
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"     # here and in the runs that tests start: tiny work, and a busy machine slows it less
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import rollout  # noqa: E402
import train    # noqa: E402

train.transformers.utils.logging.disable_progress_bar()      # as train.main does


@pytest.fixture(scope="session")
def tokenizer():
    return rollout.tiny_tokenizer()


@pytest.fixture(scope="session")
def policy(tokenizer):
    """The tiny Qwen3 after a very short warm start: it acts, mostly well-formed, and knows little."""
    model = train.tiny_model(tokenizer, seed=0)
    for scenario in rollout.WINDOWS:
        args = settled("--scenario", scenario, "--warm-start", 40, "--habits", "hesitant")
        train.warm_start(model, rollout.Task(scenario, args.window), tokenizer, args, attempts=8, lr=1e-2)
    return model


def settled(*flags):
    """The settings that a run of the tiny model with these flags has."""
    args = train.parse_args([str(flag) for flag in flags])
    train.settle(args, rollout.tiny_tokenizer())
    return args


def command(*args):
    """What `python train.py ARGS` does, in this process, which has imported all that takes seconds to import."""
    out, err, argv, sys.argv = io.StringIO(), io.StringIO(), sys.argv, ["train.py", *map(str, args)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else print(stop.code, file=err) or 1
    finally:
        sys.argv = argv
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def run_script(tokenizer):
    """Play scripted actions through the harness: a list of texts -> (contexts shown, the finished attempt)."""
    def run(question, task, actions):
        attempt, contexts = rollout.Attempt(question, task, tokenizer), []
        for action in actions:
            contexts.append(attempt.context)
            ids = action if isinstance(action, list) else written(tokenizer, action)
            attempt.act(ids, [-.5] * len(ids))
            if attempt.stop:
                return contexts, attempt
        raise AssertionError("the script ended before the attempt did")
    return run


def opening(tokenizer, text, texts=()):
    """The context that an attempt, or a subagent, begins with."""
    return [*rollout.preamble(tokenizer, texts), *rollout.message(tokenizer, text)]


def credited(trajectory, advantage):
    """The trajectory, with the same advantage for each of its sampled tokens."""
    for session in trajectory.sessions:
        session.advantages = [advantage * mask for mask in session.mask]
    return trajectory


def written(tokenizer, text):
    """Ids of a finished action: what a policy that writes `text` and ends its turn would have sampled."""
    return [*rollout.encode(tokenizer, text), rollout.control(tokenizer)[1]]


def random_attempts(tokenizer, count, seed=0):
    """Attempts by a policy that picks actions at random, most of them silly: (task, contexts shown, attempt)."""
    rng = random.Random(seed)
    for i in range(count):
        task = rollout.Task(["compaction", "subagent"][i % 2], rng.choice([60, 74, 90]), turns=rng.randint(1, 14))
        question = rollout.make_question(rng)
        attempt, contexts = rollout.Attempt(question, task, tokenizer), []
        while not attempt.stop:
            contexts.append(attempt.context)
            words = rng.choices(list(question.pages) + rollout.NAMES, k=rng.randint(0, 8))
            tag = rng.choices([*rollout.TAGS.split("|"), "compact", "none"], weights=[8, 1, 4, 4, 4, 3, 1])[0]
            text = {"compact": "<compact/>", "none": " ".join(words), "search": f"<search>{rng.choice(list(question.pages))}</search>"
                    }.get(tag, f"<{tag}>{' '.join(words)}</{tag}>")
            ids = written(tokenizer, text)[:rng.choice([3, task.limit, task.limit])]
            attempt.act(ids, [-rng.random() for _ in ids])
        yield task, contexts, attempt


TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
            "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}")


def byte_level_tokenizer():
    """A byte-level BPE tokenizer like Qwen's, trained on the toy texts: names of several tokens, `<think>` added, pad = <|endoftext|>."""
    rng = random.Random(0)
    texts = [part for opening in ("compaction", "subagent", "fork") for part in rollout.PLAIN[opening]]
    texts += [text for _ in range(50) for text in rollout.make_question(rng).pages.values()]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=310, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                        extra_special_tokens=["<|im_start|>"], chat_template=TEMPLATE)
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer
