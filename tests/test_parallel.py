"""Context parallelism: every rank's part is that of the whole call, for all splits and any number of ranks."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import cute_sparse_mla
from bench import parallel as bench_parallel
from bench.cases import Case
from cute_sparse_mla import ArgumentTypeError, ArgumentValueError, UnsupportedError, parallel
from cute_sparse_mla.parallel import SPLITS, TokenSplit

from . import doubtful, parallel_ranks
from .parallel_ranks import CASES, PACKED

# Sums of the same terms in another order.
SUM_TOLERANCE = 1e-5
ROUNDED_TOLERANCE = 2.0**-8  # once more to bfloat16

GPUS = pytest.param(("cuda", 2), marks=pytest.mark.multi_gpu, id="nccl-2")


@pytest.fixture(scope="module", params=[("cpu", 1), ("cpu", 2), ("cpu", 3), GPUS], ids=lambda p: f"gloo-{p[1]}")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict]]:
    """The device type, and the results of every rank."""
    device_type, count = request.param
    folder = tmp_path_factory.mktemp("ranks")
    arguments = (count, str(folder), device_type)
    torch.multiprocessing.spawn(parallel_ranks.run_rank, arguments, nprocs=count)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert [row["pass"] for row in rows] == ["forward", "backward"] and rows[0]["ranks"] == count
    return device_type, [torch.load(folder / f"{rank}.pt") for rank in range(count)]


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """This process as a group of its own."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def relative(got: Tensor, want: Tensor) -> float:
    if want.numel() == 0:
        return 0.0 if got.shape == want.shape else math.inf
    return float((got.double() - want.double()).norm() / want.double().norm())


def expected_positions(tokens: int, kind: str, ranks: int, rank: int) -> list[int]:
    """Written out from the definition: blocks as even as can be, the first ones longer."""
    if kind == "round_robin":
        return list(range(tokens))[rank::ranks]
    blocks = torch.arange(tokens).tensor_split(ranks if kind == "contiguous" else 2 * ranks)
    chosen = [blocks[rank]] if kind == "contiguous" else [blocks[rank], blocks[2 * ranks - 1 - rank]]
    return torch.cat(chosen).tolist()


# -- several ranks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SPLITS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ranks_have_the_parts_of_the_whole_call(ranks: tuple[str, list[dict]], case: Case, kind: str) -> None:
    device_type, results = ranks
    i = parallel_ranks.case_inputs(case, device_type)
    options = i.options | dict(config=parallel_ranks.ONE_TOKEN)
    out, lse = cute_sparse_mla.fwd(i.q, i.kv, i.indices, d_v=i.d_v, **options)
    dq, dkv, d_sink = cute_sparse_mla.bwd(
        i.q, i.kv, out, i.dout, i.indices, lse, dlse=i.dlse, dkv_dtype=torch.float32, **options
    )
    axis = i.q.dim() - 3
    parts = [result[case.name, kind] for result in results]
    for rank, part in enumerate(parts):
        own = torch.tensor(expected_positions(i.q.shape[axis], kind, len(parts), rank), dtype=torch.int64)
        assert torch.equal(part["positions"].cpu(), own)
        whole = {name: t.cpu().index_select(axis, own) for name, t in (("out", out), ("lse", lse), ("dq", dq))}
        for name, prefix in itertools.product(whole, ("", "plain_", "overlapped_")):
            assert torch.equal(part[prefix + name], whole[name]), (rank, prefix + name)
        assert torch.equal(part["unsplit"], out.cpu())
        own = torch.tensor(expected_positions(i.kv.shape[axis], kind, len(parts), rank), dtype=torch.int64)
        own_dkv = dkv.cpu().index_select(axis, own)
        assert part["dkv"].dtype == torch.float32 and relative(part["dkv"], own_dkv) <= SUM_TOLERANCE
        for prefix in ("plain_", "overlapped_"):
            assert part[prefix + "dkv"].dtype == i.kv.dtype
            assert relative(part[prefix + "dkv"], own_dkv) <= ROUNDED_TOLERANCE
    if d_sink is not None:
        for prefix in ("", "plain_", "overlapped_"):
            total = sum(part[prefix + "d_sink"] for part in parts)
            torch.testing.assert_close(total, d_sink.cpu(), rtol=SUM_TOLERANCE, atol=SUM_TOLERANCE)


