"""What a mask function of transformers hides, as windows, sequences and padding; all else is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from ..errors import InputError
from ..ops.spread import Spread, current_spread, told
from .padding import MaskPacking, packing_of
from .positions import Sizes, separate
from .spread_rows import Read, check_read

__all__ = ["NotATensorError", "TokenMask", "isolate", "token_mask"]

MaskFunction = Callable[..., Tensor]
"""(batch, head, row, column) index tensors to a bool tensor: the row sees the column."""

_PLAIN = {"causal_mask_function": True, "bidirectional_mask_function": False}
"""Mask functions of transformers that hide nothing but the future, or nothing."""


class NotATensorError(InputError, AttributeError):
    """A model used a :class:`TokenMask` as the tensor that other implementations have in its place."""


def _refuse(used: str) -> NoReturn:
    raise NotATensorError(
        f"this model does its own attention ({used} of its mask): it does not call 'dash' attention, or not "
        "only; choose another attn_implementation for it, 'eager' or 'sdpa'"
    )


def _refused(name: str) -> Callable[..., NoReturn]:
    def operator(self: TokenMask, *_: Any) -> NoReturn:
        _refuse(name)

    return operator


@dataclass(frozen=True, eq=False)
class TokenMask:
    """What the queries of a batch see; :func:`.transformers.attention_forward` takes it. Not a tensor.

    A model that adds it to scores, slices it or asks for its shape does attention by itself and would go
    wrong with anything that looks like a mask: every such use raises :class:`NotATensorError`.

    Attributes:
        batch, q_length, kv_length: sizes of the attention.
        kv_places: how many keys a layer passes: ``kv_length``, or more where the cache has places for later
            ones. Nobody sees those.
        causal: a row sees no later columns.
        window: columns that a row sees to its left and right, -1: unbounded.
        local_size: size of the window or of a chunk as the model gave it, None for neither. ``window`` is
            unbounded where it hides nothing. With less than 1 no layer can use the mask.
        padded: some token of ``attention_mask`` is padding.
        packing: rows and bounds without padding; None if every row is one sequence without any.
        numbers: (batch, kv_length) integers on the device of the mask, 0 for padding, otherwise the number of
            the key's sequence; None where ``packing`` is.
        spread: rows are those of one rank, as the context of ``dash_attn.distributed`` said when the mask was
            made; sizes are those of its rows, ``window`` is that of the whole sequences. None: they are all.
    """

    batch: int
    q_length: int
    kv_length: int
    kv_places: int
    causal: bool
    window: tuple[int, int]
    local_size: int | None
    padded: bool
    packing: MaskPacking | None
    numbers: Tensor | None = None
    spread: Spread | None = None

    @property
    def ndim(self) -> int:
        """4, as of any mask that is ready for use: ``generate`` makes masks before it calls the model, and
        transformers asks whether what the model gets is (batch, length) instead."""
        return 4

    @property
    def sizes(self) -> Sizes:
        """Rows of the batch, and queries and keys per row."""
        return Sizes(self.batch, self.q_length, self.kv_length)

    @property
    def passed(self) -> Sizes:
        """As ``sizes``, with the keys that a layer passes."""
        return self.sizes._replace(seqlen_k=self.kv_places)

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(f".{name}")

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> NoReturn:
        _refuse(getattr(function, "__name__", str(function)))

    __getitem__ = _refused("a slice")
    __bool__ = _refused("the truth")
    __neg__ = __invert__ = _refused("a negation")
    __add__ = __radd__ = __sub__ = __rsub__ = _refused("a sum")
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refused("a product")
    __and__ = __rand__ = __or__ = __ror__ = _refused("a conjunction")
    __lt__ = __le__ = __gt__ = __ge__ = _refused("a comparison")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (int, float)):
            _refuse("a comparison")
        return self is other

    __hash__ = object.__hash__


@torch.compiler.disable  # type: ignore[untyped-decorator]
@told
def token_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | TokenMask | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **other: Any,
) -> TokenMask:
    """The mask that :func:`.transformers.attention_forward` takes, in the signature of transformers.

    Args:
        batch_size, q_length, kv_length: sizes of the attention. Under a causal mask, keys behind the last
            query are places of a cache for later keys.
        q_offset, kv_offset: positions of the first query and key.
        mask_function: which columns a row sees, padding aside; None: no later ones.
        attention_mask: (batch, length) bool, False for padding; column p is the key at position p. Columns
            behind the last key are ignored. Or the mask that an earlier call made for the same attention,
            which is returned.
        local_size: size of the sliding window or of a chunk, None for neither. A mask of less than 1 is an
            error of the layer that uses it.
        use_vmap: the mask function is a user's own, or a model's that adds to transformers'.
        device: where masks belong.

    Raises:
        InputError: the mask is neither causal nor bidirectional, with windows, chunks or sequences; it is
            bidirectional beside places for later keys; or ``attention_mask`` does not cover the keys.
    """
    if use_vmap:
        raise InputError(
            "'dash' attention does not support or_mask_function and and_mask_function: somebody, or the "
            "model itself (for images in a prompt, for instance), adds to what transformers' own masks show"
        )
    if isinstance(attention_mask, TokenMask):
        return _made_before(attention_mask, Sizes(batch_size, q_length, kv_length), local_size)
    if local_size is not None and local_size < 1:  # models make masks that none of their layers uses
        sizes = (batch_size, q_length, kv_length, kv_length)
        return TokenMask(*sizes, True, (-1, -1), local_size, False, None, spread=current_spread())
    causal = _PLAIN.get(getattr(mask_function, "__name__", "")) if mask_function is not None else True
    places, q_end = kv_length, int(q_offset) + q_length
    if causal is not False:
        kv_length = q_end - kv_offset
        if not 0 <= kv_length <= places:
            raise InputError(
                f"queries end at position {q_end}, but the keys of a causal mask are at {kv_offset} to "
                f"{kv_offset + places - 1}"
            )
    band, sequences = _Band(causal is not False), None
    if causal is None:
        assert mask_function is not None
        at = (mask_function, batch_size, q_length, kv_offset)
        if kv_length < places:
            _Columns(*at, places, torch.device(device)).check_hidden_from(kv_length)
        seen = _Columns(*at, kv_length, torch.device(device))
        band, sequences = seen.found(local_size)
    tokens = _tokens(attention_mask, batch_size, kv_offset, kv_length)
    if (spread := current_spread()) is not None:
        passed = Sizes(batch_size, q_length, places)
        config = other.get("config")
        window = check_read(
            spread, Read(passed, sequences, tokens is not None, local_size, band.causal, config)
        )
        return TokenMask(*passed, places, band.causal, window, local_size, False, None, spread=spread)
    numbers = tokens if sequences is None else sequences if tokens is None else sequences * tokens
    packing = None
    if numbers is not None:
        keep_queries = not band.causal and band.window == (-1, -1)
        packing = packing_of(numbers, q_length, keep_queries=keep_queries, device=device)
        numbers = numbers.to(device)
    sizes = (batch_size, q_length, kv_length, places)
    return TokenMask(*sizes, band.causal, band.window, local_size, tokens is not None, packing, numbers)


class _Isolated(NamedTuple):
    """What :func:`isolate` found for a mask; ``mask`` is None if that stands."""

    positions: ref[Tensor]
    version: int
    mask: TokenMask | None


_ISOLATED: WeakKeyDictionary[TokenMask, _Isolated] = WeakKeyDictionary()
"""transformers makes masks anew for every forward, so an entry lives as long as a forward."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def isolate(mask: TokenMask, position_ids: Tensor) -> TokenMask:
    """The mask with the sequences that ``position_ids`` tell apart, found once for all layers of a forward.

    Args:
        mask: what the queries see so far.
        position_ids: (batch or 1, q_length) or (q_length,) integers.

    Raises:
        InputError: as :func:`.separate`; or the mask is bidirectional and has not all the sequences.
    """
    version = -1 if position_ids.is_inference() else position_ids._version
    known = _ISOLATED.get(mask)
    if known is None or known.version != version or known.positions() is not position_ids:
        numbers = separate(position_ids, mask.numbers, mask.sizes)
        found = None if numbers is None else _with_numbers(mask, numbers, position_ids.device)
        known = _ISOLATED[mask] = _Isolated(ref(position_ids), version, found)
    return mask if known.mask is None else known.mask


