"""What a call would do: whether it is supported, its plan, and what names its numerics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from .arguments import Asked, Packing, Used, aux_of, check_call
from .backends.base import AuxTensors
from .cache_arguments import (
    CheckedCache,
    Kept,
    block_table_or,
    check_cache_options,
    check_kvcache,
    check_paged,
    paged_of,
)
from .dispatch import QKV, backend_of_nothing, find_call, is_empty
from .errors import DashError, InputError
from .ops.cached import cached_call
from .schedule import Numerics, Plan, Schedule
from .values import Window, check_flag, check_flash_options, kind_of, short

__all__ = ["Fingerprints", "Support", "fingerprints", "is_supported", "plan_for"]


@dataclass(frozen=True)
class Support:
    """What :func:`is_supported` found; true in a condition if the call would work.

    Attributes:
        ok: True if the function accepts these arguments.
        reason: the message of the error otherwise, empty if ok.
        backend: what would run it ("cpu", "sm90" or "triton"), None if not ok.
    """

    ok: bool
    reason: str = ""
    backend: str | None = None

    def __bool__(self) -> bool:
        return self.ok


def is_supported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    *,
    causal: bool = False,
    window: Window = None,
    window_size: Window = None,
    softmax_scale: float | None = None,
    policy: str | Numerics | Schedule = "auto",
    deterministic: bool = True,
    return_lse: bool = False,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    new: tuple[Tensor, Tensor] | None = None,
    backend: str = "auto",
    q_segment: int | None = None,
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    row_starts: Tensor | None = None,
    row_ends: Tensor | None = None,
    **flash_options: Any,
) -> Support:
    """Whether a public function accepts these arguments, with the reason if not; it does not raise.

    With ``cu_seqlens_q``, ``cu_seqlens_k`` or ``seqused_k``, with ``page_table`` or not, it speaks of
    :func:`dash_attn.flash_attn_varlen_func`. With ``cache_seqlens``, ``cache_batch_idx``, ``new`` or
    ``page_table`` alone it speaks of :func:`dash_attn.flash_attn_with_kvcache`: then k and v are the caches,
    and ``new`` is (k, v), which would be appended. Nothing is written. (Of a cache that is full, name its
    length as ``cache_seqlens``.)

    >>> import torch
    >>> q = torch.zeros(1, 8, 4, 64)
    >>> is_supported(q, q[:, :, :3], q[:, :, :3]).reason
    'heads (4) must be a multiple of kv_heads (3)'
    >>> pages, table = torch.zeros(9, 16, 4, 64), torch.zeros(1, 5, dtype=torch.int32)
    >>> is_supported(q, pages, pages, cache_seqlens=81, page_table=table).reason
    'cache_seqlens is 81, a sequence has room for 0 to 80 keys'
    >>> is_supported(q, pages, pages, cache_seqlens=80, page_table=table).backend
    'cpu'
    """
    lengths = _Lengths(cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k)
    try:
        check_flag("return_lse", return_lse)
        kept = Kept(cache_seqlens, cache_batch_idx, block_table_or(page_table, flash_options))
        window = _one_window(window, window_size)
        asked = Asked(
            causal=causal, window=window, softmax_scale=softmax_scale, policy=policy,
            deterministic=deterministic, backend=backend, softcap=softcap, dropout_p=dropout_p,
            q_segment=q_segment,
        )  # fmt: skip
        aux = aux_of(
            q, learnable_sink=learnable_sink, alibi_slopes=alibi_slopes, dropout_p=dropout_p,
            dropout_seed=dropout_seed, row_starts=row_starts, row_ends=row_ends,
        )  # fmt: skip
        if _is_over_cache(kept, new, lengths):
            # There it is another name of return_lse.
            check_flag("return_softmax_lse", flash_options.pop("return_softmax_lse", False))
            check_cache_options(_beyond_a_cache(lengths, asked, aux, dropout_seed) | flash_options)
            if new is not None and not (isinstance(new, (tuple, list)) and len(new) == 2):
                raise InputError(f"new must be None or (k, v), got {short(new)}")
            checked = check_kvcache((q, k, v), (None, None) if new is None else new, kept, aux, asked)
            return Support(True, backend=_backend_over_cache(checked))
        check_flash_options("is_supported", flash_options)
        found = _backend_of((q, k, v), lengths, kept.page_table, aux, asked)
    except (DashError, TypeError) as error:
        return Support(False, str(error))
    return Support(True, backend=found)


class _Lengths(NamedTuple):
    """Where sequences lie, as the caller gave it, and before it is known which function is meant."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None = None
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None

    @property
    def are_given(self) -> bool:
        return any(x is not None for x in (self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_k))

    def packing(self) -> Packing | Used | None:
        """As the public functions have it; None: tensors are dense.

        Raises:
            InputError: what belongs together is not all there.
        """
        if not self.are_given:
            return None
        bounds_q, bounds_k = self.cu_seqlens_q, self.cu_seqlens_k
        if self.seqused_k is not None:
            return Used(bounds_q, bounds_k, self.seqused_k, self.max_seqlen_q, self.max_seqlen_k)
        if bounds_q is None or bounds_k is None:
            given = f"{kind_of(bounds_q)} and {kind_of(bounds_k)}"
            raise InputError(f"give cu_seqlens_q and cu_seqlens_k, or neither; got {given}")
        return Packing(bounds_q, bounds_k, self.max_seqlen_q, self.max_seqlen_k)


