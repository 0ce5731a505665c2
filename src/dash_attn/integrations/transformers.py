"""``attn_implementation="dash"`` for models of transformers::

    from dash_attn.integrations.transformers import register
    register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="dash")

Causal, sliding-window, chunked and bidirectional masks, padding on either side, packed sequences (by
``position_ids`` or ``cu_seq_lens_q``), growing key caches and caches of fixed length (``StaticCache``) work;
padded and packed batches run without their padding, so that a sequence's bytes do not depend on its
neighbours. Keys of a cache of fixed length are not copied where no row is padded. Sinks (gpt-oss) and caps of
scores (Gemma 2) work. Everything else (masks with four dimensions, mask functions of users, biases, sparse
attention, attention weights as an output, and whatever else a model asks for by a keyword that is not known
to leave the result alone) raises. So do models that do their own attention: DeBERTa, WavLM and XLNet, for
instance, when they are built.

Packed sequences are kept apart with a key cache and without. With a cache, the model must pass
``position_ids`` on to its attention. Most models do. Llama 4, Ministral 3, GPT-BigCode and Persimmon, for
instance, do not: nothing tells their sequences apart with a cache, so give them ``use_cache=False``. A cache
that holds several sequences per row cannot be continued: which key belongs to which sequence is not stored. A
call that shows it by its ``position_ids`` raises.

Inside ``dash_attn.distributed.context`` the tokens are the rows of this rank: causal, sliding-window and
bidirectional masks work, all else raises. Call the model with
``position_ids=distributed.positions(...)[None]``; other ones raise where the model hands them to its
attention. A mask that was made inside stays what it is: a layer that is run again by activation checkpointing
is shared wherever that happens.

``attn_implementation="paged|dash"`` is for continuous batching (``generate_batch``), without CUDA graphs.
From version 5.19 on transformers refuses it: there continuous batching takes no implementation but its own.

Under ``torch.compile`` there is a graph break where the mask is made: plans are made from lengths, which
are read on the host. Sequences packed by ``position_ids`` then need ``use_cache=False``; with a cache the
device checks that there are none. ``generate`` compiles by itself for a cache of fixed length on a GPU: every
step has another length, so give it ``disable_compile=True``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api import flash_attn_func, flash_attn_varlen_func
from ..errors import InputError, UnavailableError
from ..ops.autograd import needs_grad
from ..ops.lengths import host_lengths
from ..ops.results import out_alone
from ..ops.spread import Spread, current_spread, told
from ..values import kind_of
from . import OLDEST_TRANSFORMERS, release
from .callers import refuse_models_that_do_not_call
from .continuous import paged_attention_forward
from .keywords import refuse_unknown
from .padding import MaskPacking, check_mask_of_tokens, packing_of
from .positions import Sizes, assert_separate, separate
from .spread_rows import INSIDE, Layer, attend_spread, refuse_inside
from .token_masks import TokenMask, isolate, token_mask

__all__ = ["NAME", "attention_forward", "register"]

NAME = "dash"


def register(name: str = NAME) -> None:
    """Make ``attn_implementation=name`` known to transformers.

    Models that would not call it are refused when it is chosen for them.

    Raises:
        UnavailableError: transformers is not installed, or too old.
    """
    oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
    needed = f"transformers >= {oldest} is needed: pip install 'dash-attn[transformers]'"
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, __version__
    except ImportError as error:
        raise UnavailableError(f"{needed} ({error})") from error
    if release(__version__) < OLDEST_TRANSFORMERS:
        raise UnavailableError(f"{needed} (found {__version__})")
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, token_mask)
    AttentionInterface.register(f"paged|{name}", paged_attention_forward)
    refuse_models_that_do_not_call(name)


@told
def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: TokenMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    position_ids: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Attention in the signature of transformers.

    Args:
        module: without a :class:`.TokenMask`, ``is_causal`` of it counts unless the argument is given.
        query: (batch, heads, seqlen_q, head_dim).
        key, value: (batch, kv_heads, seqlen_k, head_dim); places of a cache for later keys, if a
            :class:`.TokenMask` says so, may hold anything. ``value`` may have another head_dim.
        attention_mask: what :func:`.token_mask` made, which then decides alone what a row sees, as masks do
            for transformers' eager attention. Or (batch, seqlen_k): 0 for padding, otherwise the number of
            the sequence; a floating one has 1 for tokens, and a bool one must not have as many rows as there
            are queries. Or None.
        dropout: the ``dropout_p`` of :func:`dash_attn.attention`; the seed is drawn as there. Inside
            ``distributed.context`` that of rank 0 counts.
        scaling: factor on Q K^T, default ``head_dim ** -0.5``.
        sliding_window: tokens a row sees, itself included; without ``is_causal``, to each side. A
            :class:`.TokenMask` with another window is an error.
        is_causal: as ``module.is_causal``.
        cu_seq_lens_q, cu_seq_lens_k: int32 bounds of sequences packed into a batch of one; an error beside
            padding, or beside a mask with other sequences. ``position_ids`` are then not looked at.
        position_ids: (batch or 1, seqlen_q) or (seqlen_q,) integers. Where they fall, and at a 0 behind a 0,
            another sequence begins. Ids with more dimensions name places in images, and those of a layer of
            cross-attention its queries alone: they are not looked at.
        softcap: as in :func:`dash_attn.attention`; None: 0.
        s_aux: (heads,), the ``learnable_sink`` of :func:`dash_attn.attention`, or None.
        other: what cannot change the result, such as ``use_cache``, or is None or False.

    Returns:
        out: (batch, seqlen_q, heads, head_dim of value), zero in padded rows; and None for the weights.

    Raises:
        InputError: an argument cannot be honoured; the message names it and its value.
    """
    refuse_unknown(other)
    if "output_attentions" not in other and getattr(
        getattr(module, "config", None), "output_attentions", False
    ):
        raise InputError(
            "output_attentions=True of the configuration: 'dash' attention has no weights to give"
        )
    _refuse_mask(attention_mask)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    sizes = Sizes(q.shape[0], q.shape[1], k.shape[1])
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    how: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0, "learnable_sink": s_aux}
    how["dropout_p"] = dropout
    if (spread := _spread_of(attention_mask)) is not None:

        def layer() -> Layer:
            refuse_inside(cu_seq_lens_q=cu_seq_lens_q, cu_seq_lens_k=cu_seq_lens_k)
            mask = None
            if isinstance(attention_mask, TokenMask):
                _check_sizes(attention_mask, sizes)
                mask = attention_mask.causal, attention_mask.local_size
            return Layer(mask, causal, sliding_window, position_ids, how)

        return attend_spread(spread, q, k, v, layer), None
    crossed = "cross" in type(module).__name__.lower() or getattr(module, "is_cross_attention", False)
    if crossed or cu_seq_lens_q is not None:
        position_ids = None
    if isinstance(attention_mask, TokenMask):
        _check_sizes(attention_mask, sizes)
        k, v = (x[:, : attention_mask.kv_length] for x in (k, v))  # a view: nothing is copied
        shown = _shown_by_mask(attention_mask, sliding_window, position_ids)
    else:
        numbers = _numbers(attention_mask, sizes)
        shown = _shown_by_numbers(numbers, sizes, causal, sliding_window, position_ids, q.device)
    how |= {"causal": shown.causal, "window_size": shown.window}
    if (cu_seq_lens_q is None) != (cu_seq_lens_k is None):
        given = f"{kind_of(cu_seq_lens_q)} and {kind_of(cu_seq_lens_k)}"
        raise InputError(f"cu_seq_lens_q and cu_seq_lens_k must be given together, got {given}")
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        if q.shape[0] != 1:
            raise InputError(f"cu_seq_lens_q needs a batch of 1, got {q.shape[0]}")
        _check_sequences(attention_mask, shown.packing, cu_seq_lens_q, cu_seq_lens_k)
        rows = (x.flatten(0, 1) for x in (q, k, v))
        return out_alone(flash_attn_varlen_func(*rows, cu_seq_lens_q, cu_seq_lens_k, **how))[None], None
    if shown.packing is None and attention_mask is None and shown.causal and 1 < q.shape[1] != k.shape[1]:
        raise InputError(
            f"attention_mask None with {q.shape[1]} queries and {k.shape[1]} keys: how a causal mask is "
            "aligned then differs among implementations"
        )
    return _attended(q, k, v, shown, how), None


