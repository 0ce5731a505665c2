"""What barriers count, of both machines that execute PTX: this one, and ptx_machine.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Barrier:
    """An mbarrier: arrivals and bytes that its phase still waits for."""

    count: int
    pending: int
    bytes: int = 0
    phase: int = 0

    def change(self, arrivals: int = 0, expected: int = 0) -> None:
        self.pending -= arrivals
        self.bytes += expected
        assert self.pending >= 0, "more arrivals than a phase of the barrier has"
        if self.pending == self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count


@dataclass
class Named:
    """A named barrier: threads that have come in this phase."""

    came: int = 0
    phase: int = 0

    def come(self, threads: int, of: int) -> None:
        """So many threads come, of all that the phase waits for."""
        self.came += threads
        assert self.came <= of, "more threads than the barrier has"
        if self.came == of:
            self.came, self.phase = 0, self.phase + 1
