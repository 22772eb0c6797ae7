"""The SM90 kernels over the whole matrix of padding, block counts, row bounds and configs; every head count; memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import cute_sparse_mla
from bench.cases import Case
from cute_sparse_mla.config import TABLE, SparseAttentionConfig, measured
from cute_sparse_mla.precision import Inputs, Judge, run

pytestmark = pytest.mark.sm90

HEADS = (1, 16, 48, 64, 100)
SLOTS = (1, 64, 100, 128, 192, 640)
BOUNDS = ("packed", "one_token", "causal", "batch")
CONFIGS = tuple(dict.fromkeys(row.config for row in (*measured(), *TABLE) if row.architecture == "sm90"))
REPEATS = 3
DOCUMENTS = (7, 1, 24, 1, 15)  # tokens of each document of a packed call


def judged(inputs: Inputs, config: SparseAttentionConfig | None = None) -> list[str]:
    """What the kernels miss of the precision clause on these inputs."""
    judge = Judge(inputs)
    results = run(inputs, cute_sparse_mla.fwd, cute_sparse_mla.bwd, backend="sm90", config=config)
    return [str(check) for check in judge.checks(results) if not check.ok]


def in_documents(inputs: Inputs, lengths: tuple[int, ...]) -> Inputs:
    """Rows of a packed causal call, each token's from its own document; slots that reach beyond become -1."""
    device = inputs.indices.device
    number = torch.tensor(lengths, device=device)
    ends = number.cumsum(0).repeat_interleave(number)
    first = (ends - number.repeat_interleave(number)).view(-1, 1, 1)
    tokens = torch.arange(len(ends), device=device).view(-1, 1, 1)
    slots = torch.arange(inputs.indices.shape[-1], device=device)
    # Row first + slot is the slot's choice, so a token's choices are distinct and stop at its own position.
    rows = torch.where(first + slots <= tokens, first + slots, -1)
    return replace(inputs, indices=torch.where(inputs.indices < 0, -1, rows).to(inputs.indices.dtype))


def inputs_of(heads: int, slots: int, bounds: str, invalid: str, D: int, seed: int) -> Inputs:
    case = Case(S=48, S_kv=320, H=heads, K=slots, D=D, invalid=invalid, sink="random", dlse=True)
    if bounds in ("packed", "one_token"):
        lengths = DOCUMENTS if bounds == "packed" else (1,) * 48
        packed = case.but(packed=True, causal=True, S_kv=48, invalid="none" if slots == 1 else invalid)
        return in_documents(packed.inputs(seed, "cuda"), lengths)
    changed = case.but(causal=True) if bounds == "causal" else case.but(B=2, S=24)
    return changed.inputs(seed, "cuda")


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("D", (512, 576))
@pytest.mark.parametrize("invalid", ("tail", "shuffled"))
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("heads", HEADS)
def test_matrix(heads: int, slots: int, bounds: str, invalid: str, D: int, config: SparseAttentionConfig) -> None:
    for repeat in range(REPEATS):
        misses = judged(inputs_of(heads, slots, bounds, invalid, D, seed=1000 * heads + slots + repeat), config)
        assert not misses, "\n".join((f"repeat {repeat}", *misses))


@pytest.mark.parametrize("heads", range(1, 129))
def test_every_head_count(heads: int) -> None:
    case = Case(S=9, S_kv=200, H=heads, K=100, D=(512, 576)[heads % 2], sink="random", invalid="shuffled", causal=True)
    misses = judged(case.inputs(heads, "cuda"))
    assert not misses, "\n".join(misses)


@pytest.mark.parametrize("grouped", (False, True))
@pytest.mark.parametrize("tokens", (16384, 32768, 65536))
def test_backward_memory(tokens: int, grouped: bool) -> None:
    """Beyond its results the backward takes the fp32 dkv, 16 bytes per token and head, and a bounded scratch for rows
    in order, or the lists of token groups. d_sink's sum is small.
    """
    from cute_sparse_mla.hopper.launch import SORT_BYTES

    heads, slots = 8, 640
    gen = torch.Generator(device="cuda").manual_seed(tokens)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=gen, device="cuda", dtype=torch.bfloat16)

    q, kv, dout = normal(tokens, heads, 576), normal(tokens, 1, 576), normal(tokens, heads, 512)
    indices = torch.randint(0, tokens, (tokens, 1, slots), generator=gen, device="cuda", dtype=torch.int32)
    config = SparseAttentionConfig(tokens_per_tile=8 if grouped else 1)
    options = dict(causal=True, attn_sink=torch.zeros(heads, device="cuda"), backend="sm90", config=config)
    out, lse = cute_sparse_mla.fwd(q, kv, indices, **options)
    cute_sparse_mla.bwd(q, kv, out, dout, indices, lse, **options)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = cute_sparse_mla.bwd(q, kv, out, dout, indices, lse, **options)
    torch.cuda.synchronize()
    held = sum(tensor.numel() * tensor.element_size() for tensor in results if tensor is not None)
    extra = torch.cuda.max_memory_allocated() - before - held
    slack = 1 << 16  # the allocator's rounding
    lists = 8 * indices.numel() + tokens if grouped else SORT_BYTES
    assert extra <= 4 * kv.numel() + 16 * tokens * heads + lists + slack, extra
