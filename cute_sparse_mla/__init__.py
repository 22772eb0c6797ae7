"""Sparse MLA attention for training and prefill: forward and backward, 1 to 128 heads, Hopper and Blackwell."""

from . import env

env.support_checkout()

from . import compat, indices  # noqa: E402
from .api import Explanation, bwd, explain, fwd, sparse_mla, warmup  # noqa: E402
from .config import SparseAttentionConfig  # noqa: E402
from .errors import (  # noqa: E402
    ArgumentError,
    ArgumentTypeError,
    ArgumentValueError,
    MissingDependencyError,
    SparseMLAError,
    UnsupportedError,
)
from .groups import TokenPlan, plan  # noqa: E402
from .version import __version__  # noqa: E402

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "ArgumentValueError",
    "Explanation",
    "MissingDependencyError",
    "SparseAttentionConfig",
    "SparseMLAError",
    "TokenPlan",
    "UnsupportedError",
    "__version__",
    "bwd",
    "compat",
    "explain",
    "fwd",
    "indices",
    "plan",
    "sparse_mla",
    "warmup",
]
