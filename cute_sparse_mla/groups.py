"""Token groups: plans of calls whose neighbouring query tokens share one gather list.

Neighbouring tokens select mostly the same rows of kv. A kernel may work on `tokens_per_tile` of them at a time over the
union of their rows; it then reads a shared row once. A plan holds these unions, made once for all calls with the same
indices: forward, backward, other layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import autograd, dispatch, env, validation
from .config import SparseAttentionConfig
from .errors import ArgumentTypeError, ArgumentValueError, SparseMLAError


class Lists(NamedTuple):
    """Gather lists `[B, L, G, C]` of `L = ceil(S / tokens_per_tile)` tiles, `C = tokens_per_tile K`; int32.

    The first `lengths [B, L, G]` slots of a list count: a row of kv, and who selected it, bit t for the tile's token t.
    `chosen [1]`, where the device decides: 1 if the lists pay; with 0 there are none, and calls run token by token.
    Flat, or empty for one token per tile, where a traced graph makes them: see `autograd.lists_op`.
    """

    rows: Tensor
    bits: Tensor
    lengths: Tensor
    chosen: Tensor | None


PlanTensors = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
NO_LISTS: PlanTensors = (None, None, None, None)


@dataclass(frozen=True, eq=False)
class TokenPlan:
    """What `plan` made, for calls with the same indices, `topk_length`, `q_positions` and options.

    `lists` is `None` for `tokens_per_tile` 1: the kernels then read the indices themselves. Where the size was left to
    the package, the device has decided whether lists of this size pay (`lists.chosen`), from a sample of tiles; in a
    traced graph `tokens_per_tile` is then `None`.
    """

    tokens_per_tile: int | None
    shape: tuple[int, int, int, int]  # B, S, G, K
    S_kv: int
    heads_per_group: int
    causal: bool
    has_topk_length: bool
    has_q_positions: bool
    device: torch.device
    lists: Lists | None


def plan(
    indices: Tensor, kv_shape: Sequence[int], heads_per_group: int, *, causal: bool = False,
    q_positions: Tensor | None = None, topk_length: Tensor | None = None, tokens_per_tile: int | None = None,
    backend: str | None = None,
) -> TokenPlan:  # fmt: skip
    """Make the plan of calls with these indices: `fwd(..., plan=plan)`, and the same for `bwd` and `sparse_mla`.

    Args:
        indices, causal, q_positions, topk_length, backend: as in `fwd`; the calls must pass the same.
        kv_shape: `kv.shape`, `[B, S_kv, G, D]` or packed `[T_kv, G, D]`.
        heads_per_group: query heads per group of kv; `tokens_per_tile` times these heads must fit a tile.
        tokens_per_tile: neighbouring tokens that share a gather list; `None` takes what fills a tile, and the device
            decides, from a sample, whether it pays.

    Returns: a plan on the device of `indices`, of 8 bytes per slot of `indices`, none for one token per tile. No value
    is read on the host.

    Raises: as `fwd`.
    """
    validation.tensors(
        ("q_positions", "topk_length"), indices=indices, q_positions=q_positions, topk_length=topk_length
    )
    validation.flag("causal", causal)
    shape = validation.sizes("kv_shape", kv_shape)
    if tokens_per_tile is not None:
        tokens_per_tile = validation.at_least("tokens_per_tile", tokens_per_tile, 1)
    config = SparseAttentionConfig(tokens_per_tile=tokens_per_tile)
    name = validation.backend_name(backend)
    dispatch.check_name("backend", name)
    call = validation.lists(
        indices, shape, heads_per_group, causal=causal, q_positions=q_positions, topk_length=topk_length
    )
    problem, device, lists = call.problem, indices.device, None
    bounds = (indices, q_positions, topk_length, list(shape), heads_per_group, causal)
    tokens, decide = tokens_per_tile, False
    # What the device can do is no part of a graph: the ops look, when they are traced and when they run.
    if not torch.compiler.is_compiling():
        tokens, decide = dispatch.grouping(problem, device.type, env.capability(device), name, config)
    if tokens is None and not problem.is_empty:
        lists = Lists(*autograd.lists_op(*bounds, config.encode(), name))
    elif tokens is not None and tokens > 1 and not problem.is_empty:
        lists = _made(*bounds, tokens, decide, name)
    return TokenPlan(
        tokens, (problem.B, problem.S, problem.G, problem.K), problem.S_kv, problem.heads_per_group, causal,
        topk_length is not None, q_positions is not None, device, lists,
    )  # fmt: skip


def _made(
    indices: Tensor, q_positions: Tensor | None, topk_length: Tensor | None, kv_shape: list[int], heads: int,
    causal: bool, tokens: int, decide: bool, backend: str,
) -> Lists:  # fmt: skip
    rows, bits, lengths, chosen = autograd.plan_op(
        indices, q_positions, topk_length, kv_shape, heads, causal, tokens, decide, backend
    )
    return Lists(rows, bits, lengths, chosen if decide else None)


def lists_for(
    q: Tensor, kv: Tensor, indices: Tensor, causal: bool, q_positions: Tensor | None, topk_length: Tensor | None,
    attn_sink: Tensor | None, config: SparseAttentionConfig | None, backend: str,
) -> PlanTensors:  # fmt: skip
    """The lists of a call without a plan, made ahead so that autograd keeps them; `NO_LISTS` where it needs none."""
    wished = config or SparseAttentionConfig()
    # The check of the call itself names what is wrong with it.
    if wished.tokens_per_tile == 1 or 0 in (*q.shape, *kv.shape, *indices.shape) or kv.dim() < 3:
        return NO_LISTS
    heads, shape = q.shape[-2] // kv.shape[-2], list(kv.shape)
    try:
        tokens, decide = wished.tokens_per_tile, False
        if tokens is None:
            if torch.compiler.is_compiling():
                # What the device can do is no part of a graph: the op looks, when it is traced and when it runs.
                return autograd.lists_op(
                    indices, q_positions, topk_length, shape, heads, causal, wished.encode(), backend
                )
            tokens, decide = autograd.group_size(
                indices, q_positions, topk_length, shape, heads, causal, wished, backend
            )
        if tokens == 1:
            return NO_LISTS
        if not torch.compiler.is_compiling():
            # Nothing runs in a wrong call; what is traced does not run here.
            validation.forward(
                q, kv, indices, d_v=1, causal=causal, q_positions=q_positions, topk_length=topk_length,
                attn_sink=attn_sink,
            )  # fmt: skip
        return _made(indices, q_positions, topk_length, shape, heads, causal, tokens, decide, backend)
    except SparseMLAError:
        return NO_LISTS


def check(
    given: Any, q: Tensor, kv: Tensor, indices: Tensor, causal: bool, q_positions: Tensor | None,
    topk_length: Tensor | None, config: SparseAttentionConfig | None,
) -> PlanTensors:  # fmt: skip
    """The lists of a plan that fits the call, for the custom ops."""
    if given is None:
        return NO_LISTS
    if not isinstance(given, TokenPlan):
        raise ArgumentTypeError("plan", "must be what cute_sparse_mla.plan returned, or None", type(given).__name__)
    if q.dim() not in (3, 4) or kv.dim() != q.dim():
        return NO_LISTS  # the check of shapes says so
    G, K = kv.shape[-2], indices.shape[-1]
    lead = (1, q.shape[0]) if q.dim() == 3 else tuple(q.shape[:2])
    facts = (
        ("indices of shape [B, S, G, K]", given.shape, (*lead, G, K)),
        ("S_kv", given.S_kv, kv.shape[-3]),
        ("heads per group", given.heads_per_group, q.shape[-2] // max(G, 1)),
        ("causal", given.causal, causal),
        ("topk_length", given.has_topk_length, topk_length is not None),
        ("q_positions", given.has_q_positions, q_positions is not None),
        ("device", given.device, indices.device),
    )
    for what, made, came in facts:
        if made != came:
            raise ArgumentValueError("plan", f"was made for another call: {what} {made}", came)
    wished = config.tokens_per_tile if config is not None else None
    if wished not in (None, given.tokens_per_tile):
        rule = f"has tokens_per_tile = {given.tokens_per_tile}; config.tokens_per_tile must be None or the same"
        raise ArgumentValueError("plan", rule, wished)
    return NO_LISTS if given.lists is None else (*given.lists[:3], given.lists.chosen)
