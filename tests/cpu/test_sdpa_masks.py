"""Masks inside ``sdpa.enabled()``: which are intervals of rows, that they are the mask, what is refused."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dash_attn import attention, is_supported
from dash_attn.backends.base import RowIntervals
from dash_attn.errors import InputError
from dash_attn.integrations import sdpa
from dash_attn.integrations.interval_masks import Intervals, Sizes, intervals_of
from dash_attn.integrations.kernels import Band
from dash_attn.problem import Mask
from dash_attn.testing import assert_same_bytes, same_bytes
from interval_cases import ends_of_documents, random_intervals, random_tree, seen_elements, starts_of_prefix

LOOSE = {torch.float64: 1e-12, torch.float32: 1e-5}


def found_in(mask: Tensor, batch: int = 1, heads: int = 1) -> Intervals:
    return intervals_of(mask, Sizes(batch, heads, *mask.shape[-2:]))


def mask_of(found: Intervals, seqlen_q: int, seqlen_k: int) -> Tensor:
    """(sequences, seqlen_q, seqlen_k) bool; of a band alone one sequence."""
    causal, left, right = found.band
    sides = [None if x in (None, -1) else x for x in (left, 0 if causal else right)]
    band = Mask(*sides)
    if found.row_starts is None or found.row_ends is None:
        rows = [RowIntervals(torch.zeros(seqlen_k), torch.full((seqlen_k,), seqlen_q))]
    else:
        rows = [RowIntervals(*x) for x in zip(found.row_starts, found.row_ends)]
    return torch.stack([seen_elements(x, band, seqlen_q) for x in rows])


def is_intervals(mask: Tensor) -> bool:
    """(rows, keys): by going through every key, one without the other."""
    for column in mask.T.tolist():
        rows = [row for row, seen in enumerate(column) if seen]
        if rows and rows != list(range(rows[0], rows[-1] + 1)):
            return False
    return True


NOTHING = torch.zeros(60, dtype=torch.int32)
KINDS = {
    "full": (Mask.full(), RowIntervals(NOTHING, NOTHING + 60)),
    "causal": (Mask.causal(), RowIntervals(NOTHING, NOTHING + 60)),
    "window": (Mask.window(9, 0), RowIntervals(NOTHING, NOTHING + 60)),
    "window to both sides": (Mask.window(9, 4), RowIntervals(NOTHING, NOTHING + 60)),
    "documents": (Mask.causal(), RowIntervals(NOTHING, ends_of_documents(13, 1, 30, 16))),
    "prefix": (Mask.full(), RowIntervals(starts_of_prefix(23, 60), NOTHING + 60)),
    "tree": (Mask.causal(), RowIntervals(NOTHING, random_tree(60, 3)[0])),
    "padding": (Mask.full(), RowIntervals(NOTHING, torch.where(torch.arange(60) < 40, 60, 0))),
    "causal beside padding": (Mask.causal(), RowIntervals(NOTHING, torch.where(torch.arange(60) < 7, 0, 60))),
    "any": (Mask.window(30, 5), random_intervals(60, 60, 5)),
    "nothing": (Mask.full(), RowIntervals(NOTHING, NOTHING)),
}
BLIND = ("causal beside padding", "any", "nothing")
"""Of these some rows see no key."""
BANDS = {
    "full": Band(False, None, None),
    "causal": Band(True, None, 0),
    "window": Band(True, 9, 0),
    "window to both sides": Band(False, 9, 4),
}


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_found_is_the_mask(kind, additive):
    band, rows = KINDS[kind]
    mask = seen_elements(rows, band, 60)
    given = torch.zeros(60, 60).masked_fill(~mask, -torch.inf) if additive else mask
    found = found_in(given)
    assert torch.equal(mask_of(found, 60, 60)[0], mask)
    assert (found.row_starts is None) == (kind in BANDS)
    if kind in BANDS:
        assert found.band == BANDS[kind]
    else:
        assert found.band.causal == (kind not in ("prefix", "padding", "any"))


@pytest.mark.parametrize("seed", range(40))
def test_masks_are_intervals_exactly_where_they_are(seed):
    """Random ones of any lengths; every second one has a value turned, which may still leave intervals."""
    rng = random.Random(seed)
    seqlen_q, seqlen_k = rng.randint(1, 12), rng.randint(1, 12)
    band = rng.choice([Mask.full(), Mask.causal(), Mask.window(rng.randint(0, 5), rng.randint(0, 5))])
    masks = [
        seen_elements(random_intervals(seqlen_k, seqlen_q, 9 * seed + k), band, seqlen_q) for k in range(3)
    ]
    if seed % 2:
        masks[rng.randrange(3)][rng.randrange(seqlen_q), rng.randrange(seqlen_k)] ^= True
    mask = torch.stack(masks)[:, None]
    if all(map(is_intervals, masks)):
        assert torch.equal(mask_of(found_in(mask, 3), seqlen_q, seqlen_k).expand(3, -1, -1), mask[:, 0])
        return
    with pytest.raises(InputError, match="each key has one interval of rows") as caught:
        found_in(mask, 3)
    words = str(caught.value).replace(",", "").replace(":", "").split()
    sequence, key = int(words[words.index("sequence") + 1]), int(words[words.index("key") + 1])
    first, last, between = (int(words[k + 1]) for k, word in enumerate(words) if word == "row")
    assert first < between < last
    assert masks[sequence][[first, between, last], key].tolist() == [True, False, True]


def test_random_masks_are_refused():
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(InputError, match=r"attn_mask of shape \(50, 40\) shows key 0 of sequence 0 to row"):
        found_in(torch.rand(50, 40, generator=generator) < 0.5)


def leaves(dtype=torch.float64, lengths=(60, 60), batch=2):
    generator = torch.Generator().manual_seed(0)
    sizes = [(batch, 4, lengths[0], 16), *[(batch, 2, lengths[1], 16)] * 2]
    return [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]


def run(tensors, mask, **how):
    """out, dq, dk and dv."""
    out = F.scaled_dot_product_attention(*tensors, attn_mask=mask, enable_gqa=True, **how)
    return [out.detach(), *torch.autograd.grad(out, tensors, torch.ones_like(out) * 0.1)]


def inside(*args, **how):
    with sdpa.enabled():
        return run(*args, **how)


@pytest.mark.parametrize("dtype", LOOSE)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in BLIND])
def test_attention_is_pytorchs(kind, dtype):
    """In float64 its kernels are an oracle of their own. Masks where each row sees a key."""
    band, rows = KINDS[kind]
    mask = seen_elements(rows, band, 60)
    tensors = leaves(dtype)
    expected = run(tensors, mask)
    for given in (mask, torch.zeros(60, 60, dtype=dtype).masked_fill(~mask, -torch.inf)):
        for a, b in zip(inside(tensors, given), expected):
            torch.testing.assert_close(a, b, atol=LOOSE[dtype], rtol=LOOSE[dtype])
    wider = inside(tensors, None)[0]
    assert kind == "full" or (wider - expected[0]).abs().max() > 1e-3


def random_mask(kind: str, rng: random.Random, length: int) -> Tensor:
    """(length, length) bool, built without intervals: from numbers of documents, a prefix, or parents."""
    row = torch.arange(length)
    causal = row[:, None] >= row
    if kind == "documents":
        number = torch.tensor([rng.random() < 0.1 for _ in range(length)]).cumsum(0)
        return causal & (number[:, None] == number)
    if kind == "prefix":
        return causal | (row < rng.randrange(length))
    return random_tree(length, rng.randrange(1000))[1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["documents", "prefix", "tree"])
def test_random_masks_of_each_sequence_are_pytorchs(kind, seed):
    """In float64; several tiles; also additive, and by an error what is no interval."""
    rng, length = random.Random(seed), 150
    mask = torch.stack([random_mask(kind, rng, length) for _ in range(2)])[:, None]
    tensors = leaves(lengths=(length, length))
    expected = run(tensors, mask)
    additive = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    for given in (mask, additive):
        for a, b in zip(inside(tensors, given), expected):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    key = next(key for key in range(length) if mask[1, 0, :, key].sum() > 2)
    seen = mask[1, 0, :, key].nonzero()
    hole = int(seen[1])
    mask[1, 0, hole, key] = False
    with pytest.raises(
        InputError, match=f"shows key {key} of sequence 1 to row .* but not to row {hole} between"
    ):
        inside(tensors, mask)


def test_every_sequence_has_its_own_mask():
    masks = [seen_elements(KINDS[kind][1], KINDS[kind][0], 60) for kind in ("documents", "prefix")]
    mask, tensors = torch.stack(masks)[:, None], leaves()
    found = inside(tensors, mask)
    for number, one in enumerate(masks):
        expected = run([x[number : number + 1].detach().requires_grad_() for x in tensors], one)
        for a, b in zip(found, expected):
            torch.testing.assert_close(a[number : number + 1], b)


def test_neighbours_decide_the_band():
    """A call has one band for all of its sequences."""
    masks = {
        kind: seen_elements(KINDS[kind][1], KINDS[kind][0], 60) for kind in ("causal", "documents", "prefix")
    }

    def together(*kinds):
        found = found_in(torch.stack([masks[kind] for kind in kinds])[:, None], len(kinds))
        return found.band.causal, found.row_starts is not None

    assert together("causal") == together("causal", "causal") == (True, False)
    assert together("causal", "documents") == (True, True)
    assert together("causal", "prefix") == (False, True)


@pytest.mark.parametrize("lengths", [(60, 83), (83, 60), (1, 60)])
def test_unequal_lengths(lengths):
    """Also PyTorch's causal masks of them, which are aligned upper-left."""
    tensors = leaves(lengths=lengths)
    expected = run(tensors, None, is_causal=True)
    found = inside(tensors, torch.ones(lengths, dtype=torch.bool).tril())
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", BANDS)
def test_a_band_has_the_bytes_of_that_band(kind):
    """So it runs on the Hopper kernels, too: they have no intervals."""
    tensors = leaves(torch.float32)
    mask = seen_elements(KINDS[kind][1], KINDS[kind][0], 60)
    causal, left, right = BANDS[kind]
    turned = [x.detach().transpose(1, 2) for x in tensors]
    expected = attention(*turned, causal=causal, window=(left, right))
    assert is_supported(*turned, causal=causal, window_size=(left, right))
    assert_same_bytes(inside(tensors, mask)[0], expected.transpose(1, 2))


