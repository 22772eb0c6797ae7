"""Real rows: top-k selections of real text, from int8 lightning-indexer tensors of a small encoder.

The committed sample holds 8,192 tokens; `python -m bench.make_rows` makes it, and longer ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import indices
from .errors import ArgumentValueError
from .models import ModelShape

SAMPLE = Path(__file__).parent / "data" / "indexer_sample.pt"
# Union of n neighbouring tokens' rows over K, as measured on 16k tokens of source text at K = 2048.
UNION_RANGES = {2: (1.24, 1.35), 4: (1.45, 1.77), 8: (1.66, 2.24), 16: (1.8, 2.8)}
UNION_K = 2048


@dataclass(frozen=True)
class Indexer:
    """Lightning-indexer tensors of N tokens: queries `iq [N, H_i, d]`, keys `ik [N, d]`, `weights [N, H_i]`, fp32."""

    iq: Tensor
    ik: Tensor
    weights: Tensor
    source: str

    @property
    def tokens(self) -> int:
        return self.ik.shape[0]


@dataclass(frozen=True)
class TextRows:
    """Rows of the last T tokens of a text: `indices [T, K]` int32 into `S_kv` rows, and whether to pass `causal=True`.

    `q_positions` stays `None`: the default bounds are right for the last tokens.
    """

    indices: Tensor
    S_kv: int
    causal: bool
    q_positions: Tensor | None = None


def load_indexer(path: str | Path | None = None, device: torch.device | str = "cpu") -> Indexer:
    """The indexer tensors in `path` (default: the committed sample), dequantised to fp32."""
    path = Path(path or SAMPLE)
    if not path.is_file():
        raise ArgumentValueError("rows", "must be a file that bench.make_rows wrote", path)
    data = torch.load(path, map_location=device, weights_only=True)
    iq, ik, weights = (data[name].float() * data[f"{name}_scale"] for name in ("iq", "ik", "weights"))
    return Indexer(iq, ik, weights, data["source"])


def text_rows(indexer: Indexer, model: ModelShape, queries: int, device: torch.device | str | None = None) -> TextRows:
    """The rows that a layer of `model` attends to for the last `queries` tokens of the text.

    Without a window: causal top-k over all tokens. With one (DeepSeek-V4): the last `window` tokens plus a top-k over
    rows compressed `compression` to one, which stand behind the uncompressed ones in kv; a compressed row's key is the
    mean of its tokens' keys, and only whole blocks up to the token are candidates.
    """
    N = indexer.tokens
    if not 1 <= queries <= N:
        raise ArgumentValueError("queries", f"must lie in 1..{N}, the tokens of the text", queries)
    where = torch.device(device) if device is not None else indexer.ik.device
    iq, weights = indexer.iq[N - queries :].to(where), indexer.weights[N - queries :].to(where)
    keys = indexer.ik.to(where)
    positions = torch.arange(N - queries, N, device=where)
    if not model.window:
        return TextRows(indices.select_topk(iq, keys, weights, model.topk, q_positions=positions), N, causal=True)
    blocks = N // model.compression
    compressed = keys[: blocks * model.compression].view(blocks, model.compression, -1).mean(1)
    bounds = indices.compressed_positions(positions, model.compression)
    selected = indices.select_topk(iq, compressed, weights, model.topk, q_positions=bounds)
    window = indices.sliding_window(positions, model.window)
    return TextRows(indices.window_and_selected(window, selected, selected_offset=N), N + blocks, causal=False)
