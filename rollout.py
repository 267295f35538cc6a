"""Sessions: an agent with a small context window searches, compacts its context, forks subagents, and answers.

One attempt at a question is a *trajectory*. It is recorded as a flat log of fragments of token ids: what the harness
showed and what the model wrote. `segment` cuts the log into *sessions*, the unit that Mosaic credits:

    ordinary     the main agent in one context, cut at a compaction, at a fork, at the end
    compaction   the agent sees its whole context and writes a summary; the next session starts from that alone
    subagent     a fresh context with a delegated sub-question; only its report reaches the parent

    question   page     page    compaction         summary   page
    |--ordinary: search, search--|--compaction--|  |--ordinary: search, answer--|

Text becomes tokens at the edges only: each fragment is encoded once, on its own, and what the model wrote is kept as the
ids that it sampled. Run `python rollout.py` for one scripted trajectory of each scenario, cut into its sessions.
"""
import json
import random
import re
from dataclasses import dataclass
from functools import lru_cache
from os.path import commonprefix
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import DynamicCache, PreTrainedTokenizerFast

WINDOWS = {"compaction": 74, "subagent": 60}         # the scenarios, and a window that is too small for all pages,
PLAIN_WINDOWS = {"compaction": 496, "subagent": 344}    # in words of the tiny tokenizer, and in those of a pretrained one
KINDS = ("ordinary", "compaction", "subagent")
NAMES = "anna boris clara david emma felix greta hugo ines jonas kira leon maria nils olga paul".split()
TOPICS = {"city": "paris rome oslo cairo lima delhi", "pet": "cat dog parrot hamster rabbit turtle",
          "drink": "tea coffee milk juice cocoa water", "sport": "chess tennis judo rowing golf hockey"}
CLUES = " ".join(TOPICS.values()).split()
# What the harness says to the tiny model, in single words and without instructions, and to a model that knows language.
TERSE = {"question": "{}", "nothing": "nothing found", "error": "error", "full": "window full", "compact": "<compact/>",
         "compaction": (), "subagent": (), "fork": ()}
REQUEST = "Your window is full. Reply with <summary>clues done : names left</summary>"
PLAIN = {
    "question": "Which one person fits all of these clues: {}?",
    "nothing": "Nothing found.",
    "error": "That is no action. Reply with one action, such as <search>clue</search>",
    "full": "Your window is full.",
    "compact": REQUEST,
    # how each context opens: a system text, then a worked example as messages of the user and the assistant in turn
    "compaction": ("""Find the answer by searching. Reply with one action and nothing else:
<search>clue</search> shows the page of a clue.
<compact/> clears a full window. You keep the question and your <summary>clues done : names left</summary>
<answer>name</answer> ends the task. The answer is the only name on the pages of all clues.""",
                   "Which one person fits all of these clues: berlin jazz horse?", "<search>berlin</search>",
                   "eva rosa tim carl", "<search>jazz</search>", "rosa ben eva",
                   "<compact/>", REQUEST,
                   "<summary>berlin jazz : eva rosa</summary>", "<summary>berlin jazz : eva rosa</summary>",
                   "<search>horse</search>", "lea rosa fred", "<answer>rosa</answer>"),
    "subagent": ("""Find the answer by searching. Reply with one action and nothing else:
<search>clue</search> shows the page of a clue.
<fork>clue clue</fork> asks a helper for the names on the pages of some clues.
<answer>name</answer> ends the task. The answer is the only name on the pages of all clues.""",
                 "Which one person fits all of these clues: berlin jazz horse?", "<search>berlin</search>",
                 "eva rosa tim carl", "<fork>jazz horse</fork>", "<report>rosa ben</report>", "<answer>rosa</answer>"),
    "fork": ("""Search the clues in <fork>. Reply with one action and nothing else:
<search>clue</search> shows the page of a clue.
<report>names</report> ends your work with the names on the pages of all clues.""",
             "<fork>jazz horse</fork>", "<search>jazz</search>", "rosa ben eva fred",
             "<search>horse</search>", "lea rosa ben", "<report>rosa ben</report>"),
}
SIGNALS = [says[key] for says in (TERSE, PLAIN) for key in ("nothing", "error", "full", "compact")]      # what is no page
TAGS = "search|answer|fork|report|summary"
FREE = rf"((?:(?!</?(?:{TAGS})>|<compact/>).)*)"                    # text without any tag
ACTION = re.compile(rf"{FREE}(?:<({TAGS})>{FREE}</\2>|<compact/>)\s*", re.DOTALL)


