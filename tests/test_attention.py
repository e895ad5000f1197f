"""Attention: the definition against loops, and the fast implementations against the definition."""

import math

import pytest
import torch

import train
from train import check_attention, load_attention, masked_attention, torch_attention

CPU = torch.device("cpu")


def random_qkv(T, n_head, n_kv_head, D=16, B=2, **options):
    return [torch.randn(B, T, heads, D, **options) for heads in (n_head, n_kv_head, n_kv_head)]


def attention_by_query(q, k, v, window):
    """The specification in float64, one query at a time: it sees itself and `window` tokens before it."""
    q, k, v = q.double(), k.double(), v.double()
    y = torch.empty_like(q)
    B, T, H, D = q.shape
    for b in range(B):
        for t in range(T):
            for h in range(H):
                kv, first = h * k.size(2) // H, max(0, t - window)
                scores = k[b, first:t + 1, kv] @ q[b, t, h] / math.sqrt(D)  # (at most window + 1,)
                y[b, t, h] = torch.softmax(scores, dim=0) @ v[b, first:t + 1, kv]
    return y


# ----------------------------------------------------------------------------------------------------------------------
# The definition
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("window", [0, 1, 5, 12, 13, 100])
def test_a_query_sees_itself_and_the_window_before_it(window, heads):
    q, k, v = random_qkv(13, *heads)
    torch.testing.assert_close(masked_attention(q, k, v, window).double(), attention_by_query(q, k, v, window),
                               rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize("T, window", [(70, 0), (70, 5), (70, 68), (70, 69), (70, 200), (300, 128), (300, 298)])
def test_pytorchs_own_kernels_compute_the_definition(T, window, heads):
    inputs = random_qkv(T, *heads)  # without gradients: on the CPU of newer torch FlexAttention has none
    torch.testing.assert_close(torch_attention(*inputs, window), masked_attention(*inputs, window))


@pytest.mark.parametrize("T, window", [(640, w) for w in (0, 1, 100, 127, 128, 129, 255, 256, 320, 638)] + [(600, 300)])
def test_blocks_listed_for_flex_attention_are_the_ones_a_window_touches(T, window):
    mask, block = train.window_block_mask(window, T, CPU), 128
    size = math.ceil(T / block)

    def listed(counts, indices):
        counts, indices = counts[0, 0].tolist(), indices[0, 0].tolist()
        return {(i, j) for i in range(size) for j in indices[i][:counts[i]]}

    part, whole = listed(mask.kv_num_blocks, mask.kv_indices), listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    distance = torch.arange(size * block)[:, None] - torch.arange(size * block)
    tiles = ((distance >= 0) & (distance <= window)).double().view(size, block, size, block).mean(dim=(1, 3))
    assert whole == {(i, j) for i in range(size) for j in range(size) if tiles[i, j] == 1}
    assert part == {(i, j) for i in range(size) for j in range(size) if 0 < tiles[i, j] < 1}


# ----------------------------------------------------------------------------------------------------------------------
# The check of a candidate
# ----------------------------------------------------------------------------------------------------------------------


def no_window(q, k, v, window):
    return masked_attention(q, k, v, q.size(1))


def one_key_less(q, k, v, window):
    return masked_attention(q, k, v, window - 1)


def not_causal(q, k, v, window):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def other_scale(q, k, v, window):
    return masked_attention(1.2 * q, k, v, window)


def wrong_gradient(q, k, v, window):
    return masked_attention(q, k.detach() * 0.5 + k * 0.5, v, window)


def nan(q, k, v, window):
    return masked_attention(q, k, v, window) * math.nan


def test_a_right_candidate_passes_the_check():
    check_attention(masked_attention, CPU)


@pytest.mark.parametrize("candidate", [no_window, one_key_less, not_causal, other_scale, wrong_gradient, nan])
def test_a_wrong_candidate_fails_the_check(candidate):
    with pytest.raises(RuntimeError, match="window"):
        check_attention(candidate, CPU)


# ----------------------------------------------------------------------------------------------------------------------
# On a GPU
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("T", [256, 640])
def test_fast_attention_agrees_with_the_definition_in_bf16(T, heads, loaded):
    if loaded:
        load_attention(torch.device("cuda"))
    candidate = train.attention if loaded else torch_attention
    for window in (T // 2, T, 100, 200):
        inputs = [x.requires_grad_() for x in random_qkv(T, *heads, D=128, device="cuda", dtype=torch.bfloat16)]
        exact = [x.detach().float().requires_grad_() for x in inputs]
        dy = torch.randn(2, T, heads[0], 128, device="cuda", dtype=torch.bfloat16)
        found, expected = candidate(*inputs, window), masked_attention(*exact, window)
        assert found.dtype == torch.bfloat16
        pairs = zip((found, *torch.autograd.grad(found, inputs, dy)),
                    (expected, *torch.autograd.grad(expected, exact, dy.float())), strict=True)
        for one, other in pairs:
            assert (one.float() - other).norm() < 0.02 * other.norm()