class _Shown(NamedTuple):
    """What rows see: a band, and the tokens of sequences if there is padding or more than one."""

    causal: bool
    window: tuple[int, int]
    packing: MaskPacking | None


def _shown_by_mask(mask: TokenMask, sliding_window: int | None, position_ids: Tensor | None) -> _Shown:
    _check_window(mask, sliding_window)
    if position_ids is not None:
        mask = _isolated(mask, position_ids)
    return _Shown(mask.causal, mask.window, mask.packing)


def _shown_by_numbers(
    numbers: Tensor | None,
    sizes: Sizes,
    causal: bool,
    sliding_window: int | None,
    position_ids: Tensor | None,
    device: torch.device,
) -> _Shown:
    """``numbers``: of sequences, by token; None: one without padding."""
    window = _window(sliding_window, causal)
    if position_ids is not None:
        numbers = _separated(numbers, position_ids, sizes, causal)
    if numbers is None:
        return _Shown(causal, window, None)
    keep = not causal and window == (-1, -1)
    return _Shown(causal, window, packing_of(numbers, sizes.seqlen_q, keep_queries=keep, device=device))


def _attended(q: Tensor, k: Tensor, v: Tensor, shown: _Shown, how: dict[str, Any]) -> Tensor:
    """out, (batch, seqlen_q, heads, head_dim of v)."""
    packing = shown.packing
    if packing is None:
        return out_alone(flash_attn_func(q, k, v, **how))
    if packing.holes and shown.window != (-1, -1):
        raise InputError(f"sliding_window {shown.window} over padding between the tokens of a sequence")
    if packing.used_k is not None and _forward_only(q, k, v, how["learnable_sink"]):
        return out_alone(flash_attn_varlen_func(q, k, v, seqused_k=packing.used_k, **how))
    return _unpadded(q, k, v, packing, how)


