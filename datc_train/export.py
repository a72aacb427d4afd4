"""`datc export RUN`: the trained policy as one folder that loads without PEFT."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from datc_train.checkpoint import checkpoints, readable
from datc_train.config import Config, config_from
from datc_train.disk import written
from datc_train.evaluate import best_step
from datc_train.models import load_base, wrapping
from datc_train.run_folder import read_lines, saved_config
from datc_train.sources import read_sources

_PROBE = "The quick brown fox jumps over the lazy dog. 1, 2, 3: naïve café 😀"


def export(run: Path, out: Path | None = None, which: str = "last") -> tuple[Path, float]:
    """Merge a run's adapter into its base in float32, write it in the run's dtype, read it back and compare.

    Args:
        run: the run's folder.
        out: where to; None: `run/export`. An existing folder is an error.
        which: "last", "best" (by evaluation), or a step.

    Returns the folder and the mean |difference of log-probabilities| between what was written and base + adapter, over a
    probing text; it is 0 up to rounding in the dtype.

    Raises:
        ValueError: a folder that is no run, has no such checkpoint, or holds an adapter to a model that was given in Python.
        FileExistsError: `out` exists. OSError: it cannot be written.
        RuntimeError: what was written is not what was trained (mean difference above 1e-3, in half precision 0.05).
    """
    config = _config_of(run)
    checkpoint = _checkpoint(run, which)
    out = run / "export" if out is None else out
    if out.exists():
        raise FileExistsError(f"out: {out} exists; choose another folder")
    made_of = read_sources(run)
    has_adapter = (checkpoint / "adapter_config.json").is_file()
    if has_adapter and made_of is not None and "policy" in made_of.given:
        raise ValueError(
            f"run: expected one whose config names its policy, got {run}, where train(...) was given one in Python; load that "
            f"model, then PeftModel.from_pretrained(model, {str(checkpoint)!r}).merge_and_unload()"
        )
    dtype = getattr(torch, config.dtype)
    with readable(checkpoint):
        tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    if has_adapter:
        base = load_base(config, torch.float32)
        tied = _untie(base)
        with readable(checkpoint), wrapping():
            trained: Any = PeftModel.from_pretrained(base, str(checkpoint)).eval()
        ids = torch.tensor([tokenizer.encode(_PROBE)])
        before = _logprobs(trained, ids)
        merged = trained.merge_and_unload(safe_merge=True)
        if tied and torch.equal(merged.get_input_embeddings().weight, merged.get_output_embeddings().weight):
            _tie(merged)
    else:
        with readable(checkpoint):
            merged = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        ids = torch.tensor([tokenizer.encode(_PROBE)])
        before = _logprobs(merged, ids)
    temporary = out.with_name(out.name + ".tmp")
    try:
        with written(f"out: {temporary}", "once it can be, datc export makes it"):
            shutil.rmtree(temporary, ignore_errors=True)
            merged.to(dtype).save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    after = _logprobs(AutoModelForCausalLM.from_pretrained(temporary, dtype=dtype).eval(), ids)
    difference = float((after - before).abs().mean())
    if not difference <= (1e-3 if dtype == torch.float32 else 0.05):
        raise RuntimeError(f"the exported model's log-probabilities differ by {difference:.3g} in the mean; it is in {temporary}")
    os.replace(temporary, out)
    return out, difference


@torch.no_grad()
def _logprobs(model: Any, ids: Tensor) -> Tensor:
    """log p of every token of a text but its first, [T - 1]."""
    logits = model(input_ids=ids).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]


def _untie(model: Any) -> bool:
    """A head of its own where embedding and head are one: an adapter on the embedding alone would be merged into both."""
    if not model.config.get_text_config().tie_word_embeddings:
        return False
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    _say_tied(model, False)
    return True


def _tie(model: Any) -> None:
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    _say_tied(model, True)


def _say_tied(model: Any, tied: bool) -> None:
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = tied


def _config_of(run: Path) -> Config:
    file = run / "config.yaml"
    if not file.is_file():
        raise ValueError(f"run: expected a run's folder with config.yaml, got {run}")
    return config_from(saved_config(run))


def _checkpoint(run: Path, which: str) -> Path:
    whole = {int(path.name): path for path in checkpoints(run)}
    if not whole:
        raise ValueError(f"run: expected one with checkpoints, got none in {run}")
    step = max(whole) if which == "last" else best_step(read_lines(run / "eval.jsonl")) if which == "best" else _number(which)
    if step not in whole:
        raise ValueError(f"checkpoint: expected last, best or one of {', '.join(map(str, whole))}, got {which}")
    return whole[step]


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
