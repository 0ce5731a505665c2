"""Plans: how they are made, proven safe and laid out for a device. Pure NumPy."""

from __future__ import annotations

from .build import COMMON_PLACEMENTS, build_plan
from .defaults import choose_policy
from .forward import ForwardNumerics
from .forward_plan import ForwardPlan, build_forward_plan, prove_forward
from .numerics import (
    FA3,
    POLICIES,
    SPT,
    ByLength,
    Descending,
    Shift,
    SymmetricShift,
    policy_by_name,
)
from .placement import Placement, lpt_placement
from .plan import HeadPattern, Plan, Run, Verdict
from .policy import Numerics, Policy
from .proof import check_workers, prove
from .schedule import Schedule
from .table import from_table, to_table

__all__ = [
    "COMMON_PLACEMENTS",
    "FA3",
    "POLICIES",
    "SPT",
    "ByLength",
    "Descending",
    "ForwardNumerics",
    "ForwardPlan",
    "HeadPattern",
    "Numerics",
    "Placement",
    "Plan",
    "Policy",
    "Run",
    "Schedule",
    "Shift",
    "SymmetricShift",
    "Verdict",
    "build_forward_plan",
    "build_plan",
    "check_workers",
    "choose_policy",
    "from_table",
    "lpt_placement",
    "policy_by_name",
    "prove",
    "prove_forward",
    "to_table",
]
