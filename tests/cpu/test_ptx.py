"""The compiled main kernel ends, and adds to dQ in the plan's order: its PTX, executed on the CPU."""

from __future__ import annotations

from collections import defaultdict

import pytest
from ptx_machine import PATIENCE, PLAN, DeadlockError, Instruction, Machine, Program, main_kernel_ptx

from dash_attn.backends.sm90.backward.config import BackwardConfig
from dash_attn.backends.sm90.compile import variants
from dash_attn.backends.sm90.tiles import kernel_of
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import Plan, Shift, SymmetricShift, build_plan, choose_policy
from dash_attn.schedule.layout import HEADER_WORDS, ITEM, ITEM_WORDS

pytest.importorskip("cutlass", reason="the kernel compiler is not installed: pip install 'dash-attn[cuda]'")
pytestmark = pytest.mark.filterwarnings("default")

Q, FIRST_STORED = 0, 8  # descriptors in the order of the kernel's parameters
BOUNDED = BackwardConfig(64, spin_limit=300)


def head_dims(head_dim: int) -> dict[str, int]:
    """Of Q and of V: the kernel of 192 has another one of V."""
    return {"head_dim": head_dim, "head_dim_v": 128 if head_dim == 192 else head_dim}


def product(head_dim: int) -> str:
    """The variant that users get, in bf16."""
    return f"backward-d{'192v128' if head_dim == 192 else head_dim}-bf16"


def program(variant: str) -> Program:
    config = variants()[variant]
    found = Program(main_kernel_ptx(config))
    found.parameters -= 2 * config.softcap  # its numbers stand behind those that the machine knows
    return found


def ran(variant: str, plan: Plan, blocks: int, seed: int, one_by_one: bool = False) -> Machine:
    machine = Machine(program(variant), plan, blocks, seed, one_by_one)
    machine.run()
    return machine


def tasks(plan: Plan, item: int) -> list[tuple[int, int, tuple[int, int, int]]]:
    """(dQ tile, kv tile, (first query row, q head, sequence)) of an item's tasks, in the kernel's order."""
    sequence, group, kv_tile = plan.items[item].tolist()
    heads = plan.q_heads(sequence, group)
    of_heads, q_tiles, _ = plan.pattern(sequence).tasks_of_heads(kv_tile, len(heads))
    return [
        (first_tile(plan, sequence, heads[h]) + q, kv_tile, (q * plan.problem.tile_m, heads[h], sequence))
        for h, q in zip(of_heads.tolist(), q_tiles.tolist())
    ]


def first_tile(plan: Plan, sequence: int, head: int) -> int:
    """The first dQ tile of a q head."""
    before = sum(plan.pattern(i).grid.q_tiles for i in range(sequence)) * plan.problem.heads
    return before + head * plan.pattern(sequence).grid.q_tiles


def orders(machine: Machine) -> dict[int, list[int]]:
    """The kv tiles of each dQ tile in the order in which they were added."""
    left = [iter([t for item in block.items for t in tasks(machine.plan, item)]) for block in machine.blocks]
    found = defaultdict(list)
    for block, tile, _ in machine.contributions:
        expected, kv_tile, _ = next(left[block])
        assert tile == expected
        found[tile].append(kv_tile)
    assert all(next(rest, None) is None for rest in left)
    return found


def promised(plan: Plan) -> dict[int, list[int]]:
    """The same of the plan."""
    problem = plan.problem
    found = {}
    for sequence in range(len(problem.sequences)):
        for head in range(problem.heads):
            for q, order in enumerate(plan.pattern(sequence).summation_orders()):
                found[first_tile(plan, sequence, head) + q] = order
    return {tile: order for tile, order in found.items() if order}


CASES = {
    "causal": (Problem.dense(batch=2, seqlen=400, head_dim=64, mask=Mask.causal()), None),
    "full": (Problem.dense(batch=2, seqlen=300, head_dim=64), None),
    "packed, some empty": (
        Problem(((130, 260), (0, 100), (100, 0), (0, 0), (1, 300)), 1, 1, head_dim=64, mask=Mask.causal()),
        None,
    ),
    "keys beyond the queries": (
        Problem.dense(seqlen_q=130, seqlen_k=500, head_dim=64, mask=Mask.window(60, 0)),
        None,
    ),
    "head groups": (Problem.dense(heads=4, kv_heads=1, seqlen=256, head_dim=64, mask=Mask.causal()), 2),
    "head after head": (
        Problem.dense(heads=5, kv_heads=1, seqlen=400, head_dim=64, mask=Mask.window(90, 0)),
        2,
    ),
}

