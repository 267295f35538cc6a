"""Sessions: an agent with a small context window searches, compacts its context, forks subagents, answers.

One attempt at a question is a *trajectory*. It is recorded as a flat log of fragments of token ids: what the
harness showed and what the model wrote. `segment` cuts the log into *sessions*, the unit that Mosaic credits:

    ordinary     the main agent in one context, cut at a compaction, at a fork, at the end
    compaction   the agent sees its whole context and writes a summary; the next session starts from that
    subagent     a fresh context with a delegated sub-question; only its report reaches the parent

    question   page     page    compaction         summary   page
    |--ordinary: search, search--|--compaction--|  |--ordinary: search, answer--|

Text becomes tokens at the edges only: each fragment is encoded once, on its own, and what the model wrote is
kept as the ids that it sampled. In this order: records, harness, `segment`, text and tokens, sampling many
attempts side by side; last the toy search task, its wording, its tokenizer, the teacher that demonstrates it.
"""
import json
import math
import re
import unicodedata
from codecs import BOM_UTF8
from dataclasses import dataclass, field
from functools import lru_cache
from os.path import commonprefix
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import DynamicCache, PreTrainedTokenizerFast

KINDS = ("ordinary", "compaction", "subagent")


@dataclass(frozen=True)
class Task:
    """The limits of an attempt. Window and limit are in tokens, turns counts all actions of all agents."""
    scenario: str = "compaction"
    window: int = 74            # no model call ever exceeds it
    turns: int = 20
    limit: int = 14             # tokens of one action
    plain: bool = False         # whether the harness speaks in sentences and explains itself
    own: bool = False           # whether the questions are a user's own, not about clues and names

    @property
    def says(self):
        return OWN if self.own else PLAIN if self.plain else TERSE


@dataclass
class Question:
    """A question, its right answer, and the pages that a search can return (query -> text)."""
    question: str
    answer: str
    pages: dict
    accepted: frozenset = None  # all right answers, `normalized`; None: only `answer` is right, to the letter

    def accepts(self, given):
        return given == self.answer if self.accepted is None else normalized(given) in self.accepted


@dataclass
class Session:
    """One stretch of model calls in one context. The lists of tokens are as long as `ids`."""
    kind: str                   # one of KINDS; this and what follows is filled in by `segment`
    ids: list                   # every token the model saw and wrote, as sampled
    mask: list                  # 1 where the model wrote the token in this session
    logps: list                 # log-probability at sampling time, 0 where mask is 0
    before: list                # the state before: token ids of a context at which the agent is about to act
    after: list = None          # the state after
    closing: int = 0            # where the closing action starts; len(ids) if it has none
    stop: str = ""              # compact, fork, summary, report, answered, out of turns, out of window
    scores: tuple = ()          # score before and after, floored: filled in by infogain.score_sessions
    gain: float = float("nan")  # their difference, or nan: the session has no gain
    normalized_gain: float = 0.                         # filled in by train.credit
    # of each token, 0 where mask is 0: filled in by train.credit
    advantages: list = field(default_factory=list)


@dataclass
class Trajectory:
    """One attempt: its sessions, why it stopped, what it answered ("" for nothing), its reward."""
    question: Question
    sessions: list
    stop: str                   # answered, out of turns, out of window
    answer: str
    reward: float
    advantage: float = 0.       # A', filled in by train.credit


# ---------------------------------------------------------------- the harness

# What ends a session, the kind of the next one, and the context that the next one goes on from.
TRANSITIONS = {"compact": ("compaction", "its own"), "summary": ("ordinary", "none"),
               "fork": ("subagent", "none"), "report": ("ordinary", "the parent's")}


