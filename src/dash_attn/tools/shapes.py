"""The shapes that a user asks about, from flags or a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import InputError, ProblemError
from ..problem import Mask, Problem

__all__ = ["KEYS", "Shape", "chosen_device", "chosen_shapes", "read_shapes"]


@dataclass(frozen=True)
class Shape:
    """One attention call.

    Attributes:
        batch, seqlen, seqlen_k: a dense batch; seqlen_k defaults to seqlen.
        seqlens, seqlens_k: lengths of packed sequences, in place of those three.
        heads, kv_heads, head_dim: kv_heads defaults to heads.
        head_dim_v: of V, by default head_dim.
        causal, window: the mask; window is (left, right), -1: unbounded.
        dtype: "bfloat16", "float16", "float32" or "float64".
        policy: "auto" or a policy's name.
        backend: "auto" or a backend's name.
        seed: of the random tensors.
    """

    batch: int = 2
    seqlen: int | None = None
    seqlen_k: int | None = None
    seqlens: tuple[int, ...] | None = None
    seqlens_k: tuple[int, ...] | None = None
    heads: int = 8
    kv_heads: int | None = None
    head_dim: int = 128
    head_dim_v: int | None = None
    causal: bool = False
    window: tuple[int, int] | None = None
    dtype: str = "bfloat16"
    policy: str = "auto"
    backend: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("seqlens", "seqlens_k", "window"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, (list, tuple)) or any(type(x) is not int for x in value):
                raise InputError(f"{name} must be a list of integers, got {value!r}")
            object.__setattr__(self, name, tuple(value))
        for name in ("batch", "seqlen", "seqlen_k", "heads", "kv_heads", "head_dim", "head_dim_v", "seed"):
            value = getattr(self, name)
            optional = name in ("seqlen", "seqlen_k", "kv_heads", "head_dim_v")
            if type(value) is not int and not (optional and value is None):
                raise InputError(f"{name} must be an integer, got {value!r}")
        if self.backend != "auto":
            from ..backends.base import check_backend

            check_backend(self.backend)
        if not isinstance(self.causal, bool):
            raise InputError(f"causal must be true or false, got {self.causal!r}")
        if (self.seqlen is None) == (self.seqlens is None):
            raise InputError(f"give either seqlen or seqlens, got {self.seqlen} and {self.seqlens}")
        if self.seqlens is not None and self.seqlen_k is not None:
            raise InputError(f"seqlen_k {self.seqlen_k} belongs to seqlen, not to seqlens")
        if self.seqlens is None and self.seqlens_k is not None:
            raise InputError(f"seqlens_k {self.seqlens_k} belongs to seqlens, not to seqlen")
        for name in ("seqlen", "seqlen_k", "head_dim_v"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be >= 1, got {value}")
        if not -(2**63) <= self.seed < 2**64:
            raise InputError(f"seed must be an integer of 64 bits, got {self.seed}")
        if self.window is not None and (len(self.window) != 2 or min(self.window) < -1):
            raise InputError(f"window must be (left, right), -1: unbounded; got {self.window}")
        if (
            self.seqlens is not None
            and self.seqlens_k is not None
            and len(self.seqlens) != len(self.seqlens_k)
        ):
            raise InputError(f"{len(self.seqlens)} seqlens, but {len(self.seqlens_k)} seqlens_k")
        if self.seqlens is None and self.batch < 1:
            raise InputError(f"batch must be >= 1, got {self.batch}")
        if self.seqlens is not None and not self.seqlens:
            raise InputError("seqlens must have one length at least, got []")

    @property
    def packed(self) -> bool:
        """Sequences are packed, not a dense batch."""
        return self.seqlens is not None

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """(seqlen_q, seqlen_k) of every sequence."""
        if self.seqlens is not None:
            return tuple(zip(self.seqlens, self.seqlens if self.seqlens_k is None else self.seqlens_k))
        assert self.seqlen is not None
        return ((self.seqlen, self.seqlen if self.seqlen_k is None else self.seqlen_k),) * self.batch

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of the public functions."""
        return {
            "causal": self.causal, "window_size": self.window, "policy": self.policy, "backend": self.backend
        }  # fmt: skip

    @cached_property
    def problem(self) -> Problem:
        """The problem of it.

        Raises:
            InputError: a size is out of range.
        """
        left, right = self.window or (-1, -1)
        mask = Mask.of_sides(left, 0 if self.causal else right)
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        head_dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        sizes = self.heads, kv_heads, self.head_dim
        try:
            return Problem(self.sequences, *sizes, mask, self.dtype, head_dim_v=head_dim_v)
        except ProblemError as error:
            raise InputError(str(error)) from error

    def __str__(self) -> str:
        problem, (first, *_) = self.problem, self.sequences
        length = f"{first[0]}" if first[0] == first[1] else f"{first[0]}x{first[1]}"
        if self.packed:
            length = f"{sum(q for q, _ in self.sequences)} tokens packed"
        heads = f"{problem.heads}" if problem.group == 1 else f"{problem.heads}:{problem.kv_heads}"
        head_dim = f"{self.head_dim}"
        if problem.head_dim_v != self.head_dim:
            head_dim += f"/{problem.head_dim_v}"
        return (
            f"{len(self.sequences)} x {length}, {heads} heads of {head_dim}, {problem.mask.name}, "
            f"{self.dtype}"
        )

    def as_json(self) -> dict[str, Any]:
        """What :meth:`from_json` takes; fields without a meaning here are left out."""
        facts = {name: value for name, value in asdict(self).items() if value is not None}
        if self.packed:
            del facts["batch"]
        return facts

    @classmethod
    def from_json(cls, facts: Any) -> Shape:
        """A shape from a JSON object with keys of ``KEYS``. "mask" is another way to say "causal".

        Raises:
            InputError: not an object, an unknown key, or a value out of range.
        """
        if not isinstance(facts, dict):
            raise InputError(f"a shape must be a JSON object, got {facts!r:.60}")
        if unknown := [name for name in facts if name not in KEYS]:
            raise InputError(f"unknown key {unknown[0]!r}; known: {', '.join(KEYS)}")
        if {"batch", "seqlens"} <= facts.keys():
            raise InputError(f"batch {facts['batch']} belongs to seqlen, not to seqlens")
        if "mask" not in facts:
            return cls(**facts)
        facts = dict(facts)
        mask = facts.pop("mask")
        if mask not in MASKS:
            raise InputError(f"mask must be one of {', '.join(MASKS)}, got {mask!r}")
        if "causal" in facts:
            raise InputError(f"give either mask or causal, got {mask!r} and {facts['causal']!r}")
        return cls(causal=mask == "causal", **facts)


