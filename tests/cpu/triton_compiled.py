"""The Triton kernels compile for GPUs that are not there; ``test_triton.py`` starts this file in a process.

Triton's compiler ends the process where it fails, and cannot compile what was loaded for its interpreter.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dash_attn.backends.cuda.cubin import resources_of_cubin
from dash_attn.backends.triton.backend import COMPILED
from dash_attn.backends.triton.backward_kernels import (
    dkdv_kernel,
    dq_kernel,
    fold_kernel,
    prepare_kernel,
    sink_kernel,
    sinks_kernel,
)
from dash_attn.backends.triton.forward_kernel import forward_kernel
from dash_attn.backends.triton.segments_kernel import fold_segments_kernel
from dash_attn.backends.triton.tiles import (
    FOLDED_KEYS,
    FOLDED_ROWS,
    ROOMY,
    TILES,
    columns_of,
    padded,
    shapes_of,
)
from dash_attn.schedule.constants import SINK_ROWS

SHARED = {80: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes that a block may use. Code for sm_80 also runs on sm_86, which has less than an A100."""

HEAD_DIMS = (*TILES, 80, 96, 192)

PAIRS = ((192, 128), (64, 128), (40, 200))
"""Head dims of Q and K beside that of V: DeepSeek's MLA, and others."""

MOST_LOCAL = 768
"""Bytes of local memory per thread: registers that do not fit. None would be better."""

MOST_LOCAL_WITH_INTERVALS = 1088
"""dQ of heads of 256 on Hopper."""

MOST_LOCAL_WITH_EVERYTHING = {80: 960, 90: 1280}
"""With all that scores can take at once: dK and dV of heads of 64 on sm_80, dQ of heads of 192 on Hopper.
Newer GPUs need less than sm_80."""

MOST_LOCAL_OVER_A_CACHE = 2816
"""Heads of 256 on Hopper, with the tiles of training, whose bits they must have. It is slow there."""

ROCM = "gfx942"

TYPES = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
QUICK = (80, "bfloat16")
SLOW = (
    *((arch, "bfloat16") for arch in SHARED if arch != 80),
    (90, "float16"),
    (80, "float32"),
    (120, "float32"),
)
QUICK_HEAD_DIMS = (64, 128)
CASES = [
    pytest.param(
        arch, dtype, n, marks=() if (arch, dtype) == QUICK and n in QUICK_HEAD_DIMS else pytest.mark.slow
    )
    for arch, dtype in (QUICK, *SLOW)
    for n in HEAD_DIMS
]
"""fp16 has the programs of bf16; fp32 has one table for all GPUs."""

FEATURES = ("SOFTCAP", "SINK", "ALIBI", "DROPOUT")
NEWER = [90, 100, 120]

FLOATS_ADDED = re.compile(r"\b(?:atom|red)\.\S*\.(?:f16|bf16|f32|f64|f16x2|bf16x2)\b")
"""In PTX: an addition to memory, in the order of time. Of integers any order has the same sum."""

TILED = [pytest.param(n, marks=() if n in QUICK_HEAD_DIMS else pytest.mark.slow) for n in TILES]


PLAIN = {"SOFTCAP": False, "SINK": False, "ALIBI": False, "DROPOUT": False, "INTERVALS": False}
"""What becomes of scores: constants of the variants that most calls take."""


