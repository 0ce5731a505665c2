"""What is asked of attention besides the tensors: one value, made once from any caller's convention.

Operators carry its fields one by one, in the order in which they stand here: schemas, option lists and caches
are derived from them, so a new feature is a new field with a default.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, get_type_hints

from .problem import Mask
from .schedule.constants import Q_SEGMENT
from .scores import Scores

__all__ = ["AttentionSpec"]


class AttentionSpec(NamedTuple):
    """A checked request.

    Attributes:
        softmax_scale: factor on Q K^T.
        left, right: columns that a row sees before and after its own position, -1: all.
        policy: "auto", or the name of a schedule (:class:`dash_attn.schedule.Schedule`).
        ordered: False permits sums of dQ in no fixed order.
        backend: "auto", or the name of one (:mod:`dash_attn.backends.base`).
        q_segment: rows per segment of q (:mod:`.schedule.segments`); 0: by the policy.
        softcap, sink, alibi, dropout_p, row_intervals: as in :class:`.scores.Scores`.

    >>> AttentionSpec(0.125, -1, 0).mask.name, AttentionSpec.schema()[:43]
    ('causal', 'float softmax_scale, int left, int right, s')
    """

    softmax_scale: float
    left: int = -1
    right: int = -1
    policy: str = "auto"
    ordered: bool = True
    backend: str = "auto"
    q_segment: int = 0
    softcap: float = 0.0
    sink: bool = False
    alibi: bool = False
    dropout_p: float = 0.0
    row_intervals: bool = False

    @property
    def scores(self) -> Scores:
        """What backends are given; made once per call that is kept, for it takes a moment."""
        return Scores(**{name: value for name, value in self._asdict().items() if name in Scores._fields})

    @property
    def rows_per_segment(self) -> int:
        """Rows per segment of q, 0 where sequences stay whole.

        They do under a policy that is named, unless ``q_segment`` is too: not every policy has plans for
        segments. They do under a window likewise, for their items would be short, and with dropout, whose
        bits are older than segments. What counts rows from the first one of a sequence leaves them whole as
        well, but for dropout, which is told where a segment begins.
        """
        if self.alibi or self.row_intervals:
            return 0
        cut = self.policy == "auto" and self.left < 0 and not self.dropout_p
        return self.q_segment or (Q_SEGMENT if cut else 0)

    @property
    def mask(self) -> Mask:
        """The mask, aligned bottom-right."""
        return _mask(self.left, self.right)

    @classmethod
    def schema(cls) -> str:
        """The fields as an operator's arguments."""
        kinds = get_type_hints(cls)
        return ", ".join(f"{kinds[name].__name__} {name}" for name in cls._fields)


_mask = lru_cache(1024)(Mask.of_sides)