@pytest.mark.parametrize("kind", SPLITS)
def test_ranks_select_the_rows_that_the_whole_selects(ranks: tuple[str, list[dict]], kind: str) -> None:
    whole = parallel_ranks.document_rows()
    for rank, result in enumerate(ranks[1]):
        assert torch.equal(result["rows", kind], whole[expected_positions(PACKED.S, kind, len(ranks[1]), rank)])


def test_head_parallel_example(ranks: tuple[str, list[dict]]) -> None:
    """out may be rounded otherwise where a product has fewer heads; dkv is rounded once more."""
    for result in ranks[1]:
        assert result["heads"].keys() == {"out", "dq", "dkv"}
        assert all(error <= ROUNDED_TOLERANCE for error in result["heads"].values()), result["heads"]


def test_bench_finds_every_part_equal_to_the_whole(ranks: tuple[str, list[dict]]) -> None:
    assert [result["bench"] for result in ranks[1]] == [0] * len(ranks[1])


def test_bench_finds_wrong_values_on_any_rank(ranks: tuple[str, list[dict]]) -> None:
    """NaN and infinity in the whole too; the verdict is that of every rank, one without tokens included."""
    for result in ranks[1]:
        for (name, value, token, in_whole), verdict in result["verdicts"].items():
            assert verdict["ok"] == (value == 2 and in_whole), (name, value, token, in_whole, verdict)
            assert verdict["finite"] == math.isfinite(value)
            assert all(v is None or math.isfinite(v) for v in verdict.values())
    # The same on all; NaN in a key is not equal to itself.
    assert len({str(result["verdicts"]) for result in ranks[1]}) == 1


