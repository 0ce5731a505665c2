"""Errors that this package raises on purpose. All derive from :class:`DashError`."""

from __future__ import annotations

__all__ = [
    "CommunicationError",
    "CompilationError",
    "CostError",
    "CoverageError",
    "CycleError",
    "DashError",
    "FingerprintError",
    "HandOverError",
    "InputError",
    "MissingCompilerError",
    "PlacementError",
    "PlanError",
    "PlanMismatchError",
    "ProblemError",
    "ScheduleNameError",
    "TableError",
    "TicketError",
    "TooFewWorkersError",
    "UnavailableError",
    "UnsupportedMaskError",
]


class DashError(Exception):
    """Base of all errors of this package."""


class ProblemError(DashError, ValueError):
    """A shape, mask, dtype or tile size is out of range."""


class InputError(DashError, ValueError):
    """An argument, or a parameter of a policy or placement, cannot be used; the message names its value."""


class MissingCompilerError(DashError, ImportError):
    """The compiler of the Hopper kernels is not installed."""


class UnavailableError(DashError, RuntimeError):
    """Something that this call needs is not installed here, or is too old."""


class CompilationError(DashError, RuntimeError):
    """The kernel compiler failed on a variant; the message has its words, and the next call tries again."""


class CommunicationError(DashError, RuntimeError):
    """Processes of a group could not exchange tensors, or have arguments that do not go together."""


class CostError(DashError, ValueError):
    """A simulator cost or a worker count is out of range."""


class UnsupportedMaskError(DashError, ValueError):
    """The policy does not cover this mask, or this grid under it."""


class ScheduleNameError(DashError, ValueError):
    """No schedule prints as this name, or what was given is neither a name nor a schedule."""


class PlanMismatchError(DashError, ValueError):
    """A plan is not for these tensors, or not for the tiles of the backend that should run it."""


class PlanError(DashError):
    """Base of what the verifier finds in a plan; itself: a plan is not verified, or not of its problem."""


class CoverageError(PlanError):
    """A task of the problem is missing, doubled, or does not exist."""


class TicketError(PlanError):
    """The tickets of a q tile are not a permutation of 0, 1, ..., contributions - 1."""


class CycleError(PlanError):
    """Item order and ticket order form a cycle: the plan would hang on any number of workers."""


class PlacementError(PlanError):
    """A placement is not for these numerics, or items (of a forward: places) are not listed exactly once."""


class TooFewWorkersError(PlanError):
    """Fewer resident workers than the plan's ``min_workers``: it could deadlock."""


class FingerprintError(PlanError):
    """The numerics of a plan are not the ones its fingerprint was made from."""


class HandOverError(DashError, RuntimeError):
    """A kernel gave up waiting for its ticket (debugging variant with bounded waits)."""


class TableError(PlanError):
    """An int32 plan table is malformed."""