def sources(
    head_dims: int | tuple[int, int], dtype: str, arch: int, **scores: bool
) -> dict[str, tuple[Any, dict[str, Any], int, int]]:
    """Kernel, constants, warps and stages by name, as ``launch.py`` has them; ``scores``: those of PLAIN."""
    head_dim, head_dim_v = head_dims if isinstance(head_dims, tuple) else (head_dims, head_dims)
    widest, of_scores = max(head_dim, head_dim_v), PLAIN | scores
    shapes = shapes_of(widest, dtype, divmod(arch, 10) in ROOMY, of_scores["DROPOUT"])
    forward, dq = shapes.forward, shapes.dq
    tile_m, tile_n = TILES[padded(widest)]
    columns, columns_v = columns_of(head_dim), columns_of(head_dim_v)
    of_v = {"HEAD_DIM_V": head_dim_v, "BLOCK_DV": columns_v.block, "REST_DV": columns_v.rest}
    head = {"HEAD_DIM": head_dim, "BLOCK_D": columns.block, "REST_D": columns.rest} | of_v
    tile = {"TILE_M": tile_m, "TILE_N": tile_n}
    tile |= {name: of_scores[name] for name in of_scores if name not in ("SINK", "CACHED", "SPLIT")}
    numbers = {
        "CACHED": False,
        "SPLIT": False,
        **of_scores,
        "SCALED": of_scores["SOFTCAP"] or of_scores["ALIBI"],
        "ROWS": forward.rows,
        "TILE": forward.keys,
        "SEGMENT": 8192,
        "KEEP": 5.0,
        "ROOM": 5,
    }
    of_parts = {name: numbers[name] for name in ("SINK", "DROPOUT", "CACHED", "SEGMENT")}
    of_parts |= {"TILE_ROWS": forward.rows, "ROWS": FOLDED_ROWS}
    of_keys = {}
    for launch, (shape, k, v) in zip(("dkdv", "dv"), shapes.of_keys()):
        sums = {"ROWS": shape.rows, "KEYS": shape.keys, "OF_K": k, "OF_V": v}
        of_keys[launch] = (dkdv_kernel, head | tile | sums, *shape[2:])
    return of_keys | {
        "forward": (forward_kernel, head | numbers, *forward[2:]),
        "segments": (fold_segments_kernel, of_v | of_parts, 4, 3),
        "dq": (dq_kernel, head | tile | {"ROWS": dq.rows, "KEYS": dq.keys, "LATE": shapes.late}, *dq[2:]),
        "fold": (fold_kernel, head | {"KEYS": FOLDED_KEYS, "TILE_N": tile_n}, 4, 3),
        "prepare": (prepare_kernel, of_v | {"ROWS": tile_m}, 4, 3),
        "sink": (sink_kernel, {"ROWS": SINK_ROWS}, 4, 3),
        "sinks": (sinks_kernel, {}, 1, 3),
    }


MAIN = ("forward", "dkdv", "dv", "dq")
"""Kernels whose variants take what becomes of scores; those of heads up to 128 make dV beside dK."""


@cache
def compiled(name: str, arch: int, dtype: str, head_dims: int | tuple[int, int], **scores: bool) -> Any:
    return compiled_for(GPUTarget("cuda", arch, 32), name, arch, dtype, head_dims, **scores)


