"""What the forward kernel reads of a plan, as int32 words.

Records of ENTRY_WORDS: the entries, then the folds. Each has its four words of the plan
(:class:`~dash_attn.schedule.ForwardPlan`), then seqlen_q, seqlen_k, first q row and first k row of its
sequence. Items are numbered as the plan says. The first item of a block is the one of its own number;
where there are more items than blocks, it claims the others, in their order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ....schedule import ForwardPlan

ENTRY_WORDS = 8


def forward_table(plan: ForwardPlan) -> NDArray[np.int32]:
    """The words; at least one record, so that who reads ahead finds something."""
    lengths = plan.problem.lengths
    starts = np.zeros_like(lengths)
    np.cumsum(lengths[:-1], axis=0, out=starts[1:])
    records = np.concatenate([plan.entries, plan.folds])
    of_sequence = np.concatenate([lengths, starts], 1)[records[:, 0]]
    words = np.zeros(max(records.size * 2, ENTRY_WORDS), dtype=np.int32)
    words[: records.size * 2] = np.concatenate([records, of_sequence], 1).ravel()
    return words
