"""Gather lists of tiles of several tokens: the union of the tokens' rows of kv, one CTA per (batch entry, tile, group).

`indices [B, S, G, K]` -> `rows`, `bits [B, L, G, C]`, of which the first `counts [B, L, G]` count, with
`L = ceil(S / tokens)` and `C = tokens K`. A slot is a row of kv and who selected it, bit t for token t of the tile:
distinct rows in rising order, then one slot of one bit for every repeat of a row within a token's own list, by row and
token. What the contract calls invalid (range, `topk_length`, causal bound) is in no slot.

Much as in `hopper/unions.py` the bits of `span` rows at a time stand in shared memory, every selected row sets its
token's bit, and one scan writes the slots; bits that were set already are the repeats, put down at the end of the
list's room, and moved up and sorted last. Ranges of kv that hold no selected row are skipped.

`Samples` counts, for some tiles and a share of the rows of kv, the slots of the union and those of the tokens' own
lists, with that share of the invalid ones, which a tile of one token goes through as well; `Unions` sums these up, says
in `chosen` whether the first are at most `per_mille` of the second, and makes no lists where they are not.
"""

import cutlass
from cutlass import Int32, Int64, Uint32, const_expr, cute

from . import ptx
from .forward import INDEX_DTYPES, _global, _named
from .heads import split
from .list_plan import ListPlan
from .plan import WARP

POINTERS = ("indices", "lengths", "positions", "samples", "rows", "bits", "counts", "chosen")
# `samples`: of `Unions`, those that decide, 0 for none. `step`: a sample looks at one of `2**step` rows of kv.
SIZES = (
    "B", "S", "S_kv", "G", "K", "token_tiles", "samples", "per_mille", "step", "causal", "has_length", "has_positions",
)  # fmt: skip
STRIDES = ("i_b", "i_s", "i_g", "i_k", "n_b", "n_s", "p_b", "p_s")
LOADS = 4  # indices that a thread has in flight
CHUNK = WARP * LOADS  # slots of one token that a warp reads at a time
NONE = 2**31 - 1  # past every row
VECTOR = 4  # words of one access to the bits


