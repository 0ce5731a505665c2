"""SDPA, transformers, ``dash-attn verify`` and the demo on a Hopper GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import attention as registry
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from dash_attn import attention
from dash_attn.errors import InputError
from dash_attn.integrations import sdpa
from dash_attn.integrations.positions import Sizes, separate
from dash_attn.testing import assert_same_bytes, same_bytes
from dash_attn.tools import doctor
from dash_attn.tools.cli import main
from dash_attn.tools.demo import DemoSettings, run_demo
from dash_attn.tools.demo.gpt import GPTShape
from dash_attn.tools.demo.repeatable import deterministic_torch

HAS_REGISTRY = hasattr(registry, "register_flash_attention_impl")
needs_registry = pytest.mark.skipif(not HAS_REGISTRY, reason=f"torch {torch.__version__} has no registry")


def sdpa_leaves(seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes = [(2, 8, 1000, 64), *[(2, 2, 1000, 64)] * 2]
    made = (torch.randn(size, generator=generator, device="cuda") for size in sizes)
    return [x.bfloat16().requires_grad_() for x in made]


def run(function, tensors, **how):
    out = function(*tensors, **how)
    return [out.detach(), *torch.autograd.grad(out, tensors, torch.ones_like(out) * 0.1)]


def ours(q, k, v, **how):
    return attention(*(x.transpose(1, 2) for x in (q, k, v)), **how).transpose(1, 2)


@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa_gives_the_bytes_of_attention(is_causal):
    tensors = sdpa_leaves()
    expected = run(ours, tensors, causal=is_causal)
    outside = run(F.scaled_dot_product_attention, tensors, is_causal=is_causal, enable_gqa=True)
    with sdpa.enabled():
        for _ in range(5):
            found = run(F.scaled_dot_product_attention, tensors, is_causal=is_causal, enable_gqa=True)
            for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected):
                assert_same_bytes(a, b, name)
    for a, b in zip(found, outside):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


def test_sdpa_runs_checkpoints_again_inside_and_its_backward_outside():
    tensors = sdpa_leaves()
    expected = run(ours, tensors, causal=True)

    def call(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with sdpa.enabled():
        again = run(lambda *x: checkpoint(call, *x, use_reentrant=False), tensors)
        out = call(*tensors)
    late = torch.autograd.grad(out, tensors, torch.ones_like(out) * 0.1)
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), again, (out.detach(), *late), expected):
        assert_same_bytes(a, c, name)
        assert_same_bytes(b, c, name)


def test_sdpa_under_compile():
    tensors = sdpa_leaves()
    expected = run(ours, tensors, causal=True)
    torch._dynamo.reset()

    def scaled(q, k, v):
        return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True, enable_gqa=True)

    compiled = torch.compile(scaled, fullgraph=True)
    doubled = [tensors[0].detach().div(2).requires_grad_(), *tensors[1:]]
    with sdpa.enabled():
        found = run(compiled, doubled)
    assert_same_bytes(found[0], expected[0], "out")
    assert_same_bytes(found[3], expected[3], "dv")


def test_sdpa_refuses_what_it_cannot_honour():
    q = sdpa_leaves()[0]
    with sdpa.enabled():
        mask = torch.ones(1000, 1000, device="cuda").bool()
        mask[3, 0] = False
        with pytest.raises(InputError, match=r"attn_mask of shape \(1000, 1000\) shows key 0"):
            F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        with pytest.raises(InputError, match="dropout_p must be"):
            F.scaled_dot_product_attention(q, q, q, dropout_p=1.0)
        with pytest.raises(InputError, match="head_dim 36"):
            F.scaled_dot_product_attention(q[..., :36], q[..., :36], q[..., :36])


def test_sdpa_takes_lower_right_masks():
    q, k, v = sdpa_leaves()
    tensors = [q.detach()[:, :, :700].requires_grad_(), k, v]
    expected = run(ours, tensors, causal=True)
    mask = causal_lower_right(700, 1000)
    with sdpa.enabled():
        found = run(F.scaled_dot_product_attention, tensors, attn_mask=mask, enable_gqa=True)
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected):
        assert_same_bytes(a, b, name)


def test_sdpa_takes_masks_that_are_intervals_of_rows():
    """Documents; a causal mask given as a tensor has the bytes of ``is_causal``."""
    tensors = sdpa_leaves()
    row = torch.arange(1000, device="cuda")
    causal = row[:, None] >= row
    documents = causal & (row[:, None] // 300 == row // 300)
    ends = ((row // 300 + 1) * 300).int().expand(2, -1)
    expected = run(ours, tensors, causal=True, row_ends=ends)
    plain = run(ours, tensors, causal=True)
    with sdpa.enabled():
        additive = torch.zeros(1000, 1000, device="cuda").masked_fill(~documents, -torch.inf)
        for mask in (documents, documents.expand(2, 8, -1, -1), additive):
            found = run(F.scaled_dot_product_attention, tensors, attn_mask=mask, enable_gqa=True)
            for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected):
                assert_same_bytes(a, b, name)
        found = run(F.scaled_dot_product_attention, tensors, attn_mask=causal, enable_gqa=True)
        for name, a, b in zip(("out", "dq", "dk", "dv"), found, plain):
            assert_same_bytes(a, b, name)
    theirs = run(F.scaled_dot_product_attention, tensors, attn_mask=documents, enable_gqa=True)
    for a, b in zip(expected, theirs):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


@needs_registry
def test_varlen_attn_of_torch():
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    q, k, v = (x.transpose(1, 2).flatten(0, 1).detach().requires_grad_() for x in sdpa_leaves())
    k, v = (x.repeat_interleave(4, 1).detach().requires_grad_() for x in (k, v))
    bounds = torch.tensor([0, 300, 2000], dtype=torch.int32, device="cuda")

    def call(q, k, v):
        return varlen.varlen_attn(q, k, v, bounds, bounds, 1700, 1700)

    expected = [run(attention, [x[None, a:b] for x in (q, k, v)]) for a, b in ((0, 300), (300, 2000))]
    sdpa.activate()
    try:
        found = run(call, [q, k, v])
    finally:
        sdpa.restore()
    for x, *parts in zip(found, *expected):
        assert_same_bytes(x, torch.cat([part[0] for part in parts]))


def llama(transformers, **change):
    return transformers.LlamaConfig(**{**SMALL, "num_key_value_heads": 4}, **change)


def qwen(transformers, **change):
    return transformers.Qwen3Config(**SMALL, head_dim=64, **change)


def sliding(transformers, **change):
    return transformers.Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=100, max_window_layers=1, **change
    )


SMALL = {
    "vocab_size": 211, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip
CONFIGS = pytest.mark.parametrize("config", [llama, qwen, sliding])
LENGTHS = (500, 311, 40)
CACHES = ("dynamic", "offloaded", "static", "offloaded_static")


@pytest.fixture
def transformers():
    package = pytest.importorskip("transformers")
    from dash_attn.integrations.transformers import register

    register()
    return package


def model_of(transformers, config, implementation):
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(
        config(transformers), attn_implementation=implementation, dtype=torch.bfloat16
    )
    return made.cuda().train()


def tokens_of(seed=1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(211, (3, 500), generator=generator).cuda()


def padding_of(side) -> Tensor | None:
    if side is None:
        return None
    mask = torch.zeros(3, 500, dtype=torch.long, device="cuda")
    for row, tokens in enumerate(LENGTHS):
        mask[row, slice(0, tokens) if side == "right" else slice(500 - tokens, None)] = 1
    return mask


def logits_and_gradients(model, mask):
    model.zero_grad()
    logits = model(tokens_of(), attention_mask=mask, use_cache=False).logits.float()
    if mask is not None:
        logits = logits * mask[..., None]
    logits.square().mean().backward()
    return [logits.detach(), *(w.grad for w in model.parameters())]


@CONFIGS
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_models_agree_with_sdpa(transformers, config, side):
    mask = padding_of(side)
    found = logits_and_gradients(model_of(transformers, config, "dash"), mask)
    with deterministic_torch():
        expected = logits_and_gradients(model_of(transformers, config, "sdpa"), mask)
    for a, b in zip(found, expected):
        error = float((a.double() - b.double()).norm() / b.double().norm())
        assert error < 0.03, error


@CONFIGS
def test_packed_sequences_with_a_cache(transformers, config):
    model, tokens = model_of(transformers, config, "dash").eval(), tokens_of()
    positions = torch.cat([torch.arange(n) for n in (300, 1, 199)])[None].cuda()
    with torch.no_grad():
        found = model(tokens, position_ids=positions).logits
        assert_same_bytes(found, model(tokens, position_ids=positions, use_cache=False).logits)
        assert not same_bytes(found, model(tokens).logits)


@CONFIGS
def test_caches_that_leave_the_gpu_have_the_same_bytes(transformers, config):
    """Layers of an offloaded cache come back on a stream of their own while another layer computes.

    Nothing is compiled: the compiler's own kernels round otherwise. (PyTorch 2.11 ends with a segmentation
    fault where it compiles an offloaded_static cache, with "sdpa" too.)
    """
    found = [logits_of(transformers, config, name, compiles=False) for name in CACHES]
    for each in found[1:]:
        for a, b in zip(each, found[0], strict=True):
            assert_same_bytes(a, b)


def test_compiled_generation_repeats_its_bytes(transformers):
    """transformers compiles the model by itself where a cache is static."""
    found = [logits_of(transformers, llama, "static", compiles=True) for _ in range(2)]
    for a, b in zip(*found, strict=True):
        assert_same_bytes(a, b)
    eager = logits_of(transformers, llama, "static", compiles=False)
    assert not all(map(same_bytes, found[0], eager))  # it was compiled
    torch.testing.assert_close(found[0][1], eager[1], atol=2e-2, rtol=2e-2)


def logits_of(transformers, config, cache, *, compiles) -> list[Tensor]:
    """Of generation: the tokens, and the logits of each."""
    model, prompt = model_of(transformers, config, "dash").eval(), tokens_of()[:, :40]
    made = model.generate(
        prompt, cache_implementation=cache, disable_compile=not compiles, max_new_tokens=24, do_sample=False,
        pad_token_id=0, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return [made.sequences, *made.logits]


def test_positions_on_the_device_are_read_once_until_they_are_written():
    positions, sizes = torch.arange(64, device="cuda")[None], Sizes(1, 64, 64)
    assert separate(positions, None, sizes) is None
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert separate(positions, None, sizes) is None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    positions[0, 40:] -= 40
    numbers = separate(positions, None, sizes)
    assert numbers is not None
    assert numbers[0].diff().nonzero().flatten().tolist() == [39]


def test_a_layer_may_be_on_another_device_than_its_mask(transformers):
    """As where a model is spread over GPUs."""
    from dash_attn.integrations.token_masks import token_mask
    from dash_attn.integrations.transformers import attention_forward

    q, k, v = (x.detach() for x in sdpa_leaves())
    tokens = torch.ones(2, 1000, dtype=torch.bool)
    tokens[1, :300] = False
    found = []
    for device in ("cpu", "cuda"):
        mask = token_mask(2, 1000, 1000, attention_mask=tokens.to(device), device=device)
        found.append(attention_forward(torch.nn.Identity(), q, k, v, mask)[0])
    assert_same_bytes(*found)
    assert bool(found[0][1, 300:].any())


@needs_registry
def test_multihead_attention_runs_here_beside_a_default_device():
    layer = torch.nn.MultiheadAttention(512, 8, batch_first=True, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, 500, 512, device="cuda", dtype=torch.bfloat16)
    theirs, _ = layer(x, x, x, need_weights=False)
    with sdpa.enabled():
        mine, _ = layer(x, x, x, need_weights=False)
    with torch.device("cuda"), sdpa.enabled():
        found, _ = layer(x, x, x, need_weights=False)
        compiled, _ = torch.compile(layer, fullgraph=False, backend="aot_eager")(x, x, x, need_weights=False)
    assert not same_bytes(mine, theirs)
    assert_same_bytes(found, mine)
    assert_same_bytes(compiled, mine)


def trained(transformers, config, implementation, steps=4):
    model, mask = model_of(transformers, config, implementation), padding_of("right")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        tokens = tokens_of(step)
        labels = tokens.masked_fill(mask == 0, -100)
        loss = model(tokens, attention_mask=mask, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict()


@CONFIGS
def test_two_training_runs_end_in_the_same_bytes(transformers, config):
    with deterministic_torch():
        first, second = (trained(transformers, config, "dash") for _ in range(2))
        other = trained(transformers, config, "sdpa")
    for name, weight in first.items():
        assert_same_bytes(weight, second[name], name)
    assert not all(same_bytes(weight, other[name]) for name, weight in first.items())


@pytest.mark.parametrize(
    ("line", "backend"),
    [
        ("--seqlen 1100 --heads 8 --kv-heads 2 --mask causal", "sm90"),
        ("--seqlens 700 0 31 1100 --heads 4 --head-dim 64 --window 300 0 --dtype float16", "sm90"),
        ("--backend triton --seqlen 1100 --heads 8 --kv-heads 2 --mask causal", "triton"),
        (
            "--backend triton --seqlens 700 0 31 1100 --heads 4 --head-dim 80 --head-dim-v 40 --window 300 0 "
            "--dtype float16",
            "triton",
        ),
        ("--backend triton --seqlen 700 --heads 2 --head-dim 256", "triton"),
        ("--seqlen 600 --heads 2 --head-dim 32 --mask causal --dtype float32", "triton"),
    ],
)
def test_verify(capsys, line, backend):
    code = main(["verify", "--device", "cuda", "--json", "--replays", "50", *line.split()])
    facts = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in facts["shapes"][0]["checks"]}
    assert code == 0, checks
    assert {check["status"] for check in checks.values()} == {"passed"}
    assert facts["shapes"][0]["facts"]["backend"] == backend


def test_doctor():
    facts = doctor.examine()
    assert facts["gpu"].startswith("yes")
    assert facts["backend_sm90"]["variable lengths"] == facts["backend_triton"]["fp32"] == "yes"
    assert "float32" in facts["backend_sm90"]["fp32"]


def test_the_demo_repeats_and_its_control_drifts():
    # Heads of so many bytes come one after the other (tests/cpu/test_demo.py). In turns, sums without an
    # order often come in order.
    shape = GPTShape(layers=2, width=512, head_dim=64, seqlen=2048)
    settings = DemoSettings(steps=20, batch=8, shape=shape, device="cuda")
    result = run_demo(settings, say=lambda line: None)
    assert result.identical
    for _ in range(4):  # beside other work on the GPU, sums without an order may repeat by chance
        if result.sha256[0] != result.sha256[2]:
            break
        result = run_demo(settings, say=lambda line: None)
    assert result.sha256[0] != result.sha256[2]
    assert result.drift[20] > 0
    assert run_demo(replace(settings, steps=3), say=lambda line: None).losses == result.losses[:3]
