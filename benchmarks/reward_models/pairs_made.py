"""Second stage of building the reward model: preference pairs whose better side is known from how they were made.

The better side is a hand-written answer or a low-temperature sample that ends with a whole sentence. The worse side is
off topic, cut off, repetitive, scrambled and so on, or one of the shortcuts a policy could try: nothing, two words,
politeness without content, the question again. Lengths are mixed on both sides of every kind that allows it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from benchmarks.reward_models.pairs_sampling import FOLDER, Sample, split_prompts


@dataclass(frozen=True)
class Pair:
    split: str
    kind: str
    prompt: str
    chosen: str
    rejected: str


@dataclass(frozen=True)
class Sources:
    """Everything of one split that pairs are made from."""

    split: str
    prompts: list[str]
    good: dict[str, list[str]]  # prompt -> up to four clean responses of whole sentences, at most temperature 1
    best: dict[str, list[str]]  # hand-written and low-temperature ones
    raw: dict[str, list[Sample]]  # prompt -> samples as they came
    written: dict[str, str]  # prompt -> the hand-written answer, where there is one
    phrases: dict[str, list[str]]


# Every prompt gets ALWAYS, and DRAWN of SOMETIMES, in turn.
ALWAYS = ["off topic", "off topic", "off topic", "cut off", "sample"]
SOMETIMES = ["filler", "repetition", "generic", "rude", "scrambled", "terse", "parrot", "hot sample", "gushing", "junk"]
SOMETIMES += ["repetition", "language", "roles", "generic", "scrambled", "hot sample", "cut off"]
DRAWN = 4
NEGATIVES = 8  # openings of answers to other prompts that every prompt of the training split gets


def make_pairs(samples: list[Sample], split: str, seed: int) -> list[Pair]:
    """All pairs of a split, prompt after prompt; the order of prompts is the file's."""
    rng = random.Random(f"{seed} {split}")
    sources = gather(samples, split, rng)
    pairs: list[Pair] = []
    for index, prompt in enumerate(sources.prompts):
        kinds = ALWAYS + [SOMETIMES[(DRAWN * index + k) % len(SOMETIMES)] for k in range(DRAWN)]
        for kind in kinds if sources.good[prompt] else []:
            made = MAKERS[kind](prompt, sources, rng)
            if made is not None and made[0] and made[0] != made[1]:
                pairs.append(Pair(split, kind, prompt, *made))
        if split == "train" and sources.good[prompt]:
            pairs += openings(prompt, sources, rng)
    return pairs


def openings(prompt: str, sources: Sources, rng: random.Random) -> list[Pair]:
    """First sentences of this prompt's good texts, each against `NEGATIVES` first sentences of other prompts' ones.

    Where a text is on topic shows in its first sentence, and short rows make many comparisons cheap. All of one prompt's
    openings are hand-written or all are sampled, so style gives nothing away; each is chosen here and rejected elsewhere.
    """
    written = rng.random() < 0.5

    def first_sentences(of: str) -> list[str]:
        alike = [text for text in sources.good[of] if is_written(text, of, sources) == written]
        return list(dict.fromkeys(first[0] for text in alike if (first := sentences(text))))

    others = [other for other in sources.prompts if other != prompt and first_sentences(other)]
    negatives = [rng.choice(first_sentences(other)) for other in rng.sample(others, min(NEGATIVES, len(others)))]
    return [
        Pair(sources.split, "off topic", prompt, good, bad)
        for good in first_sentences(prompt)[:2]
        for bad in negatives
        if good != bad
    ]


def gather(samples: list[Sample], split: str, rng: random.Random) -> Sources:
    prompts = split_prompts(split)
    phrases = json.loads((FOLDER / "phrases.json").read_text(encoding="utf-8"))
    written = {p: answer for p, answer in written_answers().items() if p in set(prompts)}
    raw = {p: [s for s in samples if s.prompt == p] for p in prompts}
    mine = {p: [written[p]] if p in written else [] for p in prompts}
    low = {p: mine[p] + clean_texts(p, raw[p], below=0.9) for p in prompts}
    good = {p: variants(mine[p] + clean_texts(p, raw[p], below=1.2), rng) for p in prompts}
    return Sources(split, prompts, good, low, raw, written, {kind: lists[split] for kind, lists in phrases.items()})


def clean_texts(prompt: str, samples: list[Sample], below: float) -> list[str]:
    texts = [whole_sentences(sample.response) for sample in samples if sample.temperature < below]
    return [text for text in texts if is_clean(text) and shares_a_word(prompt, text)]


@cache
def written_answers() -> dict[str, str]:
    text = (FOLDER / "answers.jsonl").read_text(encoding="utf-8")
    return {row["prompt"]: row["answer"] for row in map(json.loads, text.splitlines())}


# --- text -----------------------------------------------------------------------------------------------------------

SENTENCE_END = re.compile(r"(?<!\d)[.!?][\"')*]*(?=\s|$)")
UNCLEAN = re.compile(
    r"https?:|www\.|\[[^\]]*\]|\b[A-Z]: |^I'm sorry|^I apologize|as an AI|AI assistant|language model|chatbot"
    r"|I'm (?:glad|happy|here to|not able|afraid)|I'd be|unable to|[{}<>|]|\*\*",
    re.IGNORECASE,
)

