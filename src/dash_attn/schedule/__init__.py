"""Plans: how they are made, proven safe and laid out for a device. Pure NumPy."""

from __future__ import annotations

from .build import PLACEMENTS, build_plan
from .choose import choose_policy
from .plan import HeadPattern, Plan, Run
from .policies import (
    FA3,
    POLICIES,
    SPT,
    ByLength,
    Descending,
    Shift,
    SymmetricShift,
    lpt_placement,
    policy_by_name,
)
from .policy import Policy
from .table import from_table, to_table
from .verify import Verdict, check_workers, verify

__all__ = [
    "FA3",
    "PLACEMENTS",
    "POLICIES",
    "SPT",
    "ByLength",
    "Descending",
    "HeadPattern",
    "Plan",
    "Policy",
    "Run",
    "Shift",
    "SymmetricShift",
    "Verdict",
    "build_plan",
    "check_workers",
    "choose_policy",
    "from_table",
    "lpt_placement",
    "policy_by_name",
    "to_table",
    "verify",
]
