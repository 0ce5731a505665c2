"""What single values that the public functions take must be: flags, numbers, sides of a mask, and those
options of FlashAttention that ask for nothing. Every error names the value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from .errors import InputError
from .schedule.constants import Q_SEGMENT_STEP

__all__ = [
    "LARGEST_SOFTCAP",
    "Window",
    "check_dropout",
    "check_flag",
    "check_flash_options",
    "check_no_positional",
    "check_q_segment",
    "check_softcap",
    "is_integer",
    "kind_of",
    "known",
    "longest",
    "scale_of",
    "short",
    "sides_of",
]

_FLOAT32_MAX, _FLOAT32_TINY = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
_LARGEST_SCALE = _FLOAT32_MAX * math.log(2.0) * (1 - 1e-6)
"""Times the logarithm of e to base 2 it is a finite float32."""

LARGEST_SOFTCAP = 1e30
"""Its inverse is the least."""

Window = Sequence[int | None] | None
"""(left, right) columns around the diagonal; -1 or None leaves a side unbounded."""

_FLASH_OPTIONS: dict[str, tuple[object, ...]] = {
    # FlashAttention-2
    "block_table": (None,),
    "return_attn_probs": (False,),
    # FlashAttention-3
    "qv": (None,),
    "q_descale": (None,),
    "k_descale": (None,),
    "v_descale": (None,),
    "seqused_q": (None,),
    "seqused_k": (None,),
    "attention_chunk": (0,),
    "num_splits": (0, 1),
    "pack_gqa": (None, False, True),
    "sm_margin": (0,),
    # FlashAttention-4
    "page_table": (None,),
    "cache_leftpad": (None,),
    "cu_seqlens_k_new": (None,),
    "score_mod": (None,),
    "mask_mod": (None,),
    "aux_tensors": (None,),
    "block_sparse_tensors": (None,),
    # transformers
    "s_aux": (None,),
}
"""Arguments of FlashAttention that have no counterpart here, and the values that ask for nothing."""


_HINTS = {
    "return_attn_probs": "; use return_lse for the log-sum-exp",
    "seqused_k": "; flash_attn_varlen_func has it",
    "page_table": "; flash_attn_varlen_func and flash_attn_with_kvcache have it",
    "block_table": "; flash_attn_varlen_func and flash_attn_with_kvcache have it",
    "s_aux": "; learnable_sink is its name here",
}


def check_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name} must be True or False, got {value!r}")
    return value


def check_q_segment(value: object) -> int:
    """Rows per segment of q; 0 for None."""
    if value is None:
        return 0
    rows = int(value) if is_integer(value) else 0
    if not 0 < rows <= 2**30 or rows % Q_SEGMENT_STEP:
        raise InputError(
            f"q_segment must be a multiple of {Q_SEGMENT_STEP}, positive, at most 2**30; got {value!r:.40}"
        )
    return rows


def check_softcap(value: object, scale: float) -> float:
    """A softcap; products are multiplied by ``scale / softcap``, which float32 must hold."""
    cap = _finite(value)
    if cap and not 1 / LARGEST_SOFTCAP <= cap <= LARGEST_SOFTCAP:
        raise InputError(
            f"softcap must be 0 or in {1 / LARGEST_SOFTCAP:g} .. {LARGEST_SOFTCAP:g}, got {value!r:.40}"
        )
    if cap and scale and not _FLOAT32_TINY <= abs(scale) / cap <= _FLOAT32_MAX:
        raise InputError(f"softmax_scale / softcap must be 0 or a normal float32, got {scale!r} / {cap!r}")
    return cap + 0.0  # 0 for -0


def check_dropout(value: object) -> float:
    p = _finite(value)
    if not 0 <= p < 1:
        raise InputError(f"dropout_p must be at least 0 and less than 1, got {value!r:.40}")
    return p + 0.0


def check_no_positional(
    function: str, named: str, positional: tuple[object, ...], next_one: str = "dropout_p"
) -> None:
    """Refuse arguments that libraries with the same function take for different things. ``next_one``: the
    first of them in FlashAttention-2."""
    if positional:
        raise InputError(
            f"{function} takes {named} by position and all else by keyword; the next one, "
            f"{short(positional[0])}, would be {next_one} in FlashAttention-2 and another in later ones"
        )


def check_flash_options(function: str, options: dict[str, Any]) -> None:
    """Accept arguments of FlashAttention that ask for nothing, refuse the others.

    Raises:
        InputError: a value that asks for something that is not supported.
        TypeError: FlashAttention has no such argument.
    """
    for name, value in options.items():
        if name not in _FLASH_OPTIONS:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        allowed = _FLASH_OPTIONS[name]
        plain = value is None or isinstance(value, (bool, int, float))
        if not plain or value not in allowed:
            hint = _HINTS.get(name, "")
            raise InputError(f"{name}={short(value)} is not supported, only {_either(allowed)}{hint}")


def _either(values: tuple[object, ...]) -> str:
    return " or ".join(map(repr, values))


def is_integer(value: object) -> TypeGuard[int]:
    """Whether it is one of Python or NumPy; True and False are none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def short(value: object) -> str:
    """The value, or what it is if it would be long."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)[-40:]
    return f"{value!r:.40}"


def kind_of(value: object) -> str:
    """What it is, in a few words."""
    return "None" if value is None else f"a {type(value).__name__}"


def longest(name: str, value: Any) -> int:
    """-1 for a tensor: the lengths say what it holds, and reading it would wait for the device."""
    if value is None or isinstance(value, Tensor):
        return -1
    if not is_integer(value) or known(value < 0):
        raise InputError(f"{name} must be None, a tensor or an integer >= 0, got {value!r}")
    return int(value)


def known(condition: Any) -> bool:
    """Whether it holds; False while torch.compile traces it for a size that it does not know."""
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import

    return statically_known_true(condition)


def sides_of(causal: bool, window: Window) -> tuple[int, int]:
    """(left, right), -1 where unbounded."""
    if window is None:
        return -1, 0 if causal else -1
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise InputError(f"window must be None or (left, right), got {window!r}")
    left, right = (_side(name, value, window) for name, value in zip(("left", "right"), window))
    return left, 0 if causal else right


def _side(name: str, value: int | None, window: Window) -> int:
    if value is None:
        return -1
    if not is_integer(value) or not -1 <= value < 2**31:
        raise InputError(f"window {name} must be None, -1 or an integer in 0..2**31-1, got {window!r}")
    return int(value)


def scale_of(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return float(head_dim) ** -0.5 if head_dim else 1.0
    value = _finite(scale)
    if not -_FLOAT32_MAX <= value <= _FLOAT32_MAX:
        raise InputError(f"softmax_scale must be a finite float32, got {scale!r:.40}")
    if abs(value) > _LARGEST_SCALE:
        raise InputError(f"softmax_scale must be at most {_LARGEST_SCALE:.3e} in size, got {scale!r:.40}")
    return value + 0.0  # -0.0 equals 0.0, and would find what was prepared for it, but signs zeros otherwise


def _finite(value: object) -> float:
    """A number as a float, NaN for what is none and infinity where it is too large."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf
