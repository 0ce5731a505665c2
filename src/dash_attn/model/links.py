"""How long attention takes that several GPUs share: their work, and what moves between them.

Computing is taken at the rate that long sequences reach on one GPU. Moving is taken at the bandwidth of a
link, with a time per exchange. In turns (mode "ring"), what moves is hidden behind what is computed, but for
the first kv head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import CostError, ProblemError
from ..problem import Mask, Problem
from ..schedule.constants import Q_SEGMENT, Q_SEGMENT_STEP
from ..schedule.segments import Segment, head_groups_of_segments
from ..schedule.sharing import Cut, Layout, Rows, Teams, Work, deal, teams_of

__all__ = ["H200_LINKS", "Links", "Prediction", "memory_gb", "predict"]


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

    def __post_init__(self) -> None:
        rates = {"gb_per_s": self.gb_per_s, "memory_gb_per_s": self.memory_gb_per_s}
        rates |= {f"{name}[{i}]": rate for name in ("forward_tflops", "backward_tflops")
                  for i, rate in enumerate(getattr(self, name))}  # fmt: skip
        for name, rate in rates.items():
            if not 0 < rate < math.inf:
                raise CostError(f"{name} must be positive and finite, got {rate!r}")
        if not 0 <= self.exchange_us < math.inf:
            raise CostError(f"exchange_us must be finite and >= 0, got {self.exchange_us!r}")


H200_LINKS = Links()
"""H200s of one host, through NVLink."""


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
    q_segment: int | None = None,
) -> Prediction:
    """The time of a forward and a backward of a dense batch.

    Args:
        problem: of the whole sequences, bf16 or fp16.
        ranks: GPUs; with 1 the mode is no matter.
        mode, layout: as in :func:`dash_attn.distributed.attention`.
        links: what GPUs and links do.
        q_segment: rows per segment, 0: sequences stay whole. None: what :func:`dash_attn.attention` takes,
            which leaves them whole under a window.

    Raises:
        ProblemError: the sequences are no self-attention of one length, or a number is out of range.
        InputError: they cannot be spread evenly, or there is no such mode for so many kv heads.

    >>> long = Problem.dense(heads=16, kv_heads=4, seqlen=65536, mask=Mask.causal())
    >>> one, two = (predict(long, ranks, "ulysses") for ranks in (1, 2))
    >>> round(one.ms / two.ms, 1)
    1.9
    """
    _check(problem, ranks)
    plan = _Plan(problem, ranks, mode, layout, _rows_per_segment(problem, q_segment))
    found = [plan.of(rank, links) for rank in plan.some]
    return max(found, key=lambda prediction: prediction.ms)


def memory_gb(
    problem: Problem, ranks: int, mode: str, *, layout: str = "zigzag", q_segment: int | None = None
) -> float:
    """GB (10^9 bytes) that a rank allocates for a forward and a backward, at the most.

    What the caller has (q, k, v and dout of its rows) does not count; out, dq, dk and dv do.

    Args, errors: as for :func:`predict`.
    """
    _check(problem, ranks)
    plan = _Plan(problem, ranks, mode, layout, _rows_per_segment(problem, q_segment))
    return max(plan.bytes_of(rank) for rank in plan.some) / 1e9


def _rows_per_segment(problem: Problem, q_segment: int | None) -> int:
    if q_segment is None:
        return 0 if problem.mask.sides[0] >= 0 else Q_SEGMENT
    whole = isinstance(q_segment, int) and not isinstance(q_segment, bool)
    if not whole or q_segment < 0 or q_segment % Q_SEGMENT_STEP:
        raise ProblemError(
            f"q_segment must be None, 0 (whole sequences) or a positive multiple of {Q_SEGMENT_STEP}, got "
            f"{q_segment!r}"
        )
    return q_segment


def _check(problem: Problem, ranks: int) -> None:
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ProblemError(f"ranks must be an integer >= 1, got {ranks!r}")
    if len({*problem.sequences}) != 1 or len(set(problem.sequences[0])) != 1:
        raise ProblemError("only self-attention of equal sequences is shared by ranks")


class _Plan:
    """Who computes what, and what it needs from others."""

    def __init__(self, problem: Problem, ranks: int, mode: str, layout: str, q_segment: int) -> None:
        self.problem, self.ranks = problem, ranks
        self.length = problem.sequences[0][0]
        teams = teams_of(mode, ranks, problem.kv_heads) if ranks > 1 else Teams(1, False)
        self.head_ranks, self.in_turns = teams
        self.cut = Cut(problem.mask, problem.tile_n, q_segment)
        self.layout = Layout((self.length,), ranks, layout)
        self.work = deal(self.layout, self.cut, problem.kv_heads, self.head_ranks)
        self.groups = head_groups_of_segments(problem, q_segment)

    @property
    def some(self) -> list[int]:
        """Ranks of which one has most to do: teams at both ends and in the middle."""
        teams = self.ranks // self.head_ranks
        return sorted({team * self.head_ranks for team in (0, teams // 2, teams - 1)})

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
        passes = 1 if self.head_ranks == self.ranks and not self.in_turns else 2  # that bring k and v
        moving = 2 * q / link + (passes * keys + sums) / steps / link + (4 + 3 * steps) * exchange
        copying = 2 * (2 * q + passes * keys + 2 * sums) / local
        hidden = (passes * keys + sums) * (steps - 1) / steps / link
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
        away, rows = 1 - 1 / self.ranks, sum(r.last - r.first for r in self.work[rank].rows)
        heads, both = work_heads(self.work[rank]), p.head_dim + p.head_dim_v
        q = 0.0 if self._in_place(rank) else 2 * batch * heads * p.group * both * rows * away
        k = 2 * batch * heads * both * self._keys(rank) * away
        if self.head_ranks == self.ranks:
            return q, k, k
        sums = sum(s.keys[1] - s.keys[0] for s in self._segments(rank))
        return q, k, 4 * batch * heads * self.groups * both * sums * away

    def bytes_of(self, rank: int) -> float:
        """Bytes that a rank allocates at the most, while it makes the last sums of dK and dV leave."""
        p, work = self.problem, self.work[rank]
        batch, both = len(p.sequences), p.head_dim + p.head_dim_v
        heads, local = work_heads(work), self.length // self.ranks
        step = 1 if self.in_turns else heads
        rows = sum(r.last - r.first for r in work.rows)
        keys = self._keys(rank)
        of_q = rows * heads * p.group
        found = of_q * (2 * p.head_dim_v + 4 + 2 * p.head_dim)  # out, lse, dq
        if not self._in_place(rank):  # q and dout here; out, lse and dq where they lie
            found += of_q * 2 * both + local * p.heads * (2 * both + 4)
        found += local * p.kv_heads * 2 * both  # dk, dv
        if self.ranks > 1:  # k and v, dk and dv
            found += keys * step * 2 * both * (3 if self.in_turns else 2)
        segment = min(max((s.rows[1] - s.rows[0] for s in self._segments(rank)), default=0), rows)
        found += segment * step * p.group * (4 * p.head_dim + 8)
        wide = 4 * step * self.groups * both
        if self.head_ranks == self.ranks:
            cut = self.length > self.cut.q_segment > 0
            return batch * (found + keys * wide * cut)
        own = sum(s.keys[1] - s.keys[0] for s in self._segments(rank))
        into = sum(self._here(s, rank) for other in range(self.ranks) for s in self._segments(other))
        away = 1 - 1 / self.ranks
        before = own if self.in_turns else 0  # of the head before, still leaving
        return batch * (found + wide * (own + before + into * away + max(own * away, local)))

    def _here(self, segment: Segment, rank: int) -> int:
        """Keys of a segment that lie on a rank."""
        first, last = segment.keys
        chunks = self.layout.chunks[rank]
        return sum(max(0, min(last, c.rows.last) - max(first, c.rows.first)) for c in chunks)

    def _segments(self, rank: int) -> list[Segment]:
        return [
            s
            for s in self.cut.segments(self.length)
            if any(r.first <= s.rows[0] < r.last for r in self.work[rank].rows)
        ]

    def _in_place(self, rank: int) -> bool:
        """Whether a rank computes the rows that lie on it, with all heads."""
        rows = {row for mine in self.work[rank].rows for row in (mine.first, mine.last)}
        own = {row for chunk in self.layout.chunks[rank] for row in (chunk.rows.first, chunk.rows.last)}
        return self.head_ranks == 1 and rows == own

    def _keys(self, rank: int) -> int:
        """Keys that a rank needs, from the first one on."""
        if self.problem.mask.sides[1] != 0:
            return self.length
        return max((rows.last for rows in self.work[rank].rows), default=0)


def work_heads(work: Work) -> int:
    return work.heads[1] - work.heads[0]


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