@dataclass(frozen=True)
class Task:
    """The limits of an attempt. Window and limit are in tokens, turns counts all actions of all agents."""
    scenario: str = "compaction"
    window: int = 74            # no model call ever exceeds it
    turns: int = 12
    limit: int = 14             # tokens of one action
    plain: bool = False         # whether the harness speaks in sentences and explains itself, for a pretrained model

    @property
    def says(self):
        return PLAIN if self.plain else TERSE


@dataclass
class Question:
    """A question, its one right answer, and the pages that a search can return (query -> text)."""
    question: str
    answer: str
    pages: dict


@dataclass
class Session:
    """One stretch of model calls in one context (design, section 3.1). All lists are as long as `ids`."""
    kind: str
    ids: list                   # every token the model saw and wrote, as sampled
    mask: list                  # 1 where the model wrote the token in this session
    logps: list                 # log-probability at sampling time, 0 where mask is 0
    before: list                # the state before: token ids of a context at which the agent is about to act
    after: list = None          # the state after
    closing: int = 0            # where the closing action starts; len(ids) if it has none
    stop: str = ""              # compact, fork, summary, report, answered, out of turns, out of window
    gain: float = float("nan")  # information gain of the session, filled in by infogain.py; nan: it has none
    normalized_gain: float = 0.
    scores: tuple = ()          # score before and after, floored


@dataclass
class Trajectory:
    """One attempt: its sessions, why it stopped, what it answered ("" for nothing), its reward."""
    question: Question
    sessions: list
    stop: str                   # answered, out of turns, out of window
    answer: str
    reward: float
    advantage: float = 0.       # A', filled in by train.py


# ---------------------------------------------------------------- the toy search task

def make_question(rng, wording="{}", clues=3, page=6):
    """Draw a question with a world of its own: exactly one person is on all `clues` pages of `page` names each.

    wording: how the clues are put into a question. Each page holds the answer, a decoy for every other clue (who is on all
    pages but that clue's), and others.
    """
    topics = rng.sample(sorted(TOPICS), clues)
    words = [rng.choice(TOPICS[topic].split()) for topic in topics]
    answer, *others = rng.sample(NAMES, len(NAMES))
    decoys, others = others[:clues], others[clues:]
    pages = {}
    for i, word in enumerate(words):
        fill = page - clues                     # the answer and clues - 1 decoys stand on the page already
        names = [answer, *decoys[:i], *decoys[i + 1:], *others[i * fill:(i + 1) * fill]]
        pages[word] = " ".join(rng.sample(names, len(names)))
    return Question(wording.format(" ".join(words)), answer, pages)


def read_tasks(path):
    """Questions from a JSONL file: one object {"question", "answer", "pages": {query: text}} a line. ValueError names the line."""
    questions = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            task = json.loads(line.decode(), object_pairs_hook=unique)
            if not isinstance(task, dict) or {"question", "answer", "pages"} - task.keys():
                raise ValueError('a line must be an object with "question", "answer" and "pages"')
            if not all(isinstance(task[key], str) and task[key].strip() for key in ("question", "answer")):
                raise ValueError("question and answer must be texts that are not empty")
            if not isinstance(task["pages"], dict) or not all(isinstance(text, str) for text in task["pages"].values()):
                raise ValueError("pages must be an object: query -> text")
            answer = " ".join(task["answer"].split())
            if not any(answer in " ".join(text.split()) for text in task["pages"].values()):
                raise ValueError(f"the answer {answer!r} is on no page, so no search can find it")
        except ValueError as error:         # UnicodeDecodeError and JSONDecodeError are ValueErrors, too
            raise ValueError(f"{path}, line {number}: {error}") from None
        questions.append(Question(task["question"], answer, task["pages"]))
    return questions


def unique(pairs):
    """An object of a JSON file, which may name each key once."""
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} is there twice")
    return dict(pairs)


# ---------------------------------------------------------------- text and tokens

