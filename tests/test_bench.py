"""The benchmark's parts on a CPU: statistics, rows, verification, result rows, command line."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cute_sparse_mla
from bench import cli, report, shapes, suites, timing, verify
from bench.harness import ROW_FIELDS, Run, Settings, run_shape, work
from bench.implementations import Call, Ours, Pair
from bench.shapes import BenchShape, draw, plain_shape, random_causal_rows
from cute_sparse_mla.errors import ArgumentValueError
from cute_sparse_mla.models import MODELS
from cute_sparse_mla.precision import Inputs
from cute_sparse_mla.problem import Problem
from cute_sparse_mla.text_rows import Indexer

CPU = torch.device("cpu")
SMALL = BenchShape("shape", 48, 160, 4, 64, 32, 24, 64**-0.5)
SETTINGS = Settings(CPU, reps=2, verify_tokens=0)


def small(**changes: object) -> BenchShape:
    return replace(SMALL, **changes)  # type: ignore[arg-type]


# -- statistics ----------------------------------------------------------------------------------------------------


def test_quantiles_are_those_of_torch() -> None:
    values = torch.rand(37, dtype=torch.float64).tolist()
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        expected = torch.quantile(torch.tensor(values, dtype=torch.float64), share)
        assert timing.quantile(values, share) == pytest.approx(float(expected))
    assert timing.spread([3.0, 1.0, 2.0]) == timing.Spread(2.0, pytest.approx(1.2), pytest.approx(2.8), 3)
    with pytest.raises(ValueError, match="no values"):
        timing.quantile([], 0.5)


def test_runs_are_interleaved_and_the_order_rotates() -> None:
    seen: list[str] = []
    functions = {name: (lambda name=name: seen.append(name)) for name in "abc"}
    spreads = timing.interleaved(functions, CPU, reps=3)
    assert "".join(seen) == "abc" + "abc" + "bca" + "cab"
    assert {name: s.n for name, s in spreads.items()} == {"a": 3, "b": 3, "c": 3}
    assert all(0 <= s.p10 <= s.ms <= s.p90 for s in spreads.values())


def test_runs_fit_the_time_given() -> None:
    spreads = timing.interleaved({"a": lambda: None}, CPU, seconds=1e-9)
    assert spreads["a"].n == timing.FEWEST["cpu"]
    assert timing.interleaved({"a": lambda: None}, CPU)["a"].n == timing.MOST["cpu"]


def test_conventions() -> None:
    problem = Problem(1, 10, 100, 4, 1, 20, 576, 512, torch.bfloat16, torch.int32)
    slots = 10 * 20
    assert work(problem, "fwd") == (2 * slots * 4 * (576 + 512), slots * 2 * 576)
    assert work(problem, "bwd") == (2 * slots * 4 * (3 * 576 + 2 * 512), slots * (2 + 4) * 576)
    assert work(problem, "fwd+bwd") == tuple(
        a + b for a, b in zip(work(problem, "fwd"), work(problem, "bwd"), strict=True)
    )


# -- rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_random_causal_rows(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setitem(shapes.CHUNK_BYTES, "cpu", chunk)
    bounds = torch.tensor([-1, 0, 3, 8, 9, 63, 63, 1000])
    rows = random_causal_rows(bounds, 64, 10, torch.Generator().manual_seed(1), offset=5)
    assert rows.shape == (8, 10) and rows.dtype == torch.int32
    for bound, row in zip(bounds.tolist(), rows.tolist(), strict=True):
        chosen = [r - 5 for r in row if r >= 0]
        assert len(chosen) == len(set(chosen)) == min(10, min(bound, 63) + 1)
        assert all(0 <= r <= min(bound, 63) for r in chosen)
        assert row[len(chosen) :] == [-1] * (10 - len(chosen))


def test_random_causal_rows_are_uniform_in_value_and_order() -> None:
    rows = random_causal_rows(torch.full((20000,), 7), 16, 3, torch.Generator().manual_seed(0))
    for slot in range(3):
        share = torch.bincount(rows[:, slot].long(), minlength=8) / 20000
        assert share.shape == (8,) and (share - 1 / 8).abs().max() < 0.01


def test_more_slots_than_rows() -> None:
    rows = random_causal_rows(torch.tensor([2, 5]), 4, 9)
    assert (rows >= 0).sum(1).tolist() == [3, 4]


def test_window_layers() -> None:
    shape = shapes.model_shape(MODELS["v4-flash"], 4, 1024, tp=8)
    assert (shape.H, shape.K, shape.S_kv, shape.has_sink) == (8, 640, 1024 + 256, True)
    inputs = draw(shape, CPU)
    window, selected = inputs.indices[:, :128], inputs.indices[:, 128:]
    assert window[-1].tolist() == list(range(896, 1024))
    assert (selected >= 0).sum(1).tolist() == [255, 255, 255, 256]
    assert selected[selected >= 0].min() >= 1024 and selected.max() == 1279
    assert inputs.attn_sink is not None and inputs.attn_sink.shape == (8,)


def test_extra_models() -> None:
    ratio128 = shapes.model_shape(shapes.ALL_MODELS["v4-flash-ratio128"], 256, 4096)
    assert (ratio128.K, ratio128.S_kv) == (4096 // 128 + 128, 4096 + 32)
    ratio0 = shapes.model_shape(shapes.ALL_MODELS["v4-flash-ratio0"], 8, 256)
    assert (ratio0.K, ratio0.S_kv) == (128, 256) and draw(ratio0, CPU).indices.shape == (8, 128)
    assert shapes.model_shape(shapes.ALL_MODELS["v4.1-flash"], 256, 4096).S_kv == 2 * 4096
    every = shapes.model_shapes(shapes.ALL_MODELS, [(4096, 4096), (131072, 131072)], shapes.TP_DEGREES, shapes.ROWS)
    assert len(every) == len(shapes.ALL_MODELS) * 2 * 4 * len(shapes.ROWS)
    with pytest.raises(ArgumentValueError, match="must divide"):
        shapes.model_shape(MODELS["glm5"], 1, 1, tp=3)


def test_text_rows() -> None:
    gen = torch.Generator().manual_seed(0)
    indexer = Indexer(
        torch.randn(96, 2, 8, generator=gen),
        torch.randn(96, 8, generator=gen),
        torch.rand(96, 2, generator=gen),
        "test",
    )
    for context in (96, 64):
        inputs = draw(small(rows="text", T=16, context=context), CPU, indexer=indexer)
        assert (inputs.kv.shape[0], inputs.causal) == (context, True)
        assert (inputs.indices.max(1).values <= torch.arange(context - 16, context)).all()
    rows = run_shape(small(rows="text", T=16, context=96), [Ours()], Settings(CPU, reps=1), Run(CPU), indexer)
    assert all(row["ok"] and row["S_kv"] == 96 and row["rows"] == "text" for row in rows)
    too_long = run_shape(small(rows="text", T=16, context=97), [Ours()], SETTINGS, Run(CPU), indexer)
    assert all(row["ms"] is None and "97" in row["note"] and row["ok"] is None for row in too_long)


@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_pooled_rows(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setitem(shapes.CHUNK_BYTES, "cpu", chunk)
    bounds = torch.arange(300)
    for share, offset in ((1.0, 0), (2.0, 7), (100.0, 0)):
        rows = shapes.pooled_rows(bounds, 300, 20, share, torch.Generator().manual_seed(3), offset)
        assert rows.shape == (300, 20)
        for first in range(0, 300, shapes.POOL_TOKENS):
            block = rows[first : first + shapes.POOL_TOKENS]
            valid = block[block >= 0]
            pool = valid.unique()
            assert pool.numel() <= round(share * 20) and (not valid.numel() or valid.max() <= first + offset)
            least = min(20, first + 1)
            assert all(row[row >= 0].unique().numel() == (row >= 0).sum() == least for row in block)
            if first and share == 2.0:
                assert pool.numel() == 40 and block.unique(dim=0).shape[0] == block.shape[0]


# -- verification --------------------------------------------------------------------------------------------------


class _Wrong(Ours):
    """Ours with one result spoilt at one token."""

    def __init__(self, tensor: str, token: int) -> None:
        super().__init__("")
        self.name, self.tensor, self.token = "wrong", tensor, token

    def prepare(self, inputs: Inputs, problem: Problem) -> Call:
        call = super().prepare(inputs, problem)
        tensor, token = self.tensor, self.token
        fwd, gradients = call.fwd, call.gradients

        def spoilt_fwd() -> object:
            out, lse = fwd()
            if tensor == "out":
                out = out.clone()
                out[token] *= 1.5
            return out, lse

        def spoilt_gradients(native: object) -> object:
            dq, dkv, d_sink = gradients(native)
            if tensor == "dkv":
                dkv = dkv.clone()
                dkv[token] *= 1.5
            elif tensor == "dq":
                dq = dq.clone()
                dq[token] = math.nan
            elif tensor == "d_sink":
                d_sink = d_sink * 1.1
            return dq, dkv, d_sink

        call.fwd, call.gradients = spoilt_fwd, spoilt_gradients  # type: ignore[method-assign]
        return call


@pytest.mark.parametrize("tokens", [16, 64])
@pytest.mark.parametrize(("tensor", "which"), [("out", "fwd"), ("dq", "bwd"), ("dkv", "bwd"), ("d_sink", "bwd")])
def test_a_wrong_implementation_is_a_miss(tensor: str, which: str, tokens: int) -> None:
    shape = small(has_sink=True)
    settings = Settings(CPU, reps=1, verify_tokens=tokens)
    rows = run_shape(shape, [Ours(), _Wrong(tensor, 0)], settings, Run(CPU))
    verdicts = {(row["impl"], row["pass"]): row for row in rows}
    assert verdicts["ours", "fwd"]["ok"] and verdicts["ours", "bwd"]["ok"]
    spoilt = verdicts["wrong", which]
    assert spoilt["ok"] is False and "MISS" in spoilt["note"] and tensor in spoilt["note"]
    assert ("all tokens" if tokens == 64 else "16 of 48") in spoilt["verified"]
    json.dumps(rows, allow_nan=False)


@pytest.mark.parametrize("sink", [False, True])
def test_column_sums_of_dkv_show_a_lost_token(sink: bool) -> None:
    inputs = draw(small(T=128, has_sink=sink), CPU)
    call = Ours().prepare(inputs, small(T=128, has_sink=sink).problem())
    state = call.fwd()
    _, dkv, _ = call.gradients(call.bwd(state))
    check = verify.check_dkv_totals(inputs, *state, dkv)
    assert check.ok and check.total < 0.5
    lost = verify.take_tokens(inputs, torch.arange(127))
    shorter = Ours().prepare(lost, small(T=127, has_sink=sink).problem())
    _, dkv, _ = shorter.gradients(shorter.bwd(shorter.fwd()))
    assert not verify.check_dkv_totals(inputs, *state, dkv).ok


def test_sample_of_tokens() -> None:
    tokens = verify.sample_tokens(1000, 64, CPU)
    assert tokens.numel() == 64 and tokens[0] == 0 and tokens[-1] == 999
    assert (tokens.diff() > 1).sum() == 3
    assert verify.sample_tokens(10, 64, CPU).tolist() == list(range(10))
    assert verify.sample_tokens(100, 4, CPU).tolist() == [96, 97, 98, 99]


def test_sampled_tokens_keep_their_causal_bounds() -> None:
    inputs = draw(SMALL, CPU)
    causal = replace(inputs, causal=True, indices=torch.randint(0, 160, (48, 24), dtype=torch.int32))
    tokens = verify.sample_tokens(48, 16, CPU)
    part = verify.take_tokens(causal, tokens)
    whole = cute_sparse_mla.fwd(causal.q, causal.kv, causal.indices, d_v=32, **causal.options)[0]
    assert torch.equal(cute_sparse_mla.fwd(part.q, part.kv, part.indices, d_v=32, **part.options)[0], whole[tokens])


def test_agreement() -> None:
    a = torch.randn(7, 5)
    assert verify.relative_rms(a, a) == 0
    assert verify.relative_rms(a, 1.01 * a) == pytest.approx(0.01, rel=0.01)
    result = verify.agreement({"out": a, "dq": a}, {"x": {"out": a + 1e-3}, "y": {"dkv": a}})
    assert list(result) == ["x"] and list(result["x"]) == ["out"]


# -- result rows ---------------------------------------------------------------------------------------------------


def test_result_rows() -> None:
    shape = small(has_sink=True)
    settings = Settings(CPU, ("fwd", "bwd", "fwd+bwd"), reps=2)
    both = [Ours(), Ours("deterministic"), Pair(Ours(), Ours("deterministic"))]
    rows = run_shape(shape, both, settings, Run(CPU))
    assert [(row["impl"], row["pass"]) for row in rows] == [
        (impl.name, which) for which in settings.passes for impl in both
    ]
    for row in rows:
        assert tuple(row) == ROW_FIELDS
        assert (row["T"], row["S_kv"], row["H"], row["D"], row["d_v"], row["K"]) == (48, 160, 4, 64, 32, 24)
        assert row["ok"] is True and row["verified"] == "all tokens" and row["n"] == 2
        assert row["p10"] <= row["ms"] <= row["p90"] and row["tflops"] > 0 and row["tbps"] > 0
        assert set(row["union"]) == {"2", "4", "8", "16"} and 1 <= row["union"]["2"] <= 2
        assert row["timing"] == {"mode": "perf_counter", "l2_flush": False} and row["peak_mb"] is None
        assert row["versions"]["torch"] == torch.__version__
    assert set(rows[0]["err_vs_fp64"]) == {"out", "lse"}
    assert set(rows[3]["err_vs_fp64"]) == {"dq", "dkv", "d_sink"}
    assert rows[3]["agree"] == {
        "ours:deterministic": {"dq": 0.0, "dkv": 0.0}, "ours+ours:deterministic": {"dq": 0.0, "dkv": 0.0},
    }  # fmt: skip
    assert rows[0]["config"]["backend"] == "reference" and len({row["run"] for row in rows}) == 1
    text = report.table(rows)
    assert text.count("ok (") == 9 and "1.00" in text


def test_what_cannot_run_says_why() -> None:
    rows = run_shape(SMALL, [Ours(backend="sm90"), Ours("deterministic")], SETTINGS, Run(CPU))
    first = rows[0]
    assert first["ms"] is None and first["ok"] is None and "compute capability" in first["note"]
    assert rows[1]["ms"] > 0 and rows[1]["ok"] is None and rows[1]["verified"] == "no"
    assert "compute capability" in report.table(rows)


def test_a_failure_is_reported_and_ours_fails_the_run() -> None:
    class Broken(Ours):
        name = "ours"

        def prepare(self, inputs: Inputs, problem: Problem) -> Call:
            raise RuntimeError("out of\n luck")

    rows = run_shape(SMALL, [Broken(), Ours("deterministic")], SETTINGS, Run(CPU))
    assert rows[0]["ok"] is False and rows[0]["note"] == "failed: RuntimeError: out of luck"
    assert rows[1]["ms"] > 0


def test_settings_of_ours() -> None:
    ours = Ours("deterministic,tokens_per_tile=1,backend=reference")
    assert ours.deterministic and ours.settings.tokens_per_tile == 1 and ours.backend == "reference"
    with pytest.raises(ArgumentValueError, match="settings are deterministic"):
        Ours("faster")


@pytest.mark.parametrize("suite", suites.SUITES)
def test_suites_run(suite: str) -> None:
    """The first shape of every part, cut down to a CPU's size, with all implementations of the part."""
    for part in suites.parts(suite):
        shape = replace(part.shapes[0], T=4, context=64, H=2, K=part.shapes[0].window + 8)
        if shape.rows == "text":
            shape = replace(shape, rows="random")
        impls = [Ours(name.partition(":")[2]) for name in part.implementations]
        rows = run_shape(shape, impls, Settings(CPU, part.passes, 1, verify_tokens=4, suite=suite), Run(CPU))
        assert len(rows) == len(part.passes) * len(impls)
        assert all(row["ok"] and row["suite"] == suite and row["input_mb"] > 0 for row in rows)


