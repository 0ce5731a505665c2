"""What ``ablations.py`` compares: by ablation, variants of the forward and the points where they are timed.

A variant differs from what ships (OURS) in one thing: a field of the configuration, the order in which items
are claimed, or the number of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from forward_points import MASKS, square
from points import HIDDEN

from dash_attn.backends.sm90.forward.config import OVERLAPS, ForwardConfig, forward_config
from dash_attn.backends.sm90.forward.launch import Forward
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import ForwardPlan

OURS = "ours"
HEAD_DIMS, SEQLENS = (64, 128), (1024, 4096, 16_384)
CAUSAL, KINDS = (Mask.causal(),), ("normal", "peaked", "outliers")
SHARES = (0, 2, 4)
"""Of 8 values of 2^x, how many are a polynomial."""
WHOLE = 65_536
"""A segment that no sequence here exceeds."""


class Variant(NamedTuple):
    """One way to run the forward.

    Attributes:
        name: OURS is what ships.
        config: of the kernel.
        order: of the claims, a key of ORDERS.
        persistent: as many blocks as SMs, which claim items; otherwise one block per item.
    """

    name: str
    config: ForwardConfig
    order: str = OURS
    persistent: bool = True


class Ablation(NamedTuple):
    """Variants of a head dim, and where they are timed: every mask, length and kind of inputs."""

    variants: Callable[[int], list[Variant]]
    masks: Sequence[Mask] = MASKS
    seqlens: Sequence[int] = SEQLENS
    kinds: Sequence[str] = KINDS[:1]


class AblatedForward(Forward):
    """The forward of a problem as a variant runs it."""

    def __init__(self, problem: Problem, device: torch.device, variant: Variant) -> None:
        items = Forward(problem, device, blocks=1, config=variant.config).plan().items
        blocks = None if variant.persistent else items
        config = variant.config
        super().__init__(problem, device, blocks=blocks, config=config, turns=config.in_turns)
        self._order = variant.order

    def _plan_of(self, config: ForwardConfig) -> ForwardPlan:
        return ORDERS[self._order](super()._plan_of(config))


def one_section(plan: ForwardPlan) -> ForwardPlan:
    """Longest first over all heads: what is read meanwhile need not fit L2."""
    return replace(plan, section=plan.problem.heads)


def shortest_first(plan: ForwardPlan) -> ForwardPlan:
    return _sorted(plan, np.argsort(plan.kv_tiles, kind="stable"))


def by_position(plan: ForwardPlan) -> ForwardPlan:
    """Sequence by sequence, q tile by q tile. Of one causal sequence this is the shortest first."""
    return _sorted(plan, np.lexsort((plan.entries[:, 2], plan.entries[:, 1], plan.entries[:, 0])))


def _sorted(plan: ForwardPlan, order: np.ndarray) -> ForwardPlan:
    return replace(plan, entries=plan.entries[order], kv_tiles=plan.kv_tiles[order])


ORDERS: Mapping[str, Callable[[ForwardPlan], ForwardPlan]] = {
    OURS: lambda plan: plan,
    "one section": one_section,
    "shortest first": shortest_first,
    "by position": by_position,
}


def pipelining(head_dim: int) -> list[Variant]:
    """Every overlap, with warpgroups in turns and without.

    At head dim 64 overlap "softmax" spills registers with three warpgroups: all have two, beside OURS.
    """
    ours = forward_config(head_dim, "bf16")
    two = replace(ours, warpgroups=2)
    found = [] if two == ours else [Variant(OURS, ours)]
    for overlap in OVERLAPS:
        for in_turns in (False, True):
            config = replace(two, overlap=overlap, in_turns=in_turns)
            name = f"{overlap}, in turns" if in_turns else overlap
            found.append(Variant(OURS if config == ours else name, config))
    return found


def exp2(head_dim: int) -> list[Variant]:
    """Shares of the polynomial. At head dim 64 it spills 8 bytes per thread with three warpgroups, so all
    shares are also there with two, which spill nothing."""
    ours = forward_config(head_dim, "bf16")
    two = replace(ours, warpgroups=2)
    found = [Variant(OURS, ours), *(Variant(f"{n} of 8", replace(ours, exp2_share=n)) for n in SHARES[1:])]
    if two != ours:
        found += [Variant(f"{n} of 8, two warpgroups", replace(two, exp2_share=n)) for n in SHARES]
    return found


def rescaling(head_dim: int) -> list[Variant]:
    """Rules for a maximum. "every growth" is FlashAttention-2's, "keep 8" FlashAttention-4's threshold."""
    ours = forward_config(head_dim, "bf16")
    return [
        Variant(OURS, ours),
        Variant("every growth", replace(ours, keep=0.0, room=0)),
        Variant("keep 8", replace(ours, keep=8.0)),
        Variant("room 0", replace(ours, room=0)),
    ]


def order(head_dim: int) -> list[Variant]:
    config = forward_config(head_dim, "bf16")
    return [Variant(name, config, order=name) for name in ORDERS]


def persistent(head_dim: int) -> list[Variant]:
    config = forward_config(head_dim, "bf16")
    return [Variant(OURS, config), Variant("a block per item", config, persistent=False)]


def segment(head_dim: int) -> list[Variant]:
    ours = forward_config(head_dim, "bf16")
    found = [Variant(f"{keys:,}", replace(ours, segment=keys)) for keys in (1024, 2048, 4096)]
    return [Variant(OURS, ours), *found, Variant("whole", replace(ours, segment=WHOLE))]


ABLATIONS: Mapping[str, Ablation] = {
    "pipelining": Ablation(pipelining),
    "exp2": Ablation(exp2),
    "rescaling": Ablation(rescaling, seqlens=(4096,), kinds=KINDS),
    "order": Ablation(order, masks=CAUSAL, seqlens=(*SEQLENS, 32_768, 65_536)),
    "persistent": Ablation(persistent),
    "segment": Ablation(segment, seqlens=(16_384, 65_536)),
}


def points(ablation: Ablation) -> Iterator[tuple[Problem, str]]:
    """Problems, and which kind of inputs they get."""
    for head_dim in HEAD_DIMS:
        for mask in ablation.masks:
            for seqlen in ablation.seqlens:
                for kind in ablation.kinds:
                    yield square(seqlen, HIDDEN // head_dim, head_dim, mask), kind


def all_configs() -> list[ForwardConfig]:
    """Every configuration that any ablation launches, once."""
    lists = (ablation.variants(head_dim) for ablation in ABLATIONS.values() for head_dim in HEAD_DIMS)
    in_fp16 = [forward_config(head_dim, "fp16") for head_dim in HEAD_DIMS]  # of the accuracy
    return list(dict.fromkeys([*(variant.config for found in lists for variant in found), *in_fp16]))