SLOW = {("causal", 128), ("full", 64), ("keys beyond the queries", 64), ("head groups", 128)}
SLOW |= {("head after head", 64)}
SLOW |= {(name, 192) for name in CASES}


def case(name: str, head_dim: int) -> Plan:
    problem, groups = CASES[name]
    dims = head_dims(head_dim)
    like = Problem(problem.sequences, problem.heads, problem.kv_heads, mask=problem.mask, **dims)
    return build_plan(like, *choose_policy(like), head_groups=groups)


def assert_complete(machine: Machine) -> None:
    """Items are claimed once, contributions come in the plan's order, and complete tiles are fetched once."""
    plan = machine.plan
    assert sorted(item for block in machine.blocks for item in block.items) == list(range(len(plan.items)))
    assert orders(machine) == promised(plan)
    first: set[int] = set()
    for _, tile, added in machine.contributions:
        assert added == (tile in first)
        first.add(tile)
    assert sorted(machine.fetched) == sorted((tile, len(kv)) for tile, kv in promised(plan).items())


@pytest.mark.parametrize(
    ("name", "head_dim"),
    [
        pytest.param(name, head_dim, marks=[pytest.mark.slow] if (name, head_dim) in SLOW else [])
        for name in CASES
        for head_dim in (64, 128, 192)
    ],
)
def test_it_ends_and_adds_in_the_plans_order(name: str, head_dim: int) -> None:
    plan = case(name, head_dim)
    for seed, blocks in enumerate((plan.min_workers, len(plan.items) + 1)):
        assert_complete(ran(product(head_dim), plan, blocks, seed))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "head_dim"), [("packed, some empty", 96), ("head groups", 40)])
