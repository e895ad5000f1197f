"""Attention: the definition against loops, and the fast implementations against the definition."""

import math

import pytest
import torch

import prepare
import train

DEFINITION = train.attention.__wrapped__


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


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("window", [0, 1, 5, 12, 13, 100])
def test_a_query_sees_itself_and_the_window_before_it(window, heads):
    q, k, v = random_qkv(13, *heads)
    torch.testing.assert_close(train.attention(q, k, v, window).double(), attention_by_query(q, k, v, window),
                               rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize("T, window", [(70, 0), (70, 5), (70, 68), (70, 69), (70, 200), (300, 128), (300, 298)])
def test_pytorchs_own_kernels_compute_the_definition(monkeypatch, T, window, heads):
    inputs = random_qkv(T, *heads)  # without gradients: on the CPU of newer torch FlexAttention has none
    assert train.torch_attention(*inputs, window) is None  # float32 without autocast: the definition is to run
    monkeypatch.setattr(train, "as_bf16", lambda *tensors: tensors)
    torch.testing.assert_close(train.torch_attention(*inputs, window), DEFINITION(*inputs, window))


# ----------------------------------------------------------------------------------------------------------------------
# What is refused at the start of a run
# ----------------------------------------------------------------------------------------------------------------------


def no_window(q, k, v, window):
    return DEFINITION(q, k, v, q.size(1))


def one_key_less(q, k, v, window):
    return DEFINITION(q, k, v, window - 1)


def no_farther_than_420(q, k, v, window):
    return DEFINITION(q, k, v, min(window, 420))


def not_causal(q, k, v, window):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


def other_scale(q, k, v, window):
    return DEFINITION(1.1 * q, k, v, window)


def other_heads(q, k, v, window):
    return DEFINITION(q, k.flip(2), v.flip(2), window)


def half_a_gradient(q, k, v, window):
    return DEFINITION(q, k.detach() * 0.5 + k * 0.5, v, window)


def nan(q, k, v, window):
    return DEFINITION(q, k, v, window) * math.nan


def spoils_v(q, k, v, window):
    y = DEFINITION(q, k, v.clone(), window)
    v.data.zero_()
    return y


def declines(q, k, v, window):
    return None


CANDIDATES = [no_window, one_key_less, no_farther_than_420, not_causal, other_scale, other_heads, half_a_gradient, nan,
              spoils_v, declines]


@pytest.mark.parametrize("candidate", [DEFINITION, *CANDIDATES])
def test_only_right_attention_is_used(monkeypatch, capsys, candidate):
    monkeypatch.setattr(train, "HEAD_DIM", 16)
    monkeypatch.setattr(prepare, "VOCAB_SIZE", 64)
    monkeypatch.setattr(prepare, "MAX_SEQ_LEN", 500)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(train, "load_flash_attention", lambda device: candidate)
    monkeypatch.setattr(train, "load_torch_attention", lambda device: DEFINITION)
    train.load_kernels(torch.device("cpu"))
    log = capsys.readouterr().out
    right = candidate is DEFINITION
    assert ("not using flash-attn3: " in log) != right
    assert ("it gives no result in bf16" in log) == (candidate is declines)
    assert f"attention: {'flash-attn3' if right else 'FlexAttention and SDPA'}\n" in log
    assert train.fast_paths[DEFINITION, 4] is DEFINITION


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_float32_without_autocast_and_other_dtypes_run_the_definition(monkeypatch, heads):
    calls = []

    def kernel(*qkv, causal, window_size):
        calls.append(([x.dtype for x in qkv], window_size))
        return DEFINITION(*qkv, window_size[0])

    interface = type("interface", (), {"flash_attn_func": staticmethod(kernel)})
    monkeypatch.setattr(prepare, "load_kernel", lambda: type("kernel", (), {"flash_attn_interface": interface}))
    monkeypatch.setitem(train.fast_paths, (DEFINITION, 4), train.load_flash_attention(torch.device("cpu")))
    qkv = random_qkv(9, *heads)
    expected = DEFINITION(*qkv, 5)
    torch.testing.assert_close(train.attention(*qkv, 5), expected)
    with torch.autocast("cpu", dtype=torch.float16):
        assert train.attention(*qkv, 5).dtype == torch.float16
    assert not calls
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = train.attention(*qkv, 5)  # float32, as after a learned scale of q
    assert calls == [([torch.bfloat16] * 3, (5, 0))]
    assert (y.float() - expected).norm() < 0.02 * expected.norm()
    y = train.attention(*(x.bfloat16() for x in qkv), 5)
    assert len(calls) == 2 and y.dtype == torch.bfloat16


# ----------------------------------------------------------------------------------------------------------------------
# On a GPU
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("T", [256, 640, 700])
def test_fast_attention_agrees_with_the_definition_in_bf16(T, heads, loaded):
    device = torch.device("cuda")
    if loaded:
        train.load_kernels(device)
    candidate = train.attention if loaded else train.load_torch_attention(device)
    for window in (T // 2, T, 100, 200):
        inputs = [x.requires_grad_() for x in random_qkv(T, *heads, D=128, device=device, dtype=torch.bfloat16)]
        exact = [x.detach().float().requires_grad_() for x in inputs]
        dy = torch.randn(2, T, heads[0], 128, device=device, dtype=torch.bfloat16)
        found, expected = candidate(*inputs, window), DEFINITION(*exact, window)
        assert found.dtype == torch.bfloat16
        pairs = zip((found, *torch.autograd.grad(found, inputs, dy)),
                    (expected, *torch.autograd.grad(expected, exact, dy.float())), strict=True)
        for one, other in pairs:
            assert (one.float() - other).norm() < 0.02 * other.norm()
