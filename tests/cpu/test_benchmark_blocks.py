"""The blocks of benchmarks/blocks.py on the CPU, tiny, and what is made of profiles and of made-up rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

FOLDER = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")
PARTS = ("attention forward", "attention backward", "matrix products", "the rest")


@pytest.fixture(scope="module")
def benchmark() -> Iterator[SimpleNamespace]:
    """Modules of benchmarks/ by the end of their names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        names = ("models", "attention", "parts", "values")
        modules = {name: import_module(f"block_{name}") for name in names}
        yield SimpleNamespace(blocks=import_module("blocks"), **modules)


def small(models: Any, name: str) -> Any:
    """A case of the same kind, with few and narrow heads."""
    model = models.MODELS[name]
    change = {"hidden": 64, "heads": 4, "kv_heads": 4 if model.heads == model.kv_heads else 2, "head_dim": 16}
    return models.Case(name, model._replace(**change, mlp=96, text=model.text and 5), 2, 64)


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def test_models_have_the_sizes_that_were_published(benchmark: SimpleNamespace) -> None:
    million = {}
    for name, model in benchmark.models.MODELS.items():
        assert model.heads * model.head_dim == model.hidden
        assert model.heads % model.kv_heads == 0
        with torch.device("meta"):
            block = benchmark.models.block_of(benchmark.models.Case(name, model, 1, 8))
        million[name] = round(sum(x.numel() for x in block.parameters()) / 1e6)
    # Weights of a layer: of all but embeddings, by the number of layers.
    assert million == {
        "LLaMA3-8B": 218, "Qwen2.5-7B": 233, "Mixtral-8x7B": 1451, "SAM-H": 20, "SD3.5-medium": 85,
        "SD3.5-large": 213, "LLaDA-1B": 44,
    }  # fmt: skip


def test_cases_are_the_papers_and_their_neighbours(benchmark: SimpleNamespace) -> None:
    found = list(benchmark.models.cases())
    assert len({case.title for case in found}) == len(found) == 21
    assert "LLaMA3-8B, 1 x 32,768" in {case.title for case in found}
    for case in found:
        assert case.batch * case.seqlen == (case.seqlen if case.model.causal else 65_536)
        if case.model.experts > 1:
            assert case.seqlen % case.model.experts == 0
    chosen = benchmark.blocks.chosen
    assert [case.title for case in chosen(True, ["LLaMA", "SD3.5"], "0/1")] == [
        "LLaMA3-8B, 1 x 16,384", "SD3.5-medium, 16 x 4,429", "SD3.5-large, 16 x 4,429",
    ]  # fmt: skip
    assert sorted(case.title for k in range(4) for case in chosen(False, [], f"{k}/4")) == sorted(
        case.title for case in found
    )


@pytest.mark.parametrize(
    "name", ["LLaMA3-8B", "Qwen2.5-7B", "Mixtral-8x7B", "SAM-H", "SD3.5-medium", "LLaDA-1B"]
)
def test_blocks_run_with_any_attention(benchmark: SimpleNamespace, name: str) -> None:
    case = small(benchmark.models, name)
    assert {x.shape for x in case_inputs(benchmark, case)} == {(2, 64 + case.model.text, 64)}
    calls = benchmark.blocks.calls(case, CPU, torch.float32)
    assert list(calls) == [("dash_attn", True), ("dash_attn", False)]
    found = calls["dash_attn", True]()
    torch.manual_seed(0)
    block, x, dout = benchmark.models.block_of(case), *case_inputs(benchmark, case)
    out = block(x.requires_grad_(), lambda q, k, v: plain(q, k, v, case.model.causal))
    grads = torch.autograd.grad(out, [x, *block.parameters()], dout)
    for a, b in zip(found, (out, *grads), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-4)
        assert b.any()


def case_inputs(benchmark: SimpleNamespace, case: Any) -> tuple[Tensor, Tensor]:
    """As ``calls`` draws them, behind the weights."""
    x = torch.randn(case.batch, case.tokens, case.model.hidden)
    return x, torch.randn_like(x)


