"""Other implementations' public test suites through the drop-ins of `cute_sparse_mla.compat`.

    python -m tests.peer_suites --peer-path FOLDER --out bench/results/peer_suites.jsonl        on a GPU
    python -m tests.peer_suites --peer-path FOLDER --device cpu --limit 20                      the reference, a sample

FOLDER is outside the repository and holds sources of the suites, or of some:

    flash_mla/tests         test_flash_mla_sparse_prefill.py of deepseek-ai/FlashMLA with what it imports: its matrix of
                            cases without the timed ones, and its cases widened to every head count from 1 to 128
    miles/tests             three files of radixark/miles (MILES below)
    cudnn/test/python       fe_api/dsa/test_DSA_sparse_attention_backward.py of NVIDIA/cudnn-frontend with what it
                            imports, and its functions over more heads, lengths and empty rows

A file SOURCE in a suite's folder says where it comes from. The drop-ins stand for a suite's own modules while it runs;
its checks and tolerances are its own. One JSON line a part: counts, and the reason of every miss and skip.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib
import io
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bench.report import append_jsonl
from cute_sparse_mla import api, arguments, compat, env
from cute_sparse_mla.scales import LOG2_E

PREFILL_MATRIX = ("correctness_cases", "correctness_cases_with_features", "corner_cases")
MILES = (
    "fast-gpu/kernels/attention/dsa/test_dsa_sparse_attention.py",
    "fast-gpu/test_dsv4_sparse_mla_regressions.py",
    "manual/models/deepseek_v4/test_v4_tilelang_sparse_mla.py",
)
CUDNN_FILE = "fe_api/dsa/test_DSA_sparse_attention_backward.py"
HEADS_A_CASE = 8  # widened cases a head count
CUDNN_HEADS = (1, 2, 7, 8, 16, 24, 32, 48, 64, 72, 96, 100, 127, 128)
CPU_SCORES = 1 << 21  # larger cases take a CPU minutes


@dataclasses.dataclass
class Outcome:
    """A case of a suite: `result` is passed, missed or skipped, with the reason of the last two."""

    case: str
    result: str
    reason: str = ""


Part = Iterator[tuple[str, list[Outcome]]]


# -- what the suites import ----------------------------------------------------------------------------------------


class OnCpu(TorchFunctionMode):
    """Tensors that a suite asks a GPU for are made on the CPU."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextlib.contextmanager