class Attempt:
    """One attempt as it goes on: the agent must `act` in `context`, until `stop` is set.

    context: all token ids that the model is to see. log: a list of (event, ids, logps): `open` the first
    context, `act` what the model wrote, `observe` a page or an error, then what TRANSITIONS lists: `compact`
    the request for a summary, `summary` the context that it opens, `fork` a subagent's context, `report` its
    report in the parent's context; at the end `stop` with the reason in place of ids. ValueError: the
    question does not fit the window.
    """

    def __init__(self, question, task, tokenizer):
        self.question, self.task, self.tokenizer = question, task, tokenizer
        self.kind, self.parent, self.turns, self.stop, self.answer = "ordinary", None, 0, "", ""
        self.room = space(task, tokenizer)
        self.context = self.opening(question.question, task.scenario)
        if len(self.context) > self.room:
            raise ValueError(f"a question of {len(self.context)} tokens does not fit a window with room for "
                             f"{self.room}")
        self.log = [("open", self.context, [])]

    def act(self, ids, logps):
        """Take the action that the model wrote, ids and log-probabilities, and show what comes of it."""
        self.log.append(("act", ids, logps))
        self.turns += 1
        written = self.context + ids
        tag, body = read_action(self.tokenizer, tuple(ids))
        if tag == "answer" and self.kind == "ordinary":
            self.answer = body
            return self.end("answered")
        event, text = self.respond(tag, body, written)
        self.kind, base = TRANSITIONS.get(event, (self.kind, "its own"))
        if base == "none":
            base, new = [], self.opening(text, "fork" if event == "fork" else self.task.scenario)
        else:
            base = written if base == "its own" else self.parent
            new = reply(self.tokenizer, base, text)
        if len(base) + len(new) > self.room and event != "compact":
            return self.end("out of window")
        self.log.append((event, new, []))
        self.context = base + new
        if event == "fork":
            self.parent = written
        if self.turns == self.task.turns:
            self.end("out of turns")

    def opening(self, text, example):
        """A fresh context that shows a text, after the system text and the example that explain the task."""
        return [*preamble(self.tokenizer, self.task.says[example]), *message(self.tokenizer, text)]

    def respond(self, tag, body, written):
        """The (event, text) upon an action that is no answer. An action that is not allowed gets an error."""
        says, compaction = self.task.says, self.task.scenario == "compaction"
        if self.kind == "compaction":  # whatever it wrote: without a summary, nothing is kept
            kept = f"\n<summary>{body}</summary>" if tag == "summary" else ""
            return "summary", self.question.question + kept
        if tag == "compact" and compaction:
            return "compact", says["compact"]
        if tag == "fork" and not compaction and self.kind == "ordinary":
            return "fork", f"<fork>{body}</fork>"
        if tag == "report" and self.kind == "subagent":
            return "report", f"<report>{body}</report>"
        text = search(self.question.pages, body) or says["nothing"] if tag == "search" else says["error"]
        if len(written) + len(reply(self.tokenizer, written, text)) <= self.room:
            return "observe", text
        if compaction:
            return "compact", says["compact"]                   # forced; the search must be made again
        return ("report", says["full"]) if self.kind == "subagent" else ("observe", text)

    def end(self, reason):
        self.stop = reason
        self.log.append(("stop", reason, []))

    def trajectory(self):
        """The finished attempt; reward 1 for a right answer, else 0."""
        reward = float(self.question.accepts(self.answer))
        return Trajectory(self.question, segment(self.log), self.stop, self.answer, reward)


def space(task, tokenizer):
    """How long a context may get: it leaves room for one action and, if it may be compacted, for that."""
    request = len(reply(tokenizer, (), task.says["compact"])) + task.limit
    return task.window - task.limit - (request if task.scenario == "compaction" else 0)


def least_window(question, task, tokenizer):
    """The window in which any page of a question can be seen, after a summary and in a subagent, too."""
    main = len(preamble(tokenizer, task.says[task.scenario])) + len(message(tokenizer, question.question))
    subagent = len(preamble(tokenizer, task.says["fork"])) + len(message(tokenizer, ""))
    page = max(len(encode(tokenizer, f"<search>{query}</search>")) + 1 + len(reply(tokenizer, (), page))
               for query, page in question.pages.items())
    return task.window - space(task, tokenizer) + max(main, subagent) + task.limit + page


def search(pages, query):
    """The page of exactly this query, else of the one that shares most words with it; "" if none does."""
    def common(title):
        return len(set(re.findall(r"\w+", title.lower())) & set(re.findall(r"\w+", query.lower())))
    best = query if query in pages else max(pages, key=common, default="")
    return pages[best] if best == query or common(best) else ""


# ---------------------------------------------------------------- sessions