def tiny_tokenizer():
    """A word-level tokenizer for the toy world: every name, clue and tag is one token, white space is none."""
    tags = [f"<{slash}{tag}>" for tag in TAGS.split("|") for slash in ("", "/")]
    words = ["<unk>", "user", "assistant", ":", *" ".join(SIGNALS[:4]).split(), *tags, *NAMES, *CLUES]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(),
                                                  pre_tokenizers.Split(Regex("</?[a-z]+/?>"), "isolated")])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<|im_end|>",
                                   pad_token="<|endoftext|>", extra_special_tokens=["<|im_start|>"])


@lru_cache(maxsize=4096)
def encode(tokenizer, text):
    """Token ids of a text, all of them ordinary: a control token spelled out in `text` stays text."""
    text = text.encode("utf-8", "replace").decode()         # a lone surrogate is no character that a tokenizer could take
    return tuple(tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)


@lru_cache
def control(tokenizer):
    """The ids of ChatML's two control tokens, start and end of a message."""
    return tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])


@lru_cache
def header(tokenizer):
    """The ids that open the agent's message. With thinking off, some chat templates put an empty thought there."""
    chat = tokenizer.chat_template and tokenizer.apply_chat_template(
        [{"role": "user", "content": ""}], tokenize=False, add_generation_prompt=True, enable_thinking=False)
    return tokenizer("assistant\n" + (chat or "").rpartition("<|im_start|>assistant\n")[2], add_special_tokens=False).input_ids


@lru_cache
def preamble(tokenizer, texts):
    """The ids that contexts open with: a system text and the messages of an example; none where there are no texts."""
    (start, end), ids = control(tokenizer), []
    for i, text in enumerate(texts):
        who = header(tokenizer) if i and i % 2 == 0 else encode(tokenizer, "user\n" if i else "system\n")
        ids += [start, *who, *encode(tokenizer, text), end, *encode(tokenizer, "\n")]
    return ids


def show(tokenizer, context, text, texts=()):
    """The ids to append to a context so that it shows `text` next and the agent is to act. They close the agent's message
    if the agent did not; where the context is empty, they begin with the preamble made of `texts`."""
    (start, end), newline = control(tokenizer), encode(tokenizer, "\n")
    ids = [*([end] if context[-1] != end else []), *newline] if context else preamble(tokenizer, texts)
    return [*ids, start, *encode(tokenizer, "user\n"), *encode(tokenizer, text), end, *newline, start, *header(tokenizer)]


@lru_cache(maxsize=4096)
def read_action(tokenizer, ids):
    """The (tag, body) of a turn, a tuple of ids: free text and exactly one action tag at its end. Anything else is ("", "")."""
    match = ACTION.fullmatch(tokenizer.decode(ids[:-1])) if ids[-1] == control(tokenizer)[1] else None
    return ("", "") if match is None else (match[2] or "compact", " ".join((match[3] or "").split()))


# ---------------------------------------------------------------- the harness

def attempt(question, task, tokenizer):
    """One attempt as a coroutine: yields (role, context) where the model is to act, is sent (ids, log-probabilities).

    role: main, compaction or subagent. context: all token ids that the model is to see. Returns (log, answer). The log
    is a list of (event, ids, logps): `open` the first context, `act` what the model wrote, `observe` a page or an error,
    `compact` the request for a summary, `resume` the context that the summary opens, `fork` a subagent's context,
    `return` its report in the parent's context, and at the end `stop` with the reason in place of ids. ValueError: the
    question does not fit the window.
    """
    room = space(task, tokenizer)
    context, parent, role = show(tokenizer, [], question.question, task.says[task.scenario]), None, "main"
    if len(context) > room:
        raise ValueError(f"a question of {len(context)} tokens does not fit a window with room for {room}")
    log = [("open", context, [])]
    for _ in range(task.turns):
        ids, logps = yield role, context
        log.append(("act", ids, logps))
        written = context + ids
        tag, body = read_action(tokenizer, tuple(ids))
        if tag == "answer" and role == "main":
            return log + [("stop", "answered", [])], body
        event, text = respond(question, task, role, tag, body,
                              fits=lambda text: len(written) + len(show(tokenizer, written, text)) <= room)
        base = {"resume": [], "fork": [], "return": parent}.get(event, written)
        new = show(tokenizer, base, text, task.says["fork" if event == "fork" else task.scenario])
        if len(base) + len(new) > room and event != "compact":
            return log + [("stop", "out of window", [])], ""
        log.append((event, new, []))
        parent = written if event == "fork" else parent
        role = {"compact": "compaction", "resume": "main", "fork": "subagent", "return": "main"}.get(event, role)
        context = base + new
    return log + [("stop", "out of turns", [])], ""


