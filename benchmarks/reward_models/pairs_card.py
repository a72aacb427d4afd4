"""The reward model's card, with the figures that the build has just measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CARD = """\
---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---

# Reward model from preference pairs

Scores one response of SmolLM2-135M-Instruct to one everyday prompt, in a way that a person would mostly agree
with. It is the policy's embeddings, first 14 layers and final norm under a
linear score head; this folder has only what training changed (LoRA factors of layers 5 to 13, final norm, head).
`datc_train.quickstart.load_reward_model(folder=...)` puts it together and checks its checksum.

**Row.** The chat template of prompt and response with its closing `<|im_end|>` and newline, pooled at the last token;
a response that was cut off gets the same closing. The score is a raw logit, higher is better.

**What it prefers.** Responses that answer this prompt rather than another, end with a whole sentence, stay polite and
in English, and do not repeat themselves, fall apart, invent links or leave placeholders. It marks down the obvious
shortcuts: an empty or two-word answer, politeness or an apology without content, the prompt again, sentences that fit
any prompt.

**Data.** {prompts} prompts of `pairs_prompts/train.jsonl` with {pairs} pairs. The better side is a hand-written answer
(`pairs_prompts/answers.jsonl`) or whole sentences of a sample of the policy at temperature 0.3 or 1; the worse side is made
as `pairs_made.py` says, with phrases of `pairs_prompts/phrases.json`. Lengths are mixed on both sides. Loss: Bradley-Terry. Built
by `python -m benchmarks.reward_models.pairs`; everything in it is under Apache-2.0, as SmolLM2 is.

## Held-out accuracy

{count} pairs on the prompts of `pairs_prompts/heldout.jsonl`; their samples, hand-written answers and fixed phrases took no
part in training.

| kind of worse response | pairs | accuracy |
|---|---|---|
{table}
| **all** | {count} | **{accuracy:.3f}** |

On {spread_note}

## Limits

- It judges form and topic, not facts: a fluent, wrong answer on the right topic scores well.
- It has seen prompts of a sentence or two and responses of at most 48 tokens, in English. Longer ones, code,
  mathematics and several turns are outside of what it knows.
- It is small. A policy trained hard enough against it will find weak spots: the score is for watching methods at work,
  not for choosing a model to use.
"""


def write_card(folder: Path, report: dict[str, Any], pairs: int, prompts: int) -> None:
    table = "\n".join(f"| {kind} | {row['pairs']} | {row['accuracy']:.3f} |" for kind, row in report["by_kind"].items())
    note = (
        "samples of the policy at temperature 1 (two a prompt), the score's standard deviation within a prompt is "
        f"{report['spread']:.2f} (the scale was set so).\nFinished ones score {report['mean_finished']:.2f} in the "
        f"mean, cut ones {report['mean_cut']:.2f}. Correlation of score and number of tokens:\n"
        f"{report['length_correlation_as_sampled']:+.2f} as sampled (long ones are more often cut off), "
        f"{report['length_correlation_whole_sentences']:+.2f} when every sample ends with its last whole sentence."
    )
    text = CARD.format(
        pairs=pairs,
        prompts=prompts,
        count=report["pairs"],
        accuracy=report["accuracy"],
        table=table,
        spread_note=note,
    )
    (folder / "README.md").write_text(text)
