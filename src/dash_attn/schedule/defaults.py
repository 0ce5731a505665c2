"""``policy="auto"``: from the problem to a policy and a placement.

The choice looks at the problem and never at the machine, the batch size or a clock: any of those would
let bits depend on it. It is made from the mask, the head dim and the q heads a kv head, so it is the same for
every sequence of a batch; a policy may look at the length of each.
"""

from __future__ import annotations

from ..problem import Problem
from .build import Placement
from .numerics import SPT, ByLength, Descending, Shift
from .policy import Policy

__all__ = ["AUTO_RING", "choose_policy"]

AUTO_RING = 16
AUTO_SHIFT = Shift(ring=AUTO_RING, min_stride=2, max_stride=4)
"""What "auto" chooses under the full mask. Few members find room on any GPU, also beside other kernels, and
divide most lengths well; with a stride of one q tile, a hand-over takes as long as a task, and with more than
four, long heads leave L2 (docs/design.md)."""


def choose_policy(problem: Problem) -> tuple[Policy, Placement]:
    """The policy and placement that ``policy="auto"`` stands for.

    Full mask: shift, rings of at most ``AUTO_RING`` kv tiles that start two to four q tiles apart. Causal
    mask: SPT, head after head, which keeps few heads in L2 at a time, but at head dim 128 long sequences are
    descending, longest items first; with several q heads a kv head, items under SPT would start a whole group
    of tasks apart, so there all are descending, longest items first. Windows:
    descending, head after head; their items are equally long but for the ones at the edges, and putting
    those last would make all others wait for them.

    >>> from dash_attn.problem import Mask
    >>> [str(choose_policy(Problem.dense(seqlen=1024, mask=m))[0]) for m in (Mask.full(), Mask.causal())]
    ['shift(ring=16, min_stride=2, max_stride=4)', 'by_length(long_from=6144)']
    """
    if problem.mask.name == "full":
        return AUTO_SHIFT, "policy"
    if problem.mask.name != "causal":
        return Descending(), "policy"
    if problem.group > 1:
        return Descending(), "lpt"
    return (ByLength() if problem.head_dim == 128 else SPT()), "policy"