def _spread_of(mask: TokenMask | Tensor | None) -> Spread | None:
    """How rows are spread: a mask knows it wherever it is used, without one the context says it."""
    inside = current_spread()
    if isinstance(mask, TokenMask):
        if inside is not None and mask.spread != inside:
            made = "outside of the context" if mask.spread is None else "in another context"
            raise InputError(f"attention_mask was made {made}, but is used {INSIDE}")
        return mask.spread
    if inside is not None:
        refuse_inside(attention_mask=mask)
    return inside


def _check_sizes(mask: TokenMask, given: Sizes) -> None:
    if mask.local_size is not None and mask.local_size < 1:
        raise InputError(f"a layer uses this model's mask with a window of {mask.local_size} tokens")
    if mask.passed != given:
        hint = ""
        if mask.passed._replace(seqlen_k=given.seqlen_k) == given:
            hint = "; a model that sizes its mask by another layer's cache (MiniMax) needs use_cache=False"
        raise InputError(
            f"(batch, queries, keys) are {tuple(given)}, the model made its mask for "
            f"{tuple(mask.passed)}{hint}"
        )


def _check_window(mask: TokenMask, sliding_window: int | None) -> None:
    """A window that the layer names must be the mask's."""
    if sliding_window is None:
        return
    farthest = mask.kv_length - 1
    asked = min(_window(sliding_window, mask.causal)[0], farthest)
    if mask.local_size is None:
        sides = [farthest]
    elif mask.causal:
        sides = [mask.local_size - 1]
    else:  # transformers counts windows to both sides with the row itself or without
        sides = [mask.local_size - 1, mask.local_size]
    if asked not in [min(side, farthest) for side in sides]:
        raise InputError(
            f"sliding_window {sliding_window}, but the model made this layer's mask with window "
            f"{mask.local_size}"
        )


def _isolated(mask: TokenMask, position_ids: Tensor) -> TokenMask:
    """The mask with the sequences of ``position_ids``, or in compiled code a check that it has them."""
    if not _of_tokens(position_ids, mask.sizes, mask.causal):
        return mask
    if torch.compiler.is_compiling():
        assert_separate(position_ids, mask.numbers, mask.sizes)
        return mask
    isolated: TokenMask = isolate(mask, position_ids)
    return isolated


