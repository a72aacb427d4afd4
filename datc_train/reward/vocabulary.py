"""Is the policy's vocabulary the reward model's?"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

_SHOWN = 5


def check_same_vocabulary(policy: PreTrainedTokenizerBase, reward: PreTrainedTokenizerBase) -> None:
    """Accept two tokenizers whose ids mean the same tokens, wherever both have the id or both have the token.

    Compared id by id, added tokens included; sizes mean nothing (a padded or extended vocabulary is still the same one,
    and two of equal size can differ in every id).

    Raises:
        ValueError: names the first ids that differ, or says that the two share no token at all.
    """
    if policy is reward:
        return
    policy_ids, reward_ids = policy.get_vocab(), reward.get_vocab()
    policy_tokens = {token_id: token for token, token_id in policy_ids.items()}
    reward_tokens = {token_id: token for token, token_id in reward_ids.items()}
    different = {i for i in policy_tokens.keys() & reward_tokens.keys() if policy_tokens[i] != reward_tokens[i]}
    different |= {policy_ids[token] for token in policy_ids.keys() & reward_ids.keys() if policy_ids[token] != reward_ids[token]}
    if different:
        shown = ", ".join(
            f"id {i} is {policy_tokens.get(i)!r} in the policy's and {reward_tokens.get(i)!r} in the reward model's"
            for i in sorted(different)[:_SHOWN]
        )
        raise ValueError(
            "policy_tokenizer: expected the reward model's vocabulary, id by id (credit across different tokenizers is "
            f"not supported); got {len(different)} ids that differ: {shown}"
        )
    if not policy_ids.keys() & reward_ids.keys():
        raise ValueError("policy_tokenizer: expected the reward model's vocabulary, got one with no token in common")
