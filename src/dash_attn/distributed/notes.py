"""What ranks of a group tell each other beside their exchanges: notes in the group's store.

A note needs neither a GPU nor that the others listen. So a rank that refuses a call says why and goes on, and
the others find it: at once where they are waiting for notes, otherwise when their exchange has failed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

__all__ = ["Notes", "message_of", "notes_of"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05
"""Seconds between two looks at the store."""


_AGREED = "agreed"

Said = Sequence[tuple[str, str]]
"""Names and values of a call."""


class Notes:
    """The notes of a group, as one of its ranks knows them.

    They come in rounds. Every rank takes part in every round: it compares a call, or refuses one. So the
    ranks count rounds alike as long as they make the same calls.

    Attributes:
        agreed: what ranks have agreed on, and need not compare again, with its checksum.
        last: names and values of the call that this rank has agreed on last.
        calls: how many this rank has made or refused.
        broken: the error of this rank in the middle of a call; "" if there was none.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._store: Any = dist.PrefixStore("dash_attn/", group.get_group_store())  # type: ignore[attr-defined]
        self._rank, self._size, self._round = rank, size, 0
        self._generation = 0
        self.agreed: dict[tuple[tuple[str, Any], ...], int] = {}
        self.last: tuple[tuple[str, Any], ...] = ()
        self.calls, self.broken = 0, ""

    def refuse(self, why: str) -> None:
        """Tell the others, and wait for nobody.

        Raises:
            RuntimeError: the store does not answer.
        """
        self._tell(f"refused its arguments: {why}")

    def give_up(self, why: str) -> None:
        """Tell the others that this rank has left a call in which they may still be.

        Raises:
            RuntimeError: the store does not answer.
        """
        self._tell(f"has failed in the middle of a call: {why}")

    def _tell(self, what: str) -> None:
        said = f"rank {self._rank} of {self._size} {what}"
        try:
            self._store.set(self._key("verdict"), said.encode(errors="replace").decode())
            self._leave()
        finally:
            self._next(agreed=False)

    def compare(self, mine: Said) -> str:
        """What keeps the ranks from agreeing; "" if all have the same.

        Raises:
            TimeoutError: not all ranks have said theirs within the store's timeout. Those that come later
                find that this one has waited.
            RuntimeError: the store does not answer.
        """
        verdict = None
        try:
            verdict = self._compared(mine)
            self._leave()
        except TimeoutError:
            with suppress(RuntimeError):
                self._store.set(
                    self._key("waited"), f"rank {self._rank} of {self._size} has waited, and gone"
                )
                self._leave()
            raise
        except BaseException as error:  # Ctrl-C, for instance: others may come yet
            with suppress(RuntimeError):
                if not self._store.check([self._key("verdict")]):
                    why = f"{type(error).__name__}: {message_of(error)}"
                    self._store.set(
                        self._key("verdict"), f"rank {self._rank} of {self._size} has left: {why}"
                    )
                self._leave()
            raise
        finally:
            self._next(agreed=verdict == _AGREED)
        return "" if verdict == _AGREED else verdict

    def why_not_here(self) -> str:
        """Why other ranks are not where this one is; "" if they have not said.

        Raises:
            RuntimeError: the store does not answer.
        """
        if self._store.check([self._key("verdict")]):
            return self._note("verdict")
        if not self._store.check([self._key("begun")]):
            return ""
        rank, theirs = json.loads(self._store.get(self._key("begun")))
        said = f"rank {rank} of {self._size} makes a call of a kind that is new there"
        there = dict(theirs)
        for name, value in self.last:
            if name in there and there[name] != str(value):
                here = f"the last forward of rank {self._rank} had {name}={value}"
                return f"{said}: rank {rank} has {name}={there[name]}, {here}"
        return said

    def _compared(self, mine: Said) -> str:
        store, said, end = self._store, json.dumps([self._rank, mine]), self._end()
        store.set(self._key("begun"), said)
        if self._rank == 0:
            store.set(self._key("said"), said)
        if self._wait_for(end, "verdict", "waited", "said") == "said":
            _, first = json.loads(store.get(self._key("said")))
            if differing := self._difference(0, first, mine):
                store.set(self._key("verdict"), "ranks were called with different arguments" + differing)
            elif store.add(self._key("agreed"), 1) == self._size:
                store.set(self._key("verdict"), _AGREED)
        return self._note(self._wait_for(end, "verdict", "waited"))

    def _note(self, name: str) -> str:
        found: bytes = self._store.get(self._key(name))
        return found.decode()

    def _end(self) -> float:
        """When to wait no longer."""
        seconds: float = self._store.timeout.total_seconds()
        return time.monotonic() + seconds

    def _wait_for(self, end: float, *names: str) -> str:
        """The first of these notes that is there. The store is asked again and again: while a thread waits
        within it, others, such as NCCL's watchdog, cannot use it."""
        pause = _FIRST_PAUSE
        while time.monotonic() < end:
            for name in names:
                if self._store.check([self._key(name)]):
                    return name
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)
        raise TimeoutError(f"not all ranks have come within {self._store.timeout.total_seconds():g} s")

    def _leave(self) -> None:
        """The last one to leave a round takes its notes away."""
        if self._store.add(self._key("left"), 1) == self._size:
            with suppress(RuntimeError):  # not every store can
                for name in ("begun", "said", "agreed", "verdict", "waited", "left"):
                    self._store.delete_key(self._key(name))

    def _next(self, agreed: bool) -> None:
        """The next round. After one that has failed all is compared anew: ranks may be at different calls,
        and then compare, and wait, in place of exchanging rows of two calls."""
        self._round += 1
        if not agreed:
            self.agreed.clear()

    def _key(self, name: str) -> str:
        """Of a note of this round, and of this group: an earlier one of the same name may have left notes."""
        if not self._generation:
            self._generation = self._store.add(f"groups of rank {self._rank}", 1)
        return f"{self._generation}/{self._round}/{name}"

    def _difference(self, rank: int, theirs: Said, mine: Said) -> str:
        """The first thing by name in which another rank differs from this one; "" if none does."""
        there, here = dict(theirs), dict(mine)
        for name in {**there, **here}:
            at, of = there.get(name), here.get(name)
            if at != of:
                said = ", ".join(
                    f"rank {who} has {f'{name}={value}' if value is not None else f'no {name}'}"
                    for who, value in ((rank, at), (self._rank, of))
                )
                return f": {said}"
        return ""


def message_of(error: BaseException) -> str:
    """What an error says, if it can."""
    try:
        return str(error)
    except Exception:
        return type(error).__name__


_NOTES: WeakKeyDictionary[Any, Notes] = WeakKeyDictionary()
"""By process group. A group that is gone takes what it agreed on with it."""


def notes_of(group: Any, rank: int, size: int) -> Notes:
    """The notes of a process group, of which this process is a rank."""
    found = _NOTES.get(group)
    if found is None:
        found = _NOTES[group] = Notes(group, rank, size)
    return found