def space(task, tokenizer):
    """How long a context may get: it leaves room for one action and, if it may be compacted, for the request and the summary."""
    request = len(show(tokenizer, [None], task.says["compact"])) + task.limit
    return task.window - task.limit - (request if task.scenario == "compaction" else 0)


def respond(question, task, role, tag, body, fits):
    """The harness's (event, text) upon an action that is no answer. An action that is not allowed gets an error.

    fits: whether a text still fits the agent's context. If not, the main agent must compact, a subagent is sent home.
    """
    if role == "compaction":                                # whatever it wrote: without a summary, nothing is kept
        return "resume", question.question + (f"\n<summary>{body}</summary>" if tag == "summary" else "")
    if tag == "compact" and task.scenario == "compaction":
        return "compact", task.says["compact"]
    if tag == "fork" and task.scenario == "subagent" and role == "main":
        return "fork", f"<fork>{body}</fork>"
    if tag == "report" and role == "subagent":
        return "return", f"<report>{body}</report>"
    text = search(question.pages, body) or task.says["nothing"] if tag == "search" else task.says["error"]
    if fits(text) or (task.scenario, role) == ("subagent", "main"):
        return "observe", text
    return ("compact", task.says["compact"]) if task.scenario == "compaction" else ("return", task.says["full"])


def search(pages, query):
    """The page of exactly this query, else of the one that shares most words with it; "" if none shares any."""
    def shared(title):
        return len(set(re.findall(r"\w+", title.lower())) & set(re.findall(r"\w+", query.lower())))
    best = query if query in pages else max(pages, key=shared, default="")
    return pages[best] if best == query or shared(best) else ""


# ---------------------------------------------------------------- sessions

def segment(log):
    """Cut the log of one attempt into its sessions (design, section 3.1). Pure: token ids in, sessions out.

    A session that continues a context holds all of it, with mask 0 on what earlier sessions wrote, so that every
    sampled token has mask 1 in exactly one session.
    """
    sessions, parent = [], None

    def begin(kind, ids, before):
        sessions.append(Session(kind, list(ids), [0] * len(ids), [0.] * len(ids), before, closing=len(ids)))
        return sessions[-1]

    def end(stop, after):
        now.stop, now.after = stop, after

    for event, ids, logps in log:
        if event == "open":
            now = begin("ordinary", ids, before=ids)
        elif event in ("act", "observe"):
            wrote = event == "act"
            now.closing = len(now.ids) if wrote else len(now.ids) + len(ids)
            now.ids += ids
            now.mask += [int(wrote)] * len(ids)
            now.logps += logps if wrote else [0.] * len(ids)
        elif event == "compact":
            end("compact", now.ids[:now.closing])
            now = begin("compaction", now.ids + ids, before=now.after)
        elif event == "resume":
            end("summary", ids)
            now = begin("ordinary", ids, before=ids)
        elif event == "fork":
            end("fork", now.ids[:now.closing])
            parent = now
            now = begin("subagent", ids, before=parent.after)
        elif event == "return":
            end("report", parent.ids + ids)
            now = begin("ordinary", now.after, before=now.after)
        elif event == "stop":       # what a summary or a report would have brought never came
            end(ids, now.ids[:now.closing] if now.kind == "ordinary" else now.before)
    return [session for session in sessions if any(session.mask)]


# ---------------------------------------------------------------- batched sampling

def pad(rows, dtype=torch.long):
    """A list of lists -> (S, T) tensor, padded with 0 on the right, where no causal model can see it."""
    width = max(map(len, rows))
    flat = np.array([x for row in rows for x in row + [0] * (width - len(row))])        # numpy reads a list faster than torch
    return torch.from_numpy(flat).to(dtype).view(len(rows), width)                      # (S, T)