COMMON = {*"what when whic shou coul woul your with that this from have does give tell name want make some".split()}
COMMON |= {*"brie shor sent simp good best much many ther they them most more than into keep like need find help".split()}


def whole_sentences(text: str) -> str:
    """The text up to its last whole sentence; empty where there is none."""
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    return text[: ends[-1]].strip() if ends else ""


def sentences(text: str) -> list[str]:
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    starts = [0, *ends]
    return [part for a, b in zip(starts, [*ends, len(text)], strict=True) if (part := text[a:b].strip())]


def is_clean(text: str) -> bool:
    words = text.lower().split()
    grams = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return len(words) >= 6 and not UNCLEAN.search(text) and len(grams) - len(set(grams)) <= 1


def shares_a_word(prompt: str, text: str) -> bool:
    """Whether a longer word of the prompt, or one of the same stem, occurs in the text; True if the prompt has none."""
    stems = {word[:4] for word in re.findall(r"[a-z]{4,}", prompt.lower())} - COMMON
    return not stems or any(word[:4] in stems for word in re.findall(r"[a-z]{4,}", text.lower()))


def shorten(text: str, rng: random.Random) -> str:
    """The text or some of its first sentences."""
    parts = sentences(text)
    return " ".join(parts[: rng.randint(1, len(parts))])


def variants(texts: list[str], rng: random.Random) -> list[str]:
    """Up to four texts of different lengths out of `texts`: two whole ones and shorter ones of them."""
    whole = rng.sample(texts, min(2, len(texts)))
    short = [text for one in whole if len((text := shorten(one, rng)).split()) >= 6]
    return list(dict.fromkeys([*whole, *short]))


def pick(prompt: str, sources: Sources, rng: random.Random) -> str:
    return rng.choice(sources.good[prompt])


