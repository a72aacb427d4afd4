"""Heads whose columns lie on several ranks: gloo groups of two and four processes against one process."""

import pickle

import pytest
import torch
from torch import multiprocessing
from vocabulary_ranks import OPS, call, cuts, fields, incoming, inputs, run

from datc_kernels import linear_credit, missing_backends
from datc_kernels.finalise import Sampled, finalise
from datc_kernels.linear_credit import chunked, reference
from datc_kernels.linear_credit.inputs import LinearInputs
from datc_kernels.logit_transform import LogitTransform
from datc_kernels.reward_half import to_token_credit
from datc_kernels.testing.inputs import CASES, Sizes
from datc_kernels.testing.rounding import assert_rounded
from datc_kernels.vocabulary_parallel import Slice, fold_of_slice, merge_in_order

NAMES = ("plain", "p_y = 1 - 1e-12", "p_other = 1 - 1e-12", "ties", "short reward vocabulary", "masked columns", "everything")
VARIANTS = ["reference", "chunked", *(b for b in ("cpu", "triton") if b not in missing_backends())]
# The interpreter is slow: one case that has everything, one whose last ranks have no reward row.
JOBS = [
    (name, op, variant)
    for name in NAMES
    for op in OPS
    for variant in VARIANTS
    if variant != "triton" or name in ("everything", "ties")
]


SIZES = (2, 4)


@pytest.fixture(scope="module")
def everyone(tmp_path_factory):
    """What every rank found, by the size of its group; one set of processes for both."""
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(run, (SIZES, str(folder), JOBS), nprocs=SIZES[-1])
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(SIZES[-1])]


@pytest.fixture(scope="module", params=SIZES)
def ranks(request, everyone):
    """What every rank of a group of that size found."""
    return [found[request.param] for found in everyone[: request.param]]


def identical(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k].view(torch.int32), b[k].view(torch.int32)) for k in a)


def close(found, expected, name=""):
    """Sums in another order, float32; differences of differences."""
    assert_rounded(found, expected, length=Sizes.V + Sizes.D, condition=4, name=name)


@pytest.mark.parametrize("job", JOBS, ids=" ".join)
def test_every_rank_has_the_same_bits(ranks, job):
    first, *others = (rank[job] for rank in ranks)
    for other in others:
        assert identical(first[0], other[0])
        if "hidden" in first[1]:
            assert torch.equal(first[1]["hidden"], other[1]["hidden"])


@pytest.mark.parametrize("job", JOBS, ids=" ".join)
def test_ranks_find_what_one_process_finds(ranks, job):
    name, op, variant = job
    case = CASES[name]()
    leaves, rest = inputs(case, op, 0, len(case.weight))
    expected = call(op, leaves, rest, backend=variant)
    (expected.logprob * incoming(len(case.hidden))).sum().backward()
    for field, value in fields(expected).items():
        close(ranks[0][job][0][field], value, field)
    for leaf, tensor in leaves.items():
        gradients = [rank[job][1][leaf] for rank in ranks]
        whole = gradients[0] if leaf == "hidden" else torch.cat(gradients, dim=1 if leaf == "logits" else 0)
        close(whole, tensor.grad, f"gradient of {leaf}")


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("name", NAMES)
def test_bits_are_those_of_one_process_that_folds_the_same_slices(ranks, name, backend):
    case = CASES[name]()
    o = case.options
    transform = LogitTransform(o.get("logit_scale", 1.0), o.get("softcap"), 1.0, None)
    if isinstance(o.get("temperature"), torch.Tensor):
        transform = LogitTransform(o.get("logit_scale", 1.0), o.get("softcap"), 1.0, o["temperature"])
    elif "temperature" in o:
        transform = LogitTransform(o.get("logit_scale", 1.0), o.get("softcap"), o["temperature"], None)
    support = o.get("vocab_size", len(case.weight))
    folds = []
    for low, high in cuts(len(case.weight), len(ranks)):
        table = case.reward_embedding[low:high]
        part = Slice("a name", low, high - low, len(table), support, -100)
        bias = None if o.get("bias") is None else o["bias"][low:high]
        ids = part.local_ids(case.token_ids)
        x = LinearInputs(case.hidden, case.weight[low:high], ids, bias, transform, part.support, case.reward_grad, table)
        folds.append(fold_of_slice(x, {"reference": reference, "chunked": chunked}[backend].forward))
    nothing = torch.zeros(len(case.hidden), dtype=torch.bool)
    sampled = Sampled(nothing, nothing, case.token_ids < min(len(case.reward_embedding), support))
    assert identical(
        fields(to_token_credit(*finalise(merge_in_order(folds), sampled))), ranks[0][name, "linear_credit", backend][0]
    )


def test_an_ignore_index_may_be_any_id(ranks):
    case = CASES["plain"]()
    ids = case.token_ids.clone().clamp(min=1)
    ids[2] = 0
    hidden = case.hidden.clone().requires_grad_()
    expected = linear_credit(hidden, case.weight, ids, case.reward_grad, case.reward_embedding, ignore_index=0)
    (expected.logprob * incoming(len(ids))).sum().backward()
    for rank in ranks:
        found = rank["settings"]
        for field, value in fields(expected).items():
            close(found["ignoring"][field], value, field)
            assert found["ignoring"][field][2] == 0
        close(found["gradient"], hidden.grad)
        assert not found["gradient"][2].any()


def test_modes(ranks):
    for rank in ranks:
        found = rank["settings"]
        assert identical(found["called"], found["compiled"])
        assert found["log-prob only"].keys() == {"logprob", "entropy", "logsumexp", "sum_p2"}
        for field, value in found["log-prob only"].items():
            close(value, found["called"][field], field)


def test_slices_that_do_not_fit_are_an_error_on_every_rank(ranks):
    starts = {
        "overlap": r"^vocab_start: expected \[0, \d+.*slices in rank order that follow each other",
        "support": r"^vocab_size: expected one number of at most 301 .*got \[302, 302",
        "two supports": r"^vocab_size: expected one number",
        "table": r"^reward_embedding: expected this rank's rows, from vocab_start on, of one table",
        "id": r"^token_ids: expected ids within the support of all ranks, got 301 in row 3",
    }
    for rank in ranks:
        assert rank["mistakes"].keys() == starts.keys()
        for name, pattern in starts.items():
            with pytest.raises(ValueError, match=pattern):
                raise ValueError(rank["mistakes"][name])