def segment(log):
    """Cut the log of one attempt into its sessions (design, section 3.1). Pure: token ids in, sessions out.

    A session that continues a context holds all of it, with mask 0 on what earlier sessions wrote, so that
    every sampled token has mask 1 in exactly one session. One session's state after is the next one's state
    before.
    """
    sessions, parent = [], None

    def begin(kind, ids, before):
        sessions.append(Session(kind, list(ids), [0] * len(ids), [0.] * len(ids), before, closing=len(ids)))
        return sessions[-1]

    for event, ids, logps in log:
        if event == "open":
            now = begin("ordinary", ids, before=ids)
        elif event == "stop":           # what a summary or a report would have brought never came
            now.stop, now.after = ids, now.ids[:now.closing] if now.kind == "ordinary" else now.before
        elif event in TRANSITIONS:
            kind, base = TRANSITIONS[event]
            context = {"its own": now.ids, "none": [], "the parent's": parent}[base] + ids
            parent = now.ids if event == "fork" else parent
            now.stop, now.after = event, now.ids[:now.closing] if now.kind == "ordinary" else context
            now = begin(kind, context, before=now.after)
        else:                           # act or observe
            wrote = event == "act"
            now.closing = len(now.ids) if wrote else len(now.ids) + len(ids)
            now.ids += ids
            now.mask += [int(wrote)] * len(ids)
            now.logps += logps if wrote else [0.] * len(ids)
    return [session for session in sessions if any(session.mask)]


# ---------------------------------------------------------------- text and tokens

TAGS = "search|answer|fork|report|summary"
TEXT = rf"((?:(?!</?(?:{TAGS})>|<compact/>).)*)"        # text without any tag: no character of it begins one
ACTION = re.compile(rf"{TEXT}(?:<({TAGS})>{TEXT}</\2>|<compact/>)\s*", re.DOTALL)


@lru_cache
def plain_core(tokenizer):
    """The tokenizer without any added token, to which `<|im_end|>` and `<think>` are text like any other."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    return Tokenizer.from_str(json.dumps(state | {"added_tokens": [], "truncation": None, "padding": None}))


@lru_cache(maxsize=4096)
def encode(tokenizer, text):
    """Token ids of a text, all of them ordinary: a control token spelled out in `text` stays text."""
    return tuple(plain_core(tokenizer).encode(sound(text), add_special_tokens=False).ids)


def sound(text):
    """The text with a question mark for each lone surrogate, which is no character that a tokenizer takes."""
    return text.encode("utf-8", "replace").decode()


@lru_cache(maxsize=4096)
def answer_tokens(tokenizer, answer):
    """The answering action, as (opening, answer): the answer's are the ids that hold its characters.

    Taken from the whole action's ids, as the model would write it: a tokenizer may join the tag's last
    character and the answer's first. What closes the tag is left out.
    """
    before, answer = "<answer>", sound(answer)
    encoding = plain_core(tokenizer).encode(f"{before}{answer}</answer>", add_special_tokens=False)
    holds = [begin < len(before + answer) and end > len(before) for begin, end in encoding.offsets]
    if True not in holds:
        raise ValueError(f"the answer {answer!r} has no tokens")
    first, last = holds.index(True), len(holds) - holds[::-1].index(True)
    return tuple(encoding.ids[:first]), tuple(encoding.ids[first:last])


@lru_cache
def control(tokenizer):
    """The ids of ChatML's two control tokens, start and end of a message."""
    return tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])


@lru_cache
def header(tokenizer):
    """The ids that open the agent's message. With thinking off, some templates put an empty thought there."""
    opening = "assistant\n"
    try:
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False,
                                             add_generation_prompt=True, enable_thinking=False)
        opening += chat.rpartition("<|im_start|>assistant\n")[2] if "<|im_start|>assistant\n" in chat else ""
    except Exception:       # no template, or one that wants other messages: whatever a template raises
        pass
    return tokenizer(opening, add_special_tokens=False).input_ids


def spoken(tokenizer, who, text):
    """The ids of a whole message."""
    (start, end), newline = control(tokenizer), encode(tokenizer, "\n")
    return [start, *who, *encode(tokenizer, text), end, *newline]


@lru_cache
def preamble(tokenizer, texts):
    """The ids that contexts open with: a system text and the messages of an example, if there are any."""
    user, agent = encode(tokenizer, "user\n"), header(tokenizer)
    roles = [encode(tokenizer, "system\n"), *[user, agent] * len(texts)]
    return [token for who, text in zip(roles, texts) for token in spoken(tokenizer, who, text)]


