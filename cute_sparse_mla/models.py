"""Attention shapes of the models this package is for; used by `check`, the benchmarks and the tests.

Sources: the models' public configurations (GLM-5, DeepSeek-V3.2, DeepSeek-V4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """One layer: `heads` before tensor parallelism, row widths, slots per row, scale, sink.

    `topk` rows are selected by the indexer; a layer with a `window` also attends to its last `window` tokens and
    selects from rows compressed `compression` to one.
    """

    name: str
    heads: int
    D: int
    d_v: int
    topk: int
    sm_scale: float
    has_sink: bool = False
    window: int = 0
    compression: int = 1

    @property
    def K(self) -> int:
        """Slots per row."""
        return self.window + self.topk


# DeepSeek-V3.2 scales by its 192-wide uncompressed heads and by YaRN's squared attention factor at 40x extension.
_V32_SCALE = 192**-0.5 * (0.1 * math.log(40) + 1) ** 2

MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("glm5", 64, 576, 512, 2048, 256**-0.5),
        ModelShape("v32", 128, 576, 512, 2048, _V32_SCALE),
        ModelShape("v4-flash", 64, 512, 512, 512, 512**-0.5, has_sink=True, window=128, compression=4),
        ModelShape("v4-pro", 128, 512, 512, 1024, 512**-0.5, has_sink=True, window=128, compression=4),
    )
}