def cut(text: str, rng: random.Random, least: float = 0.3) -> str:
    """The text broken off inside a sentence, sometimes inside a word."""
    words = text.split(" ")
    if len(words) < 3:
        return text[: len(text) // 2]
    stop = rng.randint(max(2, int(least * len(words))), max(2, len(words) - 1))
    broken = " ".join(words[:stop]).rstrip(".!?\"')*:\n ")
    return broken[:-2] if rng.random() < 0.25 and len(words[stop - 1]) > 5 else broken


# --- kinds ----------------------------------------------------------------------------------------------------------

Made = tuple[str, str] | None  # (chosen, rejected)


def off_topic(prompt: str, sources: Sources, rng: random.Random) -> Made:
    """A good response to another prompt, often to one of the same theme (the files are in themes).

    Mostly both sides are hand-written or both are samples, so that nothing but the topic tells them apart.
    """
    here = sources.prompts.index(prompt)
    near = sources.prompts[max(0, here - 4) : here + 5]
    others = [p for p in (near if rng.random() < 0.3 else sources.prompts) if p != prompt and sources.good[p]]
    good = pick(prompt, sources, rng)
    if rng.random() < 0.8:
        alike = [
            text for p in others for text in sources.good[p] if is_written(text, p, sources) == is_written(good, prompt, sources)
        ]
    else:
        alike = [text for p in others for text in sources.good[p]]
    return (good, rng.choice(alike)) if alike else None


def is_written(text: str, prompt: str, sources: Sources) -> bool:
    return sources.written.get(prompt, "").startswith(text)


def cut_off(prompt: str, sources: Sources, rng: random.Random) -> Made:
    full = pick(prompt, sources, rng)
    parts = sentences(full)
    match rng.randrange(4):
        case 0:  # finished and longer
            return full, cut(full, rng)
        case 1 if len(parts) > 1:  # finished and shorter, the same words
            keep = rng.randint(1, len(parts) - 1)
            return " ".join(parts[:keep]), " ".join(parts[:keep]) + " " + cut(" ".join(parts[keep:]), rng)
        case 2:  # as sampled
            raw = [s.response for s in sources.raw[prompt] if not s.finished and not SENTENCE_END.search(s.response[-2:])]
            return (pick(prompt, sources, rng), rng.choice(raw)) if raw else None
        case _:  # unrelated lengths
            return pick(prompt, sources, rng), cut(pick(prompt, sources, rng), rng, least=0.6)


def repetition(prompt: str, sources: Sources, rng: random.Random) -> Made:
    text = pick(prompt, sources, rng)
    parts, words = sentences(text), text.split()
    match rng.randrange(4):
        case 0:
            bad = " ".join([*parts, *[parts[-1]] * rng.randint(1, 2)])
        case 1:
            bad = " ".join([parts[0]] * max(2, len(parts)))
        case 2:
            start, size = rng.randrange(max(1, len(words) - 3)), rng.randint(2, 5)
            loop = words[start : start + size]
            bad = " ".join(words[:start] + loop * max(2, (len(words) - start) // size)).rstrip(".") + "."
        case _:
            bad = " ".join(w for word in words for w in [word] * (rng.randint(2, 3) if rng.random() < 0.2 else 1))
    return (text if rng.random() < 0.5 else pick(prompt, sources, rng)), bad


def scrambled(prompt: str, sources: Sources, rng: random.Random) -> Made:
    text = pick(prompt, sources, rng)
    words = text.rstrip(".!?").split()
    match rng.randrange(5):
        case 0:
            rng.shuffle(words)
        case 1:
            words = [w for i in range(0, len(words), 4) for w in rng.sample(words[i : i + 4], len(words[i : i + 4]))]
        case 2:
            foreign = pick(rng.choice([p for p in sources.prompts if sources.good[p]]), sources, rng).split()
            words = [rng.choice(foreign) if rng.random() < 0.35 else word for word in words]
        case 3:
            words = [word for word in words if rng.random() > 0.35]
        case _:
            words = ["".join(rng.sample(w, len(w))) if len(w) > 3 and rng.random() < 0.4 else w for w in words]
    return (text if rng.random() < 0.5 else pick(prompt, sources, rng)), " ".join(words) + "."


def hot_sample(prompt: str, sources: Sources, rng: random.Random) -> Made:
    hot = [s.response for s in sources.raw[prompt] if s.temperature > 1.2]
    if not hot or not sources.best[prompt]:
        return None
    bad = rng.choice(hot)
    return rng.choice(sources.best[prompt]), bad if rng.random() < 0.2 else shorten(whole_sentences(bad) or bad, rng)


def plain_sample(prompt: str, sources: Sources, rng: random.Random) -> Made:
    """A hand-written answer against whole sentences of a sample of temperature 0.3 or 1."""
    texts = [whole_sentences(s.response) for s in sources.raw[prompt] if s.temperature < 1.2]
    texts = [text for text in texts if text]
    if prompt not in sources.written or not texts:
        return None
    bad = rng.choice(texts)
    return sources.written[prompt], shorten(bad, rng)


def phrase(kind: str, most: int) -> Callable[[str, Sources, random.Random], Made]:
    """Nothing but one to `most` phrases of a list."""

    def make(prompt: str, sources: Sources, rng: random.Random) -> Made:
        return pick(prompt, sources, rng), " ".join(rng.sample(sources.phrases[kind], rng.randint(1, most)))

    return make


def around(kind: str, alone: float) -> Callable[[str, Sources, random.Random], Made]:
    """Phrases of a list before or after a good response, or alone."""

    def make(prompt: str, sources: Sources, rng: random.Random) -> Made:
        good, other = pick(prompt, sources, rng), pick(prompt, sources, rng)
        parts = rng.sample(sources.phrases[kind], rng.randint(1, 2))
        if rng.random() > alone:
            parts.insert(rng.randint(0, len(parts)), shorten(other, rng))
        return good, " ".join(parts)

    return make


def generic(prompt: str, sources: Sources, rng: random.Random) -> Made:
    """Sentences that would fit any prompt, half of the time with a word of this one in them."""
    topics = [w.strip(".,?!\"'").lower() for w in prompt.split() if len(w) > 5]
    if topics and rng.random() < 0.6:
        topic = rng.choice(topics)
        parts = rng.sample(sources.phrases["hollow"], rng.randint(1, 2))
        parts = [part.format(topic=topic, Topic=topic.capitalize()) for part in parts]
        parts += rng.sample(sources.phrases["generic"], rng.randint(0, 1))
    else:
        parts = rng.sample(sources.phrases["generic"], rng.randint(1, 3))
    return pick(prompt, sources, rng), " ".join(parts)


def terse(prompt: str, sources: Sources, rng: random.Random) -> Made:
    good = pick(prompt, sources, rng)
    match rng.randrange(4):
        case 0:
            return good, ""
        case 1:
            return good, " ".join(good.split()[: rng.randint(1, 2)]).rstrip(".,!?") + "."
        case _:
            return good, rng.choice(sources.phrases["terse"])


def parrot(prompt: str, sources: Sources, rng: random.Random) -> Made:
    statement = prompt.rstrip("?.! ")
    bad = [
        prompt,
        f"{prompt} {prompt}",
        f"You asked: {prompt}",
        f"{statement} is a question that many people ask.",
        f"The question is {statement[0].lower() + statement[1:]}.",
        f"You want to know about this: {statement[0].lower() + statement[1:]}.",
        f"{prompt} That is a good question. {prompt}",
    ]
    return pick(prompt, sources, rng), rng.choice(bad)


MAKERS: dict[str, Callable[[str, Sources, random.Random], Made]] = {
    "off topic": off_topic,
    "cut off": cut_off,
    "repetition": repetition,
    "scrambled": scrambled,
    "hot sample": hot_sample,
    "sample": plain_sample,
    "filler": phrase("filler", 3),
    "generic": generic,
    "rude": around("rude", 0.6),
    "terse": terse,
    "parrot": parrot,
    "gushing": around("gushing", 0.3),
    "junk": around("junk", 0.1),
    "language": phrase("foreign", 2),
    "roles": around("role", 0.3),
}