def test_experts_in_turns_are_those_of_a_loop(benchmark: SimpleNamespace) -> None:
    model = small(benchmark.models, "Mixtral-8x7B").model
    layer = benchmark.models.Experts(model)
    x = torch.randn(2, 16, 64)
    expected = torch.zeros(32, 64)
    for token, row in enumerate(x.flatten(0, 1)):
        both = [token % 8, (token + 1) % 8]
        weights = layer.router(row)[both].softmax(0)
        for weight, expert in zip(weights, both):
            gate, value = (row @ layer.up[expert]).chunk(2)
            expected[token] += weight * ((F.silu(gate) * value) @ layer.down[expert])
    torch.testing.assert_close(layer(x).flatten(0, 1), expected, atol=1e-5, rtol=1e-4)


def test_rotary_scores_depend_on_distances(benchmark: SimpleNamespace) -> None:
    q, k = (torch.randn(1, 1, 1, 16).expand(1, 9, 1, 16) for _ in "qk")
    q, k = benchmark.models.rotated(q, k)
    scores = (q.transpose(1, 2) @ k.transpose(1, 2).mT)[0, 0]
    torch.testing.assert_close(scores[2, 5], scores[4, 7])
    assert abs(scores[2, 5] - scores[2, 6]) > 1e-4


def test_a_contender_that_is_wrong_or_fails_is_left_out(
    benchmark: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    case, attentions = small(benchmark.models, "SAM-H"), benchmark.attention.attentions

    def fails(*_: Tensor) -> Tensor:
        raise RuntimeError("no such kernel\nand more")

    more = {("fa4", True): lambda q, k, v: v, ("cudnn", True): fails}
    monkeypatch.setattr(benchmark.blocks, "attentions", lambda *of: attentions(*of) | more)
    assert list(benchmark.blocks.calls(case, CPU, torch.float32)) == [
        ("dash_attn", True),
        ("dash_attn", False),
    ]
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("fa4 det is left out: results differ by 0.")
    assert second == "cudnn det is left out: RuntimeError: no such kernel"


def test_two_calls_have_the_same_bytes(benchmark: SimpleNamespace) -> None:
    case = small(benchmark.models, "LLaDA-1B")
    call = benchmark.blocks.calls(case, CPU, torch.float32)["dash_attn", True]
    assert benchmark.blocks.repeats(call)
    results = [call(), [2 * x for x in call()]]
    assert not benchmark.blocks.repeats(lambda: results.pop())


def event(category: str, name: str, ts: float, dur: float, **more: Any) -> dict[str, Any]:
    args = {"correlation": more.pop("correlation")} if "correlation" in more else {}
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "args": args, **more}


TRACE = [
    event("user_annotation", PARTS[0], 10, 5, tid=1),
    event("user_annotation", PARTS[1], 30, 5, tid=2),
    event("cuda_runtime", "cudaLaunchKernel", 5, 1, tid=1, correlation=1),
    event("cuda_driver", "cuLaunchKernelEx", 11, 1, tid=1, correlation=2),
    event("cuda_driver", "cuLaunchKernelEx", 12, 1, tid=2, correlation=3),  # another thread
    event("cuda_driver", "cuLaunchKernelEx", 31, 1, tid=2, correlation=4),
    event("cuda_runtime", "cudaLaunchKernel", 40, 1, tid=2, correlation=5),
    event("gpu_user_annotation", PARTS[1], 400, 50),
    event("kernel", "nvjet_tst_128x256", 100, 2000, correlation=1),
    event("kernel", "kernel_cutlass_gemm_like_attention", 200, 3000, correlation=2),
    event("kernel", "vectorized_elementwise", 300, 500, correlation=3),
    event("kernel", "kernel_of_a_backward", 350, 4000, correlation=4),
    event("kernel", "launched_by_nobody", 420, 1000, correlation=99),
    event("gpu_memset", "Memset", 500, 250, correlation=5),
    {"ph": "M", "name": "process_name"},
]