def compiled_for(
    target: GPUTarget, name: str, arch: int, dtype: str, head_dims: int | tuple[int, int], **scores: bool
) -> Any:
    """A kernel for a target, with the shapes of another GPU."""
    kernel, constants, warps, stages = sources(head_dims, dtype, arch, **scores)[name]
    signature, aligned = {}, {}
    for at, argument in enumerate(kernel.arg_names):
        kind = "*fp32" if argument == "out" and scores.get("SPLIT") else _type_of(argument, dtype, name)
        signature[argument] = "constexpr" if argument in constants else kind
        if kind.startswith("*"):
            aligned[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    return triton.compile(source, target=target, options=options)


def _type_of(argument: str, dtype: str, name: str) -> str:
    if argument == "seed":
        return "*i64"
    if argument == "stats":
        return "*fp32" if name in ("prepare", "sink", "segments") else "*i64"
    if argument in ("q", "k", "v", "out", "dout", "dq", "dk", "dv"):
        return TYPES[dtype]
    if argument in ("lse", "sums", "sink", "dsink", "slopes"):
        return "*fp32"
    if argument in ("table", "visits", "stretches", "row_starts", "row_ends", "lengths", "bounds"):
        return "*i32"
    return "fp32" if argument in ("scale", "scale2", "cap2", "rescale", "nothing") else "i32"


def layouts_of_sums(arch: int, head_dim: int, **scores: bool) -> set[tuple[str, str]]:
    """Shapes and layouts of the tiles whose rows the forward sums. They decide the order of a sum."""
    code = compiled("forward", arch, "bfloat16", head_dim, **scores).asm["ttgir"]
    named = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
    reduced = re.findall(r"\}\) : \(tensor<(\w+)xf32, (#\w+)>\) ->", code)
    return {(shape, named[layout]) for shape, layout in reduced}


@pytest.mark.parametrize("head_dim", QUICK_HEAD_DIMS)
def test_a_cache_and_on_hopper_intervals_change_no_order_of_a_sum(head_dim: int) -> None:
    """On Ampere intervals do: then a row's bits depend on whether the mask or an interval hides a key."""
    for arch in (80, 90):
        plain, cached, hidden = (
            layouts_of_sums(arch, head_dim, **scores)
            for scores in ({}, {"CACHED": True, "SINK": True}, {"INTERVALS": True})
        )
        assert plain
        assert plain == cached
        assert (plain == hidden) == (arch == 90)


@pytest.mark.parametrize(("arch", "dtype", "head_dim"), CASES)
def test_kernels_fit(arch: int, dtype: str, head_dim: int) -> None:
    for name in sources(head_dim, dtype, arch):
        _assert_fits(name, arch, dtype, head_dim)


@pytest.mark.parametrize("arch", [80, pytest.param(90, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "head_dims", [PAIRS[0], *(pytest.param(pair, marks=pytest.mark.slow) for pair in PAIRS[1:])], ids=str
)
def test_kernels_with_another_head_dim_of_v_fit(head_dims: tuple[int, int], arch: int) -> None:
    for name in sources(head_dims, "bfloat16", arch):
        _assert_fits(name, arch, "bfloat16", head_dims)


@pytest.mark.parametrize("head_dim", TILED)
def test_kernels_with_a_softcap_fit(head_dim: int) -> None:
    for name in MAIN:
        _assert_fits(name, *QUICK, head_dim, SOFTCAP=True)


@pytest.mark.parametrize("arch", [80, pytest.param(90, marks=pytest.mark.slow)])
@pytest.mark.parametrize("head_dim", TILES)
def test_the_forward_over_a_cache_fits(head_dim: int, arch: int) -> None:
    _assert_fits("forward", arch, "bfloat16", head_dim, CACHED=True, SINK=True)


@pytest.mark.parametrize(
    ("arch", "cached"),
    [(80, True), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((80, False), (90, True)))],
)
@pytest.mark.parametrize("head_dim", TILED)
def test_the_forward_that_is_split_fits(head_dim: int, arch: int, cached: bool) -> None:
    _assert_fits("forward", arch, "bfloat16", head_dim, CACHED=cached, SPLIT=True)
    _assert_fits("segments", arch, "bfloat16", head_dim, CACHED=cached, SINK=True)


OPERATIONS = "|".join(
    (
        r"arith\.(?:addf|subf|mulf|divf|maxnumf|maximumf|cmpf|truncf|negf)\b",
        r"arith\.select\b.*f32",
        r"math\.\w+",
        r"tt\.precise_divf",
        r"tt\.dot",
        r"ttng\.(?:warp_group_dot|tc_gen5_mma)\b",
        r"\}\) : \(tensor<\w+xf32",  # what a reduction is of
    )
)
"""Of floating-point numbers, and what chooses among them."""


def arithmetic(
    name: str, arch: int, dtype: str, head_dims: int | tuple[int, int], **scores: bool
) -> list[str]:
    """The operations of a kernel in their order, with the shapes and layouts of what they take."""
    code = compiled(name, arch, dtype, head_dims, **scores).asm["ttgir"]
    named = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
    found = []
    for line in re.findall(rf"^\s*(?:%\S+ = )?((?:{OPERATIONS}).*)$", code, re.MULTILINE):
        line = re.sub(r" loc\(.*\)$", "", re.sub(r"%[\w#]+", "%", line))
        for _ in range(3):  # layouts name layouts
            line = re.sub(r"#\w+", lambda match: named.get(match[0], match[0]), line)
        found.append(line)
    return found


def counts_of(operations: list[str]) -> Counter[str]:
    """By name; 1 for those that make a row's factor, which is computed in each layout that needs it."""
    found = Counter(line.split()[0] for line in operations)
    factors = ("arith.maxnumf", "arith.cmpf", "arith.select", "arith.subf", "math.exp2")
    return Counter({name: 1 if name in factors else count for name, count in found.items()})


SPLITS = [(80, "bfloat16", 64, {})]
SLOW_SPLITS = [(90, "bfloat16", 64, {"INTERVALS": True, "DROPOUT": True, "SOFTCAP": True, "ALIBI": True})] + [
    (arch, dtype, head_dim, scores)
    for arch, dtype in (QUICK, *SLOW[:3], (80, "float32"))
    for head_dim in HEAD_DIMS
    for scores in ({}, {"CACHED": True})
]


@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim", "scores"),
    [*SPLITS, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_SPLITS)],
)
def test_a_split_changes_no_operation(arch: int, dtype: str, head_dim: int, scores: dict[str, bool]) -> None:
    """One kernel has those of the one that is split, with the same layouts, and then those of the fold."""
    whole = arithmetic("forward", arch, dtype, head_dim, SINK=True, **scores)
    parts = arithmetic("forward", arch, dtype, head_dim, SPLIT=True, **scores)
    fold = arithmetic("segments", arch, dtype, head_dim, SINK=True, **scores)
    reduced = [line for line in parts if line.startswith("}) : (tensor")]
    assert len(reduced) >= 2
    assert all("<{" in line for line in reduced)  # layouts are spelt out
    assert whole[: len(parts)] == parts
    assert counts_of(whole[len(parts) :]) == counts_of(fold)


