"""Which query rows a tile holds: tokens times padded heads, packed into the 64 rows of each CTA.

Row `r` of a tile is head `r % padded_heads` of token `r // padded_heads`. The tensor maps of q and out see heads first,
`(d, h, s, g, b)`, with the real head and token counts as extents: a load fills rows past them with zeros and a store
drops them. Nothing else guards out; lse, sink and the running maximum are guarded by the functions here. They work on
Python integers and on the DSL's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ROWS_PER_CTA = 64


@dataclass(frozen=True)
class Rows:
    """Rows of a tile: `tokens` query tokens times `padded_heads` heads, over `ctas` CTAs."""

    tokens: int
    padded_heads: int

    @property
    def ctas(self) -> int:
        return self.tokens * self.padded_heads // ROWS_PER_CTA

    @property
    def box(self) -> tuple[int, int]:
        """(heads, tokens) of the box that fills one CTA's rows."""
        heads = min(self.padded_heads, ROWS_PER_CTA)
        return heads, ROWS_PER_CTA // heads

    def origin(self, token_tile: Any, rank: Any) -> tuple[Any, Any]:
        """(head, token) of the first row of CTA `rank`."""
        first = rank * ROWS_PER_CTA
        return first % self.padded_heads, token_tile * self.tokens + first // self.padded_heads

    def of(self, row: Any, rank: Any) -> tuple[Any, Any]:
        """(head, token in the tile) of row `row` of CTA `rank`."""
        whole = row + rank * ROWS_PER_CTA
        return whole % self.padded_heads, whole // self.padded_heads


def rows_for(heads: int, tokens: int) -> Rows | None:
    """The smallest tile for `heads` heads and `tokens` tokens: 64 rows or 128; None where 128 are too few."""
    fitting = (rows // tokens for rows in (ROWS_PER_CTA, 2 * ROWS_PER_CTA) if heads <= rows // tokens)
    padded_heads = next(fitting, None)
    return None if padded_heads is None else Rows(tokens, padded_heads)


def heads_first(shape: tuple, strides: tuple, heads_per_group: Any) -> tuple[tuple, tuple]:
    """Extents and strides `(d, h, s, g, b)` of a tensor `[B, S, H, D]` of `H = g h` heads, with contiguous d."""
    B, S, H, D = shape
    stride_b, stride_s, stride_h = strides
    return (D, heads_per_group, S, H // heads_per_group, B), (
        1,
        stride_h,
        stride_s,
        stride_h * heads_per_group,
        stride_b,
    )


def split(tile: Any, token_tiles: Any, groups: Any) -> tuple[Any, Any, Any]:
    """(batch, token tile, group) of a tile number; groups change fastest."""
    return tile // groups // token_tiles, tile // groups % token_tiles, tile % groups
