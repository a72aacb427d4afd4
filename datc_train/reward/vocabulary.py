"""Is the policy's vocabulary the reward model's, and if not, what are its ids to the reward model?"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from datc_train.reward.rows import special_ids
from datc_train.reward.token_bytes import token_bytes

_SHOWN = 5


@dataclass(frozen=True)
class PolicyVocabulary:
    """The ids that responses come in."""

    difference: str | None  # from the reward model's vocabulary, in words; None where it is the same one
    bytes_of: list[bytes | None]  # of every id
    special_ids: frozenset[int]
    own: Mapping[int, int] | None  # special id of the reward model -> id of the same content; None: each is its own

    def own_ids(self, reward_ids: Collection[int]) -> frozenset[int]:
        """Special ids of the reward model as the policy's, without those that it lacks."""
        return frozenset(reward_ids if self.own is None else (self.own[i] for i in reward_ids if i in self.own))

    def whole_share(self, reward_bytes: Iterable[bytes | None]) -> float:
        """Share of the tokens whose bytes are one token of the reward model's; the others are several of them, or none."""
        tokens, known = [token for token in self.bytes_of if token], set(reward_bytes)
        return sum(token in known for token in tokens) / max(1, len(tokens))


def policy_vocabulary(
    policy: PreTrainedTokenizerBase, reward: PreTrainedTokenizerBase, reward_bytes: list[bytes | None]
) -> PolicyVocabulary:
    """Compared by `difference`. Raises ValueError for a policy tokenizer whose bytes are not known (`token_bytes`)."""
    differs = difference(policy, reward)
    bytes_of = reward_bytes if policy is reward else token_bytes(policy)
    if differs is None:
        return PolicyVocabulary(None, bytes_of, special_ids(policy) | special_ids(reward), None)
    ids = policy.get_vocab()
    own = {i: ids[token] for i in special_ids(reward) if (token := reward.convert_ids_to_tokens(i)) in ids}
    return PolicyVocabulary(differs, bytes_of, special_ids(policy), own)


def difference(policy: PreTrainedTokenizerBase, reward: PreTrainedTokenizerBase) -> str | None:
    """The first ids that differ, or that the two share no token at all; None where ids mean the same tokens in both.

    Compared id by id, wherever both have the id or both have the token, added tokens included; sizes mean nothing (a padded
    or extended vocabulary is still the same one, and two of equal size can differ in every id).
    """
    if policy is reward:
        return None
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
        return f"{len(different)} ids that differ: {shown}"
    return None if policy_ids.keys() & reward_ids.keys() else "one with no token in common"


def check_same_vocabulary(policy: PreTrainedTokenizerBase, reward: PreTrainedTokenizerBase) -> None:
    """Raises ValueError unless ids mean the same tokens in both (`difference`)."""
    differs = difference(policy, reward)
    if differs is not None:
        raise ValueError(
            "policy_tokenizer: expected the reward model's vocabulary, id by id (of a policy with another one, tell the "
            f"RewardModel: policy_tokenizer=...); got {differs}"
        )