class Unions:
    """The kernel of the lists for one plan."""

    def __init__(self, plan: ListPlan) -> None:
        self.plan = plan
        self.index_dtype = INDEX_DTYPES[plan.index_dtype]

    @cute.jit
    def __call__(self, pointers, sizes, strides, ctas, stream):
        plan = self.plan
        self.kernel(pointers, sizes, strides).launch(
            grid=(ctas, 1, 1),
            block=(plan.threads, 1, 1),
            smem=plan.smem_bytes,
            stream=stream,
            # Unasked the assembler leaves registers for a second CTA, and spills where there is none.
            min_blocks_per_mp=int(plan.alone),
        )

    @cute.kernel
    def kernel(self, pointers, sizes, strides):
        at, n, by = _named(POINTERS, pointers), _named(SIZES, sizes), _named(STRIDES, strides)
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=16).toint()
        smem = {name: base + area.start for name, area in self.plan.smem.items()}
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        self.run(at, n, by, smem, block, thread)

    @cute.jit
    def run(self, at, n, by, smem, block, thread):
        pays = self.pays(at, n)
        if (block == 0) & (thread == 0):
            _global(at["chosen"], Int32)[0] = pays
        if pays != 0:
            self.build(at, n, by, smem, block, thread)

    @cute.jit
    def pays(self, at, n):
        """Whether the union's slots are few enough, from the counts of all samples; the same in every warp."""
        counts = _global(at["samples"], Int32)
        union, own = Int32(0), Int32(0)
        for i in cutlass.range(cute.arch.lane_idx(), n["samples"], WARP):
            union += counts[2 * i]
            own += counts[2 * i + 1]
        union, own = sum_of_warp(union), sum_of_warp(own)
        return Int32(1) if Int64(own) * n["per_mille"] >= Int64(union) * 1000 else Int32(0)

    @cute.jit
    def build(self, at, n, by, smem, block, thread):
        plan = self.plan
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        b, tile, g = split(block, n["token_tiles"], n["G"])
        origin = self.origin(by, b, tile, g)
        longest = self.bounds(at, n, by, smem, thread, b, tile)
        capacity = plan.tokens * n["K"]
        place = Int64(block) * capacity * 4
        rows, bits = _global(at["rows"] + place, Int32), _global(at["bits"] + place, Int32)
        start, total = Int32(0), Int32(0)
        while start < n["S_kv"]:
            left = n["S_kv"] - start
            vectors = self.vectors(cutlass.min(left, plan.span))
            self.clear(smem, thread, vectors)
            if thread == 0:
                ptx.store_words(smem["next_row"], [Int32(NONE)])
            cute.arch.sync_threads()
            beyond = Int32(NONE)
            for chunk in cutlass.range(warp, (longest + CHUNK - 1) // CHUNK * plan.tokens, plan.warps):
                token, found = self.chunk(at, by, smem, origin, chunk, lane)
                for row in found:
                    beyond = self.mark(smem, rows, bits, capacity, start, token, row, beyond)
            if beyond != NONE:
                ptx.atomic_min(smem["next_row"], beyond)
            cute.arch.sync_threads()
            total = self.write(smem, rows, bits, warp, lane, start, vectors, total)
            start = load(smem["next_row"]) if left > plan.span else n["S_kv"]
            cute.arch.sync_threads()
        extra = load(smem["repeats"])
        self.move(rows, bits, thread, total, capacity - extra, extra)
        self.sort(rows, bits, thread, total, extra)
        if thread == 0:
            _global(at["counts"], Int32)[block] = total + extra

    def origin(self, by, b, tile, g):
        """Where the indices of a tile's first token begin."""
        return Int64(b) * by["i_b"] + Int64(tile) * self.plan.tokens * by["i_s"] + Int64(g) * by["i_g"]

    def vectors(self, rows):
        """Accesses that the bits of so many rows take."""
        each = VECTOR * self.plan.fields
        return (rows + each - 1) // each

    @cute.jit
    def clear(self, smem, thread, vectors):
        for v in cutlass.range(thread, vectors, self.plan.threads):
            ptx.store_words(smem["bits"] + v * (4 * VECTOR), [Int32(0)] * VECTOR)

    @cute.jit
    def bounds(self, at, n, by, smem, thread, b, tile):
        """Each token's number of slots, none past the end of the sequence, and the first row that it may not select.

        Returns the largest number of slots, at most 0 for none.
        """
        tokens = self.plan.tokens
        if thread < tokens:
            token = tile * tokens + thread
            length, limit = Int32(0), n["S_kv"]
            if token < n["S"]:
                length = n["K"]
                if n["has_length"] != 0:
                    given = _global(at["lengths"], Int32)[Int64(b) * by["n_b"] + Int64(token) * by["n_s"]]
                    length = cutlass.min(length, given)
                if n["causal"] != 0:
                    position = Int64(token) + n["S_kv"] - n["S"]
                    if n["has_positions"] != 0:
                        position = _global(at["positions"], Int64)[Int64(b) * by["p_b"] + Int64(token) * by["p_s"]]
                    limit = Int32(cutlass.max(Int64(-1), cutlass.min(position, Int64(limit) - 1))) + 1
            ptx.store_words(smem["lengths"] + thread * 4, [length])
            ptx.store_words(smem["limits"] + thread * 4, [limit])
        if thread == 0:
            ptx.store_words(smem["repeats"], [Int32(0)])
        cute.arch.sync_threads()
        longest = load(smem["lengths"])
        for token in cutlass.range_constexpr(1, tokens):
            longest = cutlass.max(longest, load(smem["lengths"] + token * 4))
        return longest

    @cute.jit
    def chunk(self, at, by, smem, origin, number, lane):
        """A token, and `LOADS` rows that it selects, -1 for what does not count. Tokens change fastest."""
        tokens = self.plan.tokens
        token, first = number % tokens, number // tokens * CHUNK + lane
        length, limit = load(smem["lengths"] + token * 4), load(smem["limits"] + token * 4)
        indices = _global(at["indices"], self.index_dtype)
        here = origin + Int64(token) * by["i_s"]
        found = []
        for u in cutlass.range_constexpr(LOADS):
            index = self.index_dtype(-1)
            if first + u * WARP < length:
                index = indices[here + Int64(first + u * WARP) * by["i_k"]]
            found.append(index)
        rows = []
        for u in cutlass.range_constexpr(LOADS):
            rows.append(Int32(found[u]) if (found[u] >= 0) & (found[u] < limit) else Int32(-1))
        return token, rows

    @cute.jit
    def set_bit(self, smem, offset, token):
        """Set a token's bit of a row of the range: the word as it was, and the bit."""
        plan = self.plan
        bit = Uint32(1) << Uint32(offset % plan.fields * plan.width + token)
        return ptx.atomic_or(smem["bits"] + offset // plan.fields * 4, bit), bit

    @cute.jit
    def mark(self, smem, rows, bits, capacity, start, token, row, beyond):
        """Set the bit of a row of this range, or note a repeat; returns the lowest row beyond the range."""
        if row >= start:
            if row - start >= self.plan.span:
                beyond = cutlass.min(beyond, row)
            else:
                before, bit = self.set_bit(smem, row - start, token)
                if before & bit != 0:
                    slot = capacity - 1 - ptx.atomic_add(smem["repeats"], Int32(1))
                    rows[slot] = row
                    bits[slot] = Int32(1) << token
        return beyond

    def taken(self, word):
        """The lowest bit of every field that is not zero."""
        width = self.plan.width
        step = 1
        while step < width:
            word = word | word >> Uint32(step)
            step *= 2
        return word & Uint32(sum(1 << width * field for field in range(self.plan.fields)))

    @cute.jit
    def write(self, smem, rows, bits, warp, lane, start, vectors, total):
        """The slots of a range, behind `total`: a warp counts those of its stretch, then writes them; the new total."""
        plan = self.plan
        stretch = (vectors + plan.warps - 1) // plan.warps
        own = cutlass.min(warp * stretch, vectors)
        end = cutlass.min(own + stretch, vectors)
        count = Int32(0)
        for v in cutlass.range(own + lane, end, WARP):
            for word in ptx.load_words(smem["bits"] + v * (4 * VECTOR), VECTOR, Uint32):
                count += Int32(cute.arch.popc(self.taken(word)))
        count = sum_of_warp(count)
        if lane == 0:
            ptx.store_words(smem["counts"] + warp * 4, [count])
        cute.arch.sync_threads()
        counted = Int32(0)
        if lane < plan.warps:
            counted = load(smem["counts"] + lane * 4)
        slot = total + sum_of_warp(counted if lane < warp else Int32(0))
        for first in cutlass.range(own * VECTOR, end * VECTOR, WARP):
            word = Uint32(0)
            if first + lane < end * VECTOR:
                word = load(smem["bits"] + (first + lane) * 4, Uint32)
            left = self.taken(word)
            if cute.arch.vote_any_sync(left != 0):
                before, of_warp = self.places(left, lane)
                place = slot + before
                while left != 0:
                    shift = cute.arch.popc((left & (Uint32(0) - left)) - Uint32(1))
                    rows[place] = start + (first + lane) * plan.fields + Int32(shift // plan.width)
                    bits[place] = Int32(word >> shift & Uint32((1 << plan.tokens) - 1))
                    left = left & (left - Uint32(1))
                    place += 1
                slot += of_warp
        return total + sum_of_warp(counted)

    @cute.jit
    def places(self, left, lane):
        """How many rows lanes before this one have taken, and the whole warp; `left` has a bit for each of its own."""
        if const_expr(self.plan.fields == 2):
            # No chain of shuffles: two votes.
            low, high = (cute.arch.vote_ballot_sync(left >> Uint32(16 * i) & Uint32(1) != 0) for i in (0, 1))
            earlier = (Int32(1) << lane) - 1
            before = cute.arch.popc(low & earlier) + cute.arch.popc(high & earlier)
            of_warp = cute.arch.popc(low) + cute.arch.popc(high)
        else:
            mine = Int32(cute.arch.popc(left))
            upto = mine  # inclusive sum over the lanes
            for step in cutlass.range_constexpr(5):
                below = cute.arch.shuffle_sync_up(upto, 1 << step)
                upto += below if lane >= 1 << step else Int32(0)
            before, of_warp = upto - mine, cute.arch.shuffle_sync(upto, WARP - 1)
        return before, of_warp

    @cute.jit
    def move(self, rows, bits, thread, to, source, count):
        """`count` slots from `source` up to `to`, which is not behind it."""
        for first in cutlass.range(0, count, self.plan.threads):
            mine = first + thread
            row, bit = Int32(0), Int32(0)
            if mine < count:
                row, bit = rows[source + mine], bits[source + mine]
            cute.arch.sync_threads()
            if mine < count:
                rows[to + mine] = row
                bits[to + mine] = bit
            cute.arch.sync_threads()

    @cute.jit
    def sort(self, rows, bits, thread, first, count):
        """`count` slots from `first` by row and bit, so that nothing depends on the order in which warps came.

        A bitonic network all of whose comparisons put the smaller key first, as if keys above all others filled it up
        to a power of two.
        """
        width = Int32(2)
        while width < 2 * count:
            # Mirror images in the width first, then neighbours at half the distance each time.
            span = width
            while span > 1:
                flip = width - 1 if span == width else span >> 1
                for i in cutlass.range(thread, count, self.plan.threads):
                    self.order(rows, bits, first, count, i, i ^ flip)
                cute.arch.sync_threads()
                span = span >> 1
            width *= 2

    @cute.jit
    def order(self, rows, bits, first, count, i, other):
        """Slots `i` and `other` in order, if `other` is the later of the two and there."""
        if (other > i) & (other < count):
            row, bit = rows[first + i], bits[first + i]
            other_row, other_bit = rows[first + other], bits[first + other]
            if (other_row < row) | ((other_row == row) & (other_bit < bit)):
                rows[first + i], bits[first + i] = other_row, other_bit
                rows[first + other], bits[first + other] = row, bit


class Samples(Unions):
    """The kernel of the samples for one plan: one CTA for each of `samples` tiles, evenly spaced."""

    @cute.jit
    def run(self, at, n, by, smem, block, thread):
        plan = self.plan
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tiles = Int64(n["B"] * n["token_tiles"] * n["G"])
        b, tile, g = split(Int32((2 * Int64(block) + 1) * tiles // (2 * n["samples"])), n["token_tiles"], n["G"])
        self.clear(smem, thread, Int32(plan.words // VECTOR))
        if thread < 3:
            ptx.store_words(smem["counts"] + thread * 4, [Int32(0)])
        longest = self.bounds(at, n, by, smem, thread, b, tile)
        origin = self.origin(by, b, tile, g)
        phase = block & ((Int32(1) << n["step"]) - 1)
        union, own, invalid = Int32(0), Int32(0), Int32(0)
        if thread < plan.tokens:
            invalid = cutlass.max(load(smem["lengths"] + thread * 4), 0)
        for chunk in cutlass.range(warp, (longest + CHUNK - 1) // CHUNK * plan.tokens, plan.warps):
            token, found = self.chunk(at, by, smem, origin, chunk, lane)
            for row in found:
                union, own = self.look(smem, n, phase, token, row, union, own)
                invalid -= Int32(row >= 0)
        union, own, invalid = sum_of_warp(union), sum_of_warp(own), sum_of_warp(invalid)
        if lane == 0:
            ptx.atomic_add(smem["counts"], union)
            ptx.atomic_add(smem["counts"] + 4, own)
            ptx.atomic_add(smem["counts"] + 8, invalid)
        cute.arch.sync_threads()
        if thread < 2:
            count = load(smem["counts"] + thread * 4)
            if thread > 0:
                count += load(smem["counts"] + 8) >> n["step"]
            _global(at["samples"], Int32)[2 * block + thread] = count

    @cute.jit
    def look(self, smem, n, phase, token, row, union, own):
        """Count a row if it is of the sample: for the union where no token had it, or this one has it again."""
        plan = self.plan
        if (row >= 0) & (row & ((Int32(1) << n["step"]) - 1) == phase):
            offset = row >> n["step"]
            before, bit = self.set_bit(smem, offset, token)
            others = before >> Uint32(offset % plan.fields * plan.width) & Uint32((1 << plan.tokens) - 1)
            if (others == 0) | (before & bit != 0):
                union += 1
            own += 1
        return union, own


@cute.jit
def sum_of_warp(value):
    for step in cutlass.range_constexpr(5):
        value += cute.arch.shuffle_sync_bfly(value, offset=WARP // 2 >> step)
    return value


def load(address, kind=Int32):
    """A word of shared memory."""
    return ptx.load_words(address, 1, kind)[0]