def test_with_fewer_columns_it_ends_and_adds_in_the_plans_order(name: str, head_dim: int) -> None:
    plan = case(name, head_dim)
    for seed, blocks in enumerate((plan.min_workers, len(plan.items) + 1)):
        assert_complete(ran(f"backward-d{kernel_of(head_dim, head_dim)[0]}-bf16-padded", plan, blocks, seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["packed, some empty", "head groups"])
@pytest.mark.parametrize("head_dim", [96, 88, 80, 72])
def test_kernels_of_80_and_96_columns_end_and_add_in_the_plans_order(name: str, head_dim: int) -> None:
    plan = case(name, head_dim)
    kernel = kernel_of(head_dim, head_dim)
    variant = f"backward-d{kernel.head_dim}-bf16" + "-padded" * kernel.padded
    for seed, blocks in enumerate((plan.min_workers, len(plan.items) + 1)):
        assert_complete(ran(variant, plan, blocks, seed))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_with_a_softcap_it_ends_and_adds_in_the_plans_order(head_dim: int) -> None:
    """At head dim 64 products are waited for elsewhere."""
    for name in ("causal", "packed, some empty", "head groups"):
        plan = case(name, head_dim)
        for seed, blocks in enumerate((plan.min_workers, len(plan.items) + 1)):
            assert_complete(ran(f"backward-d{head_dim}-bf16-softcap", plan, blocks, seed))


# Plans whose items wait for each other

DEPENDENT = {
    "a ring of two": (Problem.dense(seqlen=256, head_dim=64), Shift(ring=2)),
    "a ring of four": (Problem.dense(seqlen=512, head_dim=64), Shift(ring=4)),
    "two rings with a stride": (Problem.dense(seqlen=512, head_dim=64), Shift(ring=2, stride=2)),
    "rings of grouped heads": (
        Problem.dense(batch=2, heads=2, kv_heads=1, seqlen=256, head_dim=64),
        Shift(ring=2),
    ),
    "rings of a packed batch": (Problem(((256, 256), (384, 384)), 1, 1, head_dim=64), Shift(ring=3)),
    "symmetric shift": (
        Problem.dense(heads=2, seqlen=512, head_dim=64, mask=Mask.causal()),
        SymmetricShift(),
    ),
    "symmetric shift of odd length": (
        Problem.dense(seqlen=640, head_dim=64, mask=Mask.causal()),
        SymmetricShift(),
    ),
}


def dependent(name: str, head_dim: int) -> Plan:
    problem, policy = DEPENDENT[name]
    dims = head_dims(head_dim)
    like = Problem(problem.sequences, problem.heads, problem.kv_heads, mask=problem.mask, **dims)
    plan = build_plan(like, policy)
    assert plan.min_workers > 1
    return plan


@pytest.mark.parametrize("head_dim", [64, *(pytest.param(n, marks=pytest.mark.slow) for n in (128, 192))])
@pytest.mark.parametrize("name", DEPENDENT)
def test_as_few_blocks_as_may_be_run_a_plan_whose_items_wait_for_each_other(name: str, head_dim: int) -> None:
    """A block that claims too early takes an item that another one waits for. Random orders seldom show it;
    blocks that come one by one do."""
    plan = dependent(name, head_dim)
    for seed in range(2):
        assert_complete(ran(product(head_dim), plan, plan.min_workers, seed, one_by_one=True))
    assert_complete(ran(product(head_dim), plan, plan.min_workers, 2))


@pytest.mark.slow
@pytest.mark.parametrize("one_by_one", [False, True], ids=["together", "one by one"])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize("name", DEPENDENT)
def test_further_orders_of_plans_whose_items_wait(name: str, head_dim: int, one_by_one: bool) -> None:
    plan = dependent(name, head_dim)
    for seed in range(10, 13):
        for blocks in (plan.min_workers, plan.min_workers + 1):
            assert_complete(ran(product(head_dim), plan, blocks, seed, one_by_one=one_by_one))


@pytest.mark.parametrize("name", DEPENDENT)
def test_a_block_told_that_its_item_needs_no_later_one_claims_too_early(name: str) -> None:
    """The control of the test above: `needs` of the table says less than the truth, and blocks deadlock."""
    plan = dependent(name, 64)
    machine = Machine(program("backward-d64-bf16"), plan, plan.min_workers, 0, one_by_one=True)
    for item in range(len(plan.items)):
        machine.memory[PLAN + 4 * (HEADER_WORDS + ITEM_WORDS * item + ITEM.needs)] = 0
    with pytest.raises(DeadlockError):
        machine.run()


@pytest.mark.parametrize("head_dim", [64, 128, pytest.param(192, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["causal", "full"])
def test_it_loads_the_tiles_of_its_tasks_and_stores_every_tile_once(name: str, head_dim: int) -> None:
    plan = case(name, head_dim)
    machine = ran(product(head_dim), plan, 3, 0)
    parts = head_dim // 64
    for block in machine.blocks:
        loaded = [where[1:4] for which, where in block.loads if which == Q][::parts]
        assert loaded == [rows for item in block.items for _, _, rows in tasks(plan, item)]
    stores = [store for block in machine.blocks for store in block.stores]
    assert len(set(stores)) == len(stores)
    for descriptor, columns in zip((FIRST_STORED, FIRST_STORED + 2), head_dims(head_dim).values()):
        assert len([which for which, _ in stores if which == descriptor]) == columns // 64 * len(plan.items)


def test_too_few_blocks_deadlock_unless_waits_are_bounded() -> None:
    plan = build_plan(Problem.dense(seqlen=256, head_dim=64), Shift(ring=2))
    assert plan.min_workers == 2
    with pytest.raises(DeadlockError, match="block 0 warp 3"):
        ran("backward-d64-bf16", plan, 1, 0)
    for blocks in (1, 2):
        machine = Machine(Program(main_kernel_ptx(BOUNDED)), plan, blocks, 0)
        machine.run(100 * PATIENCE)
        assert machine.errors == ((1, 0) if blocks == 1 else (0, 0))  # the ticket of sequence 0


def test_a_tile_that_never_becomes_complete_is_waited_for_or_reported() -> None:
    """The kernel is told that one more tile gets contributions than do."""
    plan = case("packed, some empty", 64)
    machines = [
        Machine(Program(main_kernel_ptx(config)), plan, 2, 0) for config in (BackwardConfig(64), BOUNDED)
    ]
    for machine in machines:
        machine.complete += 1
    with pytest.raises(DeadlockError):
        machines[0].run()
    machines[1].run(100 * PATIENCE)
    assert machines[1].errors == (1, -1)  # of no sequence: a tile, not a ticket


@pytest.mark.parametrize("number", range(4))
def test_without_one_of_the_arrivals_it_does_not_end(number: int) -> None:
    broken = program("backward-d64-bf16")
    code = broken.instructions
    arrivals = [i for i, one in enumerate(code) if one.operation.startswith("mbarrier.arrive.shared")]
    code[arrivals[3 + 5 * number]] = Instruction("", True, "mov.b32", ["mov", "b32"], ["%none", "0"])
    with pytest.raises(DeadlockError):
        Machine(broken, case("causal", 64), 2, 0).run()


def test_without_order_the_order_is_another() -> None:
    plan = case("causal", 64)
    assert any(
        orders(ran("backward-d64-bf16-unordered", plan, 4, seed)) != promised(plan) for seed in range(4)
    )
