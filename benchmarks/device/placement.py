"""Where tensors are and how calls are run: a GPU that is not current (K35), graphs, torch.compile, no wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from datc_kernels import allocate_weights, linear_credit, logits_credit
from datc_kernels.testing.inputs import CreditCase

from .report import Part
from .setting import Setting, draw


def _step(x: CreditCase, backend: str = "triton") -> tuple[Tensor, ...]:
    """All three ops on one batch: log-probabilities, credit, credit over logits that exist, weights."""
    out = linear_credit(*x.args, backend=backend)
    logits = x.hidden @ x.weight.T
    existing = logits_credit(logits, *x.args[2:], backend=backend)
    assert out.credit is not None
    assert existing.credit is not None
    weights = allocate_weights(out.credit, x.hidden[:1, 0].float(), backend=backend)
    return out.logprob, out.credit, existing.credit, weights.weight


def run(part: Part, setting: Setting) -> None:
    inputs = lambda seed=0: draw(setting, setting.pick(130, 4), setting.pick(1500, 330), 64, 64, seed=seed)  # noqa: E731
    part.attempt("modes", lambda: _modes(part, inputs()))
    if setting.device.type == "cuda":
        _on_a_gpu(part, setting, inputs)
    else:
        part.notes.append("no GPU: no CUDA graph, no synchronisation, no second GPU to look at")
    part.attempt("torch.compile", lambda: _compile(part, setting, inputs()))


def _on_a_gpu(part: Part, setting: Setting, inputs: Callable[..., CreditCase]) -> None:
    part.attempt("no synchronisation", lambda: _no_synchronisation(part, inputs()))
    part.attempt("CUDA graph", lambda: _graph(part, inputs(), inputs(1)))
    part.attempt("a side stream", lambda: _stream(part, inputs()))
    if torch.cuda.device_count() > 1:
        part.attempt("another GPU", lambda: _other_gpu(part, setting, inputs()))
    else:
        part.notes.append("one GPU: inputs on one that is not current were not tried")


def _equal(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(a, b, strict=True))


def _compile(part: Part, setting: Setting, x: CreditCase) -> None:
    def gradient(step: Callable[..., Any]) -> tuple[Tensor, ...]:
        hidden = x.hidden.clone().requires_grad_(True)
        out = step(hidden)
        return out.detach(), *torch.autograd.grad(out.sum(), hidden)

    def call(hidden: Tensor) -> Tensor:
        return linear_credit(hidden, x.weight, x.token_ids, x.reward_grad, x.reward_embedding, backend="triton").logprob * 2.0

    traced = torch.compile(call, fullgraph=True, backend="aot_eager" if setting.dry else "inductor")
    part.holds("torch.compile: one graph, the same bits", _equal(gradient(traced), gradient(call)))


def _modes(part: Part, x: CreditCase) -> None:
    expected = _step(x)
    with torch.no_grad():
        part.holds("no_grad", _equal(_step(x), expected))
    with torch.inference_mode():
        part.holds("inference mode", _equal(_step(x), expected))
    expected_credit = linear_credit(*x.args, backend="triton").credit
    with torch.autocast(x.hidden.device.type, dtype=torch.bfloat16):
        inside = linear_credit(*x.args, backend="triton").credit
    assert expected_credit is not None
    assert inside is not None
    part.holds("autocast", torch.equal(expected_credit, inside))
    empty = linear_credit(*x.rows(slice(0, 0)).args, backend="triton")
    part.holds("no rows", len(empty.logprob) == 0)


def _no_synchronisation(part: Part, x: CreditCase) -> None:
    _step(x)
    try:
        torch.cuda.set_sync_debug_mode("error")
        _step(x)
        waited = False
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        waited = True
        part.errors.append(f"no synchronisation: {error}")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    part.holds("no call waits for the device", not waited)


def _graph(part: Part, x: CreditCase, other: CreditCase) -> None:
    expected, expected_other = _step(x), _step(other)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _step(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _step(x)
    graph.replay()
    part.holds("CUDA graph: the same bits", _equal(captured, expected))
    for mine, theirs in zip(x.args, other.args, strict=True):
        mine.copy_(theirs)
    graph.replay()
    part.holds("CUDA graph: other inputs", _equal(captured, expected_other))


def _stream(part: Part, x: CreditCase) -> None:
    expected = _step(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        got = _step(x)
    torch.cuda.synchronize()
    part.holds("a side stream", _equal(got, expected))


def _other_gpu(part: Part, setting: Setting, x: CreditCase) -> None:
    other = torch.device("cuda", (setting.device.index or 0) + 1)
    moved = x.to(x.hidden.dtype, str(other))
    got = _step(moved)
    on_it = all(t.device == other for t in got)
    part.holds("a GPU that is not current: results on it", on_it)
    if torch.cuda.get_device_name(other) == torch.cuda.get_device_name(setting.device):
        part.holds("a GPU that is not current: the same bits", _equal(got, _step(x)))
