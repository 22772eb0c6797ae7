"""What a run tells an observer (`Machine(observer=...)`): every access, barrier, fence and asynchronous operation.

The methods here do nothing; race detection and counters override them. `split` is the issuing split (its warp is the
actor), `mask` its active lanes, `index` the instruction (`machine.program.where(index)` gives the PTX line). While an
asynchronous operation runs, `machine.current` is that operation: accesses then belong to it, not to the warp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .machine import AsyncOp, Cluster, ClusterBarrier, Cta, NamedBarrier, Split, Warp
    from .matrix_operands import Descriptor
    from .ops_mbarrier import Mbarrier
    from .ops_tcgen05 import Shape


class Observer:
    """Base class; all methods are no-ops."""

    # Lifetimes

    def cluster_start(self, cluster: Cluster) -> None:
        """A cluster has its warps and memory; none of them has run."""

    def warp_end(self, warp: Warp) -> None:
        """All lanes of a warp have exited."""

    def cluster_end(self, cluster: Cluster) -> None:
        """All its warps have ended and nothing asynchronous is left; its memory is about to be given back."""

    def griddepcontrol(self, split: Split, mask: np.ndarray, index: int, action: str) -> None:
        """griddepcontrol.wait and launch_dependents."""

    # Memory

    def access(
        self, split: Split, mask: np.ndarray, index: int, space: str, address: np.ndarray, size: int, kind: str
    ) -> None:
        """`size` bytes per active lane; kind is read, write or atomic. Inactive lanes repeat an active address."""

    def bulk(self, split: Split, index: int, space: str, address: int, size: int, kind: str) -> None:
        """A contiguous range touched by a copy engine (async proxy); kind is read, write or reduce.

        Swizzled tensor copies report the whole box in shared memory and row by row in global memory.
        """

    def tensor_map(self, split: Split, index: int, address: int) -> None:
        """A tensor copy is issued with the tensor map at this generic address."""

    def tmem_alloc(self, split: Split, mask: np.ndarray, index: int, target: int, first: int, count: int) -> None:
        """tcgen05.alloc got `count` columns from `first` on and writes that to the shared address `target`."""

    def tmem_dealloc(self, split: Split, mask: np.ndarray, index: int, first: int, count: int) -> None:
        """tcgen05.dealloc"""

    def tmem(self, split: Split, index: int, shape: str, lane: int, column: int, count: int, kind: str) -> None:
        """tcgen05.ld or st."""

    def mma(
        self,
        split: Split,
        index: int,
        cta: Cta,
        shape: Shape,
        target: int,
        a: Descriptor | int,
        b: Descriptor,
        accumulate: bool,
    ) -> None:
        """tcgen05.mma on one CTA of the pair; `a` is a descriptor or a tensor-memory address."""

    def cp(self, split: Split, index: int, cta: Cta, source: Descriptor, rows: int, width: int, target: int) -> None:
        """tcgen05.cp: shared to tensor memory."""

    def wgmma_issue(self, split: Split, index: int, number: int) -> None:
        """One warp issues its part of the warpgroup's wgmma `number`; the last of the four hands it over."""

    def wgmma(
        self, split: Split, index: int, a: Descriptor | None, b: Descriptor, n: int, a_k_major: bool, b_k_major: bool
    ) -> None:
        """wgmma of a whole warpgroup; `a` is None when it comes from registers."""

    # Order

    def fence(self, split: Split, mask: np.ndarray, index: int, kind: str) -> None:
        """fence, membar, and the tcgen05 waits and fences; `kind` is the opcode without its first part."""

    def barrier(self, split: Split, mask: np.ndarray, index: int, barrier: NamedBarrier, wait: bool) -> None:
        """Arrival at a named barrier, before it is counted."""

    def barrier_done(self, split: Split, mask: np.ndarray, index: int, barrier: NamedBarrier) -> None:
        """A split leaves bar.sync."""

    def cluster_arrive(self, split: Split, mask: np.ndarray, index: int, relaxed: bool) -> None:
        """barrier.cluster.arrive"""

    def cluster_wait(self, split: Split, mask: np.ndarray, index: int, barrier: ClusterBarrier) -> None:
        """A split leaves barrier.cluster.wait."""

    def warp_sync(self, split: Split, mask: np.ndarray, index: int) -> None:
        """bar.warp.sync"""

    def mbarrier_init(self, split: Split, mask: np.ndarray, index: int, barrier: Mbarrier) -> None:
        """mbarrier.init. Here and below, `mask` is of the lanes that name this barrier."""

    def mbarrier_arrive(self, split: Split, mask: np.ndarray, index: int, barrier: Mbarrier) -> None:
        """An arrival of threads, before it is counted; inside an AsyncOp one of cp.async.mbarrier.arrive."""

    def mbarrier_expect(self, split: Split, mask: np.ndarray, index: int, barrier: Mbarrier, size: int) -> None:
        """expect_tx raises the bytes to wait for, before that is counted."""

    def mbarrier_complete(self, split: Split, index: int, barrier: Mbarrier, size: int) -> None:
        """An asynchronous copy completes bytes on a barrier, before they are counted."""

    def mbarrier_wait(self, split: Split, mask: np.ndarray, index: int, barrier: Mbarrier) -> None:
        """A try_wait or test_wait that returns true."""

    def commit(self, split: Split, index: int, barrier: Mbarrier) -> None:
        """tcgen05.commit arrives on a barrier, before that is counted."""

    def bulk_group(self, split: Split, mask: np.ndarray, index: int, action: str, count: int, read: bool) -> None:
        """cp.async.bulk.commit_group and wait_group."""

    def cp_async_group(self, split: Split, mask: np.ndarray, index: int, action: str, count: int) -> None:
        """cp.async.commit_group, wait_group and wait_all."""

    def wgmma_sync(self, split: Split, mask: np.ndarray, index: int, action: str, count: int) -> None:
        """wgmma.fence, commit_group, and a wait_group that returns."""

    # Asynchronous operations

    def issue(self, op: AsyncOp) -> None:
        """An asynchronous operation is handed to its engine."""

    def begin(self, op: AsyncOp) -> None:
        """It runs now."""

    def end(self, op: AsyncOp) -> None:
        """It has run."""
