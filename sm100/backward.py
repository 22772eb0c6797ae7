"""Backward of sparse MLA on SM100: 64 query rows a CTA, or 128 a pair of CTAs; persistent.

    p_hat = exp(s - lse)   P = w p_hat   dP = dout v   dS = p_hat (w dP + (dlse - w Delta))
    dq = sm_scale sum dS k               dkv[row] += sm_scale dS q, and P dout on the first 512 columns

`q [B, S, H, D]`, `dout [B, S, H, 512]`, `kv [B, S_kv, G, D]`, `indices [B, S, G, K]` and the per-row `stats` of
`preprocess.py` -> `dq [B, S, H, D]`, and sums in fp32 for `dkv [B, S_kv, G, D]`, whose columns stand in the order of
`launch.columns_of`. How operands and lanes are laid out is told in `backward_plan.py`, what a row is in `heads.py`.

Pipeline of one block of 64 slots, time down; a name behind > is the barrier that announces it:

    index                gather                mma                        softmax             epilogue
    rows i  >rows_ready  q, dout  >q_full
                         kv i     >kv_full     S, dP      >s_ready        to registers
    rows i + 1                                                            (a pair: parts change hands)
                                                                          P, dS   >p_ready    (adds of block i - 1)
                                               q^T dS, dout^T P of 128 columns of d
                                                          >dkv_ready                          to registers >dkv_free
                                               dq += dS K >kv_free                            sm_scale a + b, adds
                         kv i + 1              the next 128 columns
                                               ...
                                               S, dP i + 1         >s_ready
                                               the last columns    >p_free
    next tile            q, dout, by columns   >q_free    >dq_ready       dq

A pair makes dq first. With a tail its dout^T P takes the place of dP, so it makes the tail's columns first, and of the
scores of i + 1 only S before the last columns, dP when their dout^T P has been read (> dp_free): S and then dP become P
and dS, parts changing hands in between. P and dS are rounded once, dS unscaled.
"""

import cutlass  # noqa: I001
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, cute
from cutlass.cute.nvgpu import cpasync

from . import forward, ptx
from .backward_plan import CHUNK, BackwardPlan
from .forward import HALF_K, KEYS, K_MAJOR, STEP, STEPS, Forward, _global, _named, _next
from .heads import ROWS_PER_CTA, split
from .plan import (
    BLOCK_K, D_V, HALF, ITEM, PIECE, ROLE, ROW_STAGES, SPAN, THREADS, TMEM_COLUMNS, WARP,
)  # fmt: skip

# Run-time arguments, in order; see `launch.py` for their meaning.
POINTERS = ("q", "kv", "indices", "bits", "lengths", "positions", "chosen", "dout", "stats", "dq", "dkv")
SIZES = (*forward.SIZES, "first_tile", "end_tile")
STRIDES = (*forward.STRIDES[:-1], "do_b", "do_s", "do_h")
SCALES = ("scale_log2", "dkv_scale", "dq_scale")
MN_STEP = STEP * SPAN * ITEM  # bytes of 16 rows of a span
P_BARRIER = 8  # named barrier of the softmax warps
CTAS = (0, 1)  # of a pair


