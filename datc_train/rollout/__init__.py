"""prompts -> Rollout: whole groups of responses, drawn from exactly the policy that the loss sees."""

from datc_train.rollout.check import check_sampler
from datc_train.rollout.encode import encode_prompts, stop_token_ids, support_size
from datc_train.rollout.make import make_sampler
from datc_train.rollout.sampler import Sampler
from datc_train.rollout.transformers_sampler import TransformersSampler
from datc_train.rollout.vllm_sampler import VllmSampler

__all__ = [
    "Sampler",
    "TransformersSampler",
    "VllmSampler",
    "check_sampler",
    "encode_prompts",
    "make_sampler",
    "stop_token_ids",
    "support_size",
]
