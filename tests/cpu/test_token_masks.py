"""What the attention function of transformers makes of masks and positions; without a model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from token_cases import PACKED, padding_of

from dash_attn import attention
from dash_attn.errors import InputError
from dash_attn.integrations import transformers as dash
from dash_attn.integrations.padding import packing_of
from dash_attn.integrations.positions import Sizes, assert_separate, separate
from dash_attn.integrations.token_masks import NotATensorError, isolate, token_mask
from dash_attn.testing import assert_same_bytes


def test_a_window_that_hides_nothing_of_a_packed_sequence_is_none():
    """As in the masks that transformers makes without a cache: the same plans, the same bytes."""
    for size, window in ((24, (-1, -1)), (20, (-1, -1)), (19, (18, 0))):
        made = token_mask(1, 33, 33, mask_function=see_window(size), local_size=size)
        assert made.window == (size - 1, 0)
        assert isolate(made, PACKED).window == window


def test_packed_sequences_in_chunks():
    """As transformers' own mask of both, which it makes without a cache."""
    document = (PACKED.diff(dim=1, prepend=PACKED[:, :1] - 1) != 1).cumsum(1)[0]

    def chunks(batch, head, row, column):
        return (column <= row) & (row // 8 == column // 8)

    def both(batch, head, row, column):
        return chunks(batch, head, row, column) & (document[row] == document[column])

    of_chunks, expected = (token_mask(2, 33, 33, mask_function=see, local_size=8) for see in (chunks, both))
    found = isolate(of_chunks, PACKED)
    assert same_packing(found.numbers, expected.numbers, found.sizes)
    assert not same_packing(of_chunks.numbers, expected.numbers, found.sizes)
    assert found.window == expected.window
    assert isolate(expected, PACKED).window == expected.window


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("count", [lambda mask: mask.cumsum(1) - 1, lambda mask: torch.arange(33)[None]])
def test_positions_beside_padding_are_one_sequence(side, count):
    mask = padding_of(side)
    positions = count(mask).clamp(min=1)  # as ``generate`` numbers padding
    made = token_mask(3, 33, 33, attention_mask=mask.bool())
    positions = torch.where(mask.bool(), count(mask), positions)
    assert isolate(made, positions) is made
    made = token_mask(3, 4, 33, q_offset=29, attention_mask=padding_of("left").bool())
    positions = (padding_of("left").cumsum(1) - 1)[:, -4:]
    assert isolate(made, positions) is made


def test_positions_over_holes():
    numbers = torch.tensor([[1, 1, 0, 1, 1]])
    for positions in ([0, 1, 9, 2, 3], [0, 1, 2, 3, 4]):
        assert separate(torch.tensor([positions]), numbers, Sizes(1, 5, 5)) is None
    found = separate(torch.tensor([[0, 1, 9, 0, 1]]), numbers, Sizes(1, 5, 5))
    assert packing_of(found, 5).cu_seqlens_k.tolist() == [0, 2, 4]


@pytest.mark.parametrize(
    ("positions", "numbers", "sizes", "holds"),
    [
        ([[0, 1, 2, 0]], None, (2, 4, 4), False),
        ([[0, 1, 2, 0]], [[1, 1, 1, 2], [1, 1, 1, 0]], (2, 4, 4), True),
        ([[0, 1, 2, 0]], [[1, 1, 1, 2], [1, 1, 1, 1]], (2, 4, 4), False),
        ([[1, 1, 0, 1]], [[0, 0, 1, 1]], (1, 4, 4), True),
        ([[4, 5]], None, (1, 2, 6), True),
        ([[3, 4]], None, (1, 2, 6), False),
        ([[4, 0]], None, (1, 2, 6), False),
        ([[3, 4]], [[0, 1, 1, 1, 1, 1]], (1, 2, 6), True),
        ([[2, 3]], [[0, 1, 1, 1, 1, 1]], (1, 2, 6), False),
        ([[1, 0]], [[0, 0, 0, 0, 0, 1]], (1, 2, 6), True),
        ([[0]], None, (1, 1, 1), True),
    ],
)
def test_the_check_on_the_device_is_the_one_on_the_host(positions, numbers, sizes, holds):
    positions = torch.tensor(positions)
    numbers = None if numbers is None else torch.tensor(numbers)
    sizes = Sizes(*sizes)
    if holds:
        assert_separate(positions, numbers, sizes)
    else:
        with pytest.raises(RuntimeError, match="position_ids pack sequences"):
            assert_separate(positions, numbers, sizes)
    try:
        found = separate(positions, numbers, sizes)
        stands = found is None or same_packing(found, numbers, sizes)
    except InputError:
        stands = False
    assert stands is holds


def same_packing(found, numbers, sizes):
    if numbers is None:
        return False
    a, b = (packing_of(x, sizes.seqlen_q) for x in (found, numbers))
    return all(torch.equal(x, y) for x, y in zip(a[:4], b[:4]))


def test_positions_for_plain_masks_and_none():
    q = torch.randn(2, 4, 33, 16)
    module = torch.nn.Module()
    expected = attention(*[q.transpose(1, 2)[:, :20]] * 3, causal=True)
    for mask in (None, torch.ones(2, 33)):
        for positions in (PACKED, PACKED[0], PACKED.expand(2, -1)):
            out, _ = dash.attention_forward(module, q, q, q, mask, position_ids=positions)
            assert_same_bytes(out[:, :20], expected)
    with pytest.raises(InputError, match=r"position_ids have shape \(1, 32\), the queries .* \(2, 33\)"):
        dash.attention_forward(module, q, q, q, None, position_ids=PACKED[:, 1:])
    full = dash.attention_forward(module, q, q, q, None)[0]
    places = dash.attention_forward(module, q, q, q, None, position_ids=PACKED.expand(3, 2, -1))[0]
    assert_same_bytes(places, full)


def test_numbers_of_sequences_that_positions_divide_do_not_meet():
    """Of any two sequences of a row, whatever numbers they had and how many there are."""
    numbers = torch.tensor([[3, 3, 2, 2, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 0, 0, 0, 0, 0, 1]])
    found = separate(positions, numbers, Sizes(1, 8, 8))[0].tolist()
    assert len(set(found)) == 6
    assert found[:2] == [found[0]] * 2
    assert found[6:] == [found[6]] * 2


def test_positions_under_bidirectional_masks():
    q, k = torch.randn(1, 4, 33, 16), torch.randn(1, 4, 40, 16)
    module = torch.nn.Module()
    both = token_mask(1, 33, 33, mask_function=sees_all)
    with pytest.raises(InputError, match="several sequences into a row under a bidirectional mask"):
        dash.attention_forward(module, q, q, q, both, position_ids=PACKED)
    with pytest.raises(InputError, match="packed sequences of 33 keys with 33 queries that see all keys"):
        dash.attention_forward(module, q, q, q, None, is_causal=False, position_ids=PACKED)
    bounds = torch.tensor([0, 20, 21, 33], dtype=torch.int32)
    how = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    out, _ = dash.attention_forward(module, q, q, q, both, position_ids=PACKED, **how)
    assert_same_bytes(out[:, :20], attention(*[q.transpose(1, 2)[:, :20]] * 3))
    cross = dash.attention_forward(module, q, k, k, None, is_causal=False, position_ids=PACKED)[0]
    assert_same_bytes(cross, dash.attention_forward(module, q, k, k, None, is_causal=False)[0])


def test_a_sequence_has_the_same_bytes_padded_left_right_or_alone():
    q, k, v = (torch.randn(2, heads, 200, 16) for heads in (4, 2, 2))
    module = torch.nn.Module()
    alone = attention(*(x[1:, :, :150].transpose(1, 2) for x in (q, k, v)), causal=True)
    mask = torch.ones(2, 200, dtype=torch.bool)
    mask[1, 150:] = False
    out, weights = dash.attention_forward(module, q, k, v, mask)
    assert weights is None
    assert_same_bytes(out[1:, :150], alone)
    assert not out[1, 150:].any()
    rolled = [x.clone() for x in (q, k, v)]
    for x in rolled:
        x[1] = x[1].roll(50, 1)
    out, _ = dash.attention_forward(module, *rolled, torch.cat([mask[:1], mask[1:].roll(50, 1)]))
    assert_same_bytes(out[1:, 50:], alone)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"dropout": -0.1}, "dropout_p must be at least 0 and less than 1, got -0.1"),
        ({"softcap": -1.0}, "softcap must be 0 or in 1e-30 .. 1e.30, got -1.0"),
        (
            {"position_bias": torch.zeros(4)},
            r"position_bias is not supported .*, got a tensor of shape \(4,\)",
        ),
        ({"output_attentions": True}, "output_attentions is not supported"),
        (
            {"block_indices": torch.zeros(2, 4, 9, 2)},
            r"block_indices is not supported .*, got a tensor of shape \(2, 4, 9, 2\): .* no sparse",
        ),
        ({"score_mod": abs}, "score_mod is not supported by 'dash' attention, got abs"),
        ({"window_size": (1, 1)}, r"window_size is not supported by 'dash' attention, got \(1, 1\)"),
        (
            {"attention_mask": torch.zeros(2, 1, 9, 9)},
            r"must be None or .*, got \(2, 1, 9, 9\)",
        ),
        ({"sliding_window": 0}, "sliding_window must be None or >= 1, got 0"),
        ({"cu_seq_lens_q": torch.tensor([0, 9])}, "must be given together, got a Tensor and None"),
        ({"cu_seq_lens_k": torch.tensor([0, 9])}, "must be given together, got None and a Tensor"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 9]), "cu_seq_lens_k": torch.tensor([0, 9])},
            "cu_seq_lens_q needs a batch of 1, got 2",
        ),
        (
            {"attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1, 1]] * 2), "sliding_window": 3},
            r"sliding_window \(2, 0\) over padding between the tokens",
        ),
        (
            {"attention_mask": torch.ones(2, 5)},
            r"attention_mask has shape \(2, 5\), the keys are .* \(2, 9\)",
        ),
        ({"attention_mask": torch.ones(2, 12)}, r"attention_mask has shape \(2, 12\)"),
        (
            {"attention_mask": torch.tensor([[-torch.inf] + [0.0] * 8, [0.0] * 9])},
            r"attention_mask of shape \(2, 9\) is floating and has -inf: only 0 for padding and 1",
        ),
        ({"attention_mask": torch.full((2, 9), 0.5)}, "is floating and has 0.5: only 0 for padding and 1"),
        ({"attention_mask": torch.zeros(2, 9)}, "is floating and has zeros only, which are padding here"),
    ],
)
def test_what_cannot_be_honoured_raises(how, message):
    q = torch.randn(2, 4, 9, 16)
    with pytest.raises(InputError, match=message):
        dash.attention_forward(torch.nn.Module(), q, q, q, **{"attention_mask": None, **how})