def test_intervals_have_the_bytes_of_attention_with_them():
    tensors = leaves(torch.float32)
    ends = KINDS["documents"][1].ends
    turned = [x.detach().transpose(1, 2) for x in tensors]
    expected = attention(*turned, causal=True, row_ends=ends.expand(2, -1)).transpose(1, 2)
    found = inside(tensors, seen_elements(KINDS["documents"][1], Mask.causal(), 60))[0]
    assert_same_bytes(found, expected)
    assert not same_bytes(found, attention(*turned, causal=True).transpose(1, 2))


def test_rows_that_see_nothing_are_zero():
    mask = torch.ones(60, 60, dtype=torch.bool).tril()
    mask[:7] = False
    out, dq, *_ = inside(leaves(), mask)
    assert not out[:, :, :7].any()
    assert not dq[:, :, :7].any()
    assert out[:, :, 7:].any(-1).all()


@pytest.mark.parametrize("shape", [(1, 60), (2, 1, 1, 60), (2, 4, 60, 60), (60, 1), (1, 1, 1, 1)])
def test_masks_are_broadcast(shape):
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(*shape[:1], *[1] * (len(shape) - 1), generator=generator) < 2
    mask = mask.expand(shape).clone()
    if shape[-1] == 60:
        mask[..., -9:] = False
    tensors = leaves()
    for given in (mask, mask.expand(*shape[:-2], 60, 60)):
        for a, b in zip(inside(tensors, given), run(tensors, given)):
            torch.testing.assert_close(a, b)


