"""prompts -> Rollout: whole groups of responses, drawn from exactly the policy that the loss sees."""

from datc_train.rollout.check import check_sampler
from datc_train.rollout.encode import encode_prompts, stop_token_ids, support_size
from datc_train.rollout.transformers_sampler import TransformersSampler

__all__ = ["TransformersSampler", "check_sampler", "encode_prompts", "stop_token_ids", "support_size"]
