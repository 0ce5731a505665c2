"""What the functions over a cache of keys accept; see arguments.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .arguments import Asked, cast_to, check_aux, check_dtype, check_int32, check_tensor, spec_of
from .backends.base import AuxTensors, check_device
from .backends.cached import PAGE_SIZES, CachedTensors
from .errors import InputError
from .ops.autograd import needs_grad
from .ops.cached import beside, check_last_strides, numbers
from .ops.cached_values import check_tokens, rows_of_q
from .ops.lengths import check_longest
from .spec import AttentionSpec
from .values import check_dropout, check_flash_options, is_integer, kind_of, longest, short

__all__ = [
    "CheckedCache",
    "Kept",
    "Paged",
    "block_table_or",
    "check_cache_options",
    "check_kvcache",
    "check_paged",
    "paged_of",
]

NO_GRADIENT = (
    "a cache of keys has no backward: call it under torch.no_grad(), or with tensors that need no gradient"
)

_ROTARY = ("rotary_cos", "rotary_sin", "rotary_seqlens")

_OTHERS = {
    "alibi_slopes": "",
    "cu_seqlens_q": "; flash_attn_varlen_func has it, with seqused_k and page_table",
    "max_seqlen_q": "",
    "scheduler_metadata": "",
}
"""Other arguments of FlashAttention's function over a cache, of which only None is taken; with a hint."""

_QKV = tuple[Tensor, Tensor, Tensor]

_Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of a tensor, in elements."""


class Kept(NamedTuple):
    """Where the keys of ``flash_attn_with_kvcache`` lie, as the caller gave it."""

    cache_seqlens: int | Tensor | None
    cache_batch_idx: Tensor | None
    page_table: Tensor | None


class Paged(NamedTuple):
    """How the sequences of a call with pages lie, as the caller gave it."""

    cu_seqlens_q: Tensor | None
    seqused_k: Tensor
    page_table: Tensor
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None


class CheckedCache(NamedTuple):
    """A checked call over a cache of keys.

    Attributes:
        tensors: on one device. Their lengths count tokens that are appended, too.
        aux: tensors beside them.
        spec: what is asked.
        longest_q: no sequence of packed q has more rows; -1: unknown.
        new: keys and values to append, None: none.
        before: (batch,) int32, tokens in the cache before them.
    """

    tensors: CachedTensors
    aux: AuxTensors
    spec: AttentionSpec
    longest_q: int = -1
    new: tuple[Tensor, Tensor] | None = None
    before: Tensor | None = None


def check_kvcache(
    qkv: _QKV, new: Sequence[Tensor | None], kept: Kept, aux: AuxTensors, asked: Asked
) -> CheckedCache:
    """Check a call of ``flash_attn_with_kvcache``. ``new``: k and v that are appended."""
    q, k_cache, v_cache = qkv
    _check_caches(q, k_cache, v_cache, 4)
    _refuse_transformed(("k_cache", "v_cache", "k", "v", *Kept._fields), (k_cache, v_cache, *new, *kept))
    compiling = torch.compiler.is_compiling()
    q, *cast = _cast(k_cache, v_cache, q, *new)
    checked_new = _checked_new(q, k_cache, v_cache, *cast)
    check_aux(aux, q, q.shape[0])
    spec = spec_of(q, asked, aux)
    _refuse_gradients(q, k_cache, v_cache, *cast, *aux)
    table = _table(q, k_cache, kept.page_table, kept.cache_batch_idx)
    contiguous, more = kept.page_table is None, 0 if checked_new is None else checked_new[0].shape[1]
    room = k_cache.shape[1] * table.shape[1]
    before, known = _lengths(q, kept.cache_seqlens, room, None if checked_new is None else more)
    if not compiling:
        check_tokens(
            "cache_seqlens", known, more, table, k_cache, contiguous=contiguous,
            rows=q.shape[1], left=spec.mask.sides[0],
        )  # fmt: skip
        if checked_new is not None:
            check_last_strides((k_cache, v_cache))
            _check_apart((k_cache, v_cache), new)
            (q,) = beside((k_cache, v_cache), q)
            if aux.learnable_sink is not None:
                aux = aux._replace(learnable_sink=beside((k_cache, v_cache), aux.learnable_sink)[0])
    before, table = (x.to(q.device).contiguous() for x in (before, table))
    tensors = CachedTensors(q, k_cache, v_cache, before + more if more else before, table)
    return CheckedCache(tensors, aux, spec, new=checked_new, before=before)


def paged_of(
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, seqused_k: Tensor | None, page_table: Tensor,
    max_seqlen_q: Any, max_seqlen_k: Any,
) -> Paged:  # fmt: skip
    """Where the sequences of ``flash_attn_varlen_func`` lie if it has a page table."""
    if seqused_k is None or cu_seqlens_k is not None:
        given = f"{kind_of(seqused_k)} and {kind_of(cu_seqlens_k)}"
        raise InputError(f"page_table needs seqused_k and no cu_seqlens_k, got {given}")
    return Paged(cu_seqlens_q, seqused_k, page_table, max_seqlen_q, max_seqlen_k)


def check_paged(qkv: _QKV, paged: Paged, aux: AuxTensors, asked: Asked) -> CheckedCache:
    """Check a call of ``flash_attn_varlen_func`` with a page table."""
    q, k, v = qkv
    cu_seqlens_q, seqused_k, page_table, longest_q, longest_k = paged
    for name, value in aux._asdict().items():
        if value is not None and name != "learnable_sink":
            raise InputError(f"{name} is not supported with page_table")
    if check_dropout(asked.dropout_p):
        raise InputError(f"dropout_p {asked.dropout_p!r:.40} is not supported with page_table")
    _check_caches(q, k, v, 4 if cu_seqlens_q is None else 3, names=("k", "v"))
    _refuse_transformed(("k", "v", *Paged._fields), (k, v, *paged))
    (q,) = _cast(k, v, q, names=("k", "v"))
    batch = q.shape[0]
    if cu_seqlens_q is not None:
        check_int32("cu_seqlens_q", cu_seqlens_q, q.device, ("batch + 1",), least=1)
        batch = cu_seqlens_q.shape[0] - 1
    check_int32("seqused_k", seqused_k, q.device, (batch,))
    check_aux(aux, q, batch)
    spec = spec_of(q, asked, aux)
    _refuse_gradients(q, k, v, *aux)
    table = _table(q, k, page_table, None, batch)
    most, most_keys = longest("max_seqlen_q", longest_q), longest("max_seqlen_k", longest_k)
    if not torch.compiler.is_compiling():
        check_tokens(
            "seqused_k", seqused_k, 0, table, k, contiguous=False,
            rows=rows_of_q(q, cu_seqlens_q, most), left=spec.mask.sides[0],
        )  # fmt: skip
        if most_keys >= 0 and seqused_k.device.type == "cpu":
            check_longest("k", most_keys, max(seqused_k.tolist(), default=0))
    seqused_k, table = (x.to(q.device).contiguous() for x in (seqused_k, table))
    if cu_seqlens_q is not None:
        cu_seqlens_q = cu_seqlens_q.to(q.device).contiguous()
    return CheckedCache(CachedTensors(q, k, v, seqused_k, table, cu_seqlens_q), aux, spec, most)


def block_table_or(page_table: Tensor | None, options: dict[str, Any]) -> Tensor | None:
    """The table under either of its names, taken from the other options."""
    other = options.pop("block_table", None)
    if other is not None and page_table is not None:
        raise InputError("give page_table or block_table, got both")
    return page_table if other is None else other


def check_cache_options(options: dict[str, Any]) -> None:
    """As ``check_flash_options``, of ``flash_attn_with_kvcache``."""
    for name in _ROTARY:
        if options.get(name) is not None:
            raise InputError(f"{name} is not supported: rotate q and k before the call")
    for name, hint in _OTHERS.items():
        if options.get(name) is not None:
            raise InputError(f"{name}={short(options[name])} is not supported, only None{hint}")
    # Interleaved or not asks for nothing without the others.
    known = {*_ROTARY, "rotary_interleaved", *_OTHERS}
    others = {name: x for name, x in options.items() if name not in known}
    check_flash_options("flash_attn_with_kvcache", others)


def _check_caches(
    q: Tensor, k: Tensor, v: Tensor, dims_q: int, names: tuple[str, str] = ("k_cache", "v_cache")
) -> None:
    for name, x, dims in (("q", q, dims_q), (names[0], k, 4), (names[1], v, 4)):
        check_tensor(name, x, q, (dims,), f"{dims} dimensions")
    check_device(q.device)
    if k.shape[3] != q.shape[-1]:
        raise InputError(f"{names[0]} has head_dim {k.shape[3]}, q has {q.shape[-1]}")
    if k.shape[:3] != v.shape[:3]:
        raise InputError(
            f"{names[0]} has shape {tuple(k.shape)}, {names[1]} has {tuple(v.shape)}: "
            "only head_dim may differ"
        )


def _cast(
    k: Tensor, v: Tensor, q: Tensor, *new: Tensor | None, names: tuple[str, str] = ("k_cache", "v_cache")
) -> list[Any]:
    """q and new keys and values as autocast has them. A cache is not cast: it must have that dtype."""
    device, why = q.device.type, ""
    others: list[Any] = [*new]
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, *others = (cast_to(dtype, x) if isinstance(x, Tensor) else x for x in (q, *others))
        why = f" (under autocast to {dtype}, which does not cast a cache)"
    for name, x in (("q", q), (names[0], k), (names[1], v)):
        check_dtype(name, x)
        if x.dtype != q.dtype:
            raise InputError(f"{name} has dtype {x.dtype}, q has {q.dtype}{why}")
    return [q, *others]


def _checked_new(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    if k is None and v is None:
        return None
    if k is None or v is None:
        raise InputError(f"give k and v, or neither; got {kind_of(k)} and {kind_of(v)}")
    rows = None
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        check_tensor(name, x, q, (4,), "4 dimensions")
        if (x.shape[0], *x.shape[2:]) != (q.shape[0], *cache.shape[2:]):
            wanted = f"({q.shape[0]}, seqlen_new, {cache.shape[2]}, {cache.shape[3]})"
            raise InputError(f"{name} must have shape {wanted}, got {tuple(x.shape)}")
        if x.dtype != q.dtype:
            raise InputError(f"{name} has dtype {x.dtype}, q has {q.dtype}")
        rows = x.shape[1] if rows is None else rows
        if x.shape[1] != rows:
            raise InputError(f"v has {x.shape[1]} new tokens, k has {rows}")
    return k, v


def _check_apart(caches: Sequence[Tensor], new: Sequence[Tensor | None]) -> None:
    """Caches have elements of their own, or are columns of the same rows, and so are the new keys and values.

    Raises:
        InputError: neither is so, and new values would overwrite keys.
    """
    k_cache, v_cache = caches
    if k_cache.untyped_storage().data_ptr() != v_cache.untyped_storage().data_ptr():
        return
    layouts = [(tuple(x.shape), x.stride()) for x in caches]
    size, distance = k_cache.element_size(), v_cache.data_ptr() - k_cache.data_ptr()
    if not _share_elements(*layouts, size, distance):
        return
    columns = distance // size
    span = max(k_cache.shape[3], columns + v_cache.shape[3]) - min(0, columns)
    in_one_row = all(n == 1 or stride >= span for n, stride in zip(k_cache.shape[:3], k_cache.stride()))
    k, v = (x for x in new if x is not None)
    same_way = _are_alike(k_cache, v_cache) and _are_alike(k, v) and v.data_ptr() - k.data_ptr() == distance
    if not (in_one_row and same_way):
        raise InputError(
            "k_cache and v_cache share memory, k and v do not in the same way: v would overwrite keys"
        )


def _are_alike(a: Tensor, b: Tensor) -> bool:
    """Whether rows of two tensors with equally many are equally far apart."""
    return all(n == 1 or i == j for n, i, j in zip(a.shape[:3], a.stride(), b.stride()))


@lru_cache
def _share_elements(a: _Layout, b: _Layout, size: int, distance: int) -> bool:
    """Whether two tensors have an element in common.

    ``size``: bytes of an element. ``distance``: bytes from where a begins to where b does.
    """
    far = 2**40  # no address is looked at

    def array(layout: _Layout, address: int) -> NDArray[Any]:
        shape, strides = layout
        described = {
            "shape": shape, "strides": tuple(size * n for n in strides), "typestr": f"|V{size}",
            "data": (address, True), "version": 3,
        }  # fmt: skip
        return np.asarray(SimpleNamespace(__array_interface__=described))

    return np.shares_memory(array(a, far), array(b, far + distance))


def _refuse_gradients(*tensors: Tensor | None) -> None:
    if not torch.compiler.is_compiling() and needs_grad(*tensors):
        raise InputError(NO_GRADIENT)


def _refuse_transformed(names: Sequence[str], given: Sequence[object]) -> None:
    """Values of these are read, or are written to."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return
    for name, x in zip(names, given):
        if isinstance(x, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x):
            raise InputError(f"{name} is under a transform of torch.func: over a cache of keys only q may be")