def _is_over_cache(kept: Kept, new: object, lengths: _Lengths) -> bool:
    """Whether the arguments are those of ``flash_attn_with_kvcache``."""
    paged = kept.page_table is not None and not lengths.are_given
    return paged or any(x is not None for x in (kept.cache_seqlens, kept.cache_batch_idx, new))


def _beyond_a_cache(
    lengths: _Lengths, asked: Asked, aux: AuxTensors, dropout_seed: int | Tensor | None
) -> dict[str, object]:
    """What other functions are asked for, by name: ``flash_attn_with_kvcache`` has no such arguments."""
    plain = Asked()._asdict()
    given = lengths._asdict() | aux._asdict() | {"dropout_seed": dropout_seed}
    given |= {name: x for name, x in asked._asdict().items() if x != plain[name]}
    taken = ("causal", "window", "softmax_scale", "backend", "softcap", "learnable_sink")
    return {name: x for name, x in given.items() if x is not None and name not in taken}


def _backend_over_cache(checked: CheckedCache) -> str:
    return cached_call(checked.tensors, checked.spec, checked.longest_q).backend.name


def _backend_of(qkv: QKV, lengths: _Lengths, page_table: Tensor | None, aux: AuxTensors, asked: Asked) -> str:
    if page_table is not None:
        paged = paged_of(page_table=page_table, **lengths._asdict())
        return _backend_over_cache(check_paged(qkv, paged, aux, asked))
    checked = check_call(*qkv, lengths.packing(), asked, aux)
    if is_empty(checked):
        return backend_of_nothing(checked)
    return find_call(checked).backend.name


def plan_for(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    *,
    causal: bool = False,
    window: Window = None,
    window_size: Window = None,
    softmax_scale: float | None = None,
    policy: str | Numerics | Schedule = "auto",
    deterministic: bool = True,
    return_lse: bool = False,
    backend: str = "auto",
    q_segment: int | None = None,
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    row_starts: Tensor | None = None,
    row_ends: Tensor | None = None,
    **flash_options: Any,
) -> Plan:
    """The backward's plan of a call with these arguments. Nothing runs, and no value of q, k and v is read.

    It is that of the mask, whatever ``row_starts`` and ``row_ends`` hide. They, ``softmax_scale`` and
    ``softcap`` may lead to another backend.

    Args:
        q, k, v: as in :func:`dash_attn.attention`; packed, as in :func:`dash_attn.flash_attn_varlen_func`,
            where ``cu_seqlens`` are given.
        window, window_size: two names of one argument.
        flash_options: as in :func:`dash_attn.flash_attn_func`.

    All others are those of these functions, so that the arguments of a call that has a backward can be passed
    on.

    Returns:
        The proven plan. Its ``policy`` can be named in a call unless it is one of your own, its
        ``fingerprint`` names its numerics.

    Raises:
        InputError, UnsupportedMaskError: as :func:`dash_attn.attention`; also for sequences longer than
            ``q_segment``, which have several plans, and for a batch without sequences, which has none.

    >>> import torch
    >>> q = torch.zeros(1, 512, 2, 64)
    >>> plan_for(q, q, q, causal=True)
    Plan(spt, 8 items, 20 tasks)
    """
    check_flag("return_lse", return_lse)
    check_flash_options("plan_for", flash_options)
    asked = Asked(
        causal=causal, window=_one_window(window, window_size), softmax_scale=softmax_scale, policy=policy,
        deterministic=deterministic, backend=backend, softcap=softcap, dropout_p=dropout_p,
        q_segment=q_segment,
    )  # fmt: skip
    aux = aux_of(
        q, learnable_sink=learnable_sink, alibi_slopes=alibi_slopes, dropout_p=dropout_p,
        dropout_seed=dropout_seed, row_starts=row_starts, row_ends=row_ends,
    )  # fmt: skip
    lengths = _Lengths(cu_seqlens_q, cu_seqlens_k, None, max_seqlen_q, max_seqlen_k)
    call = find_call(check_call(q, k, v, lengths.packing(), asked, aux))
    if call.parts:
        raise InputError(
            f"the backward is cut into segments of {call.spec.rows_per_segment} rows of q, each with a plan: "
            "give a larger q_segment for a plan of whole sequences; fingerprints() names all of them"
        )
    return call.plan


