"""Variants, counts and errors of benchmarks/ablations.py, and what the docs would quote of made-up rows."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dash_attn.problem import Mask, Problem
from dash_attn.schedule import ForwardNumerics
from dash_attn.schedule.forward_plan import prove_forward

FOLDER = Path(__file__).parents[2] / "benchmarks"
SMS = 132
CPU = import_module("dash_attn.backends.cpu.forward")  # the package has a function of this name


@pytest.fixture(scope="module")
def benchmark() -> Iterator[SimpleNamespace]:
    """Modules of benchmarks/ by the end of their names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        names = ("variants", "errors", "values", "figures")
        yield SimpleNamespace(**{name: import_module(f"ablation_{name}") for name in names})


def test_variants_differ_and_one_of_them_ships(benchmark: SimpleNamespace) -> None:
    variants = benchmark.variants
    assert tuple(variants.ABLATIONS) == benchmark.values.SPEEDS
    for ablation in variants.ABLATIONS.values():
        for head_dim in variants.HEAD_DIMS:
            found = ablation.variants(head_dim)
            names, ways = [x.name for x in found], {x[1:] for x in found}
            assert len(set(names)) == len(ways) == len(found)
            (ours,) = (x for x in found if x.name == variants.OURS)
            assert ours[1:] == (variants.forward_config(head_dim, "bf16"), variants.OURS, True)
    configs = variants.all_configs()
    assert len(set(configs)) == len(configs)
    assert all(config.shared_bytes <= 232_448 for config in configs)


