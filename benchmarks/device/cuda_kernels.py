"""The CUDA C++ kernels, where they are built: against float64, bits in any batch, on a stream and in a graph, and a time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from datc_kernels import allocate_weights, logits_credit, missing_backends
from datc_kernels.testing.inputs import CreditCase

from . import invariance, others
from .clock import Clock
from .report import Part
from .setting import Setting, draw


def run(part: Part, setting: Setting) -> None:
    if "cuda" in missing_backends():
        part.notes.append(f"backend cuda is not here: {missing_backends()['cuda']}")
        return
    others.logits(part, setting, "cuda")
    others.weights(part, setting, ("cuda",))
    part.attempt("invariance", lambda: _invariance(part, setting))
    if setting.device.type == "cuda":
        part.attempt("streams and graphs", lambda: _streams(part, setting))
    part.attempt("time", lambda: _time(part, setting))


def _invariance(part: Part, setting: Setting) -> None:
    x = draw(setting, setting.pick(257, 5), setting.pick(2500, 280), setting.pick(2500, 280), 8, seed=5)

    def alone(x: CreditCase) -> object:  # hidden has as many columns as the vocabulary: it is the logits
        return logits_credit(x.hidden, x.token_ids, backend="cuda")

    def given(x: CreditCase) -> object:
        return logits_credit(x.hidden, x.token_ids, reward=x.hidden, backend="cuda")

    calls: dict[str, Callable[[CreditCase], object]] = {"cuda, logits": alone, "cuda, u given": given}
    for name, call in calls.items():
        invariance.rows(part, setting, name, call, x)  # type: ignore[arg-type]


def _streams(part: Part, setting: Setting) -> None:
    """Work that is queued on another stream, and a replay with new numbers in the same places, give the same bits."""
    x = draw(setting, 64, 5000, 64, 8)
    z, other = x.hidden @ x.weight.T, x.hidden.flip(0) @ x.weight.T
    lengths = torch.tensor([10, 0, 54], device=setting.device)
    advantage = torch.ones(3, device=setting.device)

    def both(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = logits_credit(z, x.token_ids, reward=z, backend="cuda")
        assert found.credit is not None
        return found.credit, allocate_weights(found.credit, advantage, lengths, backend="cuda").weight

    expected = [both(z), both(other)]
    torch.cuda.synchronize()
    held, stream = z.clone(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late = both(held.copy_(other))
    stream.synchronize()
    part.holds("another stream", all(map(torch.equal, late, expected[1])))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both(held)
    for numbers, wanted in zip((z, other), expected, strict=True):
        held.copy_(numbers)
        graph.replay()
        torch.cuda.synchronize()
        part.holds("a graph's replay", all(map(torch.equal, captured, wanted)))


def _time(part: Part, setting: Setting) -> None:
    clock, V = Clock(setting), setting.shapes[0].V
    x = draw(setting, setting.pick(4096, 4), V, 64, 8)
    z = x.hidden @ x.weight.T
    out = torch.empty_like(z)
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: out.copy_(z),
        "cuda": lambda: logits_credit(z, x.token_ids, backend="cuda"),
        "triton": lambda: logits_credit(z, x.token_ids, backend="triton"),
    }
    times, failed = clock.compare(calls, seconds=2.0)
    if failed:
        raise RuntimeError(str(failed))
    part.rows += [{"call": f"logits alone, {name}", "N": len(z), "V": V, "ms": round(t.median, 4)} for name, t in times.items()]
