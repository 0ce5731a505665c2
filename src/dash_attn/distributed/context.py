"""A context in which other libraries' attention calls are those of a group of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any

from torch import Tensor

from ..errors import InputError
from ..ops.results import out_alone
from ..ops.spread import spread_by
from ..schedule.sharing import LAYOUTS, MODES
from ..values import check_q_segment
from .agreement import telling
from .functional import attention
from .rows import positions
from .team import Team, team_of

__all__ = ["context"]


@contextmanager
def context(
    group: Any = None, *, layout: str = "zigzag", mode: str = "auto", q_segment: int | None = None
) -> Iterator[None]:
    """Inside, attention of other libraries that runs on dash-attn is :func:`attention` over a group.

    That is ``F.scaled_dot_product_attention`` inside :func:`dash_attn.integrations.sdpa.enabled`, and models
    of transformers with ``attn_implementation="dash"``. Their tensors are the rows of this rank, as
    :func:`shard` deals them. A model needs ``position_ids=positions(seqlen, group, layout)[None]``.

    Calls of :mod:`dash_attn`'s own functions are left alone. What runs here at once is ours; its backward may
    run anywhere. What runs a forward again in the backward, as activation checkpointing does, calls attention
    again: let such a backward run inside too. Of several contexts the innermost counts. It counts in this
    thread, and in this asynchronous task.

    Args:
        group: a process group, a DeviceMesh of one dimension, or None for all processes.
        layout, mode, q_segment: as for :func:`attention`.

    Raises:
        InputError: an argument cannot be used. From a call inside: what it asks for cannot be shared.
    """
    team = team_of(group)
    with telling(team):
        if layout not in LAYOUTS:
            raise InputError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
        if mode not in MODES:
            raise InputError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        check_q_segment(q_segment)
    with spread_by(_Spread(team, layout, mode, q_segment)):
        yield


class _Spread:
    """What a context says."""

    def __init__(self, team: Team, layout: str, mode: str, q_segment: int | None) -> None:
        self._team, self._what = team, (team, layout, mode, q_segment)
        self._how = {"group": team.group, "layout": layout, "mode": mode, "q_segment": q_segment}
        self._positions = lru_cache(8)(
            lambda rows: positions(rows * team.size, team.group, layout, device="cpu")
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Spread) and self._what == other._what

    def __hash__(self) -> int:
        return hash(self._what)

    @property
    def ranks(self) -> int:
        return self._team.size

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        return out_alone(attention(q, k, v, **how, **self._how))

    def telling(self) -> AbstractContextManager[None]:
        return telling(self._team)

    def positions(self, rows: int) -> Tensor:
        found: Tensor = self._positions(rows)
        return found

    def local(self, x: Tensor, dim: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        from torch.distributed.tensor import DTensor, Shard  # slow

        if not isinstance(x, DTensor):
            return x, _same
        mesh, placements = x.device_mesh, x.placements
        if tuple(placements) != (Shard(dim),) or not self._is_group(mesh):
            raise InputError(
                f"a DTensor must be sharded in dimension {dim} over the group of distributed.context, got "
                f"placements {tuple(placements)} on {mesh}"
            )

        def like_x(out: Tensor) -> Tensor:
            made: Tensor = DTensor.from_local(out, mesh, placements, run_check=False)
            return made

        local: Tensor = x.to_local()
        return local, like_x

    def _is_group(self, mesh: Any) -> bool:
        """Whether a mesh has the ranks of the group, in its order."""
        from torch.distributed import get_process_group_ranks

        ranks: list[int] = mesh.mesh.flatten().tolist()
        return ranks == get_process_group_ranks(self._team.group)


def _same(out: Tensor) -> Tensor:
    return out