@pytest.mark.parametrize("head_dim", TILES)
def test_the_forward_with_a_sink_fits(head_dim: int) -> None:
    _assert_fits("forward", *QUICK, head_dim, SINK=True)


@pytest.mark.parametrize("arch", NEWER)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.slow
def test_kernels_with_a_feature_fit_on_newer_gpus(feature: str, arch: int) -> None:
    for name in MAIN if feature != "SINK" else ("forward",):
        _assert_fits(name, arch, "bfloat16", 128, **{feature: True})


@pytest.mark.parametrize("head_dim", TILES)
@pytest.mark.slow
def test_kernels_with_alibi_fit(head_dim: int) -> None:
    for name in MAIN:
        _assert_fits(name, *QUICK, head_dim, ALIBI=True)


@pytest.mark.parametrize("head_dim", TILES)
@pytest.mark.slow
def test_kernels_with_dropout_fit(head_dim: int) -> None:
    for name in MAIN:
        _assert_fits(name, *QUICK, head_dim, DROPOUT=True)


@pytest.mark.parametrize(("arch", "dtype"), [QUICK, *(one for one in SLOW if one[0] != 89)])
@pytest.mark.parametrize("head_dims", [*TILES, (192, 128)], ids=str)
@pytest.mark.slow
def test_kernels_with_intervals_fit(head_dims: int | tuple[int, int], arch: int, dtype: str) -> None:
    for name in MAIN:
        _assert_fits(name, arch, dtype, head_dims, INTERVALS=True)


@pytest.mark.parametrize(
    "arch", [80, *(pytest.param(arch, marks=pytest.mark.slow) for arch in SHARED if arch != 80)]
)
@pytest.mark.parametrize("head_dims", [64, (192, 128)], ids=str)
def test_kernels_with_everything_fit(head_dims: int | tuple[int, int], arch: int) -> None:
    everything = dict.fromkeys(PLAIN, True)
    for name in MAIN:
        _assert_fits(name, arch, "bfloat16", head_dims, **everything)