def _with_numbers(mask: TokenMask, numbers: Tensor, device: torch.device) -> TokenMask:
    """The mask for other sequences; a window that hides nothing of them is none."""
    if not mask.causal:
        raise InputError(
            "position_ids pack several sequences into a row under a bidirectional mask: 'dash' attention "
            "needs cu_seq_lens_q and cu_seq_lens_k for that"
        )
    packing = packing_of(numbers, mask.q_length, device=device)
    longest = int(packing.cu_seqlens_k.diff().max())
    hides = mask.local_size is None or longest > mask.local_size
    window = mask.window if hides else (-1, -1)
    return replace(mask, window=window, packing=packing, numbers=numbers.to(device))


def _made_before(mask: TokenMask, sizes: Sizes, local_size: int | None) -> TokenMask:
    if (mask.passed, mask.local_size) != (sizes, local_size):
        raise InputError(
            f"attention_mask was made for (batch, queries, keys) {tuple(mask.passed)} and window "
            f"{mask.local_size}, this layer has {tuple(sizes)} and {local_size}"
        )
    return mask


def _tokens(attention_mask: Tensor | None, batch: int, kv_offset: int, kv_length: int) -> Tensor | None:
    """(batch, kv_length) int32 on the CPU, 0 for padding; None if there is none."""
    if attention_mask is None:
        return None
    size, end = tuple(attention_mask.shape), kv_offset + kv_length
    if len(size) != 2 or size[0] != batch or size[1] < end:
        raise InputError(
            f"attention_mask has shape {size}, but there are {batch} rows and keys up to position {end}: "
            "give it a column for every key, those of a cache among them"
        )
    tokens = attention_mask[:, kv_offset:end].cpu() != 0
    return None if bool(tokens.all()) else tokens.int()