# -- splits, without communication ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SPLITS)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_positions_and_slots(monkeypatch: pytest.MonkeyPatch, one_rank: None, kind: str, count: int) -> None:
    """For every token count: parts in rising order, all tokens once, and where they stand among the gathered parts."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: count)
    for tokens in range(3 * count + 3):
        split = TokenSplit(tokens, kind)
        where = torch.full((tokens,), -1)
        seen = []
        for rank in range(count):
            monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
            own = split.positions()
            assert own.dtype == torch.int64 and own.tolist() == expected_positions(tokens, kind, count, rank)
            assert split.count == len(own)
            x = torch.rand(2, tokens, 3)
            assert torch.equal(split.split(x, dim=1), x[:, own])
            where[own] = rank * split._longest + torch.arange(len(own))
            seen += own.tolist()
        assert sorted(seen) == list(range(tokens))
        slots = split._slots(torch.device("cpu"))
        assert torch.equal(where, torch.arange(tokens) if slots is None else slots)


# -- one rank ------------------------------------------------------------------------------------------------------

SMALL = Case(S=6, S_kv=6, H=4, K=5, D=24, d_v=16, packed=True, invalid="shuffled", sink="random")


def small_call(seed: int = 0) -> tuple[Any, TokenSplit, dict[str, Any]]:
    i = SMALL.inputs(seed)
    split = TokenSplit(6)
    return i, split, dict(split=split, d_v=i.d_v, **i.options)


def test_two_calls_share_one_gather(one_rank: None) -> None:
    i, split, options = small_call(1)
    kv = i.kv.clone().requires_grad_()
    gathered = parallel.gather_kv(kv, split)
    calls = [parallel.sparse_mla(i.q * n, gathered, i.indices, **options) for n in (1, 2)]
    torch.autograd.backward(calls, [i.dout, i.dout])
    own = []
    for n in (1, 2):
        leaf = i.kv.clone().requires_grad_()
        parallel.sparse_mla(i.q * n, leaf, i.indices, **options).backward(i.dout)
        own.append(leaf.grad)
    assert torch.equal(kv.grad, own[0] + own[1])


def test_the_sum_of_dkv_runs_while_autograd_goes_on(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started before, awaited after the gradients of what was computed between the gather and the call."""
    events: list[str] = []
    start, wait = parallel._ReduceScatter.__init__, parallel._ReduceScatter.wait
    monkeypatch.setattr(parallel._ReduceScatter, "__init__", lambda *a: (events.append("start"), start(*a))[1])
    monkeypatch.setattr(parallel._ReduceScatter, "wait", lambda *a: (events.append("wait"), wait(*a))[1])
    i, split, options = small_call(2)
    leaf, kv = i.q.clone().requires_grad_(), i.kv.clone().requires_grad_()
    gathered = parallel.gather_kv(kv, split)
    q = leaf * 2
    leaf.register_hook(lambda grad: events.append("q"))
    parallel.sparse_mla(q, gathered, i.indices, **options).backward(i.dout)
    assert events == ["start", "q", "wait"]
    parallel.sparse_mla(leaf * 2, kv.detach(), i.indices, **options).backward(i.dout)
    assert events == ["start", "q", "wait", "q"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(one_rank: None, reentrant: bool) -> None:
    i, split, options = small_call(3)
    grads = []
    for recompute in (False, True):
        q, kv = i.q.clone().requires_grad_(), i.kv.clone().requires_grad_()

        def layer(q: Tensor, kv: Tensor) -> Tensor:
            return parallel.sparse_mla(q, parallel.gather_kv(kv * 2, split), i.indices, **options)

        out = checkpoint(layer, q, kv, use_reentrant=reentrant) if recompute else layer(q, kv)
        out.backward(i.dout)
        grads.append((q.grad, kv.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_kv_is_saved_and_its_changes_are_noticed(one_rank: None) -> None:
    i, _, options = small_call(4)
    q = i.q.clone().requires_grad_()
    out = parallel.sparse_mla(q, i.kv, i.indices, **options)
    i.kv.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(i.dout)


@pytest.mark.parametrize("loss", ["out", "lse", "sum"])
def test_any_gradient_that_autograd_hands_over(one_rank: None, loss: str) -> None:
    i, _, options = small_call(5)
    grads = []
    for module in (parallel, cute_sparse_mla):
        q, kv = i.q.clone().requires_grad_(), i.kv.clone().requires_grad_()
        keywords = options if module is parallel else {n: v for n, v in options.items() if n != "split"}
        out, lse = module.sparse_mla(q, kv, i.indices, return_lse=True, **keywords)
        if loss == "out":
            out.backward(i.dout)
        else:
            (out if loss == "sum" else lse.masked_fill(lse.isinf(), 0)).sum().backward()
        grads.append((out, lse, q.grad, kv.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("wrt", ["q", "kv", "sink"])
@pytest.mark.parametrize("module", [parallel, cute_sparse_mla], ids=["parallel", "plain"])
def test_second_derivatives_are_refused_by_name(one_rank: None, module: Any, wrt: str) -> None:
    """Not taken for zero, whatever they are asked for; `create_graph` alone is no harm."""
    i, _, options = small_call(6)
    keywords = {n: v for n, v in options.items() if n != "attn_sink" and (n != "split" or module is parallel)}
    leaves = dict(q=i.q.clone(), kv=i.kv.clone(), sink=i.attn_sink.clone())
    q, kv, sink = (t.requires_grad_() for t in leaves.values())
    out = module.sparse_mla(q, kv, i.indices, attn_sink=sink, **keywords)
    first = torch.autograd.grad(out, (q, kv, sink), i.dout, retain_graph=True)
    again = torch.autograd.grad(out, (q, kv, sink), i.dout, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for gradient in again:
        with pytest.raises(UnsupportedError, match="second derivatives of sparse_mla are not supported"):
            torch.autograd.grad(gradient.float().sum(), leaves[wrt], allow_unused=True, retain_graph=True)


def test_a_scattered_sum_has_no_graph(one_rank: None) -> None:
    """As what `bwd` and `unsplit` return: a gradient through it would leave the communication out."""
    i, split, _ = small_call()
    leaf = i.kv.float().requires_grad_()
    parts = parallel.scatter_sum(leaf, split), split.unsplit(leaf)
    assert not any(part.requires_grad for part in parts) and torch.equal(parts[0], leaf)


def test_equal_splits_are_the_same(one_rank: None) -> None:
    """The default group by either name, and numpy's ints."""
    i, split, options = small_call()
    for same in (TokenSplit(6, group=dist.group.WORLD), TokenSplit(np.int64(6))):
        assert same == split and hash(same) == hash(split) and type(same.tokens) is int
        parallel.fwd(i.q, parallel.gather_kv(i.kv, same), i.indices, **options)


def test_forward_mode_is_refused(one_rank: None) -> None:
    i, split, options = small_call(7)
    with forward_ad.dual_level():
        q, kv = (forward_ad.make_dual(t, torch.ones_like(t)) for t in (i.q, i.kv))
        for call in (
            lambda: parallel.sparse_mla(q, i.kv, i.indices, **options),
            lambda: parallel.fwd(i.q, kv, i.indices, **options),
            lambda: parallel.gather_kv(kv, split),
        ):
            with pytest.raises(UnsupportedError, match="forward-mode"):
                call()


def test_gradients_by_torch_func_are_refused(one_rank: None) -> None:
    i, _, options = small_call(7)

    def loss(q: Tensor, kv: Tensor) -> Tensor:
        return parallel.sparse_mla(q, kv, i.indices, **options).float().sum()

    for argument in (0, 1):
        with pytest.raises(UnsupportedError, match=r"torch.func \(grad, vjp, jacrev\) are not supported"):
            torch.func.grad(loss, argnums=argument)(i.q, i.kv)


# -- processes -----------------------------------------------------------------------------------------------------


def program(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, with these variables instead of torchrun's."""
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in launched} | variables
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs the names of this process's threads")
def test_no_thread_of_a_destroyed_group_is_left() -> None:
    """One that is aborts the process now and then, when it frees a tensor while the interpreter goes down."""
    run = program("""
import os, torch, torch.distributed as dist
from cute_sparse_mla import parallel
def threads():
    return [open(f"/proc/self/task/{n}/comm").read().strip() for n in os.listdir("/proc/self/task")]
with parallel.process_group(torch.device("cpu")) as device:
    q, kv = torch.ones(4, 2, 576).bfloat16().requires_grad_(), torch.ones(4, 1, 576).bfloat16().requires_grad_()
    rows = torch.zeros(4, 1, 3, dtype=torch.int32)
    parallel.sparse_mla(q, kv, rows, split=parallel.TokenSplit(4)).sum().backward()
    assert dist.get_world_size() == 1 and "pt_gloo_runloop" in threads(), threads()
assert not dist.is_initialized() and not [name for name in threads() if "gloo" in name], threads()
""")
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(("variables", "code", "said"), [
    (dict(), 0, "rank 0 of 1: relative errors"),
    (dict(MASTER_ADDR="127.0.0.1"), 0, "rank 0 of 1: relative errors"),
    (dict(WORLD_SIZE="1"), 1, "UnsupportedError: run under torchrun, or without RANK and WORLD_SIZE: RANK is not set"),
    (dict(RANK="0", WORLD_SIZE="1"), 1, "MASTER_ADDR is not set"),
])  # fmt: skip
def test_the_example_without_torchrun(variables: dict[str, str], code: int, said: str) -> None:
    run = program("from cute_sparse_mla.examples import head_parallel; head_parallel.main()", **variables)
    assert run.returncode == code and said in run.stdout + run.stderr and "Traceback" not in run.stderr, run.stderr


# -- wrong arguments -----------------------------------------------------------------------------------------------


def test_without_a_process_group() -> None:
    with pytest.raises(UnsupportedError, match="init_process_group"):
        TokenSplit(4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(tokens=4.0), ArgumentTypeError, "tokens: must be an int; got float"),
        (dict(tokens=-1), ArgumentValueError, "tokens: must be at least 0; got -1"),
        (dict(tokens=4, kind="ring"), ArgumentValueError, "kind: must be one of contiguous, zigzag, round_robin"),
        (dict(tokens=4, group=7), ArgumentTypeError, "group: must be a process group"),
    ],
)
def test_wrong_splits(one_rank: None, arguments: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        TokenSplit(**arguments)


def test_a_result_or_an_error_that_names_an_argument(one_rank: None) -> None:
    i, split, options = small_call()
    shared = options | dict(q=i.q, indices=i.indices, causal=True, q_positions=torch.arange(6), backend="reference")
    out, lse = parallel.fwd(kv=i.kv, **shared)
    backward = {name: value for name, value in shared.items() if name != "d_v"}
    backward |= dict(kv=i.kv, out=out, dout=i.dout, lse=lse, dkv_dtype=None, deterministic=False)
    calls: tuple[tuple[Callable[..., Any], dict[str, Any]], ...] = (
        (parallel.fwd, shared | dict(kv=i.kv)),
        (parallel.sparse_mla, shared | dict(kv=i.kv, return_lse=False)),
        (parallel.bwd, backward),
        (parallel.gather_kv, dict(kv=i.kv, split=split)),
        (parallel.scatter_sum, dict(dkv=i.kv.float(), split=split)),
        (split.split, dict(x=i.kv, dim=0)),
        (split.unsplit, dict(x=i.kv, dim=0)),
        (split.positions, dict(device="cpu")),
        (TokenSplit, dict(tokens=6, kind="zigzag", group=None)),
        (lambda device: parallel.process_group(device).__enter__(), dict(device=torch.device("cpu"))),
    )
    for call, arguments in calls:
        refused = doubtful.refusals(call, arguments)
        assert all(refused.values()), (call, refused)


def test_unknown_keywords_are_refused_before_the_gather(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    i, _, options = small_call()
    out, lse = parallel.fwd(i.q, i.kv, i.indices, **options)
    monkeypatch.setattr(parallel, "GatheredKV", lambda *_: pytest.fail("a gather has begun"))
    backward = {name: value for name, value in options.items() if name != "d_v"}
    for call in (
        lambda **wrong: parallel.fwd(i.q, i.kv, i.indices, **options, **wrong),
        lambda **wrong: parallel.sparse_mla(i.q, i.kv, i.indices, **options, **wrong),
        lambda **wrong: parallel.bwd(i.q, i.kv, out, i.dout, i.indices, lse, **backward, **wrong),
    ):
        with pytest.raises(ArgumentTypeError, match="scale: is no argument of this call; got float"):
            call(scale=0.5)


def test_the_bench_takes_or_refuses_the_named_backend(tmp_path: Path) -> None:
    words = [
        "--tokens=5",
        "--heads=2",
        "--reps=1",
        "--splits=zigzag",
        "--device=cpu",
        f"--out={tmp_path / 'rows.jsonl'}",
    ]
    with pytest.raises(SystemExit, match="backend 'sm90' needs compute capability"):
        bench_parallel.main([*words, "--backend=sm90"])
    with pytest.raises(SystemExit, match="backend: must be"):
        bench_parallel.main([*words, "--backend=none"])
    assert bench_parallel.main([*words, "--backend=reference"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["backend"] for row in rows] == ["reference"] * 2


def test_the_bench_on_a_cpu_must_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_parallel.arguments, "default_device", lambda: torch.device("cpu"))
    with pytest.raises(SystemExit):
        bench_parallel.main([])
    assert "--device cpu --tokens 64" in capsys.readouterr().err


def test_wrong_tensors(one_rank: None) -> None:
    i, split, options = small_call()
    for wrong, message in ((i.kv[:5], "kv: axis 0 must have 6 entries"), (i.kv[0], "kv: must be")):
        with pytest.raises(ArgumentValueError, match=message):
            parallel.sparse_mla(i.q, wrong, i.indices, **options)
    with pytest.raises(ArgumentTypeError, match=r"kv: must be a torch\.Tensor"):
        parallel.fwd(i.q, None, i.indices, **options)
    for causal in (False, True):
        with pytest.raises(ArgumentTypeError, match="split: must be a TokenSplit"):
            parallel.fwd(i.q, i.kv, i.indices, **options | dict(split="zigzag", causal=causal))
    with pytest.raises(ArgumentTypeError, match="split: must be a TokenSplit"):
        parallel.scatter_sum(i.kv, None)
    with pytest.raises(UnsupportedError, match="'flash_mla' has no backward"):
        parallel.sparse_mla(i.q.clone().requires_grad_(), i.kv, i.indices, **options, backend="flash_mla")
    with pytest.raises(ArgumentValueError, match="split: must be that of gather_kv"):
        parallel.fwd(i.q, parallel.gather_kv(i.kv, split), i.indices, **options | dict(split=TokenSplit(7)))
    with pytest.raises(ArgumentValueError, match=r"q: axis 0 must have 6 entries.*else give q_positions"):
        parallel.fwd(i.q[:4], i.kv, i.indices[:4], **options | dict(causal=True))
    with pytest.raises(ArgumentValueError, match="x: axis 1 must have 6 entries"):
        split.split(i.kv, dim=1)
    with pytest.raises(ArgumentValueError, match="dim: must be an axis of x"):
        split.unsplit(i.kv, dim=3)
    with pytest.raises(ArgumentValueError, match="dkv: axis 0 must have 6 entries"):
        parallel.scatter_sum(i.kv[:5], split)
    out, lse = parallel.fwd(i.q, i.kv, i.indices, **options)
    backward = dict(split=split, **i.options)
    for name, value in (("dkv", out), ("dkv_dtype", torch.int32)):
        with pytest.raises(ArgumentTypeError, match=f"{name}: "):
            parallel.bwd(i.q, i.kv, out, i.dout, i.indices, lse, **backward, **{name: value})
