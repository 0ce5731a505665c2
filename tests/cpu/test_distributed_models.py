"""Small models of transformers whose rows are spread over two ranks of gloo.

Matrix products of half the rows may have other bytes than those of all rows. So what is compared is
attention: its inputs are recorded on every rank, brought together, and run by one process.
"""

from __future__ import annotations

import pytest
import torch

import dash_attn
from dash_attn.distributed import context, positions, shard, unshard
from dash_attn.integrations.continuous import paged_attention_forward
from dash_attn.integrations.token_masks import token_mask
from dash_attn.testing import assert_same_bytes
from sharing_cases import notes, refused
from spawned import spawn

transformers = pytest.importorskip("transformers")

from dash_attn.integrations import transformers as dash  # noqa: E402

SEQLEN, SEGMENT = 256, 128
SMALL = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


def llama():
    return transformers.LlamaConfig(**SMALL)


def sliding():
    """The second layer has a window, which ends within the rows of a rank."""
    return transformers.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=100, max_window_layers=1)


def long_window():
    """The window is longer than the rows of a rank, but shorter than the sequences."""
    return transformers.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=200, max_window_layers=0)


def gemma():
    """Scores are capped."""
    return transformers.Gemma2Config(
        **SMALL, head_dim=16, attn_logit_softcapping=0.05, query_pre_attn_scalar=16, sliding_window=100
    )


CONFIGS = (llama, sliding, long_window, gemma)


