"""The model: against golden numbers of the reference, and against its parts written out by hand in float64."""

import dataclasses
import functools
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import prepare
import train
from train import GPT, CausalSelfAttention, GPTConfig, norm

rotary_norm = train.rotary_norm.__wrapped__
squared_relu_mlp = train.squared_relu_mlp.__wrapped__
softcapped_cross_entropy = train.softcapped_cross_entropy.__wrapped__

CONFIG = GPTConfig(sequence_len=16, vocab_size=50, n_layer=3, n_head=4, n_kv_head=2, n_embd=40, window_pattern="SL")


def random_model(config=CONFIG):
    """A model whose weights are all random, also those that are initialized to zero."""
    model = GPT(config)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (p.size(-1) ** -0.5 if p.ndim == 2 else 1))
    return model


def assert_close(found, expected, relative=1e-5):
    """Equal up to `relative` times the largest number that is expected."""
    found, expected = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= relative * expected.abs().max()


def rms_norm_by_hand(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + np.finfo(np.float32).eps)


def rotate_by_hand(x):
    """Rotary embedding of x (T, H, D) by complex numbers: (x[j], x[j + D/2]) turns back by t * 10000^(-2j/D)."""
    T, _, D = x.shape
    angle = np.arange(T)[:, None] * 10000.0 ** (-np.arange(0, D, 2) / D)  # (T, D/2)
    turned = (x[..., :D // 2] + 1j * x[..., D // 2:]) * np.exp(-1j * angle)[:, None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


# ----------------------------------------------------------------------------------------------------------------------
# Golden numbers
# ----------------------------------------------------------------------------------------------------------------------


def test_logits_and_losses_are_those_of_the_reference(golden, golden_model):
    idx, targets = torch.from_numpy(golden["idx"][0]), torch.from_numpy(golden["targets"][0])
    assert (targets[:, 3] == -1).all()
    assert_close(golden_model(idx), golden["logits"])
    assert_close(golden_model(idx, targets), golden["loss"])
    assert_close(golden_model(idx, targets, reduction="none"), golden["loss_none"])


def test_gradients_are_those_of_the_reference(golden, golden_model):
    golden_model(torch.from_numpy(golden["idx"][0]), torch.from_numpy(golden["targets"][0])).backward()
    names = {name.removeprefix("grad/") for name in golden if name.startswith("grad/")}
    assert names == {name for name, _ in golden_model.named_parameters()}
    for name, p in golden_model.named_parameters():
        assert_close(p.grad, golden[f"grad/{name}"], relative=3e-5)


def test_windows_flops_and_counts_are_those_of_the_reference(golden, golden_model):
    assert golden_model.window_sizes == [tuple(pair) for pair in golden["windows"].tolist()]
    assert golden_model.estimate_flops() == golden["flops"]
    assert golden_model.num_scaling_params() == golden["counts"]


@pytest.mark.parametrize("depth", [6, 8, 12])
def test_every_fact_about_a_depth_holds(facts, depth):
    expected = facts[str(depth)]
    config = train.build_model_config(depth, vocab_size=8192)
    with torch.device("meta"):
        model = GPT(config)
    assert (config.n_embd, config.n_head, config.n_kv_head) == (expected["n_embd"], *2 * [expected["n_head"]])
    assert (config.sequence_len, config.vocab_size, config.n_layer) == (2048, 8192, depth)
    assert [list(pair) for pair in model.window_sizes] == expected["windows"]
    assert model.estimate_flops() == expected["flops"]
    assert model.num_scaling_params() == expected["counts"]
    assert [i for i in range(depth) if train.has_ve(i, depth)] == expected["ve_layers"]
    assert sorted(map(int, model.value_embeds)) == expected["ve_layers"]
    assert [i for i, block in enumerate(model.transformer.h) if hasattr(block.attn, "ve_gate")] == expected["ve_layers"]


# ----------------------------------------------------------------------------------------------------------------------
# Parts by hand
# ----------------------------------------------------------------------------------------------------------------------


def test_rotary_embedding_is_multiplication_by_complex_numbers():
    model = GPT(CONFIG)
    x = torch.randn(2, 16, 3, 10)
    y = train.apply_rotary_emb(x, model.cos, model.sin)
    assert_close(y, np.stack([rotate_by_hand(row) for row in x.double().numpy()]))


@pytest.mark.parametrize("window", [0, 3, 16])
@pytest.mark.parametrize("layer", [1, 2])  # without and with a value embedding
def test_attention_layer_is_its_definition_written_out(layer, window):
    attn = CausalSelfAttention(CONFIG, layer)
    T, H, H_kv, D = 9, 4, 2, 10
    model = GPT(CONFIG)
    x, ve = torch.randn(1, T, 40), torch.randn(1, T, H_kv * D) if layer == 2 else None
    found = attn(x, ve, model.cos[:, :T], model.sin[:, :T], window)

    weights = {name: p.detach().double().numpy() for name, p in attn.named_parameters()}
    inputs = x[0].double().numpy()
    q, k, v = (np.stack([weights[f"c_{name}.weight"] @ row for row in inputs]).reshape(T, -1, D) for name in "qkv")
    if ve is not None:
        gate = 2 / (1 + np.exp(-inputs[:, :32] @ weights["ve_gate.weight"].T))  # (T, H_kv)
        v = v + gate[:, :, None] * ve[0].double().numpy().reshape(T, H_kv, D)
    q, k = rms_norm_by_hand(rotate_by_hand(q)), rms_norm_by_hand(rotate_by_hand(k))
    y = np.zeros((T, H, D))
    for t in range(T):
        for h in range(H):
            seen = [s for s in range(T) if t - window <= s <= t]
            scores = np.array([q[t, h] @ k[s, h // 2] for s in seen]) / math.sqrt(D)
            shares = np.exp(scores) / np.exp(scores).sum()
            y[t, h] = sum(share * v[s, h // 2] for share, s in zip(shares, seen, strict=True))
    assert_close(found[0].detach(), y.reshape(T, -1) @ weights["c_proj.weight"].T)


# ----------------------------------------------------------------------------------------------------------------------
# Fast paths against definitions
# ----------------------------------------------------------------------------------------------------------------------


def gradients(function, inputs, dy, dtype):
    """What `function` returns for copies of `inputs` in `dtype`, and the gradients of these."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
    y = function(*inputs)
    return y, *torch.autograd.grad(y, inputs, dy.to(y.dtype))


def linear(weight):
    """A plain linear module with this weight, which stays part of the graph."""
    module = torch.nn.Linear(*weight.shape[::-1], bias=False, device="meta")
    del module.weight
    module.weight = weight
    return module


@pytest.mark.parametrize("B, T, H, D", [(2, 16, 3, 10), (1, 1, 1, 2), (3, 7, 5, 128)])
def test_rotary_norm_and_its_gradient_are_those_of_rotation_and_norm(B, T, H, D):
    x, dy = torch.randn(2, B, T, H, D)
    x[0, 0] *= 1e-4  # eps counts there
    cos, sin = torch.randn(2, 1, T, 1, D // 2)  # not even on the unit circle
    found = gradients(lambda x: train.fused_rotary_norm(x, cos, sin), [x], dy, torch.float32)
    cos, sin = cos.double(), sin.double()
    eps = torch.finfo(torch.float32).eps
    expected = gradients(lambda x: F.rms_norm(train.apply_rotary_emb(x, cos, sin), (D,), eps=eps), [x], dy,
                         torch.float64)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, relative=1e-4)


@pytest.mark.parametrize("B, T, H, D", [(2, 16, 3, 10), (3, 7, 5, 128)])
def test_rotary_norm_rounds_only_its_results(B, T, H, D):
    x, dy = torch.randn(2, B, T, H, D).bfloat16()
    angle = torch.randn(1, T, 1, D // 2)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    found = gradients(lambda x: train.fused_rotary_norm(x, cos, sin), [x], dy, torch.bfloat16)
    expected = gradients(lambda x: rotary_norm(x, cos.float(), sin.float()), [x], dy, torch.float32)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.bfloat16 and (one.float() - other).norm() < 0.0022 * other.norm()


@pytest.mark.parametrize("N, vocab, C", [(5, 7, 3), (1, 2, 1), (33, 300, 16)])
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])  # the largest ones are capped
@pytest.mark.parametrize("cap, reduction", [(15, "none"), (30, "none"), (75, "none"), (15.0, "mean"), (15, "sum")])
def test_softcapped_loss_and_its_gradient_are_those_of_the_definition(N, vocab, C, scale, cap, reduction):
    x, weight, targets = torch.randn(1, N, C) * scale, torch.randn(vocab, C), torch.randint(vocab, (1, N))
    targets[0, 1:2] = -1
    dy = torch.rand(N) if reduction == "none" else torch.rand(())

    def by_hand(x, weight):
        logits = cap * torch.tanh(x @ weight.T / cap)
        return F.cross_entropy(logits[0], targets[0], ignore_index=-1, reduction=reduction)

    expected = gradients(by_hand, [x, weight], dy, torch.float64)
    for loss in (train.fused_cross_entropy, softcapped_cross_entropy):
        found = gradients(lambda x, w, loss=loss: loss(x, linear(w), cap, targets, reduction), [x, weight], dy,
                          torch.float32)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, relative=1e-4)


def test_the_fused_loss_ignores_every_negative_target():
    x, weight, targets = torch.randn(1, 9, 16), torch.randn(50, 16), torch.randint(50, (1, 9))
    targets[0, 3:6] = -100
    logits = 15 * torch.tanh(x @ weight.T / 15)
    expected = F.cross_entropy(logits[0], targets[0], ignore_index=-100)
    assert_close(train.fused_cross_entropy(x, linear(weight), 15, targets, "mean").detach(), expected, relative=1e-4)


def test_softcapped_loss_of_extreme_logits_is_finite_and_of_nan_is_nan():
    x = torch.tensor([[1e30], [-1e30], [0.0], [math.nan]], requires_grad=True)
    head = linear(torch.tensor([[1.0], [-1.0], [0.0]]))
    losses = train.fused_cross_entropy(x, head, 15, torch.tensor([0, 0, 1, 0]), "none")
    expected = [math.log(1 + math.exp(-30) + math.exp(-15)), 30, math.log(3)]
    assert losses[:3].tolist() == pytest.approx(expected, abs=2e-5) and losses[3].isnan()
    losses[:3].sum().backward()
    assert x.grad[:3].isfinite().all()


def test_softcapped_loss_computes_in_what_autocast_says():
    x, weight, targets = torch.randn(9, 16), torch.randn(50, 16) / 4, torch.randint(50, (9,))

    def loss(x, w):
        return train.fused_cross_entropy(x, linear(w), 15, targets, "none")

    expected = gradients(loss, [x, weight], torch.ones(9), torch.float32)
    kept = []  # what a step keeps in memory for the backward pass
    with (torch.autocast("cpu", dtype=torch.bfloat16),
          torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x)):
        found = gradients(loss, [x, weight], torch.ones(9), torch.float32)
    assert [one.dtype for one in found] == 3 * [torch.float32]
    for one, other in zip(found, expected, strict=True):
        assert 1e-5 < (one - other).norm() / other.norm() < 0.005  # the products are rounded, but not the logits again
    assert {x.dtype for x in kept if x.shape == (9, 50)} <= {torch.bfloat16, torch.bool}  # the largest tensors


@pytest.mark.parametrize("fast", [False, True])
def test_after_a_loss_under_autocast_other_uses_of_the_head_still_get_gradients(monkeypatch, fast):
    if fast:
        monkeypatch.setitem(train.fast_paths, (softcapped_cross_entropy, 5), train.fused_cross_entropy)
    model = random_model()
    idx = torch.randint(50, (2, 16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(idx, idx)
        F.cross_entropy(model(idx).flatten(0, 1), idx.flatten()).backward()
    assert all(p.grad is not None and (p.grad != 0).any() for p in model.parameters())


class Twice(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def hooked(module, register="register_forward_hook"):
    getattr(module, register)(lambda *args: None)
    return module


def with_other_forward(module):
    module.forward = torch.sin
    return module


LINEAR = functools.partial(torch.nn.Linear, 8, 8, bias=False)
NOT_PLAIN = {
    "bias": torch.nn.Linear(8, 8), "subclass": Twice(8, 8, bias=False), "no module": torch.sin,
    "a sequence": torch.nn.Sequential(LINEAR()), "forward": with_other_forward(LINEAR()),
    "hook": hooked(LINEAR()), "pre-hook": hooked(LINEAR(), "register_forward_pre_hook"),
    "backward hook": hooked(LINEAR(), "register_full_backward_hook"),
    "backward pre-hook": hooked(LINEAR(), "register_full_backward_pre_hook"),
    "parametrization": torch.nn.utils.parametrizations.weight_norm(LINEAR()),
}


@pytest.mark.parametrize("module", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_fast_paths_take_only_plain_linear_modules(module):
    x, targets = torch.randn(3, 8), torch.randint(8, (3,))
    assert train.is_plain(LINEAR()) and not train.is_plain(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert train.fused_mlp(x, module, LINEAR()) is None and train.fused_mlp(x, LINEAR(), module) is None
        assert train.fused_cross_entropy(x, module, 15, targets, "mean") is None


def test_fast_paths_take_only_constants_that_are_constant():
    x, targets = torch.randn(1, 3, 2, 8), torch.randint(8, (1, 3, 2))
    table, learned = torch.randn(2, 1, 3, 1, 4)
    learned.requires_grad_()
    assert train.fused_rotary_norm(x, table, table) is not None
    assert train.fused_rotary_norm(x, learned, table) is None and train.fused_rotary_norm(x, table, learned) is None
    for cap in (torch.tensor(15.0, requires_grad=True), torch.tensor(15.0), 0, -1, 75.1, math.inf, None):
        assert train.fused_cross_entropy(x, LINEAR(), cap, targets, "mean") is None, cap


def test_a_definition_called_in_another_way_than_it_was_compared_runs_itself(monkeypatch):
    @train.has_fast_path
    def definition(x, shift=1):
        return x + shift

    monkeypatch.setitem(train.fast_paths, (definition.__wrapped__, 1), lambda x: None if x == 5 else -x)
    assert definition(2) == -2 and definition(5) == 6
    assert definition(2, 2) == 4 and definition(2, shift=3) == 5 and definition(x=2) == 3


def test_mlp_squares_the_relu():
    mlp = train.MLP(CONFIG)
    x = torch.randn(5, 40)
    hidden = np.maximum(x.double().numpy() @ mlp.c_fc.weight.detach().double().numpy().T, 0) ** 2
    assert hidden.shape == (5, 160)
    assert_close(mlp(x).detach(), hidden @ mlp.c_proj.weight.detach().double().numpy().T)


INTERPRETED = """
import types
import torch
import triton.language as tl
from triton.runtime import interpreter
import train
from test_model import check_squared_relu_mlp

patch_lang = interpreter._patch_lang

def patch_and_mend(function):
    scope = patch_lang(function)
    tl.tensor.__index__ = lambda tensor: int(tensor.handle.data.item())  # the interpreter's own fails on newer numpy
    return scope

interpreter._patch_lang = patch_and_mend
torch.cuda.get_device_capability = lambda device: (9, 0)
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(multi_processor_count=3)
train.load_fused_mlp(torch.device("cpu"))
for sizes in ((129, 80, 272), (16, 144, 16)):
    check_squared_relu_mlp(*sizes, torch.float16, "cpu")  # the interpreter knows no bf16
meta = torch.device("meta")
kernel = train.squared_relu_kernel
assert kernel(torch.empty(3, 8, device=meta), torch.empty(5, 8, device=meta)).shape == (3, 5)
a = torch.ones(16, 16, dtype=torch.float16)
a[3, 5] = float("nan")
assert kernel(a, torch.ones_like(a))[3].isnan().all() and not kernel(a, torch.ones_like(a))[4].isnan().any()
print("checked")
"""


def check_squared_relu_mlp(N, C, hidden, dtype, device):
    """The fused MLP and its gradients against the definition in float32, for inputs that are rounded to `dtype`."""
    shapes = (N, C), (hidden, C), (C, hidden), (N, C)
    x, w_fc, w_proj, dy = (torch.randn(shape[::-1], device=device).T.div(shape[-1] ** 0.5).to(dtype)
                           for shape in shapes)  # and not contiguous
    found = gradients(train.SquaredReluMLP.apply, [x, w_fc, w_proj], dy, dtype)
    expected = gradients(lambda x, w_fc, w_proj: squared_relu_mlp(x, linear(w_fc), linear(w_proj)), [x, w_fc, w_proj],
                         dy, torch.float32)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype and (one.float() - other).norm() < 2 * torch.finfo(dtype).eps * other.norm()


def test_the_fused_mlps_kernel_computes_squared_relu_and_its_gradient_when_interpreted():
    pytest.importorskip("triton")
    paths = os.pathsep.join(map(str, (Path(__file__).parent, Path(train.__file__).parent)))
    result = subprocess.run([sys.executable, "-c", INTERPRETED], capture_output=True, text=True,
                            env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths})
    assert result.stdout.endswith("checked\n"), result.stderr[-2000:]


@pytest.mark.parametrize("C, hidden, dtype, autocast, fused", [
    (40, 160, torch.bfloat16, True, True), (40, 160, torch.float32, True, True), (44, 176, torch.bfloat16, True, False),
    (40, 106, torch.bfloat16, True, False), (40, 160, torch.float32, False, False),
])
def test_mlps_use_the_fused_kernel_only_for_what_it_can_do(monkeypatch, C, hidden, dtype, autocast, fused):
    calls = []

    def squared_relu(a, b, h=None):
        calls.append((a.dtype, b.dtype))
        return F.relu(a @ b.T).square() if h is None else a @ b.T * 2 * h.sqrt()

    mlp = train.MLP(dataclasses.replace(CONFIG, n_embd=C))
    mlp.c_fc, mlp.c_proj = torch.nn.Linear(C, hidden, bias=False), torch.nn.Linear(hidden, C, bias=False)
    x, dy = torch.randn(2, 3, 5, C).to(dtype)
    monkeypatch.setattr(train, "squared_relu_kernel", squared_relu)
    outputs = []
    for fast_paths in ({}, {(train.squared_relu_mlp.__wrapped__, 3): train.fused_mlp}):
        monkeypatch.setattr(train, "fast_paths", fast_paths)
        mlp.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = mlp(x)
        y.backward(dy.to(y.dtype))
        outputs.append((y, mlp.c_fc.weight.grad, mlp.c_proj.weight.grad))
    assert set(calls) == ({(torch.bfloat16, torch.bfloat16)} if fused else set())
    for one, other in zip(*outputs, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype) and (one - other).norm() < 0.02 * other.norm()


def test_norm_divides_by_the_root_of_the_mean_square():
    x = torch.randn(3, 7) * torch.tensor([[1.0], [100.0], [1e-5]])
    assert_close(norm(x), rms_norm_by_hand(x.double().numpy()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_keeps_its_inputs_dtype_where_autocast_would_not(monkeypatch, dtype):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert norm(torch.randn(4, 8).to(dtype)).dtype == dtype
    rms_norm = F.rms_norm
    monkeypatch.setattr(F, "rms_norm", lambda x, shape: rms_norm(x.float(), shape))  # as in newer torch
    assert norm(torch.randn(4, 8).to(dtype)).dtype == dtype


# ----------------------------------------------------------------------------------------------------------------------
# The whole model
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 7, 15])
def test_a_token_changes_only_its_own_and_later_logits(position):
    model = random_model()
    idx = torch.randint(50, (2, 16))
    changed = idx.clone()
    changed[:, position] = (changed[:, position] + 1) % 50
    moved = (model(changed) - model(idx)).abs().amax(dim=(0, 2))  # (T,)
    assert (moved[:position] == 0).all() and moved[position] > 1e-3
    assert (moved[position:] > 0).all()  # the last layer is full


def test_rows_of_a_batch_do_not_mix_and_short_inputs_are_prefixes():
    model = random_model()
    idx = torch.randint(50, (3, 16))
    assert_close(model(idx)[1:2], model(idx[1:2]))
    assert_close(model(idx)[:, :5], model(idx[:, :5]))


def test_each_layer_reads_a_scaled_sum_of_the_residual_stream_and_the_embedding():
    model = random_model()
    calls = []
    for block in model.transformer.h:
        block.register_forward_hook(lambda block, inputs, output: calls.append((inputs[0], output)))
    idx = torch.randint(50, (2, 16))
    model(idx)
    stream = x0 = norm(model.transformer.wte.weight[idx])
    for i, (found, output) in enumerate(calls):
        assert_close(found, model.resid_lambdas[i] * stream + model.x0_lambdas[i] * x0)
        stream = output
    assert len(calls) == 3


def test_logits_are_capped_softly_at_15_and_float32():
    model = random_model()
    idx = torch.randint(50, (2, 16))
    small = model(idx)
    raw = 15 * torch.atanh(small.double() / 15)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    large = model(idx)
    assert large.dtype == torch.float32 and 14.5 < large.abs().max() <= 15
    assert_close(large, 15 * torch.tanh(20 * raw / 15), relative=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(idx).dtype == torch.float32


def test_loss_is_the_mean_surprise_over_targets_that_are_not_minus_one():
    model = random_model()
    idx, targets = torch.randint(50, (2, 16)), torch.randint(50, (2, 16))
    targets[0, :10], targets[1, 0] = -1, 0
    surprise = [-F.log_softmax(model(idx).double()[b, t], dim=0)[targets[b, t]].item()
                for b in range(2) for t in range(16) if targets[b, t] >= 0]
    assert len(surprise) == 22
    assert model(idx, targets).item() == pytest.approx(np.mean(surprise), rel=1e-5)
    losses = model(idx, targets, reduction="none")
    assert losses.shape == (32,) and (losses[:10] == 0).all()
    assert losses[10:].tolist() == pytest.approx(surprise, rel=1e-4)
    assert model(idx, targets, reduction="sum").item() == pytest.approx(sum(surprise), rel=1e-5)


def test_initialization_has_the_specified_spreads_and_zeros():
    config = dataclasses.replace(CONFIG, n_embd=160, vocab_size=300)
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(torch.nan)  # so that a forgotten tensor shows
    model.init_weights()
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        assert weight.dtype == torch.float32
        if name.endswith(("c_proj.weight", "ve_gate.weight")):
            assert (weight == 0).all(), name
        elif name == "resid_lambdas":
            assert weight.tolist() == [1.0] * 3
        elif name == "x0_lambdas":
            assert weight.tolist() == pytest.approx([0.1] * 3)
        elif name in ("transformer.wte.weight", "lm_head.weight"):
            std = 1 if "wte" in name else 0.001
            assert weight.std().item() == pytest.approx(std, rel=0.03)
            assert weight.abs().max() > 3 * std  # normal, not uniform
        else:
            bound = math.sqrt(3 / 160)
            assert weight.std().item() == pytest.approx(160**-0.5, rel=0.03), name
            assert 0.99 * bound < weight.abs().max() <= bound, name
    assert_close(model.cos[0, :, 0], np.cos(np.outer(np.arange(16), 10000.0 ** (-np.arange(0, 40, 2) / 40))))
    assert_close(model.sin[0, :, 0], np.sin(np.outer(np.arange(16), 10000.0 ** (-np.arange(0, 40, 2) / 40))))
    assert torch.isfinite(model(torch.randint(300, (1, 16)))).all()


def test_parameters_have_the_names_that_checkpoints_rely_on():
    names = {"transformer.wte.weight", "lm_head.weight", "resid_lambdas", "x0_lambdas"}
    names |= {f"value_embeds.{i}.weight" for i in (0, 2)}
    for i in range(3):
        names |= {f"transformer.h.{i}.attn.c_{c}.weight" for c in ("q", "k", "v", "proj")}
        names |= {f"transformer.h.{i}.mlp.c_{c}.weight" for c in ("fc", "proj")}
        names |= {f"transformer.h.{i}.attn.ve_gate.weight"} if i != 1 else set()
    assert set(GPT(CONFIG).state_dict()) == names


# ----------------------------------------------------------------------------------------------------------------------
# Configuration
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern, windows", [
    ("SSSL", [8, 8, 8, 16, 8, 16]), ("sL", [8, 16, 8, 16, 8, 16]), ("l", [16] * 6), ("S", [8, 8, 8, 8, 8, 16]),
    ("LLLLLLS", [16] * 6),
])
def test_window_pattern_repeats_and_the_last_layer_is_full(pattern, windows):
    config = dataclasses.replace(CONFIG, n_layer=6, window_pattern=pattern)
    assert GPT(config).window_sizes == [(window, 0) for window in windows]


@pytest.mark.parametrize("pattern", ["SXL", "", "S L", "SSSL\n"])
def test_other_window_letters_are_refused_with_the_pattern(pattern):
    with pytest.raises(ValueError, match="window pattern") as error:
        GPT(dataclasses.replace(CONFIG, window_pattern=pattern))
    assert repr(pattern) in str(error.value)


@pytest.mark.parametrize("changes", [{"n_embd": 42}, {"n_kv_head": 3}, {"n_embd": 36}, {"n_layer": 0}])
def test_heads_that_do_not_divide_the_width_are_refused(changes):
    with pytest.raises(ValueError, match=f"n_embd={changes.get('n_embd', 40)}"):
        GPT(dataclasses.replace(CONFIG, **changes))


def test_width_is_rounded_up_to_whole_heads_and_the_context_is_the_current_one(monkeypatch):
    monkeypatch.setattr(prepare, "MAX_SEQ_LEN", 64)
    monkeypatch.setattr(train, "ASPECT_RATIO", 50)
    monkeypatch.setattr(train, "HEAD_DIM", 64)
    config = train.build_model_config(3, vocab_size=99)
    assert (config.n_embd, config.n_head, config.n_kv_head) == (192, 3, 3)
    assert (config.sequence_len, config.vocab_size, config.n_layer, config.window_pattern) == (64, 99, 3, "SSSL")


# ----------------------------------------------------------------------------------------------------------------------
# On a GPU
# ----------------------------------------------------------------------------------------------------------------------


def load_fused_mlp_or_skip():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for Hopper")
    train.load_fused_mlp(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(300, 136, 264), (1, 8, 8), (257, 512, 2048), (5000, 264, 1000)])
def test_the_fused_mlp_computes_squared_relu_and_its_gradient_in_bf16(sizes):
    load_fused_mlp_or_skip()
    check_squared_relu_mlp(*sizes, torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("B, T, H, D", [(2, 16, 3, 10), (3, 7, 5, 128), (2, 300, 4, 64)])
def test_compiled_rotary_norm_agrees_with_float32(B, T, H, D):
    x, dy = torch.randn(2, B, T, H, D, device="cuda").bfloat16()
    angle = torch.randn(1, T, 1, D // 2, device="cuda")
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    compiled = torch.compile(train.fused_rotary_norm, dynamic=False, fullgraph=True)
    found = gradients(lambda x: compiled(x, cos, sin), [x], dy, torch.bfloat16)
    expected = gradients(lambda x: rotary_norm(x, cos.float(), sin.float()), [x], dy, torch.float32)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.bfloat16 and (one.float() - other).norm() < 0.01 * other.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("N, vocab, C", [(33, 300, 16), (7, 8192, 64), (1000, 5001, 40)])
def test_compiled_softcapped_loss_agrees_with_float32(N, vocab, C):
    x, weight, dy = (torch.randn(shape, device="cuda") for shape in ((N, C), (vocab, C), (N,)))
    x, weight, targets = x.bfloat16(), weight.bfloat16().float(), torch.randint(vocab, (N,), device="cuda")
    compiled = torch.compile(lambda x, w: train.SoftcappedLoss.apply(x, w, targets, 15), dynamic=False, fullgraph=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = gradients(compiled, [x, weight], dy, torch.float32)
    expected = gradients(lambda x, w: softcapped_cross_entropy(x, linear(w), 15, targets, "none"), [x, weight], dy,
                         torch.float32)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32 and (one - other).norm() < 0.02 * other.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
def test_model_on_cuda_keeps_embeddings_in_bf16_and_gives_the_cpus_loss(fast):
    if fast:
        train.load_kernels(torch.device("cuda"))
        assert {"rotary_norm", "softcapped_cross_entropy"} < {definition.__name__ for definition, _ in train.fast_paths}
    config = GPTConfig(sequence_len=256, vocab_size=512, n_layer=3, n_head=4, n_kv_head=2, n_embd=256,
                       window_pattern="SSSL")
    reference = random_model(config)
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device="cuda")
    model.init_weights()
    bf16 = {name for name, p in model.named_parameters() if p.dtype == torch.bfloat16}
    assert bf16 == {"transformer.wte.weight", "value_embeds.0.weight", "value_embeds.2.weight"}
    assert {p.dtype for name, p in model.named_parameters() if name not in bf16} == {torch.float32}
    assert model.cos.dtype == model.sin.dtype == torch.bfloat16

    model.load_state_dict(reference.state_dict())
    reference.load_state_dict(model.state_dict())  # the same rounded embeddings on both
    idx, targets = torch.randint(512, (2, 256)), torch.randint(512, (2, 256))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(idx.cuda(), targets.cuda())
        compiled_loss = torch.compile(model, dynamic=False, fullgraph=True)(idx.cuda(), targets.cuda())
    expected = reference(idx, targets)
    expected.backward()
    for found in (loss, compiled_loss):
        assert found.item() == pytest.approx(expected.item(), abs=0.02)
        found.backward()
        for (name, p), q in zip(reference.named_parameters(), model.parameters(), strict=True):
            error = (q.grad.float().cpu() - p.grad).norm() / p.grad.norm()
            assert error < 0.1, name  # of bf16, through three layers
        model.zero_grad()