@dataclass(frozen=True)
class _Band:
    """``causal`` and ``window`` of a :class:`TokenMask`."""

    causal: bool
    window: tuple[int, int] = (-1, -1)


@dataclass(frozen=True)
class _Columns:
    """Asks a mask function what the rows of all keys see, those of earlier calls among them.

    It looks at the ends, the middle and the first column: transformers' own mask functions leave a row one
    interval, and others come with ``use_vmap``.
    """

    see: MaskFunction
    batch: int
    q_length: int
    k_start: int
    k_length: int
    device: torch.device

    def found(self, local_size: int | None) -> tuple[_Band, Tensor | None]:
        """The band, and (batch, k_length) int32 on the CPU: the number of every key's sequence.

        None in place of the numbers if a row has only one sequence.
        """
        row = torch.arange(self.k_start, self.k_start + self.k_length, device=self.device)
        row = row.expand(self.batch, -1)
        if bool(self._sees(row, row + 1)[:, -self.q_length :].any()):
            return self._bidirectional(row[:, -self.q_length :], local_size), None
        first = ~self._sees(row, row - 1)
        if local_size == 1:
            first = torch.zeros_like(first)
        first[:, 0] = True
        numbers = first.int().cumsum(1, dtype=torch.int32)
        start = torch.where(first, row, self.k_start).cummax(1).values
        left = start if local_size is None else torch.maximum(start, row - local_size + 1)
        first_column = torch.full_like(row, self.k_start)
        seen = self._sees(row, left) & self._sees(row, (left + row) // 2) & self._sees(row, row)
        seen &= ~self._sees(row, left - 1) & (~self._sees(row, first_column) | (left == first_column))
        as_expected, windowed = torch.stack([seen.all(), (left > start).any()]).tolist()
        if not as_expected:
            raise InputError(
                "this model's mask is not causal with a sliding window, chunks or packed sequences "
                f"({self.q_length} queries up to position {self.k_start + self.k_length - 1}, local size "
                f"{local_size}); 'dash' attention supports nothing else"
            )
        numbers = numbers.cpu()
        window = (local_size - 1, 0) if windowed and local_size is not None else (-1, -1)
        return _Band(True, window), numbers if int(numbers.max()) > 1 else None

    def check_hidden_from(self, length: int) -> None:
        """Raise InputError if a query sees a key behind the first ``length`` ones, the last of which is its
        own or a later query's."""
        row = torch.arange(self.k_start + length - self.q_length, self.k_start + length, device=self.device)
        row = row.expand(self.batch, -1)
        later = torch.full_like(row, self.k_start + length)
        if bool((self._sees(row, row + 1) | self._sees(row, later)).any()):
            raise InputError(
                f"this model's mask shows keys behind the query, and its cache has places for later keys "
                f"({length} of {self.k_length} are used): 'dash' attention does not support that"
            )

    def _bidirectional(self, row: Tensor, local_size: int | None) -> _Band:
        """A window to both sides, or nothing hidden at all."""
        reach = self.q_length + self.k_length if local_size is None else local_size
        first, last = self.k_start, self.k_start + self.k_length - 1
        left, right = (row - reach).clamp(min=first), (row + reach).clamp(max=last)
        seen = self._sees(row, left) & self._sees(row, right)
        seen &= ~self._sees(row, left - 1) & ~self._sees(row, right + 1)
        if not bool(seen.all()):
            raise InputError(
                "this model's mask shows some later keys, but not all of them, nor those of a window to both "
                "sides: 'dash' attention does not support that"
            )
        return _Band(False, (-1, -1) if reach >= self.k_length - 1 else (reach, reach))

    def _sees(self, row: Tensor, column: Tensor) -> Tensor:
        """(batch, rows) bool: the row sees its column; no column outside of the keys is seen."""
        batch = torch.arange(self.batch, device=self.device)[:, None]
        inside = (column >= self.k_start) & (column < self.k_start + self.k_length)
        clamped = column.clamp(self.k_start, self.k_start + self.k_length - 1)
        seen = self.see(batch, batch.new_zeros(()), row, clamped)
        return seen.expand(row.shape) & inside