def test_time_by_part(benchmark: SimpleNamespace) -> None:
    parts = benchmark.parts.parts_of(json.loads(json.dumps(TRACE)))
    assert parts == dict(zip(PARTS, (3.0, 5.0, 2.0, 0.75)))
    assert tuple(parts) == benchmark.values.PARTS
    with pytest.raises(ValueError, match="in which attention takes no time"):
        benchmark.parts.parts_of([e for e in TRACE if "annotation" not in e.get("cat", "")])


def row(case: str, impl: str, deterministic: bool, ms: float) -> dict[str, Any]:
    parts = dict(zip(PARTS, (ms * 0.2, ms * 0.3, ms * 0.4, ms * 0.1)))
    return {
        "case": case, "model": case.partition(",")[0], "central": "16,384" in case, "impl": impl,
        "deterministic": deterministic, "ms": ms, "peak_mib": 1234, "parts_ms": parts,
    }  # fmt: skip


ROWS = [
    row("LLaMA3-8B, 1 x 16,384", "dash_attn", True, 10.0),
    row("LLaMA3-8B, 1 x 16,384", "dash_attn", False, 9.9),
    row("LLaMA3-8B, 1 x 16,384", "fa4", True, 11.0),
    row("LLaMA3-8B, 1 x 16,384", "fa4", False, 9.8),
    row("LLaMA3-8B, 1 x 16,384", "fa2", True, 20.0),
    row("SAM-H, 8 x 8,192", "dash_attn", True, 20.0),
    row("SAM-H, 8 x 8,192", "fa2", False, 30.0),
]


def test_what_the_docs_would_quote(
    benchmark: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    values = benchmark.values
    monkeypatch.setattr(values, "read", lambda name: ROWS)
    found = {name: value() for name, value in values.block_values() if not name.startswith("det-")}
    assert found["any-mean"] == "1.21"
    assert (found["any-least"], found["any-behind"], found["no-order-points"]) == ("0.98", "1", "1")
    assert dict(values.block_values())["det-least"]() == "1.10"
    head, _, first, second = found["table"].splitlines()
    named = "ours, no order / ours | FA4 det / ours | FA4 / ours | PyTorch strict / ours | PyTorch / ours"
    assert head == f"| block | ours, ms | {named} | MiB |"  # cuDNN was not measured
    assert first == "| LLaMA3-8B, 1 x 16,384 | 10.00 | 0.990 | 1.100 | 0.980 | 2.000 | - | 1,234 |"
    assert second == "| SAM-H, 8 x 8,192 | 20.00 | - | - | - | - | 1.500 | 1,234 |"
    assert found["parts"].splitlines()[2:] == ["| LLaMA3-8B, 1 x 16,384 | 2.00 | 3.00 | 4.00 | 1.00 |"]
    first_bytes = values.block_figure(tmp_path / "a.svg").read_bytes()
    assert values.block_figure(tmp_path / "b.svg").read_bytes() == first_bytes
    assert b"attention backward" in first_bytes
    assert benchmark.blocks.line([r | {"case": "x"} for r in ROWS[:5]]).startswith(
        "x: 10.000 ms (attention forward 2.00, attention backward 3.00, matrix products 4.00, the rest 1.00);"
        " others / ours: dash_attn nondet 0.990, fa4 det 1.100"
    )


@pytest.mark.filterwarnings("ignore::UserWarning")  # of graph breaks beside a tensor that is no leaf
def test_steps_of_a_model(benchmark: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Eager and compiled, in a fixed order and not; every step goes on from the one before it."""
    steps = import_module("steps")
    monkeypatch.setattr(steps, "LAYERS", 2)  # each is compiled by itself
    case = small(benchmark.models, "LLaMA3-8B")._replace(seqlen=16)
    torch._dynamo.reset()
    made = steps.steps(case, CPU, words=31, backend="aot_eager")
    assert {(way.mode, way.ordered, way.everything) for way in made} == {
        (mode, *way)
        for mode in ("eager", "compiled")
        for way in ((True, True), (True, False), (False, False))
    }
    assert not capsys.readouterr().err
    losses = [float(call()) for call in made.values()]
    assert losses == sorted(losses, reverse=True)
    assert not torch.are_deterministic_algorithms_enabled()
    torch._dynamo.reset()
