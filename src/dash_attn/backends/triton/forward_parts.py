"""What the two kernels of the forward share: which tile a program has, the fold of segments, results.

Where one kernel goes through all segments, and where a second one folds what the first one left of each,
these are the same operations in the same order. So a split decides no bit.
"""

import triton
import triton.language as tl

from .cached_parts import cached_tile
from .parts import added, scaled, sequence_of, zeros

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def tile_of(
    tile, table, lengths, bounds, batch, seqlen_cached, total_q, room, group,
    CACHED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Record, batch and first row of q, batch and first row of k, lengths, diagonal and first row of a tile.

    Over a cache the batch of k is the sequence, and there is no record.
    """
    if CACHED:
        sequence, batch_q, start_q, seqlen_q, seqlen_k, top = cached_tile(
            lengths, bounds, tile, batch, seqlen_cached, total_q, room, group, ROWS
        )
        return table, batch_q, start_q, sequence, start_q, seqlen_q, seqlen_k, seqlen_k - seqlen_q, top
    else:
        record = table + tile * 16
        batch_q, start_q, batch_k, start_k, seqlen_q, seqlen_k, diagonal = sequence_of(record)
        top = tl.load(record + 7) * ROWS
        return record, batch_q, start_q, batch_k, start_k, seqlen_q, seqlen_k, diagonal, top


@triton.jit
def folded(maximum, total, acc, m, total_here, here, REST_DV: tl.constexpr):
    """Maximum, sum and output of the segments so far, and those of the next one."""
    both = tl.maximum(maximum, m)
    shift = tl.where(both == float("-inf"), 0.0, both)
    before = tl.exp2(maximum - shift)
    after = tl.exp2(m - shift)
    total = total * before + total_here * after
    acc = scaled(acc, before[:, None], REST_DV)
    return both, total, added(acc, scaled(here, after[:, None], REST_DV), REST_DV)


@triton.jit
def with_sink(maximum, total, acc, m_sink, REST_DV: tl.constexpr):
    """As ``folded`` with a segment of one key without a value, behind all others."""
    both = tl.maximum(maximum, m_sink)
    shift = tl.where(both == float("-inf"), 0.0, both)
    before = tl.exp2(maximum - shift)
    total = total * before + tl.exp2(m_sink - shift)
    return both, total, scaled(acc, before[:, None], REST_DV)


@triton.jit
def lse_of(maximum, total):
    """The natural log-sum-exp."""
    return (tl.where(maximum == float("-inf"), 0.0, maximum) + tl.log2(total)) * LN2


@triton.jit
def output_of(
    acc, total, rescale, DROPOUT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_DV: tl.constexpr, REST_DV: tl.constexpr,
):  # fmt: skip
    """Sums over sums of weights. 0 for -0: a fold with what a row does not see makes 0 of -0, too."""
    inverse = tl.div_rn(1.0, tl.where(total == 0.0, 1.0, total))
    if DROPOUT:
        inverse = inverse * rescale
    return added(scaled(acc, inverse[:, None], REST_DV), zeros(ROWS, BLOCK_DV, REST_DV), REST_DV)