class SlotCache:
    """Keys and values of many contexts, each in a slot of its own, so that no token of a context is computed twice.

    Position p of a slot holds the key of token p of that slot's context. A query at position p sees positions 0..p of its
    own slot only; what lies beyond (padding, an abandoned context) is overwritten before it can be seen.
    """

    def __init__(self, slots, window):
        self.window, self.layers = window, {}
        self.held = [[] for _ in range(slots)]          # the ids whose keys each slot holds

    def read(self, model, slots, contexts):
        """Hidden state of the last token of each context (B, H). Computed is only what its slot does not hold yet, and equal
        contexts, as those of a group are at first, only once."""
        owner, device = {}, model.device                    # owner: distinct context -> the row that computes it, in ascending order
        source = [owner.setdefault(tuple(context), row) for row, context in enumerate(contexts)]
        rows = [*owner.values()]
        start = [min(shared(self.held[slot], context), len(context) - 1) for slot, context in zip(slots, contexts)]
        ids = pad([contexts[row][start[row]:] for row in rows]).to(device)                              # (D, N)
        self.slots, first = pad([[slots[row] for row in rows], [start[row] for row in rows]]).to(device)        # (D,) each
        positions = first[:, None] + torch.arange(ids.shape[1], device=device)                          # (D, N)
        self.positions = positions.clamp(max=self.window)               # the last place is for padding only
        begin, self.reach = min(start), max(map(len, contexts))
        visible = torch.arange(self.reach, device=device) <= positions[:, :, None]                      # (D, N, reach)
        hidden = model.base_model(input_ids=ids, position_ids=positions, attention_mask=visible[:, None],
                                  cache=self, use_cache=True).last_hidden_state.flatten(0, 1)           # (D * N, H)
        copies = [[slots[row], slot] for row, slot in zip(source, slots) if slots[row] != slot]
        if copies:
            origin, to = pad(copies).T.to(device)                                                       # (B - D,) each
            for store in self.layers.values():
                new = store[:, :, begin:self.reach]                                                     # (slots, 2 heads, new, D)
                new.index_copy_(0, to, new.index_select(0, origin))
        for slot, context in zip(slots, contexts):
            self.held[slot] = context
        zero = {row: i * ids.shape[1] - start[row] for i, row in enumerate(rows)}           # where in `hidden` its token 0 would be
        last = [zero[row] + len(contexts[row]) - 1 for row in source]
        return hidden.index_select(0, pad([last])[0].to(device))                                        # (B, H)

    def update(self, keys, values, layer, **_):
        """What an attention layer of transformers calls: stores keys and values (B, heads, N, D), returns all so far."""
        new = torch.cat([keys, values], 1)                                                              # (B, 2 heads, N, D)
        if layer not in self.layers:
            self.layers[layer] = new.new_zeros(len(self.held), new.shape[1], self.window + 1, new.shape[3])
        store = self.layers[layer]                                                      # (slots, 2 heads, window + 1, D)
        store.transpose(1, 2)[self.slots[:, None], self.positions] = new.transpose(1, 2)
        return store[:, :, :self.reach].index_select(0, self.slots).chunk(2, 1)         # (B, heads, reach, D) each


class TurnCache:
    """The same for models with layers that keep no keys but a running state (linear attention), which cannot be kept in
    slots or cut back to a prefix: every turn reads its whole contexts anew, padded on the left, and all its rows go on until
    the last one has ended."""

    def __init__(self):
        self.held = {}                                      # slot -> its context, in the order of the rows

    def read(self, model, slots, contexts):
        fresh = any(self.held.get(slot) != context[:-1] for slot, context in zip(slots, contexts))
        if fresh:
            self.held, self.cache, self.mask = {}, DynamicCache(config=model.config), torch.ones(len(contexts), 0, dtype=torch.long)
        self.held.update(zip(slots, contexts))
        new = [context if fresh else context[-1:] for context in self.held.values()]     # a row that has ended repeats its last token
        ids, mask = (pad([row[::-1] for row in rows]).flip(1) for rows in (new, [[1] * len(row) for row in new]))       # (B, N)
        self.mask = torch.cat([self.mask, mask], 1)                                     # (B, all so far)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1]:]           # (B, N)
        hidden = model.base_model(input_ids=ids.to(model.device), attention_mask=self.mask.to(model.device), use_cache=True,
                                  position_ids=positions.to(model.device), cache=self.cache).last_hidden_state[:, -1]   # (B, H)
        return hidden[[[*self.held].index(slot) for slot in slots]]


