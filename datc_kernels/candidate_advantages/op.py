"""`candidate_advantages`: probability and local advantage of some columns of each row; logits never exist."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..dispatch import choose, implementation
from ..finalise import Support
from ..logit_transform import LogitTransform, compute_dtype
from ..reward_half import check_reward
from ..types import Candidates
from .inputs import CandidateInputs

_NO_ID = -100  # never an id of a candidate


def candidate_advantages(
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    reward_grad: Tensor | None,  # [N, K]
    reward_embedding: Tensor | None,  # [rows, K]
    *,
    candidate_ids: Tensor | None = None,  # [N, k]
    top_k: int | None = None,
    bias: Tensor | None = None,  # [V]
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
    backend: str | None = None,
) -> Candidates:
    """Probability and local advantage of given candidates, or of the `top_k` most likely ones, without ever holding [N, V].

    With z = softcap * tanh(logit_scale * (hidden weight^T + bias) / softcap) / temperature, p = softmax(z) over the first
    `vocab_size` columns and u = reward_grad reward_embedding^T:

        A_v = u_v - sum_w p_w u_w           the first-order change of the reward when candidate v stands at this position,
                                            against the policy's own average (sum_v p_v A_v = 0)

    Args:
        hidden: policy hidden states that predict the tokens, [N, D] float32, bfloat16, float16 or float64.
        weight: LM head, [V, D]. If its dtype differs from hidden's, both are converted to float32 (float64 if one is).
        reward_grad: gradient of the raw reward score with respect to the reward model's input embedding at each token, [N, K].
        reward_embedding: what the reward model's embedding module returns for every id, [rows, K]. With fewer rows than
            columns, A is that of p conditioned on the columns that have a row, and 0 in the others. None for this and for
            reward_grad: probabilities only, no reward product runs.
        candidate_ids: columns to look at, [N, k] int64 or int32, in any order.
        top_k: instead of candidate_ids, take the k columns of largest p; of equal ones the lower id comes first.
        bias: of the LM head, [V].
        temperature: a number, or a tensor [N].
        softcap: soft-cap of the logits (Gemma), before the temperature. logit_scale: factor on the raw logits (Cohere, Granite).
        vocab_size: columns of the support; padded columns beyond it do not exist. None: all of them.
        backend: None, "reference", "chunked", "cpu" (C++; float32 results) or "triton" (the library's products with the row
            kernel between; float32 results).

    Returns:
        Candidates: token_ids [N, k] int64, and probability (over the whole support) and advantage [N, k] in float32 (float64
        with float64 inputs); advantage is None without a reward gradient. With top_k sorted by falling probability. All of it
        is constant: no gradient flows through it.

    Raises:
        ValueError: beginning with the argument's name. On CPUs also for an id outside the support; on other devices the
            values of such an id are NaN.
        RuntimeError: the backend asked for cannot run here.

    Example:
        >>> import torch
        >>> from datc_kernels import candidate_advantages
        >>> hidden, weight = torch.randn(8, 16), torch.randn(100, 16)      # policy: hidden states, LM head
        >>> grad, table = torch.randn(8, 12), torch.randn(100, 12)         # reward model: dR/de, embedding table
        >>> best = candidate_advantages(hidden, weight, grad, table, top_k=5)
        >>> best.token_ids.shape, bool((best.probability.diff(dim=1) <= 0).all())
        (torch.Size([8, 5]), True)

    Source: DATC (arXiv 2610.32772).
    """
    checks.check_float("hidden", hidden, 2, "[N, D]")
    checks.check_float("weight", weight, 2, "[V, D]")
    checks.check_not_empty("weight", weight)
    n, device = hidden.shape[0], hidden.device
    checks.check_size("weight", weight, 1, hidden.shape[1], "D of hidden")
    checks.check_device("weight", weight, "hidden", device)
    if bias is not None:
        checks.check_float("bias", bias, 1, "[V]")
        checks.check_size("bias", bias, 0, weight.shape[0], "V of weight")
        checks.check_device("bias", bias, "hidden", device)
    check_reward(reward_grad, reward_embedding, n, device)
    scalar, per_row = checks.check_temperature(temperature, n, device)
    support = checks.check_vocab_size(vocab_size, weight.shape[0], "V of weight")
    count = _check_candidates(candidate_ids, top_k, n, support, device)
    ids, values = torch.ops.datc.candidate_advantages(
        hidden.detach(),
        weight.detach(),
        None if reward_grad is None else reward_grad.detach(),
        None if reward_embedding is None else reward_embedding.detach(),
        candidate_ids,
        None if bias is None else bias.detach(),
        None if per_row is None else per_row.detach(),
        count,
        scalar,
        checks.check_positive("logit_scale", logit_scale),
        None if softcap is None else checks.check_positive("softcap", softcap),
        support,
        choose(backend, device, compute_dtype(hidden, weight, reward_grad, reward_embedding)),
    )
    return Candidates(ids, values[0], None if reward_grad is None else values[1])


def _check_candidates(candidate_ids: object, top_k: object, n: int, support: int, device: torch.device) -> int:
    """k; exactly one of the two is there and right."""
    if candidate_ids is None:
        if top_k is None:
            checks.fail("candidate_ids", "ids [N, k], or top_k instead", "neither")
        if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= support:
            checks.fail("top_k", f"an integer from 1 to {support} (the support)", repr(top_k))
        return top_k
    if top_k is not None:
        checks.fail("top_k", "None beside candidate_ids", repr(top_k))
    ids = checks.check_tensor("candidate_ids", candidate_ids, 2, "[N, k]")
    if ids.dtype not in checks.INTEGERS:
        checks.fail("candidate_ids", "int64 or int32", ids.dtype)
    checks.check_size("candidate_ids", ids, 0, n, "N of hidden")
    checks.check_device("candidate_ids", ids, "hidden", device)
    return int(ids.shape[1])


@torch.library.custom_op("datc::candidate_advantages", mutates_args=())
def _op(
    hidden: Tensor,
    weight: Tensor,
    reward_grad: Tensor | None,
    reward_embedding: Tensor | None,
    candidate_ids: Tensor | None,
    bias: Tensor | None,
    row_temperature: Tensor | None,
    count: int,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    vocab_size: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Ids [N, k] and values [1 or 2, N, k]: probability and, with a reward gradient, advantage."""
    checks.check_row_temperature(row_temperature, hidden.new_zeros(hidden.shape[0]), _NO_ID)
    outside, inside = None, None
    if candidate_ids is not None:
        outside = (candidate_ids < 0) | (candidate_ids >= vocab_size)
        if hidden.device.type == "cpu" and bool(outside.any()):
            row, column = outside.nonzero()[0].tolist()
            checks.fail("candidate_ids", f"ids from 0 to {vocab_size - 1}", f"{int(candidate_ids[row, column])} in row {row}")
        inside = candidate_ids.to(torch.int64).clamp(0, vocab_size - 1)
    transform = LogitTransform(logit_scale, softcap, temperature, row_temperature)
    rewarded = 0 if reward_embedding is None else min(reward_embedding.shape[0], vocab_size)
    inputs = CandidateInputs(
        hidden,
        weight,
        reward_grad,
        reward_embedding,
        bias,
        transform,
        Support(vocab_size, rewarded, _NO_ID),
        inside,
        count,
    )
    with torch.autocast(hidden.device.type, enabled=False):
        ids, values = implementation("candidate_advantages", backend, hidden.device).forward(inputs)
    if candidate_ids is not None and outside is not None:
        return candidate_ids.to(torch.int64, copy=True), values.masked_fill(outside, torch.nan)
    return ids.contiguous(), values


@_op.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    reward_grad: Tensor | None,
    reward_embedding: Tensor | None,
    candidate_ids: Tensor | None,
    bias: Tensor | None,
    row_temperature: Tensor | None,
    count: int,
    *_settings: object,
) -> tuple[Tensor, Tensor]:
    dtype, n = compute_dtype(hidden, weight, reward_grad, reward_embedding), hidden.shape[0]
    k = count if candidate_ids is None else candidate_ids.shape[1]
    values = hidden.new_empty((1 if reward_grad is None else 2, n, k), dtype=dtype)
    return hidden.new_empty((n, k), dtype=torch.int64), values
