"""Saved launches, the command line, mutants and the witness list."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from .ptx_sim import coverage, mutate
from .ptx_sim import foreign_dsa as dsa
from .ptx_sim.__main__ import main
from .ptx_sim.launch import Launch
from .ptx_sim.testing import LANE, lane_address, launch

FOREIGN = dsa.unavailable()
needs_wheel = pytest.mark.skipif(FOREIGN is not None, reason=f"foreign kernels: {FOREIGN}")
if FOREIGN is None:
    dsa.capture_cute.prepare()

DOUBLE = (
    LANE
    + lane_address(0, 10)
    + lane_address(1, 11)
    + """ld.global.b32 %r1, [%d10]; add.u32 %r2, %r1, %r1;
st.global.b32 [%d11], %r2;
"""
)


def small_launch() -> tuple[Launch, np.ndarray]:
    values = np.arange(64, dtype=np.uint32)
    return launch(DOUBLE, {"in": values, "out": np.zeros(64, np.uint32)}), values


def test_a_saved_launch_runs_at_other_addresses(tmp_path: Path) -> None:
    first, values = small_launch()
    first.save(tmp_path)
    again = Launch.load(tmp_path)
    assert again.sha256 == first.sha256
    again.run()
    out = again.memory().bytes_at(again.tensors[-1][1], 128).view(np.uint32)
    named = {name: address for name, address, _, _ in again.tensors}
    out = again.memory().bytes_at(named["out"], 128).view(np.uint32)
    assert np.array_equal(out, 2 * values[:32])


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    first, values = small_launch()
    first.save(tmp_path / "000")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.argv", ["ptx_sim", "run", str(tmp_path), "--save", str(tmp_path / "after")])
    assert main() == 0
    assert "warp instructions" in capsys.readouterr().out
    out = np.fromfile(tmp_path / "after" / "000.out.bin", np.uint32)
    assert np.array_equal(out[:32], 2 * values[:32])
    monkeypatch.setattr("sys.argv", ["ptx_sim", "opcodes", str(tmp_path / "000" / "kernel.ptx")])
    assert main() == 0
    assert "1 add.u32" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["ptx_sim", "coverage", str(tmp_path)])
    assert main() == 0
    assert "without a witness" in capsys.readouterr().out


def test_mutants_of_a_small_kernel() -> None:
    """Reading or writing 16 bytes further is noticed; the laboratory restores memory between runs."""
    first, _ = small_launch()
    laboratory = mutate.Laboratory(first)
    outcomes = laboratory.sample(100)
    assert outcomes
    assert all(
        o.verdict != "survived"
        for o in outcomes
        if o.mutant.instr.base in ("ld", "st") and "param" not in o.mutant.instr.parts
    )
    assert laboratory.try_mutant(outcomes[0].mutant) == outcomes[0]


@needs_wheel
def test_mutants_of_a_foreign_kernel() -> None:
    """300 random single-instruction mutants of the 64-head forward: at least 90 % are noticed."""
    p = dsa.problem(64, 512, 256, tokens=1, ragged=True, seed=5)
    laboratory = mutate.Laboratory(dsa.forward(p, run=False).launches[0])
    outcomes = laboratory.sample(300)
    assert len(outcomes) == 300
    killed = sum(o.verdict != "survived" for o in outcomes)
    assert killed >= 270, mutate.summary(outcomes, laboratory.program)


@needs_wheel
@pytest.mark.parametrize(("heads", "dim"), dsa.FORWARD)
def test_witnesses_are_of_this_ptx(heads: int, dim: int) -> None:
    """The recorded sha256 is that of the PTX compiled now, so the witnessed forms are current."""
    recorded = json.loads(coverage.WITNESSES.read_text())
    p = dsa.problem(heads, dim, 128, ragged=True)
    sha = dsa.forward(p, run=False).launches[0].sha256
    assert recorded[f"{dsa.WHEEL} DSA forward SM100 H{heads} D{dim}, launch 0"]["sha256"] == sha
