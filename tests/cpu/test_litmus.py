"""The hand-over litmus test without a GPU: every form compiles to what it says, and its values show order."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch

from dash_attn.backends.cuda.cubin import resources_of_cubin

for _module in ("cutlass", "tvm_ffi"):
    pytest.importorskip(_module, reason="the kernel compiler is not installed: pip install 'dash-attn[cuda]'")
pytestmark = pytest.mark.filterwarnings("default")  # of the kernel compiler

from litmus import FORMS, SHAPES, contributions, fold  # noqa: E402 - imports the compiler
from litmus_kernel import LitmusConfig, Reader, Wait, compile_litmus  # noqa: E402

SHARED = 232_448  # bytes that a block may own on sm_90


def compiled(config: LitmusConfig, folder: Path) -> Counter[str]:
    """PTX instructions of a variant, which must not spill, by name and with how often they occur."""
    compile_litmus(config, f"--keep-ptx --keep-cubin --dump-dir={folder}")
    (cubin,), (ptx,) = folder.rglob("*.cubin"), folder.rglob("*.ptx")
    (kernel,) = resources_of_cubin(cubin.read_bytes())
    assert kernel.stack == 0
    return Counter(re.findall(r"^\s*(?:@!?%p\d+ )?([a-z][\w.:]+)[\s;]", ptx.read_text(), re.M))


@pytest.mark.parametrize("name", FORMS)
def test_a_form_compiles_to_what_it_says(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    found = compiled(replace(SHAPES["small-bulk"], form=form, busy=False), tmp_path)
    raised = "st.{}.gpu.global.b32" if form.queued else "red.{}.gpu.global.add.s32"
    assert found[raised.format("release")] == form.release
    assert found[raised.format("relaxed")] >= (not form.release)
    assert found["atom.relaxed.gpu.global.add.s32"] == form.queued
    assert (found["ld.acquire.gpu.global.b32"] > 0) == form.acquire
    assert (found["ld.relaxed.gpu.global.b32"] > 0) != form.acquire
    # One more wait, for everything, stands at the end of the kernel.
    assert found["cp.async.bulk.wait_group"] == 1 + (form.wait is Wait.PERFORMED)
    assert found["cp.async.bulk.wait_group.read"] == (form.wait is Wait.SOURCE_READ)
    assert found["cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"] == 1
    assert found["cp.async.bulk.global.shared::cta.bulk_group"] == 1
    assert found["fence.proxy.async.global"] == 2  # before the reader's bulk load and before the contribution


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_compiles_with_its_reader_and_its_load(name: str, tmp_path: Path) -> None:
    config = SHAPES[name]
    found = compiled(config, tmp_path)
    loads = found["cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"]
    assert loads == 1 + (config.reader is Reader.BULK)
    assert found["wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"] == 16
    assert config.period * config.size + 2 * config.size <= SHARED


@pytest.mark.parametrize(("period", "words"), [(8, 128), (3, 8192)])
def test_every_exchange_of_two_additions_shows_in_every_word(period: int, words: int) -> None:
    sources, expected = contributions(period, words)
    assert sources.shape == expected.shape == (period, words)
    assert torch.equal(fold(sources), expected)
    for first in range(1, period - 1):
        order = list(range(period))
        order[first : first + 2] = first + 1, first
        assert (fold(sources[order])[-1] != expected[-1]).all()
    for row in range(1, period):
        assert (expected[row] != expected[row - 1]).all()  # a missing contribution shows at once


def test_most_orders_of_a_period_show_in_every_tile() -> None:
    sources, expected = contributions(5, 128)
    for order in permutations(range(1, 5)):
        if order != (1, 2, 3, 4):
            assert (fold(sources[[0, *order]])[-1] != expected[-1]).any()


@pytest.mark.parametrize(("wrong", "message"), [({"size": 500}, "got 500"), ({"period": 9}, "got 9")])
def test_what_cannot_be_built_is_refused(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SHAPES["small-load"], **wrong)
