"""The Hopper kernels' machine code (its PTX) executed on the CPU: numbers, bytes, and the order of accesses.

See emulator/. Bits are not a GPU's, for wgmma and exp2 round in another way. But what must be equal is equal
here, too, and what nothing orders is found whether or not it does harm.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from emulator import backend as emulator_backend
from emulator import programs as emulator_programs
from emulator.backend import emulated
from emulator.memory import EarlyAccessError
from emulator.mutants import instead, unnoticed
from emulator.program import kernels_of as parsed
from emulator.races import RaceError
from torch import Tensor

from dash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from dash_attn.backends.base import AuxTensors
from dash_attn.backends.cpu.oracle import Inputs, plain_attention, sink_gradient
from dash_attn.backends.sm90 import backend
from dash_attn.backends.sm90.compile import variants
from dash_attn.backends.sm90.convert.config import FEW, MANY
from dash_attn.backends.sm90.forward import launch
from dash_attn.backends.sm90.segments import run_segment
from dash_attn.backends.sm90.tiles import TILES, has_softcap_apart
from dash_attn.problem import Mask
from dash_attn.scores import Scores
from dash_attn.testing import assert_same_bytes, same_bytes
from kvcache_cases import History, random_history

pytest.importorskip("cutlass", reason="the kernel compiler is not installed: pip install 'dash-attn[cuda]'")
pytest.importorskip("tvm_ffi", reason="the kernel compiler is not installed: pip install 'dash-attn[cuda]'")

slow = pytest.mark.slow
CAUSAL, WINDOW, BEHIND = Mask.causal(), Mask.window(100, 30), Mask.window(100, 0)


@dataclass(frozen=True)
class Case:
    """Packed sequences (queries, keys), and how they attend."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    heads: tuple[int, int]
    head_dim: int
    head_dim_v: int = 0
    mask: Mask = CAUSAL
    dtype: torch.dtype = torch.bfloat16
    sink: bool = False
    how: tuple[tuple[str, Any], ...] = ()

    def tensors(self) -> tuple[list[Tensor], Tensor]:
        """q, k, v and the sink if there is one; dout."""
        generator = torch.Generator().manual_seed(len(self.name))
        columns = self.head_dim_v or self.head_dim
        rows, keys = (sum(lengths) for lengths in zip(*self.sequences))
        shapes = [(rows, self.heads[0], self.head_dim), (keys, self.heads[1], self.head_dim)]
        shapes += [(keys, self.heads[1], columns), (rows, self.heads[0], columns)]
        q, k, v, dout = (torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes)
        sink = [torch.linspace(-1.0, 2.0, self.heads[0])] if self.sink else []
        return [x.requires_grad_() for x in (q, k, v, *sink)], dout

    @property
    def goes_apart(self) -> bool:
        """Whether there are kernels that keep contributions to dQ apart."""
        how, head_dims = dict(self.how), (self.head_dim, self.head_dim_v or self.head_dim)
        return "q_segment" not in how and ("softcap" not in how or has_softcap_apart(*head_dims))

    def forward(self, inputs: Sequence[Tensor], **how: Any) -> tuple[Tensor, Tensor]:
        """out and lse by the public functions."""
        left, right = self.mask.sides
        given = dict(self.how) | how
        given |= {"window_size": (left, right), "backend": "sm90", "return_lse": True}
        if self.sink:
            given["learnable_sink"] = inputs[3]
        if len(set(self.sequences)) == 1:
            batch = (x.unflatten(0, (len(self.sequences), -1)) for x in inputs[:3])
            out, lse = flash_attn_func(*batch, **given)
            out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
        else:
            bounds = [np.cumsum([0, *lengths]).tolist() for lengths in zip(*self.sequences)]
            most = [max(lengths) for lengths in zip(*self.sequences)]
            starts = [torch.tensor(each, dtype=torch.int32) for each in bounds]
            out, lse = flash_attn_varlen_func(*inputs[:3], *starts, *most, **given)
        return out, lse

    def run(self, **how: Any) -> dict[str, Tensor]:
        """out, lse and gradients."""
        inputs, dout = self.tensors()
        out, lse = self.forward(inputs, **how)
        gradients = torch.autograd.grad(out, inputs, dout)
        named = dict(zip(("dq", "dk", "dv", "dsink"), gradients))
        return {"out": out.detach(), "lse": lse.detach(), **named}

    def expected(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The same by plain attention in a dtype."""
        inputs, dout = self.tensors()
        q, k, v, *sink = (x.detach() for x in inputs)
        aux = AuxTensors(learnable_sink=sink[0]) if sink else AuxTensors()
        bounds = [np.cumsum([0, *lengths]).tolist() for lengths in zip(*self.sequences)]
        parts, dsink = [], torch.zeros(self.heads[0], dtype=torch.float64)
        for (top, bottom), (first, last) in zip(*map(pairwise, bounds)):
            rows, keys = slice(top, bottom), slice(first, last)
            one = Inputs(dout[rows], q[rows], k[keys], v[keys])
            scores = Scores(self.head_dim**-0.5, softcap=dict(self.how).get("softcap", 0.0), sink=self.sink)
            parts.append(plain_attention(one, self.mask, scores, dtype, aux=aux))
            if sink:
                dsink += sink_gradient(one.dout, parts[-1], sink[0])
        found = {n: torch.cat([getattr(p, n) for p in parts]) for n in ("out", "dq", "dk", "dv")}
        found["lse"] = torch.cat([p.lse for p in parts], 1)
        return found | ({"dsink": dsink} if sink else {})


CAP = ("softcap", 15.0)
PACKED = ((150, 150), (1, 70), (0, 33), (40, 0), (129, 260))
CASES = [
    Case("causal", ((300, 300),), (2, 1), 64),
    Case("full-128", ((140, 300),), (1, 1), 128, mask=Mask.full()),
    Case("causal-128-groups", ((280, 280),), (2, 1), 128),
    Case("few-rows", ((40, 2000),), (1, 1), 64),
    Case("packed", PACKED, (2, 2), 64),
    Case("packed-128-fp16", PACKED, (1, 1), 128, dtype=torch.float16),
    Case("batch", ((130, 150),) * 2, (2, 1), 64),
    Case("batch-of-72-40", ((100, 150),) * 2, (1, 1), 72, 40),
    Case("window-fp16", ((260, 330),), (1, 1), 64, mask=WINDOW, dtype=torch.float16),
    Case("head-groups", ((200, 200),), (8, 1), 64),
    Case("sink", ((200, 200),), (2, 2), 64, sink=True),
    Case("sink-128-packed", PACKED, (2, 1), 128, sink=True),
    Case("padded-72", ((200, 200),), (2, 1), 72),
    Case("padded-40-32", ((200, 200),), (1, 1), 40, 32),
    Case("segments", ((300, 300),), (2, 1), 64, how=(("q_segment", 128),)),
    Case("segments-128-window", ((200, 290),), (1, 1), 128, mask=BEHIND, how=(("q_segment", 128),)),
    Case("softcap-far", ((140, 200),), (2, 1), 64, how=(("softcap", 1.5),)),
    Case("softcap-far-128", ((140, 200),), (1, 1), 128, how=(("softcap", 1.5),)),
    Case("segments-softcap-sink", ((200, 200),), (2, 1), 64, sink=True, how=(("q_segment", 128), CAP)),
    Case("softcap", ((200, 200),), (2, 1), 64, how=(CAP,)),
    Case(
        "softcap-sink-128-fp16", PACKED, (2, 2), 128, dtype=torch.float16, sink=True, how=(("softcap", 30.0),)
    ),
    Case("softcap-padded", ((150, 200),), (1, 1), 96, mask=WINDOW, how=(("softcap", 50.0),)),
    Case("rings", ((300, 300),), (2, 2), 64, mask=Mask.full(), how=(("policy", "shift(ring=3)"),)),
    Case("symmetric", ((300, 300),), (2, 2), 64, how=(("policy", "symmetric_shift"),)),
    Case("wide", ((300, 300),), (2, 1), 192, 128),
    Case("wide-full", ((140, 300),), (1, 1), 192, 128, mask=Mask.full(), dtype=torch.float16),
    Case("wide-packed", PACKED, (2, 2), 192, 128),
    Case("wide-packed-sink", PACKED, (2, 1), 192, 128, sink=True),
    Case("wide-window-segments", ((200, 290),), (2, 1), 192, 128, mask=BEHIND, how=(("q_segment", 128),)),
    Case("wide-head-groups", ((200, 200),), (8, 1), 192, 128),
    Case("wide-padded-160-96", ((200, 200),), (2, 1), 160, 96),
    Case("wide-rings", ((300, 300),), (2, 2), 192, 128, mask=Mask.full(), how=(("policy", "shift(ring=3)"),)),
    Case("large", ((200, 260),), (2, 1), 256),
    Case("large-full", ((140, 200),), (1, 1), 256, mask=Mask.full(), dtype=torch.float16),
    Case("large-packed", PACKED, (2, 2), 256),
    Case("large-packed-sink", PACKED, (2, 1), 256, sink=True),
    Case("large-window-segments", ((200, 290),), (2, 1), 256, mask=BEHIND, how=(("q_segment", 128),)),
    Case("large-softcap", ((140, 200),), (2, 1), 256, how=(CAP,)),
    Case("large-softcap-far", ((140, 200),), (1, 1), 256, how=(("softcap", 1.5),)),
    Case("large-head-groups", ((140, 140),), (8, 1), 256),
    Case("large-padded", ((150, 200),), (2, 1), 200, 232, mask=WINDOW),
    Case("large-padded-160", ((150, 200),), (1, 1), 160),
    Case("large-batch-of-160", ((70, 90),) * 2, (1, 1), 160),
    Case("large-v-of-24-columns", ((150, 150),), (2, 1), 256, 24),
    Case("large-q-of-40-columns", ((150, 150),), (2, 1), 40, 256, mask=WINDOW),
    Case("large-padded-groups-fp16", ((70, 70),), (8, 1), 248, dtype=torch.float16),
    Case("large-rings", ((300, 300),), (2, 2), 256, mask=Mask.full(), how=(("policy", "shift(ring=3)"),)),
]


@slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numbers_and_bytes(case: Case) -> None:
    """Errors are at most twice those of plain attention in the same dtype; nothing that matters is left
    without an order; another interleaving, more blocks, work that is done at once, and products of a forward
    in turns, or not, or of one warpgroup per block, leave all bytes."""
    at = CASES.index(case)
    with (
        emulated(blocks=4, seed=1, races=True, turns=at % 2 == 0, narrow=at % 3 == 0),
        mock.patch.object(backend, "run_segment", wraps=run_segment) as cut,
    ):
        found = case.run()
    assert (cut.call_count > 1) == ("q_segment" in dict(case.how))
    assert_near(case, found)
    with emulated(blocks=6, seed=2, late=False, turns=at % 2 == 1, narrow=at % 3 == 1):
        for name, x in case.run().items():
            assert_same_bytes(x, found[name], name)


@slow
@pytest.mark.parametrize("case", [each for each in CASES if each.goes_apart], ids=lambda case: case.name)
def test_contributions_that_are_apart_give_the_bytes_of_those_that_wait(case: Case) -> None:
    """And nothing is left without an order that matters."""
    kept = emulator_backend.Emulated
    with mock.patch.object(emulator_backend, "Emulated", side_effect=kept) as ran:
        for apart, how in (
            (False, {"blocks": 4, "seed": 1}),
            (True, {"blocks": 3, "seed": 2, "races": True}),
        ):
            with emulated(apart=apart, **how):
                found = case.run()
            ways = {c.args[0].apart for c in ran.call_args_list if c.args[0].direction == "backward"}
            assert ways == {apart}
            if apart:
                at_a_time = {c.args[0].apart for c in ran.call_args_list if c.args[0].direction == "convert"}
                assert at_a_time == {MANY if case.name == "few-rows" else FEW}
            ran.reset_mock()
            if not apart:
                expected = found
        for name, x in found.items():
            assert_same_bytes(x, expected[name], name)


@slow
@pytest.mark.parametrize(("name", "waits"), [("backward", [0]), ("convert", [0, 1])])
def test_kernels_that_begin_early_wait_for_what_is_made_meanwhile(name: str, waits: list[int]) -> None:
    """Without the wait in front of its first task a block would read row statistics too early; the other one
    is for blocks without tasks. Without either of those of Convert it would read contributions, or sums of
    head groups."""
    case, config = Case("early", ((300, 300),), (8, 1), 64), variants()[f"{name}-d64-bf16-apart"]
    inputs, dout = case.tensors()
    with emulated(apart=True):
        out, _ = case.forward(inputs)
        torch.autograd.grad(out, inputs, dout, retain_graph=True)
    *before, main = emulator_programs.kernels(config)
    places = [n for n, i in enumerate(main.instructions) if i.operation == "griddepcontrol.wait"]
    assert len(places) == 2
    for wait in waits:
        instructions = list(main.instructions)
        instructions[places[wait]] = replace(instructions[places[wait]], operation="nanosleep")
        hasty = [*before, replace(main, instructions=instructions)]
        with (
            mock.patch.object(emulator_programs, "kernels", instead(config, hasty)),
            emulated(apart=True),
            pytest.raises(EarlyAccessError),
        ):
            torch.autograd.grad(out, inputs, dout, retain_graph=True)


def assert_near(case: Case, found: dict[str, Tensor]) -> None:
    """Errors are at most twice those of plain attention in the same dtype."""
    exact, plain = case.expected(torch.float64), case.expected(case.dtype)
    for name, x in found.items():
        there = exact[name].isfinite()
        error, usual = (
            float((y.double() - exact[name])[there].norm()) for y in (x, plain.get(name, exact[name]))
        )
        scale = float(exact[name][there].norm())
        few = 1 + 2 * there.sum().item() ** -0.5  # elements: their errors do not average out
        assert error <= 2 * few * usual + 1e-5 * scale, f"{name}: {error:.3g}, plain attention {usual:.3g}"
        assert same_bytes(x[~there].double(), exact[name][~there].double())


OF_96 = [
    Case("causal-96", ((300, 300),), (2, 1), 96),
    Case("full-80-fp16", ((140, 300),), (1, 1), 80, mask=Mask.full(), dtype=torch.float16),
    Case("packed-72", PACKED, (2, 1), 72),
    Case("rows-without-keys-80", ((300, 100),), (2, 1), 80),
    Case("packed-96", PACKED, (1, 1), 96),
    Case("window-96-fp16", ((260, 330),), (1, 1), 96, mask=WINDOW, dtype=torch.float16),
    Case("head-groups-96", ((200, 200),), (8, 1), 96),
    Case("head-groups-88", ((150, 150),), (8, 1), 88, mask=WINDOW),
    Case("head-groups-80", ((200, 200),), (8, 1), 80),
    Case("head-groups-72", ((150, 150),), (8, 1), 72, mask=WINDOW),
    Case("v-of-40-columns", ((200, 200),), (2, 2), 96, 40),
    Case("v-of-72-columns", ((200, 200),), (2, 2), 80, 72),
    Case("v-of-96-columns", ((200, 200),), (2, 2), 24, 96),
    Case("sink-96-packed", PACKED, (2, 1), 96, sink=True),
    Case("softcap-96", ((200, 200),), (2, 1), 96, how=(CAP,)),
    Case(
        "softcap-sink-72-fp16", PACKED, (2, 2), 72, dtype=torch.float16, sink=True, how=(("softcap", 30.0),)
    ),
    Case("segments-96", ((300, 300),), (2, 1), 96, how=(("q_segment", 128),)),
    Case("segments-80-softcap", ((200, 290),), (1, 1), 80, how=(("q_segment", 128), ("softcap", 15.0))),
    Case("segments-80", ((300, 300),), (2, 1), 80, how=(("q_segment", 128),)),
    Case("rings-80", ((300, 300),), (2, 2), 80, mask=Mask.full(), how=(("policy", "shift(ring=3)"),)),
    Case("rings-96", ((300, 300),), (2, 2), 96, mask=Mask.full(), how=(("policy", "shift(ring=3)"),)),
]


@slow
@pytest.mark.parametrize("case", OF_96, ids=lambda case: case.name)
def test_kernels_of_96_columns_make_the_bytes_of_128(case: Case) -> None:
    """Columns that are left out are zeros, which add exactly nothing. Up to 80 columns have kernels of 80.
    Where 16 does not divide both head dims, forwards have tiles of K and V in two parts."""
    kept, turns = emulator_backend.Emulated, OF_96.index(case) % 2 == 0
    with mock.patch.object(emulator_backend, "Emulated", side_effect=kept) as ran:
        with emulated(blocks=4, seed=1, races=True, turns=turns):
            found = case.run()
        both = case.head_dim, case.head_dim_v
        columns = 80 if max(both) <= 80 else 96
        assert head_dims_of(ran, "backward") == head_dims_of(ran, "forward") == {columns}
        forwards = {c.args[0] for c in ran.call_args_list if c.args[0].direction == "forward"}
        assert {config.rest for config in forwards} == {columns - 64 if any(x % 16 for x in both) else 0}
        # A gradient of two sinks is too few elements for a bound on errors. Its bytes are compared below.
        assert_near(case, {name: x for name, x in found.items() if name != "dsink"})
        for head_dim, how in (
            (columns, {"blocks": 6, "seed": 2, "late": False, "turns": not turns}),
            (128, {"blocks": 3, "seed": 3, "turns": True}),
        ):
            ran.reset_mock()
            with kernels_of(head_dim), emulated(**how):
                for name, x in case.run().items():
                    assert_same_bytes(x, found[name], name)
            assert head_dims_of(ran, "backward") == {head_dim}


@contextmanager
def kernels_of(head_dim: int) -> Iterator[None]:
    """Head dims from 72 to 96 run on kernels of 128, or as they always do."""
    with mock.patch.dict(TILES):
        if head_dim == 128:
            del TILES[80, 80], TILES[96, 96]
        yield


def head_dims_of(ran: mock.Mock, direction: str) -> set[int]:
    """Of the kernels of a direction that ran."""
    return {c.args[0].head_dim for c in ran.call_args_list if c.args[0].direction == direction}


@slow
def test_a_sink_that_takes_all_weight_has_a_gradient_of_0() -> None:
    q = torch.randn(1, 70, 3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for large in (1.1e11, 7.7e15):
        sink = torch.tensor([0.5, large, -large]).requires_grad_()
        with emulated():
            flash_attn_func(q, q, q, learnable_sink=sink, backend="sm90").sum().backward()
        assert [float(x) != 0 for x in sink.grad] == [True, False, False]


@slow
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_sums_that_nothing_orders_are_found(head_dim: int) -> None:
    """The negative control: without tickets blocks add to dQ as they come."""
    case = Case("without-order", ((400, 400),), (1, 1), head_dim, how=(("deterministic", False),))
    with emulated(blocks=3, seed=1, races=True), pytest.raises(RaceError, match="writes of stores"):
        case.run()


@slow
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_a_row_of_the_forward_depends_on_its_position_only(head_dim: int) -> None:
    whole = Case("whole", ((300, 300),), (2, 1), head_dim, 128 if head_dim == 192 else head_dim)
    q, k, v = (x.detach() for x in whole.tensors()[0])
    how = {"causal": True, "backend": "sm90", "return_lse": True}
    with emulated(blocks=3):
        out, lse = flash_attn_func(q[None], k[None], v[None], **how)
        chunk = flash_attn_func(q[None, 130:257], k[None, :257], v[None, :257], **how)
        alone = flash_attn_func(q[None, 211:212], k[None, :212], v[None, :212], **how)
        ends = torch.tensor([0, 1, 212], dtype=torch.int32)
        packed = flash_attn_varlen_func(
            q[:212].repeat(1, 2, 1),
            k[:212].repeat(1, 2, 1),
            v[:212].repeat(1, 2, 1),
            ends,
            ends,
            211,
            211,
            **how,
        )
        other = flash_attn_func(q[None, 1:212], k[None, 1:212], v[None, 1:212], **how)
    assert_same_bytes(chunk[0], out[:, 130:257])
    assert_same_bytes(chunk[1], lse[..., 130:257])
    assert_same_bytes(alone[0], out[:, 211:212])
    assert_same_bytes(alone[1], lse[..., 211:212])
    assert_same_bytes(packed[0][1:, 0], other[0][0, :, 0])
    assert not same_bytes(other[0][:, -1], out[:, 211])  # one key less


@slow
@pytest.mark.parametrize("head_dims", [(64, 64), (160, 160), (64, 128)])
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
def test_dense_keys_end_at_the_used_ones(head_dims: tuple[int, int], layout: str) -> None:
    """Where the host knows the used lengths. Behind them lies NaN; "sbhd" has to be copied."""
    used, generator = (150, 33), torch.Generator().manual_seed(0)
    order = ["bshd".index(mode) for mode in layout]

    def drawn(rows: int, heads: int, columns: int) -> Tensor:
        return torch.randn(2, rows, heads, columns, generator=generator).bfloat16()

    q, k, v = drawn(20, 2, head_dims[0]), drawn(170, 1, head_dims[0]), drawn(170, 1, head_dims[1])
    with emulated(blocks=3):
        alone = [
            flash_attn_func(q[i, None], k[i, None, :n], v[i, None, :n], causal=True, backend="sm90")
            for i, n in enumerate(used)
        ]
        for x in (k, v):
            for i, n in enumerate(used):
                x[i, n:] = torch.nan
        k, v = (x.permute(order).contiguous().permute(*map(order.index, range(4))) for x in (k, v))
        with mock.patch.object(launch, "_as_packed", wraps=launch._as_packed) as packed:
            lengths = torch.tensor(used, dtype=torch.int32)
            found = flash_attn_varlen_func(q, k, v, seqused_k=lengths, causal=True, backend="sm90")
        assert packed.called
    assert_same_bytes(found, torch.cat(alone))


@slow
@pytest.mark.parametrize("number", range(12))
def test_histories_of_a_cache(number: int) -> None:
    """Every row of every call over a cache has the bytes of one forward; behind used keys lie NaN or inf."""
    dtype = torch.bfloat16 if number % 3 else torch.float16
    with emulated(blocks=3, seed=number, late=bool(number % 2), races=number % 4 == 0):
        random_history(number, "cpu", dtype, 150, head_dims=(64, 72, 128), backend="sm90").run()


@slow
@pytest.mark.parametrize("number", range(6))
def test_histories_of_a_cache_of_96_columns(number: int) -> None:
    """Rows of a cache have the bytes of a forward by the kernels of 128, too."""
    dtype, dims = torch.bfloat16 if number % 2 else torch.float16, (96, 80, (96, 48))

    def history() -> History:
        return random_history(number, "cpu", dtype, 150, head_dims=dims, backend="sm90")

    with kernels_of(128), emulated(blocks=3, seed=number + 1):
        wanted = history().wanted
    with emulated(blocks=3, seed=number, late=number < 3, races=number % 3 == 0):
        narrow = history()
        for found, other in zip(narrow.wanted, wanted):
            assert_same_bytes(found[0], other[0], "out")
            assert_same_bytes(found[1], other[1], "lse")
        narrow.run()


@slow
@pytest.mark.parametrize("number", range(4))
def test_histories_of_a_cache_where_v_has_fewer_columns(number: int) -> None:
    dtype = torch.bfloat16 if number % 2 else torch.float16
    with emulated(blocks=3, seed=number, races=number == 0):
        random_history(number, "cpu", dtype, 150, head_dims=((192, 128), (136, 40)), backend="sm90").run()


@slow
@pytest.mark.parametrize("number", range(4))
def test_histories_of_a_cache_with_head_dims_to_256(number: int) -> None:
    dtype = torch.bfloat16 if number % 2 else torch.float16
    with emulated(blocks=3, seed=number, races=number == 0):
        dims = (256, 160, (200, 240), (256, 64))
        random_history(number, "cpu", dtype, 150, head_dims=dims, backend="sm90").run()


@slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rows", [1, 70])
def test_items_without_keys_leave_their_place_when_all_have_read_it(rows: int, seed: int) -> None:
    """An item's words lie in shared memory until another item needs the place. Of one without keys nothing
    is loaded that would hold up a warp."""
    generator = torch.Generator().manual_seed(seed)
    used = torch.tensor([100, 0, 0, 0, 130, 0], dtype=torch.int32)
    q, k, v = (torch.randn(6, n, 2, 64, generator=generator).bfloat16() for n in (rows, 140, 140))
    with emulated(blocks=1, seed=seed, late=False, races=True):
        out = flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=True, backend="sm90")
        alone = flash_attn_func(q[4:5], k[4:5, :130], v[4:5, :130], causal=True, backend="sm90")
    assert_same_bytes(out[4:5], alone)
    assert not out[used == 0].any()


# What is found

ONLY_LOOKS = {64: 1, 128: 2}
"""Acquires behind which nothing is read: of the number of claimed items, and, at 128, of a tile that is
waited for, which none is here."""


@slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_fence_acquire_and_release_of_the_backward_is_missed(head_dim: int) -> None:
    """Every item has several tasks, and a block converts more tiles of dQ than it has places for."""
    case = Case("mutants", ((400, 400),), (2, 2), head_dim)
    inputs, dout = case.tensors()
    with emulated(blocks=2, seed=1):
        out, _ = case.forward(inputs)
    backward = partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)
    places, missed = unnoticed(variants()[f"backward-d{head_dim}-bf16"], backward)
    assert missed == ["ld.acquire.gpu.global.b32"] * ONLY_LOOKS[head_dim]
    assert places >= 12


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("add.s32 %r1, %r2,\n\t%r3;", "expected a statement that ends in its line, got 'add.s32 %r1, %r2,'"),
        (".reg .f64 x;", "a statement of an unknown kind: '.reg .f64 x'"),
    ],
)
def test_statements_that_the_emulator_does_not_know_are_refused(statement: str, message: str) -> None:
    text = ".visible .entry k()\n.reqntid 32\n{{\n\t.reg .b32 \t%r<4>;\n\t{}\n\tret;\n\n}}"
    (kernel,) = parsed(text.format("add.s32 %r1, %r2, %r3;"))
    assert [each.operation for each in kernel.instructions] == ["add.s32", "ret"]
    with pytest.raises(ValueError, match=re.escape(message)):
        parsed(text.format(statement))