MASKS = ("full", "causal")

OLDEST_GPU = (8, 0)
"""The oldest compute capability that a backend covers."""

KEYS = (*(field.name for field in fields(Shape)), "mask")
"""Keys of a shape in JSON: the fields of :class:`Shape`, and "mask"."""


def read_shapes(path: Path) -> Sequence[Shape]:
    """Shapes from a JSON file: one object, or a list of them.

    Raises:
        InputError: the file is not JSON, or not of shapes.
        OSError: it cannot be read.
    """
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also of bytes that are no text, and of too many digits
        raise InputError(f"{path} is not JSON: {error}") from error
    shapes = [Shape.from_json(entry) for entry in (facts if isinstance(facts, list) else [facts])]
    if not shapes:
        raise InputError(f"{path} has no shapes")
    return shapes


def chosen_shapes(flags: Mapping[str, Any], device: str) -> Sequence[Shape]:
    """What the flags of the command ask for: a file, one shape, or a few typical ones.

    Raises:
        InputError: a value is out of range, or there are both a file and a shape.
        OSError: the file cannot be read.
    """
    given = {name: flags[name] for name in KEYS if flags.get(name) is not None}
    if flags["shapes"] is not None:
        if given:
            named = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given))
            raise InputError(f"--shapes {flags['shapes']} and {named}: give one of them")
        return read_shapes(flags["shapes"])
    if given:
        return [Shape.from_json(given)]
    if device == "cuda":
        return [
            Shape(seqlen=4096, heads=16, kv_heads=4, causal=True),
            Shape(seqlens=(3000, 17, 1000, 0, 4097), head_dim=64, causal=True, window=(1024, 0)),
        ]
    return [
        Shape(seqlen=600, heads=2, kv_heads=1, head_dim=64, causal=True),
        Shape(seqlens=(500, 17, 0, 300), heads=2, head_dim=64, causal=True, window=(400, 0)),
    ]


def chosen_device(name: str | None) -> str:
    """The device of a flag; by default the GPU where there are kernels for it.

    Raises:
        InputError: "cuda", and PyTorch sees no GPU.
    """
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda, but PyTorch sees no CUDA device")
    if name is not None:
        return name
    covered = torch.cuda.is_available() and torch.cuda.get_device_capability() >= OLDEST_GPU
    return "cuda" if covered else "cpu"
