"""Named cases of the contract as data, and their random inputs; shared by the tests and the benchmarks.

A `Case` says which shapes, options and patterns of invalid slots; `Case.inputs` draws fresh values for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cute_sparse_mla.models import ModelShape
from cute_sparse_mla.precision import Inputs

INVALID_PATTERNS = ("none", "tail", "shuffled", "odd", "head", "all", "one_row", "out_of_range")


@dataclass(frozen=True)
class Case:
    """One call. Defaults are the base case of the fault list: 64 tokens over 256 rows, 16 heads, K 128, all valid.

    `invalid` is where invalid slots stand: `tail` and `shuffled` (`share` of the slots), `odd` slots, the `head` of a
    row (`share` of it), `all`, `one_row` (a whole row), `out_of_range` (values other than -1, `share`). `length` is
    `None`, `"random"` or `"zero"` (half of the rows). `sink` is `None`, `"random"` or a number. `positions` is `None`
    (default causal bounds) or `"random"` (negative ones included); it implies causal.
    """

    name: str = "base"
    B: int = 1
    S: int = 64
    S_kv: int = 256
    H: int = 16
    G: int = 1
    K: int = 128
    D: int = 576
    d_v: int = 512
    packed: bool = False
    dtype: torch.dtype = torch.bfloat16
    index_dtype: torch.dtype = torch.int32
    causal: bool = False
    positions: str | None = None
    length: str | None = None
    sink: str | float | None = None
    invalid: str = "none"
    share: float = 0.5
    duplicates: bool = False
    dlse: bool = False
    q_scale: float = 1.0
    sm_scale: float | None = None

    def but(self, **changes: object) -> Case:
        """This case with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def inputs(self, seed: int = 0, device: torch.device | str = "cpu") -> Inputs:
        """Fresh random inputs; the same seed gives the same values on one device type."""
        gen = torch.Generator(device=device).manual_seed(seed)

        def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(shape, generator=gen, device=device).to(dtype)

        B, S = self.B, self.S
        rows = _draw_rows(self, gen, device)
        causal = self.causal or self.positions is not None
        positions = None
        if self.positions == "random":
            positions = torch.randint(-3, self.S_kv + 3, (B, S), generator=gen, device=device)
        q = (normal(B, S, self.H, self.D) * self.q_scale).to(self.dtype)
        tensors: dict[str, Any] = dict(
            q=q,
            kv=normal(B, self.S_kv, self.G, self.D, dtype=self.dtype),
            indices=_invalidate(self, rows, gen),
            dout=normal(B, S, self.H, self.d_v, dtype=self.dtype),
            q_positions=positions,
            topk_length=_lengths(self, gen, device),
            dlse=normal(B, S, self.H) if self.dlse else None,
        )
        if self.packed:
            if B != 1:
                raise ValueError("a packed case has B = 1")
            tensors = {name: None if t is None else t[0] for name, t in tensors.items()}
        scale = self.D**-0.5 if self.sm_scale is None else self.sm_scale
        return Inputs(**tensors, attn_sink=_sink(self, gen, device), d_v=self.d_v, sm_scale=scale, causal=causal)


