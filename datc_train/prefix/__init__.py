"""Rows that begin alike, read once: keys and values of a prefix serve every row that goes on from it."""

from datc_train.prefix.exactness import why_not_shared
from datc_train.prefix.past import Past, Rows, any_shared, backbone_hidden, cache_argument, prefix_rows, read_shared, rest_rows

__all__ = [
    "Past",
    "Rows",
    "any_shared",
    "backbone_hidden",
    "cache_argument",
    "prefix_rows",
    "read_shared",
    "rest_rows",
    "why_not_shared",
]
