"""The names that users and other trainers rely on, their exact signatures, and the examples that document them."""

import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import datc_kernels

ROOT = Path(__file__).parent.parent
OPTIONS = {"temperature": 1.0, "softcap": None, "logit_scale": 1.0, "vocab_size": None}
PARALLEL = {"ignore_index": -100, "process_group": None, "vocab_start": 0, "backend": None}
REQUIRED = inspect.Parameter.empty

# name -> (positional parameters, keyword-only parameters), with their defaults.
SIGNATURES = {
    "linear_credit": (
        {"hidden": REQUIRED, "weight": REQUIRED, "token_ids": REQUIRED, "reward_grad": None, "reward_embedding": None},
        {"bias": None} | OPTIONS | PARALLEL,
    ),
    "logits_credit": (
        {"logits": REQUIRED, "token_ids": REQUIRED, "reward_grad": None, "reward_embedding": None},
        {"reward": None} | OPTIONS | PARALLEL,
    ),
    "candidate_advantages": (
        {"hidden": REQUIRED, "weight": REQUIRED, "reward_grad": REQUIRED, "reward_embedding": REQUIRED},
        {"candidate_ids": None, "top_k": None, "bias": None} | OPTIONS | {"backend": None},
    ),
    "allocate_weights": (
        {"credit": REQUIRED, "advantage": REQUIRED, "lengths": None},
        {"mask": None, "frozen": None, "ceiling": 4.0, "utility": "advantage", "backend": None},
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    parameters = inspect.signature(getattr(datc_kernels, name)).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    keyword = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert len(positional) + len(keyword) == len(parameters)
    expected = SIGNATURES[name]
    # In order, too: positional arguments are a contract.
    assert list(positional.items()) == list(expected[0].items())
    assert list(keyword.items()) == list(expected[1].items())


def test_records():
    names = [f.name for f in dataclasses.fields(datc_kernels.TokenCredit)]
    assert set(names) == {
        "logprob",
        "entropy",
        "logsumexp",
        "sum_p2",
        "credit",
        "advantage",
        "reward_mean",
        "displacement_norm",
        "force_norm",
    }
    assert names[:4] == ["logprob", "entropy", "logsumexp", "sum_p2"]
    assert isinstance(datc_kernels.TokenCredit.cosine, property)
    assert [f.name for f in dataclasses.fields(datc_kernels.TokenWeights)] == ["weight", "temperature"]
    assert [f.name for f in dataclasses.fields(datc_kernels.Candidates)] == ["token_ids", "probability", "advantage"]
    for record in (datc_kernels.TokenCredit, datc_kernels.TokenWeights, datc_kernels.Candidates):
        assert record.__dataclass_params__.frozen


def test_what_is_exported_exists_and_is_documented():
    for name in datc_kernels.__all__:
        assert getattr(datc_kernels, name).__doc__, name
    assert set(SIGNATURES) | {"Candidates", "TokenCredit", "TokenWeights"} <= set(datc_kernels.__all__)


def test_annotations_are_types():
    """The package is typed (`py.typed`): every parameter of every public function, and its result."""
    assert (Path(datc_kernels.__file__).parent / "py.typed").exists()
    for name in SIGNATURES:
        signature = inspect.signature(getattr(datc_kernels, name))
        assert signature.return_annotation is not REQUIRED
        assert all(p.annotation is not REQUIRED for p in signature.parameters.values())


def modules():
    return sorted(m.name for m in pkgutil.walk_packages(datc_kernels.__path__, "datc_kernels.") if "backend" not in m.name)


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings_run(name):
    torch.manual_seed(0)
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_the_public_ops_have_examples():
    for name in SIGNATURES:
        assert ">>> " in inspect.getdoc(getattr(datc_kernels, name)), name


@pytest.mark.parametrize("path", sorted((ROOT / "datc_kernels").rglob("README.md")), ids=lambda p: p.parent.name)
def test_code_in_the_kernels_pages_runs(path):
    blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    scope = {}
    for block in blocks:
        exec(compile(block, str(path), "exec"), scope)