def standing_in(device: torch.device) -> Iterator[None]:
    """On a CPU: what the suites ask of torch.cuda, answered as a Hopper GPU would."""
    if device.type == "cuda":
        yield
        return
    answers: dict[str, Any] = dict(
        is_available=lambda: True, get_device_capability=lambda *_: (9, 0), synchronize=lambda *_: None,
        empty_cache=lambda: None, current_stream=lambda *_: SimpleNamespace(cuda_stream=0),
        manual_seed_all=lambda _: None,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        yield stack.enter_context(OnCpu())


def module(name: str, **contents: Any) -> ModuleType:
    """A module of this name."""
    made = ModuleType(name)
    vars(made).update(contents)
    return made


@contextlib.contextmanager
def importable(folder: Path, modules: Iterable[ModuleType]) -> Iterator[None]:
    """Inside, the modules stand for theirs and the folder's files can be imported."""
    by_name = {made.__name__: made for made in modules}
    for name in list(by_name):
        parts = name.split(".")[:-1]
        for parent in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
            # What is really there stays.
            if parent not in sys.modules:
                by_name.setdefault(parent, module(parent, __path__=[]))
    # Parts of a real package that somebody imported before: they are not the stand-in's.
    hidden = {
        name: found for name, found in sys.modules.items()
        if name not in by_name and any(name.startswith(f"{made}.") for made in by_name)
    }  # fmt: skip
    before = {name: sys.modules.get(name) for name in by_name} | hidden
    for name in hidden:
        del sys.modules[name]
    sys.modules.update(by_name)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name, real in before.items():
            if real is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = real
        for name, found in list(sys.modules.items()):
            if str(getattr(found, "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]


def missing(name: str, **contents: Any) -> list[ModuleType]:
    """A stand-in for a package that the suite imports and does not use here, where it is not installed."""
    try:
        importlib.import_module(name)
    except ImportError:
        return [module(name, **contents)]
    return []


# -- FlashMLA ------------------------------------------------------------------------------------------------------


def prefill_matrix(file: Path, script: ModuleType) -> dict[str, list[Any]]:
    """The lists of cases that the script makes when it is run, without those that it times."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    main = next(node for node in tree.body if isinstance(node, ast.If))
    wanted: list[ast.stmt] = [
        node for node in main.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) in PREFILL_MATRIX
    ]  # fmt: skip
    exec(compile(ast.Module(wanted, []), str(file), "exec"), vars(script))
    return {name: getattr(script, name) for name in PREFILL_MATRIX}


def widened(matrix: dict[str, list[Any]]) -> list[Any]:
    """Some of the suite's shapes and features for every head count from 1 to 128."""
    templates = {dataclasses.replace(case, h_q=64).__repr__(): case for case in matrix[PREFILL_MATRIX[1]]}
    shapes = list(templates.values())
    step = max(1, len(shapes) // HEADS_A_CASE)
    return [
        dataclasses.replace(case, h_q=heads)
        for heads in range(1, 129)
        for case in shapes[heads % step :: step][:HEADS_A_CASE]
    ]


def flash_mla(folder: Path, device: torch.device, limit: int) -> Part:
    file = folder / "flash_mla" / "tests" / "test_flash_mla_sparse_prefill.py"
    refused = {"get_mla_metadata": None, "flash_mla_with_kvcache": None}
    drop_in = module("flash_mla", flash_mla_sparse_fwd=compat.flash_mla_sparse_fwd, **refused)
    with importable(file.parent, [drop_in]):
        # Only while it is imported: torch looks whether there is one.
        with importable(file.parent, missing("triton", jit=lambda function: function)):
            script = importlib.import_module(file.stem)
        matrix = prefill_matrix(file, script)
        parts = matrix | {"heads 1 to 128": widened(matrix)}
        # As the script sets them.
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device(device)
        torch.set_float32_matmul_precision("high")
        try:
            for name, cases in parts.items():
                fit = [c for c in cases if device.type == "cuda" or c.s_q * c.topk * c.h_q <= CPU_SCORES]
                yield f"flash_mla {name}", [run_prefill(script, case) for case in sampled(fit, limit)]
        finally:
            torch.set_default_dtype(before)
            torch.set_default_device(None)
            torch.set_float32_matmul_precision("highest")


def run_prefill(script: ModuleType, case: Any) -> Outcome:
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            right = script.run_test(case)
    except Exception as error:
        # Whatever it raises is the reason of a miss.
        return Outcome(str(case), "missed", f"{type(error).__name__}: {error}"[:500])
    reason = " / ".join(said.getvalue().strip().splitlines()[2:])[:500]
    return Outcome(str(case), "passed") if right else Outcome(str(case), "missed", reason)


def sampled(cases: list[Any], limit: int) -> list[Any]:
    """All cases, or `limit` of them spread over the list."""
    return cases if limit == 0 or len(cases) <= limit else cases[:: math.ceil(len(cases) / limit)]


# -- pytest files --------------------------------------------------------------------------------------------------


class Recorder:
    """A pytest plugin that keeps the outcome of every test."""

    def __init__(self, limit: int) -> None:
        self.limit, self.outcomes = limit, dict[str, Outcome]()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sampled(items, self.limit)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self.outcomes[report.nodeid] = Outcome(report.nodeid, "missed", f"not collected: {report.longrepr}"[:500])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "passed":
            if report.when == "call":
                self.outcomes[report.nodeid] = Outcome(report.nodeid, "passed")
            return
        skipped = report.outcome == "skipped" and isinstance(report.longrepr, tuple)
        reason = report.longrepr[2] if skipped else report.longreprtext[-500:]  # type: ignore[index]
        self.outcomes[report.nodeid] = Outcome(report.nodeid, "skipped" if skipped else "missed", reason)


def run_pytest(file: Path, limit: int) -> list[Outcome]:
    recorder = Recorder(limit)
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={file.parent}"]
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main([*options, str(file)], plugins=[recorder])
    return list(recorder.outcomes.values())


# -- miles ---------------------------------------------------------------------------------------------------------


def sparse_attn_tilelang(q: Tensor, kv: Tensor, attn_sink: Tensor, topk_idxs: Tensor, sm_scale: float) -> Tensor:
    """miles' DeepSeek-V4 form: one latent `kv [B, S_kv, D]` without an axis of groups."""
    return compat.sparse_attention(q, kv[:, :, None], topk_idxs[:, :, None], sm_scale, attn_sink=attn_sink)


def sparse_mqa_fwd_interface(
    q: Tensor, kv: Tensor, attn_sink: Tensor, topk_idxs: Tensor, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """The same with its lse: base 2, with the sink's share."""
    out, lse = api.fwd(
        q, kv[:, :, None], topk_idxs[:, :, None], sm_scale=sm_scale, d_v=q.shape[-1], attn_sink=attn_sink
    )
    return out, torch.logaddexp(lse, attn_sink) * LOG2_E


def miles(folder: Path, device: torch.device, limit: int) -> Part:
    kernels, plugins = "miles.kernels.attention.dsa", "miles_plugins.models.deepseek_v4.ops.kernel"
    nothing = lambda **_: None  # noqa: E731
    drop_ins = [
        module(kernels, __path__=[], sparse_attention=compat.sparse_attention),
        module(f"{kernels}.sparse_attention", flash_mla_sparse_fwd=None),
        module(f"{plugins}.tilelang_sparse_mla", sparse_attn_tilelang=sparse_attn_tilelang),
        module(f"{plugins}.tilelang_sparse_mla_fwd", sparse_mqa_fwd_interface=sparse_mqa_fwd_interface),
        # Where the suite registers its tests for its own continuous integration.
        module("tests.ci", __path__=[]),
        module("tests.ci.ci_register", register_cuda_ci=nothing, register_rocm_ci=nothing),
        *missing("tilelang"),
    ]
    for name in MILES:
        with importable(folder / "miles", drop_ins):
            yield f"miles {Path(name).stem}", run_pytest(folder / "miles" / "tests" / name, limit)


# -- the cuDNN frontend --------------------------------------------------------------------------------------------


def cudnn(folder: Path, device: torch.device, limit: int) -> Part:
    root = folder / "cudnn" / "test" / "python"
    wrapper = SimpleNamespace(sparse_attention_backward_wrapper=compat.sparse_attention_backward_wrapper)
    drop_ins = [module("cudnn", DSA=wrapper), *missing("cuda.bindings.driver", CUstream=int)]
    with importable(root, drop_ins):
        yield "cudnn backward", run_pytest(root / CUDNN_FILE, limit)
        reference = importlib.import_module("fe_api.dsa.dsa_reference")
        cases = [(h, D, lengths) for h in CUDNN_HEADS for D in (512, 576) for lengths in (None, "mixed", "empty")]
        yield (
            "cudnn backward, more heads and lengths",
            [run_cudnn(reference, device, *case) for case in sampled(cases, limit)],
        )


def run_cudnn(reference: ModuleType, device: torch.device, heads: int, D: int, lengths: str | None) -> Outcome:
    """A case in the manner of the suite's own: fillers of 2**31 - 1 behind the lengths, destinations of NaN."""
    name, K, S_kv = f"H {heads}, D {D}, lengths {lengths}", 128, 256
    values = torch.tensor((-3, 0, 1, 63, 64, 65, 128) if lengths == "mixed" else (0,) * 7, dtype=torch.int32)
    topk_length = None if lengths is None else values.to(device)
    gen = torch.Generator(device).manual_seed(433)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, device=device)

    q, kv, sink = (normal(7, heads, D) / 10).bfloat16(), (normal(S_kv, D) / 10).bfloat16(), normal(heads)
    rows = torch.rand((7, S_kv), generator=gen, device=device).argsort(-1)[:, :K].int()
    if topk_length is not None:
        rows[torch.arange(K, device=device) >= topk_length[:, None]] = torch.iinfo(torch.int32).max
    scale = D**-0.5
    out, lse = reference.ref_sparse_attention_forward(q, kv, sink, rows, topk_length, scale)
    dout = normal(*out.shape).bfloat16()
    try:
        dq, dkv = torch.full_like(q, math.nan), torch.full_like(kv, math.nan)
        done = compat.sparse_attention_backward_wrapper(
            q, kv, out, dout, lse, sink, rows, softmax_scale=scale, topk_length=topk_length, dq=dq, dkv=dkv
        )
        assert done["dq"] is dq and done["dkv"] is dkv, "the destinations are not what came back"
        if topk_length is not None:
            assert not dq[topk_length <= 0].any(), "dq of an empty row is not zero"
        reference.check_ref_dsa_sparse_attention_backward(
            q, kv, sink, rows, out, dout, lse, *done, scale, topk_length, atol=5e-2, rtol=5e-2
        )
    except Exception as error:
        # Whatever it raises is the reason of a miss.
        return Outcome(name, "missed", f"{type(error).__name__}: {error}"[:500])
    return Outcome(name, "passed")


# -- the command ---------------------------------------------------------------------------------------------------

SUITES: dict[str, Callable[[Path, torch.device, int], Part]] = {"flash_mla": flash_mla, "miles": miles, "cudnn": cudnn}


def row(suite: str, part: str, outcomes: list[Outcome], seconds: float, folder: Path, device: torch.device) -> dict:
    """The result row of a part."""
    source = folder / suite / "SOURCE"
    by = {result: [o for o in outcomes if o.result == result] for result in ("passed", "missed", "skipped")}
    return {
        "kind": "peer suite", "suite": part, "cases": len(outcomes), "passed": len(by["passed"]),
        "missed": [{"case": o.case, "reason": o.reason} for o in by["missed"]],
        "skipped": [{"case": o.case, "reason": o.reason} for o in by["skipped"]],
        "seconds": round(seconds, 1), "source": source.read_text().strip() if source.exists() else None,
        "device": env.device_name(device), "versions": env.versions("tilelang"),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.peer_suites", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--peer-path", type=Path, required=True, metavar="FOLDER", help="sources of the suites")
    parser.add_argument("--only", nargs="+", choices=tuple(SUITES), default=tuple(SUITES))
    parser.add_argument("--device", type=arguments.device, help="default: the GPU where there is one")
    parser.add_argument("--limit", type=int, default=0, help="at most that many cases a part (default: all)")
    parser.add_argument("--out", type=arguments.output_file, metavar="FILE", help="append result rows as JSON lines")
    args = parser.parse_args()
    device = args.device or arguments.default_device()
    failed = False
    absent = [suite for suite in args.only if not (args.peer_path / suite).is_dir()]
    if absent and args.only != tuple(SUITES):
        parser.error(f"{args.peer_path} has no folder {', '.join(absent)}")
    for suite in absent:
        print(f"{suite}: no folder of that name in {args.peer_path}, not run", flush=True)
    for suite in (s for s in args.only if s not in absent):
        start = time.perf_counter()
        with standing_in(device):
            for part, outcomes in SUITES[suite](args.peer_path.absolute(), device, args.limit):
                done = row(suite, part, outcomes, time.perf_counter() - start, args.peer_path, device)
                start = time.perf_counter()
                failed |= bool(done["missed"]) or not outcomes
                print(f"{part}: {done['passed']} of {done['cases']} passed, {len(done['skipped'])} skipped", flush=True)
                for bad in done["missed"][:3] + done["skipped"][:3]:
                    print(f"  {json.dumps(bad)[:300]}", flush=True)
                if args.out:
                    append_jsonl(args.out, [done])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