def test_suites_have_each_shape_once() -> None:
    for suite in suites.SUITES:
        every = [shape for part in suites.parts(suite) for shape in part.shapes]
        assert len(every) == len(set(every))


# -- command line --------------------------------------------------------------------------------------------------


def run_cli(*words: str) -> int:
    return cli.console([*words, "--device", "cpu"])


def test_command_line_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "results" / "x.jsonl"
    words = ["--shape", "8,64,2,32,16", "--pass", "fwd,bwd", "--reps", "1", "--out", str(out), "--device", "cpu"]
    done = subprocess.run([sys.executable, "-m", "bench", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "[1/1]" in done.stderr and "x ours" in done.stdout
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["pass"] for row in rows] == ["fwd", "bwd"] and all(row["ok"] for row in rows)


def test_command_line_counts_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    words = "--model glm5 v4-pro --tokens 4096,4096x8192 --tp 1,8 --rows random,text --shape 8,8,8,512,8"
    chosen = cli._shapes(parser.parse_args(words.split()), "cuda")
    assert len(chosen) == 2 + 2 * 2 * 2 * 2
    assert (chosen[-1].S_kv, chosen[-1].H, chosen[-1].K) == (8192 + 2048, 16, 1152)
    default = cli._shapes(parser.parse_args([]), "cpu")
    assert [(s.name, s.T, s.S_kv, s.H) for s in default] == [("glm5", 64, 4096, 8)]


@pytest.mark.parametrize(
    "words",
    ["--shape 1,2", "--shape 9,4,1,64,4", "--rows real", "--pass backward", "--tokens 8x4", "--tokens a",
     "--impl theirs", "--impl ours:fast", "--peer x=y", "--peer flash_mla", "--impl tilelang_example", "--tp 3",
     "--tp 0",     "--impl flash_mla --peer flash_mla=no_such_module", "--peer flash_mla=/no/such/file.py",
     "--rows text --indexer /no/such/file", "--invalid 101", "--suite v4", "--suite v5", "--suite v4 --tokens 4"],
)  # fmt: skip
def test_command_line_errors(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(*words.split()) == 2
    captured = capsys.readouterr()
    assert "Error:" in captured.err and len(captured.err.strip().splitlines()) == 1


def test_a_miss_makes_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--shape", "8,64,2,32,16", "--reps", "1", "--impl", "ours"]
    assert run_cli(*words) == 0
    monkeypatch.setattr(cli, "Ours", lambda settings, backend: _Wrong("out", 0))
    assert run_cli(*words) == 1


def test_names_with_commas() -> None:
    assert cli._names(["ours,ours:deterministic,tokens_per_tile=1,flash_mla", "flash_mla+cudnn"]) == [
        "ours", "ours:deterministic,tokens_per_tile=1", "flash_mla", "flash_mla+cudnn",
    ]  # fmt: skip


def test_plain_shape() -> None:
    shape = plain_shape("8,64,2,576,16")
    assert (shape.d_v, shape.sm_scale, shape.problem().packed) == (512, 576**-0.5, True)


def test_peers_are_not_imported_unasked() -> None:
    script = (
        "import sys, bench.cli; print([m for m in ('flash_mla', 'cudnn', 'tilelang', 'cutlass') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
