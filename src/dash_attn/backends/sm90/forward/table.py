"""What the forward kernel reads of a plan, as int32 words.

Records of ENTRY_WORDS: the entries, then the folds. Each has its four words of the plan
(:class:`~dash_attn.schedule.ForwardPlan`), then seqlen_q, seqlen_k, first q row and first k row of its
sequence. First rows count in packed tensors only. Items are numbered as the plan says. The first item of a
block is the one of its own number; where there are more items than blocks, it claims the others, in their
order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ....schedule import ForwardPlan

ENTRY_WORDS = 8


def forward_table(plan: ForwardPlan, k_starts: Sequence[int] | None = None) -> NDArray[np.int32]:
    """The words; at least one record, so that who reads ahead finds something.

    ``k_starts``: the first row of every sequence in packed k and v; None: where the one before it ends.
    """
    lengths = plan.problem.lengths
    starts = np.zeros_like(lengths)
    np.cumsum(lengths[:-1], axis=0, out=starts[1:])
    if k_starts is not None:
        starts[:, 1] = k_starts
    records = np.concatenate([plan.entries, plan.folds])
    of_sequence = np.concatenate([lengths, starts], 1).take(records[:, 0], axis=0)
    words = np.zeros(max(records.size * 2, ENTRY_WORDS), dtype=np.int32)
    words[: records.size * 2] = np.concatenate([records, of_sequence], 1).ravel()
    return words
