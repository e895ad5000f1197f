"""
Train a GPT for TIME_BUDGET seconds on one GPU and print its bits per byte: the one file that an experiment edits.

    uv run train.py                  after `uv run prepare.py`; without a CUDA GPU, after `uv run prepare.py --toy`
    uv run train.py > run.log 2>&1   the same for an agent: a line about every ten seconds instead of every step

Prints progress, then nine `key: value` lines, val_bpb first. Exit code 0 only with a finite val_bpb. Opens no
connection, and writes nothing to disk but compile caches: the weights are not kept.
"""

import os
import signal

if __name__ == "__main__":  # nothing to lose, so Ctrl-C just ends the process, in the slow imports below as well
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
# Without expandable segments GPU memory splinters. torch 2.9 reads only the second name, later versions the first.
if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
    os.environ["PYTORCH_ALLOC_CONF"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
os.environ["HF_HUB_OFFLINE"] = "1"  # a night runs on the attention kernel that prepare.py fetched

import contextlib
import functools
import gc
import math
import sys
import time
from dataclasses import asdict, dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import prepare

# ----------------------------------------------------------------------------------------------------------------------
# Hyperparameters: edit them
# ----------------------------------------------------------------------------------------------------------------------

DEPTH = 8                   # layers: the one dial, the width follows
ASPECT_RATIO = 64           # n_embd = DEPTH * ASPECT_RATIO, rounded up to whole heads
HEAD_DIM = 128
WINDOW_PATTERN = "SSSL"     # repeated over the layers: L sees the whole context, S half of it; the last layer is L
TOTAL_BATCH_SIZE = 2**19    # tokens per optimizer step, summed over micro-batches
DEVICE_BATCH_SIZE = 128     # rows per micro-batch: lower it when memory runs out
EMBEDDING_LR = 0.6          # token and value embeddings (AdamW)
UNEMBEDDING_LR = 0.004      # lm_head (AdamW)
MATRIX_LR = 0.04            # matrices inside the blocks (Muon)
SCALAR_LR = 0.5             # x0 scales; a hundredth of it for the residual scales (AdamW)
WEIGHT_DECAY = 0.2          # of Muon's matrices, falls linearly to 0
ADAM_BETAS = (0.8, 0.95)
WARMUP_RATIO = 0.0          # share of the time budget in which the learning rates rise
WARMDOWN_RATIO = 0.5        # share of the time budget in which they fall
FINAL_LR_FRAC = 0.0         # what they end at, as a fraction
SEED = 42

# ----------------------------------------------------------------------------------------------------------------------
# Kernels: what the model computes, in plain PyTorch, and beside it faster ways to compute the same
# ----------------------------------------------------------------------------------------------------------------------

# Edit the definitions, not the fast paths. At each start `load_kernels` drops every fast path that disagrees with its
# definition, and the log says so. It cannot see a change that is within rounding to bf16 or outside its examples.
fast_paths = {}  # (definition, number of its arguments): the fast path that agrees with it
squared_relu_kernel = None  # the operator that load_fused_mlp makes
sdpa_settings = contextlib.ExitStack()  # entered once a process: in the model they would defeat the compile cache


def has_fast_path(definition):
    """Decorator: a call by position runs the fast path; where there is none, or it gives None, the definition runs."""
    @functools.wraps(definition)
    def run(*args, **kwargs):
        fast_path = fast_paths.get((definition, len(args)))
        result = None if fast_path is None or kwargs else fast_path(*args)
        return definition(*args, **kwargs) if result is None else result
    return run


def is_plain(linear):
    """Whether `linear` is just x @ weight.T: no subclass, no bias, no hook or forward of its own."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return (type(linear) is nn.Linear and linear.bias is None and "forward" not in vars(linear)
            and not any(getattr(linear, name) for name in hooks))


def as_bf16(*tensors):
    """The tensors cast to bf16 if autocast is on for bf16; unchanged if all of them are bf16; else None."""
    device_type = tensors[0].device.type
    if torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) == torch.bfloat16:
        return [x.to(torch.bfloat16) for x in tensors]
    return tensors if all(x.dtype == torch.bfloat16 for x in tensors) else None


@has_fast_path
def attention(q, k, v, window):
    """Causal attention of q (B, T, H, D) over k, v (B, T, H_kv, D): a token sees itself and `window` tokens before."""
    position = torch.arange(q.size(1), device=q.device)
    distance = position[:, None] - position[None, :]  # (T, T)
    mask = (distance >= 0) & (distance <= window)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.size(1) != k.size(1)).transpose(1, 2)


def load_flash_attention(device):
    """FlashAttention-3 (https://arxiv.org/abs/2407.08608), as prepare.py fetched it. Raises whatever goes wrong."""
    flash_attn_func = prepare.load_kernel().flash_attn_interface.flash_attn_func
    def flash_attention(q, k, v, window):
        qkv = as_bf16(q, k, v)
        return None if qkv is None else flash_attn_func(*qkv, causal=True, window_size=(window, 0))
    return flash_attention


def window_block_mask(window, T, device):
    """FlexAttention's mask for a causal window, in closed form: torch 2.9's own function breaks the graph."""
    block = 128  # places, of queries and of keys
    index = torch.arange(-(-T // block), device=device)
    distance = block * (index[:, None] - index)  # from the start of a block of keys to that of one of queries
    whole = (distance >= block - 1) & (distance <= window - (block - 1))
    part = (distance > -block) & (distance <= window + (block - 1)) & ~whole
    lists = []  # for `part`, then `whole`: per block of queries how many blocks of keys, and all indices, those first
    for seen in (part, whole):
        lists += [seen.sum(-1).int()[None, None], seen.int().argsort(descending=True, stable=True).int()[None, None]]
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block, seq_lengths=(T, T),
                                    mask_mod=lambda b, h, i, j: (i >= j) & (i - j <= window))


def torch_attention(q, k, v, window):
    """PyTorch's own kernels: SDPA where the window covers the context, else FlexAttention, which must be compiled."""
    if (qkv := as_bf16(q, k, v)) is None:
        return None
    q, k, v = (x.transpose(1, 2) for x in qkv)  # (B, H, T, D)
    T, gqa = q.size(2), q.size(1) != k.size(1)
    if window >= T - 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa).transpose(1, 2)
    return flex_attention(q, k, v, block_mask=window_block_mask(window, T, q.device), enable_gqa=gqa).transpose(1, 2)


def load_torch_attention(device):
    """`torch_attention`, compiled. From Hopper on SDPA tries cuDNN first, which is faster there."""
    if torch.cuda.get_device_capability(device) >= (9, 0):
        order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION,
                 SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        sdpa_settings.enter_context(sdpa_kernel(order, set_priority=True))
        sdpa_settings.enter_context(torch.compiler.config.patch(cache_key_tag=f"{order}"))  # the key lacks the order
    return torch.compile(torch_attention, dynamic=False)


def norm(x):
    """RMS norm without weight, in the dtype of `x`: under autocast newer torch would give float32."""
    return F.rms_norm(x, (x.size(-1),)).to(x.dtype)


def apply_rotary_emb(x, cos, sin):
    """Rotate the first half of each head in x (B, T, H, D) against the second half; cos and sin are (1, T, 1, D/2)."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1)


@has_fast_path
def rotary_norm(x, cos, sin):
    """Queries or keys x (B, T, H, D), rotated by their positions and then normed."""
    return norm(apply_rotary_emb(x, cos, sin))


class RotaryNorm(torch.autograd.Function):
    """rotary_norm in one kernel each way. Saves its output, which attention saves too, and a mean square per head."""
    @staticmethod
    def forward(ctx, x, cos, sin):
        x1, x2 = x.float().chunk(2, dim=-1)
        z1, z2 = x1 * cos + x2 * sin, x2 * cos - x1 * sin
        mean_square = (z1 * z1 + z2 * z2).mean(-1, keepdim=True) / 2 + torch.finfo(torch.float32).eps
        y = torch.cat([(z * mean_square.rsqrt()).to(x.dtype) for z in (z1, z2)], dim=-1)  # cast first: cat is stored
        ctx.save_for_backward(y, mean_square, cos, sin)
        return y

    @staticmethod
    def backward(ctx, dy):
        y, mean_square, cos, sin = ctx.saved_tensors
        (y1, y2), (d1, d2) = y.float().chunk(2, dim=-1), dy.float().chunk(2, dim=-1)
        radial = (d1 * y1 + d2 * y2).mean(-1, keepdim=True) / 2
        r = mean_square.sqrt()  # computed anew: a value shared with the forward pass would be stored there
        d1, d2 = (d1 - radial * y1) / r, (d2 - radial * y2) / r  # dz = (dy - y mean(y dy)) / r, for y = z / r
        return torch.cat([d.to(dy.dtype) for d in (d1 * cos - d2 * sin, d2 * cos + d1 * sin)], dim=-1), None, None


def fused_rotary_norm(x, cos, sin):
    """The fast path of rotary_norm, for tables that are not learned."""
    return None if cos.requires_grad or sin.requires_grad else RotaryNorm.apply(x, cos, sin)


@has_fast_path
def squared_relu_mlp(x, c_fc, c_proj):
    """Squared ReLU (Primer, https://arxiv.org/abs/2109.08668) between two linear modules; x (B, T, C) to (B, T, C)."""
    return c_proj(F.relu(c_fc(x)).square())


def load_fused_mlp(device):
    """Make squared_relu_kernel, for bf16 and by Triton, and return the fast path that uses it.

    From (a, b) it makes h = relu(a b^T)^2, from (a, b, h) it makes 2 sqrt(h) a b^T, the backward pass of that.
    To square a product before it is stored is modded-nanogpt's idea (https://github.com/KellerJordan/modded-nanogpt).
    """
    global squared_relu_kernel
    if torch.cuda.get_device_capability(device) != (9, 0):
        raise prepare.UserError("its tiles are made for Hopper GPUs")
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
    @triton.jit
    def kernel(a, b, h, out, M, N, K, GRADIENT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
        tiles_n = tl.cdiv(N, BN)
        for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * tiles_n, tl.num_programs(0), flatten=True):
            m, n = tile // tiles_n * BM, tile % tiles_n * BN
            product = tl.zeros((BM, BN), tl.float32)
            for k in range(0, K, BK):
                product = tl.dot(a.load([m, k]), b.load([n, k]).T, product)
            if GRADIENT:
                product *= 2 * tl.sqrt(h.load([m, n]).to(tl.float32))
            else:
                product *= tl.maximum(product, 0, propagate_nan=tl.PropagateNan.ALL)
            out.store([m, n], product.to(out.dtype))

    @torch.library.custom_op("autoresearch::squared_relu", mutates_args=(), tags=(torch.Tag.flexible_layout,))
    def squared_relu(a: torch.Tensor, b: torch.Tensor, h: torch.Tensor | None = None) -> torch.Tensor:
        out = a.new_empty(a.size(0), b.size(0))
        BM, BN, BK, num_stages = (128, 256, 64, 3) if h is None else (128, 256, 32, 4)  # the fastest on an H200
        # not from_tensor: it refuses odd strides of a dimension of size 1, which nobody walks
        operands = (a, BM, BK), (b, BN, BK), (out if h is None else h, BM, BN), (out, BM, BN)
        tiles = [TensorDescriptor(x.contiguous(), x.shape, (x.size(1), 1), block) for x, *block in operands]
        grid = (torch.cuda.get_device_properties(a.device).multi_processor_count,)
        kernel[grid](*tiles, *out.shape, a.size(1), h is not None, BM, BN, BK, num_warps=8, num_stages=num_stages)
        return out
    squared_relu.register_fake(lambda a, b, h=None: a.new_empty(a.size(0), b.size(0)))
    squared_relu_kernel = squared_relu
    return fused_mlp


class SquaredReluMLP(torch.autograd.Function):
    """squared_relu_mlp of x (N, C) with bare weights. Saves h = relu(x w_fc^T)^2 and not the product inside it."""
    @staticmethod
    def forward(ctx, x, w_fc, w_proj):
        h = squared_relu_kernel(x, w_fc)  # (N, 4C)
        ctx.save_for_backward(x, w_fc, w_proj, h)
        return h @ w_proj.T

    @staticmethod
    def backward(ctx, dy):
        x, w_fc, w_proj, h = ctx.saved_tensors
        da = squared_relu_kernel(dy, w_proj.T.contiguous(), h)
        return da @ w_fc, da.T @ x, dy.T @ h


def fused_mlp(x, c_fc, c_proj):
    """The fast path of squared_relu_mlp."""
    if not (is_plain(c_fc) and is_plain(c_proj)) or any(n % 8 for n in (*c_fc.weight.shape, *c_proj.weight.shape)):
        return None
    matrices = as_bf16(x.flatten(0, -2), c_fc.weight, c_proj.weight)
    return None if matrices is None else SquaredReluMLP.apply(*matrices).view(*x.shape[:-1], -1)


def softcapped_logits(x, lm_head, cap):
    """Logits (..., vocab) of x (..., C) in float32: a tanh keeps them between -cap and cap, so they cannot run away."""
    return cap * torch.tanh(lm_head(x).float() / cap)


@has_fast_path
def softcapped_cross_entropy(x, lm_head, cap, targets, reduction):
    """Cross-entropy of the logits of x (B, T, C) for targets (B, T); -1 is ignored, `reduction` is as in PyTorch."""
    logits = softcapped_logits(x, lm_head, cap).flatten(0, -2)  # (B * T, vocab)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction=reduction)


class SoftcappedLoss(torch.autograd.Function):
    """Losses (N,) of x (N, C) with a bare weight. The forward pass also makes the gradient, so no logits are saved.

    As in Liger Kernel (https://arxiv.org/abs/2410.10989). cap tanh(z / cap) is 2 cap s - cap, s = sigmoid(2 z / cap).
    """
    @staticmethod
    def forward(ctx, x, weight, targets, cap):
        logits = F.linear(x, weight.detach())  # (N, vocab); undetached, autocast would cache a bf16 copy without graph
        s = 1 / (1 + torch.exp2(logits.float() * (-2 / cap / math.log(2))))
        exp = torch.exp2((2 * cap * s - cap) / math.log(2))
        total = exp.sum(-1, keepdim=True)
        hit = (torch.arange(weight.size(0), device=x.device) == targets[:, None]).float()
        dlogits = (exp * (1 / total) - hit) * (s - s * s) * 4
        ctx.save_for_backward(x, weight, dlogits.to(logits.dtype))
        return total.squeeze(-1).log() + cap - 2 * cap * (s * hit).sum(-1)

    @staticmethod
    def backward(ctx, dloss):
        x, weight, dlogits = ctx.saved_tensors
        dloss = dloss[:, None]  # a factor per row, applied to (N, C) and not to (N, vocab)
        return dloss * (dlogits @ weight.to(dlogits.dtype)), dlogits.T @ (dloss * x).to(dlogits.dtype), None, None


def fused_cross_entropy(x, lm_head, cap, targets, reduction):
    """The fast path of softcapped_cross_entropy, for a cap that is not learned."""
    if not is_plain(lm_head) or not isinstance(cap, (int, float)) or not 0 < cap <= 75:  # above, exponentials overflow
        return None
    counted = targets.flatten() >= 0  # an edit may ignore another negative number than -1
    losses = SoftcappedLoss.apply(x.flatten(0, -2), lm_head.weight, targets.flatten(), cap).where(counted, 0)
    return {"mean": losses.sum() / counted.sum(), "sum": losses.sum(), "none": losses}[reduction]


def load_kernels(device):
    """Compare the fast paths with their definitions on `device`, keep those that agree, and print their names."""
    T = prepare.MAX_SEQ_LEN
    # random arguments, large so that most edits show; what a fast path holds constant requires no gradient
    randn = functools.partial(torch.randn, device=device, requires_grad=True)
    linear = functools.partial(nn.Linear, bias=False, device=device)
    q, k, v = 4 * randn(1, T, 4, HEAD_DIM), randn(1, T, 2, HEAD_DIM), randn(1, T, 2, HEAD_DIM)  # peaked softmax
    heads, x = randn(2, T, 3, HEAD_DIM), randn(2, T - 5, 72)  # the last fills no whole tiles
    cos, sin = torch.randn(2, 1, T, 1, HEAD_DIM // 2, device=device)  # not even on the unit circle
    c_fc, negative, c_proj, lm_head = linear(72, 200), linear(72, 200), linear(200, 72), linear(72, prepare.VOCAB_SIZE)
    negative.weight.data.abs_().neg_()
    targets = torch.arange(prepare.VOCAB_SIZE, device=device)[None]
    windows = [(q, k, v, T), (q, k, v, T // 2)]
    scales = [(heads, cos, sin), (heads / 1000, cos, sin)]  # eps matters in the second
    signs = [(x, c_fc, c_proj), (25 * x, c_fc, c_proj), (x.abs(), negative, c_proj)]  # none positive in the last
    caps = [(25 * randn(*targets.shape, 72), lm_head, cap, targets, how) for cap, how in ((15, "mean"), (4, "none"))]
    candidates = [("flash-attn3", attention, load_flash_attention, windows),
                  ("FlexAttention and SDPA", attention, load_torch_attention, windows),
                  ("the fused rotary norm", rotary_norm, lambda _: fused_rotary_norm, scales),
                  ("the fused MLP", squared_relu_mlp, load_fused_mlp, signs),
                  ("the fused loss", softcapped_cross_entropy, lambda _: fused_cross_entropy, caps)]
    fast_paths.clear()
    names = {}
    for name, definition, load, examples in candidates if torch.cuda.is_available() else []:
        if definition not in names:
            try:
                fast_path = load(device)
                for args in examples:
                    prepare.check_equal(fast_path, definition.__wrapped__, args)
            except BaseException as error:  # a kernel can fail in any way, even by SystemExit; then the definition runs
                print(f"not using {name}: {prepare.first_line(error)}")
            else:
                fast_paths[definition.__wrapped__, len(examples[0])] = fast_path
                names[definition] = name
    print(f"attention: {names.pop(attention, 'masked SDPA')}")
    print(f"fast paths: {', '.join(name.removeprefix('the fused ') for name in names.values()) or 'none'}")


# ----------------------------------------------------------------------------------------------------------------------
# Model
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class GPTConfig:
    """The shape of the model; `build_model_config` derives it from DEPTH."""
    sequence_len: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_kv_head: int
    n_embd: int
    window_pattern: str


def has_ve(layer_idx, n_layer):
    """Whether a layer has a value embedding: every other one, counted back from the last."""
    return (n_layer - 1 - layer_idx) % 2 == 0


class CausalSelfAttention(nn.Module):
    """Grouped-query attention; some layers add value embeddings (ResFormer, https://arxiv.org/abs/2410.17897) to v."""
    def __init__(self, config, layer_idx):
        super().__init__()
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.head_dim = config.n_embd // config.n_head
        self.c_q = nn.Linear(config.n_embd, self.n_head * self.head_dim, bias=False)
        self.c_k = nn.Linear(config.n_embd, self.n_kv_head * self.head_dim, bias=False)
        self.c_v = nn.Linear(config.n_embd, self.n_kv_head * self.head_dim, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.ve_gate_channels = min(32, config.n_embd)
        if has_ve(layer_idx, config.n_layer):
            self.ve_gate = nn.Linear(self.ve_gate_channels, self.n_kv_head, bias=False)

    def forward(self, x, ve, cos, sin, window):
        B, T, C = x.size()
        q = self.c_q(x).view(B, T, self.n_head, self.head_dim)
        k = self.c_k(x).view(B, T, self.n_kv_head, self.head_dim)
        v = self.c_v(x).view(B, T, self.n_kv_head, self.head_dim)
        if ve is not None:
            gate = 2 * torch.sigmoid(self.ve_gate(x[..., :self.ve_gate_channels]))  # (B, T, H_kv), 1 at the start
            v = v + gate.unsqueeze(-1) * ve.view(B, T, self.n_kv_head, self.head_dim)
        y = attention(rotary_norm(q, cos, sin), rotary_norm(k, cos, sin), v, window)  # (B, T, H, D)
        return self.c_proj(y.reshape(B, T, C))


class MLP(nn.Module):
    """Two matrices and a squared ReLU between them, where the width is four times that of the model."""
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        return squared_relu_mlp(x, self.c_fc, self.c_proj)


class Block(nn.Module):
    """Attention and MLP, each on the normed residual stream and added to it. (B, T, C) to (B, T, C)."""
    def __init__(self, config, layer_idx):
        super().__init__()
        self.attn = CausalSelfAttention(config, layer_idx)
        self.mlp = MLP(config)

    def forward(self, x, ve, cos, sin, window):
        x = x + self.attn(norm(x), ve, cos, sin, window)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """Decoder-only transformer. Raises ValueError for a config that does not add up."""
    def __init__(self, config):
        super().__init__()
        if (min(config.n_layer, config.n_head, config.n_kv_head) < 1 or config.n_embd % (2 * config.n_head)
                or config.n_head % config.n_kv_head):
            raise prepare.UserError(f"{config} does not add up: n_head must split n_embd into heads of even width,"
                                    " n_kv_head must divide n_head, n_layer must be positive; change DEPTH or HEAD_DIM")
        self.config = config
        self.window_sizes = self._compute_window_sizes(config)
        blocks = nn.ModuleList([Block(config, i) for i in range(config.n_layer)])
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(config.vocab_size, config.n_embd), "h": blocks})
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.resid_lambdas = nn.Parameter(torch.ones(config.n_layer))
        self.x0_lambdas = nn.Parameter(torch.zeros(config.n_layer))
        kv_dim = config.n_kv_head * (config.n_embd // config.n_head)
        self.value_embeds = nn.ModuleDict({str(i): nn.Embedding(config.vocab_size, kv_dim)
                                           for i in range(config.n_layer) if has_ve(i, config.n_layer)})
        for name, table in zip(("cos", "sin"), self._compute_rotary(self.lm_head.weight.device), strict=True):
            self.register_buffer(name, table, persistent=False)

    @staticmethod
    def _compute_window_sizes(config):
        """A pair (w, 0) per layer: w tokens before the query and 0 after it. Here w = -1 does not mean all of them."""
        pattern = config.window_pattern.upper()
        if not pattern or set(pattern) - set("SL"):
            raise prepare.UserError(f"the window pattern is {config.window_pattern!r}, but may hold only the letters S"
                                    " (half the context) and L (all of it); change WINDOW_PATTERN in train.py")
        width = {"L": config.sequence_len, "S": config.sequence_len // 2}
        sizes = [(width[pattern[i % len(pattern)]], 0) for i in range(config.n_layer)]
        return sizes[:-1] + [(width["L"], 0)]

    def _compute_rotary(self, device):
        """cos and sin of the rotary embedding, (1, T, 1, D/2) each; bf16 on CUDA, like the q and k that they turn."""
        head_dim = self.config.n_embd // self.config.n_head
        frequency = 10000 ** -(torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
        angle = torch.outer(torch.arange(self.config.sequence_len, dtype=torch.float32, device=device), frequency)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return [table.to(dtype)[None, :, None, :] for table in (angle.cos(), angle.sin())]

    @torch.no_grad()
    def init_weights(self):
        """Set the weights that `__init__` makes, and cos and sin; on CUDA the embeddings become bf16."""
        bound = 3**0.5 * self.config.n_embd**-0.5  # uniform in +-bound has the standard deviation n_embd**-0.5
        nn.init.normal_(self.transformer.wte.weight)
        nn.init.normal_(self.lm_head.weight, std=0.001)
        for name, module in self.transformer.h.named_modules():
            if name.endswith(("c_q", "c_k", "c_v", "c_fc")):
                nn.init.uniform_(module.weight, -bound, bound)
            elif name.endswith(("c_proj", "ve_gate")):
                nn.init.zeros_(module.weight)
        nn.init.ones_(self.resid_lambdas)
        nn.init.constant_(self.x0_lambdas, 0.1)
        for embedding in self.value_embeds.values():
            nn.init.uniform_(embedding.weight, -bound, bound)
        self.cos, self.sin = self._compute_rotary(self.lm_head.weight.device)
        if self.lm_head.weight.is_cuda:
            self.transformer.wte.to(torch.bfloat16)
            self.value_embeds.to(torch.bfloat16)

    def num_scaling_params(self):
        """Parameter counts by role, and their total."""
        roles = {"wte": self.transformer.wte, "value_embeds": self.value_embeds, "lm_head": self.lm_head,
                 "transformer_matrices": self.transformer.h}
        counts = {name: sum(p.numel() for p in module.parameters()) for name, module in roles.items()}
        counts["scalars"] = self.resid_lambdas.numel() + self.x0_lambdas.numel()
        return counts | {"total": sum(p.numel() for p in self.parameters())}

    def estimate_flops(self):
        """FLOPs per token, forward and backward: 6 per matmul parameter, and attention over each layer's window."""
        counts, config = self.num_scaling_params(), self.config
        keys = sum(min(window, config.sequence_len) for window, _ in self.window_sizes)
        return 6 * (counts["lm_head"] + counts["transformer_matrices"]) + 12 * config.n_embd * keys

    def setup_optimizer(self, unembedding_lr, embedding_lr, matrix_lr, weight_decay, adam_betas, scalar_lr):
        """MuonAdamW over all trainable parameters. Raises ValueError that names the ones that no group holds."""
        scale = (self.config.n_embd / 768) ** -0.5  # the AdamW rates of matrices were tuned at width 768
        wte, blocks = list(self.transformer.wte.parameters()), list(self.transformer.h.parameters())
        taken, groups = set(), []
        def add(params, **group):
            params = [p for p in params if p.requires_grad and p not in taken]
            taken.update(params)
            if params:
                groups.append(dict(params=params, **group))
        adam = dict(kind="adamw", betas=adam_betas, eps=1e-10, weight_decay=0.0)
        add((p for p in self.lm_head.parameters() if p not in set(wte)), lr=unembedding_lr * scale, **adam)
        add(wte, lr=embedding_lr * scale, **adam)  # a tied lm_head stays in this group, too
        add(self.value_embeds.parameters(), lr=embedding_lr * scale, **adam)
        add([self.resid_lambdas], lr=scalar_lr * 0.01, **adam)  # they act on every layer above: step with care
        add([self.x0_lambdas], lr=scalar_lr, **adam | {"betas": (0.96, 0.95)})
        add((p for p in blocks if p.ndim != 2), lr=scalar_lr * 0.01, **adam)
        for shape in sorted({p.shape for p in blocks if p.ndim == 2}):  # stacked, one update for all of a shape
            add((p for p in blocks if p.shape == shape), kind="muon", lr=matrix_lr, momentum=0.95, ns_steps=5,
                beta2=0.95, weight_decay=weight_decay)
        forgotten = [name for name, p in self.named_parameters() if p.requires_grad and p not in taken]
        if forgotten:
            raise prepare.UserError(f"no optimizer group holds {', '.join(forgotten)}; add one in GPT.setup_optimizer")
        return MuonAdamW(groups)

    def forward(self, idx, targets=None, reduction="mean"):
        """Logits (B, T, vocab) in float32 for ids (B, T); with targets (B, T) their cross-entropy, -1 being ignored."""
        cos, sin = self.cos[:, :idx.size(1)], self.sin[:, :idx.size(1)]
        x = x0 = norm(self.transformer.wte(idx))  # (B, T, C)
        for i, block in enumerate(self.transformer.h):
            x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0
            ve = self.value_embeds[str(i)](idx) if str(i) in self.value_embeds else None
            x = block(x, ve, cos, sin, self.window_sizes[i][0])
        x = norm(x)
        cap = 15
        if targets is None:
            return softcapped_logits(x, self.lm_head, cap)
        return softcapped_cross_entropy(x, self.lm_head, cap, targets, reduction)


# ----------------------------------------------------------------------------------------------------------------------
# Optimizer: Muon for the matrices inside the blocks, AdamW for the rest
# ----------------------------------------------------------------------------------------------------------------------

# (a, b, c) per iteration, for safety 2e-2 and cushion 2: Polar Express, https://arxiv.org/abs/2505.16932
polar_express_coeffs = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def adamw_step_fused(p, grad, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps, wd):
    """One AdamW step (https://arxiv.org/abs/1711.05101) in place, in float32, rounded once; scalars are 0-D tensors."""
    g, x = grad.float(), p.float()
    m = exp_avg.float() + (1 - beta1) * (g - exp_avg)
    v = exp_avg_sq.float() + (1 - beta2) * (g * g - exp_avg_sq)
    m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
    p.copy_(x * (1 - lr * wd) - lr * m_hat / (v_hat.sqrt() + eps))
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)


def orthogonalize(g, ns_steps):
    """Push the singular values of each matrix in `g` (N, rows, cols) toward 1 by polar express; returns bf16."""
    X = g.bfloat16()
    X = X / (1.02 * X.norm(dim=(-2, -1), keepdim=True) + 1e-6)
    for a, b, c in polar_express_coeffs[:ns_steps]:
        if X.size(-2) > X.size(-1):  # the smaller of the two Gram matrices
            A = X.mT @ X
            X = a * X + X @ (b * A + c * (A @ A))
        else:
            A = X @ X.mT
            X = a * X + (b * A + c * (A @ A)) @ X
    return X


def muon_step_fused(grads, params, momentum_buffer, second_momentum_buffer, momentum, lr, wd, beta2, ns_steps):
    """One Muon step (https://kellerjordan.github.io/posts/muon/) in place on a stack `params` (N, rows, cols).

    Orthogonalized Nesterov momentum is evened out by a running mean square of each row, or column if wide (NorMuon,
    https://arxiv.org/abs/2510.05491). Decay acts only where it agrees with the update (https://arxiv.org/abs/2411.16085).
    """
    rows, cols = params.shape[-2:]
    momentum_buffer.copy_(momentum_buffer + (1 - momentum) * (grads - momentum_buffer))
    g = orthogonalize(grads + momentum * (momentum_buffer - grads), ns_steps).float()
    mean_square = g.square().mean(dim=-1 if rows >= cols else -2, keepdim=True)
    second_momentum_buffer.copy_(second_momentum_buffer + (1 - beta2) * (mean_square - second_momentum_buffer))
    scaled = g * second_momentum_buffer.float().clamp_min(1e-10).rsqrt()
    g = scaled * (g.norm(dim=(-2, -1), keepdim=True) / scaled.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-10))
    lr = lr * max(1, rows / cols) ** 0.5
    x = params.float()
    params.copy_(x - lr * g - lr * wd * x * (g * x >= 0))


def scalar_tensors(device, *values):
    """Each value as a 0-D float32 tensor on `device`, without waiting for the device."""
    return [torch.full((), value, dtype=torch.float32, device=device) for value in values]


class MuonAdamW(torch.optim.Optimizer):
    """One optimizer for all parameters. A group's `kind` is "adamw" (betas, eps) or "muon" (momentum, ns_steps, beta2).

    Leaves parameters without a gradient as they are. On CUDA the steps are compiled once per shape; what a schedule
    changes reaches them as 0-D tensors on the device, since arithmetic on CPU scalars would need a C++ compiler.
    """
    def __init__(self, param_groups):
        super().__init__(param_groups, defaults={})
        self.adamw_step, self.muon_step = adamw_step_fused, muon_step_fused
        if self.param_groups[0]["params"][0].is_cuda:
            self.adamw_step = torch.compile(adamw_step_fused, dynamic=False, fullgraph=True)
            self.muon_step = torch.compile(muon_step_fused, dynamic=False, fullgraph=True)

    def add_param_group(self, param_group):
        if param_group["kind"] not in ("adamw", "muon"):
            raise prepare.UserError(f'an optimizer group has kind {param_group["kind"]!r}, not "adamw" or "muon"')
        param_group["initial_lr"] = param_group["lr"]
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                step = self._step_adamw if group["kind"] == "adamw" else self._step_muon
                step(group, params)

    def _step_adamw(self, group, params):
        scalars = scalar_tensors(params[0].device, group["lr"], *group["betas"], group["eps"], group["weight_decay"])
        for p in params:
            state = self.state[p]
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["step"] += 1
            step, = scalar_tensors(p.device, state["step"])
            self.adamw_step(p, p.grad, state["exp_avg"], state["exp_avg_sq"], step, *scalars)

    def _step_muon(self, group, params):
        scalars = scalar_tensors(params[0].device, *(group[key] for key in ("momentum", "lr", "weight_decay", "beta2")))
        for p in params:
            if not self.state[p]:
                shape = (p.size(-2), 1) if p.size(-2) >= p.size(-1) else (1, p.size(-1))
                self.state[p].update(momentum_buffer=torch.zeros_like(p), second_momentum_buffer=p.new_zeros(shape))
        # kept per parameter and not as a stack: after an edit some parameters may lack a gradient in some steps
        buffers = [[self.state[p][key] for p in params] for key in ("momentum_buffer", "second_momentum_buffer")]
        stacks = [torch.stack(tensors) for tensors in (params, *buffers)]
        self.muon_step(torch.stack([p.grad for p in params]), *stacks, *scalars, group["ns_steps"])
        for tensors, stack in zip((params, *buffers), stacks, strict=True):
            torch._foreach_copy_(tensors, list(stack.unbind()))


# ----------------------------------------------------------------------------------------------------------------------
# The run
# ----------------------------------------------------------------------------------------------------------------------


def build_model_config(depth, vocab_size):
    """The model of a given depth: the width grows with it, in whole heads."""
    n_head = math.ceil(depth * ASPECT_RATIO / HEAD_DIM)
    return GPTConfig(sequence_len=prepare.MAX_SEQ_LEN, vocab_size=vocab_size, n_layer=depth, n_head=n_head,
                     n_kv_head=n_head, n_embd=n_head * HEAD_DIM, window_pattern=WINDOW_PATTERN)


def count_micro_steps():
    """Micro-batches per step. Raises ValueError, with a valid choice, if they do not fill TOTAL_BATCH_SIZE exactly."""
    T, rows = prepare.MAX_SEQ_LEN, max(1, DEVICE_BATCH_SIZE)
    micro_steps = max(1, TOTAL_BATCH_SIZE // (rows * T))
    if TOTAL_BATCH_SIZE != micro_steps * DEVICE_BATCH_SIZE * T:
        raise prepare.UserError(
            f"TOTAL_BATCH_SIZE = {TOTAL_BATCH_SIZE} is not a multiple of DEVICE_BATCH_SIZE * MAX_SEQ_LEN ="
            f" {DEVICE_BATCH_SIZE} * {T} = {DEVICE_BATCH_SIZE * T}; change one of the two in train.py, for example to"
            f" DEVICE_BATCH_SIZE = {rows}, TOTAL_BATCH_SIZE = {micro_steps * rows * T}")
    return micro_steps


def get_lr_multiplier(progress):
    """Factor of all learning rates at `progress` (0 to 1) through the time budget."""
    if progress < WARMUP_RATIO:
        return min(max(progress, 1 / 300) / WARMUP_RATIO, 1.0)  # not 0 in the first steps, which are not charged
    if progress > 1 - WARMDOWN_RATIO:
        remaining = (1 - progress) / WARMDOWN_RATIO
        return remaining + (1 - remaining) * FINAL_LR_FRAC
    return 1.0


def get_muon_momentum(step):
    return 0.85 + (0.95 - 0.85) * min(step / 300, 1)


def get_weight_decay(progress):
    return WEIGHT_DECAY * (1 - progress)


def use_toy_scale():
    """Say so, and shrink everything to what a CPU trains in a minute. Raises ValueError if a GPU was lost."""
    global DEPTH, TOTAL_BATCH_SIZE, DEVICE_BATCH_SIZE
    print(f"TOY SCALE: {prepare.explain_missing_gpu()}. This shows the loop at work; its numbers compare with nothing.")
    prepare.use_toy_scale()
    DEPTH, TOTAL_BATCH_SIZE, DEVICE_BATCH_SIZE = 2, 2**12, 8


def print_settings(model, optimizer, names):
    """Model, parameter counts, FLOPs, and the learning rates in effect; `names` maps parameters to their names."""
    print(f"model: {asdict(model.config)}")
    print("parameters: " + ", ".join(f"{name} {count:,}" for name, count in model.num_scaling_params().items()))
    print(f"FLOPs per token: {model.estimate_flops():e}")
    for group in optimizer.param_groups:
        first, *others = group["params"]
        more = f" and {len(others)} more of its kind" if others else ""
        print(f"learning rate: {group['lr']:.6f} {group['kind']} for {names[first]}{more}")


@prepare.mistakes_as_sentences()
def main():
    """The run from data to summary. Exits with a sentence, or FAIL in the log, where there can be no score."""
    start_time = time.perf_counter()
    sys.stdout.reconfigure(line_buffering=True)  # run.log is read while it grows
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_cuda = device.type == "cuda"
    if not on_cuda:
        use_toy_scale()
    tokenizer = prepare.check_data()
    print(f"vocabulary: {tokenizer.get_vocab_size():,} ids")
    grad_accum_steps = count_micro_steps()
    load_kernels(device)
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")  # not before load_kernels, which compares in full precision
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_cuda)
    synchronize = torch.cuda.synchronize if on_cuda else lambda: None
    # not by way of the meta device: that unties tied weights, and what init_weights does not know would stay unset
    with torch.device(device):
        model = GPT(build_model_config(DEPTH, tokenizer.get_vocab_size()))
    torch.manual_seed(SEED)  # again, so that the weights do not depend on what the modules drew
    model.init_weights()
    optimizer = model.setup_optimizer(UNEMBEDDING_LR, EMBEDDING_LR, MATRIX_LR, WEIGHT_DECAY, ADAM_BETAS, SCALAR_LR)
    names = {p: name for name, p in model.named_parameters()}
    print_settings(model, optimizer, names)
    num_params, flops_per_token = model.num_scaling_params()["total"], model.estimate_flops()
    if on_cuda:
        torch._dynamo.config.recompile_limit = 64  # the optimizer compiles once per shape, and an edit may add some
        torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True  # their code is part of the key
        model = torch.compile(model, dynamic=False)
    train_loader = prepare.make_dataloader(tokenizer, DEVICE_BATCH_SIZE, prepare.MAX_SEQ_LEN, "train")
    x, y, epoch = next(train_loader)
    print(f"time budget: {prepare.TIME_BUDGET} s, {grad_accum_steps} micro-batches per step")
    peak_flops = prepare.get_peak_flops(device)
    is_terminal = sys.stdout.isatty()
    step, smooth_loss, training_seconds, last_line = 0, 0.0, 0.0, -math.inf
    while training_seconds < prepare.TIME_BUDGET:
        synchronize()
        step_start = time.perf_counter()
        losses = []
        for _ in range(grad_accum_steps):
            with autocast:
                loss = model(x, y)
            losses.append(loss.detach())
            (loss / grad_accum_steps).backward()
            x, y, epoch = next(train_loader)  # while the GPU is still busy
        progress = min(training_seconds / prepare.TIME_BUDGET, 1.0)
        lrm = get_lr_multiplier(progress)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lrm
            if group["kind"] == "muon":
                group["momentum"] = get_muon_momentum(step)
                group["weight_decay"] = get_weight_decay(progress)
        optimizer.step()
        if step == 0 and (idle := [name for p, name in names.items() if p.requires_grad and p.grad is None]):
            print(f"WARNING: no gradient reaches {', '.join(idle)}: without one a parameter never moves")
        model.zero_grad(set_to_none=True)
        losses = torch.stack(losses).tolist()
        synchronize()
        dt = time.perf_counter() - step_start
        if step >= prepare.UNTIMED_STEPS:
            training_seconds += dt
        if bad := [loss for loss in losses if not -math.inf < loss <= 100]:  # nan is in no range
            print(f"{chr(10) if is_terminal else ''}FAIL: step {step}, loss {bad[0]}")  # for those who read the log
            raise SystemExit(1)
        smooth_loss = 0.9 * smooth_loss + 0.1 * sum(losses) / len(losses)
        remaining = max(0.0, prepare.TIME_BUDGET - training_seconds)
        if is_terminal or remaining == 0 or time.perf_counter() - last_line >= 10:
            last_line = time.perf_counter()
            mfu = 100 * flops_per_token * TOTAL_BATCH_SIZE / dt / peak_flops
            line = (f"step {step:05d} ({100 * progress:.1f}%) | loss: {smooth_loss / (1 - 0.9 ** (step + 1)):.6f}"
                    f" | lrm: {lrm:.2f} | dt: {1000 * dt:.0f}ms | tok/sec: {TOTAL_BATCH_SIZE / dt:,.0f}"
                    f" | mfu: {mfu:.1f}% | epoch: {epoch} | remaining: {remaining:.0f}s")
            print(f"\r\x1b[K{line}" if is_terminal else line, end="" if is_terminal and remaining else "\n", flush=True)
        if step % 5000 == 0:  # seldom: it takes half a second, and only an edit can make garbage in cycles
            gc.collect()
        if step == 0:
            gc.freeze()
            gc.disable()
        step += 1

    train_loader.close()
    with autocast:
        val_bpb = prepare.evaluate_bpb(model, tokenizer, DEVICE_BATCH_SIZE)
    charged_flops = flops_per_token * TOTAL_BATCH_SIZE * (step - prepare.UNTIMED_STEPS)
    print("---")
    print(f"val_bpb:          {val_bpb:.6f}")
    print(f"training_seconds: {training_seconds:.1f}")
    print(f"total_seconds:    {time.perf_counter() - start_time:.1f}")
    print(f"peak_vram_mb:     {torch.cuda.max_memory_allocated() / 2**20:.1f}")
    print(f"mfu_percent:      {100 * charged_flops / training_seconds / peak_flops:.2f}")
    print(f"total_tokens_M:   {step * TOTAL_BATCH_SIZE / 1e6:.1f}")
    print(f"num_steps:        {step}")
    print(f"num_params_M:     {num_params / 1e6:.1f}")
    print(f"depth:            {DEPTH}")


if __name__ == "__main__":
    main()
