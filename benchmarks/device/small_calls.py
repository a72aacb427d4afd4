"""Small calls of every kernel, for a memory checker to watch: `python -m benchmarks.device.small_calls DEVICE`."""

from __future__ import annotations

import sys

import torch

from datc_kernels import allocate_weights, linear_credit, logits_credit, missing_backends
from datc_kernels.testing.variants import using

from .setting import Setting, draw


def main(device: str) -> None:
    setting = Setting(torch.device(device), dry=device == "cpu")
    N, V = setting.pick(130, 3), setting.pick(1500, 330)  # one row, one column beyond whole blocks
    for variant in ("triton", "triton by pointers"):
        with using(variant):
            for D, K in (setting.wide, (64, 72)) if not setting.dry else ((32, 24),):
                x = draw(setting, N, V, D, K)
                linear_credit(*x.args, backend="triton")
                linear_credit(*x.args[:3], vocab_size=V - 7, backend="triton")
                linear_credit(*x.args[:4], x.reward_embedding[: V - 90], backend="triton")
    hidden = x.hidden.clone().requires_grad_(True)
    linear_credit(hidden, x.weight, x.token_ids, backend="triton").logprob.sum().backward()
    logits = (x.hidden @ x.weight.T).requires_grad_(True)
    logits_credit(logits, x.token_ids, *x.args[3:], backend="triton")
    logits_credit(logits, x.token_ids, reward=logits.detach(), backend="triton")
    logits_credit(logits, x.token_ids, backend="triton").logprob.sum().backward()
    lengths = torch.tensor([1, 2, N - 3], device=setting.device)[: setting.pick(3, 2)]
    credit = torch.randn(int(lengths.sum()), device=setting.device)
    allocate_weights(credit, torch.ones(len(lengths), device=setting.device), lengths, backend="triton")
    if "cuda" not in missing_backends():
        logits_credit(logits, x.token_ids, reward=logits.detach()[:, : V - 90], vocab_size=V - 7, backend="cuda")
        allocate_weights(credit, torch.ones(len(lengths), device=setting.device), lengths, backend="cuda")
    if setting.device.type == "cuda":
        torch.cuda.synchronize()
    print("every call ran")


if __name__ == "__main__":
    main(sys.argv[1])