def test_a_mask_that_was_expanded_is_not_copied():
    """16 million values for 60 keys."""
    row = torch.arange(60) < 40
    found = intervals_of(row.expand(512, 9, 60, 60), Sizes(512, 9, 60, 60))
    assert found.row_ends.unique(dim=0).tolist() == [[60] * 40 + [0] * 20]
    assert found.row_ends.shape == (512, 60)


def test_layers_of_pytorch_with_padding():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True)
    x, padding = torch.randn(2, 30, 64), torch.arange(30) >= torch.tensor([[30], [11]])
    expected = layer(x, src_key_padding_mask=padding)
    with sdpa.enabled():
        found = layer(x, src_key_padding_mask=padding)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.randn(60, 60).fill_(0.5), r"attn_mask of shape \(60, 60\) holds 0.5: of additive masks"),
        (torch.full((60, 60), torch.nan), "holds nan"),
        (torch.full((60, 60), torch.finfo(torch.float32).min), "holds -3.4028234663852886e[+]38"),
        (torch.zeros(60, 60, dtype=torch.int64), "must have booleans or floats, got torch.int64"),
        (torch.ones(60, dtype=torch.bool), r"attn_mask has shape \(60,\), the attention \(2, 4, 60, 60\)"),
        (torch.ones(61, 60, dtype=torch.bool), r"attn_mask has shape \(61, 60\), the attention"),
        (torch.ones(3, 1, 60, 60, dtype=torch.bool), r"attn_mask has shape \(3, 1, 60, 60\)"),
        (torch.zeros(60, 60, requires_grad=True), "needs a gradient"),
        (torch.ones(2, 4, 60, 60).tril().bool() & (torch.arange(4) != 2)[:, None, None],
         "differs between heads 0 and 2 at row 0 and key 0 of sequence 0: dash-attn takes one mask for all"),
        (torch.ones(60, 60).bool() & (torch.arange(60) != 33)[:, None],
         "shows key 0 of sequence 0 to row 0 and to row 59, but not to row 33 between them"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(mask, message):
    with pytest.raises(InputError, match=message):
        inside(leaves(), mask)


def test_a_mask_beside_is_causal_raises():
    with pytest.raises(InputError, match=r"is_causal=True beside an attn_mask of shape \(60, 60\)"):
        inside(leaves(), torch.ones(60, 60, dtype=torch.bool), is_causal=True)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of graph breaks beside a tensor that is no leaf
def test_compiled_calls_break_the_graph_there():
    tensors, mask = leaves(torch.float32), seen_elements(KINDS["prefix"][1], Mask.full(), 60)
    expected = inside(tensors, mask)

    def call(q, k, v, mask):
        return F.scaled_dot_product_attention(q * 1, k, v, attn_mask=mask, enable_gqa=True)

    torch._dynamo.reset()
    with sdpa.enabled():
        out = torch.compile(call, backend="aot_eager")(*tensors, mask)
        assert_same_bytes(out.detach(), expected[0])
        torch._dynamo.reset()
        whole = torch.compile(call, backend="aot_eager", fullgraph=True)
        with pytest.raises(Exception, match="dash-attn reads an attn_mask on the host"):
            whole(*tensors, mask)
    torch._dynamo.reset()
