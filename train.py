"""
Train a GPT for TIME_BUDGET seconds on one GPU and print its bits per byte: the one file that an experiment edits.

    uv run train.py                  after `uv run prepare.py`; without a CUDA GPU, after `uv run prepare.py --toy`
    uv run train.py > run.log 2>&1   the same for an agent: a line about every ten seconds instead of every step

Prints progress, then a summary of nine `key: value` lines that begins with val_bpb. Exit code 0 only with a finite
val_bpb. Writes nothing to disk but compile caches: results live in the summary, the weights are not kept.
"""

import os
import signal
import sys

if __name__ == "__main__":  # nothing to lose, so Ctrl-C just ends the process, in the slow imports below as well
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
# Without expandable segments memory fragments. torch 2.9 reads only the second name for CUDA, later versions the first.
if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
    os.environ["PYTORCH_ALLOC_CONF"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would flood run.log

import contextlib
import functools
import gc
import math
import re
import shutil
import subprocess
import threading
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
SCALAR_LR = 0.5             # residual and x0 scales (AdamW)
WEIGHT_DECAY = 0.2          # of Muon's matrices, falls linearly to 0
ADAM_BETAS = (0.8, 0.95)
WARMUP_RATIO = 0.0          # share of the time budget in which the learning rates rise
WARMDOWN_RATIO = 0.5        # share of the time budget in which they fall
FINAL_LR_FRAC = 0.0         # where they end, as a fraction

SEED = 42
UNTIMED_STEPS = 11          # the first steps also compile kernels: they train, but are not charged to the budget, which
                            # makes them part of the measurement: leave their number as it is

# ----------------------------------------------------------------------------------------------------------------------
# Attention: every implementation takes q (B, T, H, D), k and v (B, T, H_kv, D) and a window, and returns (B, T, H, D)
# ----------------------------------------------------------------------------------------------------------------------


def masked_attention(q, k, v, window):
    """The definition: a query sees itself and the `window` tokens before it. Works everywhere, slowly."""
    position = torch.arange(q.size(1), device=q.device)
    distance = position[:, None] - position[None, :]  # (T, T)
    mask = (distance >= 0) & (distance <= window)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.size(1) != k.size(1)).transpose(1, 2)


