"""``paged|dash``: attention for the continuous batching of transformers (``generate_batch``).

Rows of all requests are one packed batch, and keys lie in the cache of transformers. Where it gives a block
table, every request has one new token, which :func:`.kvcache.flash_attn_with_kvcache` appends. Otherwise
transformers gathers the keys; the lengths are then read on the host, so a CUDA graph cannot be captured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import flash_attn_varlen_func, flash_attn_with_kvcache
from ..errors import InputError
from ..ops.results import out_alone
from ..ops.spread import current_spread, told
from .keywords import OF_CONTINUOUS_BATCHING, refuse_unknown
from .spread_rows import INSIDE

__all__ = ["paged_attention_forward"]


@torch.no_grad()
@told
def paged_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cache: Any = None,
    scaling: float | None = None,
    block_table: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Any = None,
    cu_seq_lens_k: Any = None,
    read_index: Any = None,
    write_index: Any = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Attention in the signature that continuous batching calls.

    Args:
        module: with ``layer_idx``.
        query, key, value: (1, heads, rows, head_dim): the new tokens of all requests.
        attention_mask: None; what a row sees follows from the lengths.
        cache: the paged cache of transformers, which knows the window of every layer.
        scaling, softcap, s_aux: as in :func:`.transformers.attention_forward`.
        block_table: (groups, batch, most_pages) int32, or None.
        sliding_window: tokens a row sees, itself included; None: that of the cache. Others are refused.
        dropout: must be 0.
        cu_seq_lens_q, cu_seq_lens_k: bounds of the requests; those of keys also by the kind of the layer.
        read_index, write_index: where the cache reads and writes.
        other: as in :func:`.transformers.attention_forward`.

    Returns:
        out: (1, rows, heads, head_dim of value), and None for the weights.

    Raises:
        InputError: there is no cache, or a mask; rows are spread over ranks; or an argument cannot be
            honoured.
    """
    if current_spread() is not None:
        raise InputError(f"paged attention is not supported {INSIDE}: a cache cannot be shared by ranks")
    if cache is None or attention_mask is not None:
        what = "no cache" if cache is None else f"a mask of shape {tuple(attention_mask.shape)}"  # type: ignore[union-attr]
        raise InputError(f"paged attention is for continuous batching, got {what}")
    refuse_unknown(other, OF_CONTINUOUS_BATCHING)
    if dropout:
        raise InputError(f"dropout {dropout} is not supported by paged attention")
    window = _window(sliding_window, cache.sliding_windows[module.layer_idx])
    sides = (int(window) - 1, 0) if window else (-1, -1)
    how: dict[str, Any] = {"softmax_scale": scaling, "causal": True, "window_size": sides}
    how |= {"softcap": 0.0 if softcap is None else softcap, "learnable_sink": s_aux}
    ends = cu_seq_lens_k
    if isinstance(ends, dict):
        ends = ends["sliding_attention" if window else "full_attention"]
    if block_table is not None:
        return _one_token_each((query, key, value), cache, module, ends, block_table, how), None
    where = {"read_index": read_index, "write_index": write_index}
    k, v = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, **where)
    ends_q, total = cu_seq_lens_q.int(), int(ends[-1])
    q = query[0].transpose(0, 1)
    rows = int(ends_q[-1])  # the others fill up the batch
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    packed = q[:rows], k[:total], v[:total]
    out[:rows] = out_alone(flash_attn_varlen_func(*packed, ends_q, ends.int().clone(), **how))
    return out[None], None


def _window(passed: int | None, of_cache: int) -> int | None:
    """That of the cache, where 1 stands for none. Not every layer with a window passes it, and not every one
    that has an attribute of that name has a window."""
    window = None if of_cache == 1 else of_cache
    if passed is not None and passed != window:
        raise InputError(f"sliding_window {passed}, but the cache has {window} for this layer")
    return window


def _one_token_each(
    qkv: tuple[Tensor, Tensor, Tensor],
    cache: Any,
    module: Any,
    ends: Tensor,
    block_table: Tensor,
    how: dict[str, Any],
) -> Tensor:
    group, layer = cache.layer_index_to_group_indices[module.layer_idx]
    shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
    pages = [x[layer].view(shape) for x in (cache.key_cache, cache.value_cache)]
    q, k, v = (x.permute(2, 0, 1, 3).contiguous() for x in qkv)
    before = (ends.diff()[: len(q)] - 1).int()
    out = flash_attn_with_kvcache(
        q, *pages, k, v, cache_seqlens=before, page_table=block_table[group].contiguous(), **how
    )
    return out_alone(out).transpose(0, 1)