def message(tokenizer, text):
    """The ids that show a text to the agent and let it act: a user's message, the head of its own."""
    return [*spoken(tokenizer, encode(tokenizer, "user\n"), text), control(tokenizer)[0], *header(tokenizer)]


def reply(tokenizer, context, text):
    """The same as an answer to what the agent wrote last; closes its message if the agent did not."""
    end = control(tokenizer)[1]
    close = [] if context[-1:] == [end] else [end]
    return [*close, *encode(tokenizer, "\n"), *message(tokenizer, text)]


@lru_cache(maxsize=4096)
def read_action(tokenizer, ids):
    """(tag, body) of a turn, a tuple of ids: free text, then exactly one action tag. Else it is ("", "")."""
    match = ACTION.fullmatch(tokenizer.decode(ids[:-1])) if ids[-1] == control(tokenizer)[1] else None
    return ("", "") if match is None else (match[2] or "compact", " ".join((match[3] or "").split()))


# ---------------------------------------------------------------- sampling

def sample_attempts(model, tokenizer, questions, task, uniforms, temperature=1.):
    """Attempt every question (repeat it for a group), side by side. Returns a list of Trajectory.

    uniforms: (B, turns, limit) in [0, 1), one number per token that an attempt may sample, so that what it
    samples does not depend on the other attempts.
    """
    attempts = [Attempt(question, task, tokenizer) for question in questions]
    play(model, tokenizer, attempts, task, uniforms, temperature)
    return [attempt.trajectory() for attempt in attempts]


@torch.inference_mode()
def play(model, tokenizer, attempts, task, uniforms, temperature):
    """Let the model act in all attempts, wherever they are, until each has stopped.

    One that has finished its action waits with its next context until half of the others have, so that
    contexts are read together, and tokens written together.
    """
    B, uniforms, stop = len(attempts), uniforms.tolist(), control(tokenizer)[1]
    keyed, head = keeps_keys(model), model.get_output_embeddings()
    ids, logps = [[] for _ in attempts], [[] for _ in attempts]  # the action that each attempt is writing
    slots = 2 * B if task.scenario == "subagent" else B  # attempt i: slot i; its subagents: B + i
    cache = SlotCache(slots, task.window) if keyed else TurnCache()
    if keyed and task.plain:  # what all contexts open with is read once
        for first in range(0, slots, B):
            opening = task.says["fork" if first else task.scenario]
            cache.read(model, range(first, first + B), [preamble(tokenizer, opening)] * B)
    running = list(range(B))
    while running:
        reading, writing = [i for i in running if not ids[i]], [i for i in running if ids[i]]
        rows = reading if not writing or keyed and len(reading) >= len(writing) else writing
        where = [i + B if attempts[i].kind == "subagent" else i for i in rows]
        hidden = cache.read(model, where, [attempts[i].context + ids[i] for i in rows])  # (W, H)
        numbers = torch.tensor([uniforms[i][attempts[i].turns][len(ids[i])] for i in rows])             # (W,)
        tokens, drawn = draw(head(hidden), numbers.to(hidden.device), temperature)  # (W,) each
        for i, token, logp in zip(rows, tokens.tolist(), drawn.tolist()):
            ids[i].append(token)
            logps[i].append(logp)
            if not logp > -math.inf:                                            # nan is neither more nor less
                raise FloatingPointError("the policy's log-probabilities are no longer numbers")
            if token == stop or len(ids[i]) == task.limit:
                attempts[i].act(ids[i], logps[i])
                ids[i], logps[i] = [], []
        running = [i for i in running if not attempts[i].stop]


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
        tokens = torch.searchsorted(mass, uniforms[:, None] * mass[:, -1:], right=True)[:, 0]   # (B,)
        tokens = tokens.clamp(max=logits.shape[1] - 1)              # where the logits are no numbers; (B,)
    return tokens, logps.gather(1, tokens[:, None])[:, 0]


