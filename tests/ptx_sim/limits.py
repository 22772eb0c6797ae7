"""Launch limits that a GPU enforces: what cudaLaunchKernel would refuse is an error here too.

CUDA programming guide, technical specifications per compute capability, and PTX ISA 11.4 (performance directives) and
11.7 (cluster directives).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from .memory import SimError

if TYPE_CHECKING:
    from .launch import Launch
    from .parser import Kernel, Module

# Compute capability -> the most shared memory of one block, static and dynamic together, in KiB.
SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 101: 227, 103: 227, 110: 227, 120: 99, 121: 99}
STATIC_KIB = 48
THREADS, BLOCK = 1024, (1024, 1024, 64)
GRID = (2**31 - 1, 65535, 65535)
PORTABLE_CLUSTER, LARGEST_CLUSTER = 8, 16


def capability(target: str) -> int:
    """100 for sm_100a, 90 for sm_90."""
    return int("".join(c for c in target if c.isdigit()) or 0)


def _threads(launch: Launch, kernel: Kernel) -> str | None:
    threads = prod(launch.block)
    if not 1 <= threads <= THREADS or any(b > most for b, most in zip(launch.block, BLOCK, strict=True)):
        return f"block {launch.block} has {threads} threads; at most {THREADS}, and {BLOCK} per dimension"
    most = kernel.attributes.get("maxntid")
    if most and threads > prod(most):
        return f"block {launch.block} has {threads} threads; the kernel's .maxntid allows {prod(most)}"
    wanted = kernel.attributes.get("reqntid")
    if wanted and (*wanted, 1, 1)[:3] != tuple(launch.block):
        return f"block {launch.block}; the kernel's .reqntid wants {(*wanted, 1, 1)[:3]}"
    return None


def _shared(launch: Launch, static: int, arch: int) -> str | None:
    total, most = static + launch.shared_bytes, SHARED_KIB.get(arch, 48) * 1024
    if static > STATIC_KIB * 1024:
        return f"{static} bytes of static shared memory; at most {STATIC_KIB * 1024}"
    if total > most:
        return (
            f"{static} static + {launch.shared_bytes} dynamic = {total} bytes of shared memory; a block of "
            f"sm_{arch} has at most {most}"
        )
    return None


def _cluster(launch: Launch, kernel: Kernel, arch: int) -> str | None:
    size, attributes = prod(launch.cluster), kernel.attributes
    most = LARGEST_CLUSTER if launch.nonportable_cluster else PORTABLE_CLUSTER
    if any(g % c for g, c in zip(launch.grid, launch.cluster, strict=True)):
        return f"grid {launch.grid} is no multiple of the cluster {launch.cluster}"
    if size > 1 and arch < 90:
        return f"cluster {launch.cluster} on sm_{arch}, which has no clusters"
    if size > most:
        return (
            f"cluster {launch.cluster} has {size} CTAs; at most {PORTABLE_CLUSTER}, or {LARGEST_CLUSTER} with the "
            "function attribute NonPortableClusterSizeAllowed"
        )
    wanted = attributes.get("reqnctapercluster")
    if wanted and (*wanted, 1, 1)[:3] != tuple(launch.cluster):
        return f"cluster {launch.cluster}; the kernel's .reqnctapercluster wants {(*wanted, 1, 1)[:3]}"
    if "maxclusterrank" in attributes and size > attributes["maxclusterrank"][0]:
        return f"cluster {launch.cluster} exceeds the kernel's .maxclusterrank {attributes['maxclusterrank'][0]}"
    return None


def check(launch: Launch, module: Module, kernel: Kernel, static_shared: int) -> None:
    """Raise SimError with the rule and what came when a GPU would refuse this launch."""
    arch = capability(module.target)
    if any(not 1 <= g <= most for g, most in zip(launch.grid, GRID, strict=True)):
        reason: str | None = f"grid {launch.grid}; each dimension is 1 to {GRID}"
    else:
        reason = _threads(launch, kernel) or _shared(launch, static_shared, arch) or _cluster(launch, kernel, arch)
    if reason is None and len(launch.params) < kernel.param_bytes:
        reason = f"{len(launch.params)} bytes of parameters; the kernel takes {kernel.param_bytes}"
    if reason is not None:
        raise SimError(f"launch of {launch.kernel} refused: {reason}")
