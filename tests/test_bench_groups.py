"""The bench of token groups: what its rows say about gains and lists, from made-up times, and a run on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import groups, suites
from bench.shapes import plain_shape
from bench.timing import Spread

FOUND = {"kind": "groups", "tokens_per_tile": 8, "slots": [800, 200], "chosen": 1, "implied": 4.0}


def test_gains_are_against_token_by_token_of_the_same_pass() -> None:
    times = (
        ("ours", "fwd", 2.0, ""), (suites.SINGLE, "fwd", 6.0, ""), ("flash_mla", "fwd", 5.0, "padded"),
        ("ours", "bwd", None, "failed: no memory"), ("flash_mla", "bwd", None, "not run: no backward"),
    )  # fmt: skip
    rows = groups.with_gains(
        [{"impl": impl, "pass": which, "ms": ms, "note": note, "config": {}} for impl, which, ms, note in times], FOUND
    )
    assert [row["gain"] for row in rows] == [3.0, 1.0, None, None]
    assert rows[0]["share"] == 0.75 and all(row["implied"] == 4.0 and row["kind"] == "groups" for row in rows)


@pytest.mark.parametrize(("chosen", "decision"), ((1, 0.02), (0, 0.05)))
def test_a_decision_costs_what_the_lists_do_not(chosen: int, decision: float) -> None:
    times = {groups.LISTS: Spread(0.03, 0.02, 0.04, 5), groups.DECIDED: Spread(0.05, 0.04, 0.06, 5)}
    rows = groups.list_rows({"kind": "groups"}, times, 2.0, chosen)
    by_name = {row["impl"]: row for row in rows}
    assert by_name[groups.DECISION]["ms"] == pytest.approx(decision)
    assert by_name[groups.DECISION]["of_forward"] == pytest.approx(decision / 2)
    assert by_name[groups.LISTS]["of_forward"] == 0.015 and by_name[groups.LISTS]["n"] == 5


def test_the_layers_are_those_of_few_heads() -> None:
    shapes = groups.shapes()
    assert {shape.H for shape in shapes} == {8, 16, 32}
    assert {(shape.D, shape.K) for shape in shapes} == {(576, 2048), (512, 640)}
    assert any(shape.rows == "random" and shape.S_kv == 131072 for shape in shapes)


def test_a_run_where_nothing_is_grouped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(groups, "shapes", lambda: [plain_shape("6,40,8,512,16"), plain_shape("6,50,8,512,16")])
    out = tmp_path / "rows.jsonl"
    assert groups.main(["--only", "6 x 40", "--reps", "1", "--verify-tokens", "2", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {(row["impl"], row["pass"]) for row in rows} == {
        (impl, which) for impl in (groups.AS_IT_COMES, suites.PLANNED, suites.SINGLE) for which in ("fwd", "bwd")
    }
    assert all(row["tokens_per_tile"] == 1 and row["implied"] is None and row["ok"] for row in rows)
    assert "6 x 40" in capsys.readouterr().out


def test_without_a_gpu_a_shape_must_be_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(groups.arguments, "default_device", lambda: torch.device("cpu"))
    with pytest.raises(SystemExit):
        groups.main([])
    assert "needs a GPU" in capsys.readouterr().err


def test_the_committed_rows() -> None:
    """Every layer, nothing that missed its verification, and random rows never below 0.97 of token by token."""
    rows = [json.loads(line) for line in (Path(groups.__file__).parent / "results" / "groups.jsonl").open()]
    names = ("model", "T", "H", "rows")
    assert {tuple(row[name] for name in names) for row in rows} == {
        tuple(getattr(shape, name if name != "model" else "name") for name in names) for shape in groups.shapes()
    }
    assert all(row["kind"] == "groups" and row.get("ok") is not False for row in rows)
    ours = [row for row in rows if row["impl"] in (groups.AS_IT_COMES, suites.PLANNED)]
    assert ours and min(row["gain"] for row in ours) >= 0.97
    decisions = [row["of_forward"] for row in rows if row["impl"] == groups.DECISION and row["model"] == "glm5"]
    assert len(decisions) == 12 and max(decisions) < 0.01
