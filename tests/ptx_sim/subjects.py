"""Named kernels for the race commands: each makes one call whose launches are recorded, memory as it was before each.

The wheel's kernels (`foreign_dsa.py`) and the project's own. Another kernel joins by a line in `subjects()`: a name and
a function of the numbers of slots per row and of query tokens that makes the call and executes its launches.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from . import foreign_dsa, project_hopper, project_sm100
from .launch import Launch

Subject = Callable[[int, int], object]


def _problem(heads: int, dim: int, slots: int, tokens: int) -> foreign_dsa.Problem:
    """Ragged rows whose scores grow along the row."""
    p = foreign_dsa.problem(heads, dim, slots, tokens, ragged=True, seed=slots)
    if tokens == 1:
        p.lengths[0] = slots - 7
    return foreign_dsa.growing(p)


def _wheel_forward(heads: int, dim: int, slots: int, tokens: int) -> object:
    return foreign_dsa.forward(_problem(heads, dim, slots, tokens))


def _wheel_backward(heads: int, dim: int, deterministic: bool, slots: int, tokens: int) -> object:
    return foreign_dsa.backward(_problem(heads, dim, slots, tokens), deterministic)


def _wheel_pair(heads: int, slots: int, tokens: int) -> object:
    return foreign_dsa.backward_pair(_problem(heads, 576, slots, tokens))


def _wheel_sm90(heads: int, dim: int, slots: int, tokens: int) -> object:
    return foreign_dsa.backward_sm90(_problem(heads, dim, slots, tokens))


def _hopper(D: int, H: int, deterministic: bool, slots: int, tokens: int) -> object:
    return project_hopper.example(D, H, slots, tokens, deterministic, multiprocessors=1)


def _hopper_pair(slots: int, tokens: int) -> object:
    return project_hopper.example(576, 128, slots, tokens, multiprocessors=1, bwd_cluster=2)


def _hopper_forward(D: int, H: int, slots: int, tokens: int) -> object:
    return project_hopper.forward_over_tiles(D, H, slots, tokens, multiprocessors=1)


def _sm100(heads: int, dim: int, tokens_per_tile: int, slots: int, tokens: int) -> object:
    p = _problem(heads, dim, slots, tokens)
    return project_sm100.forward(p.q, p.kv, p.indices, p.lengths, p.sink, tokens_per_tile)


def _sm100_lists(slots: int, tokens: int) -> object:
    return project_sm100.lists(_problem(8, 512, slots, tokens))


def _sm100_backward(heads: int, dim: int, slots: int, tokens: int) -> object:
    return project_sm100.backward(_problem(heads, dim, slots, tokens))


def subjects() -> dict[str, Subject]:
    """Every kernel that can run here, by name."""
    found: dict[str, Subject] = {}
    if foreign_dsa.unavailable() is None:
        for heads, dim in foreign_dsa.FORWARD:
            found[f"wheel-fwd-h{heads}-d{dim}"] = partial(_wheel_forward, heads, dim)
        for heads, dim, deterministic in foreign_dsa.BACKWARD:
            name = f"wheel-bwd-h{heads}-d{dim}{'-deterministic' if deterministic else ''}"
            found[name] = partial(_wheel_backward, heads, dim, deterministic)
        for heads in foreign_dsa.PAIR:
            found[f"wheel-bwd-pair-h{heads}"] = partial(_wheel_pair, heads)
        for heads, dim in foreign_dsa.HOPPER:
            found[f"wheel-bwd90-h{heads}-d{dim}"] = partial(_wheel_sm90, heads, dim)
    if project_hopper.unavailable() is None:
        for D, H in ((576, 64), (512, 64), (512, 24)):
            found[f"hopper-h{H}-d{D}"] = partial(_hopper, D, H, False)
            found[f"hopper-fwd-h{H}-d{D}"] = partial(_hopper_forward, D, H)
        found["hopper-pair-h128-d576"] = _hopper_pair
        found["hopper-h64-d576-deterministic"] = partial(_hopper, 576, 64, True)
    if project_sm100.unavailable() is None:
        for heads, dim, tokens_per_tile in project_sm100.FORWARD:
            grouped = f"x{tokens_per_tile}" if tokens_per_tile > 1 else ""
            found[f"sm100-fwd-h{heads}{grouped}-d{dim}"] = partial(_sm100, heads, dim, tokens_per_tile)
        found["sm100-lists"] = _sm100_lists
        for heads, dim in project_sm100.BACKWARD:
            found[f"sm100-bwd-h{heads}-d{dim}"] = partial(_sm100_backward, heads, dim)
    return found


def record(name: str, slots: int, tokens: int = 2) -> list[tuple[str, Launch]]:
    """The launches of a subject, in order, each with its memory as it was when it was launched."""
    known = subjects()
    if name not in known:
        raise KeyError(f"no subject {name!r}; there are {', '.join(known)}")
    before = os.environ.get("PTX_SIM_DUMP")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PTX_SIM_DUMP"] = folder
        try:
            known[name](slots, tokens)
        finally:
            del os.environ["PTX_SIM_DUMP"]
            if before is not None:
                os.environ["PTX_SIM_DUMP"] = before
        return launches_in(Path(folder))


def launches_in(folder: Path) -> list[tuple[str, Launch]]:
    """The saved launches in a folder or in its subfolders."""
    places = [folder] if (folder / "launch.json").exists() else sorted(p.parent for p in folder.glob("*/launch.json"))
    return [(place.name, Launch.load(place)) for place in places]