class SlotCache:
    """Keys and values of many contexts, each in a slot of its own: no token is computed twice.

    Position p of a slot holds the key of token p of that slot's context. A query at position p sees positions
    0..p of its own slot only; what lies beyond (padding, an abandoned context) is overwritten before it can
    be seen.
    """

    def __init__(self, slots, window):
        self.window, self.layers = window, {}
        self.held = [[] for _ in range(slots)]          # the ids whose keys each slot holds

    def read(self, model, slots, contexts):
        """Hidden state of the last token of each context (B, H), each in its slot.

        Computed is only what a slot does not hold yet, and equal contexts, as those of a group are at first,
        only once: by their leader, the first row that has them, from which the other rows' slots are copied.
        """
        device, first = model.device, {}
        leader = [first.setdefault(tuple(context), row) for row, context in enumerate(contexts)]
        leaders = [*first.values()]
        known = [min(begins_alike(self.held[slot], context), len(context) - 1)
                 for slot, context in zip(slots, contexts)]
        ids = pad([contexts[row][known[row]:] for row in leaders]).to(device)  # (D, N)
        self.slots = torch.tensor([slots[row] for row in leaders], device=device)                       # (D,)
        start = torch.tensor([known[row] for row in leaders], device=device)                            # (D,)
        positions = start[:, None] + torch.arange(ids.shape[1], device=device)  # (D, N)
        self.positions = positions.clamp(max=self.window)               # the last place is for padding only
        self.reach = max(map(len, contexts))
        visible = torch.arange(self.reach, device=device) <= positions[:, :, None]  # (D, N, reach)
        hidden = model.base_model(input_ids=ids, position_ids=positions, attention_mask=visible[:, None],
                                  cache=self, use_cache=True).last_hidden_state  # (D, N, H)
        followers = [row for row in range(len(contexts)) if leader[row] != row]
        if followers:
            origin = [slots[leader[row]] for row in followers]
            self.copy(origin, [slots[row] for row in followers], min(known))
        for slot, context in zip(slots, contexts):
            self.held[slot] = context
        place = {row: i for i, row in enumerate(leaders)}
        last = [len(contexts[row]) - 1 - known[row] for row in leader]
        return hidden[[place[row] for row in leader], last]  # (B, H)

    def copy(self, origin, to, begin):
        """Give slots the keys and values of others, from a position on; before it they hold the same."""
        origin, to = pad([origin, to]).to(self.slots.device)  # (B - D,) each
        for store in self.layers.values():
            new = store[:, :, begin:self.reach]  # (slots, 2 heads, new, D)
            new.index_copy_(0, to, new.index_select(0, origin))

    def update(self, keys, values, layer, **_):
        """What an attention layer calls: stores keys and values (B, heads, N, D), returns all so far."""
        new = torch.cat([keys, values], 1)                                              # (B, 2 heads, N, D)
        if layer not in self.layers:
            self.layers[layer] = new.new_zeros(len(self.held), new.shape[1], self.window + 1, new.shape[3])
        store = self.layers[layer]  # (slots, 2 heads, window + 1, D)
        store.transpose(1, 2)[self.slots[:, None], self.positions] = new.transpose(1, 2)
        return store[:, :, :self.reach].index_select(0, self.slots).chunk(2, 1)  # (B, heads, reach, D) each


class TurnCache:
    """The same for layers that keep no keys but a running state, which cannot be cut back to a prefix.

    Every turn reads its whole contexts anew, padded on the left, and all its rows go on until the last one
    has ended.
    """

    def __init__(self):
        self.held = {}                                      # slot -> its context, in the order of the rows

    def read(self, model, slots, contexts):
        fresh = any(self.held.get(slot) != context[:-1] for slot, context in zip(slots, contexts))
        if fresh:
            self.held, self.cache = {}, DynamicCache(config=model.config)
            self.mask = torch.ones(len(contexts), 0, dtype=torch.long, device=model.device)
        self.held.update(zip(slots, contexts))
        # a row that has ended repeats its last token
        new = [context if fresh else context[-1:] for context in self.held.values()]
        ids = pad([row[::-1] for row in new]).flip(1).to(model.device)                  # (B, N)
        mask = pad([[1] * len(row) for row in new]).flip(1).to(model.device)            # (B, N)
        self.mask = torch.cat([self.mask, mask], 1)                                     # (B, all so far)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1]:]           # (B, N)
        hidden = model.base_model(input_ids=ids, attention_mask=self.mask, position_ids=positions,
                                  cache=self.cache, use_cache=True).last_hidden_state[:, -1]    # (B, H)
        return hidden[[list(self.held).index(slot) for slot in slots]]