class Backward(Forward):
    """The kernel of one plan. Slots, lengths and masks are the forward's roles and helpers."""

    def __init__(self, plan: BackwardPlan) -> None:
        super().__init__(plan)

    @cute.jit
    def __call__(self, pointers, sizes, strides, scales, ctas, stream):
        at, n, by = _named(POINTERS, pointers), _named(SIZES, sizes), _named(STRIDES, strides)
        plan = self.plan
        load = cpasync.CopyBulkTensorTileG2SOp()
        q_map = self.heads_map(at["q"], n, plan.D, (by["q_b"], by["q_s"], by["q_h"]), load)
        dout_map = self.heads_map(at["dout"], n, D_V, (by["do_b"], by["do_s"], by["do_h"]), load)
        kv_map = self.rows_map(at["kv"], n, by["kv_row"], load)
        self.kernel((q_map, kv_map, dout_map), pointers, sizes, strides, scales).launch(
            grid=(ctas, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(plan.ctas, 1, 1),
            smem=plan.smem_bytes,
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, maps, pointers, sizes, strides, scales):
        plan = self.plan
        at, n, by = _named(POINTERS, pointers), _named(SIZES, sizes), _named(STRIDES, strides)
        # Row numbers are indices, -1 for an invalid slot: kv and dkv number their rows differently.
        plain = {**n, "row_b": Int32(0), "row_s": Int32(1), "row_g": Int32(0), "kv_rows": Int32(-1)}
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if plan.pair else Int32(0)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        smem = {name: base + area.start for name, area in plan.smem.items()}
        if const_expr(not plan.pair):
            smem["dout"] = smem["q"] + PIECE
        if const_expr(not plan.own_exchange):
            smem["exchange"] = smem["p"]
        bar = {b.name: base + plan.barrier_offset(b.name) for b in plan.barriers}

        holder = ptx.shared(smem["tmem_address"], Int32, 16)
        if warp == ROLE["mma"].first:
            cute.arch.alloc_tmem(TMEM_COLUMNS, holder)
            cute.arch.relinquish_tmem_alloc_permit()
        if warp == ROLE["gather"].first:
            for tensor_map in maps:
                cpasync.prefetch_descriptor(tensor_map)
        if warp == ROLE["index"].first:
            with cute.arch.elect_one():
                for b in plan.barriers:
                    for stage in cutlass.range_constexpr(b.stages):
                        barrier = ptx.shared(bar[b.name] + 8 * stage, Int64, 8)
                        cute.arch.mbarrier_init(barrier, b.arrivals(plan.ctas))
                cute.arch.mbarrier_init_fence()
        self.sync_all()
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, holder).toint()

        work = (n["first_tile"] + block // plan.ctas, self.end(at, n, n["end_tile"]), grid // plan.ctas)
        if warp < ROLE["epilogue"].first:
            self.softmax(at, n, by, smem, bar, tmem, rank, warp, work, scales)
        elif warp < ROLE["mma"].first:
            self.epilogue(at, n, by, smem, bar, tmem, rank, warp, work, scales[1])
        elif warp == ROLE["mma"].first:
            self.mma(at, n, by, smem, bar, tmem, rank, work)
        elif warp == ROLE["index"].first:
            self.index(at, plain, by, smem, bar, work)
        else:
            self.gather(at, n, by, smem, bar, rank, warp, work, maps)

        # A pair's CTAs write to each other: neither may leave before the other is done.
        self.sync_all()
        if warp == ROLE["mma"].first:
            cute.arch.dealloc_tmem(cute.arch.retrieve_tmem_ptr(Float32, 16, holder), TMEM_COLUMNS)

    # Does: loads q, dout and gathered rows. Produces: q_full, kv_full. Consumes: rows_ready, q_free, kv_free.
    @cute.jit
    def gather(self, at, n, by, smem, bar, rank, warp, work, maps):
        plan = self.plan
        half = warp - ROLE["gather"].first
        first, tiles, step = work
        q_phase, kv_phase = Int32(1), Int32(1)
        stage, phase = Int32(0), Int32(0)
        early = plan.chunks // 2
        q_map, kv_map, dout_map = (ptx.descriptor(m) for m in maps)
        for tile in cutlass.range(first, tiles, step):
            b, s, g = split(tile, n["token_tiles"], n["G"])
            # The tile before leaves q and dout chunk by chunk, the later ones after its last rows of kv.
            self.load_chunks(smem, bar, half, rank, q_map, dout_map, (s, g, b), q_phase, (0, early))
            row_base = b * n["row_b"] + g * n["row_g"]
            for i in cutlass.range(self.blocks(at, n, by, tile)):
                ptx.wait(bar["rows_ready"] + 8 * stage, phase)
                ptx.wait(bar["kv_free"], kv_phase)
                kv_phase ^= 1
                numbers = smem["row_numbers"] + (stage * BLOCK_K + half * HALF_K) * 4
                with cute.arch.elect_one():
                    rows = []
                    for quad in cutlass.range_constexpr(HALF_K // 4):
                        found = ptx.load_words(numbers + quad * 16, 4)
                        rows.append([row_base + i * n["row_s"] if i >= 0 else n["kv_rows"] for i in found])
                    spans = plan.spans + self.tails(rank)
                    ptx.arrive_expect(bar["kv_full"], spans * (HALF_K * SPAN * ITEM))
                    for span in cutlass.range(spans, unroll=1):
                        column = Int32(D_V) if span == plan.spans else rank * plan.columns + span * SPAN
                        where = smem["kv"] + span * PIECE + half * (HALF_K * SPAN * ITEM)
                        self.gather_rows(where, kv_map, column, rows, bar["kv_full"])
                stage, phase = _next(stage, phase, ROW_STAGES)
                if i == 0:
                    self.load_chunks(smem, bar, half, rank, q_map, dout_map, (s, g, b), q_phase, (early, plan.chunks))
            q_phase ^= 1

    @cute.jit
    def gather_rows(self, where, kv_map, column, rows, full):
        """One span of columns of this warp's keys."""
        for quad in cutlass.range_constexpr(len(rows)):
            ptx.gather4(where + quad * 4 * SPAN * ITEM, kv_map, column, rows[quad], full, False)

    def tails(self, rank):
        """Spans of the tail that this CTA has: 0 or 1."""
        if not self.plan.tail:
            return Int32(0)
        return 1 - rank

    @cute.jit
    def load_chunks(self, smem, bar, half, rank, q_map, dout_map, tile, phase, chunks: cutlass.Constexpr):
        """The tile's rows of q (first gather warp) or dout (second), a range of chunks; q's tail with the last."""
        plan = self.plan
        for chunk in cutlass.range_constexpr(*chunks):
            full = bar["q_full"] + 8 * chunk
            spans = range(chunk * CHUNK // SPAN, (chunk + 1) * CHUNK // SPAN)
            ptx.wait(bar["q_free"] + 8 * chunk, phase)
            with cute.arch.elect_one():
                bytes_of = len(spans) * plan.ctas * PIECE
                if half == 0:
                    if const_expr(chunk == plan.chunks - 1):
                        ptx.arrive_expect(full, bytes_of + self.tails(rank) * (plan.ctas * PIECE))
                        if self.tails(rank) == 1:
                            self.load_span(smem["q"], plan.spans, q_map, Int32(D_V), tile, full)
                    else:
                        ptx.arrive_expect(full, bytes_of)
                else:
                    ptx.arrive_expect(full, bytes_of)
                for span in cutlass.range_constexpr(spans.start, spans.stop):
                    column = rank * plan.columns + span * SPAN
                    if half == 0:
                        self.load_span(smem["q"], span, q_map, column, tile, full)
                    else:
                        self.load_span(smem["dout"], span, dout_map, column, tile, full)

    @cute.jit
    def load_span(self, where, span: cutlass.Constexpr, tensor_map, column, tile, full):
        """All rows of 64 columns; spans lie two pieces apart, of which a CTA alone uses every second one."""
        s, g, b = tile
        for part in cutlass.range_constexpr(self.plan.ctas):
            head, token = self.plan.rows.origin(s, part)
            target = where + span * 2 * PIECE + part * PIECE
            ptx.tensor_load(target, tensor_map, (column, head, token, g, b), full, False)

    # Does: all products. Produces: s_ready, dp_ready, kv_free, dkv_ready, p_free, q_free, dq_ready.
    # Consumes: q_full, kv_full, p_ready, dkv_free, dp_free.
    @cute.jit
    def mma(self, at, n, by, smem, bar, tmem, rank, work):
        plan = self.plan
        first, tiles, step = work
        q_phase, block_phase, p_phase = Int32(0), Int32(0), Int32(0)
        phase, dp_phase = Int32(1), Int32(1)
        tail_last = plan.tail and not plan.shared_sums
        for tile in cutlass.range(first, tiles, step):
            blocks = self.blocks(at, n, by, tile)
            self.scores(smem, bar, tmem, rank, block_phase, q_phase, True)
            if const_expr(plan.shared_sums):
                self.late_scores(smem, bar, tmem, dp_phase)
                dp_phase ^= 1
            q_phase ^= 1
            block_phase ^= 1
            for i in cutlass.range(blocks):
                last = i == blocks - 1
                # The warps that made P have read S and dP, and dq of the tile before.
                self.wait_both(bar["p_ready"], p_phase)
                p_phase ^= 1
                if const_expr(plan.pair):
                    # Alone, the first dkv has a fence.
                    ptx.fence_after()
                    self.dq(smem, bar, tmem, rank, i > 0, last)
                if const_expr(plan.shared_sums):
                    if self.tails(rank) == 1:
                        self.dkv(smem, bar, tmem, Int32(plan.spans - 1), True, phase)
                        phase ^= 1
                for chunk in cutlass.range(plan.chunks, unroll=1):
                    # The next block's softmax runs under the adds of this one's last chunks.
                    if (chunk == plan.chunks - 1) & (i < blocks - 1):
                        self.scores(smem, bar, tmem, rank, block_phase, q_phase, False)
                        block_phase ^= 1
                    self.dkv(smem, bar, tmem, chunk * (CHUNK // SPAN), False, phase)
                    phase ^= 1
                    if const_expr(not plan.pair):
                        if chunk == 0:
                            self.dq(smem, bar, tmem, rank, i > 0, last)
                    if last & (chunk < plan.chunks - (1 if tail_last else 0)):
                        with cute.arch.elect_one():
                            ptx.commit(bar["q_free"] + 8 * chunk, False)
                if const_expr(tail_last):
                    self.dkv(smem, bar, tmem, Int32(plan.spans - 1), True, phase)
                    phase ^= 1
                    if last:
                        with cute.arch.elect_one():
                            ptx.commit(bar["q_free"] + 8 * (plan.chunks - 1), False)
                with cute.arch.elect_one():
                    ptx.commit(bar["p_free"], False, multicast=plan.pair)
                if const_expr(plan.shared_sums):
                    if i < blocks - 1:
                        self.late_scores(smem, bar, tmem, dp_phase)
                        dp_phase ^= 1

    @cute.jit
    def scores(self, smem, bar, tmem, rank, phase, q_phase, fresh: cutlass.Constexpr):
        """S = q K^T and dP = dout V^T over this CTA's columns; S alone where tensor memory is short."""
        plan = self.plan
        ptx.wait(bar["kv_full"], phase)
        for chunk in cutlass.range(plan.chunks, unroll=1):
            if const_expr(fresh):
                ptx.wait(bar["q_full"] + 8 * chunk, q_phase)
            for part in cutlass.range_constexpr(CHUNK // SPAN):
                span = chunk * (CHUNK // SPAN) + part
                heads, keys = span * (2 * PIECE), smem["kv"] + span * PIECE
                with cute.arch.elect_one():
                    # Alone, the rows of dout follow those of q: S in lanes 0 to 63, dP in 64 to 127.
                    self.score_span(smem["q"] + heads, keys, tmem + plan.tmem["s"].start, span > 0)
                    if const_expr(plan.own_exchange):
                        self.score_span(smem["dout"] + heads, keys, tmem + plan.tmem["dp"].start, span > 0)
        if const_expr(plan.tail):
            heads, keys = smem["q"] + plan.spans * 2 * PIECE, smem["kv"] + plan.spans * PIECE
            if self.tails(rank) == 1:
                with cute.arch.elect_one():
                    if const_expr(plan.pair):
                        self.score_span(heads, keys, tmem + plan.tmem["s"].start, True)
                    else:
                        self.tail_scores(heads, keys, tmem + plan.tmem["s_tail"].start)
        with cute.arch.elect_one():
            ptx.commit(bar["s_ready"], False)

    @cute.jit
    def late_scores(self, smem, bar, tmem, phase):
        """dP, once dout^T P of the block before, which lies there, has been read; S has waited for the operands."""
        plan = self.plan
        ptx.wait(bar["dp_free"], phase)
        ptx.fence_after()
        for span in cutlass.range(plan.spans, unroll=1):
            with cute.arch.elect_one():
                heads, keys = smem["dout"] + span * (2 * PIECE), smem["kv"] + span * PIECE
                self.score_span(heads, keys, tmem + plan.tmem["dp"].start, span > 0)
        with cute.arch.elect_one():
            ptx.commit(bar["dp_ready"], False)

    @cute.jit
    def score_span(self, heads, keys, d, accumulate):
        """64 columns of 128 rows."""
        shape = ptx.shape(self.dtype, 2 * ROWS_PER_CTA, BLOCK_K, False)
        for k in cutlass.range_constexpr(STEPS):
            a = ptx.operand(heads + k * STEP * ITEM, **K_MAJOR)
            b = ptx.operand(keys + k * STEP * ITEM, **K_MAJOR)
            more = accumulate if k == 0 else Boolean(True)
            ptx.mma_rows(d, a, b, shape, more)

    @cute.jit
    def tail_scores(self, heads, keys, d):
        """S of the tail's columns by keys, as in the forward: lanes 0 to 63 have the first 32."""
        shape = ptx.shape(self.dtype, ROWS_PER_CTA, BLOCK_K, False)
        for k in cutlass.range_constexpr(STEPS):
            a = ptx.operand(heads + k * STEP * ITEM, **K_MAJOR)
            b = ptx.operand(keys + k * STEP * ITEM, **K_MAJOR)
            ptx.mma(d, a, b, shape, k > 0, pair=False, a_in_tensor_memory=False)

    @cute.jit
    def dq(self, smem, bar, tmem, rank, accumulate, last):
        """dq (+)= dS K over this CTA's columns; alone, half of a product's columns go to lanes 0 to 63."""
        plan = self.plan
        for j in cutlass.range(plan.columns // HALF, unroll=1):
            with cute.arch.elect_one():
                keys = smem["kv"] + j * (HALF // SPAN * PIECE)
                self.dq_columns(smem["ds"], keys, tmem + plan.tmem["dq"].start + j * (HALF // 2), HALF, accumulate)
        if const_expr(plan.tail):
            if self.tails(rank) == 1:
                with cute.arch.elect_one():
                    keys = smem["kv"] + plan.spans * PIECE
                    self.dq_columns(smem["ds"], keys, tmem + plan.tmem["dq_tail"].start, SPAN, accumulate)
        with cute.arch.elect_one():
            ptx.commit(bar["kv_free"], False)
        if last:
            with cute.arch.elect_one():
                ptx.commit(bar["dq_ready"], False)

    @cute.jit
    def dq_columns(self, ds, keys, d, width: cutlass.Constexpr, accumulate):
        """`width` columns of d."""
        pair = self.plan.pair
        shape = ptx.shape(self.dtype, ROWS_PER_CTA * self.plan.ctas, width, True)
        for k in cutlass.range_constexpr(STEPS):
            a = ptx.operand(ds + k * STEP * ITEM, **K_MAJOR)
            b = ptx.operand(keys + k * MN_STEP, **mn_major(PIECE))
            more = accumulate if k == 0 else Boolean(True)
            if const_expr(pair):
                ptx.mma_rows(d, a, b, shape, more)
            else:
                ptx.mma(d, a, b, shape, more, pair=False, a_in_tensor_memory=False)

    @cute.jit
    def dkv(self, smem, bar, tmem, span, is_tail: cutlass.Constexpr, phase):
        """q^T dS and dout^T P, 128 columns of d by 64 keys. The tail's lanes 64 to 127 count, the others repeat."""
        plan = self.plan
        ptx.wait(bar["dkv_free"], phase)
        ptx.fence_after()
        shape = ptx.shape(self.dtype, CHUNK, BLOCK_K, True, True)
        with cute.arch.elect_one():
            for operand, heads, d in (("p", "dout", plan.p_dout), ("ds", "q", "ds_q"))[1 if is_tail else 0 :]:
                for k in cutlass.range_constexpr(plan.ctas * ROWS_PER_CTA // STEP):
                    a = ptx.operand(smem[heads] + span * (2 * PIECE) + k * MN_STEP, **mn_major(2 * PIECE))
                    b = ptx.operand(smem[operand] + k * MN_STEP, **mn_major(PIECE))
                    ptx.mma_rows(tmem + plan.tmem[d].start, a, b, shape, k > 0)
            ptx.commit(bar["dkv_ready"], False)

    # Does: P and dS; warpgroup w owns keys 32 i + 16 w and 15 more of a row, where i is the rank in a pair, alone the
    # half of the lanes; stores dq. Produces: p_ready; of a pair halves_ready, halves_taken.
    # Consumes: s_ready, rows_ready, p_free, dq_ready; halves_ready, halves_taken, dp_ready.
    @cute.jit
    def softmax(self, at, n, by, smem, bar, tmem, rank, warp, work, scales):
        plan = self.plan
        first, tiles, step = work
        lane = cute.arch.lane_idx()
        group, quadrant = warp // 4, warp % 4
        row, side = quadrant % 2 * WARP + lane, quadrant // 2
        if const_expr(plan.pair):
            row, side = quadrant * WARP + lane, rank
        head, token = plan.rows.of(row, 0)
        s_phase, p_phase, dq_phase = Int32(0), Int32(1), Int32(0)
        stage, phase = Int32(0), Int32(0)
        scale_log2, _, dq_scale = scales
        for tile in cutlass.range(first, tiles, step):
            lse, w, offset = self.statistics(at, n, tile, head, token)
            for _ in cutlass.range(self.blocks(at, n, by, tile)):
                ptx.wait(bar["rows_ready"] + 8 * stage, phase)
                at_mask = smem["slot_masks"] + ((stage * plan.rows.tokens + token) * 2 + side) * 4
                mask = ptx.load_words(at_mask, 1, Uint32)[0] >> Uint32(group * KEYS)
                stage, phase = _next(stage, phase, ROW_STAGES)

                ptx.wait(bar["s_ready"], s_phase)
                ptx.fence_after()
                if const_expr(plan.shared_sums):
                    own = self.sum_halves(smem, bar, tmem, rank, warp, lane, ("s",), "p", p_phase)
                elif const_expr(plan.pair):
                    own = self.sum_halves(smem, bar, tmem, rank, warp, lane, ("s", "dp"), "exchange", s_phase)
                else:
                    own = self.sort_halves(smem, bar, tmem, side, warp, lane, p_phase)
                s, dp, p_hat = own[:KEYS], own[KEYS:], []
                for key in cutlass.range_constexpr(KEYS):
                    p = cute.math.exp2(s[key] * scale_log2 - lse, fastmath=True)
                    p = p if (mask >> key) & 1 != 0 else Float32(0.0)
                    p_hat.append(p)
                    s[key] = w * p
                    if const_expr(not plan.shared_sums):
                        dp[key] = p * (w * dp[key] + offset)
                if const_expr(plan.shared_sums):
                    self.store_operand(smem["p"], rank, row, side * 4 + group * 2, s)
                    ptx.wait(bar["dp_ready"], s_phase)
                    ptx.fence_after()
                    dp = self.sum_halves(smem, bar, tmem, rank, warp, lane, ("dp",), "ds", p_phase)
                    dp = [p * (w * x + offset) for p, x in zip(p_hat, dp, strict=True)]
                if const_expr(plan.own_exchange):
                    ptx.wait(bar["p_free"], p_phase)
                if const_expr(not plan.shared_sums):
                    self.store_operand(smem["p"], rank, row, side * 4 + group * 2, s)
                s_phase ^= 1
                p_phase ^= 1
                self.store_operand(smem["ds"], rank, row, side * 4 + group * 2, dp)
                if const_expr(plan.pair):
                    cute.arch.fence_proxy("async")
                else:
                    cute.arch.fence_view_async_shared()
                ptx.fence_before()
                self.arrive_both(bar["p_ready"])
            ptx.wait(bar["dq_ready"], dq_phase)
            dq_phase ^= 1
            self.store_dq(at, n, bar, tmem, tile, rank, group, side, head, token, dq_scale)
        if const_expr(plan.pair):
            # The other CTA's last signal has come: this one may end.
            ptx.wait(bar["p_free"], p_phase)

    @cute.jit
    def sort_halves(self, smem, bar, tmem, side, warp, lane, p_phase):
        """(S, dP) of the thread's own keys: of a row, lane r has S of all keys and lane r + 64 dP."""
        plan = self.plan
        group = warp // 4
        columns = tmem + plan.tmem["s"].start + group * KEYS
        own = ptx.load_columns(columns + side * HALF_K, KEYS)
        given = ptx.load_columns(columns + (1 - side) * HALF_K, KEYS)
        tail = [Float32(0.0)] * KEYS
        if const_expr(plan.tail):
            tail = ptx.load_columns(tmem + plan.tmem["s_tail"].start + group * KEYS, KEYS)
        cute.arch.fence_view_async_tmem_load()
        # The exchange, P and dS lie where the block before had its P and dS.
        ptx.wait(bar["p_free"], p_phase)
        taken = self.exchange(smem, warp, lane, [Float32(0.0)] * KEYS, given)
        cute.arch.barrier(barrier_id=P_BARRIER, number_of_threads=ROLE["softmax"].warps * WARP)
        s, dp = [], []
        for key in cutlass.range_constexpr(KEYS):
            s.append((own[key] if side == 0 else taken[key]) + tail[key])
            dp.append(taken[key] if side == 0 else own[key])
        return s + dp

    @cute.jit
    def sum_halves(self, smem, bar, tmem, rank, warp, lane, names: cutlass.Constexpr, place: cutlass.Constexpr, phase):
        """S, dP or both of the thread's own keys: this CTA's part and the other's, which gets its own keys' parts.

        They change hands at `place`: an area of their own, or that of the operand that they become.
        """
        plan = self.plan
        own, given = [], []
        for name in names:
            columns = tmem + plan.tmem[name].start + warp // 4 * KEYS
            own += ptx.load_columns(columns + rank * HALF_K, KEYS)
            given += ptx.load_columns(columns + (1 - rank) * HALF_K, KEYS)
        cute.arch.fence_view_async_tmem_load()
        if const_expr(place == "p"):
            ptx.wait(bar["p_free"], phase)
        # Of two exchanges a block, the first completes phase 0.
        turn = Int32(place == "ds") if plan.shared_sums else phase
        here = smem[place] + (warp * (len(given) // 4) * WARP + lane) * 16
        there = ptx.in_other(here, rank)
        for vector in cutlass.range_constexpr(len(given) // 4):
            ptx.store_cluster(there + vector * (WARP * 16), given[4 * vector : 4 * vector + 4])
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            ptx.arrive(bar["halves_ready"], 1 - rank)
        ptx.wait_cluster(bar["halves_ready"], turn)
        for vector in cutlass.range_constexpr(len(given) // 4):
            taken = ptx.load_words(here + vector * (WARP * 16), 4, Float32)
            for i in cutlass.range_constexpr(4):
                own[4 * vector + i] += taken[i]
        if const_expr(plan.shared_sums):
            self.arrive_both(bar["halves_taken"])
            ptx.wait_cluster(bar["halves_taken"], turn)
        return own

    @cute.jit
    def store_operand(self, where, rank, row, chunk, values):
        """16 keys of a row, rounded, as two 16-byte chunks of a swizzled piece; of a pair in both CTAs."""
        words = ptx.pack_halves(values, self.dtype)
        for vector in cutlass.range_constexpr(2):
            there = where + row * (BLOCK_K * ITEM) + ((chunk + vector) ^ (row % 8)) * 16
            ptx.store_words(there, words[4 * vector : 4 * vector + 4])
            if const_expr(self.plan.pair):
                ptx.store_cluster(ptx.in_other(there, rank), words[4 * vector : 4 * vector + 4])

    @cute.jit
    def statistics(self, at, n, tile, head, token):
        """(lse in base 2, w, dlse - w Delta) of a row; of a padded one, values that make P and dS zero."""
        b, s, g = split(tile, n["token_tiles"], n["G"])
        token = s * self.plan.rows.tokens + token
        lse, w, offset = Float32.inf, Float32(0.0), Float32(0.0)
        if (head < n["heads_per_group"]) & (token < n["S"]):
            heads = n["G"] * n["heads_per_group"]
            row = (Int64(b) * n["S"] + token) * heads + g * n["heads_per_group"] + head
            plane = Int64(n["B"]) * n["S"] * heads
            stats = _global(at["stats"], Float32)
            lse, w, offset = stats[row], stats[row + plane], stats[row + 2 * plane]
        return lse, w, offset

    @cute.jit
    def arrive_warp(self, barrier):
        """One arrival of this warp."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            ptx.arrive(barrier)

    @cute.jit
    def arrive_both(self, barrier):
        """One arrival of this warp, of a pair in both CTAs."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            if const_expr(self.plan.pair):
                for rank in CTAS:
                    ptx.arrive(barrier, rank)
            else:
                ptx.arrive(barrier)

    @cute.jit
    def wait_both(self, barrier, phase):
        """Wait for arrivals of a pair's both CTAs."""
        if const_expr(self.plan.pair):
            ptx.wait_cluster(barrier, phase)
        else:
            ptx.wait(barrier, phase)

    # Does: adds dkv, or stores its terms. Lane l of tensor memory is column l of a chunk of d.
    # Produces: dkv_free, dp_free; rows_free for all roles: a block's dkv comes from what they have made of its rows.
    # Consumes: dkv_ready.
    @cute.jit
    def epilogue(self, at, n, by, smem, bar, tmem, rank, warp, work, dkv_scale):
        plan = self.plan
        first, tiles, step = work
        lane = cute.arch.lane_idx()
        quadrant = warp - ROLE["epilogue"].first
        lanes = tmem + (quadrant * WARP << 16)
        stage, phase = Int32(0), Int32(0)
        row_bytes = n["G"] * (plan.D * 4)
        if const_expr(plan.ordered):
            row_bytes = Int32(plan.D * 4)
        for tile in cutlass.range(first, tiles, step):
            b, _, g = split(tile, n["token_tiles"], n["G"])
            # Row 0 of the batch entry and group, or the term of the tile's first slot.
            target = at["dkv"]
            if const_expr(plan.ordered):
                target += Int64(tile - n["first_tile"]) * n["K"] * row_bytes
            else:
                target += Int64(b) * n["S_kv"] * row_bytes + g * (plan.D * 4)
            # Its first of the four columns that this lane adds to.
            target += Int64(rank * plan.columns + quadrant * WARP + lane // 4 * 4) * 4
            for block in cutlass.range(self.blocks(at, n, by, tile)):
                # Of 8 keys, and columns of tensor memory, lane l has two: 2 (l % 4) and the next.
                numbers = smem["row_numbers"] + (stage * BLOCK_K + lane % 4 * 2) * 4
                base = target
                if const_expr(plan.ordered):
                    base += Int64(block * BLOCK_K + lane % 4 * 2) * row_bytes
                if const_expr(plan.shared_sums):
                    if self.tails(rank) == 1:
                        self.add_tail(bar, lanes, quadrant, base, row_bytes, numbers, phase, dkv_scale)
                        phase ^= 1
                for chunk in cutlass.range(plan.chunks, unroll=1):
                    there = base + chunk * (CHUNK * 4)
                    is_last = chunk == plan.chunks - 1
                    self.add_chunk(bar, lanes, False, is_last, there, row_bytes, numbers, phase, dkv_scale)
                    phase ^= 1
                if const_expr(plan.tail and not plan.shared_sums):
                    self.add_tail(bar, lanes, quadrant, base, row_bytes, numbers, phase, dkv_scale)
                    phase ^= 1
                self.arrive_warp(bar["rows_free"] + 8 * stage)
                stage = (stage + 1) % ROW_STAGES

    @cute.jit
    def add_tail(self, bar, lanes, quadrant, target, row_bytes, numbers, phase, dkv_scale):
        """Adds the tail's columns; lanes 0 to 63 have columns that another chunk has added."""
        if quadrant < 2:
            ptx.wait(bar["dkv_ready"], phase)
            with cute.arch.elect_one():
                ptx.arrive(bar["dkv_free"])
        else:
            there = target + (D_V - SPAN) * 4
            self.add_chunk(bar, lanes, True, False, there, row_bytes, numbers, phase, dkv_scale)

    @cute.jit
    def add_chunk(self, bar, lanes, is_tail: cutlass.Constexpr, is_last, target, row_bytes, numbers, phase, dkv_scale):
        """Adds a chunk of the block's dkv: of each key, lane l has columns l // 4 + (0, 8, 16, 24) of the warp's 32.

        They stand side by side in the sums, so an addition of a warp is four whole lines.
        """
        plan = self.plan
        ptx.wait(bar["dkv_ready"], phase)
        ptx.fence_after()
        ds_q, p_dout = plan.tmem["ds_q"].start, plan.tmem[plan.p_dout].start
        width = BLOCK_K if is_tail else HALF_K
        given = []
        for start in cutlass.range_constexpr(0, BLOCK_K, width):
            if const_expr(not is_tail and len(given) == start):
                reach = BLOCK_K if plan.reads_ahead else start + width
                for key in cutlass.range_constexpr(start, reach, HALF_K):
                    given += self.read_sums(lanes + p_dout + key)
                    if const_expr(plan.shared_sums and reach == BLOCK_K):
                        # The last wait would do; with it alone the replay is 2.8 % slower.
                        cute.arch.fence_view_async_tmem_load()
                if const_expr(plan.shared_sums and reach == BLOCK_K):
                    if is_last:
                        ptx.fence_before()
                        self.arrive_warp(bar["dp_free"])
            sums = []
            for key in cutlass.range_constexpr(start, start + width, HALF_K):
                sums += self.read_sums(lanes + ds_q + key)
            cute.arch.fence_view_async_tmem_load()
            sums = [x * dkv_scale for x in sums]
            if const_expr(not is_tail):
                sums = [x + y for x, y in zip(sums, given[start : start + width], strict=True)]
            if const_expr(start + width == BLOCK_K):
                ptx.fence_before()
                self.arrive_warp(bar["dkv_free"])
            for eight in cutlass.range_constexpr(width // 8):
                key = start + eight * 8
                found = ptx.load_words(numbers + key * 4, 2)
                for i in cutlass.range_constexpr(2):
                    at = eight // 4 * HALF_K + eight % 4 * 4 + i
                    values = tuple(sums[at + j] for j in (0, 2, 16, 18))
                    if const_expr(plan.ordered):
                        ptx.store_quad(target + (key + i) * (plan.D * 4), values, found[i] >= 0)
                    else:
                        ptx.add_quad(target + Int64(found[i]) * row_bytes, values, found[i] >= 0)

    def read_sums(self, columns) -> list:
        """32 keys of the warp's lanes 0 to 15, then 16 to 31: register 4 i + 2 j + k of 16 is row l // 4 + 8 j and key
        8 i + 2 (l % 4) + k; wait::ld before use.
        """
        low, high = (ptx.load_fragments(columns + (first << 16), HALF_K) for first in (0, WARP // 2))
        return low + high

    @cute.jit
    def store_dq(self, at, n, bar, tmem, tile, rank, group, side, head, token, dq_scale):
        """This CTA's columns of dq of a tile's row, half of tensor memory a warpgroup."""
        plan = self.plan
        ptx.fence_after()
        b, s, g = split(tile, n["token_tiles"], n["G"])
        token += s * plan.rows.tokens
        real = (head < n["heads_per_group"]) & (token < n["S"])
        which = (Int64(b) * n["S"] + token) * (n["G"] * n["heads_per_group"]) + g * n["heads_per_group"] + head
        target = at["dq"] + which * (plan.D * ITEM)
        # Alone, a warpgroup has a product of 256 columns, of which each half of the lanes has 128.
        major, minor = (side, group) if plan.pair else (group, side)
        for x in cutlass.range_constexpr(0, HALF // 2, WARP):
            there = target + (major * HALF + minor * (HALF // 2) + x) * ITEM
            self.store_columns(tmem + plan.tmem["dq"].start + group * (HALF // 2) + x, WARP, there, real, dq_scale)
        if const_expr(plan.tail):
            width = plan.tmem["dq_tail"].size // 2
            there = target + (D_V + group * width) * ITEM
            if const_expr(not plan.pair):
                there += side * (SPAN // 2) * ITEM
            column = tmem + plan.tmem["dq_tail"].start + group * width
            if self.tails(rank) == 1:
                self.store_columns(column, width, there, real, dq_scale)

    @cute.jit
    def store_columns(self, column, count: cutlass.Constexpr, target, real, dq_scale):
        """`count` columns of a row of dq."""
        values = ptx.load_columns(column, count)
        cute.arch.fence_view_async_tmem_load()
        words = ptx.pack_halves([v * dq_scale for v in values], self.dtype)
        if real:
            for vector in cutlass.range_constexpr(count * ITEM // 16):
                ptx.store_global(target + vector * 16, words[4 * vector : 4 * vector + 4])


def mn_major(leading: int) -> dict[str, int]:
    """Strides of a swizzled operand whose rows are K: spans of MN lie `leading` bytes apart."""
    return dict(leading=leading, stride=8 * SPAN * ITEM)
