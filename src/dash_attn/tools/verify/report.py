"""What the checks found, as rows of a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

__all__ = ["Check", "Report", "Status"]


class Status(str, Enum):
    """Outcome of a check."""

    PASSED = "passed"
    FAILED = "FAILED"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Check:
    """One row.

    Attributes:
        name: of the check.
        status: outcome.
        detail: what was measured, or why it failed or was skipped.
        seconds: it took.
    """

    name: str
    status: Status
    detail: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"  {self.name:<18}{self.status.value:<9}{self.seconds:>7.1f} s  {self.detail}"


@dataclass(frozen=True)
class Report:
    """One shape.

    Attributes:
        shape: fields of the shape.
        facts: device, backend, plan, min_workers, fingerprint.
        hashes: SHA-256 of out, lse, dq, dk and dv.
        checks: in the order in which they ran.
    """

    shape: dict[str, Any]
    facts: dict[str, Any]
    hashes: dict[str, str] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """There are checks and none of them failed; skipped ones do not count."""
        return bool(self.checks) and all(check.status is not Status.FAILED for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """Everything, and ``passed``."""
        return {"passed": self.passed, **asdict(self)}
