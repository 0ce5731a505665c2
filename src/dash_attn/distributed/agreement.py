"""Whether all ranks of a group have arguments that go together: asked the first time that they are seen."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..errors import CommunicationError, DashError
from .exchange import Team, errors_of

__all__ = ["agree"]

_AGREED: set[tuple[Any, ...]] = set()


def agree(
    team: Team, signature: tuple[Any, ...], refused: DashError | None, **numbers: Tensor | None
) -> None:
    """Return if all ranks have the same signature and none refuses it; else raise on every rank.

    Args:
        team: all its ranks call this.
        signature: what must be equal, of things whose ``str`` says it.
        refused: the error that this rank has found by itself.
        numbers: tensors of one number, new in every call. They are compared when the signature is.

    Raises:
        CommunicationError: signatures differ, or another rank has refused its arguments.
        DashError: ``refused``.
    """
    key = (team.group, *signature)
    if refused is None and key in _AGREED:
        return
    read = [(name, None if x is None or refused is not None else int(x)) for name, x in numbers.items()]
    mine = [f"{name}={value}" for name, value in (*signature, *read)], str(refused or "")
    found: list[Any] = [None] * team.size
    with errors_of(team):
        dist.all_gather_object(found, mine, group=team.group)
    if refused is not None:
        raise refused
    for rank, (said, why) in enumerate(found):
        if why:
            raise CommunicationError(f"rank {rank} of {team.size} refused its arguments: {why}")
        differing = [pair for pair in zip(said, mine[0]) if pair[0] != pair[1]]
        if differing:
            theirs, ours = differing[0]
            raise CommunicationError(
                f"ranks were called with different arguments: rank {rank} has {theirs}, "
                f"rank {team.rank} has {ours}"
            )
    _AGREED.add(key)