def _table(
    q: Tensor, cache: Tensor, pages: Tensor | None, places: Tensor | None, batch: int | None = None
) -> Tensor:
    """The page table; of a contiguous cache the place of each sequence."""
    batch = q.shape[0] if batch is None else batch
    if pages is not None:
        if places is not None:
            raise InputError("cache_batch_idx is not supported with page_table, which says the same")
        check_int32("page_table", pages, q.device, (batch, "any"))
        if cache.shape[1] not in PAGE_SIZES:
            sizes = ", ".join(map(str, PAGE_SIZES))
            raise InputError(f"pages must have {sizes} tokens, got pages of shape {tuple(cache.shape[1:])}")
        return pages
    if places is not None:
        check_int32("cache_batch_idx", places, q.device, (batch,))
        return places[:, None]
    if cache.shape[0] != batch:
        raise InputError(f"k_cache has batch {cache.shape[0]}, q has {batch}: give cache_batch_idx")
    return numbers(batch, q)[:, None]


def _lengths(q: Tensor, given: object, room: int, more: int | None) -> tuple[Tensor, Tensor]:
    """Tokens in the cache before the call: a tensor to compute with, and one to check, on the CPU where the
    host knows them. ``more``: new ones behind them; None: none are given."""
    if given is None:
        if more is not None:
            raise InputError("k and v need cache_seqlens, which says where they go; got None")
        given = room
    if isinstance(given, Tensor):
        check_int32("cache_seqlens", given, q.device, (q.shape[0],))
        return given, given
    if not is_integer(given):
        raise InputError(f"cache_seqlens must be None, an integer or a tensor, got {short(given)}")
    if not 0 <= given <= room:
        raise InputError(f"cache_seqlens is {given}, a sequence has room for 0 to {room} keys")
    if more and given + more > room:
        raise InputError(
            f"cache_seqlens is {given}, with {more} new ones; a sequence has room for {room} keys"
        )
    known = torch.full((q.shape[0],), int(given), dtype=torch.int32, device="cpu")
    return torch.full_like(known, int(given), device=q.device), known