def test_a_square_bool_mask_is_not_taken_for_one_of_tokens():
    """Of as many rows as queries, nobody can tell whether they are queries or sequences."""
    q, module = torch.randn(9, 2, 9, 16), torch.nn.Module()
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    with pytest.raises(
        InputError, match=r"shape \(9, 9\) is bool, and the batch is as large as the 9 queries"
    ):
        dash.attention_forward(module, q, q, q, seen)
    found, _ = dash.attention_forward(module, q, q, q, seen.int())
    assert_same_bytes(found, dash.attention_forward(module, q, q, q, seen.double())[0])
    assert_same_bytes(found[:8], dash.attention_forward(module, q[:8], q[:8], q[:8], seen[:8])[0])


def test_a_mask_without_a_window_is_an_error_of_the_layer_that_uses_it():
    q = torch.randn(2, 4, 9, 16)
    unused = token_mask(2, 9, 9, mask_function=see_window(0), local_size=0)
    with pytest.raises(InputError, match="a layer uses this model's mask with a window of 0 tokens"):
        dash.attention_forward(torch.nn.Module(), q, q, q, unused)


def test_keywords_that_change_nothing_are_accepted():
    q = torch.randn(2, 4, 9, 16)
    plain = {"use_cache": True, "num_items_in_batch": torch.tensor(3), "logits_to_keep": 0, "indices": None}
    plain |= {"shift_labels": torch.ones(2, 9), "ignore_index": -100, "vocab_size": 61}
    found, _ = dash.attention_forward(torch.nn.Module(), q, q, q, None, output_attentions=False, **plain)
    assert_same_bytes(found, dash.attention_forward(torch.nn.Module(), q, q, q, None)[0])


