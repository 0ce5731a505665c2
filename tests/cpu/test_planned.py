"""What a caller keeps in his hands cannot undo a proof, and odd surroundings change nothing."""

from __future__ import annotations

import copy
import math
import pickle
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dash_attn import flash_attn_func, flash_attn_varlen_func
from dash_attn.api import apply_plan
from dash_attn.errors import InputError, PlacementError, PlanMismatchError, TableError
from dash_attn.grid import IntArray, Mask, SequenceGrid, TileGrid
from dash_attn.ops import calls
from dash_attn.problem import Problem
from dash_attn.schedule import (
    FA3,
    SPT,
    HeadPattern,
    Numerics,
    Plan,
    Policy,
    build_plan,
    from_table,
    lpt_placement,
    prove,
    to_table,
)
from dash_attn.schedule.batch import Batch
from dash_attn.schedule.placement import Placement
from dash_attn.testing import assert_same_bytes

CAUSAL = Problem.dense(heads=2, seqlen=512, head_dim=64, mask=Mask.causal())


def test_items_cannot_be_written_after_codes_were_made_of_them() -> None:
    made = build_plan(CAUSAL, FA3())
    items = made.items.copy()
    plan = Plan(CAUSAL, "by hand", made.patterns, items[:])
    lpt_placement(plan)
    items[:] = 0
    with pytest.raises(ValueError, match="read-only"):
        plan.items[:] = 0
    proven = prove(plan)
    assert np.array_equal(proven.items, made.items)
    assert np.array_equal(proven.batch.codes_of(proven.items), proven.codes)
    with pytest.raises(ValueError, match="read-only"):
        proven.codes[0] = 1


def test_patterns_of_a_plan_cannot_be_exchanged() -> None:
    made = build_plan(CAUSAL, FA3())
    mine = dict(made.patterns)
    plan = prove(Plan(CAUSAL, "by hand", mine, made.items))
    mine[512, 512] = build_plan(CAUSAL, SPT()).pattern(0)
    assert plan.pattern(0) is made.pattern(0)
    with pytest.raises(TypeError, match="does not support item assignment"):
        plan.patterns[512, 512] = mine[512, 512]  # type: ignore[index]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_a_copy_is_proven_anew_and_cannot_be_written(duplicate: Any) -> None:
    made = build_plan(Problem.varlen([512, 500], heads=2, head_dim=64), FA3())
    other = duplicate(made)
    assert other.verdict is None
    assert other.fingerprint == made.fingerprint
    assert other.pattern(0) is other.pattern(1)
    for array in (other.items, other.pattern(0).runs):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    assert np.array_equal(to_table(prove(other)), to_table(made))


@pytest.mark.parametrize("name", ["kv_first", "kv_last", "q_first", "q_last", "contributions"])
def test_arrays_of_a_grid_belong_to_all_problems_with_its_tiles(name: str) -> None:
    with pytest.raises(ValueError, match="read-only"):
        getattr(SequenceGrid(300, 300, 128, 128, Mask.causal()), name)[0] = 7


def test_equal_grids_of_a_problem_are_one_and_long_ones_are_not_kept() -> None:
    def grids(*seqlens: int) -> list[TileGrid]:
        return list(Problem.varlen(seqlens, heads=1, head_dim=64).tile_grids.values())

    long, also_long, short = grids(2**19, 2**19 - 1, 300)
    assert long is also_long
    assert short is grids(299)[0]
    kept = weakref.ref(long)
    del long, also_long
    assert kept() is None


@dataclass(frozen=True)
class Moved(Placement):
    name: ClassVar[str] = "moved"
    by: int = 0

    def place(self, batch: Batch, numerics: Numerics) -> IntArray:
        return np.arange(batch.item_count) + self.by


@pytest.mark.parametrize(("by", "bad"), [(1, 8), (-1, -1), (-100, -100)])
def test_a_placement_of_items_that_do_not_exist(by: int, bad: int) -> None:
    with pytest.raises(PlacementError, match=rf"placement moved\(by={by}\): item {bad} of 8"):
        build_plan(CAUSAL, FA3(), Moved(by))