def keeps_keys(model):
    """Whether all layers attend to the keys of all tokens, so that slots and trees compute the right thing.

    `train.check_model` tries it, and says where it is not so although the configuration promises it.
    """
    config = vars(model.config)
    kinds = set(config.get("layer_types") or ["full_attention"])
    slides = config.get("sliding_window") and config.get("use_sliding_window", True)
    return kinds == {"full_attention"} and not slides and not getattr(model, "reads_plainly", False)


def begins_alike(a, b):
    """How many tokens two contexts begin alike with."""
    return len(a) if b[:len(a)] == a else len(commonprefix([a, b]))  # the latter alone takes a Python loop


def pad(rows, dtype=torch.long):
    """A list of lists -> (S, T) tensor, padded with 0 on the right, where no causal model can see it."""
    width = max(map(len, rows))
    # numpy reads a list faster than torch
    flat = np.array([x for row in rows for x in row + [0] * (width - len(row))])
    return torch.from_numpy(flat).to(dtype).view(len(rows), width)                      # (S, T)


# ---------------------------------------------------------------- the toy search task

# the scenarios, and the tiny model's window, which is too small for all pages of most questions
WINDOWS = {"compaction": 74, "subagent": 60}
NAMES = "anna boris clara david emma felix greta hugo ines jonas kira leon maria nils olga paul".split()
TOPICS = {"city": "paris rome oslo cairo lima delhi", "pet": "cat dog parrot hamster rabbit turtle",
          "drink": "tea coffee milk juice cocoa water", "sport": "chess tennis judo rowing golf hockey"}
CLUES = " ".join(TOPICS.values()).split()


def make_question(rng, wording="{}", clues=None, page=6):
    """Draw a question with a world of its own: exactly one person is on the pages of all its clues.

    wording: how the clues are put into a question. clues: how many, by default two, three or four. Each page
    of `page` names holds the answer, as many decoys as there is room for, each of whom is on all pages but
    one, and others. So of three pages, one leaves 6 names and two leave 3.
    """
    clues = clues or rng.choice((2, 3, 4))
    words = [rng.choice(TOPICS[topic].split()) for topic in rng.sample(sorted(TOPICS), clues)]
    answer, *others = rng.sample(NAMES, len(NAMES))
    each = (page - 1) // (clues - 1)                        # decoys that are on all pages but this one
    missing = [[others.pop() for _ in range(each)] for _ in words]
    pages = {}
    for word, absent in zip(words, missing):
        names = [answer] + [name for decoys in missing if decoys is not absent for name in decoys]
        names += [others.pop() for _ in range(page - len(names))]
        pages[word] = " ".join(rng.sample(names, page))
    return Question(wording.format(" ".join(words)), answer, pages)


def read_tasks(path):
    """Questions from a JSONL file: an object {"question", "answer", "pages": {query: text}} a line.

    ValueError names the line that is none, or says that there is none at all. Blank lines are skipped.
    """
    questions = []
    for number, line in enumerate(Path(path).read_bytes().removeprefix(BOM_UTF8).splitlines(), 1):
        try:
            if line.strip():
                questions.append(read_task(json.loads(line.decode(), object_pairs_hook=unique)))
        except ValueError as error:         # UnicodeDecodeError and JSONDecodeError are ValueErrors, too
            raise ValueError(f"{path}, line {number}: {error}") from None
        except RecursionError:
            raise ValueError(f"{path}, line {number}: nested too deeply") from None
    if not questions:
        raise ValueError(f"{path} holds no question")
    return questions


def read_task(task):
    """The Question that an object from a task file states; ValueError says what is wrong with it."""
    if not isinstance(task, dict) or {"question", "answer", "pages"} - task.keys():
        raise ValueError('a line must be an object with "question", "answer" and "pages"')
    question, answers, pages = task["question"], task["answer"], task["pages"]
    answers = answers if isinstance(answers, list) and answers else [answers]
    if not all(isinstance(text, str) and text.strip() for text in (question, *answers)):
        raise ValueError("question and answer must be texts that are not empty, or answer a list of such")
    if not isinstance(pages, dict) or not all(isinstance(text, str) for text in pages.values()):
        raise ValueError("pages must be an object: query -> text")
    answer, accepted = " ".join(answers[0].split()), frozenset(map(normalized, answers))
    if "" in accepted:
        raise ValueError(f"the answer {answer!r} is nothing but articles and punctuation")
    stands = (answer in text or any(one in normalized(text) for one in accepted) for text in pages.values())
    if not any(stands):
        raise ValueError(f"the answer {answer!r} is on no page, so no search can find it")
    return Question(question, answer, pages, accepted)


