"""The point at which the reward's gradient is taken for the credit.

    u_v - u_y = <g_t, E_v - E_y>    is to forecast what replacing token t = y by v does to the score

    embedding     g_t = dR/de_t at the sampled embeddings: the paper's point (arXiv 2610.32772)
    tangent       the same less its part along the token's own embedding, g - <g, E_y> E_y / |E_y|^2
    integrated    g_t = dR/de_t where the response's embeddings are scaled by c (0.5): integrated gradients with one midpoint
                  between the baseline 0 and the embeddings (Sundararajan et al. 2017, arXiv 1703.01365)

E_v - E_y is no small step. A model that normalises its input (RMSNorm) hardly sees the length of an embedding, so a
gradient at the embedding says little along it, and is too large or too small for a step that goes as far as another token.
`datc probe` measures how well each point forecasts real replacements for one's own models.

Only the gradient moves: scores are always those of the row as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["embedding", "tangent", "integrated"]
KINDS: tuple[Kind, ...] = ("embedding", "tangent", "integrated")


@dataclass(frozen=True)
class CreditPoint:
    """Where the gradient is taken.

    Args:
        kind: see above.
        passes: of "integrated": 1 moves all of a response's tokens at once; k moves every k-th one at a time and leaves the
            others where they are, in k passes forward and backward. More is nearer to a replacement of one token.
        scale: of "integrated": c in (0, 1].

    Raises ValueError, beginning with `credit_point`, `credit_passes` or `credit_scale`.
    """

    kind: Kind = "embedding"
    passes: int = 1
    scale: float = 0.5

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"credit_point: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        if isinstance(self.passes, bool) or not isinstance(self.passes, int) or self.passes < 1:
            raise ValueError(f"credit_passes: expected a whole number of at least 1, got {self.passes!r}")
        if isinstance(self.scale, bool) or not isinstance(self.scale, int | float) or not 0 < self.scale <= 1:
            raise ValueError(f"credit_scale: expected a number above 0 and at most 1, got {self.scale!r}")
        if self.kind != "integrated" and self.passes != 1:
            raise ValueError(f"credit_passes: expected 1 with credit_point: {self.kind}, which has one pass, got {self.passes}")
        if self.kind != "integrated" and self.scale != CreditPoint.scale:
            raise ValueError(
                f"credit_scale: expected {CreditPoint.scale} with credit_point: {self.kind}, which scales nothing, "
                f"got {self.scale}"
            )

    def arguments(self) -> dict[str, Any]:
        """As the config, `RewardModel.score` and `DATCConfig` name them."""
        return {"credit_point": self.kind, "credit_passes": self.passes, "credit_scale": self.scale}

    @property
    def name(self) -> str:
        """ "embedding", "tangent", "integrated, 2 passes"; with a scale other than the default's, that too."""
        if not self.moves:
            return self.kind
        scale = "" if self.scale == CreditPoint.scale else f", scale {self.scale:g}"
        return f"{self.kind}, {self.passes} pass{'' if self.passes == 1 else 'es'}{scale}"

    @property
    def moves(self) -> bool:
        """Whether the gradient needs passes of its own, beside the one that scores."""
        return self.kind == "integrated"


EMBEDDING = CreditPoint()  # the paper's
DEFAULT = CreditPoint("integrated")  # of training: forecasts replacements best for its price, see datc_train/reward/README.md
