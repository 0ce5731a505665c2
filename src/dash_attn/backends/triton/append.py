"""Writing new keys and values into a cache, at places that only the device knows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["append"]


@triton.jit(
    do_not_specialize=[
        "cache_page", "cache_row", "cache_head", "new_batch", "new_row", "new_head", "rows", "most", "size",
        "number", "heads",
    ]
)  # fmt: skip
def append_kernel(
    cache, new, at, table, cache_page, cache_row, cache_head, new_batch, new_row, new_head,
    rows, most, size, number, heads, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program per new token. One that has no place, or whose page does not exist, is not written."""
    pid = tl.program_id(0).to(tl.int64)
    sequence = pid // rows
    token = tl.load(at + sequence) + pid % rows
    there = (token >= 0) & (token < most * size)
    page = tl.load(table + sequence * most + token // size, mask=there, other=-1).to(tl.int64)
    there = there & (page >= 0) & (page < number)
    dims = tl.arange(0, BLOCK_D)
    mask = there & (dims < HEAD_DIM)
    source = new + sequence * new_batch + (pid % rows) * new_row + dims
    target = cache + page * cache_page + (token % size) * cache_row + dims
    for _ in range(heads):  # by steps: a product of 32 bits could overflow
        tl.store(target, tl.load(source, mask=mask), mask=mask)
        target += cache_head
        source += new_head


def append(cache: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], at: Tensor, table: Tensor) -> None:
    """As :func:`..cpu.cached.append`, for tensors on a GPU.

    The last dimension of the caches has stride 1; new tokens may have any strides.
    """
    for where, what in zip(cache, new):
        what = what.resolve_neg()
        what = what if what.stride(-1) == 1 else what.contiguous()
        pages, size, heads, head_dim = where.shape
        batch, rows = what.shape[:2]
        if not what.numel():
            continue
        append_kernel[(batch * rows,)](
            where, what, at, table, *where.stride()[:3], *what.stride()[:3],
            rows, table.shape[1], size, pages, heads,
            HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), num_warps=1,
        )  # fmt: skip
