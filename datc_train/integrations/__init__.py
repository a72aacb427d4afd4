"""Token credit in trainers that are not ours: one plain function, and a drop-in for TRL (`datc_train.integrations.trl`)."""

from datc_train.integrations.token_advantages import TokenAdvantages, token_advantages

__all__ = ["TokenAdvantages", "token_advantages"]