attention = masked_attention  # what the model calls; load_attention replaces it by a faster one
sdpa_settings = contextlib.ExitStack()  # held by the whole process: inside a model they keep it from the compile cache
CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def window_block_mask(window, T, device):
    """FlexAttention's mask for a causal window: which blocks of keys each block of queries needs, in part or whole.

    In closed form, since `create_block_mask` with a window of its own breaks the graph of a compiled model.
    """
    block = 128  # places, of queries and of keys
    index = torch.arange(-(-T // block), device=device)
    distance = block * (index[:, None] - index[None, :])  # of a query from a key, at equal places in their blocks
    nearest, farthest = distance - (block - 1), distance + (block - 1)
    whole, needed = (nearest >= 0) & (farthest <= window), (farthest >= 0) & (nearest <= window)

    def listed(blocks):  # how many each row needs, and their indices first
        return blocks.sum(-1).int()[None, None], blocks.int().argsort(descending=True, stable=True).int()[None, None]

    return BlockMask.from_kv_blocks(*listed(needed & ~whole), *listed(whole), BLOCK_SIZE=block, seq_lengths=(T, T),
                                    mask_mod=lambda b, h, i, j: (i >= j) & (i - j <= window))


def torch_attention(q, k, v, window):
    """PyTorch's own kernels: SDPA where the window covers the context, else FlexAttention.

    To be compiled: only then is FlexAttention block-sparse.
    """
    T = q.size(1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D)
    gqa = q.size(1) != k.size(1)
    if window >= T - 1:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
    else:
        y = flex_attention(q, k, v, block_mask=window_block_mask(window, T, q.device), enable_gqa=gqa)
    return y.transpose(1, 2)


def probe_hub(repo_id, revision, seconds=8):
    """Raise what is wrong with the kernel hub, or TimeoutError: name lookup and the hub's API have no time-out."""
    errors = [TimeoutError(f"no answer within {seconds} s")]

    def ask():
        try:
            from huggingface_hub import HfApi
            HfApi().kernel_info(repo_id, revision=revision)
            errors.clear()
        except Exception as error:
            errors[0] = error

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]


def load_cached_kernel(repo_id, revision):
    """The kernel from the local cache, without a question to the hub. Raises whatever goes wrong."""
    from huggingface_hub import constants, snapshot_download
    from kernels import get_kernel

    was_offline, theirs = constants.HF_HUB_OFFLINE, os.environ.get("LOCAL_KERNELS")
    try:
        constants.HF_HUB_OFFLINE = True  # read at each call
        if theirs is None:  # by path: by name the library refuses a cache without the builds for other machines
            with contextlib.suppress(Exception):
                path = snapshot_download(repo_id, repo_type="kernel", revision=revision, allow_patterns=[],
                                         local_files_only=True, cache_dir=os.environ.get("KERNELS_CACHE"))
                os.environ["LOCAL_KERNELS"] = f"{repo_id}={path}"
        return get_kernel(repo_id, revision=revision, trust_remote_code=[repo_id])
    finally:
        constants.HF_HUB_OFFLINE = was_offline
        if theirs is None:
            os.environ.pop("LOCAL_KERNELS", None)


def load_hub_attention(repo_id, revision):
    """FlashAttention from the local cache, else from the kernel hub. Raises whatever goes wrong there.

    The cache comes first, so that neither a network failure nor a new version on the hub moves the rest of a night to
    another attention.
    """
    try:
        kernel = load_cached_kernel(repo_id, revision)
    except Exception:
        probe_hub(repo_id, revision)
        # fetched by a process that can be stopped: a download that stalls here would keep this one from ending
        fetch = ("import kernels; "
                 f"kernels.install_kernel({repo_id!r}, revision={revision!r}, trust_remote_code=[{repo_id!r}])")
        fetched = subprocess.run([sys.executable, "-c", fetch], timeout=90, capture_output=True, text=True)
        if fetched.returncode:
            raise RuntimeError(fetched.stderr.strip().rpartition("\n")[2]) from None
        kernel = load_cached_kernel(repo_id, revision)
    flash_attn_func = kernel.flash_attn_interface.flash_attn_func
    return lambda q, k, v, window: flash_attn_func(q, k, v, causal=True, window_size=(window, 0))


def check_attention(candidate, device):
    """Run `candidate` forward and backward on `device`. Raises RuntimeError unless it agrees with the definition."""
    T = 256
    for window in (T, T // 4):
        q, k, v, dy = torch.randn(4, 2, T, 2, HEAD_DIM, device=device, dtype=torch.bfloat16).unbind()
        outputs = []
        for function, dtype in ((masked_attention, torch.float32), (candidate, torch.bfloat16)):
            inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
            y = function(*inputs, window)
            outputs.append((y, *torch.autograd.grad(y, inputs, dy.to(dtype)), *inputs))  # it must not change these
        for expected, found in zip(*outputs, strict=True):
            error = (found.float() - expected).norm() / expected.norm()
            if not error < 0.02:  # bf16 rounding gives about 0.004
                raise RuntimeError(f"it is off by {error:.2g} with window {window}")


def load_attention(device):
    """Make the fastest attention that gives right numbers on `device` the one that GPT calls, and return its name."""
    global attention
    attention = masked_attention
    if device.type != "cuda":
        return "masked SDPA"
    repos = [("kernels-community/flash-attn3", "v1")]  # the branch, since version=1 is not found again offline
    capability = torch.cuda.get_device_capability(device)
    if capability == (9, 0):
        repos.insert(0, ("varunneal/flash-attention-3", "main"))
    if capability >= (9, 0):  # from Hopper on, SDPA's flash kernel is slower than cuDNN's
        sdpa_settings.enter_context(sdpa_kernel(CUDNN_FIRST, set_priority=True))
        # else the compile cache would not notice another order
        sdpa_settings.enter_context(torch.compiler.config.patch(cache_key_tag=f"{CUDNN_FIRST}"))
    candidates = [(repo, functools.partial(load_hub_attention, repo, revision)) for repo, revision in repos]
    candidates.append(("FlexAttention and SDPA", lambda: torch.compile(torch_attention, dynamic=False)))
    for name, load in candidates:
        try:
            candidate = load()
            check_attention(candidate, device)
            attention = candidate
            return name
        except BaseException as error:  # a kernel can fail in any way, exit too; the next candidate computes the same
            print(f"not using {name}: {type(error).__name__}: {str(error).partition(chr(10))[0]:.200}")
    return "masked SDPA"


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


def norm(x):
    """RMS norm without weight, in the dtype of `x`: under autocast newer torch would give float32."""
    return F.rms_norm(x, (x.size(-1),)).to(x.dtype)


def has_ve(layer_idx, n_layer):
    """Whether a layer has a value embedding: every other one, counted back from the last."""
    return (n_layer - 1 - layer_idx) % 2 == 0


def rotate(x1, x2, cos, sin):  # its transpose must be itself with -sin: RotaryNorm.backward relies on that
    return x1 * cos + x2 * sin, x2 * cos - x1 * sin


def apply_rotary_emb(x, cos, sin):
    """Rotate x (B, T, H, D), first half of D against second, by cos, sin (1, T, 1, D/2). The model uses RotaryNorm."""
    return torch.cat(rotate(*x.chunk(2, dim=-1), cos, sin), dim=-1)


class RotaryNorm(torch.autograd.Function):
    """norm(apply_rotary_emb(x, cos, sin)) for x in halves. It saves its result, which attention keeps anyway."""

    @staticmethod
    def forward(ctx, x1, x2, cos, sin):
        y1, y2 = rotate(x1.float(), x2.float(), cos, sin)
        mean_square = (y1 * y1 + y2 * y2).mean(-1, keepdim=True) / 2 + torch.finfo(torch.float32).eps
        y = torch.cat([(z * mean_square.rsqrt()).to(x1.dtype) for z in (y1, y2)], dim=-1)
        ctx.save_for_backward(y, mean_square, cos, sin)
        return y

    @staticmethod
    def backward(ctx, dy):
        y, mean_square, cos, sin = ctx.saved_tensors
        (y1, y2), (d1, d2) = y.float().chunk(2, dim=-1), dy.float().chunk(2, dim=-1)
        radial = (d1 * y1 + d2 * y2).mean(-1, keepdim=True) / 2
        # not the rsqrt of the forward pass: shared, it would be stored between two kernels there
        d1, d2 = ((d - radial * z) / mean_square.sqrt() for d, z in ((d1, y1), (d2, y2)))
        return *(d.to(dy.dtype) for d in rotate(d1, d2, cos, -sin)), None, None


class CausalSelfAttention(nn.Module):
    """Grouped-query attention; q and k are rotated, then normed; some layers add value embeddings (ResFormer) to v."""

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
        half = self.head_dim // 2  # halves rotate against each other: one product gives those of q and k, without bias
        rows = [w for linear in (self.c_q, self.c_k) for w in linear.weight.unflatten(0, (-1, 2, half)).unbind(1)]
        qk = F.linear(x, torch.cat(rows).flatten(0, 1)).view(B, T, -1, half)
        q1, q2, k1, k2 = qk.split([len(w) for w in rows], dim=2)  # (B, T, H, D/2)
        v = self.c_v(x).view(B, T, self.n_kv_head, self.head_dim)
        if ve is not None:
            gate = 2 * torch.sigmoid(self.ve_gate(x[..., :self.ve_gate_channels]))  # (B, T, H_kv), 1 at the start
            v = v + gate.unsqueeze(-1) * ve.view(B, T, self.n_kv_head, self.head_dim)
        q, k = RotaryNorm.apply(q1, q2, cos, sin), RotaryNorm.apply(k1, k2, cos, sin)  # (B, T, H, D)
        y = attention(q, k, v, window)
        return self.c_proj(y.reshape(B, T, C))


fused_squared_relu = None  # f(a, b): relu(a @ b.T)**2; f(a, b, h): the gradient through such an h, a @ b.T * 2 sqrt(h)


def load_fused_squared_relu(device):
    """Set fused_squared_relu: a Triton kernel for Hopper, bf16 a (M, K), b (N, K), N and K multiples of 8; or raise."""
    global fused_squared_relu
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    @triton.jit
    def kernel(a, b, h, out, M, N, K, HAS_H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
        tiles_n = tl.cdiv(N, BN)
        for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * tiles_n, tl.num_programs(0), flatten=True):
            m, n = tile // tiles_n * BM, tile % tiles_n * BN
            product = tl.zeros((BM, BN), tl.float32)
            for k in range(0, K, BK):
                product = tl.dot(a.load([m, k]), b.load([n, k]).T, product)
            halves = product.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()  # whole, it takes too much shared memory
            for i in tl.static_range(2):
                column = n + i * (BN // 2)
                scale = 2 * tl.sqrt(h.load([m, column]).to(tl.float32)) if HAS_H else tl.maximum(halves[i], 0)
                out.store([m, column], (halves[i] * scale).to(out.dtype))

    @torch.library.custom_op("autoresearch::squared_relu", mutates_args=(), tags=(torch.Tag.flexible_layout,))
    def fused(a: torch.Tensor, b: torch.Tensor, h: torch.Tensor | None = None) -> torch.Tensor:
        out, (BM, BN, BK) = a.new_empty(a.size(0), b.size(0)), (128, 256, 64)
        tiles = ((a, BM, BK), (b, BN, BK), (out if h is None else h, BM, BN // 2), (out, BM, BN // 2))
        programs = torch.cuda.get_device_properties(a.device).multi_processor_count
        # not from_tensor: it refuses odd strides of a dimension of size 1, which nobody walks
        tiles = (TensorDescriptor(x.contiguous(), x.shape, (x.size(1), 1), block) for x, *block in tiles)
        kernel[(programs,)](*tiles, *out.shape, a.size(1), h is not None, BM, BN, BK, num_warps=8, num_stages=3)
        return out

    fused.register_fake(lambda a, b, h=None: a.new_empty(a.size(0), b.size(0)))
    a, b = torch.randn(2, 304, 144, device=device).bfloat16()
    product, h = a.float() @ b.float().T, fused(a, b)
    for found, expected in ((h, product.relu() ** 2), (fused(a, b, h), product * 2 * h.float().sqrt())):
        if not (found - expected).norm() < 0.02 * expected.norm():  # bf16 rounding gives about 0.003
            raise RuntimeError("its numbers are wrong")
    fused_squared_relu = fused


class SquaredReluMLP(torch.autograd.Function):
    """relu(x @ w_fc.T)**2 @ w_proj.T for x (N, C). Of the first product it keeps only what the second one reads."""

    @staticmethod
    def forward(ctx, x, w_fc, w_proj):
        h = fused_squared_relu(x, w_fc)  # (N, 4C)
        ctx.save_for_backward(x, w_fc, w_proj, h)
        return h @ w_proj.T

    @staticmethod
    def backward(ctx, dy):
        x, w_fc, w_proj, h = ctx.saved_tensors
        da = fused_squared_relu(dy, w_proj.T.contiguous(), h)
        return da @ w_fc, da.T @ x, dy.T @ h


class MLP(nn.Module):
    """Squared ReLU (Primer, https://arxiv.org/abs/2109.08668) between two matrices."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        if fused_squared_relu and x.dtype == torch.bfloat16 and not any(n % 8 for n in self.c_fc.weight.shape):
            weights = (linear.weight.to(x.dtype) for linear in (self.c_fc, self.c_proj))
            return SquaredReluMLP.apply(x.flatten(0, -2), *weights).view_as(x)
        return self.c_proj(F.relu(self.c_fc(x)).square())  # not reached on Hopper while the lines above are there


class Block(nn.Module):
    """Attention and MLP, each on the normed residual stream and added to it. (B, T, C) to (B, T, C)."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.attn = CausalSelfAttention(config, layer_idx)
        self.mlp = MLP(config)

    def forward(self, x, ve, cos, sin, window):
        x = x + self.attn(norm(x), ve, cos, sin, window)
        return x + self.mlp(norm(x))


class SoftcappedLoss(torch.autograd.Function):
    """Cross-entropy (N,) of the logits cap tanh(x @ weight.T / cap) for x (N, C), weight (vocab, C) and targets (N,).

    The forward pass computes the gradient too, while it has the logits. cap tanh(z / cap) is taken as 2 cap s - cap
    with s = sigmoid(2 z / cap): fewer instructions. For a cap below 75 no sum of exponentials overflows.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, cap):
        logits = F.linear(x, weight.detach())  # (N, vocab); else autocast would cache a copy that gets no gradient
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
        dloss = dloss[:, None]  # it scales rows, so it can wait for the products
        return dloss * (dlogits @ weight.to(dlogits.dtype)), dlogits.T @ (dloss * x).to(dlogits.dtype), None, None


class GPT(nn.Module):
    """Decoder-only transformer. Raises ValueError for a config that does not add up."""

    def __init__(self, config):
        super().__init__()
        if (min(config.n_layer, config.n_head, config.n_kv_head) < 1 or config.n_embd % (2 * config.n_head)
                or config.n_head % config.n_kv_head):
            raise prepare.UserError(f"the model must have layers and heads, n_embd = {config.n_embd} an even number for"
                                    f" each of n_head = {config.n_head}, and n_head be a multiple of n_kv_head ="
                                    f" {config.n_kv_head}; change DEPTH or HEAD_DIM in train.py")
        self.config = config
        self.window_sizes = self._compute_window_sizes(config)
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(config.vocab_size, config.n_embd),
            "h": nn.ModuleList([Block(config, i) for i in range(config.n_layer)]),
        })
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.resid_lambdas = nn.Parameter(torch.ones(config.n_layer))
        self.x0_lambdas = nn.Parameter(torch.zeros(config.n_layer))
        kv_dim = config.n_kv_head * (config.n_embd // config.n_head)
        self.value_embeds = nn.ModuleDict({str(i): nn.Embedding(config.vocab_size, kv_dim)
                                           for i in range(config.n_layer) if has_ve(i, config.n_layer)})
        cos, sin = self._compute_rotary(self.lm_head.weight.device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @staticmethod
    def _compute_window_sizes(config):
        """A pair (w, 0) a layer, in FlashAttention's convention: w tokens before the query and 0 after it."""
        pattern = config.window_pattern.upper()
        if not re.fullmatch("[SL]+", pattern):
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
        return tuple(table.to(dtype)[None, :, None, :] for table in (angle.cos(), angle.sin()))

    @torch.no_grad()
    def init_weights(self):
        """Fill every parameter and buffer in place; on CUDA the embeddings become bf16."""
        bound = 3**0.5 * self.config.n_embd**-0.5  # uniform in this has the standard deviation n_embd**-0.5
        nn.init.normal_(self.transformer.wte.weight)
        nn.init.normal_(self.lm_head.weight, std=0.001)
        for block in self.transformer.h:
            for linear in (block.attn.c_q, block.attn.c_k, block.attn.c_v, block.mlp.c_fc):
                nn.init.uniform_(linear.weight, -bound, bound)
            for linear in (block.attn.c_proj, block.mlp.c_proj, getattr(block.attn, "ve_gate", None)):
                if linear is not None:
                    nn.init.zeros_(linear.weight)
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
        counts = {
            "wte": sum(p.numel() for p in self.transformer.wte.parameters()),
            "value_embeds": sum(p.numel() for p in self.value_embeds.parameters()),
            "lm_head": sum(p.numel() for p in self.lm_head.parameters()),
            "transformer_matrices": sum(p.numel() for p in self.transformer.h.parameters()),
            "scalars": self.resid_lambdas.numel() + self.x0_lambdas.numel(),
        }
        return counts | {"total": sum(p.numel() for p in self.parameters())}

    def estimate_flops(self):
        """FLOPs per token, forward and backward: 6 a matmul parameter, and attention over the keys that it may see."""
        counts, config = self.num_scaling_params(), self.config
        keys = sum(min(window, config.sequence_len) for window, _ in self.window_sizes)
        return 6 * (counts["lm_head"] + counts["transformer_matrices"]) + 12 * config.n_embd * keys

    def setup_optimizer(self, unembedding_lr, embedding_lr, matrix_lr, weight_decay, adam_betas, scalar_lr):
        """MuonAdamW over all trainable parameters. Raises ValueError that names the ones that no group holds."""
        scale = (self.config.n_embd / 768) ** -0.5  # the AdamW rates of matrices were tuned at width 768
        wte, blocks = list(self.transformer.wte.parameters()), list(self.transformer.h.parameters())
        taken, groups = set(), []

        def add(params, kind, lr, **options):
            params = [p for p in params if p.requires_grad and p not in taken]
            taken.update(params)
            if params:
                groups.append(dict(params=params, kind=kind, lr=lr, **options))

        adam = dict(kind="adamw", betas=adam_betas, eps=1e-10, weight_decay=0.0)
        add((p for p in self.lm_head.parameters() if p not in set(wte)), lr=unembedding_lr * scale, **adam)
        add(wte, lr=embedding_lr * scale, **adam)  # what others share with it stays here
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
        T = idx.size(1)
        cos, sin = self.cos[:, :T], self.sin[:, :T]
        x = x0 = norm(self.transformer.wte(idx))  # (B, T, C)
        for i, block in enumerate(self.transformer.h):
            x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0
            ve = self.value_embeds[str(i)](idx) if str(i) in self.value_embeds else None
            x = block(x, ve, cos, sin, self.window_sizes[i][0])
        x, weight, cap = norm(x), self.lm_head.weight, 15  # softcap: the logits cannot run away
        if targets is None:
            return cap * torch.tanh(F.linear(x, weight).float() / cap)  # for evaluation: training has its own, below
        counted = targets.flatten() >= 0
        losses = SoftcappedLoss.apply(x.flatten(0, 1), weight, targets.flatten(), cap).where(counted, 0)
        return {"mean": losses.sum() / counted.sum(), "sum": losses.sum(), "none": losses}[reduction]


# ----------------------------------------------------------------------------------------------------------------------
# Optimizer: Muon for the matrices inside the blocks, AdamW for the rest
# ----------------------------------------------------------------------------------------------------------------------

# One (a, b, c) an iteration, for 5 of them, safety 2e-2, cushion 2. Polar Express, https://arxiv.org/abs/2505.16932
polar_express_coeffs = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def adamw_step_fused(p, grad, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps, wd):
    """One AdamW step (https://arxiv.org/abs/1711.05101) on `p` and its moments in place; the scalars are 0-D tensors.

    Computed in float32 and rounded back, so that bf16 embeddings lose precision once a step and not at each operation.
    """
    g, m, v, x = grad.float(), exp_avg.float(), exp_avg_sq.float(), p.float()
    m = m + (1 - beta1) * (g - m)
    v = v + (1 - beta2) * (g * g - v)
    m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
    x = x * (1 - lr * wd) - lr * m_hat / (v_hat.sqrt() + eps)
    p.copy_(x)
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
    """One Muon step on the stack `params` (N, rows, cols) and its buffers in place; the scalars are 0-D tensors.

    Nesterov momentum, orthogonalized (Muon, https://kellerjordan.github.io/posts/muon/), evened out by a running mean
    square of each row, or column if wide (NorMuon, https://arxiv.org/abs/2510.05491), and weight decay only where it
    does not work against the update (cautious, https://arxiv.org/abs/2411.16085).
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

    On CUDA the steps are compiled once a shape; what a schedule changes reaches them as 0-D tensors, on the device, for
    arithmetic on CPU scalars inside would need a C++ compiler. Parameters without a gradient are left as they are.
    """

    def __init__(self, param_groups):
        super().__init__(param_groups, defaults={})
        on_cuda = self.param_groups[0]["params"][0].is_cuda
        self.adamw_step, self.muon_step = (
            torch.compile(step, dynamic=False, fullgraph=True) if on_cuda else step
            for step in (adamw_step_fused, muon_step_fused))

    def add_param_group(self, param_group):
        if param_group["kind"] not in ("adamw", "muon"):
            raise prepare.UserError(f'an optimizer group has kind {param_group["kind"]!r}, not "adamw" or "muon"')
        param_group["initial_lr"] = param_group["lr"]
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            if group["kind"] == "adamw":
                self._step_adamw(group, params)
            else:
                self._step_muon(group, params)

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
                tall = p.size(-2) >= p.size(-1)
                second = p.new_zeros((p.size(-2), 1) if tall else (1, p.size(-1)))
                self.state[p].update(momentum_buffer=torch.zeros_like(p), second_momentum_buffer=second)
        # kept per parameter and not as a stack: after an edit some parameters may lack a gradient in some steps
        momenta, second_momenta = ([self.state[p][key] for p in params]
                                   for key in ("momentum_buffer", "second_momentum_buffer"))
        grads = torch.stack([p.grad for p in params])
        stacks = [torch.stack(tensors) for tensors in (params, momenta, second_momenta)]
        self.muon_step(grads, *stacks, *scalars, group["ns_steps"])
        for tensors, stack in zip((params, momenta, second_momenta), stacks, strict=True):
            torch._foreach_copy_(tensors, list(stack.unbind()))


# ----------------------------------------------------------------------------------------------------------------------
# The run
# ----------------------------------------------------------------------------------------------------------------------


def build_model_config(depth, vocab_size):
    """The model of a given depth: the width grows with it, in whole heads."""
    n_head = math.ceil(depth * ASPECT_RATIO / HEAD_DIM)
    return GPTConfig(sequence_len=prepare.MAX_SEQ_LEN, vocab_size=vocab_size, n_layer=depth, n_head=n_head,
                     n_kv_head=n_head, n_embd=n_head * HEAD_DIM, window_pattern=WINDOW_PATTERN)


def get_lr_multiplier(progress):
    """Factor of all learning rates at `progress` (0 to 1) through the time budget."""
    if progress < WARMUP_RATIO:
        return min(max(progress, 1 / 300) / WARMUP_RATIO, 1.0)  # the uncharged steps would run at 0
    if progress > 1 - WARMDOWN_RATIO:
        remaining = (1 - progress) / WARMDOWN_RATIO
        return remaining + (1 - remaining) * FINAL_LR_FRAC
    return 1.0


def get_muon_momentum(step):
    return 0.85 + (0.95 - 0.85) * min(step / 300, 1)


def get_weight_decay(progress):
    return WEIGHT_DECAY * (1 - progress)


# Dense bf16 FLOPs per second by name, from the vendors' data sheets; the first name found in the device's counts
PEAK_FLOPS = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989.5e12, "H200": 989.5e12, "GH200": 989.5e12, "H800": 989.5e12,
    "B200": 2250e12, "GB200": 2500e12, "A100": 312e12, "A800": 312e12, "A40": 149.7e12, "A10": 125e12, "L40S": 362e12,
    "L40": 181e12, "L4": 121e12, "RTX 3090": 71e12, "RTX 4090": 165.2e12, "RTX 5090": 209.5e12,
}


def get_peak_flops(device):
    """Peak bf16 FLOPs per second of `device`; nan if it is not known, and so is the MFU then."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for key, flops in PEAK_FLOPS.items() if re.search(rf"\b{key}\b(?! Laptop)", name)), math.nan)


def use_toy_scale():
    """Shrink everything to what a CPU trains in a minute. Exits if this looks like a GPU machine that lost its GPU."""
    global DEPTH, TOTAL_BATCH_SIZE, DEVICE_BATCH_SIZE
    is_full_scale = os.path.exists(os.path.join(prepare.TOKENIZER_DIR, "tokenizer.pkl"))
    if is_full_scale and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        raise SystemExit("no CUDA GPU was found, but the full-scale data is prepared here: see why (nvidia-smi), or set"
                         " CUDA_VISIBLE_DEVICES to nothing to run the toy scale on the CPU")
    prepare.use_toy_scale()
    DEPTH, TOTAL_BATCH_SIZE, DEVICE_BATCH_SIZE = 2, 2**12, 8
    print("TOY SCALE: no CUDA GPU. This shows the loop at work; its numbers compare with nothing.")


@contextlib.contextmanager
def mistakes_as_sentences():
    """A user's mistake, and what the system refuses, ends the script with a sentence; bugs keep their traceback."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        message = f"GPU memory ran out; lower DEVICE_BATCH_SIZE in train.py, or undo what takes more ({error})"
        raise SystemExit(message) from None
    except (FileNotFoundError, prepare.UserError) as error:
        raise SystemExit(str(error)) from None
    except OSError as error:
        if error.errno is None:  # not from the system, which refuses a full disk or a pipe that nobody reads
            raise
        raise SystemExit(str(error)) from None


@mistakes_as_sentences()
def main():
    """The run from data to summary. Exits with a sentence, or FAIL in the log, where there can be no score."""
    start_time = time.perf_counter()
    if sys.stdout is None:
        raise prepare.UserError("stdout is closed: the score would be lost; redirect it to a file")
    sys.stdout.reconfigure(line_buffering=True)  # run.log is read while it grows
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_cuda = device.type == "cuda"
    if not on_cuda:
        use_toy_scale()
    prepare.check_data()
    tokenizer = prepare.Tokenizer.from_directory()
    vocab_size = tokenizer.get_vocab_size()
    print(f"vocabulary: {vocab_size:,} ids")
    print(f"attention: {load_attention(device)}")
    if on_cuda and torch.cuda.get_device_capability(device) == (9, 0):  # its tiles are made for Hopper
        try:
            load_fused_squared_relu(device)
        except Exception as error:  # without it MLPs compute the same
            print(f"not using the fused MLP: {type(error).__name__}: {str(error).partition(chr(10))[0]:.200}")

    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_cuda)
    synchronize = torch.cuda.synchronize if on_cuda else lambda: None

    config = build_model_config(DEPTH, vocab_size)
    print(f"model: {asdict(config)}")
    # not by way of the meta device: that unties tied weights, and what init_weights does not know would stay unset
    with torch.device(device):
        model = GPT(config)
    torch.manual_seed(SEED)  # again, so that the weights do not depend on what the modules drew
    model.init_weights()
    counts, flops_per_token = model.num_scaling_params(), model.estimate_flops()
    print("parameters: " + ", ".join(f"{name} {count:,}" for name, count in counts.items()))
    print(f"FLOPs per token: {flops_per_token:e}")

    T, rows = prepare.MAX_SEQ_LEN, max(1, DEVICE_BATCH_SIZE)
    grad_accum_steps = max(1, TOTAL_BATCH_SIZE // (rows * T))
    if TOTAL_BATCH_SIZE != grad_accum_steps * DEVICE_BATCH_SIZE * T:
        raise prepare.UserError(
            f"TOTAL_BATCH_SIZE = {TOTAL_BATCH_SIZE} is not a multiple of DEVICE_BATCH_SIZE * MAX_SEQ_LEN ="
            f" {DEVICE_BATCH_SIZE} * {T} = {DEVICE_BATCH_SIZE * T}; change one of the two in train.py, for example to"
            f" DEVICE_BATCH_SIZE = {rows}, TOTAL_BATCH_SIZE = {grad_accum_steps * rows * T}")
    optimizer = model.setup_optimizer(UNEMBEDDING_LR, EMBEDDING_LR, MATRIX_LR, WEIGHT_DECAY, ADAM_BETAS, SCALAR_LR)
    names = {p: name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        first, *others = group["params"]
        print(f"learning rate: {group['lr']:.6f} {group['kind']} for {names[first]}"
              + (f" and {len(others)} more of its kind" if others else ""))
    if on_cuda:
        torch._dynamo.config.recompile_limit = 64  # the optimizer compiles once a shape, and an edit may add shapes
        torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True  # their code is part of the key
        model = torch.compile(model, dynamic=False)
    train_loader = prepare.make_dataloader(tokenizer, DEVICE_BATCH_SIZE, T, "train")
    x, y, epoch = next(train_loader)
    print(f"time budget: {prepare.TIME_BUDGET} s, {grad_accum_steps} micro-batches a step")

    peak_flops, is_terminal = get_peak_flops(device), sys.stdout.isatty()
    step, smooth_loss, training_seconds, last_line = 0, 0.0, 0.0, -math.inf
    while True:
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
                group["momentum"], group["weight_decay"] = get_muon_momentum(step), get_weight_decay(progress)
        optimizer.step()
        if step == 0 and (idle := [name for p, name in names.items() if p.requires_grad and p.grad is None]):
            print(f"WARNING: no gradient reaches {', '.join(idle)}: they stay as they were initialized")
        model.zero_grad(set_to_none=True)
        losses = torch.stack(losses).tolist()
        synchronize()
        dt = time.perf_counter() - step_start
        if step >= UNTIMED_STEPS:
            training_seconds += dt

        bad = [loss for loss in losses if not -math.inf < loss <= 100]  # nan is in no range
        if bad:
            print(f"{chr(10) if is_terminal else ''}FAIL: step {step}, loss {bad[0]}")  # for those who read the log
            raise SystemExit(1)
        smooth_loss = 0.9 * smooth_loss + 0.1 * sum(losses) / len(losses)
        finished = training_seconds >= prepare.TIME_BUDGET
        if is_terminal or finished or time.perf_counter() - last_line >= 10:
            last_line = time.perf_counter()
            mfu = 100 * flops_per_token * TOTAL_BATCH_SIZE / dt / peak_flops
            line = (f"step {step:05d} ({100 * progress:.1f}%) | loss: {smooth_loss / (1 - 0.9 ** (step + 1)):.6f}"
                    f" | lrm: {lrm:.2f} | dt: {1000 * dt:.0f}ms | tok/sec: {TOTAL_BATCH_SIZE / dt:,.0f}"
                    f" | mfu: {mfu:.1f}% | epoch: {epoch}"
                    f" | remaining: {max(0, prepare.TIME_BUDGET - training_seconds):.0f}s")
            if is_terminal:  # a line that wraps could not be rewritten
                line = "\r\x1b[K" + line[:shutil.get_terminal_size().columns - 1]
            print(line, end="" if is_terminal and not finished else "\n")
            sys.stdout.flush()

        if step == 0:  # a collection takes half a second, and nothing here makes garbage in cycles
            gc.collect()
            gc.freeze()
            gc.disable()
        elif step % 5000 == 0:
            gc.collect()
        step += 1
        if finished:
            break

    train_loader.close()
    with autocast:
        val_bpb = prepare.evaluate_bpb(model, tokenizer, DEVICE_BATCH_SIZE)
    charged_flops = flops_per_token * TOTAL_BATCH_SIZE * (step - UNTIMED_STEPS)
    peak_memory = torch.cuda.max_memory_allocated() if on_cuda else 0
    print("---")
    print(f"val_bpb:          {val_bpb:.6f}")
    print(f"training_seconds: {training_seconds:.1f}")
    print(f"total_seconds:    {time.perf_counter() - start_time:.1f}")
    print(f"peak_vram_mb:     {peak_memory / 2**20:.1f}")
    print(f"mfu_percent:      {100 * charged_flops / training_seconds / peak_flops:.2f}")
    print(f"total_tokens_M:   {step * TOTAL_BATCH_SIZE / 1e6:.1f}")
    print(f"num_steps:        {step}")
    print(f"num_params_M:     {counts['total'] / 1e6:.1f}")
    print(f"depth:            {DEPTH}")


if __name__ == "__main__":
    main()
