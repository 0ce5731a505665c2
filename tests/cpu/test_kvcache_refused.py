"""Calls over a cache of keys that are refused: each error names what is wrong, and nothing is appended."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from cache_cases import CACHE, NEW, PAGES, TABLE, USED, Q, draw, int32
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dash_attn import (
    Support,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    is_supported,
)
from dash_attn.backends.base import backend_named
from dash_attn.backends.cpu.cached import Cached
from dash_attn.cache_arguments import _lengths
from dash_attn.errors import InputError, MissingCompilerError
from dash_attn.ops.cached import _call
from dash_attn.ops.cached_values import check_tokens
from dash_attn.ops.operators import APPEND

LONG, WIDE = draw(2, 40, 2, 8, seed=4), draw(2, 32, 2, 16, seed=5)
SHARED = "k_cache and v_cache share memory, k and v do not in the same way: v would overwrite keys"

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rotary": ({"rotary_cos": Q}, "rotary_cos is not supported: rotate q and k before the call"),
    "k alone": ({"k": NEW}, "give k and v, or neither; got a Tensor and None"),
    "v alone": ({"v": NEW}, "give k and v, or neither; got None and a Tensor"),
    "no place": ({"k": NEW, "v": NEW}, "k and v need cache_seqlens, which says where they go; got None"),
    "new rows": (
        {"k": NEW, "v": NEW[:, :2], "cache_seqlens": 0},
        "v has 2 new tokens, k has 3",
    ),
    "new shape": (
        {"k": NEW[:1], "v": NEW, "cache_seqlens": 0},
        r"k must have shape \(2, seqlen_new, 2, 8\), got \(1, 3, 2, 8\)",
    ),
    "one cache": ({"k": NEW, "v": -NEW, "cache_seqlens": 0}, SHARED),
    "v in k": (
        {"v_cache": CACHE[..., :4], "k": NEW, "v": NEW[..., :4].clone(), "cache_seqlens": 0},
        SHARED,
    ),
    "other columns": (
        {"v_cache": CACHE[..., :4], "k": NEW, "v": NEW[..., 4:], "cache_seqlens": 0},
        SHARED,
    ),
    "shifted": (
        {"k_cache": LONG[:, :32], "v_cache": LONG[:, 2:34], "k": NEW, "v": NEW, "cache_seqlens": 0},
        SHARED,
    ),
    "other rows": (
        {"k": NEW, "v": NEW[:1].expand(2, -1, -1, -1), "cache_seqlens": 0},
        SHARED,
    ),
    "shifted alike": (
        {"k_cache": LONG[:, :32], "v_cache": LONG[:, 2:34], "k": LONG[:, :3], "v": LONG[:, 2:5],
         "cache_seqlens": 9},
        SHARED,
    ),
    "other heads": (
        {"k_cache": WIDE[..., :8], "v_cache": WIDE.as_strided((2, 32, 2, 8), (1024, 32, 8, 1), 8),
         "k": WIDE[:, :3, :, :8], "v": WIDE[:, :3, :, 8:], "cache_seqlens": 9},
        SHARED,
    ),
    "new dtype": ({"k": NEW.half(), "v": NEW, "cache_seqlens": 0}, "k has dtype torch.float16, q has"),
    "new layout": (
        {"k": NEW.to_sparse(), "v": NEW, "cache_seqlens": 0},
        "k must be a dense tensor, got layout torch.sparse_coo",
    ),
    "layout": ({"cache_seqlens": USED.to_sparse()}, "cache_seqlens must be a dense tensor, got layout"),
    "too many": (
        {"cache_seqlens": int32(3, 33)},
        "cache_seqlens has 33 at 1, but sequence 1 has room for 32",
    ),
    "too many with new ones": (
        {"k": NEW, "v": NEW, "cache_seqlens": int32(30, 2)},
        "cache_seqlens has 30 at 0 and 3 new ones, but sequence 0 has room for 32 keys",
    ),
    "negative": ({"cache_seqlens": int32(3, -1)}, "cache_seqlens must not be negative, got -1 at 1"),
    "number": ({"cache_seqlens": 33}, "cache_seqlens is 33, a sequence has room for 0 to 32 keys"),
    "number with pages": (
        {"k_cache": PAGES, "v_cache": PAGES, "page_table": TABLE, "cache_seqlens": 33},
        "cache_seqlens is 33, a sequence has room for 0 to 32 keys",
    ),
    "flag": ({"cache_seqlens": True}, "cache_seqlens must be None, an integer or a tensor, got True"),
    "int64": ({"cache_seqlens": USED.long()}, "cache_seqlens must be torch.int32, got torch.int64"),
    "shape": ({"cache_seqlens": int32(3)}, r"cache_seqlens must have shape \(2,\), got \(1,\)"),
    "batch": ({"k_cache": CACHE[:1], "v_cache": CACHE[:1]}, "k_cache has batch 1, q has 2: give cache_batch"),
    "place": (
        {"cache_batch_idx": int32(0, 2), "cache_seqlens": 3},
        "cache_batch_idx has 2 at 1, k_cache has 2",
    ),
    "page": (
        {"k_cache": PAGES, "v_cache": PAGES, "page_table": TABLE + 2, "cache_seqlens": USED},
        r"page_table has 5 at \(0, 0\), there are 4 pages",
    ),
    "page size": (
        {"page_table": TABLE, "k_cache": CACHE[:, :24], "v_cache": CACHE[:, :24]},
        "pages must have 16, 32, 64, 128, 256 tokens, got pages of shape",
    ),
    "table": (
        {"k_cache": PAGES, "v_cache": PAGES, "page_table": TABLE[0]},
        r"page_table must have shape \(2, any\), got \(2,\)",
    ),
    "two places": (
        {"k_cache": PAGES, "v_cache": PAGES, "page_table": TABLE, "cache_batch_idx": USED},
        "cache_batch_idx is not supported with page_table",
    ),
    "two tables": ({"page_table": TABLE, "block_table": TABLE}, "give page_table or block_table, got both"),
    "v": ({"v_cache": CACHE[:, :9]}, r"k_cache has shape \(2, 32, 2, 8\), v_cache has \(2, 9, 2, 8\)"),
    "head_dim": ({"k_cache": CACHE[..., :4], "v_cache": CACHE}, "k_cache has head_dim 4, q has 8"),
    "heads": ({"q": Q[:, :, :3]}, r"heads \(3\) must be a multiple of kv_heads \(2\)"),
    "dtype": ({"k_cache": CACHE.half()}, "k_cache has dtype torch.float16, q has torch.float32"),
    "dtype of all": (
        {"q": Q.int(), "k_cache": CACHE.int(), "v_cache": CACHE.int()},
        "q must be one of bfloat16, float16, float32, float64, got torch.int32",
    ),
    "dtype of a cache": (
        {"k_cache": CACHE.to(torch.float8_e4m3fn)},
        "k_cache must be one of bfloat16, float16, float32, float64, got torch.float8_e4m3fn",
    ),
    "ndim": ({"q": Q[0]}, r"q must have 4 dimensions, got shape \(3, 4, 8\)"),
    "gradient": ({"q": Q.clone().requires_grad_()}, "a cache of keys has no backward: call it under"),
    "gradient of keys": ({"k_cache": CACHE.clone().requires_grad_()}, "a cache of keys has no backward"),
    "gradient of values": ({"v_cache": CACHE.clone().requires_grad_()}, "a cache of keys has no backward"),
    "gradient of new keys": (
        {"k": NEW.clone().requires_grad_(), "v": NEW, "cache_seqlens": 0},
        "a cache of keys has no backward",
    ),
    "gradient of new values": (
        {"k": NEW, "v": NEW.clone().requires_grad_(), "cache_seqlens": 0},
        "a cache of keys has no backward",
    ),
    "gradient of a sink": (
        {"learnable_sink": torch.zeros(4, requires_grad=True)},
        "a cache of keys has no backward",
    ),
    "sink": ({"learnable_sink": torch.zeros(3)}, r"learnable_sink must have shape \(heads,\) = \(4,\), got"),
    "leftpad": ({"cache_leftpad": USED}, "cache_leftpad=a tensor .* is not supported, only None"),
    "backend": ({"backend": "sm90"}, "the sm90 backend does not run on cpu"),
    "alibi": ({"alibi_slopes": USED}, "alibi_slopes=a tensor .* is not supported, only None"),
    "packed q": ({"cu_seqlens_q": USED}, "cu_seqlens_q=a tensor .*; flash_attn_varlen_func has it"),
    "longest q": ({"max_seqlen_q": 3}, "max_seqlen_q=3 is not supported, only None"),
    "metadata": ({"scheduler_metadata": USED}, "scheduler_metadata=a tensor .* is not supported, only None"),
    "a place twice": (
        {"k": NEW, "v": NEW, "cache_seqlens": 3, "cache_batch_idx": int32(1, 1)},
        "cache_batch_idx has 1 at 0 and at 1: no place may be given twice where tokens are appended",
    ),
    "expanded": (
        {"k_cache": CACHE[:1].expand(2, -1, -1, -1), "k": NEW, "v": NEW, "cache_seqlens": 3},
        r"k_cache has tokens that share memory: shape \(2, .*\), strides \(0, 16, 8, 1\)",
    ),
    "steps shorter than a token": (
        {"v_cache": CACHE.as_strided(CACHE.shape, (512, 8, 8, 1)), "k": NEW, "v": NEW, "cache_seqlens": 3},
        r"v_cache has tokens that share memory: shape .*, strides \(512, 8, 8, 1\)",
    ),
    "a number with new ones": (
        {"k": NEW, "v": NEW, "cache_seqlens": 30},
        "cache_seqlens is 30, with 3 new ones; a sequence has room for 32 keys",
    ),
    "a page twice": (
        {"k": NEW, "v": NEW, "cache_seqlens": int32(14, 5), "page_table": int32(3, 1, 1, 2).view(2, 2),
         "k_cache": PAGES, "v_cache": PAGES},
        r"page_table has 1 at \(0, 1\) and at \(1, 0\): no place may be given twice where tokens",
    ),
}  # fmt: skip


def supported(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any = None, v: Any = None, **how: Any
) -> Support:
    """Whether the same call of ``flash_attn_with_kvcache`` would be accepted."""
    new = None if k is None and v is None else (k, v)
    if new is None and not how.keys() & {"cache_seqlens", "cache_batch_idx", "page_table"}:
        how["cache_seqlens"] = k_cache.shape[1]  # a full cache has nothing else that says whose call it is
    return is_supported(q, k_cache, v_cache, new=new, **how)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_calls_name_what_is_wrong(case: str) -> None:
    changed, message = REFUSED[case]
    given = {"q": Q, "k_cache": CACHE, "v_cache": CACHE} | changed
    with pytest.raises(InputError, match=message) as error:
        flash_attn_with_kvcache(**given)
    assert supported(**given) == Support(False, str(error.value))


PAGED_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "lengths": ({"seqused_k": None}, "page_table needs seqused_k and no cu_seqlens_k, got None and None"),
    "ends of k": (
        {"cu_seqlens_k": int32(0, 3, 6)},
        "page_table needs seqused_k and no cu_seqlens_k, got a Tensor and a Tensor",
    ),
    "no end": ({"cu_seqlens_q": int32()}, r"cu_seqlens_q must have shape \(batch \+ 1,\), got \(0,\)"),
    "gradient": ({"v": PAGES.clone().requires_grad_()}, "has no backward: call it under"),
    "gradient of a sink": (
        {"learnable_sink": torch.zeros(4, requires_grad=True)},
        "has no backward: call it",
    ),
    "sink": ({"learnable_sink": torch.zeros(3)}, r"learnable_sink must have shape \(heads,\) = \(4,\), got"),
    "ends": ({"cu_seqlens_q": int32(0, 3, 7)}, "cu_seqlens_q ends at 7, q has 6 rows"),
    "batch": ({"cu_seqlens_q": int32(0, 6)}, r"seqused_k must have shape \(1,\), got \(2,\)"),
    "longest": ({"max_seqlen_q": 2}, "max_seqlen_q is 2, the longest sequence has 3"),
    "longest of k": ({"max_seqlen_k": 28}, "max_seqlen_k is 28, the longest sequence has 29"),
    "rows": (
        {"q": Q, "cu_seqlens_q": None, "max_seqlen_q": 2},
        "max_seqlen_q is 2, q has 3 rows per sequence",
    ),
    "too many": ({"seqused_k": int32(33, 2)}, "seqused_k has 33 at 0, but sequence 0 has room for 32 keys"),
    "alibi": ({"alibi_slopes": torch.ones(4)}, "alibi_slopes is not supported with page_table"),
    "dropout": ({"dropout_p": 0.5}, "dropout_p 0.5 is not supported with page_table"),
    "dropouts": ({"dropout_p": np.ones(2)}, r"dropout_p must be at least 0 and less than 1, got array"),
}


@pytest.mark.parametrize("case", PAGED_REFUSED)
def test_refused_calls_with_pages(case: str) -> None:
    changed, message = PAGED_REFUSED[case]
    given = {
        "q": Q.flatten(0, 1), "k": PAGES, "v": PAGES, "cu_seqlens_q": int32(0, 3, 6), "seqused_k": USED,
        "page_table": TABLE,
    }  # fmt: skip
    flash_attn_varlen_func(**given)
    assert is_supported(**given) == Support(True, "", "cpu")
    with pytest.raises(InputError, match=message) as error:
        flash_attn_varlen_func(**(given | changed))
    assert is_supported(**(given | changed)) == Support(False, str(error.value))


def test_others_say_who_has_pages() -> None:
    with pytest.raises(InputError, match="flash_attn_varlen_func and flash_attn_with_kvcache have it"):
        flash_attn_func(Q, Q, Q, page_table=TABLE)


STRANGE: dict[str, dict[str, Any]] = {
    "alibi": {"alibi_slopes": torch.ones(4)},
    "dropout": {"dropout_p": 0.5},
    "policy": {"policy": "descending"},
    "order": {"deterministic": False},
    "segments": {"q_segment": 128},
    "rows": {"row_ends": int32(1, 2)},
    "packed q": {"cu_seqlens_q": int32(0, 3, 6)},
    "used keys": {"seqused_k": USED},
}


@pytest.mark.parametrize("name", STRANGE)
def test_arguments_of_other_functions(name: str) -> None:
    with pytest.raises((InputError, TypeError)) as error:
        flash_attn_with_kvcache(Q, CACHE, CACHE, cache_seqlens=USED, **STRANGE[name])
    found = is_supported(Q, CACHE, CACHE, cache_seqlens=USED, **STRANGE[name])
    assert found == Support(False, str(error.value))


@pytest.mark.parametrize("new", [(NEW,), NEW, 5], ids=["one", "tensor", "int"])
def test_new_tokens_that_are_no_pair(new: Any) -> None:
    said = is_supported(Q, CACHE, CACHE, cache_seqlens=USED, new=new).reason
    assert said.startswith("new must be None or (k, v), got ")


def test_what_is_supported_is_not_run() -> None:
    caches = CACHE.clone(), CACHE.clone()
    given = {"cache_seqlens": USED, "causal": True, "learnable_sink": torch.zeros(4), "softcap": 3.0}
    assert is_supported(Q, *caches, new=(NEW, NEW), **given) == Support(True, "", "cpu")
    assert all(torch.equal(x, CACHE) for x in caches)
    assert is_supported(Q, PAGES, PAGES, page_table=TABLE, window_size=(3, 0)).backend == "cpu"
    assert is_supported(Q, PAGES, PAGES, block_table=TABLE, seqused_k=USED).backend == "cpu"
    assert is_supported(Q, CACHE, CACHE, cache_batch_idx=int32(1, 1)).backend == "cpu"
    assert is_supported(Q, CACHE, CACHE, cache_seqlens=USED, return_softmax_lse=True).backend == "cpu"
    assert not is_supported(Q, CACHE, CACHE, cache_seqlens=USED, return_softmax_lse="yes")
    assert "dropout_seed" in is_supported(Q, CACHE, CACHE, cache_seqlens=USED, dropout_seed=5).reason
    assert not is_supported(Q, CACHE, CACHE, cache_seqlens=USED, new=torch.zeros(3))
    assert is_supported(Q[:0], CACHE[:0], CACHE[:0], cache_seqlens=0)


def test_nothing_is_appended_for_a_call_that_no_backend_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    _call.cache_clear()
    monkeypatch.setattr(type(backend_named("cpu")), "why_not_cached", lambda *_: "no time")
    caches = CACHE.clone(), CACHE.clone()
    call = (Q, *caches, NEW, NEW)
    with pytest.raises(InputError, match="no time"):
        flash_attn_with_kvcache(*call, cache_seqlens=USED)
    assert all(torch.equal(x, CACHE) for x in caches)
    assert supported(*call, cache_seqlens=USED) == Support(False, "no time")


@pytest.mark.parametrize("wrong", [{"q": Q[:, :, :3]}, {"backend": "sm90"}])
@pytest.mark.parametrize("wrap", [None, "vmap", "mode"])
def test_nothing_is_appended_for_a_call_that_raises(wrong: dict[str, Any], wrap: str | None) -> None:
    caches, seen = (CACHE.clone(), CACHE.clone()), []
    given = {"q": Q, "k": NEW, "v": NEW, "cache_seqlens": 3} | wrong

    def call(q: Tensor) -> Tensor:
        return flash_attn_with_kvcache(q, *caches, *(given[x] for x in "kv"), **options)  # type: ignore

    options = {name: x for name, x in given.items() if name not in "qkv"}

    class Appends(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with pytest.raises(InputError), Appends() if wrap == "mode" else nullcontext():
        torch.vmap(call)(given["q"][None]) if wrap == "vmap" else call(given["q"])
    assert all(torch.equal(x, CACHE) for x in caches)
    assert APPEND not in seen


COMPILED: dict[str, tuple[dict[str, Any], str]] = {
    "a number": ({"cache_seqlens": 30}, "cache_seqlens is 30, with 3 new ones; a sequence has room for 32"),
    "a place twice": (
        {"cache_seqlens": USED, "cache_batch_idx": int32(1, 1)},
        "sequences 0 and 1 would both write to page 1",
    ),
    "a page twice": (
        {"cache_seqlens": int32(14, 5), "page_table": int32(3, 1, 1, 2).view(2, 2)},
        "sequences 0 and 1 would both write to page 1",
    ),
    "lengths": ({"cache_seqlens": int32(3, 30)}, "cache_seqlens has 30 at 1: no room for 3 new ones"),
}


@pytest.mark.parametrize("case", COMPILED)
def test_compiled_code_finds_before_it_writes_what_cannot_be_written(case: str) -> None:
    options, message = COMPILED[case]
    caches = [(PAGES if "page_table" in options else CACHE).clone() for _ in range(2)]
    before = [x.clone() for x in caches]
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_with_kvcache, backend="aot_eager")
    with pytest.raises(Exception, match=message):
        compiled(Q, *caches, NEW, NEW, **options)
    assert all(map(torch.equal, caches, before))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seqused_k": int32(33, 2)}, "sequence 0 would have 33 keys, there is room for 0 to 32"),
        ({"seqused_k": int32(3, -1)}, "sequence 1 would have -1 keys"),
        ({"cu_seqlens_q": int32(0, 7, 6)}, r"cu_seqlens_q must begin at 0, .* end at 6, got \[0, 7, 6\]"),
        ({"cu_seqlens_q": int32(0, 3, 5)}, r"cu_seqlens_q must begin at 0, .* end at 6, got \[0, 3, 5\]"),
    ],
)
def test_compiled_code_names_lengths_that_are_out_of_range(changed: dict[str, Any], message: str) -> None:
    given = {"cu_seqlens_q": int32(0, 3, 6), "seqused_k": USED, "page_table": TABLE} | changed
    compiled = torch.compile(flash_attn_varlen_func, fullgraph=True, backend="aot_eager")
    with pytest.raises(InputError, match=message):
        compiled(Q.flatten(0, 1), PAGES, PAGES, **given)


def test_a_kernel_that_cannot_be_had_is_found_before_the_append(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise MissingCompilerError("no compiler")

    monkeypatch.setattr(Cached, "load", load)
    caches = CACHE.clone(), CACHE.clone()

    def call(q: Tensor, new: Tensor = NEW) -> Tensor:
        return flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=USED)

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    for around, run in (
        (nullcontext(), call),
        (Mode(), call),
        (nullcontext(), torch.vmap(call)),
    ):
        with pytest.raises(MissingCompilerError), around:
            run(Q[None] if run is not call else Q)
        assert all(torch.equal(x, CACHE) for x in caches)
    call(Q[:, :0])  # nothing to compute: no kernel is needed
    assert not torch.equal(caches[0], CACHE)


def test_only_q_may_be_under_a_transform() -> None:
    call = partial(flash_attn_with_kvcache, Q, CACHE, CACHE, cache_seqlens=USED)
    both = torch.stack([USED, USED])
    for name, run in (
        ("k_cache", lambda: torch.vmap(lambda k: flash_attn_with_kvcache(Q, k, CACHE))(CACHE[None])),
        ("v_cache", lambda: torch.func.grad(lambda v: flash_attn_with_kvcache(Q, CACHE, v).sum())(CACHE)),
        ("cache_seqlens", lambda: torch.vmap(lambda n: call(cache_seqlens=n))(both)),
        ("k", lambda: torch.vmap(lambda k: call(k=k, v=k))(NEW[None])),
    ):
        with pytest.raises(InputError, match=f"^{name} is under a transform of torch.func"):
            run()
    paged = {"page_table": TABLE, "seqused_k": USED}
    with pytest.raises(InputError, match="^seqused_k is under a transform of torch.func"):
        torch.vmap(lambda n: flash_attn_varlen_func(Q, PAGES, PAGES, **{**paged, "seqused_k": n}))(both)
    with pytest.raises(InputError, match="a cache of keys has no backward"):
        torch.func.grad(lambda q: flash_attn_with_kvcache(q, CACHE, CACHE).sum())(Q)


def test_pages_that_are_written_must_be_there_though_no_row_sees_them() -> None:
    new, how = draw(2, 20, 2, 8), {"cache_seqlens": 0, "causal": True, "window_size": (0, 0)}
    for row, message in (
        ((-1, 0), r"page_table has -1 at \(0, 0\)"),
        ((2, 0), r"page_table has 2 at \(0, 0\) and at \(1, 0\)"),
    ):
        table = int32(*row, 2, 3).view(2, 2)
        with pytest.raises(InputError, match=message):
            flash_attn_with_kvcache(Q[:, :1], PAGES.clone(), PAGES.clone(), new, new, page_table=table, **how)


def test_what_the_host_knows_is_checked_wherever_lengths_are() -> None:
    """A number for all sequences; places of sequences beside lengths on another device."""
    q, elsewhere = Q.to("meta"), torch.empty(2, dtype=torch.int32, device="meta")
    all_keys: Any = {"rows": 3, "left": -1}
    before, known = _lengths(q, 29, 32, 3)
    assert before.device.type == "meta"
    assert known.tolist() == [29, 29]
    with pytest.raises(InputError, match="cache_seqlens is 30, with 3 new ones"):
        _lengths(q, 30, 32, 3)
    with pytest.raises(InputError, match="cache_seqlens has 29 at 0 and 4 new ones"):
        check_tokens("cache_seqlens", known, 4, elsewhere[:, None], CACHE, contiguous=True, **all_keys)
    for places, more, message in (
        (int32(0, 7), 0, "cache_batch_idx has 7 at 1, k_cache has 2"),
        (int32(-1, 0), 0, "cache_batch_idx has -1 at 0, k_cache has 2"),
        (int32(1, 1), 3, "cache_batch_idx has 1 at 0 and at 1"),
    ):
        with pytest.raises(InputError, match=message):
            check_tokens(
                "cache_seqlens", elsewhere, more, places[:, None], CACHE, contiguous=True, **all_keys
            )
    check_tokens("cache_seqlens", elsewhere, 0, int32(1, 1)[:, None], CACHE, contiguous=True, **all_keys)
    check_tokens("cache_seqlens", elsewhere, 3, TABLE + 9, PAGES, contiguous=False, **all_keys)


def test_tokens_are_appended_where_columns_lie_side_by_side() -> None:
    turned = CACHE.transpose(1, 3).contiguous().transpose(1, 3)
    with pytest.raises(InputError, match="k_cache must have a last dimension of stride 1") as error:
        flash_attn_with_kvcache(Q, turned, CACHE, NEW, NEW, cache_seqlens=USED)
    assert supported(Q, turned, CACHE, NEW, NEW, cache_seqlens=USED) == Support(False, str(error.value))
    assert supported(Q, turned, CACHE, cache_seqlens=USED)