class Fingerprints(NamedTuple):
    """What names the numerics of a call: two runs with the same three round in the same places.

    Attributes:
        forward: of out and lse: SHA-256 of the numerics (``dash_attn.schedule.ForwardNumerics``).
        backward: of the gradients: SHA-256 of the plan's numerics (``Plan.fingerprint``), or of those of all
            segments of long sequences. With "triton" both are hashed once more, with the version of its
            kernels (``TRITON_VERSION``), and with a softcap on "sm90" with that of its tanh
            (``SOFTCAP_VERSION``).
        backend: its name. Two backends may have the same two numerics, and still round otherwise.
    """

    forward: str
    backward: str
    backend: str


def fingerprints(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    *,
    causal: bool = False,
    window: Window = None,
    window_size: Window = None,
    softmax_scale: float | None = None,
    policy: str | Numerics | Schedule = "auto",
    deterministic: bool = True,
    return_lse: bool = False,
    backend: str = "auto",
    q_segment: int | None = None,
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    row_starts: Tensor | None = None,
    row_ends: Tensor | None = None,
    **flash_options: Any,
) -> Fingerprints:
    """What names the numerics of a call with these arguments. Nothing runs. Log it: then a later run can tell
    whether it sums alike.

    Args and errors are those of :func:`plan_for`, but that sequences longer than ``q_segment`` have
    fingerprints, too.

    Returns:
        The forward's, the backward's, and the backend: :class:`Fingerprints`.

    >>> import torch
    >>> q = torch.zeros(1, 512, 2, 64)
    >>> names = fingerprints(q, q, q, causal=True)
    >>> len(names.forward), len(names.backward), names.backend
    (64, 64, 'cpu')
    """
    check_flag("return_lse", return_lse)
    check_flash_options("fingerprints", flash_options)
    asked = Asked(
        causal=causal, window=_one_window(window, window_size), softmax_scale=softmax_scale, policy=policy,
        deterministic=deterministic, backend=backend, softcap=softcap, dropout_p=dropout_p,
        q_segment=q_segment,
    )  # fmt: skip
    aux = aux_of(
        q, learnable_sink=learnable_sink, alibi_slopes=alibi_slopes, dropout_p=dropout_p,
        dropout_seed=dropout_seed, row_starts=row_starts, row_ends=row_ends,
    )  # fmt: skip
    lengths = _Lengths(cu_seqlens_q, cu_seqlens_k, None, max_seqlen_q, max_seqlen_k)
    call = find_call(check_call(q, k, v, lengths.packing(), asked, aux))
    both = call.prepared.forward_fingerprint, call.fingerprint
    forward, backward = (call.backend.with_scores(x, call.scores) for x in both)
    return Fingerprints(forward, backward, call.backend.name)


def _one_window(window: Window, window_size: Window) -> Window:
    if window is not None and window_size is not None:
        raise InputError(f"give window or window_size, got {window!r} and {window_size!r}")
    return window_size if window is None else window
