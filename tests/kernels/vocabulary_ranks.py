"""What `test_vocabulary_parallel.py` runs on every rank of a gloo group; results go to a file a rank."""

import os
import pickle
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from limits import PATIENCE

from datc_kernels import linear_credit, logits_credit
from datc_kernels.testing.inputs import CASES
from datc_kernels.testing.variants import using

OPS = ("linear_credit", "logits_credit", "logits_credit of rewards")


def cuts(columns, world):
    """Where the slices begin, and the end: uneven ones, and of four the last lies beyond what some cases' support holds."""
    starts = {1: [0], 2: [0, columns // 3], 4: [0, columns // 5, columns // 2, columns - 2]}[world]
    return list(pairwise([*starts, columns]))


def inputs(case, op, low, high):
    """Keyword arguments of `op` for the columns [low, high): leaves whose gradients are asked for stand first."""
    rest = {k: v for k, v in case.options.items() if k not in ("bias", "vocab_size")}
    rest |= {"vocab_start": low, "vocab_size": case.options.get("vocab_size")}
    table = case.reward_embedding[low:high]
    if op == "linear_credit":
        leaves = {"hidden": case.hidden.clone(), "weight": case.weight[low:high].clone()}
        if case.options.get("bias") is not None:
            leaves["bias"] = case.options["bias"][low:high].clone()
    else:
        leaves = {"logits": case.logits()[:, low:high].clone()}
    reward = {"reward_grad": case.reward_grad, "reward_embedding": table}
    if op == "logits_credit of rewards":
        reward = {"reward": case.reward_grad @ table.T}
    return {k: v.requires_grad_() for k, v in leaves.items()}, rest | reward | {"token_ids": case.token_ids}


def call(op, leaves, rest, **more):
    return (linear_credit if op == "linear_credit" else logits_credit)(**leaves, **rest, **more)


def fields(result):
    return {name: value.detach() for name, value in vars(result).items() if value is not None}


def incoming(n):
    return torch.linspace(-1, 1, n)


def numbers(job, rank, group):
    name, op, variant = job
    case = CASES[name]()
    leaves, rest = inputs(case, op, *cuts(len(case.weight), group.size())[rank])
    with using(variant) as backend:
        result = call(op, leaves, rest, process_group=group, backend=backend)
        (result.logprob * incoming(len(case.hidden))).sum().backward()
    return fields(result), {k: v.grad for k, v in leaves.items()}


def mistakes(rank, group):
    """Each on a case of its own: what a rank gets for arguments that do not fit the others'."""
    case = CASES["plain"]()
    V = len(case.weight)
    low, high = cuts(V, group.size())[rank]
    leaves, good = inputs(case, "linear_credit", low, high)
    wrong_id = case.token_ids.clone()
    wrong_id[3] = V
    wrong = {
        "overlap": {"vocab_start": max(0, low - 1)},
        "support": {"vocab_size": V + 1},
        "two supports": {"vocab_size": V - rank},
        "table": {"reward_embedding": good["reward_embedding"][: None if rank else -1]},
        "id": {"token_ids": wrong_id},
    }
    found = {}
    for name, change in wrong.items():
        try:
            call("linear_credit", leaves, good | change, process_group=group, backend="chunked")
        except ValueError as error:
            found[name] = str(error)
    return found


def settings(rank, group):
    """An ignore_index that is a place in another rank's slice; log-probabilities alone; a compiled call."""
    case = CASES["plain"]()
    n = len(case.hidden)
    leaves, rest = inputs(case, "linear_credit", *cuts(len(case.weight), group.size())[rank])
    ids = case.token_ids.clone().clamp(min=1)
    ids[2] = 0
    ignoring = call("linear_credit", leaves, rest | {"token_ids": ids, "ignore_index": 0}, process_group=group)
    (ignoring.logprob * incoming(n)).sum().backward()
    alone = {k: v for k, v in rest.items() if not k.startswith("reward")}
    compiled = torch.compile(
        lambda: call("linear_credit", leaves, rest, process_group=group), fullgraph=True, backend="aot_eager"
    )
    return {
        "ignoring": fields(ignoring),
        "gradient": leaves["hidden"].grad,
        "log-prob only": fields(call("linear_credit", leaves, alone, process_group=group)),
        "called": fields(call("linear_credit", leaves, rest, process_group=group)),
        "compiled": fields(compiled()),
    }


def run(rank, sizes, folder, jobs):
    """Groups of the first ranks, as many as `sizes` says, one after the other; the last has everyone."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", sizes[-1])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=sizes[-1], timeout=timedelta(seconds=PATIENCE))
    results = {}
    for size in sizes:
        group = dist.new_group(range(size))  # all ranks make it, the first take part
        if rank < size:
            found = {job: numbers(job, rank, group) for job in jobs}
            results[size] = found | {"mistakes": mistakes(rank, group), "settings": settings(rank, group)}
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(results))
    dist.destroy_process_group()
