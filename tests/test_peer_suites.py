"""The runner of peers' suites, on suites made up here: which cases it takes, and what it says of each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from cute_sparse_mla import compat

from . import peer_suites

# A script of the form of FlashMLA's, which makes its cases when it is run.
SCRIPT = """
import dataclasses
import flash_mla
import torch

@dataclasses.dataclass
class TestParam:
    s_q: int
    topk: int
    h_q: int
    num_runs: int = 0

def run_test(case):
    q = torch.randn(case.s_q, case.h_q, 24).float()
    rows = torch.arange(case.topk).int().expand(case.s_q, 1, case.topk)
    out, _, lse = flash_mla.flash_mla_sparse_fwd(q.bfloat16(), torch.randn(9, 1, 24).bfloat16(), rows, 0.5, 16)
    print("running")
    print("case")
    print("h_q 2 is wrong here")
    return case.h_q != 2 and bool(lse.isfinite().all())

if __name__ == "__main__":
    correctness_cases = [TestParam(s, 3, 4) for s in (1, 2)]
    correctness_cases_with_features = [TestParam(1, k, h) for k in range(1, 17) for h in (64, 128)]
    corner_cases = [TestParam(1, 8, 2)]
    performance_cases = [TestParam(1 << 20, 8, 2, num_runs=10)]
    raise SystemExit("the runner does not run the script's main part")
"""
CUDNN = """
import pytest
import torch

@pytest.mark.parametrize("heads", [1, 2])
def test_backward(heads):
    from cudnn import DSA
    assert torch.zeros(1, device="cuda").device.type == "cpu"
    assert heads == 1, "two heads"
    assert callable(DSA.sparse_attention_backward_wrapper)

def test_internals():
    pytest.importorskip("cudnn.deepseek_sparse_attention")
"""
CPU = torch.device("cpu")


def test_matrix_and_reasons(tmp_path: Path) -> None:
    folder = tmp_path / "flash_mla" / "tests"
    folder.mkdir(parents=True)
    (folder / "test_flash_mla_sparse_prefill.py").write_text(SCRIPT)
    parts = dict(peer_suites.flash_mla(tmp_path, CPU, 0))
    assert [len(outcomes) for outcomes in parts.values()] == [2, 32, 1, 128 * peer_suites.HEADS_A_CASE]
    assert [o.result for o in parts["flash_mla correctness_cases"]] == ["passed"] * 2
    (corner,) = parts["flash_mla corner_cases"]
    assert (corner.result, corner.reason) == ("missed", "h_q 2 is wrong here")
    heads = {o.case.partition("h_q=")[2].partition(",")[0] for o in parts["flash_mla heads 1 to 128"]}
    assert heads == {str(h) for h in range(1, 129)}
    assert torch.get_default_dtype() == torch.float32 and "flash_mla" not in sys.modules


def test_pytest_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes, misses and skips with their reasons; the stand-ins are gone afterwards."""
    file = tmp_path / "test_made_up.py"
    file.write_text(CUDNN)
    wrapper = type("DSA", (), {"sparse_attention_backward_wrapper": compat.sparse_attention_backward_wrapper})
    # As if somebody had imported the real package's parts before.
    monkeypatch.setitem(sys.modules, "cudnn.deepseek_sparse_attention", ModuleType("cudnn.deepseek_sparse_attention"))
    with peer_suites.standing_in(CPU), peer_suites.importable(tmp_path, [peer_suites.module("cudnn", DSA=wrapper)]):
        passed, missed, skipped = peer_suites.run_pytest(file, 0)
    assert (passed.result, missed.result, skipped.result) == ("passed", "missed", "skipped")
    assert "two heads" in missed.reason and "deepseek_sparse_attention" in skipped.reason
    assert "cudnn.deepseek_sparse_attention" in sys.modules


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "flash_mla" / "tests"
    folder.mkdir(parents=True)
    (folder / "test_flash_mla_sparse_prefill.py").write_text(SCRIPT)
    (tmp_path / "flash_mla" / "SOURCE").write_text("made up\n")
    out = tmp_path / "rows.jsonl"
    options = [
        "--peer-path",
        str(tmp_path),
        "--only",
        "flash_mla",
        "--device",
        "cpu",
        "--limit",
        "2",
        "--out",
        str(out),
    ]
    monkeypatch.setattr(sys, "argv", ["peer_suites", *options])
    assert peer_suites.main() == 1
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["cases"] for row in rows] == [2, 2, 1, 2] and rows[0]["source"] == "made up"
    assert rows[2]["missed"][0]["reason"] == "h_q 2 is wrong here"
    assert "flash_mla corner_cases: 0 of 1 passed" in capsys.readouterr().out
