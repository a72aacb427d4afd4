"""The reward model's card, with the figures that the build has just measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.reward_models.sampling import MAX_NEW_TOKENS

CARD = """\
---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---

# Quickstart reward model

Scores how pleasant the words of one answer of SmolLM2-135M-Instruct are. What it should say is known exactly, so that a run
can show the true utility beside its score: a third of the summed valence of the answer's words in VADER's lexicon
(`datc_train.quickstart.true_utility`). Where the two part, the policy has found an error of this model.

It is the policy's embeddings, first {layers} layers and final norm under a linear score head; this folder has only what
training changed (LoRA factors of every projection, final norm, head, in bfloat16).
`datc_train.quickstart.load_reward_model()` puts it together and checks its checksum.

**Row.** The chat template of prompt and answer with its closing `<|im_end|>` and newline, pooled at the last token; an answer
that was cut off gets the same closing. The score is an estimate of the utility, in its units.

**Data.** {rows} rows: answers of the policy at temperature 1 to the prompts of `prompts/train.jsonl`. In most of them words
were replaced, by words of the lexicon and others, and some were cut off. Loss: Huber, on the utility of the text so far at
every token of the answer. Built by `python -m benchmarks.reward_models.sentiment`, {minutes:.0f} minutes of training
(threads of torch: {threads}). Everything in it is under Apache-2.0, as SmolLM2 is; the lexicon is looked up in
`vaderSentiment` (MIT), not part of it.

## On held-out prompts

{answers} answers of the policy to {prompts} prompts of `prompts/heldout.jsonl`, at most {most} tokens, temperature 1: the
share R² of the true utility's variance that the score explains, over all answers and within each prompt's, and more.

| answers | R² | R² within prompts | correlation | mean, score (utility) | std within prompts, score (utility) |
|---|---|---|---|---|---|
{table}

Of these answers {finished_in_48:.0%} end by themselves within 48 tokens, {finished_in_64:.0%} within 64.

## Limits

- It reads single words, as its teacher does: "not good" is worth as much as "good", and an answer may please and be wrong.
- It has seen answers of at most {trained_most} tokens, in English, to questions of a sentence or two.
- It is small. A policy that is trained hard enough against it will find weak spots, and the true utility shows them; the
  score is for watching methods at work, not for choosing a model to use.
"""
KINDS = {"plain": "as sampled", "substituted": "with words replaced", "cut": "cut anywhere"}


def write_card(folder: Path, report: dict[str, Any], trained_most: int) -> None:
    table = "\n".join(
        f"| {label} | {row['r2']:.2f} | {row['r2_within']:.2f} | {row['correlation']:.2f} | {row['mean_score']:.2f} "
        f"({row['mean_utility']:.2f}) | {row['std_score_within']:.2f} ({row['std_utility_within']:.2f}) |"
        for label, row in ((label, report[kind]) for kind, label in KINDS.items())
    )
    text = CARD.format(
        table=table, minutes=report["training_seconds"] / 60, most=MAX_NEW_TOKENS, trained_most=trained_most, **report
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
