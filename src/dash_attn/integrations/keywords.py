"""Which keywords of transformers may be left out of a call of attention: those that cannot change its result.

Models hand down what they were called with, and some ask for more than attention by its usual arguments:
sparse attention by ``indices=``, a bias by ``position_bias=``. So a keyword that is not known is refused. Of
those below, the eager attention of no model in transformers reads any but the ones that we take.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from ..errors import InputError
from ..values import short

__all__ = ["OF_CONTINUOUS_BATCHING", "refuse_given", "refuse_unknown"]

_HARMLESS = frozenset(
    {
        "cache_position",  # where the new tokens stand: the mask knows
        "deterministic",  # a wish of ModernBERT; it is always granted
        "ignore_index",  # of the loss, like shift_labels and vocab_size
        "is_causal",
        "max_length_k",  # read from cu_seq_lens
        "max_length_q",
        "num_items_in_batch",  # of the loss
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",  # the keys that are passed come from it
        "position_embeddings",  # rotary ones: queries and keys are rotated before
        "position_ids",
        "return_dict",
        "seq_idx",  # of state space layers; attention has cu_seq_lens or position_ids beside it
        "shift_labels",
        "use_cache",
        "vocab_size",
    }
)

_INPUTS = frozenset(
    {
        "audio_attention_mask", "audio_embed_sizes", "audio_input_features", "bbox",
        "high_res_pixel_values", "image_attention_mask", "image_grid_thw", "image_pixel_values",
        "image_position_ids", "image_sizes", "images_per_sample", "input_features", "input_features_mask",
        "input_ids", "input_values", "inputs_embeds", "labels", "logits_to_keep", "mm_token_type_ids",
        "num_crops", "num_local_patches", "num_tiles", "pixel_attention_mask", "pixel_mask", "pixel_values",
        "pixel_values_local", "pixel_values_videos", "second_per_grid_ts", "spatial_shapes",
        "token_type_ids", "video_grid_thw", "video_position_ids",
    }
)  # fmt: skip
"""What tokenizers and processors make, and what a loss needs. A model that hands them down has used them."""

OF_CONTINUOUS_BATCHING = frozenset(
    {
        "logits_indices",
        "logits_processor_args",
        "max_seqlen_k",
        "max_seqlen_q",
    }
)
"""What ``generate_batch`` says besides, of the batch as a whole."""

_WHY = {
    "position_bias": ": 'dash' attention adds no bias to scores, such as T5's learned one by relative "
    "position; choose another attn_implementation for this model, 'eager' or 'sdpa'",
    "indices": ": 'dash' attention has no sparse attention, by tokens that the model chose",
    "block_indices": ": 'dash' attention has no sparse attention, by blocks that the model chose",
}
"""What more an error says."""


def refuse_unknown(given: dict[str, Any], more: Collection[str] = ()) -> None:
    """Raise InputError for a keyword that may change the result; None and False ask for nothing.

    ``more``: others that cannot.
    """
    for name, value in given.items():
        if value is None or value is False or name in _HARMLESS or name in _INPUTS or name in more:
            continue
        why = _WHY.get(name, "")
        raise InputError(f"{name} is not supported by 'dash' attention, got {short(value)}{why}")


def refuse_given(where: str, /, **given: Any) -> None:
    """Raise for every argument that has another value than None, False or 0. ``where``: ends the message."""
    for name, value in given.items():
        if value is not None and (isinstance(value, Tensor) or value):
            raise InputError(f"{name} is not supported {where}, got {short(value)}")
