"""What a traced forward keeps of every item: nanoseconds at which it began and was done, and the SM.

The first thread that multiplies writes it. An item begins when its Q has arrived and this warpgroup is done
with the item before, so items of a block do not overlap. It is done when O, or what is left of a segment, has
left the registers. Kernels before and behind the main one are not in the trace.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ..device import ptx
from .arguments import TRACE_WORDS

BEGIN, END, SM = range(TRACE_WORDS)


@cute.jit
def note(trace, item: Int32, word: cutlass.Constexpr) -> None:
    """Write down that an item begins, or that it is done."""
    if ptx.thread_index() == 128:
        line = cute.make_tensor(trace.iterator + Int64(item) * TRACE_WORDS, cute.make_layout(TRACE_WORDS))
        line[word] = ptx.nanoseconds()
        if const_expr(word == END):
            line[SM] = Int64(ptx.multiprocessor())
