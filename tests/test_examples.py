"""The training example runs and learns; the picture is well formed. (`test_parallel.py` runs the other example.)"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from cute_sparse_mla.examples import train_dsa

SMALL = ("--steps", "4", "--warmup", "2", "--batch", "2", "--context", "12", "--topk", "4", "--device", "cpu")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The example takes one thread; other tests keep theirs."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_training_runs_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg = tmp_path / "curves.svg"
    assert train_dsa.main([*SMALL, "--svg", str(svg)]) == 0
    said = capsys.readouterr().out
    assert "dense " in said and "sparse, top 4 " in said
    lines = ElementTree.parse(svg).getroot().findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 4 and all(len(line.attrib["points"].split()) == 4 for line in lines)


@pytest.mark.parametrize(("words", "said"), [
    (["--steps", "60"], "no row is ever selected: got 60 and 60"),
    (["--context", "1"], "--context must be at least 2"),
    (["--context", "10000000"], "must be at most 65536 tokens: got 2 x 10000000"),
    (["--context", "8192"], "must be at most 268435456, scores of the dense twin: got 1073741824"),
    (["--batch", "1000000"], "must be at most 65536 tokens"),
    (["--topk", "129"], "--topk must be at most --context: got 129 and 128"),
    (["--layers", "100000"], "--layers: must be at most 64"),
    (["--heads", "129"], "--heads: must be at most 128"),
    (["--threads", "99999999999"], "--threads: must be at most"),
    (["--steps", "many"], "--steps: must be an int of at least 1"),
    (["--seed", "-1"], "--seed: must be an int in 0..2**63 - 1"),
    (["--device", "mps"], "--device: no such device here: 'mps'"),
    (["--svg", "{folder}"], "--svg: cannot be written"),
    (["--svg", "{file}/curves.svg"], "--svg: cannot be written"),
    (["--svg", ""], "--svg: cannot be written"),
])  # fmt: skip
def test_what_cannot_be_trained_is_said_before(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_dsa, "train", lambda *_: pytest.fail("a training has begun"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    words = [word.format(folder=tmp_path, file=tmp_path / "file") for word in words]
    with pytest.raises(SystemExit):
        train_dsa.main(["--device", "cpu", *words])
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("steps", [2, 3, 9, 10, 11, 20])
def test_any_number_of_steps(steps: int) -> None:
    """The learning rate rises and falls within them; 10 and 20 are where a rise ends on a step."""
    s = train_dsa.Settings(steps=steps, warmup=1, batch=1, context=4, topk=2, width=32, layers=1, heads=1)
    for losses in train_dsa.train(s, True, torch.device("cpu")):
        assert len(losses) == steps and all(math.isfinite(loss) for loss in losses)


def test_a_folder_for_the_picture_is_made(tmp_path: Path) -> None:
    svg = tmp_path / "not" / "there" / "curves.svg"
    assert train_dsa.main([*SMALL, "--svg", str(svg)]) == 0 and svg.stat().st_size > 1000


def test_selecting_every_row_is_the_dense_attention() -> None:
    """Forward and gradients, and the indexer's loss reaches the indexer alone."""
    s = train_dsa.Settings(batch=2, context=9, topk=9, width=32, heads=2)
    torch.manual_seed(0)
    layer = train_dsa.Attention(s, sparse=True)
    positions = torch.arange(9).repeat(2)
    cu_seqlens = torch.tensor([0, 9, 18], dtype=torch.int32)
    x = torch.randn(18, 32)
    results = []
    for layer.selects in (True, False):
        layer.zero_grad()
        out = layer(x, positions, cu_seqlens)
        out.square().sum().backward()
        assert all(p.grad is None for p in layer.indexer.parameters())
        grads = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
        loss = layer.index_loss
        layer.zero_grad()
        loss.backward()
        assert all((p.grad is not None) == name.startswith("indexer.") for name, p in layer.named_parameters())
        results.append((out.detach(), loss.detach(), grads))
    (out, loss, grads), (dense_out, dense_loss, dense_grads) = results
    # out and the gradients of q and kv are rounded to bfloat16.
    torch.testing.assert_close(out, dense_out, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(loss, dense_loss, rtol=1e-4, atol=1e-5)
    assert grads.keys() == dense_grads.keys()
    for name, grad in grads.items():
        assert float((grad - dense_grads[name]).norm() / dense_grads[name].norm()) < 2e-2, name
