"""Peers without a GPU: what FlashAttention-4 is asked for, and whose warnings are shown."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType

import pytest
import torch

from dash_attn.peers import fa4
from dash_attn.peers.registry import PEERS, Inputs, PackedLengths
from dash_attn.problem import Mask, Problem


class Interface(ModuleType):
    """Stands for FlashAttention-4: keeps its calls, and warns as its compiler does."""

    def __init__(self, *categories: type[Warning]) -> None:
        super().__init__("flash_attn.cute.interface")
        self.calls: list[tuple] = []
        self.categories = categories

    def _call(self, tensors: tuple, options: dict) -> tuple:
        self.calls.append((tensors, options))
        for category in self.categories:
            warnings.simplefilter("always", category)  # as the compiler does before a deprecation
            warnings.warn_explicit(f"a {category.__name__}", category, "flash_fwd.py", len(self.calls))
        return (*tensors, None)

    def _flash_attn_fwd(self, *tensors: torch.Tensor, **options: object) -> tuple:
        return self._call(tensors, options)

    def _flash_attn_bwd(self, *tensors: torch.Tensor, **options: object) -> tuple:
        return self._call(tensors, options)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Installs a stand-in for FlashAttention-4 of which nothing has been called yet."""
    monkeypatch.setattr(fa4, "_CALLED", set())

    def put(*categories: type[Warning]) -> Interface:
        interface = Interface(*categories)
        for name in ("flash_attn", "flash_attn.cute"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
        return interface

    return put


Q, K, V = (torch.zeros(1, 8, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (Mask.full(), {"causal": False}),
        (Mask.causal(), {"causal": True}),
        (Mask.window(3, 0), {"causal": False, "window_size_left": 3, "window_size_right": 0}),
        (Mask.window(None, 5), {"causal": False, "window_size_left": None, "window_size_right": 5}),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_fa4_is_asked_for_the_mask(install, mask: Mask, options: dict) -> None:
    interface = install()
    out, lse = fa4.forward(Q, K, V, 0.5, mask)
    assert (out is Q, lse is K) == (True, True)
    inputs = Inputs(Problem.dense(seqlen=8, heads=4, kv_heads=2, mask=mask), Q, Q, K, V, Q, Q, (), 0.5)
    assert len(fa4.backward(inputs, deterministic=True)()) == 3
    (_, forward), (_, backward) = interface.calls
    assert forward == {**options, "softmax_scale": 0.5, "return_lse": True}
    assert backward == {**options, "softmax_scale": 0.5, "deterministic": True}


def test_fa4_is_told_where_sequences_begin(install) -> None:
    interface = install()
    problem = Problem.varlen([(5, 7), (3, 9)], heads=4, kv_heads=2)
    bounds = (torch.tensor([0, 5, 8]), torch.tensor([0, 7, 16]))
    fa4.forward(Q[0], K[0], V[0], 0.5, problem.mask, PackedLengths(*bounds, 5, 9))
    fa4.backward(Inputs(problem, Q[0], Q[0], K[0], V[0], Q[0], Q[0], bounds, 0.5), deterministic=False)()
    for _, options in interface.calls:
        assert options["cu_seqlens_q"] is bounds[0]
        assert options["cu_seqlens_k"] is bounds[1]
        assert (options["max_seqlen_q"], options["max_seqlen_k"]) == (5, 9)


def test_tensors_of_the_backward_are_in_fa4s_order(install) -> None:
    interface = install()
    dout, q, k, v, out, lse = (torch.zeros(1, 8, 4, 64) for _ in range(6))
    fa4.backward(Inputs(Problem.dense(seqlen=8), dout, q, k, v, out, lse, (), 0.5), deterministic=True)()
    assert [id(x) for x in interface.calls[0][0]] == [id(x) for x in (q, k, v, out, dout, lse)]


def shown(call) -> list[type[Warning]]:
    """Categories of the warnings that a caller sees."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [w.category for w in caught]


def test_the_compilers_warnings_are_dropped_at_the_first_call_and_no_others(install) -> None:
    install(DeprecationWarning, RuntimeWarning, UserWarning, FutureWarning)

    def forward() -> None:
        fa4.forward(Q, K, V, 0.5, Mask.causal())

    assert shown(forward) == [RuntimeWarning, FutureWarning]
    # Nothing is compiled any more, so a warning is of another kind and the caller's filters decide.
    assert shown(forward) == [DeprecationWarning, RuntimeWarning, UserWarning, FutureWarning]
    # Another mask has kernels of its own.
    assert shown(lambda: fa4.forward(Q, K, V, 0.5, Mask.full())) == [RuntimeWarning, FutureWarning]


def test_the_callers_filters_hold_afterwards(install) -> None:
    install(DeprecationWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = list(warnings.filters)
        fa4.forward(Q, K, V, 0.5, Mask.causal())
        assert warnings.filters == before


def test_a_warning_that_is_an_error_to_the_caller_is_one(install) -> None:
    install(RuntimeWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="a RuntimeWarning"):
            fa4.forward(Q, K, V, 0.5, Mask.causal())


def test_modes_have_names_of_their_own() -> None:
    assert len({(peer.impl, peer.deterministic) for peer in PEERS}) == len(PEERS) == 6