def test_equal_patterns_that_are_not_shared_come_back_from_a_table() -> None:
    problem = Problem.varlen([500, 510], heads=1, head_dim=64)
    made = build_plan(problem, FA3())
    pattern = made.pattern(0)
    assert pattern is made.pattern(1)
    twin = HeadPattern(pattern.grid, pattern.offsets, pattern.runs)
    plan = prove(Plan(problem, "twins", {(500, 500): pattern, (510, 510): twin}, made.items))
    again = from_table(to_table(plan), head_dim=64, dtype="bfloat16")
    assert again.fingerprint == plan.fingerprint
    assert again.pattern(0) is not again.pattern(1)


def test_a_table_has_no_field_for_where_rows_are_aligned() -> None:
    problem = Problem(((500, 500),), 1, 1, 64, Mask.causal(), q_starts=(200,))
    with pytest.raises(TableError, match=r"not with columns \(200,\)"):
        to_table(build_plan(problem, FA3()))


def test_proofs_of_random_placements_do_not_pile_up() -> None:
    made = build_plan(Problem.dense(seqlen=128 * 9, head_dim=64), FA3())
    pattern, rng = made.pattern(0), np.random.default_rng(0)
    for _ in range(300):
        shuffled = rng.permutation(made.items)
        assert prove(made.with_items(shuffled)).min_workers >= 1
    assert len(pattern.proven.orders) <= 64
    assert len(pattern._tiled) <= 128  # type: ignore[attr-defined]


@pytest.fixture
def _another_default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(0)
    q = torch.randn(2, 200, 2, 16, generator=generator, device="cpu").requires_grad_()
    ends = torch.tensor([0, 150, 400], dtype=torch.int32, device="cpu")
    dense = flash_attn_func(q, q, q, causal=True)
    rows = q.flatten(0, 1)
    packed = flash_attn_varlen_func(rows, rows, rows, ends, ends, causal=True)
    (dq,) = torch.autograd.grad((dense * dense).sum() + (packed * packed).sum(), q)
    return [dense, packed, dq]


def test_the_default_device_is_nobodys(request: pytest.FixtureRequest) -> None:
    expected = gradients()
    request.getfixturevalue("_another_default_device")
    assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))


def planned(policy: Policy) -> Plan:
    return build_plan(Problem.dense(batch=2, seqlen=100, head_dim=64, dtype="float32"), policy)


@pytest.mark.parametrize("shape", [(1, 200, 1, 64), (2, 101, 1, 64), (4, 50, 1, 64), (2, 100, 2, 64)])
def test_dense_tensors_of_another_problem_are_refused(shape: tuple[int, ...]) -> None:
    """One sequence of 200 rows has as many as two of 100."""
    x = torch.zeros(shape)
    with pytest.raises(PlanMismatchError, match=r"q has shape .*, the problem is for \(2, 100, 1, 64\)"):
        apply_plan(planned(FA3()), x, x, x, 0.1)


def test_dense_tensors_of_a_packed_problem_are_refused() -> None:
    x = torch.zeros(1, 300, 1, 64)
    plan = build_plan(Problem.varlen([100, 200], heads=1, head_dim=64, dtype="float32"), FA3())
    with pytest.raises(PlanMismatchError, match="the problem is for packed tensors"):
        apply_plan(plan, x, x, x, 0.1)


def test_a_plan_of_ones_own_is_prepared_once() -> None:
    """What the first call puts on a device is there for the next one, also in a CUDA graph."""
    x = torch.randn(2, 100, 1, 64)
    plan = planned(FA3())
    first = apply_plan(plan, x, x, x, 0.1)
    before = calls.prepared_once.cache_info().hits
    again = apply_plan(plan, x, x, x, 0.1)
    assert calls.prepared_once.cache_info().hits == before + 1
    assert torch.equal(first[0], again[0])


