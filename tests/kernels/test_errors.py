"""What cannot be right is refused: a ValueError that begins with the argument's name; what cannot run here, a RuntimeError."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from datc_kernels import allocate_weights, linear_credit, logits_credit, missing_backends
from datc_kernels.testing.inputs import plain

CASE = plain()
N, V, D, K = 16, 301, 24, 20
HALVES = ("reward_grad", "reward_embedding")
LINEAR = dict(zip(("hidden", "weight", "token_ids", *HALVES), CASE.args, strict=True))
LOGITS = {"logits": CASE.logits(), "token_ids": CASE.token_ids} | {name: LINEAR[name] for name in HALVES}
ALLOCATE = {"credit": torch.randn(N), "advantage": torch.ones(2), "lengths": torch.tensor([6, 10])}
PADDED = {"credit": torch.randn(2, 8), "advantage": torch.ones(2)}


def with_id(row, value, dtype=torch.int64):
    ids = CASE.token_ids.clone()
    ids[row] = value
    return ids.to(dtype)


def with_temperature(value):
    temperature = torch.ones(N)
    temperature[3] = value
    return temperature


# What both ops refuse: (argument, value).
SHARED = [
    ("token_ids", [1, 2, 3]),
    ("token_ids", torch.zeros(N)),
    ("token_ids", torch.zeros(N, dtype=torch.bool)),
    ("token_ids", torch.zeros(N, dtype=torch.int16)),
    ("token_ids", torch.zeros(N + 1, dtype=torch.int64)),
    ("token_ids", torch.zeros(N, 1, dtype=torch.int64)),
    ("token_ids", torch.zeros(N, dtype=torch.int64, device="meta")),
    ("token_ids", with_id(4, V)),
    ("token_ids", with_id(0, -1)),
    ("token_ids", with_id(15, -101)),
    ("token_ids", with_id(4, 2**31 - 1, torch.int32)),
    ("reward_grad", None),
    ("reward_grad", torch.zeros(N - 1, K)),
    ("reward_grad", torch.zeros(N, K, dtype=torch.int64)),
    ("reward_grad", torch.zeros(N * K)),
    ("reward_grad", torch.zeros(N, K, device="meta")),
    ("reward_embedding", None),
    ("reward_embedding", torch.zeros(V, K + 1)),
    ("reward_embedding", torch.zeros(0, K)),
    ("reward_embedding", torch.zeros(V * K)),
    ("reward_embedding", torch.zeros(V, K, dtype=torch.int8)),
    ("reward_embedding", torch.zeros(V, K, device="meta")),
    ("temperature", 0),
    ("temperature", 5e36),
    ("temperature", 1e-40),
    ("temperature", 10**400),
    ("temperature", 10**6000),
    ("temperature", with_temperature(1e37)),
    ("softcap", 1e-50),
    ("softcap", 1e40),
    ("logit_scale", 10**400),
    ("ignore_index", 2**70),
    ("temperature", -0.5),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", torch.tensor(1.0)),
    ("temperature", torch.ones(N - 1)),
    ("temperature", torch.ones(N, 1)),
    ("temperature", torch.ones(N, dtype=torch.int64)),
    ("temperature", torch.ones(N, device="meta")),
    ("temperature", with_temperature(0.0)),
    ("temperature", with_temperature(-1.0)),
    ("temperature", with_temperature(float("nan"))),
    ("temperature", with_temperature(float("inf"))),
    ("softcap", 0.0),
    ("softcap", -30.0),
    ("softcap", float("nan")),
    ("softcap", "30"),
    ("logit_scale", 0),
    ("logit_scale", -1.0),
    ("logit_scale", float("inf")),
    ("logit_scale", None),
    ("ignore_index", None),
    ("ignore_index", 1.5),
    ("ignore_index", True),
    ("vocab_size", 0),
    ("vocab_size", -5),
    ("vocab_size", V + 1),
    ("vocab_size", 300.0),
    ("vocab_size", True),
    ("vocab_start", 5),
    ("backend", "cudnn"),
    ("backend", ""),
    ("backend", 3),
]

LINEAR_ONLY = [
    ("hidden", None),
    ("hidden", torch.zeros(N, D, dtype=torch.int64)),
    ("hidden", torch.zeros(N, D, dtype=torch.complex64)),
    ("hidden", torch.zeros(2, N, D)),
    ("hidden", torch.zeros(N, D).to_sparse()),
    ("weight", torch.zeros(V, D + 1)),
    ("weight", torch.zeros(D, V)),
    ("weight", torch.zeros(V, D, device="meta")),
    ("bias", torch.zeros(V + 1)),
    ("bias", torch.zeros(V, 1)),
    ("bias", torch.zeros(V, dtype=torch.int64)),
    ("bias", torch.zeros(V, device="meta")),
]

LOGITS_ONLY = [
    ("logits", None),
    ("logits", torch.zeros(N)),
    ("logits", torch.zeros(N, 0)),
    ("logits", torch.zeros(N, V, dtype=torch.int64)),
    ("reward", torch.zeros(N, V)),  # beside reward_grad and reward_embedding
]

ALLOCATION = [
    ("credit", None),
    ("credit", torch.zeros(N, dtype=torch.int64)),
    ("credit", torch.zeros(2, 3, 4)),
    ("credit", torch.tensor(1.0)),
    ("advantage", [1.0, 2.0]),
    ("advantage", torch.ones(3)),
    ("advantage", torch.ones(2, 1)),
    ("advantage", torch.ones(2, dtype=torch.int64)),
    ("advantage", torch.ones(2, device="meta")),
    ("lengths", [6, 10]),
    ("lengths", torch.tensor([6, 9])),
    ("lengths", torch.tensor([6, 11])),
    ("lengths", torch.tensor([-2, 18])),
    ("lengths", torch.tensor([6.0, 10.0])),
    ("lengths", torch.tensor([[6, 10]])),
    ("lengths", torch.tensor([6, 10], device="meta")),
    ("mask", torch.ones(N, dtype=torch.bool)),
    ("frozen", torch.zeros(N)),
    ("frozen", torch.zeros(N - 1, dtype=torch.bool)),
    ("frozen", torch.zeros(2, 8, dtype=torch.bool)),
    ("frozen", torch.zeros(N, dtype=torch.bool, device="meta")),
    ("ceiling", 0.999),
    ("ceiling", -4.0),
    ("ceiling", float("nan")),
    ("ceiling", float("inf")),
    ("ceiling", "4"),
    ("ceiling", None),
    ("utility", "signed"),
    ("utility", None),
    ("backend", "nope"),
]

PADDED_ONLY = [
    ("lengths", torch.tensor([6, 10])),
    ("mask", torch.ones(2, 7, dtype=torch.bool)),
    ("mask", torch.ones(2, 8)),
    ("mask", torch.ones(16, dtype=torch.bool)),
    ("frozen", torch.zeros(16, dtype=torch.bool)),
]


def table():
    for op, arguments, rows in (
        (linear_credit, LINEAR, SHARED + LINEAR_ONLY),
        (logits_credit, LOGITS, SHARED + LOGITS_ONLY),
        (allocate_weights, ALLOCATE, ALLOCATION),
        (allocate_weights, PADDED, PADDED_ONLY),
    ):
        for i, (name, value) in enumerate(rows):
            yield pytest.param(op, arguments, name, value, id=f"{op.__name__}-{name}-{i}")


@pytest.mark.parametrize(("op", "arguments", "name", "value"), list(table()))
def test_k25_value_errors_begin_with_the_arguments_name(op, arguments, name, value):
    """K25 (ids outside the support), K63 (arguments that contradict each other) and every other wrong argument."""
    with pytest.raises(ValueError) as caught:
        op(**(arguments | {name: value}))
    message = str(caught.value)
    assert message.startswith(f"{name}: expected "), message
    assert ", got " in message


def test_the_arguments_themselves_are_fine():
    for op, arguments in (
        (linear_credit, LINEAR),
        (logits_credit, LOGITS),
        (allocate_weights, ALLOCATE),
        (allocate_weights, PADDED),
    ):
        op(**arguments)


def test_an_id_beyond_vocab_size_is_outside_the_support():
    """K25: also where the weight has such a row."""
    ids = with_id(0, 299)
    linear_credit(CASE.hidden, CASE.weight, ids, vocab_size=300)
    with pytest.raises(ValueError, match=r"^token_ids: expected ids from 0 to 298 or ignore_index -100, got 299 in row 0"):
        linear_credit(CASE.hidden, CASE.weight, ids, vocab_size=299)


def test_a_temperature_that_cannot_be_is_harmless_in_an_ignored_row():
    got = linear_credit(**(LINEAR | {"token_ids": with_id(3, -100), "temperature": with_temperature(0.0)}))
    assert got.logprob.isfinite().all()


def test_k28_empty_weight():
    """K28: a ZeRO-3 shard has numel 0; the message says to gather."""
    for empty in (torch.zeros(0, D), torch.zeros(0)):
        with pytest.raises(ValueError, match=r"^weight: .*gathered first"):
            linear_credit(**(LINEAR | {"weight": empty}))


def test_k38_flattened_weight():
    """K38: FSDP flattens parameters into one vector."""
    with pytest.raises(ValueError, match=r"^weight: expected shape \[V, D\], got \(7224,\).*gathered first"):
        linear_credit(**(LINEAR | {"weight": CASE.weight.flatten()}))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_k40_quantised_weight(dtype):
    """K40: integers and float8 without their scales mean nothing; the message says to dequantise."""
    with pytest.raises(ValueError, match=r"^weight: .*dequantise it first.*" + str(dtype)):
        linear_credit(**(LINEAR | {"weight": torch.zeros(V, D).to(dtype)}))


@pytest.fixture
def mesh():
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["weight", "hidden", *HALVES])
def test_k37_a_sharded_tensor_is_refused_with_the_way_out(name, mesh):
    """K37: a DTensor (FSDP2) is detected, and the message says how to gather it."""
    sharded = DTensor.from_local(LINEAR[name], mesh)
    with pytest.raises(ValueError, match=rf"^{name}: .*DTensor.*full_tensor"):
        linear_credit(**(LINEAR | {name: sharded}))


@pytest.mark.parametrize("backend", ["cpu", "triton", "cuda"])
def test_k63_a_known_backend_that_cannot_run_says_why(backend):
    """K59, K63: never a silent fallback. Backends that do run here are tested with the others."""
    if backend not in missing_backends():
        pytest.skip(f"{backend} runs here")
    for op, arguments in ((linear_credit, LINEAR), (logits_credit, LOGITS), (allocate_weights, ALLOCATE)):
        with pytest.raises(RuntimeError, match=f"^backend: '{backend}' cannot run here: "):
            op(**arguments, backend=backend)


def test_reward_of_the_wrong_shape():
    """`reward` [N, rows]: one row a token, at least one column."""
    for wrong in (torch.zeros(N + 1, V), torch.zeros(N), torch.zeros(N, 0), torch.zeros(N, V, dtype=torch.int64), None):
        arguments = {"logits": LOGITS["logits"], "token_ids": CASE.token_ids, "reward": wrong}
        if wrong is None:
            assert logits_credit(**arguments).credit is None
            continue
        with pytest.raises(ValueError, match=r"^reward: expected"):
            logits_credit(**arguments)


def test_a_process_group_is_one():
    """Vocabulary-parallel heads themselves: `test_vocabulary_parallel.py`."""
    for op, arguments in ((linear_credit, LINEAR), (logits_credit, LOGITS)):
        with pytest.raises(ValueError, match=r"^process_group: expected a torch.distributed.ProcessGroup or None, got str"):
            op(**arguments, process_group="tensor_parallel")
