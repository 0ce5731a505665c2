"""What the public functions accept: every argument is checked here, and every error names its value."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backends.base import NO_AUX, AuxTensors, check_backend, check_device, given_by
from .errors import InputError
from .ops.autograd import refuse_gradients
from .ops.calls import DTYPE_NAMES
from .ops.lengths import Packing, Used
from .ops.policies import policy_key
from .problem import DTYPES
from .schedule import Numerics, Schedule
from .spec import AttentionSpec
from .values import (
    Window,
    check_dropout,
    check_flag,
    check_q_segment,
    check_softcap,
    is_integer,
    longest,
    scale_of,
    short,
    sides_of,
)

__all__ = [
    "Asked",
    "CheckedCall",
    "Packing",
    "Used",
    "aux_of",
    "cast_to",
    "check_aux",
    "check_call",
    "check_dtype",
    "check_int32",
    "check_planned",
    "check_rows",
    "check_tensor",
    "completed",
    "dense",
    "spec_of",
]


class Asked(NamedTuple):
    """What a caller asks for besides the tensors, as the caller gave it. Made by keywords: many are alike."""

    causal: bool = False
    window: Window = None
    softmax_scale: float | None = None
    policy: str | Numerics | Schedule = "auto"
    deterministic: bool = True
    backend: str = "auto"
    softcap: float = 0.0
    dropout_p: float = 0.0
    q_segment: int | None = None


class CheckedCall(NamedTuple):
    """A checked call.

    Attributes:
        q, k, v: the inputs, cast if autocast says so.
        aux: tensors beside them, not yet completed.
        spec: what is asked.
        packing: None for a dense call; longest lengths are -1 where not given.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    aux: AuxTensors
    spec: AttentionSpec
    packing: Packing | Used | None

    @property
    def rest(self) -> tuple[Any, ...]:
        """What follows the tensors in a call of the operators."""
        if self.packing is None:
            return (*self.aux, *self.spec)
        return (*self.aux, *self.packing.tensors, *self.spec, *self.packing.longest)


def aux_of(
    q: Tensor,
    *,
    learnable_sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    row_starts: Tensor | None = None,
    row_ends: Tensor | None = None,
) -> AuxTensors:
    """The tensors beside q, k and v as the caller gave them; NO_AUX itself, if there are none.

    The seed is left out where nothing is dropped.

    Raises:
        InputError: the probability or the seed cannot be used.
    """
    seed = dropout_seed
    if seed is not None:
        if not isinstance(seed, Tensor):
            seed = _seed_of(seed, q)
        if not check_dropout(dropout_p):
            if isinstance(q, Tensor):
                check_aux(AuxTensors(dropout_seed=seed), q, 0)
            seed = None
    if learnable_sink is None and alibi_slopes is None and seed is row_starts is row_ends is None:
        return NO_AUX
    return AuxTensors(learnable_sink, alibi_slopes, seed, row_starts, row_ends)


def _seed_of(seed: object, q: object) -> Tensor:
    if not is_integer(seed) or not 0 <= seed < 2**63:
        raise InputError(
            f"dropout_seed must be None, a tensor or an integer in 0..2**63-1, got {short(seed)}"
        )
    device = q.device if isinstance(q, Tensor) else "cpu"  # what q is, is checked later
    return torch.full((), int(seed), dtype=torch.int64, device=device)


def completed(aux: AuxTensors, dropout_p: float, q: Tensor) -> AuxTensors:
    """Checked ``aux`` with what is not given where it is needed, on q's device.

    A seed of dropout comes from the device's default generator. Where one side of the intervals of rows is
    given, the other one is the first row, or behind the last one.
    """
    if not torch.compiler.is_compiling() and aux is NO_AUX and not dropout_p:
        return aux
    if dropout_p and aux.dropout_seed is None:
        seed: Tensor | None = torch.randint(2**63 - 1, (), device=q.device)
    else:
        seed = aux.dropout_seed
    rows = _both_sides(aux.row_starts, aux.row_ends, q.device)
    return AuxTensors(aux.learnable_sink, aux.alibi_slopes, seed, *rows)


def _both_sides(
    starts: Tensor | None, ends: Tensor | None, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    if starts is ends is None:
        return None, None
    starts, ends = (None if x is None else x.to(device).contiguous() for x in (starts, ends))
    if starts is None:
        assert ends is not None
        starts = torch.zeros_like(ends)
    elif ends is None:
        ends = torch.full_like(starts, 2**31 - 1)
    return starts, ends


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing | Used | None,
    asked: Asked,
    aux: AuxTensors = NO_AUX,
) -> CheckedCall:
    """Check the arguments of a call. What needs the lengths of a packed batch is checked when it runs."""
    _check_tensors(q, k, v, packing)
    q, k, v = _autocast(q, k, v)
    _check_dtypes(q, k, v)
    if packing is None:
        _check_dense(q, k, v)
    elif isinstance(packing, Used):
        packing = _checked_used(packing, q, k)
        _check_packed(q, k, v)
    else:
        packing = _checked_packing(packing, q.device)
        _check_packed(q, k, v)
    check_aux(aux, q, q.shape[0] if packing is None else packing.sequences)
    check_rows(aux, k, packing)
    if isinstance(packing, Used) and not torch.compiler.is_compiling():  # it sees the operator, which refuses
        refuse_gradients(q, k, v, *aux)
    return CheckedCall(q, k, v, aux, spec_of(q, asked, aux), packing)