def shared(a, b):
    """How many tokens two contexts begin alike with."""
    return len(a) if b[:len(a)] == a else len(commonprefix([a, b]))         # the latter alone takes a Python loop


def keeps_keys(model):
    """Whether every layer attends to the keys of all tokens, so that contexts can be kept in slots and scored as trees."""
    return set(getattr(model.config, "layer_types", None) or ["full_attention"]) == {"full_attention"}


def draw(logits, uniforms, temperature):
    """Sample one token per row: the inverse of the cumulative distribution at the row's own uniform number.

    logits: (B, V). uniforms: (B,) in [0, 1). temperature: 0 takes the likeliest token.
    Returns tokens (B,) and their log-probabilities (B,) at this temperature (at 1 if it is 0), in float32.
    """
    logps = (logits.float() / (temperature or 1.)).log_softmax(-1)                      # (B, V)
    if temperature == 0:
        tokens = logps.argmax(-1)                                                       # (B,)
    else:
        mass = logps.exp().cumsum(-1)                                                   # (B, V)
        tokens = torch.searchsorted(mass, uniforms[:, None] * mass[:, -1:], right=True)[:, 0]       # (B,)
    return tokens, logps.gather(1, tokens[:, None])[:, 0]


@torch.inference_mode()
def rollout(model, tokenizer, questions, task, uniforms, temperature=1.):
    """Attempt every question (repeat it for a group), all attempts side by side. Returns a list of Trajectory.

    uniforms: (B, turns, limit) in [0, 1), one number per token that an attempt may sample, so that what it samples does not
    depend on the other attempts. An attempt that has finished its action waits with its next context until half of
    the batch does, so that contexts are read together, and tokens written together.
    """
    B, stop, keyed = len(questions), control(tokenizer)[1], keeps_keys(model)
    head, uniforms = model.get_output_embeddings(), uniforms.tolist()
    attempts = [attempt(question, task, tokenizer) for question in questions]
    where = [next(run) for run in attempts]                                 # the role and context that each attempt is in
    ids, logps = ([[] for _ in attempts] for _ in range(2))                 # the action that it writes
    running, turn, done = list(range(B)), [0] * B, {}
    slots = 2 * B if task.scenario == "subagent" else B                     # attempt i: slot i; its subagents: B + i
    cache = SlotCache(slots, task.window) if keyed else TurnCache()
    for first in range(0, slots, B) if keyed and task.plain else ():       # what all contexts open with is read once
        cache.read(model, range(first, first + B), [preamble(tokenizer, task.says["fork" if first else task.scenario])] * B)
    while running:
        reading, writing = ([i for i in running if bool(ids[i]) == begun] for begun in (False, True))
        rows = reading if not writing or keyed and len(reading) >= len(writing) else writing
        hidden = cache.read(model, [i + B * (where[i][0] == "subagent") for i in rows], [where[i][1] + ids[i] for i in rows])       # (W, H)
        numbers = pad([[uniforms[i][turn[i]][len(ids[i])] for i in rows]], torch.float)[0].to(hidden.device)       # (W,)
        drawn = draw(head(hidden), numbers, temperature)                                                            # (W,) each
        for i, token, logp in zip(rows, *(x.tolist() for x in drawn)):
            ids[i].append(token)
            logps[i].append(logp)
            if token == stop or len(ids[i]) == task.limit:
                try:
                    where[i] = attempts[i].send((ids[i], logps[i]))
                    ids[i], logps[i], turn[i] = [], [], turn[i] + 1
                except StopIteration as finished:
                    done[i] = finished.value
                    running.remove(i)
    return [finish(question, *done[i]) for i, question in enumerate(questions)]


def finish(question, log, answer):
    """The trajectory of a finished attempt; reward 1 for exactly the right answer, else 0."""
    return Trajectory(question, segment(log), log[-1][1], answer, float(answer == question.answer))


# ---------------------------------------------------------------- the scripted teacher

FORGET, EARLY, REPEAT = .35, .3, .2    # how often the teacher drops a name from a summary, compacts too early, repeats a search,
GUESS, BLIND = .45, .05                  # and answers before it can know: having seen something, having seen nothing


def inside(tag, text):
    """What the first `tag` of a text holds, as words; [] where there is none."""
    found = re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return found[1].split() if found else []


