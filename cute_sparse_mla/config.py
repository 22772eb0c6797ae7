"""Kernel configurations: what a caller may set, and the measured table that fills in the rest.

Every row of the table says why it is there and which measurement chose it; `explain` prints the row that was used.
Rows for classes of D, heads, K and rows of kv are measured by `python -m cute_sparse_mla bench --tune`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from .errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from .problem import MAX_HEADS_PER_GROUP, Problem

THREAD_COUNTS = (128, 256, 384, 512)
ANY = (0, 2**63 - 1)
# Rows that `python -m cute_sparse_mla bench --tune --write-table` measured, and nothing else.
MEASURED = Path(__file__).parent / "data" / "configs.json"


@dataclass(frozen=True)
class SparseAttentionConfig:
    """Tuning choices of one call; a field left at `None` comes from the measured table.

    Fields: `fwd_backend` (backend of the forward when it should differ from the backward's), `fwd_threads`,
    `bwd_threads` (threads per CTA), `fwd_stages`, `bwd_stages` (KV buffers in flight), `fwd_block_k`, `bwd_block_k`
    (slots per step), `bwd_split_store` (parts in which a step's dKV is staged and added), `tokens_per_tile`
    (neighbouring query tokens that share one gather list; 1 makes results independent of the other queries, and `None`
    lets the device decide whether groups that fill a tile pay), `bwd_cluster` (SM90, more than 64 heads per group: with
    2 a pair of CTAs has a tile of the backward, each with half of its columns, instead of a CTA for 64 heads each. An
    experiment: 4096 x 8192 tokens, 128 heads, D 576, K 2048 take 13.7 ms on an H200 where the default takes 12.7).
    """

    fwd_backend: str | None = None
    fwd_threads: int | None = None
    fwd_stages: int | None = None
    fwd_block_k: int | None = None
    bwd_threads: int | None = None
    bwd_stages: int | None = None
    bwd_block_k: int | None = None
    bwd_split_store: int | None = None
    tokens_per_tile: int | None = None
    bwd_cluster: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value, name = getattr(self, field.name), f"config.{field.name}"
            if value is None:
                continue
            if field.name == "fwd_backend":
                if not isinstance(value, str):
                    raise ArgumentTypeError(name, "must be a backend's name or None", type(value).__name__)
                if not value.isidentifier():
                    raise ArgumentValueError(name, "must be a backend's name or None", repr(value))
            elif isinstance(value, bool) or not isinstance(value, int):
                raise ArgumentTypeError(name, "must be an int or None", type(value).__name__)
            elif value < 1:
                raise ArgumentValueError(name, "must be at least 1", value)
            elif field.name.endswith("_threads") and value not in THREAD_COUNTS:
                raise ArgumentValueError(name, f"must be one of {THREAD_COUNTS}", value)
            elif field.name == "bwd_cluster" and value > 2:
                raise ArgumentValueError(name, "must be 1 or 2", value)

    def encode(self) -> str:
        """Canonical text of the fields that are set (custom ops carry it as an argument)."""
        # Not by the json module: torch.compile cannot trace it, nor the text of a number that it takes for an unknown.
        values = [(field.name, getattr(self, field.name)) for field in fields(self)]
        given = [(name, value) for name, value in values if value is not None]
        texts = [f'"{name}": "{v}"' if isinstance(v, str) else f'"{name}": {int(v)}' for name, v in given]
        return "{" + ", ".join(texts) + "}"

    @staticmethod
    def tuning() -> tuple[str, ...]:
        """Names of the fields that tune this package's own kernels."""
        return tuple(field.name for field in fields(SparseAttentionConfig) if field.name != "fwd_backend")

    def filled_from(self, defaults: SparseAttentionConfig) -> SparseAttentionConfig:
        """Fields left at `None` taken from `defaults`."""
        missing = {f.name: getattr(defaults, f.name) for f in fields(self) if getattr(self, f.name) is None}
        return replace(self, **missing)

    def __str__(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in asdict(self).items() if v is not None) or "defaults"


@cache
def decode(text: str) -> SparseAttentionConfig:
    """Inverse of `SparseAttentionConfig.encode`."""
    return SparseAttentionConfig(**json.loads(text))


@dataclass(frozen=True)
class ConfigRow:
    """One row of the table: where it holds, what it sets, why, and the figure that chose it.

    It holds for these D (none: any) and from the first to the second of `heads` (per group), `K` and `S_kv`.
    """

    architecture: str
    D: tuple[int, ...]
    heads: tuple[int, int]
    config: SparseAttentionConfig
    reason: str
    figure: str
    K: tuple[int, int] = ANY
    S_kv: tuple[int, int] = ANY

    def holds_for(self, architecture: str, problem: Problem) -> bool:
        numbers = ((problem.heads_per_group, self.heads), (problem.K, self.K), (problem.S_kv, self.S_kv))
        return (
            architecture == self.architecture
            and (not self.D or problem.D in self.D)
            and all(low <= number <= high for number, (low, high) in numbers)
        )


TABLE: tuple[ConfigRow, ...] = (
    ConfigRow(
        "sm90", (512, 576), (1, MAX_HEADS_PER_GROUP),
        SparseAttentionConfig(
            fwd_threads=384, fwd_stages=2, fwd_block_k=64,
            bwd_threads=384, bwd_stages=1, bwd_block_k=64, bwd_split_store=8,
        ),
        reason="forward: two matrix warpgroups and a copy warpgroup; backward: one warpgroup for scores, one that "
        "streams dkv, one that copies; 64 head rows and 64 slots fill a wgmma tile, and the time of 8 heads is that of "
        "the gather and of the dkv adds: where neighbouring tokens share enough rows, which the device finds out from "
        "a sample, up to 32 heads fill the tile with 2 to 16 tokens; one thread count serves every head count, so "
        "there is no ratio of two: 128 matrix threads cannot hold a 64 x 512 accumulator (256 fp32 registers each). "
        "Where fp32 dkv exceeds the L2 the backward takes each token's rows in rising order, from lists made first",
        figure="H200, 4096 x 8192 tokens, D 576, K 2048, text rows: forward 2.12 and backward 7.22 ms at 64 heads, "
        "1.70 and 6.51 at 8; in groups of 8, lists and decision included, 0.56 and 1.92",
    ),
    ConfigRow(
        "sm100", (512, 576), (1, MAX_HEADS_PER_GROUP),
        SparseAttentionConfig(
            fwd_threads=512, fwd_stages=5, fwd_block_k=64,
            bwd_threads=512, bwd_stages=1, bwd_block_k=64, bwd_split_store=4,
        ),
        reason="forward: a ring of five slots of KV fills shared memory; one CTA up to 64 heads, a pair of CTAs above. "
        "backward: q, dout, one block of KV, P and dS fill it; above 64 heads a CTA of a pair has half of the columns. "
        "Up to 32 heads neighbouring tokens fill the tile of one CTA where a sample says that they share enough rows",
        figure="none: no Blackwell GPU has run it; right in the simulator, times predicted in bench/results",
    ),
    ConfigRow(
        "reference", (), (1, MAX_HEADS_PER_GROUP), SparseAttentionConfig(tokens_per_tile=1),
        reason="plain torch; a chunk of tokens is sized by memory, not by this table",
        figure="none needed",
    ),
    *(
        ConfigRow(
            name, (512, 576), (1, MAX_HEADS_PER_GROUP), SparseAttentionConfig(tokens_per_tile=1),
            reason=f"{name} chooses its own configuration", figure="none: not this package's kernels",
        )
        for name in ("flash_mla", "cudnn")
    ),
)  # fmt: skip


def measured_entries() -> tuple[dict[str, Any], ...]:
    """What `MEASURED` holds: `architecture`, `D`, `heads`, `K`, `S_kv`, `changes` to the table's config, `figure`."""
    return tuple(json.loads(MEASURED.read_text(encoding="utf-8")))


def measured() -> tuple[ConfigRow, ...]:
    """The measured rows, which come before those of `TABLE`: its config and reason, with changes and own figures."""
    return _measured


def read_measured() -> tuple[ConfigRow, ...]:
    """What `measured` returns, from the file."""
    rows = []
    for entry in measured_entries():
        base = next(row for row in TABLE if row.architecture == entry["architecture"])
        heads, K, S_kv = (tuple(entry[name]) for name in ("heads", "K", "S_kv"))
        config = replace(base.config, **entry["changes"])
        rows.append(ConfigRow(base.architecture, (entry["D"],), heads, config, base.reason, entry["figure"], K, S_kv))
    return tuple(rows)


# Read at import: torch.compile traces what `plan` calls, and cannot trace the reading of a file.
_measured = read_measured()


def choose(
    architecture: str, problem: Problem, config: SparseAttentionConfig
) -> tuple[SparseAttentionConfig, ConfigRow]:
    """The caller's config with the first matching row's values filled in, and that row."""
    for row in (*measured(), *TABLE):
        if row.holds_for(architecture, problem):
            return config.filled_from(row.config), row
    raise UnsupportedError(
        f"no kernel config for {architecture} at D = {problem.D} with {problem.heads_per_group} heads per group; "
        "backend='reference' runs it"
    )