def test_every_plan_is_whole_and_orders_differ(
    benchmark: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants, device = benchmark.variants, torch.device("cpu")
    monkeypatch.setattr("dash_attn.backends.sm90.forward.launch.multiprocessors", lambda device: SMS)
    for name in ("order", "persistent", "segment"):
        for problem, _ in variants.points(variants.ABLATIONS[name]):
            claims = set()
            for variant in variants.ABLATIONS[name].variants(problem.head_dim):
                forward = variants.AblatedForward(problem, device, variant)
                plan = forward.plan()
                prove_forward(plan)
                assert not len(plan.folds)  # no variant splits what ships whole
                assert forward._available() == (SMS if variant.persistent else plan.items)
                claims.add((plan.section, plan.entries.tobytes()))
            # The q tiles of one sequence alone are the shortest ones first.
            alike = (len(problem.sequences) == 1) + (len({section for section, _ in claims}) == 1)
            assert len(claims) == (len(variants.ORDERS) - alike if name == "order" else 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("keep", "room"), [(0.0, 0), (5.0, 5), (8.0, 0)])
def test_maxima_rise_where_the_reference_raises_them(
    benchmark: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, causal: bool, keep: float, room: int
) -> None:
    errors, seen, step = benchmark.errors, [], CPU._Head._with

    def watched(self: Any, state: Any, *rest: Any) -> Any:
        after = step(self, state, *rest)
        known = state.maximum != -torch.inf
        both = [known, known & (after.maximum != state.maximum)]
        seen.append([(x.sum(), x.view(-1, errors.WARP).any(1).sum()) for x in both])
        return after

    monkeypatch.setattr(CPU._Head, "_with", watched)
    mask = Mask.causal() if causal else Mask.full()
    x = errors.inputs("peaked", (1, 320, 2, 64), torch.float32, "cpu")
    numerics = ForwardNumerics(64, "float32", tile=32, segment=128, keep=keep, room=room)
    problem = Problem.dense(seqlen=320, heads=2, head_dim=64, mask=mask, dtype="float32")
    CPU.forward(problem, *(t[0] for t in x), 64**-0.5, numerics=numerics)
    q, k = (t[0].transpose(0, 1) for t in x[:2])
    found = errors.rises(*errors.tile_maxima(q, k, mask, numerics.tile), numerics)
    (pairs, warp_pairs), (rising, warps_rising) = torch.tensor(seen).sum(0).tolist()
    assert found == (pairs, rising, warp_pairs, warps_rising)
    assert 0 < found.rising < found.pairs
    assert found.rising < errors.WARP * found.warps_rising


def test_the_polynomial_is_the_kernels(benchmark: SimpleNamespace) -> None:
    errors = benchmark.errors
    source = (FOLDER.parent / "src/dash_attn/backends/sm90/forward/exact.py").read_text()
    assert all(f"0f{bits:08X}" in source for bits in errors.COEFFICIENTS)
    x = np.linspace(-126, 20, 40_001, dtype=np.float32)
    found = errors.exp2_errors(errors.polynomial_exp2(x), x)
    assert 8e-5 < found["fp32_max"] < 9e-5
    assert 3.8e-3 < found["bf16_max"] < 4e-3
    whole = np.arange(-126, 127, dtype=np.float32)
    assert (errors.polynomial_exp2(whole) == np.exp2(whole)).all()
    assert errors.polynomial_exp2(np.float32([-500.0]))[0] < 1e-37


def test_errors_of_attention_and_kinds_of_inputs(benchmark: SimpleNamespace) -> None:
    errors = benchmark.errors
    shape = (1, 100, 2, 64)
    normal, peaked, outliers, fa3 = (
        errors.inputs(kind, shape, torch.float32, "cpu") for kind in ("normal", "peaked", "outliers", "fa3")
    )
    assert torch.equal(3 * normal.q, peaked.q)
    assert torch.equal(normal.q, errors.inputs("normal", shape, torch.float32, "cpu").q)
    assert float(outliers.q.abs().max()) > 15 > 5 > float(normal.q.abs().max())
    assert float(fa3.q.abs().max()) > 8
    for mask in (Mask.full(), Mask.causal()):
        x = errors.inputs("normal", shape, torch.bfloat16, "cpu")
        wanted = errors.exact(x, mask)
        found = {name: errors.rmse(call(), wanted) for name, call in errors.peers(x, mask)}
        assert set(found) == {"sdpa flash", "sdpa math", "standard"}
        assert all(0 < error < 5e-3 for error in found.values())


def made_up(benchmark: SimpleNamespace) -> list[dict[str, Any]]:
    """Every variant half as fast as ours, FlashAttention-4 at 0.9, and errors."""
    variants, rows = benchmark.variants, []
    for name, ablation in variants.ABLATIONS.items():
        for problem, kind in variants.points(ablation):
            row = {"set": name, "what": "speed", "head_dim": problem.head_dim, "mask": problem.mask.name,
                   "seqlen": problem.sequences[0][0], "inputs": kind,
                   "same_bits": name != "segment"}  # fmt: skip
            names = [variant.name for variant in ablation.variants(problem.head_dim)]
            speeds = dict.fromkeys(names, 300.0) | {"ours": 600.0, "fa4": 540.0}
            rows += [row | {"variant": name, "tflops": speed} for name, speed in speeds.items()]
    rows.append({"set": "exp2", "what": "2^x", "variant": "polynomial", "fp32_max": 8.6e-5,
                 "fp32_mean": 1e-5, "bf16_max": 4e-3, "bf16_mean": 1e-3})  # fmt: skip
    at = {"head_dim": 64, "mask": "full", "seqlen": 4096}
    rows.append({"set": "exp2", "what": "rmse", "variant": "ours", "rmse": 1.25e-4, **at})
    rows.append({"set": "rescaling", "what": "rises", "variant": "ours", "inputs": "normal", "rows": 0.01,
                 "warps": 0.1, **at})  # fmt: skip
    for kind, dtype in (("normal", "bfloat16"), ("fa3", "float16")):
        for variant, rmse in (("ours", 3e-4), ("fa4", 2e-4)):
            rows.append({"set": "accuracy", "what": "rmse", "inputs": kind, "dtype": dtype,
                         "variant": variant, "rmse": rmse, **at})  # fmt: skip
    return rows


def test_what_the_docs_quote(
    benchmark: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    values, figures = benchmark.values, benchmark.figures
    monkeypatch.setattr(values, "rows", list)
    assert list(values.ablation_values()) == []  # not measured yet
    rows = made_up(benchmark)
    for module in (values, figures):
        monkeypatch.setattr(module, "rows", lambda: rows)
    pairs = [(name, value()) for name, value in values.ablation_values()]
    found = dict(pairs)
    assert len(found) == len(pairs)
    assert (found["pipelining-nothing-in-turns-mean"], found["order-64-fa4-most"]) == ("0.50", "0.90")
    assert (found["order-other-bits"], found["segment-other-bits"]) == ("0", "40")
    assert found["rescaling-peaked-keep-8-least"] == "0.50"
    assert "| 128 | causal | 65,536 | 600 | 300 | 300 | 300 | 540 |" in found["order-table"]
    assert "| 64 | full | 4,096 | peaked | 600 | 300 | 300 | 300 | 540 |" in found["rescaling-table"]
    assert "| 64 | full | normal | 1.00 / 10.0 |" in found["rises"]
    assert "| fa3 | float16 | 64 | full | 4,096 | 3.0e-4 | 2.0e-4 |" in found["accuracy-table"]
    assert "| FlashAttention-3, FA3's paper, table 3 | 1.9e-4 |" in found["accuracy-published"]
    assert found["accuracy-normal-mean"] == "1.50"
    drawn = [path.name for path in figures.ablation_figures(tmp_path)]
    assert drawn == [f"ablation-{name}.svg" for name in values.SPEEDS]
    assert "FA4" in (tmp_path / drawn[0]).read_text()
