"""What of the launcher needs no GPU: which tensors are copied first, and the order of dQ tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from emulator import backend as emulator

from dash_attn.backends.base import SegmentTargets, Tensors
from dash_attn.backends.cuda.upload import loadable
from dash_attn.backends.sm90 import backend, launch, segments
from dash_attn.backends.sm90.backend import BACKEND
from dash_attn.backends.sm90.backward import arguments as backward
from dash_attn.backends.sm90.backward.config import BackwardConfig
from dash_attn.backends.sm90.forward import arguments as forward
from dash_attn.backends.sm90.forward.config import ForwardConfig
from dash_attn.backends.sm90.forward.launch import Forward, _faster_in_turns, config_of, why_no_scale
from dash_attn.backends.sm90.launch import _accumulator_order, check_tensors
from dash_attn.backends.sm90.places import Buffer, Sizes, place_of, sizes_of
from dash_attn.backends.sm90.resident import _place
from dash_attn.backends.sm90.tiles import TILES, kernel_of, tiles_of
from dash_attn.backends.sums import new_key_sums
from dash_attn.errors import PlanMismatchError
from dash_attn.problem import Mask, Problem, default_tiles
from dash_attn.schedule import build_plan
from dash_attn.scores import Scores


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


@pytest.mark.parametrize(
    "x",
    [
        bf16(2, 5, 3, 64),
        bf16(2, 3, 5, 64).transpose(1, 2),
        bf16(2, 5, 3, 3, 64)[:, :, 1],
        bf16(4, 5, 3, 128)[::2, 1:, :, :64],
        bf16(1, 5, 3, 64),
        bf16(7, 3, 64),
        bf16(7, 3, 3, 64)[:, 1],
    ],
    ids=[
        "contiguous",
        "heads first",
        "one of packed q, k, v",
        "slices",
        "batch of one",
        "packed batch",
        "packed batch of packed q, k, v",
    ],
)
def test_read_in_place(x: torch.Tensor) -> None:
    assert loadable(x) is x


@pytest.mark.parametrize(
    "x",
    [
        bf16(2, 5, 64, 3).transpose(2, 3),
        bf16(2, 5, 3, 65)[..., :64],
        bf16(2, 5, 3, 72)[..., 4:68],
        bf16(2 * 5 * 3 * 64 + 1)[1:].view(2, 5, 3, 64),
        bf16(2, 5, 1, 64).expand(2, 5, 3, 64),
    ],
    ids=["head_dim strided", "odd rows", "odd start", "misaligned base", "expanded"],
)
def test_copied_first(x: torch.Tensor) -> None:
    copy = loadable(x)
    assert copy.is_contiguous()
    assert torch.equal(copy, x)
    assert copy.data_ptr() % 16 == 0


@pytest.mark.parametrize(("tile_m", "head_dim"), [(64, 96), (64, 128), (128, 64), (64, 192), (64, 256)])
def test_every_value_of_a_dq_tile_has_one_place(tile_m: int, head_dim: int) -> None:
    order = _accumulator_order(tile_m, head_dim)
    assert order.shape == (tile_m, head_dim)
    assert torch.equal(order.flatten().sort().values, torch.arange(tile_m * head_dim))


@pytest.mark.parametrize("head_dims", [*TILES, (40, 8), (136, 128), (128, 136), (256, 8)])
def test_problems_have_the_tiles_of_the_kernels_by_default(head_dims: tuple[int, int]) -> None:
    """A plan made by hand, without a word about tiles, runs on a GPU."""
    assert BACKEND.tiles(*head_dims) == tiles_of(*kernel_of(*head_dims)[:2])[:2] == default_tiles(*head_dims)


def test_explicit_positions_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_capability", lambda device: (9, 0))
    shifted = Problem(((128, 256),), 1, 1, 64, Mask.causal(), q_starts=(0,))
    reason = BACKEND.why_not(shifted, torch.device("cuda"), False)
    assert reason == "q_starts (0,) are not supported by sm90: rows are aligned bottom-right"


def test_more_heads_than_a_grid_has_blocks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(backend, "_why_no_compiler", lambda: "")
    for heads, reason in ((65_535, ""), (65_536, "65536 q heads are not supported by sm90, at most 65535")):
        problem = Problem.dense(heads=heads, kv_heads=1, seqlen=64, head_dim=64)
        assert BACKEND.why_not(problem, torch.device("cuda"), False) == reason


@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-46, 2.4e38])
def test_scales_that_the_kernel_could_not_hold_are_named(scale: float) -> None:
    """1e-46 is 0 in float32, and 2.4e38 log2(e) is infinite."""
    assert why_no_scale(scale).endswith(f"got {scale}")
    assert why_no_scale(1e-30) == ""


SMALL = Problem.dense(seqlen=256, heads=2, head_dim=64)
OTHERS = [
    (lambda x: x[:, 1:], r"has shape \(1, 255, 2, 64\)"),
    (lambda x: x.half(), "has .*dtype torch.float16"),
    (lambda x: x.to("meta"), "is on meta"),
]


@pytest.mark.parametrize(("change", "message"), OTHERS, ids=["shape", "dtype", "device"])
@pytest.mark.parametrize("at", ["k", "v"])
def test_a_forward_of_tensors_that_do_not_fit_never_begins(
    at: str, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    """A kernel is given addresses: it would read whatever is there."""
    prepared = BACKEND.prepare(SMALL, torch.device("cpu"), False)
    tensors = {name: bf16(1, 256, 2, 64) for name in "qkv"}
    tensors[at] = change(tensors[at])
    with pytest.raises(PlanMismatchError, match=f"^{at} {message}"):
        prepared.forward(*tensors.values(), Scores(0.125))


@pytest.mark.parametrize(("change", "message"), OTHERS, ids=["shape", "dtype", "device"])
@pytest.mark.parametrize("at", ["dout", "k", "v", "out"])
def test_a_backward_of_tensors_that_do_not_fit_never_begins(
    at: str, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    given = Tensors(*(bf16(1, 256, 2, 64) for _ in range(5)), torch.zeros(1, 2, 256))
    plan = build_plan(SMALL, "fa3")
    place = _place(plan, None)
    check_tensors(place, plan, given)
    with pytest.raises(PlanMismatchError, match=f"^{at} {message}"):
        check_tensors(place, plan, given._replace(**{at: change(getattr(given, at))}))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sums_of_another_size_are_refused(head_dim: int) -> None:
    """A kernel is given an address: it would write behind them. At head dim 256 kv tiles have 64 keys."""
    cut = Problem.dense(batch=2, seqlen_q=200, seqlen_k=300, heads=4, kv_heads=2, head_dim=head_dim)
    plan = build_plan(cut, "fa3", head_groups=2)
    tiles = 5 if head_dim == 256 else 3
    like = bf16(1)
    segments.check_sums(plan, new_key_sums(BACKEND, cut, tiles, 2, like))
    for wrong in (new_key_sums(BACKEND, cut, tiles - 1, 2, like), new_key_sums(BACKEND, cut, tiles, 1, like)):
        with pytest.raises(PlanMismatchError, match=f"^sums have {wrong.numel()} numbers; the plan's"):
            segments.check_sums(plan, wrong)


def test_a_segment_is_not_launched_with_other_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Tensors(*(bf16(1, 256, 2, 64) for _ in range(5)), torch.zeros(1, 2, 256))
    plan = build_plan(SMALL, "fa3")
    monkeypatch.setattr(segments, "on_device", lambda plan, device, key_sums: _place(plan, None))
    sums = new_key_sums(BACKEND, SMALL, 1, 1, given.q)
    with pytest.raises(PlanMismatchError, match="^sums have 32768 numbers; the plan's 4 items"):
        segments.run_segment(plan, given, 0.125, SegmentTargets(sums, torch.empty_like(given.q)))


def test_places_are_addresses_and_strides_in_elements() -> None:
    dense, packed = bf16(2, 5, 6, 64)[:, 1:, ::2], bf16(5, 3, 3, 64)[:, 1]
    assert place_of(dense) == (dense.data_ptr(), 5 * 6 * 64, 6 * 64, 2 * 64)
    assert place_of(packed) == (packed.data_ptr(), 0, 3 * 3 * 64, 64)


@pytest.mark.parametrize("packed", [False, True])
def test_extents_of_keys_in_another_batch(packed: bool) -> None:
    q, k, v = bf16(*(5,) if packed else (2, 5), 4, 64), bf16(3, 7, 2, 64), bf16(3, 7, 2, 40)
    sizes = sizes_of(q, k, v)
    assert sizes.of_q == ((1, 5, 4, 64) if packed else (2, 5, 4, 64))
    assert sizes.of_out == (*sizes.of_q[:3], 40)
    assert (sizes.of_k, sizes.of_v) == ((3, 7, 2, 64), (3, 7, 2, 40))


def test_a_buffer_has_its_parts_one_behind_the_other() -> None:
    buffer = Buffer([32, 96, 64], torch.device("cpu"))
    assert [buffer.part(i).data_ptr() for i in range(3)] == buffer.addresses
    assert [buffer.part(i).numel() for i in range(3)] == [32, 96, 64]


@pytest.mark.parametrize("module", [backward, forward], ids=["backward", "forward"])
@pytest.mark.parametrize("cap", [0, 2])
def test_arguments_have_their_names_again(module: Any, cap: int) -> None:
    config = BackwardConfig(64, key_sums=True) if module is backward else ForwardConfig(64, sink=True)
    passed = module.tensors_of(config)
    counts = (
        4 * len(module.MATRICES),
        1,
        len(Sizes._fields),
        2 * len(module.PARTS),
        len(module.Launch._fields),
    )
    found = module.named(config, range(len(passed) + sum(counts) + cap))
    flat = [*found.tensors.values(), *(n for place in found.places.values() for n in place), found.lse]
    flat += [*found.sizes, *(address for address, _ in found.parts), *(words for _, words in found.parts)]
    flat += [*found.launch, *found.cap]
    assert flat == list(range(len(flat)))
    assert (list(found.tensors), tuple(found.places), len(found.cap)) == (passed, module.MATRICES, cap)
    with pytest.raises(AssertionError):
        module.named(config, range(len(flat) + 1))


@pytest.mark.parametrize(
    ("shape", "turns"),
    [
        ({"batch": 4, "heads": 8, "seqlen": 256}, True),
        ({"batch": 4, "heads": 8, "seqlen": 256, "head_dim": 256}, False),  # no such kernel
        ({"heads": 16, "seqlen": 1024, "head_dim": 64, "mask": Mask.full()}, True),
        ({"batch": 2, "heads": 16, "seqlen": 1024, "mask": Mask.full()}, False),  # 16 per worker
        ({"heads": 1, "seqlen_q": 100, "seqlen_k": 1024}, True),
        ({"heads": 1, "seqlen_q": 100, "seqlen_k": 1025}, False),  # 9 tiles of an item
        ({"batch": 64, "heads": 16, "seqlen": 128}, True),
        ({"batch": 67, "heads": 16, "seqlen": 128}, False),
    ],
)
def test_who_starts_products_in_turns(shape: dict[str, Any], turns: bool) -> None:
    """A forward whose blocks have few kv tiles."""
    problem = Problem.dense(**{"head_dim": 128, "mask": Mask.causal()} | shape)
    made = Forward(problem, torch.device("cpu"), blocks=132, narrow=False)
    assert not made.config.in_turns
    assert _faster_in_turns(made.config, made.plan()) == turns


@pytest.mark.parametrize(
    ("shape", "narrow"),
    [
        ({"batch": 4, "heads": 8, "seqlen": 256}, True),  # 128 items in place of 64
        ({"heads": 8, "seqlen": 2048}, True),  # 256 items in place of 128, of up to 16 kv tiles
        ({"heads": 16, "seqlen": 2048}, False),
        ({"heads": 2, "seqlen": 4096}, True),
        ({"heads": 16, "seqlen": 1024, "mask": Mask.full()}, False),  # two rounds in place of one
        ({"heads": 16, "seqlen_q": 256, "seqlen_k": 4096, "mask": Mask.full()}, True),
        ({"heads": 4, "seqlen": 4096, "head_dim": 64}, True),
        ({"batch": 2, "heads": 12, "seqlen": 384, "head_dim": 64, "mask": Mask.full()}, False),
        ({"heads": 2, "seqlen": 1024, "head_dim": 80}, False),  # no such kernel
        ({"heads": 2, "seqlen_q": 100, "seqlen_k": 20_000, "mask": Mask.full()}, False),  # split
        ({"batch": 64, "heads": 16, "seqlen": 4096}, False),
    ],
)
def test_whose_blocks_have_one_warpgroup(shape: dict[str, Any], narrow: bool) -> None:
    """A forward of few items. Measured: docs/experiments/forward.md."""
    problem = Problem.dense(**{"head_dim": 128, "mask": Mask.causal()} | shape)
    config, plan = Forward(problem, torch.device("cpu"), blocks=132)._chosen()
    assert (config.warpgroups == 1) == narrow
    assert plan.tile_m == 64 * config.warpgroups
    assert not narrow or config == config_of(problem).as_narrow()


@pytest.mark.parametrize("of", ["the workspace", "what comes behind it"])
def test_without_memory_for_contributions_apart_they_wait(of: str) -> None:
    """Once for each plan; whoever asks for it is told."""
    tried: list[bool] = []

    class Workspace(launch.Workspace):
        def __init__(self, variant: launch.Variant, *rest: Any, **how: Any) -> None:
            tried.append(variant.config.apart)
            if variant.config.apart and of == "the workspace":
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().__init__(variant, *rest, **how)

    def copied(x: torch.Tensor) -> torch.Tensor:
        if tried[-1] and of != "the workspace":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x

    q = torch.zeros(1, 100, 1, 64, dtype=torch.bfloat16)
    given = Tensors(q, q, q, q, q, torch.zeros(1, 1, 100))
    plan = build_plan(Problem.dense(seqlen=100, head_dim=64), "spt")
    nothing = mock.patch.object(emulator, "Emulated")
    patched = mock.patch.multiple(launch, Workspace=Workspace, loadable=copied)
    uncaptured = mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False)
    with nothing, emulator.emulated(apart=True), patched, uncaptured:
        for _ in range(2):
            launch.run_backward(plan, given, 0.125, apart=None)
        assert tried == [True, False, False]
        with pytest.raises(torch.OutOfMemoryError):
            launch.run_backward(plan, given, 0.125, apart=True)
