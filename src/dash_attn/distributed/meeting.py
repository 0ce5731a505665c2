"""Whether all ranks of a group are at one step, asked before anything moves."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .team import OutOfStep, Team, errors_of, usable_notes
from .windows import Window, window_of

__all__ = ["Meeting", "Step"]


class Step(NamedTuple):
    """Where a rank is.

    Attributes:
        call: a number that counts the calls of the group.
        checksum: 32 bits, of what the call was given.
        backward: whether this is its backward.
    """

    call: int
    checksum: int
    backward: bool = False

    @property
    def tag(self) -> int:
        """The step in 63 bits: the checksum, and the number of the pass."""
        return self.checksum * _PASSES + (2 * self.call + self.backward) % _PASSES


_PASSES = 1 << 31
"""So many passes have numbers of their own: forwards even ones, backwards odd ones."""

_OUT_OF_STEP = (
    "dash_attn.distributed: the ranks of a group are at different calls: backwards ran in another order, one "
    "was left out, a refused call was skipped, or lengths or other arguments differ"
)


class Meeting:
    """Are all ranks at one step? Asked when this is made; :meth:`end`, before anything moves, has the answer.
    What a GPU is given between the two runs meanwhile.

    Args:
        team: all its ranks meet.
        at: where this one is.
        device: of what will move.
    """

    def __init__(self, team: Team, at: Step, device: torch.device) -> None:
        self._team, self.at = team, at
        self._work: Any = None
        self._window: Window | None = None
        if team.size == 1:
            return
        usable_notes(team)
        self._window = window_of(team, device)
        if self._window is not None:
            with errors_of(team):
                self._window.say(at.tag)
            return
        self._mine = torch.full((team.size,), at.tag, dtype=torch.int64, device=device)
        self._every = torch.empty_like(self._mine)
        with errors_of(team):
            self._work = dist.all_to_all_single(self._every, self._mine, group=team.group, async_op=True)

    def end(self) -> None:
        """On a GPU the host does not wait. Nothing happens the second time.

        Raises:
            OutOfStep: the ranks are not at one step. On a GPU no kernel behind this runs then, and
                PyTorch's next synchronisation raises.
        """
        team, work, window = self._team, self._work, self._window
        self._work = self._window = None
        if work is None and window is None:
            return
        with errors_of(team):
            if window is not None:
                self._every = window.heard()
            else:
                work.wait()
        if self._every.is_cuda:
            torch._assert_async((self._every == self.at.tag).all(), _OUT_OF_STEP)
            return
        for rank, tag in enumerate(self._every.tolist()):
            if tag != self.at.tag:
                raise OutOfStep(
                    f"rank {team.rank} of {team.size} is in {_named(self.at.tag)}, rank {rank} in "
                    f"{_named(tag)}: all ranks make the same calls, and run their backwards in the same order"
                )


def _named(tag: int) -> str:
    checksum, number = divmod(tag, _PASSES)
    way = "backward" if number & 1 else "forward"
    return f"the {way} of call {number >> 1} (checksum of arguments and lengths {checksum:08x})"