def check_planned(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Tensors of a given plan, cast if autocast says so, and the scale. Shapes and dtypes are the plan's."""
    forms = ((3, 4), "3 or 4 dimensions (total or batch and seqlen, heads, head_dim)")
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, q, *forms)
    q, k, v = _autocast(q, k, v)
    return q, k, v, scale_of(softmax_scale, q.shape[-1])


def spec_of(q: Tensor, asked: Asked, aux: AuxTensors) -> AttentionSpec:
    """What is asked besides the tensors, checked."""
    left, right = sides_of(check_flag("causal", asked.causal), asked.window)
    ordered = check_flag("deterministic", asked.deterministic)
    scale = scale_of(asked.softmax_scale, q.shape[-1])
    return AttentionSpec(
        softmax_scale=scale,
        left=left,
        right=right,
        policy=policy_key(asked.policy),
        ordered=ordered,
        backend=check_backend(asked.backend),
        q_segment=check_q_segment(asked.q_segment),
        softcap=check_softcap(asked.softcap, scale),
        dropout_p=check_dropout(asked.dropout_p),
        **given_by(aux),
    )


_LAYOUTS = {4: "(batch, seqlen, heads, head_dim)", 3: "(total, heads, head_dim)"}


def _forms(packing: Packing | Used | None) -> tuple[tuple[int, str], tuple[int, str]]:
    """Dimensions of q and of k, with the reason where it is not plain."""
    if not isinstance(packing, Used):
        return ((4, ""),) * 2 if packing is None else ((3, ""),) * 2
    dense_q, dense_k = packing.cu_seqlens_q is None, packing.cu_seqlens_k is None
    return (
        (4, " without cu_seqlens_q") if dense_q else (3, " with cu_seqlens_q"),
        (4, " without cu_seqlens_k") if dense_k else (3, " with cu_seqlens_k"),
    )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, packing: Packing | Used | None) -> None:
    """Types, layouts, dimensions and devices."""
    form_q, form_k = _forms(packing)
    for name, x, (ndim, why) in (("q", q, form_q), ("k", k, form_k), ("v", v, form_k)):
        check_tensor(name, x, q, (ndim,), f"{ndim} dimensions {_LAYOUTS[ndim]}{why}")
    check_device(q.device)


def check_tensor(name: str, x: object, q: Tensor, ndim: tuple[int, ...], dimensions: str) -> None:
    """A dense tensor on q's device with one of these numbers of dimensions, which the error calls so."""
    if type(x).__name__ == "DTensor":  # by name: importing it is slow
        raise InputError(
            f"{name} is a DTensor: give {name}.to_local(), or use dash_attn.distributed for sequences that "
            "are spread over ranks"
        )
    x = dense(name, x)
    if x.ndim not in ndim:
        raise InputError(f"{name} must have {dimensions}, got shape {tuple(x.shape)}")
    if x.device != q.device:
        raise InputError(f"{name} is on {x.device}, q is on {q.device}")


def dense(name: str, x: object) -> Tensor:
    """What is a dense tensor."""
    if not isinstance(x, Tensor):
        raise InputError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.layout != torch.strided or x.is_nested:
        layout = "nested" if x.is_nested else x.layout
        raise InputError(f"{name} must be a dense tensor, got layout {layout}")
    return x


def _autocast(q: Tensor, *others: Tensor) -> list[Tensor]:
    device, tensors = q.device.type, [q, *others]
    if not torch.is_autocast_enabled(device):
        return tensors
    return [cast_to(torch.get_autocast_dtype(device), x) for x in tensors]


def cast_to(dtype: torch.dtype, x: Tensor) -> Tensor:
    """As autocast does it for PyTorch's own attention: all but float64 becomes one dtype."""
    return x.to(dtype) if x.dtype in (torch.float32, torch.float16, torch.bfloat16) else x


def _check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dtype(name, x)
        if x.dtype != q.dtype:
            raise InputError(f"{name} has dtype {x.dtype}, q has {q.dtype}")


def check_dtype(name: str, x: Tensor) -> None:
    """Raise InputError if nothing here computes with a tensor of this dtype."""
    if x.dtype not in DTYPE_NAMES:
        raise InputError(f"{name} must be one of {', '.join(DTYPES)}, got {x.dtype}")


def _check_dense(q: Tensor, k: Tensor, v: Tensor) -> None:
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise InputError(
            f"k has batch {k.shape[0]} and head_dim {k.shape[3]}, q has {q.shape[0]} and {q.shape[3]}"
        )
    _check_rows_of_v(k, v)


def _check_packed(q: Tensor, k: Tensor, v: Tensor) -> None:
    if k.shape[-1] != q.shape[-1]:
        raise InputError(f"k has head_dim {k.shape[-1]}, q has {q.shape[-1]}")
    _check_rows_of_v(k, v)


