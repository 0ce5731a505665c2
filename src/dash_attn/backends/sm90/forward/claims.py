"""Claiming items, and the kernel before the main one, which sets their number to 0."""

import cutlass.cute as cute
from cutlass import Int32

from ..device import ptx

# The next item is claimed when so many kv tiles of an item are still to be loaded, and read when so many are.
CLAIM_BEFORE, READ_BEFORE = 4, 2


@cute.jit
def claim(claimed) -> Int32:
    """Claim the next item; lane 0 knows which. Nobody waits for the answer here."""
    number = Int32(0)
    if cute.arch.lane_idx() == 0:
        number = ptx.add(claimed.iterator)
    return number


class Claims:
    @cute.jit
    def __call__(self, claimed, stream):
        self.kernel(claimed).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, claimed) -> None:
        cute.arch.griddepcontrol_launch_dependents()  # they wait for the end of this kernel before they read
        cute.arch.griddepcontrol_wait()
        if cute.arch.thread_idx()[0] == 0:
            claimed[0] = Int32(0)