def test_a_mask_made_before_must_be_for_the_same_attention():
    made = token_mask(2, 9, 9, mask_function=see_window(4), local_size=4)
    assert token_mask(2, 9, 9, mask_function=see_window(4), attention_mask=made, local_size=4) is made
    with pytest.raises(InputError, match=r"\(2, 9, 9\) and window 4, this layer has \(2, 9, 9\) and None"):
        token_mask(2, 9, 9, attention_mask=made)
    with pytest.raises(InputError, match=r"this layer has \(2, 1, 9\) and 4"):
        token_mask(2, 1, 9, q_offset=8, attention_mask=made, local_size=4)


def see_prefix(batch, head, row, column):
    return (column <= row) | (column < 5)


def sees_all(batch, head, row, column):
    return (column >= 0).expand_as(row)


def see_window(size):
    return lambda batch, head, row, column: (column <= row) & (column > row - size)


def see_every_other(batch, head, row, column):
    return (column <= row) & (row - column != 1)


def see_around_a_hole(batch, head, row, column):
    return (column <= row) & ((column != row // 2) | (row < 4))


@pytest.mark.parametrize("see", [see_prefix, see_every_other, see_around_a_hole])
def test_other_mask_functions_are_refused(see):
    with pytest.raises(InputError, match="mask"):
        token_mask(2, 20, 20, mask_function=see)
    with pytest.raises(InputError, match="or_mask_function"):
        token_mask(2, 20, 20, mask_function=see, use_vmap=True)


def test_places_for_later_keys():
    made = token_mask(2, 3, 64, q_offset=4, attention_mask=torch.ones(2, 7, dtype=torch.bool))
    assert (made.sizes, made.passed) == ((2, 3, 7), (2, 3, 64))
    assert made.packing is None
    assert token_mask(2, 3, 64, q_offset=4, attention_mask=made) is made
    padded = torch.tensor([[1] * 7 + [0] * 57, [0] * 2 + [1] * 5 + [0] * 57], dtype=torch.bool)
    packing = token_mask(2, 3, 64, q_offset=4, attention_mask=padded).packing
    assert packing.cu_seqlens_k.tolist() == [0, 7, 12]
    window = token_mask(2, 3, 64, q_offset=4, mask_function=see_window(4), local_size=4)
    assert (window.window, window.kv_length) == ((3, 0), 7)
    with pytest.raises(InputError, match="end at position 67, but the keys of a causal mask are at 0 to 63"):
        token_mask(2, 3, 64, q_offset=64)
    with pytest.raises(InputError, match=r"shows keys behind the query, .* \(7 of 64 are used\)"):
        token_mask(2, 3, 64, q_offset=4, mask_function=sees_all)
    with pytest.raises(InputError, match=r"shows keys behind the query, .* \(7 of 64 are used\)"):
        token_mask(2, 3, 64, q_offset=4, mask_function=see_around, local_size=4)


def see_around(batch, head, row, column):
    return abs(row - column) <= 4


def test_packing_with_a_cache_and_for_cross_attention():
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    packing = packing_of(mask, 1)
    assert packing.rows_q.tolist() == [0]
    assert packing.cu_seqlens_q.tolist() == [0, 1, 1]
    assert packing.cu_seqlens_k.tolist() == [0, 3, 6]
    every = packing_of(mask, 3, keep_queries=True)
    assert every.rows_q.tolist() == list(range(6))
    assert every.cu_seqlens_q.tolist() == [0, 3, 6]
    with pytest.raises(InputError, match="packed sequences of 4 keys with 3 queries that see all keys"):
        packing_of(mask + 1, 3, keep_queries=True)
    named = packing_of(-7 * mask, 3, keep_queries=True)  # one sequence per row, whatever its number
    assert all(torch.equal(a, b) for a, b in zip(named[:4], every[:4]))
    chunks = packing_of(torch.tensor([[1, 1, 2, 2, 3]]), 2)
    assert chunks.cu_seqlens_q.tolist() == [0, 0, 1, 2]
    assert chunks.cu_seqlens_k.tolist() == [0, 2, 4, 5]


@pytest.mark.parametrize("inference", [False, True])
def test_a_mask_is_read_as_it_is_now(inference):
    """Whoever writes it: not every write is seen by PyTorch's version counter."""
    with torch.inference_mode(inference):
        memory = np.ones((1, 4), dtype=np.int64)
        mask = torch.from_numpy(memory)
        for column in range(3):
            assert packing_of(mask, 4).cu_seqlens_k.tolist() == [0, 4 - column]
            memory[0, column] = 0


@pytest.mark.parametrize(
    "use",
    [
        lambda mask, x: x + mask, lambda mask, x: mask + x, lambda mask, x: x * mask,
        lambda mask, x: 1 - mask, lambda mask, x: torch.where(mask, x, 0),
        lambda mask, x: x.masked_fill(mask, 0),
        lambda mask, x: mask[:, None], lambda mask, x: mask.shape, lambda mask, x: mask == 0,
        lambda mask, x: x == mask, lambda mask, x: mask > 0, lambda mask, x: ~mask,
        lambda mask, x: list(mask), lambda mask, x: mask.to(x.device),
        lambda mask, x: torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask),
    ],
)  # fmt: skip
def test_a_token_mask_is_no_tensor(use):
    with pytest.raises(NotATensorError, match="choose another attn_implementation"):
        use(token_mask(1, 4, 4), torch.ones(1, 1, 4, 4))


def test_windows_and_sizes_that_contradict_the_mask_raise():
    q = torch.randn(1, 4, 9, 16)

    def call(mask, **how):
        return dash.attention_forward(torch.nn.Module(), q, q, q, mask, **how)

    window = token_mask(1, 9, 9, mask_function=see_window(4), local_size=4)
    assert_same_bytes(call(window)[0], call(window, sliding_window=4)[0])
    assert_same_bytes(call(window)[0], call(None, sliding_window=4)[0])
    with pytest.raises(InputError, match="sliding_window 5, but .* with window 4"):
        call(window, sliding_window=5)
    with pytest.raises(InputError, match="sliding_window 5, but .* with window None"):
        call(token_mask(1, 9, 9), sliding_window=5)
    call(token_mask(1, 9, 9), sliding_window=9)  # hides nothing
    with pytest.raises(InputError, match=r"are \(1, 9, 9\), the model made its mask for \(1, 9, 10\)"):
        call(token_mask(1, 9, 10, q_offset=1))
    with pytest.raises(InputError, match="None with 9 queries and 8 keys"):
        dash.attention_forward(torch.nn.Module(), q, q[:, :, :8], q[:, :, :8], None)