def _check_rows_of_v(k: Tensor, v: Tensor) -> None:
    if k.shape[:-1] != v.shape[:-1]:
        raise InputError(f"k has shape {tuple(k.shape)}, v has {tuple(v.shape)}: only head_dim may differ")


def check_aux(aux: AuxTensors, q: Tensor, batch: int) -> None:
    """Raise InputError if a tensor cannot stand beside q; ``batch``: how many sequences there are."""
    heads = q.shape[-2]
    if aux.learnable_sink is not None:
        dtypes = tuple(dict.fromkeys((q.dtype, torch.float32)))
        _check_beside("learnable_sink", aux.learnable_sink, q, {"(heads,)": (heads,)}, dtypes)
    if aux.alibi_slopes is not None:
        shapes = {"(heads,)": (heads,), "(batch, heads)": (batch, heads)}
        _check_beside("alibi_slopes", aux.alibi_slopes, q, shapes, (torch.float32,))
        if aux.alibi_slopes.requires_grad:
            raise InputError("alibi_slopes require a gradient, which they do not get: give them detached")
    if aux.dropout_seed is not None:
        _check_beside("dropout_seed", aux.dropout_seed, q, {"()": ()}, (torch.int64,))


def _check_beside(
    name: str, x: object, q: Tensor, shapes: dict[str, tuple[int, ...]], dtypes: tuple[torch.dtype, ...]
) -> None:
    x = dense(name, x)
    if tuple(x.shape) not in shapes.values():
        allowed = " or ".join(f"{names} = {sizes}" if sizes else names for names, sizes in shapes.items())
        raise InputError(f"{name} must have shape {allowed}, got shape {tuple(x.shape)}")
    if x.dtype not in dtypes:
        raise InputError(f"{name} must be {' or '.join(map(str, dtypes))}, got {x.dtype}")
    if x.device != q.device:
        raise InputError(f"{name} is on {x.device}, q is on {q.device}")


def _checked_packing(packing: Packing, device: torch.device) -> Packing:
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = packing
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_int32(name, x, device, ("batch + 1",), least=1)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise InputError(
            f"cu_seqlens_k has {cu_seqlens_k.shape[0] - 1} sequences, "
            f"cu_seqlens_q has {cu_seqlens_q.shape[0] - 1}"
        )
    both = (longest("max_seqlen_q", max_seqlen_q), longest("max_seqlen_k", max_seqlen_k))
    return Packing(cu_seqlens_q, cu_seqlens_k, *both)


def _checked_used(used: Used, q: Tensor, k: Tensor) -> Used:
    cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k = used
    check_int32("seqused_k", seqused_k, q.device, ("batch",))
    batch = seqused_k.shape[0]
    for name, x, cu_seqlens in (("q", q, cu_seqlens_q), ("k", k, cu_seqlens_k)):
        if cu_seqlens is None:
            found, text = x.shape[0], f"{name} has batch {{}}"
        else:
            check_int32(f"cu_seqlens_{name}", cu_seqlens, q.device, ("batch + 1",), least=1)
            found, text = cu_seqlens.shape[0] - 1, f"cu_seqlens_{name} has {{}} sequences"
        if found != batch:  # only here: a size in a text is no longer dynamic for torch.compile
            raise InputError(f"seqused_k has {batch} sequences, {text.format(found)}")
    both = (longest("max_seqlen_q", max_seqlen_q), longest("max_seqlen_k", max_seqlen_k))
    return Used(cu_seqlens_q, cu_seqlens_k, seqused_k, *both)


def check_rows(aux: AuxTensors, k: Tensor, packing: Packing | Used | None) -> None:
    """Raise InputError if intervals of rows cannot stand beside k. Their values are not read: an interval may
    hold no row, or rows that do not exist."""
    for name, x in (("row_starts", aux.row_starts), ("row_ends", aux.row_ends)):
        if x is None:
            continue
        if isinstance(packing, Used):
            raise InputError(f"{name} is not supported with seqused_k")
        check_int32(name, x, k.device, tuple(k.shape[:-2]), note=", a row per key")


def check_int32(
    name: str, x: object, device: torch.device, shape: tuple[int | str, ...], least: int = 0, note: str = ""
) -> None:
    """Raise InputError unless it is an int32 tensor of a shape, on q's device or on the CPU.

    Args:
        name: of x in errors.
        x: what is given.
        device: of q.
        shape: a string stands for any size, and is its name in errors.
        least: the first size must not be less.
        note: follows the shape in errors.
    """
    x = dense(name, x)
    if x.dtype != torch.int32:
        raise InputError(f"{name} must be torch.int32, got {x.dtype}")
    # not `size in (...)`, which torch.compile gets wrong where one of them is a symbol
    fits = x.ndim == len(shape) and all(isinstance(n, str) or n == size for n, size in zip(shape, x.shape))
    if not fits or (least and x.shape[0] < least):
        sizes = f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
        raise InputError(f"{name} must have shape {sizes}{note}, got {tuple(x.shape)}")
    if x.device != device and x.device.type != "cpu":
        raise InputError(f"{name} is on {x.device}, q is on {device}; it may be there or on the cpu")
