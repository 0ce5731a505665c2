"""Helpers for tests that compare bytes, not numbers within a tolerance."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["assert_same_bytes", "same_bytes"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(x: Tensor, device: torch.device) -> Tensor:
    """Elements of x as integers of the same width."""
    return x.detach().to(device).contiguous().view(_BITS[x.element_size()])


def _meeting_place(a: Tensor, b: Tensor) -> torch.device:
    """Where two tensors are compared: where they are, or on the CPU if that is not one device."""
    return a.device if a.device == b.device else torch.device("cpu")


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """True if dtype, shape and every byte agree: 0.0 differs from -0.0, a NaN equals the same NaN.

    Tensors of one device are compared there.

    >>> same_bytes(torch.tensor([0.0]), torch.tensor([-0.0]))
    False
    """
    place = _meeting_place(a, b)
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a, place), _bits(b, place))


def assert_same_bytes(a: Tensor, b: Tensor, what: str = "tensors") -> None:
    """Raise AssertionError with the first mismatch unless :func:`same_bytes` holds.

    >>> assert_same_bytes(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), "dq")
    Traceback (most recent call last):
    AssertionError: dq: 1 of 2 elements differ, first at (1,): 2.0 (0x40000000) and 2.5 (0x40200000)
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        raise AssertionError(f"{what}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}")
    place = _meeting_place(a, b)
    bits_a, bits_b = _bits(a, place), _bits(b, place)
    wrong = (bits_a != bits_b).nonzero()
    if not len(wrong):
        return
    at = tuple(wrong[0].tolist())
    values = " and ".join(_shown(x, bits, at) for x, bits in ((a, bits_a), (b, bits_b)))
    raise AssertionError(f"{what}: {len(wrong)} of {a.numel()} elements differ, first at {at}: {values}")


def _shown(x: Tensor, bits: Tensor, at: tuple[int, ...]) -> str:
    width = x.element_size()
    return f"{x.detach()[at].item()!r} (0x{int(bits[at]) & (1 << 8 * width) - 1:0{2 * width}x})"