def _assert_fits(name: str, arch: int, dtype: str, head_dims: int | tuple[int, int], **scores: bool) -> None:
    if name not in sources(head_dims, dtype, arch, **scores):
        return
    found = compiled(name, arch, dtype, head_dims, **scores)
    assert not FLOATS_ADDED.findall(found.asm["ptx"]), name
    assert found.metadata.shared <= SHARED[arch], name
    (kernel,) = resources_of_cubin(found.asm["cubin"])
    most = MOST_LOCAL_WITH_INTERVALS if scores.get("INTERVALS") else MOST_LOCAL
    if scores.get("CACHED") and (arch, head_dims) == (90, 256):
        most = MOST_LOCAL_OVER_A_CACHE
    if all(scores.get(x) for x in PLAIN):
        most = MOST_LOCAL_WITH_EVERYTHING[90 if arch == 90 else 80]
    assert kernel.stack <= most, name


@triton.jit
def adding_kernel(out, x):
    tl.atomic_add(out, tl.load(x))


@pytest.mark.parametrize(("kind", "floats"), [("fp32", True), ("fp16", True), ("i32", False)])
def test_additions_in_the_order_of_time_are_found(kind: str, floats: bool) -> None:
    """The control of :func:`_assert_fits`, which looks for them in every kernel."""
    source = ASTSource(fn=adding_kernel, signature={"out": f"*{kind}", "x": f"*{kind}"}, constexprs={})
    for arch in (80, 90):
        text = triton.compile(source, target=GPUTarget("cuda", arch, 32)).asm["ptx"]
        assert re.search(r"\b(atom|red)\.", text)
        assert bool(FLOATS_ADDED.search(text)) == floats


@pytest.mark.parametrize(
    ("arch", "dtype", "sums"), [(80, "bfloat16", 1), (80, "float32", 1), (90, "bfloat16", 2)]
)
def test_every_contribution_to_dq_is_a_product_of_its_own(arch: int, dtype: str, sums: int) -> None:
    """The compiler makes one product of a product and a sum, where the product begins with zeros. On Hopper
    a contribution is added a task later: the last one behind the loop."""
    shape = shapes_of(64, dtype).dq
    tile = f"tensor<{shape.rows}x64xf32>"
    text = compiled("dq", arch, dtype, 64).asm["ttir"]
    loop = text[text.index("scf.for") :]
    assert len(re.findall(rf"arith\.addf .* : {tile}", loop)) == sums
    assert loop.count("tt.dot ") == 3


def test_what_is_called_compiled_is_compiled_here() -> None:
    assert [10 * major + minor for major, minor in COMPILED] == list(SHARED)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", QUICK_HEAD_DIMS)
def test_rocm_needs_shapes_of_its_own_for_dq_only(head_dim: int) -> None:
    """Code for gfx942 with the shapes of sm_80. A workgroup there may use 64 KB. Nobody has run it."""
    made = {
        name: compiled_for(GPUTarget("hip", ROCM, 64), name, *QUICK, head_dim)
        for name in ("forward", "dkdv", "dq", "segments", "prepare")
    }
    assert all(f"amdgcn-amd-amdhsa--{ROCM}" in kernel.asm["amdgcn"] for kernel in made.values())
    too_large = {name for name, kernel in made.items() if kernel.metadata.shared > 65_536}
    assert too_large == ({"dq"} if head_dim == 64 else set())


def test_no_sum_is_fused_with_a_product() -> None:
    """But in products of matrices, in exponents of scores, and in log2, which asks for it."""
    for name in ("forward", "dkdv", "dq"):
        text = compiled(name, 80, "bfloat16", 64).asm["ptx"]
        assert "mma.sync" in text, name
        if name == "forward":
            log2 = text.rindex("mma.sync")
            assert "fma." in text[log2:]
            text = text[:log2]
        fused = re.findall(r"fma\.\S+\s+(%\w+),", text)
        exponents = set(re.findall(r"ex2\.\S+\s+%\w+, (%\w+);", text))
        assert fused, name
        assert set(fused) <= exponents, name
