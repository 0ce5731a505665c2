"""What a mask function of transformers hides, as a number a token; refused where that cannot express it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError

__all__ = ["token_mask"]

MaskFunction = Callable[..., Tensor]
"""(batch, head, row, column) index tensors to a bool tensor: the row sees the column."""

_PLAIN = {"causal_mask_function": True, "bidirectional_mask_function": False}
"""Mask functions of transformers that hide nothing but the future, or nothing."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def token_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **other: Any,
) -> Tensor | None:
    """The mask that :func:`.transformers.attention_forward` takes.

    Args:
        batch_size, q_length, kv_length: sizes of the attention.
        q_offset, kv_offset: positions of the first query and key.
        mask_function: which columns a row sees, padding aside; None: no later ones.
        attention_mask: (batch, length) bool, False for padding; its last ``kv_length`` columns count.
        local_size: size of the sliding window or of a chunk, None for neither.
        use_vmap: the mask function is a user's own.
        device: where masks belong.

    Returns:
        None if every row is one sequence without padding, otherwise (batch, kv_length) int32: 0 for
        padding, or the number of the sequence in its row.

    Raises:
        InputError: the mask is neither causal nor bidirectional, with windows, chunks or sequences.
    """
    if use_vmap:
        raise InputError("or_mask_function and and_mask_function are not supported by 'dash' attention")
    causal = _PLAIN.get(getattr(mask_function, "__name__", "")) if mask_function is not None else True
    q_start = int(q_offset)
    if causal is not False and q_start + q_length != kv_offset + kv_length:
        raise InputError(
            f"queries end at position {q_start + q_length}, keys at {kv_offset + kv_length}: key caches of a "
            "fixed length are not supported by 'dash' attention"
        )
    sequences = None
    if causal is None:
        assert mask_function is not None
        rows = _Rows(mask_function, batch_size, q_start, q_length, kv_offset, kv_length, device)
        sequences = rows.sequences(local_size)
    if attention_mask is None:
        return sequences
    tokens = attention_mask[:, -kv_length:]
    if sequences is None:
        return None if bool(tokens.all()) else tokens.int()
    return sequences * tokens


@dataclass(frozen=True)
class _Rows:
    """Looks at the ends, the middle and the first column of what every row sees.

    transformers' own mask functions leave a row one interval, and others come with ``use_vmap``.
    """

    see: MaskFunction
    batch: int
    q_start: int
    q_length: int
    k_start: int
    k_length: int
    device: torch.device | str

    def sequences(self, local_size: int | None) -> Tensor | None:
        """(batch, k_length) int32, the number of every token's sequence; None if a row has only one."""
        row, end = self._row(), self.k_start + self.k_length
        if bool(self._sees(row + 1).any()):
            self._check_bidirectional(row, local_size)
            return None
        start = torch.full((self.batch, self.q_length), self.k_start, device=row.device)
        numbers = None
        if self.q_length == self.k_length:
            first = ~self._sees(row - 1)
            if local_size == 1:
                first = torch.zeros_like(first)
            first[:, 0] = True
            numbers = first.int().cumsum(1, dtype=torch.int32)
            start = torch.where(first, row, self.k_start).cummax(1).values
        left = start if local_size is None else torch.maximum(start, row - local_size + 1)
        first_column = torch.full_like(row, self.k_start)
        seen = self._sees(left) & self._sees((left + row) // 2) & self._sees(row) & ~self._sees(left - 1)
        seen &= ~self._sees(first_column) | (left == first_column)
        if not bool(seen.all()):
            raise InputError(
                "this model's mask is not causal with a sliding window, chunks or packed sequences "
                f"({self.q_length} queries up to position {end - 1}, local size {local_size}); 'dash' "
                "attention supports nothing else"
            )
        return None if numbers is None or int(numbers[:, -1].max()) == 1 else numbers

    def _check_bidirectional(self, row: Tensor, local_size: int | None) -> None:
        """A window to both sides, or nothing hidden at all."""
        reach = self.q_length + self.k_length if local_size is None else local_size
        first, last = self.k_start, self.k_start + self.k_length - 1
        left, right = (row - reach).clamp(min=first), (row + reach).clamp(max=last)
        seen = self._sees(left) & self._sees(right) & ~self._sees(left - 1) & ~self._sees(right + 1)
        if not bool(seen.all()):
            raise InputError("this model's bidirectional mask is not supported by 'dash' attention")

    def _row(self) -> Tensor:
        """(batch, q_length) positions of the queries."""
        row = torch.arange(self.q_start, self.q_start + self.q_length, device=self.device)
        return row.expand(self.batch, -1)

    def _sees(self, column: Tensor) -> Tensor:
        """(batch, q_length) bool: the row sees its column; no column outside of the keys is seen."""
        batch = torch.arange(self.batch, device=self.device)[:, None]
        inside = (column >= self.k_start) & (column < self.k_start + self.k_length)
        clamped = column.clamp(self.k_start, self.k_start + self.k_length - 1)
        seen = self.see(batch, batch.new_zeros(()), self._row(), clamped)
        return seen.expand(self.batch, self.q_length) & inside
