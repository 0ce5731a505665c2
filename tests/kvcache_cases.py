"""Serving histories: requests are prefilled in chunks, decode in changing batches, and share prefixes.

Every row of every call is compared with one forward over the whole sequence.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from dash_attn.backends.cached import PAGE_SIZES
from dash_attn.testing import assert_same_bytes

BAD = (float("nan"), float("inf"), -float("inf"))


@dataclass
class History:
    """Requests that share a cache. Keys behind the used ones are ``bad``. ``head_dim``: two, if V has another
    one."""

    rng: random.Random
    device: str
    dtype: torch.dtype
    lengths: list[int]
    heads: tuple[int, int]
    head_dim: int | tuple[int, int]
    page_size: int  # 0: contiguous
    how: dict[str, Any]
    backend: str = "auto"
    shared: int = 0  # tokens that request 1 shares with request 0; whole pages
    done: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator(self.device).manual_seed(self.rng.randrange(2**31))

        def drawn(length: int, heads: int, columns: int) -> Tensor:
            x = torch.randn(1, length, heads, columns, generator=generator, device=self.device)
            return x.to(self.dtype)

        (q_heads, kv_heads), (of_qk, of_v) = self.heads, self._head_dims
        self.q = [drawn(n, q_heads, of_qk) for n in self.lengths]
        self.k, self.v = ([drawn(n, kv_heads, columns) for n in self.lengths] for columns in (of_qk, of_v))
        if self.shared:
            for x in (self.q, self.k, self.v):
                x[1][:, : self.shared] = x[0][:, : self.shared]
        self.wanted = [
            flash_attn_func(*one, return_lse=True, backend=self.backend, **self.how)
            for one in zip(self.q, self.k, self.v)
        ]
        self.done = [0] * len(self.lengths)
        self._make_cache()

    @property
    def _head_dims(self) -> tuple[int, int]:
        return (self.head_dim, self.head_dim) if isinstance(self.head_dim, int) else self.head_dim

    def _make_cache(self) -> None:
        size = self.page_size or max(self.lengths) + self.rng.randint(0, 70)
        self.table = torch.full((len(self.lengths), 1), -1, dtype=torch.int32)
        if self.page_size:
            counts = [-(-n // size) for n in self.lengths]
            spare = self.rng.randint(0, 3)
            self.table = torch.full((len(counts), max(counts) + spare), -7, dtype=torch.int32)
            numbers = self.rng.sample(range(sum(counts) + 3), sum(counts))
            for row, count in zip(self.table, counts):
                row[:count] = torch.tensor([numbers.pop() for _ in range(count)])
            if self.shared:
                self.table[1, : self.shared // size] = self.table[0, : self.shared // size]
            places = sum(counts) + 3
        else:
            places = len(self.lengths) + 2
            self.table[:, 0] = torch.tensor(self.rng.sample(range(places), len(self.lengths)))
        shape, bad = (places, size, self.heads[1]), self.rng.choice(BAD)
        self.cache = [
            torch.full((*shape, columns), bad, dtype=self.dtype, device=self.device)
            for columns in self._head_dims
        ]

    def run(self) -> int:
        """Until all requests are done; how many calls there were."""
        calls = 0
        while active := [i for i, n in enumerate(self.lengths) if self.done[i] < n]:
            if self.shared and 1 in active and self.done[1] == 0:
                if self.done[0] < self.shared:
                    active.remove(1)
                else:
                    self.done[1] = min(self.shared, self.lengths[1] - 1)
            some = self.rng.sample(active, self.rng.randint(1, len(active)))
            rest = [self.lengths[i] - self.done[i] for i in some]
            if self.rng.random() < 0.5 or (not self.page_size):
                self._alike(some, self.rng.choice([1, self.rng.randint(1, min(rest))]))
            else:
                self._mixed(some, [self.rng.choice([1, self.rng.randint(1, n)]) for n in rest])
            calls += 1
        return calls

    def _int32(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _alike(self, some: list[int], rows: int) -> None:
        """As many rows of each, whose keys are appended by the call."""
        parts = [
            torch.cat([x[i][:, self.done[i] : self.done[i] + rows] for i in some])
            for x in (self.q, self.k, self.v)
        ]
        q, k, v = parts
        table = self.table[some].to(self.device)
        where = {"page_table": table} if self.page_size else {"cache_batch_idx": table[:, 0]}
        before = [self.done[i] for i in some]
        found = flash_attn_with_kvcache(
            q, *self.cache, k, v, cache_seqlens=self._int32(before), return_lse=True, backend=self.backend,
            **where, **self.how,
        )  # fmt: skip
        for at, i in enumerate(some):
            self._compare(i, rows, found[0][at], found[1][at])

    def _mixed(self, some: list[int], rows: list[int]) -> None:
        """Chunks and steps in one call; keys are in their pages before."""
        for i, n in zip(some, rows):
            tokens = torch.arange(self.done[i], self.done[i] + n)
            pages = self.table[i, tokens // self.page_size].long()
            for cache, x in zip(self.cache, (self.k, self.v)):
                cache[pages, tokens % self.page_size] = x[i][0, tokens.to(self.device)]
        q = torch.cat([self.q[i][0, self.done[i] : self.done[i] + n] for i, n in zip(some, rows)])
        ends = torch.tensor([0, *rows], dtype=torch.int32).cumsum(0).int().to(self.device)
        used = self._int32([self.done[i] + n for i, n in zip(some, rows)])
        most = self.rng.choice([None, max(rows)])
        out, lse = flash_attn_varlen_func(
            q, *self.cache, ends, max_seqlen_q=most, seqused_k=used,
            page_table=self.table[some].to(self.device), return_lse=True, backend=self.backend, **self.how,
        )  # fmt: skip
        of_each = zip(some, rows, out.split(rows), lse.split(rows, 1))
        for i, n, mine, of_mine in of_each:
            self._compare(i, n, mine, of_mine)

    def _compare(self, i: int, rows: int, out: Tensor, lse: Tensor) -> None:
        at = slice(self.done[i], self.done[i] + rows)
        assert_same_bytes(out, self.wanted[i][0][0, at], f"out of rows {at} of request {i}")
        assert_same_bytes(lse, self.wanted[i][1][0, :, at], f"lse of rows {at} of request {i}")
        self.done[i] += rows


def random_history(
    number: int,
    device: str,
    dtype: torch.dtype,
    longest: int,
    *,
    head_dims: tuple[int | tuple[int, int], ...],
    backend: str,
) -> History:
    """The history of a number."""
    rng = random.Random(number)
    kv_heads, group = rng.choice((1, 2)), rng.choice((1, 2, 3, 4))
    lengths = [rng.choice((1, rng.randint(1, 40), rng.randint(1, longest))) for _ in range(rng.randint(2, 4))]
    page_size = rng.choice((0, *PAGE_SIZES))
    shared = 0
    if 0 < 4 * page_size <= longest and rng.random() < 0.4:
        shared = page_size * rng.randint(1, 2)
        lengths[:2] = [n + shared for n in lengths[:2]]
    how: dict[str, Any] = {"causal": True}
    if rng.random() < 0.4:
        how["window_size"] = (rng.randint(0, longest), 0)
    if rng.random() < 0.3:
        how["learnable_sink"] = torch.linspace(-2, 2, kv_heads * group, device=device)
    heads, head_dim = (kv_heads * group, kv_heads), rng.choice(head_dims)
    return History(rng, device, dtype, lengths, heads, head_dim, page_size, how, backend, shared)