def test_a_copy_of_a_plan_must_be_proven_again() -> None:
    x, plan = torch.randn(2, 100, 1, 64, requires_grad=True), planned(FA3())
    copied = pickle.loads(pickle.dumps(plan))
    with pytest.raises(InputError, match=r"the plan is not proven.*dash_attn\.schedule\.prove"):
        apply_plan(copied, x, x, x, 0.1)
    found = [torch.autograd.grad(apply_plan(p, x, x, x, 0.1)[0].sum(), x)[0] for p in (plan, prove(copied))]
    assert torch.equal(*found)


def test_a_plan_of_ones_own_has_checked_arguments() -> None:
    plan, x = planned(FA3()), torch.randn(2, 100, 1, 64)
    assert_same_bytes(apply_plan(plan, x, x, x, None)[0], apply_plan(plan, x, x, x, 64**-0.5)[0])
    for scale in (math.nan, "1"):
        with pytest.raises(InputError, match=f"softmax_scale must be a finite float32, got '?{scale}"):
            apply_plan(plan, x, x, x, scale)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"plan must be a dash_attn.schedule.Plan, got 'spt'"):
        apply_plan("spt", x, x, x, 0.1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="k must be a torch.Tensor, got int"):
        apply_plan(plan, x, 1, x, 0.1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="v must have 3 or 4 dimensions"):
        apply_plan(plan, x, x, x[0, 0], 0.1)


def test_a_plan_of_ones_own_in_a_selective_checkpoint() -> None:
    """It sees no product of the backend, to keep in place of what is computed again."""
    plan, x = planned(FA3()), torch.randn(2, 100, 1, 64, requires_grad=True)

    def chosen(_: object, operator: object, *args: object, **how: object) -> CheckpointPolicy:
        asked.append(operator)
        return CheckpointPolicy.MUST_SAVE

    asked: list[object] = []
    contexts = partial(create_selective_checkpoint_contexts, chosen, allow_cache_entry_mutation=True)
    call = partial(apply_plan, plan, softmax_scale=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        return 2 * call(x, x, x)[0]

    out = checkpoint(step, x, use_reentrant=False, context_fn=contexts)
    (found,) = torch.autograd.grad(out.square().sum(), x)
    (wanted,) = torch.autograd.grad(step(x).square().sum(), x)
    assert_same_bytes(found, wanted)
    assert torch.ops.aten.mul.Tensor in asked, "it sees nothing"
    assert torch.ops.aten.mm.default not in asked


def test_a_plan_of_ones_own_under_autocast() -> None:
    x = torch.randn(2, 100, 1, 64)
    problem = Problem.dense(batch=2, seqlen=100, head_dim=64, dtype="bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = apply_plan(build_plan(problem, FA3()), x, x, x, 0.1)
        assert_same_bytes(out, flash_attn_func(x, x, x, softmax_scale=0.1))
        with pytest.raises(PlanMismatchError, match="q has dtype torch.bfloat16 .* the plan is for float32"):
            apply_plan(planned(FA3()), x, x, x, 0.1)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # by the compiler, where a graph ends
def test_a_plan_of_ones_own_in_compiled_code() -> None:
    plan, x = planned(FA3()), torch.randn(2, 100, 1, 64, requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        return 2 * apply_plan(plan, x + 1, x, x, 0.1)[0]

    found, wanted = torch.compile(step, backend="aot_eager")(x), step(x)
    assert_same_bytes(found, wanted)
    assert_same_bytes(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (found, wanted)))


@pytest.mark.parametrize("at", range(3))
def test_tensors_of_another_dtype_are_refused(at: int) -> None:
    tensors = [torch.zeros(2, 100, 1, 64) for _ in range(3)]
    tensors[at] = tensors[at].double()
    with pytest.raises(PlanMismatchError, match=f"{'qkv'[at]} has dtype torch.float64"):
        apply_plan(planned(FA3()), *tensors, 0.1)


def test_a_batch_of_output_gradients_is_refused_by_name() -> None:
    q = torch.randn(1, 40, 1, 16, requires_grad=True)
    out = flash_attn_func(q, q, q)
    with pytest.raises(RuntimeError, match=r"no rule for torch.vmap"):
        torch.autograd.grad(out, q, torch.ones(2, *out.shape), is_grads_batched=True)