def normalized(text):
    """A text as question-answering sets compare it: composed, lower case, no punctuation, no articles."""
    text = unicodedata.normalize("NFC", text).lower()
    text = "".join(character for character in text if unicodedata.category(character)[0] not in "PS")
    return " ".join(word for word in text.split() if word not in ("a", "an", "the"))


def unique(pairs):
    """An object of a JSON file, which may name each key once."""
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} is there twice")
    return dict(pairs)


# What the harness says to the tiny model, in single words without instructions, and to others.
TERSE = {"question": "{}", "nothing": "nothing found", "error": "error", "full": "window full",
         "compact": "<compact/>", "compaction": (), "subagent": (), "fork": ()}
REQUEST = "Your window is full. Reply with <summary>clues done : names left</summary>"
PLAIN = {
    "question": "Which one person fits all of these clues: {}?",
    "nothing": "Nothing found.",
    "error": "That is no action. Reply with one action, such as <search>clue</search>",
    "full": "Your window is full.",
    "compact": REQUEST,
    # how each context opens: a system text, then an example as messages of the user and the assistant in turn
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
                 "eva rosa tim carl", "<fork>jazz horse</fork>", "<report>rosa ben</report>",
                 "<answer>rosa</answer>"),
    "fork": ("""Search the clues in <fork>. Reply with one action and nothing else:
<search>clue</search> shows the page of a clue.
<report>names</report> ends your work with the names on the pages of all clues.""",
             "<fork>jazz horse</fork>", "<search>jazz</search>", "rosa ben eva fred",
             "<search>horse</search>", "lea rosa ben", "<report>rosa ben</report>"),
}
KNOWN = "Your window is full. Reply with <summary>what you know so far</summary>"
OWN = PLAIN | {
    "question": "{}",
    "error": "That is no action. Reply with one action, such as <search>words</search>",
    "compact": KNOWN,
    "compaction": ("""Answer the question by searching. Reply with one action and nothing else:
<search>words</search> shows the page that fits them best.
<compact/> clears a full window. You keep the question and your <summary>what you know so far</summary>
<answer>text</answer> ends the task. Answer in as few words as possible.""",
                   "Who wrote the novel that the film Blade Runner is based on?",
                   "<search>Blade Runner</search>", "Blade Runner is based on the novel Electric Sheep.",
                   "<compact/>", KNOWN, "<summary>The novel is Electric Sheep.</summary>",
                   "<summary>The novel is Electric Sheep.</summary>", "<search>Electric Sheep</search>",
                   "Electric Sheep is a novel by Philip K. Dick.", "<answer>Philip K. Dick</answer>"),
    "subagent": ("""Answer the question by searching. Reply with one action and nothing else:
<search>words</search> shows the page that fits them best.
<fork>question</fork> asks a helper to find something out.
<answer>text</answer> ends the task. Answer in as few words as possible.""",
                 "Who wrote the novel that the film Blade Runner is based on?",
                 "<fork>Which novel is the film Blade Runner based on?</fork>",
                 "<report>Electric Sheep</report>", "<search>Electric Sheep</search>",
                 "Electric Sheep is a novel by Philip K. Dick.",
                 "<answer>Philip K. Dick</answer>"),
    "fork": ("""Find out what <fork> asks by searching. Reply with one action and nothing else:
<search>words</search> shows the page that fits them best.
<report>text</report> ends your work with what you found out.""",
             "<fork>Which novel is the film Blade Runner based on?</fork>", "<search>Blade Runner</search>",
             "Blade Runner is based on the novel Electric Sheep.", "<report>Electric Sheep</report>"),
}
# what the harness says that is no page
SIGNALS = [says[key] for says in (TERSE, PLAIN, OWN) for key in ("nothing", "error", "full", "compact")]


def tiny_tokenizer():
    """A word-level tokenizer for the toy world: every name, clue and tag is one token, a space is none."""
    tags = [f"<{slash}{tag}>" for tag in TAGS.split("|") for slash in ("", "/")]
    words = ["<unk>", "user", "assistant", ":", *" ".join(SIGNALS[:4]).split(), *tags, *NAMES, *CLUES]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(),
                                                  pre_tokenizers.Split(Regex("</?[a-z]+/?>"), "isolated")])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<|im_end|>",
                                   pad_token="<|endoftext|>", extra_special_tokens=["<|im_start|>"])