def _separated(numbers: Tensor | None, position_ids: Tensor, sizes: Sizes, causal: bool) -> Tensor | None:
    """As :func:`_isolated`, for the numbers of a plain mask."""
    if not _of_tokens(position_ids, sizes, causal):
        return numbers
    if torch.compiler.is_compiling():
        assert_separate(position_ids, numbers, sizes)
        return numbers
    found: Tensor | None = separate(position_ids, numbers, sizes)
    return numbers if found is None else found


def _of_tokens(position_ids: Tensor, sizes: Sizes, causal: bool) -> bool:
    """The ids number the queries, and these stand among the keys."""
    if position_ids.ndim > 2 or (not causal and sizes.seqlen_q != sizes.seqlen_k):  # images, cross-attention
        return False
    shape = tuple(position_ids.shape)
    fits = shape[-1:] == (sizes.seqlen_q,) and shape[:-1] in ((), (1,), (sizes.batch,))
    if causal and not fits:
        raise InputError(f"position_ids have shape {shape}, the queries (batch, seqlen_q) {tuple(sizes[:2])}")
    return fits


def _numbers(mask: Tensor | None, sizes: Sizes) -> Tensor | None:
    """A plain mask, if there is one."""
    keys = (sizes.batch, sizes.seqlen_k)
    if mask is not None and tuple(mask.shape) != keys:
        raise InputError(
            f"attention_mask has shape {tuple(mask.shape)}, the keys are (batch, seqlen_k) {keys}"
        )
    if mask is not None and (mask.is_floating_point() or mask.dtype == torch.bool):
        check_mask_of_tokens(mask, sizes.seqlen_q)
    return mask


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _check_sequences(
    mask: TokenMask | Tensor | None, packing: MaskPacking | None, cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor
) -> None:
    """Bounds that the caller gives must be those of the mask, if that has any."""
    if packing is None:
        return
    if not isinstance(mask, TokenMask) or mask.padded:
        raise InputError("cu_seq_lens_q and an attention_mask with padding: give one of them")
    for side, bounds, found in (
        ("q", cu_seq_lens_q, packing.cu_seqlens_q),
        ("k", cu_seq_lens_k, packing.cu_seqlens_k),
    ):
        given = [n for n in host_lengths(f"cu_seq_lens_{side}", bounds).seqlens if n]
        of_mask = [n for n in found.diff().tolist() if n]
        if given != of_mask:
            raise InputError(
                f"cu_seq_lens_{side} has sequences of {given}, position_ids or the model's mask of {of_mask}"
            )


def _unpadded(q: Tensor, k: Tensor, v: Tensor, packing: MaskPacking, how: dict[str, Any]) -> Tensor:
    """Attention of the rows that are no padding; the others are zero."""
    rows_q, rows_k = (x.to(q.device) for x in (packing.rows_q, packing.rows_k))  # layers may be elsewhere
    packed = [x.flatten(0, 1).index_select(0, rows) for x, rows in ((q, rows_q), (k, rows_k), (v, rows_k))]
    out = out_alone(flash_attn_varlen_func(*packed, packing.cu_seqlens_q, packing.cu_seqlens_k, **how))
    rows, heads = q.shape[:2], out.shape[1:]
    return out.new_zeros((rows.numel(), *heads)).index_copy(0, rows_q, out).view(*rows, *heads)


def _forward_only(*tensors: Tensor | None) -> bool:
    """No gradient is wanted, and no transform of torch.func is at work."""
    if needs_grad(*tensors):
        return False
    return torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active()


def _window(sliding_window: int | None, causal: bool) -> tuple[int, int]:
    if sliding_window is None:
        return -1, -1
    side = int(sliding_window) - 1
    if side < 0:
        raise InputError(f"sliding_window must be None or >= 1, got {sliding_window!r}")
    return side, 0 if causal else side


def _refuse_mask(attention_mask: object) -> None:
    if attention_mask is None or isinstance(attention_mask, TokenMask):
        return
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
        shape = tuple(getattr(attention_mask, "shape", ())) or type(attention_mask).__name__
        raise InputError(f"attention_mask must be None or (batch, seqlen_k), got {shape}")