def _draw_rows(case: Case, gen: torch.Generator, device: torch.device | str) -> Tensor:
    """Rows of kv `[B, S, G, K]`: without repeats where there are enough rows, unless the case wants repeats."""
    shape = (case.B, case.S, case.G, case.K)
    if case.S_kv == 0:
        return torch.full(shape, -1, dtype=torch.int64, device=device)
    rows = torch.randint(0, case.S_kv, shape, generator=gen, device=device)
    if case.duplicates or case.S_kv < case.K or 0 in shape:
        return rows
    # A full permutation per row costs S_kv each; past a few million entries a random stride walk is as good.
    if case.B * case.S * case.G * case.S_kv <= 1 << 24:
        keys = torch.rand((*shape[:3], case.S_kv), generator=gen, device=device)
        return keys.argsort(dim=-1)[..., : case.K]
    start = rows[..., :1]
    return (start + torch.arange(case.K, device=device) * max(1, case.S_kv // case.K)) % case.S_kv


def _invalidate(case: Case, rows: Tensor, gen: torch.Generator) -> Tensor:
    K, device = case.K, rows.device
    slot = torch.arange(K, device=device)
    mask = torch.zeros_like(rows, dtype=torch.bool)
    filler = torch.full_like(rows, -1)
    if case.invalid in ("tail", "head"):
        count = round(K * case.share)
        mask = mask | (slot >= K - count if case.invalid == "tail" else slot < count)
    elif case.invalid in ("shuffled", "out_of_range"):
        mask = torch.rand(rows.shape, generator=gen, device=device) < case.share
    elif case.invalid == "odd":
        mask = mask | (slot % 2 == 1)
    elif case.invalid == "all":
        mask = ~mask
    elif case.invalid == "one_row":
        mask[:, case.S // 2] = True
    elif case.invalid != "none":
        raise ValueError(f"unknown pattern {case.invalid!r}: {INVALID_PATTERNS}")
    if case.invalid == "out_of_range":
        values = [-1, -2, case.S_kv, case.S_kv + 5, 2**31 - 1, -(2**31)]
        values += [2**32 + 5, -(2**32) + 5] if case.index_dtype == torch.int64 else []
        # In turn rather than at random: every one of them does occur.
        choice = (mask.flatten().cumsum(0) % len(values)).view(rows.shape)
        filler = torch.tensor(values, device=device)[choice]
    return torch.where(mask, filler, rows).to(case.index_dtype)


def _lengths(case: Case, gen: torch.Generator, device: torch.device | str) -> Tensor | None:
    if case.length is None:
        return None
    # Out-of-range lengths are part of the contract: clamped to [0, K].
    lengths = torch.randint(-2, case.K + 3, (case.B, case.S), generator=gen, device=device, dtype=torch.int32)
    if case.length == "zero":
        lengths[:, ::2] = 0
    return lengths


def _sink(case: Case, gen: torch.Generator, device: torch.device | str) -> Tensor | None:
    if case.sink is None:
        return None
    if case.sink == "random":
        return torch.randn(case.H, generator=gen, device=device)
    return torch.full((case.H,), float(case.sink), device=device)


def model_case(model: ModelShape, T: int, S_kv: int, heads: int | None = None) -> Case:
    """A packed call of a model's layer with random rows; `heads` after tensor parallelism."""
    return Case(
        name=model.name, S=T, S_kv=S_kv, H=heads or model.heads, K=model.K, D=model.D, d_v=model.d_v, packed=True,
        causal=True, sink="random" if model.has_sink else None, sm_scale=model.sm_scale,
    )  # fmt: skip


BASE = Case()
_SMALL: dict[str, Any] = dict(S=6, S_kv=11, H=3, K=7, D=24, d_v=16)
# The clauses of the contract, small enough for brute force; every one is run forward and backward.
_CONTRACT: tuple[Case, ...] = tuple(
    BASE.but(**{**_SMALL, **changes})
    for changes in (
        dict(name="plain"),
        dict(name="holes", invalid="odd"),
        dict(name="head", invalid="head"),
        dict(name="tail", invalid="tail"),
        dict(name="shuffled", invalid="shuffled"),
        dict(name="out_of_range", invalid="out_of_range"),
        dict(name="out_of_range_int64", invalid="out_of_range", index_dtype=torch.int64),
        dict(name="duplicates", duplicates=True),
        dict(name="more_slots_than_rows", K=19),
        dict(name="length", length="random"),
        dict(name="zero_length", length="zero"),
        dict(name="causal", causal=True),
        dict(name="causal_more_queries_than_rows", causal=True, S=14),
        dict(name="positions", positions="random"),
        dict(name="groups", H=6, G=2, invalid="shuffled"),
        dict(name="batch", B=3, invalid="shuffled", length="random", causal=True),
        dict(name="packed", packed=True, invalid="shuffled"),
        dict(name="sink", sink="random"),
        dict(name="sink_200", sink=200.0),
        dict(name="sink_plus_inf", sink=float("inf")),
        dict(name="sink_minus_inf", sink=float("-inf")),
        dict(name="empty_row", invalid="one_row"),
        dict(name="empty_row_sink", invalid="one_row", sink="random"),
        dict(name="all_empty", invalid="all"),
        dict(name="all_empty_sink", invalid="all", sink="random"),
        dict(name="large_scores", q_scale=64.0, sink="random"),
        dict(name="zero_scale", sm_scale=0.0),
        dict(name="one_slot", K=1),
        dict(name="fp16", dtype=torch.float16, sink="random"),
        dict(name="everything", B=2, H=6, G=2, invalid="out_of_range", length="random", causal=True, sink="random",
             duplicates=True, index_dtype=torch.int64),
    )
)  # fmt: skip
CONTRACT_CASES = _CONTRACT + tuple(case.but(name=f"{case.name}+dlse", dlse=True) for case in _CONTRACT)