# ---------------------------------------------------------------- the scripted teacher

class Habits(NamedTuple):
    """How often the teacher errs."""
    forget: float       # drops a name from a summary
    compact: float      # compacts what it has seen before it is made to
    fork: float         # forks a clue where there is room for its page
    repeat: float       # searches for any clue instead of the next one
    guess: float        # answers before it can know, from a page or report that it has just seen
    blind: float        # ... having seen nothing


# Demonstrations are careful at first, so that the tiny model learns to read, but free with sessions. They
# end with one of these sets of habits, which it then has: learned last, and unlearned first.
CAREFUL = Habits(forget=.03, compact=.2, fork=.4, repeat=.02, guess=.03, blind=.02)
HABITS = {"careless": Habits(forget=.03, compact=.3, fork=.5, repeat=.1, guess=.9, blind=.9),
          "hesitant": Habits(forget=.1, compact=.8, fork=.8, repeat=.5, guess=.1, blind=.05),
          "hasty": Habits(forget=.1, compact=.2, fork=.2, repeat=.1, guess=.97, blind=.95)}


def inside(tag, text):
    """What the first `tag` of a text holds, as words; [] where there is none."""
    found = re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return found[1].split() if found else []


def read(text):
    """What a careful reader knows of a context: (opening, last) messages, clues done, names left, seen.

    Names left are those on every page, report and summary so far; None while there was none. seen: how many
    pages and reports the context shows.
    """
    messages = r"<\|im_start\|>\s*(?:user|assistant)\s*(.*?)\s*<\|im_end\|>"
    opening, *rest = re.findall(messages, text, re.DOTALL)
    summary = " ".join(inside("summary", opening))
    done, left = [part.split() for part in summary.split(":")] if ":" in summary else ([], None)
    seen, left = 0, left if done else None
    for action, result in zip(rest[0::2], rest[1::2]):
        clues = inside("search", action) or inside("fork", action)
        if clues and result not in SIGNALS:
            names = inside("report", result) if "<report>" in result else result.split()
            done = done + [clue for clue in clues if clue not in done]
            left = [name for name in (names if left is None else left) if name in names]
            seen += 1
    return (opening, rest[-1] if rest else ""), done, left, seen


def teacher(text, task, rng, habits):
    """An imperfect agent's next action, read off its context's text; its demonstrations warm up the model."""
    (opening, last), done, left, seen = read(text)
    if last == task.says["compact"]:
        kept = [name for name in left or [] if rng.random() > habits.forget]
        return f"<summary>{' '.join(done)} : {' '.join(kept)}</summary>"
    delegated, forks = inside("fork", opening), task.scenario == "subagent"
    clues = delegated or [word for word in re.findall(r"\w+", opening.split("<summary>")[0]) if word in CLUES]
    todo = [clue for clue in clues if clue not in done]
    if not forks and seen and rng.random() < habits.compact:
        return "<compact/>"
    room = 2 - seen                                     # a context has room for two pages or reports
    through = not todo or forks and room == 0
    if delegated and through:
        return f"<report>{' '.join((left or [])[:6])}</report>"
    rash = habits.guess if seen else habits.blind * (left is None)
    if not delegated and (through or rng.random() < rash):
        return f"<answer>{rng.choice(left or NAMES)}</answer>"
    if forks and not delegated and (len(todo) > room or rng.random() < habits.fork):
        return f"<fork>{' '.join(todo[:2 if len(todo) > room else 1])}</fork>"
    return f"<search>{rng.choice(clues) if rng.random() < habits.repeat else todo[0]}</search>"


def demonstrate(question, task, tokenizer, rng, habits=HABITS["careless"]):
    """The trajectory of the teacher's attempt at a question."""
    attempt = Attempt(question, task, tokenizer)
    while not attempt.stop:
        opening = preamble(tokenizer, task.says["fork" if attempt.kind == "subagent" else task.scenario])
        text = tokenizer.decode(attempt.context[len(opening):])         # the example is not its own work
        ids = [*encode(tokenizer, teacher(text, task, rng, habits)), control(tokenizer)[1]]
        attempt.act(ids, [0.] * len(ids))
    return attempt.trajectory()