class Recorder:
    """Attention of transformers that keeps what it is called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, module, query, key, value, attention_mask, **how):
        out, weights = dash.attention_forward(module, query, key, value, attention_mask, **how)
        if out.requires_grad:
            for x in (query, key, value, out):
                x.retain_grad()
        self.calls.append((query, key, value, out, how))
        return out, weights


RECORDER = Recorder()


def model_of(config, name="recorded", **change):
    transformers.AttentionInterface.register("recorded", RECORDER)
    transformers.AttentionMaskInterface.register("recorded", token_mask)
    dash.register()
    RECORDER.calls.clear()
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name)
    return made.train()


def tokens_of(batch=2, length=SEQLEN):
    return torch.randint(61, (batch, length), generator=torch.Generator().manual_seed(1))


def inside(**how):
    return context(**{"q_segment": SEGMENT, **how})


def loss_of(model, layout="zigzag", **how):
    """The sum of all rows of this rank."""
    rows = positions(SEQLEN, layout=layout)[None]
    logits = model(shard(tokens_of(), layout=layout), position_ids=rows, **how).logits
    return logits, (logits * shard(weights_of(), layout=layout)).sum()


def weights_of():
    return torch.randn(2, SEQLEN, 61, generator=torch.Generator().manual_seed(2))


def check_layer(call, layout, **more):
    """Attention of a layer, and its gradients, are those of one process."""
    query, key, value, out, how = call
    tensors = [x.detach().transpose(1, 2) for x in (query, key, value)]
    q, k, v = (unshard(x, layout=layout).contiguous().requires_grad_() for x in tensors)
    window = how.get("sliding_window")
    expected = dash_attn.attention(
        q,
        k,
        v,
        causal=True,
        window=None if window is None or window >= SEQLEN else (window - 1, 0),
        softmax_scale=how["scaling"],
        softcap=how.get("softcap") or 0.0,
        q_segment=SEGMENT,
        **more,
    )
    expected.backward(unshard(out.grad, layout=layout))
    assert_same_bytes(out.detach(), shard(expected.detach(), layout=layout))
    for found, x in zip((query, key, value), (q, k, v)):
        assert_same_bytes(found.grad.transpose(1, 2).contiguous(), shard(x.grad, layout=layout).contiguous())


# On every rank


def on_models():
    for config in CONFIGS:
        for layout, how in [("zigzag", {"use_cache": False}), ("contiguous", {}), ("zigzag", {})]:
            model = model_of(config())
            with inside(layout=layout):
                logits, loss = loss_of(model, layout, **how)
            loss.backward()
            assert len(RECORDER.calls) == 2
            for call in RECORDER.calls:
                check_layer(call, layout)
            whole = model_of(config(), "eager")(tokens_of()).logits
            torch.testing.assert_close(logits, shard(whole, layout=layout))


def on_dropout():
    """Each layer drops by a seed that rank 0 draws; the numbers of other ranks do not count."""
    config = llama()
    config.attention_dropout = 0.5
    model = model_of(config)
    torch.manual_seed(3 + torch.distributed.get_rank())
    with inside():
        _, loss = loss_of(model)
    loss.backward()
    torch.manual_seed(3)
    seeds = [torch.randint(2**63 - 1, ()) for _ in RECORDER.calls]
    assert len(seeds) == 2
    for call, seed in zip(RECORDER.calls, seeds):
        check_layer(call, "zigzag", dropout_p=0.5, dropout_seed=seed)


def on_gradients_of_weights():
    """Their sum over ranks is the gradient of one process, but for rounding."""
    model, whole = model_of(llama()), model_of(llama(), "eager")
    with inside():
        loss_of(model)[1].backward()
    (whole(tokens_of()).logits * weights_of()).sum().backward()
    for mine, other in zip(model.parameters(), whole.parameters()):
        torch.distributed.all_reduce(mine.grad)
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4)


def on_checkpoints():
    """Layers that are run again outside of the context are shared there: their mask knows."""
    grads = []
    for again in (False, True):
        model = model_of(llama())
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with inside():
            _, loss = loss_of(model, use_cache=False)
        loss.backward()
        grads.append([x.grad for x in model.parameters()])
        assert len(RECORDER.calls) == (4 if again else 2)
    for x, y in zip(*grads):
        assert_same_bytes(x, y)


def on_all_tokens():
    """A mask of tokens without padding hides nothing."""
    model = model_of(llama())
    with inside():
        _, loss = loss_of(model, attention_mask=torch.ones(2, SEQLEN // 2, dtype=torch.long))
    loss.backward()
    for call in RECORDER.calls:
        check_layer(call, "zigzag")


def on_refused_models():
    rows = positions(SEQLEN)[None]
    shared = {"position_ids": rows, "use_cache": False}
    padded = torch.ones(2, SEQLEN // 2, dtype=torch.long)
    padded[0, 0] = 0
    bounds = torch.tensor([0, 128], dtype=torch.int32)
    packed = torch.cat([torch.arange(50), torch.arange(SEQLEN // 2 - 50)])[None]
    dense = torch.ones(2, 1, SEQLEN // 2, SEQLEN // 2, dtype=torch.bool)
    for change, message in [
        (
            {"position_ids": None, "use_cache": True},
            "position_ids have .* where the position on this rank is",
        ),
        ({"position_ids": packed}, "pack several sequences into a row: they cannot be shared"),
        ({"position_ids": packed, "use_cache": True}, "position_ids have .* the position on this rank is"),
        ({"position_ids": positions(SEQLEN, layout="contiguous")[None]}, "the position on this rank is"),
        ({"attention_mask": padded}, "attention_mask with padding cannot be shared"),
        ({"attention_mask": torch.ones(2, SEQLEN, dtype=torch.long)}, "128 queries and 256 keys"),
        ({"attention_mask": dense}, r"attention_mask must be None or \(batch, seqlen_k\)"),
        ({"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}, "cu_seq_lens_q is not supported inside"),
    ]:
        with inside(), refused(message):
            model_of(llama())(shard(tokens_of()), **{**shared, **change})


def on_refused_caches():
    model = model_of(llama())
    rows = positions(SEQLEN)[None]
    with inside(), torch.no_grad():
        cache = model(shard(tokens_of()), position_ids=rows, use_cache=True).past_key_values
        with refused("1 queries and 129 keys on this rank"):
            model(tokens_of(length=1), past_key_values=cache, position_ids=torch.tensor([[SEQLEN]]))


def on_refused_masks():
    module, q = torch.nn.Module(), torch.randn(1, 4, 128, 16)
    sizes = {"batch_size": 1, "q_length": 128, "kv_length": 128}
    outside = token_mask(**sizes)
    with inside():
        of_zigzag = token_mask(**sizes)
        with refused("made outside of the context, but is used inside"):
            dash.attention_forward(module, q, q, q, outside)
        with inside(layout="contiguous"), refused("made in another context"):
            dash.attention_forward(module, q, q, q, of_zigzag)
        out, _ = dash.attention_forward(module, q, q, q, of_zigzag)
        with inside():  # as a checkpoint's recomputation may be
            again, _ = dash.attention_forward(module, q, q, q, of_zigzag)
        assert_same_bytes(again, out)
        with refused(r"attention_mask is not supported .* shape \(1, 128\)"):
            dash.attention_forward(module, q, q, q, torch.ones(1, 128))
        with refused("sliding_window 7, but .* a window or chunks of None"):
            dash.attention_forward(module, q, q, q, of_zigzag, sliding_window=7)
        with refused("sliding_window 7 without a causal mask"):
            dash.attention_forward(module, q, q, q, None, sliding_window=7, is_causal=False)
        with refused(r"position_ids have shape \(3, 1, 128\)"):
            dash.attention_forward(module, q, q, q, of_zigzag, position_ids=positions(256).expand(3, 1, 128))
        with refused("paged attention is not supported inside"):
            paged_attention_forward(module, q, q, q, None, cache=object())
        config = transformers.LlamaConfig(**SMALL, attention_chunk_size=64)
        with refused("attention_chunk_size 64: chunks cannot be shared"):
            token_mask(**sizes, local_size=64, config=config)
        before = notes().calls
        assert not hasattr(of_zigzag, "shape")  # somebody looks at it
        assert notes().calls == before
        windowed = token_mask(**sizes, local_size=300)
        with refused("sliding_window None, but .* a window or chunks of 300"):
            dash.attention_forward(module, q, q, q, windowed)
    with refused("sliding_window 7, but .* a window or chunks of None"):  # the mask remembers the context
        dash.attention_forward(module, q, q, q, of_zigzag, sliding_window=7)


TURNS = {
    "bytes": (on_models, on_dropout),
    "rest": (
        on_gradients_of_weights,
        on_checkpoints,
        on_all_tokens,
        on_refused_models,
        on_refused_caches,
        on_refused_masks,
    ),
}


@pytest.mark.parametrize("name", ["bytes", pytest.param("rest", marks=pytest.mark.slow)])
def test_two_ranks(name):
    spawn(in_turns, 2, name)


def in_turns(rank, name):
    for function in TURNS[name]:
        function()
