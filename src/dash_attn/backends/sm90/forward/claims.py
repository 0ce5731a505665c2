"""The kernel before the main one, where blocks claim items: nobody has claimed any."""

import cutlass.cute as cute
from cutlass import Int32


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
