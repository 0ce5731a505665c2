"""Buffers that warps pass round: stages of shared memory, each with a full and an empty mbarrier."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute

from . import ptx


@dataclass(frozen=True)
class Ring:
    """Buffers that some warps fill and others empty.

    Use n of the ring takes stage ``n % stages``. Every warp counts the uses for itself, from 0. The methods
    leave nothing but their arithmetic and their waits in the kernel. The class is frozen: the kernel compiler
    then knows that a method changes nothing, and carries no ring through loops and branches.

    Attributes:
        full, empty: the first of ``stages`` mbarriers each, in shared memory.
        stages: int, or Int32 where the kernel decides.
        starts_empty: the first use of a stage waits for nobody. Otherwise somebody arrives at ``empty``
            before it.
    """

    full: Any
    empty: Any
    stages: Any = 1
    starts_empty: bool = True

    def stage(self, n):
        """The stage that use n takes."""
        return 0 if self._single else n % self.stages

    def phase(self, n):
        """The phase, 0 or 1, of its stage that use n takes."""
        return n & 1 if self._single else (n // self.stages) & 1

    def full_of(self, n):
        """The mbarrier at which use n becomes full."""
        return self.full if self._single else self.full + self.stage(n)

    def empty_of(self, n):
        """The mbarrier at which use n becomes empty again."""
        return self.empty if self._single else self.empty + self.stage(n)

    def wait_full(self, n) -> None:
        """Wait until the stage of use n is full."""
        cute.arch.mbarrier_wait(self.full_of(n), self.phase(n))

    def is_full(self, n):
        """1 if the stage of use n is full already, 0 if not."""
        return ptx.is_over(self.full_of(n), self.phase(n))

    @cute.jit
    def wait_full_unless(self, known, n) -> None:
        """Wait until the stage of use n is full, if that is not known yet."""
        if known == 0:
            self.wait_full(n)

    def wait_full_before(self, n) -> None:
        """Wait until the stage of use n - 1 is full; for n = 0 not at all."""
        before = n if self._single else n + self.stages - 1  # the same stage, a round later
        cute.arch.mbarrier_wait(self.full_of(before), self.phase(before) ^ 1)

    def wait_empty(self, n) -> None:
        """Wait until the stage of use n is empty."""
        barrier, phase = self.empty_of(n), self.phase(n)
        cute.arch.mbarrier_wait(barrier, phase ^ 1 if self.starts_empty else phase)

    @property
    def _single(self) -> bool:
        return isinstance(self.stages, int) and self.stages == 1


@cute.jit
def arrive(barrier) -> None:
    """One lane arrives for its warp, which need not stand together."""
    with cute.arch.elect_one():  # comparing the lane would keep it in a register
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def arrive_together(barrier) -> None:
    """One lane arrives for its warp, once all lanes have come so far."""
    cute.arch.sync_warp()
    arrive(barrier)


@cute.jit
def arrive_for_copies(barrier) -> None:
    """As `arrive_together`, where the warp has read what the copy engine will then write over.

    A load of shared memory may still be under way when its warp arrives. It ends before a proxy fence, or
    where what was loaded is used.
    """
    cute.arch.fence_view_async_shared()
    arrive_together(barrier)
