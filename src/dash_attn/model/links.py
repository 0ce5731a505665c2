"""How long attention takes that several GPUs share: their work, and what moves between them.

Computing is taken at the rate that long sequences reach on one GPU. Moving is taken at the bandwidth of a
link, with a time per exchange. In turns (mode "ring"), what moves is hidden behind what is computed, but for
the first kv head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ProblemError
from ..problem import Mask, Problem
from ..schedule.constants import Q_SEGMENT
from ..schedule.segments import Segment, head_groups_of_segments
from ..schedule.sharing import Cut, Layout, Piece, Rows, Work, deal, pieces

__all__ = ["H200_LINKS", "Links", "Prediction", "predict"]


@dataclass(frozen=True)
class Links:
    """What GPUs and the links between them do.

    Attributes:
        forward_tflops, backward_tflops: of one GPU that is hot, on long sequences, at head dims 64 and 128.
        gb_per_s: that a GPU sends, and receives at the same time.
        exchange_us: of an exchange, whatever its size.
        memory_gb_per_s: what a GPU copies, read and written bytes together.
    """

    forward_tflops: tuple[float, float] = (520.0, 620.0)
    backward_tflops: tuple[float, float] = (520.0, 590.0)
    gb_per_s: float = 330.0
    exchange_us: float = 60.0
    memory_gb_per_s: float = 3500.0


H200_LINKS = Links()
"""H200s of one host, through NVLink and NCCL."""


class Prediction(NamedTuple):
    """Milliseconds of a forward and a backward, of the slowest rank.

    Attributes:
        ms: of both together.
        forward_ms, backward_ms: what is computed.
        moving_ms: what is moved and not hidden.
    """

    ms: float
    forward_ms: float
    backward_ms: float
    moving_ms: float


def predict(
    problem: Problem,
    ranks: int,
    mode: str,
    links: Links = H200_LINKS,
    *,
    layout: str = "zigzag",
    q_segment: int = Q_SEGMENT,
) -> Prediction:
    """The time of a forward and a backward of a dense batch.

    Args:
        problem: of the whole sequences, bf16 or fp16.
        ranks: GPUs; with 1 the mode is no matter.
        mode, layout: as in :func:`dash_attn.distributed.attention`, without "auto".
        links: what GPUs and links do.
        q_segment: rows per segment.

    Raises:
        ProblemError: the sequences are no self-attention of one length.
        InputError: they cannot be spread evenly.

    >>> long = Problem.dense(heads=16, kv_heads=4, seqlen=65536, mask=Mask.causal())
    >>> one, two = (predict(long, ranks, "ulysses") for ranks in (1, 2))
    >>> round(one.ms / two.ms, 1)
    1.9
    """
    if len({*problem.sequences}) != 1 or len(set(problem.sequences[0])) != 1:
        raise ProblemError("only self-attention of equal sequences is shared by ranks")
    plan = _Plan(problem, ranks, mode, layout, q_segment)
    found = [plan.of(rank, links) for rank in range(ranks)]
    return max(found, key=lambda prediction: prediction.ms)


class _Plan:
    """Who computes what, and what it needs from others."""

    def __init__(self, problem: Problem, ranks: int, mode: str, layout: str, q_segment: int) -> None:
        self.problem, self.ranks = problem, ranks
        self.length = problem.sequences[0][0]
        common = math.gcd(ranks, problem.kv_heads)
        self.head_ranks = common if "ulysses" in mode else 1
        self.in_turns = mode.endswith("ring")
        self.cut = Cut(problem.mask, problem.tile_n, q_segment)
        self.layout = Layout((self.length,), ranks, layout)
        self.work = deal(self.layout, self.cut, problem.kv_heads, self.head_ranks)
        self.groups = head_groups_of_segments(problem, q_segment)

    def of(self, rank: int, links: Links) -> Prediction:
        work, p = self.work[rank], self.problem
        wide = int(p.widest > 64)
        share = (work.heads[1] - work.heads[0]) / p.kv_heads
        flops = share * sum(map(self._flops, work.rows)) / 1e9
        forward, backward = 4 * flops / links.forward_tflops[wide], 10 * flops / links.backward_tflops[wide]
        if self.ranks == 1:
            return Prediction(forward + backward, forward, backward, 0.0)
        steps = work.heads[1] - work.heads[0] if self.in_turns else 1
        q, keys, sums = self._bytes(rank)
        link, local = links.gb_per_s * 1e6, links.memory_gb_per_s * 1e6
        exchange = links.exchange_us / 1e3
        moving = 2 * q / link + (2 * keys + sums) / steps / link + (4 + 3 * steps) * exchange
        copying = 2 * (2 * q + 2 * keys + 2 * sums) / local
        hidden = (2 * keys + sums) * (steps - 1) / steps / link
        late = max(0.0, hidden - forward - backward)
        total = forward + backward + moving + copying + late
        return Prediction(total, forward, backward, moving + copying + late)

    def _flops(self, rows: Rows) -> float:
        """Elements of Q K^T of some rows times the head dim (an average with V's), of all heads."""
        p = self.problem
        seen = _visible(rows, self.length, p.mask)
        return seen * len(p.sequences) * p.heads * (p.head_dim + p.head_dim_v) / 2

    def _bytes(self, rank: int) -> tuple[float, float, float]:
        """What comes to a rank, or leaves it, the larger one: rows like q (forward or backward), keys and
        values of one pass, and sums of dK and dV."""
        p, batch = self.problem, len(self.problem.sequences)
        into = [work.rows for work in self.work]
        per_head = (work_heads(self.work[rank])) * p.group
        q_rows = _moved(pieces(self.layout, into), rank)
        q = 0.0
        if self.head_ranks > 1 or q_rows:
            width = 2 * batch * per_head * (p.head_dim + p.head_dim_v)
            q = width * max(
                q_rows, sum(r.last - r.first for r in self.work[rank].rows) * (1 - 1 / self.ranks)
            )
        keys = [[Rows(0, 0, max((self._end(r) for r in rows), default=0))] for rows in into]
        width = 2 * batch * work_heads(self.work[rank]) * (p.head_dim + p.head_dim_v)
        k = width * _moved(pieces(self.layout, keys), rank)
        if self.head_ranks == self.ranks:
            return q, k, k
        four = 4 * batch * work_heads(self.work[rank]) * self.groups * (p.head_dim + p.head_dim_v)
        sums = sum(self._end(Rows(0, *s.rows)) - s.keys[0] for s in self._segments(rank))
        return q, k, four * sums * (1 - 1 / self.ranks)

    def _segments(self, rank: int) -> list[Segment]:
        return [
            s
            for s in self.cut.segments(self.length)
            if any(r.first <= s.rows[0] < r.last for r in self.work[rank].rows)
        ]

    def _end(self, rows: Rows) -> int:
        return rows.last if self.problem.mask.sides[1] == 0 else self.length


def work_heads(work: Work) -> int:
    return work.heads[1] - work.heads[0]


def _moved(on: list[Piece], rank: int) -> int:
    """Rows that come to a rank or leave it, the larger number."""
    into = sum(x.rows.last - x.rows.first for x in on if x.worker == rank != x.owner)
    out = sum(x.rows.last - x.rows.first for x in on if x.owner == rank != x.worker)
    return max(into, out)


def _visible(rows: Rows, length: int, mask: Mask) -> float:
    """Elements of Q K^T that rows see."""
    left, right = mask.sides
    if right < 0:
        return float(rows.last - rows.first) * length
    first, last = rows.first, rows.last
    seen = (first + 1 + last) * (last - first) / 2
    if left >= 0:
        hidden = max(0, last - 1 - left), max(0, first - 1 - left)
        seen -= (hidden[0] * (hidden[0] + 1) - hidden[1] * (hidden[1] + 1)) / 2
    return seen