def read(text):
    """What a careful reader knows from a context's text: (opening, last) messages, clues done, names left, pages seen.

    Names left are those on every page, report and summary so far; None while there was none.
    """
    opening, *rest = re.findall(r"<\|im_start\|>\s*(?:user|assistant)\s*(.*?)\s*<\|im_end\|>", text, re.DOTALL)
    summary = " ".join(inside("summary", opening))
    done, left = [part.split() for part in summary.split(":")] if ":" in summary else ([], None)
    pages = 0
    for action, result in zip(rest[0::2], rest[1::2]):
        clues = inside("search", action) or inside("fork", action)
        if clues and result not in SIGNALS:
            names = inside("report", result) if "<report>" in result else result.split()
            done = done + [clue for clue in clues if clue not in done]
            left = [name for name in (names if left is None else left) if name in names]
            pages += "<search>" in action
    return (opening, rest[-1] if rest else ""), done, left, pages


def teacher(text, task, rng):
    """An imperfect agent's next action, read off its context's text; demonstrations of it warm up the tiny model."""
    (opening, last), done, left, pages = read(text)
    if last == task.says["compact"]:
        return f"<summary>{' '.join(done)} : {' '.join(name for name in left or [] if rng.random() > FORGET)}</summary>"
    delegated = inside("fork", opening)
    clues = delegated or [word for word in re.findall(r"\w+", opening.split("<summary>")[0]) if word in CLUES]
    todo = [clue for clue in clues if clue not in done]
    if delegated and (not todo or pages == 2 or pages and rng.random() < EARLY):
        return f"<report>{' '.join((left or [])[:6])}</report>"
    if not delegated and (not todo or rng.random() < (BLIND if left is None else GUESS)):
        return f"<answer>{rng.choice(left or NAMES)}</answer>"
    if task.scenario == "subagent" and not delegated and (pages == 2 or rng.random() < .6):
        return f"<fork>{' '.join(rng.sample(todo, rng.randint(1, len(todo))))}</fork>"
    if task.scenario == "compaction" and pages and rng.random() < EARLY:
        return "<compact/>"
    return f"<search>{rng.choice(clues if rng.random() < REPEAT else todo)}</search>"


def demonstrate(question, task, tokenizer, rng):
    """The trajectory of the teacher's attempt at a question."""
    run = attempt(question, task, tokenizer)
    role, context = next(run)
    while True:
        texts = task.says["fork" if role == "subagent" else task.scenario]
        text = tokenizer.decode(context[len(preamble(tokenizer, texts)):])       # the example is not its own work
        ids = [*encode(tokenizer, teacher(text, task, rng)), control(tokenizer)[1]]
        try:
            role, context = run.send((ids, [0.] * len(ids)))
        except StopIteration as finished:
            return finish(question, *finished.value)


# ---------------------------------------------------------------- a worked example

def spans(mask):
    """The stretches of 1 in a mask: [0, 1, 1, 0, 1] -> [[1, 3], [4, 5]]."""
    edges = [i for i, (a, b) in enumerate(zip([0, *mask], [*mask, 0])) if a != b]
    return [list(pair) for pair in zip(edges[0::2], edges[1::2])]


def describe(session, tokenizer):
    """A session as text, what the model wrote in it between [ and ]."""
    text, done = "", 0
    for begin, end in spans(session.mask):
        text += f"{tokenizer.decode(session.ids[done:begin])} [{tokenizer.decode(session.ids[begin:end])}] "
        done = end
    return (text + tokenizer.decode(session.ids[done:])).strip()


def demo():
    tokenizer, rng = tiny_tokenizer(), random.Random("demo 100")
    for scenario, window in WINDOWS.items():
        question = make_question(rng)
        trajectory = demonstrate(question, Task(scenario, window), tokenizer, rng)
        print(f"\nScenario {scenario}: who fits {question.question!r}? ({question.answer})")
        for clue, page in question.pages.items():
            print(f"  page {clue}: {page}")
        print(f"The teacher {trajectory.stop} {trajectory.answer!r}, reward {trajectory.reward}. Its sessions, its own tokens in []:")
        for i, session in enumerate(trajectory.sessions, 1):
            print(f"  {i}. {session.kind}, {len(session.ids)} tokens, ended by: {session.stop}")
            print(f"     {describe(session, tokenizer)}")


if __name__ == "__main__":
    demo()
