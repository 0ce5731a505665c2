"""``F.scaled_dot_product_attention`` on dash-attn.

Nothing happens on import. There are two ways in:

``with enabled():``
    Every SDPA call from Python of this thread inside runs here or raises. ``nn.MultiheadAttention`` is taken,
    too. Not seen are calls that PyTorch itself makes while it runs something else: of TorchScript and C++, in
    the body of a custom operator, in a function given to ``torch.cond``, ``torch.compiler.allow_in_graph`` or
    another operator of higher order, in a hook of saved tensors, and where torch functions are disabled. They
    run PyTorch's attention, without a word. ``torch.compile`` breaks its graph at an activation checkpoint.
    Open the block outside of compiled code.
    That layer needs ``need_weights=False``. Dropout drops what :func:`dash_attn.attention` drops. The masks
    that run are ``is_causal`` for equal lengths, PyTorch's ``causal_lower_right``, and tensors that show each
    key to one interval of rows (:mod:`.interval_masks`): causal ones, windows, padding, documents, prefixes,
    trees. The backward is ours wherever and whenever it runs, with PyTorch's checkpoints, too. Checkpoints
    of others call SDPA again in the backward: let such a backward run inside. Inside
    ``dash_attn.distributed.context`` the tensors are the rows of this rank; attention runs over the group.
:func:`activate`, :func:`restore`
    Replace PyTorch's flash backend only, as ``torch.nn.attention.activate_flash_attention_impl("DASH")``
    does, for the whole process, on every thread, on the GPU and on the CPU. PyTorch goes on choosing a
    backend for each call by its own rules, and may choose cuDNN or the memory-efficient one, which this
    package does not control; restrict it with ``torch.nn.attention.sdpa_kernel``, or ask it to raise with
    ``torch.use_deterministic_algorithms``. Forward and backward of a call must both run before
    :func:`restore`. Nested tensors and ``torch.nn.attention.varlen`` reach the same kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.nn import attention as registry
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ..api import flash_attn_func
from ..errors import InputError, UnavailableError
from ..ops.results import out_alone
from ..ops.spread import Spread, current_spread, spread_by, told
from .aten import in_layout_of, override, upper_left
from .checkpointing import Wrapping
from .interval_masks import Intervals, Sizes, intervals_of
from .kernels import Band
from .spread_rows import INSIDE, refuse_inside

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

__all__ = ["NAME", "activate", "enabled", "restore"]

NAME = "DASH"
"""Under this name the implementation is registered."""

_HOOKS = (
    "register_flash_attention_impl",
    "activate_flash_attention_impl",
    "current_flash_attention_impl",
    "restore_flash_attention_impl",
)


def activate() -> None:
    """Replace PyTorch's flash backend until :func:`restore`.

    Raises:
        UnavailableError: this PyTorch has no registry of flash implementations.
    """
    _hook("register_flash_attention_impl")(NAME, register_fn=override)
    _hook("activate_flash_attention_impl")(NAME)


def restore() -> None:
    """Give PyTorch its own flash backend back; nothing happens unless :func:`activate` was called.

    Raises:
        UnavailableError: this PyTorch has no registry of flash implementations.
    """
    if _hook("current_flash_attention_impl")() == NAME:
        _hook("restore_flash_attention_impl")()


@contextmanager
def enabled() -> Iterator[None]:
    """Inside, every SDPA call of this thread runs on dash-attn, forward and backward, or raises.

    Other threads are left alone, but while a block is open anywhere, ``nn.TransformerEncoder`` and its layers
    take no fused inference path. (``torch.backends.mha`` is set back at the end.) A call's backward is ours
    after the block as well, and so is what ``torch.utils.checkpoint`` runs again.

    Raises:
        InputError: from a call inside that is not supported; the message names the argument and its value.
        UnavailableError: in this PyTorch nn.MultiheadAttention would escape, or torch.compile could not be
            kept from a mistake.

    Example::

        with enabled():  # q, k, v: (batch, heads, seqlen, head_dim)
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out.sum().backward()
    """
    if _HIDES_ITS_CALL:
        raise UnavailableError(f"torch {torch.__version__}: nn.MultiheadAttention hides its SDPA call")
    if _MAY_BE_COMPILED:
        raise UnavailableError(f"torch {torch.__version__}: torch.compile may mix up what a block runs")
    with _BLOCKS, _Mode():
        yield


def _inside(function: Any) -> Any:
    """The function inside of a block like this one; in a thread without one the function itself."""
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    found = next((mode for mode in reversed(modes) if isinstance(mode, _Mode)), None)
    if found is None:
        return function
    spread = current_spread() or found.spread

    def again(*args: Any, **kwargs: Any) -> Any:
        with _BLOCKS, _Mode(spread):
            return function(*args, **kwargs)

    return again


class _Blocks:
    """While a block is open in any thread, what PyTorch's checkpoints run again runs inside, wherever the
    backward is called, and fused paths are off: in eager code a mode keeps modules from them, but
    torch.compile does not ask it, neither before it chooses them nor when it calls them.
    """

    def __init__(self) -> None:
        self._lock, self._open, self._fused = threading.Lock(), 0, True
        self._checkpoints = Wrapping(_inside)

    def __enter__(self) -> None:
        with self._lock:
            if not self._open:
                self._fused = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
                self._checkpoints.begin()
            self._open += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                self._checkpoints.end()
                torch.backends.mha.set_fastpath_enabled(self._fused)


_BLOCKS = _Blocks()


class _Mode(TorchFunctionMode):
    """Takes this thread's calls of SDPA before PyTorch chooses a backend.

    Args:
        spread: counts where no context is open. A mode goes along when a backward takes other threads, a
            context does not.
    """

    def __init__(self, spread: Spread | None = None) -> None:
        super().__init__()
        self.spread = spread

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _FUSED:
            _refuse_fused(func)
        if func in _BODIES:
            return _outside(func, args, kwargs)
        kwargs = kwargs or {}
        if func in _BACKWARDS:
            with _Mode(current_spread() or self.spread):  # a checkpoint's recomputation is inside too
                return _BACKWARDS[func](*args, **kwargs)
        if func in _OURS:
            if self.spread is None or current_spread() is not None:
                return _OURS[func](*args, **kwargs)
            with spread_by(self.spread):
                return _OURS[func](*args, **kwargs)
        return func(*args, **kwargs)


def _never_compile_alone(function: Any) -> None:
    """Let torch.compile trace a function where one that it compiles calls it, and never by itself.

    Where it cannot compile a frame (a break of the graph within ``try``), the mode is asked about each call
    in that frame. It would compile the mode's function by itself, and run what it made for one call for
    others.
    """
    frames = torch._C._dynamo.eval_frame
    actions = frames._FrameAction
    strategy = frames._FrameExecStrategy(actions.SKIP, actions.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, strategy)


try:
    _never_compile_alone(_Mode.__torch_function__)
    _MAY_BE_COMPILED = False
except AttributeError:  # another PyTorch
    _MAY_BE_COMPILED = True

_UNSEEN = "inside dash_attn's sdpa.enabled() no attention in it would be seen"


@torch.compiler.disable(reason=_UNSEEN)  # type: ignore[untyped-decorator, no-untyped-call]
def _outside(function: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """A break of the graph: what is called runs as in eager code, where this mode sees what is inside."""
    return function(*args, **(kwargs or {}))


@told
def _refuse_fused(function: Any) -> NoReturn:
    raise InputError(f"{function.__name__} hides an attention that dash-attn cannot take; call SDPA itself")


@told
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention, with autograd; tensors (batch, heads, seqlen, head_dim)."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.is_nested and x.layout is torch.strided:
            raise InputError(f"{name} is a nested tensor: flash_attn_varlen_func takes packed sequences")
        if x.ndim != 4:
            raise InputError(
                f"{name} must have 4 dimensions (batch, heads, seqlen, head_dim), got {tuple(x.shape)}"
            )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise InputError(f"query has {query.shape[1]} heads, key {key.shape[1]}, and enable_gqa is False")
    how: dict[str, Any]
    if (spread := current_spread()) is not None:
        refuse_inside(attn_mask=attn_mask)
        how = {"causal": is_causal, "softmax_scale": scale, "dropout_p": dropout_p}
        shared: Tensor = _spread_attention(spread, (query, key, value), how)
        return shared
    band, row_starts, row_ends = _shown(query, key, attn_mask, is_causal)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    how = {"softmax_scale": scale, "dropout_p": dropout_p}
    how |= {"causal": band.causal, "window_size": (band.left, band.right)}
    out = out_alone(flash_attn_func(q, k, v, row_starts=row_starts, row_ends=row_ends, **how))
    return in_layout_of(query, out.transpose(1, 2))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _spread_attention(spread: Spread, qkv: tuple[Tensor, Tensor, Tensor], how: dict[str, Any]) -> Tensor:
    """Attention over a group; tensors have the rows of this rank, and may be DTensors of all rows."""
    query, like_query = spread.local(qkv[0], 2)
    key, value = (spread.local(x, 2)[0] for x in qkv[1:])
    if query.shape[2] != key.shape[2]:
        raise InputError(
            f"query has {query.shape[2]} rows and key {key.shape[2]}: only self-attention can be shared by "
            f"ranks, {INSIDE}"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = spread.attend(q, k, v, **how)
    return like_query(in_layout_of(query, out.transpose(1, 2)))


def _shown(query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Intervals:
    """What rows see; of all masks only PyTorch's causal ones say that without their values."""
    if attn_mask is None:
        return Intervals(upper_left(query, key, is_causal))
    if type(attn_mask) is not Tensor:
        from torch.nn.attention.bias import CausalBias  # slow, for it imports the compiler

        if isinstance(attn_mask, CausalBias):
            return Intervals(_band_of_bias(attn_mask, (query.shape[2], key.shape[2]), is_causal))
    if is_causal:
        raise InputError(
            f"is_causal=True beside an attn_mask of shape {tuple(attn_mask.shape)}: give one of them"
        )
    found: Intervals = intervals_of(
        attn_mask, Sizes(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    )
    return found


def _band_of_bias(bias: CausalBias, seqlens: tuple[int, int], is_causal: bool) -> Band:
    """The band of ``causal_lower_right`` and ``causal_upper_left``."""
    if is_causal:
        raise InputError("is_causal=True beside an attn_mask that is causal itself: give one of them")
    of_mask = (bias.seq_len_q, bias.seq_len_kv)
    if of_mask != seqlens:
        raise InputError(
            f"attn_mask is for {of_mask[0]} queries and {of_mask[1]} keys, there are {seqlens[0]} and "
            f"{seqlens[1]}"
        )
    if bias.variant != type(bias.variant).LOWER_RIGHT and seqlens[0] != seqlens[1]:
        raise InputError(
            f"attn_mask is causal_upper_left{of_mask}: dash-attn aligns causal masks bottom-right only, as "
            f"causal_lower_right{of_mask} does, and for unequal lengths that is another mask"
        )
    return Band(True)


def _copy(function: Any, **names: Any) -> Any:
    """A copy of a function of PyTorch in which these names mean something else, and in which nobody asks a
    mode: this one has been asked already.

    While a mode is asked about a function it is off, so it would not see the calls inside of that. Where
    there is a mode around it, as ``torch.set_default_device`` opens one, or a subclass of tensors, the
    function would begin again with them. The copy has no ``__name__`` among its globals: torch.compile would
    look for its names in the module of that name, where they mean what they mean there.
    """
    asking = dict.fromkeys(("has_torch_function", "has_torch_function_unary"), _nothing_to_ask)
    known = {**function.__globals__, **asking, **names}
    del known["__name__"]
    copy = FunctionType(function.__code__, known, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _regions() -> tuple[Any, ...]:
    """What ``torch.compiler.nested_compile_region`` calls, in a PyTorch that has it."""
    try:
        from torch._higher_order_ops.invoke_subgraph import invoke_subgraph_placeholder
    except ImportError:
        return ()
    return (invoke_subgraph_placeholder,)


def _nothing_to_ask(*_: Any) -> bool:
    return False


_multi_head_attention = _copy(F.multi_head_attention_forward, scaled_dot_product_attention=_attention)
_MULTI_HEAD_ARGUMENTS = _multi_head_attention.__code__.co_varnames[
    : _multi_head_attention.__code__.co_argcount
]


@told
def _without_weights(*args: Any, **kwargs: Any) -> Any:
    """F.multi_head_attention_forward, which calls SDPA only where nobody needs the attention weights."""
    weights = {**dict(zip(_MULTI_HEAD_ARGUMENTS, args)), **kwargs}.get("need_weights", True)
    if weights:
        raise InputError(
            f"need_weights={weights!r}, the default of nn.MultiheadAttention: dash-attn has no attention "
            "weights to give; call the layer with need_weights=False"
        )
    return _multi_head_attention(*args, **kwargs)


_OURS = {
    # as F has it, unless another library has put its own one there, which calls this one
    torch._C._nn.scaled_dot_product_attention: _attention,
    torch.ops.aten.scaled_dot_product_attention: _attention,
    torch.ops.aten.scaled_dot_product_attention.default: _attention,
    F.multi_head_attention_forward: _without_weights,
}

_BACKWARDS = {
    function: _copy(function) for function in (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
}

_HIDES_ITS_CALL = (
    "scaled_dot_product_attention" not in F.multi_head_attention_forward.__code__.co_names
    or "need_weights" not in _MULTI_HEAD_ARGUMENTS
)

_BODIES = (checkpoint, *_regions())
"""Functions whose bodies torch.compile traces where no mode is asked. Eager code does not ask a mode about
these."""

_FUSED = (torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd)
"""What nn.MultiheadAttention and nn.TransformerEncoderLayer call on fused paths (:class:`_Blocks`).
Direct calls are refused."""


def _hook(name: str) -> Any:
    """A function of PyTorch's registry."""
    if missing := [hook for hook in _HOOKS if not hasattr(registry, hook)]:
        raise UnavailableError(
            f"torch {torch.__version__} has no torch.nn.attention.{missing[0]}; call dash_attn.attention "
            "directly, or update PyTorch"
        )
    return getattr(registry, name)
