"""Edits of train.py by source text, as agents make them: each must change the score, or the log must say why not.

A copy of the file with the edit runs to its score on the CPU with every fast path in use, as on Hopper. Plain
equivalents stand in for the two kernels that need a GPU; the other fast paths run as they are.
"""

import itertools
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from conftest import NARROW

import prepare

SOURCE = (Path(__file__).resolve().parent.parent / "train.py").read_text()
BUDGET = 2  # seconds of a clock that moves by half a second at every look


def other_attention(q, k, v, window):
    """Attention by explicit scores, where the definition leaves them to SDPA."""
    k, v = (x.repeat_interleave(q.size(2) // x.size(2), dim=2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.size(-1) ** -0.5
    distance = torch.arange(q.size(1))[:, None] - torch.arange(q.size(1))
    scores = scores.masked_fill((distance < 0) | (distance > window), -torch.inf)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)


def other_squared_relu(a, b, h=None):
    return (a @ b.T).clamp_min(0) ** 2 if h is None else a @ b.T * 2 * h.sqrt()


def run(source, monkeypatch, capsys):
    """The score that `source` prints, and its log, at a scale of a second or two."""
    module = types.ModuleType("edited_train")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, "edited train.py", "exec"), vars(module))

    def load_fused_mlp(device):
        module.squared_relu_kernel = other_squared_relu
        return module.fused_mlp

    def load_kernels(device, load=module.load_kernels):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            load(device)

    def use_smaller_scale(use_toy_scale=module.use_toy_scale):
        use_toy_scale()
        prepare.MAX_SEQ_LEN, prepare.EVAL_TOKENS, prepare.TIME_BUDGET = 64, 8 * 64, BUDGET
        prepare.UNTIMED_STEPS = 1
        module.TOTAL_BATCH_SIZE, module.DEVICE_BATCH_SIZE = 512, 4
        vars(module).update(NARROW)

    as_bf16 = module.as_bf16
    module.as_bf16 = lambda *tensors: as_bf16(*tensors) or tensors  # the run on a CPU is in float32
    module.load_flash_attention = lambda device: other_attention
    module.load_fused_mlp, module.load_kernels = load_fused_mlp, load_kernels
    module.use_toy_scale = use_smaller_scale
    clock = itertools.count()
    monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: next(clock) / 2))
    module.main()
    log = capsys.readouterr().out
    return float(re.search(r"^val_bpb: +([\d.]+)$", log, re.M)[1]), log


@pytest.fixture
def small(toy_home, monkeypatch):
    monkeypatch.setenv("HOME", str(toy_home))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def replaced(*changes):
    """The source after some (old, new) text replacements, each of a text that stands there exactly once."""
    source = SOURCE
    for old, new in changes:
        assert source.count(old) == 1, f"{source.count(old)} times in train.py: {old}"
        source = source.replace(old, new)
    return source


MLP_LINE = "    return c_proj(F.relu(c_fc(x)).square())\n"
CAP_LINE = "        cap = 15\n"
LOSS_LINE = "    return F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction=reduction)\n"
LOGITS_LINE = "    return cap * torch.tanh(lm_head(x).float() / cap)\n"
NORM_LINE = "    return F.rms_norm(x, (x.size(-1),)).to(x.dtype)\n"
ROTARY_LINES = """    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1)
"""
HEAD_LINE = "        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)\n"
FC_LINE = "        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)\n"
Q_LINE = "        self.c_q = nn.Linear(config.n_embd, self.n_head * self.head_dim, bias=False)\n"
FORGOTTEN = "        forgotten = [name for"
SCALED_LINEAR = """class ScaledLinear(nn.Linear):
    def forward(self, x):
        return 1.5 * super().forward(x)


class MLP(nn.Module):"""
ATTENTION_CALL = "        y = attention(rotary_norm(q, cos, sin), rotary_norm(k, cos, sin), v, window)"
LOGITS_CALL = "            return softcapped_logits(x, self.lm_head, cap)\n"
LOSS_CALL = "        return softcapped_cross_entropy(x, self.lm_head, cap, targets, reduction)\n"
ATTENTION_LINE = ("    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask,"
                  " enable_gqa=q.size(1) != k.size(1)).transpose(1, 2)\n")
ATTENTION_CAPPED = """    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    scores = 50 * torch.tanh(q @ k.mT * q.size(-1) ** -0.5 / 50)
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(1, 2)
"""
HOOK = "        self.{}.{}(lambda *args: {})\n"
TWO_HEADS = "lambda x: self.lm_head(x) + self.head2(x)"
COS_LINE = "        cos, sin = self.cos[:, :idx.size(1)], self.sin[:, :idx.size(1)]\n"

MLP, LOSS, ROTARY, ATTENTION = "the fused MLP", "the fused loss", "the fused rotary norm", "flash-attn3"
SCALE = "        self.q_scale = nn.Parameter(torch.full((self.head_dim,), 1.2))\n"
STRETCH = "        self.stretch = nn.Parameter(torch.ones(config.n_embd // config.n_head // 2))\n"
# name: (changes, the fast paths that no longer agree with their definitions)
EDITS = {
    "ReLU^3": ([(MLP_LINE, MLP_LINE.replace(".square()", " ** 3"))], [MLP]),
    "GELU": ([(MLP_LINE, "    return c_proj(F.gelu(c_fc(x)))\n")], [MLP]),
    "leaky ReLU": ([(MLP_LINE, "    return c_proj(F.leaky_relu(c_fc(x), 0.1).square())\n")], [MLP]),
    "dropout": ([(MLP_LINE, "    return c_proj(F.dropout(F.relu(c_fc(x)).square(), 0.1, c_fc.training))\n")], [MLP]),
    "SwiGLU": ([(FC_LINE, FC_LINE + FC_LINE.replace("c_fc", "c_gate")),
                ("        return squared_relu_mlp(x, self.c_fc, self.c_proj)\n",
                 "        return self.c_proj(F.silu(self.c_gate(x)) * self.c_fc(x))\n")], []),
    "a bias on c_fc": ([(FC_LINE, FC_LINE.replace("bias=False", "bias=True"))], []),
    "a bias on c_q": ([(Q_LINE, Q_LINE.replace("bias=False", "bias=True"))], []),
    "a bias on lm_head": ([(HEAD_LINE, HEAD_LINE.replace("bias=False", "bias=True"))], []),
    "a subclass for c_fc": ([("class MLP(nn.Module):", SCALED_LINEAR),
                             (FC_LINE, FC_LINE.replace("nn.Linear", "ScaledLinear"))], []),
    "a subclass for lm_head": ([("class MLP(nn.Module):", SCALED_LINEAR),
                                (HEAD_LINE, HEAD_LINE.replace("nn.Linear", "ScaledLinear"))], []),
    "a hook on c_q": ([(Q_LINE, Q_LINE + HOOK.format("c_q", "register_forward_hook", "args[2].sin()"))], []),
    "a hook on c_fc": ([(FC_LINE, FC_LINE + HOOK.format("c_fc", "register_forward_hook", "2 * args[2]"))], []),
    "a hook on lm_head": ([(HEAD_LINE, HEAD_LINE + HOOK.format("lm_head", "register_forward_pre_hook",
                                                               "(2 * args[1][0],)"))], []),
    "another forward of c_fc": ([(FC_LINE, FC_LINE + "        weight = self.c_fc.weight\n"
                                          "        self.c_fc.forward = lambda x: (x @ weight.T).sin()\n")], []),
    "partial rotary": ([(ROTARY_LINES, """    x1, x2, rest = x.tensor_split([8, 16], dim=-1)
    cos, sin = cos[..., :8], sin[..., :8]
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin, rest], dim=-1)
""")], [ROTARY]),
    "turned the other way": ([(ROTARY_LINES, """    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)
""")], [ROTARY]),
    "LayerNorm": ([(NORM_LINE, "    return F.layer_norm(x, (x.size(-1),)).to(x.dtype)\n")], [ROTARY]),
    "an eps of 0.1": ([(NORM_LINE, "    return F.rms_norm(x, (x.size(-1),), eps=0.1).to(x.dtype)\n")], [ROTARY]),
    "an eps of 1e-5": ([(NORM_LINE, "    return F.rms_norm(x, (x.size(-1),), eps=1e-5).to(x.dtype)\n")], [ROTARY]),
    "no norm of q and k": ([("    return norm(apply_rotary_emb(x, cos, sin))\n",
                             "    return apply_rotary_emb(x, cos, sin)\n")], [ROTARY]),
    "no norm where it is called": ([(ATTENTION_CALL, ATTENTION_CALL.replace("rotary_norm", "apply_rotary_emb"))], []),
    "cap 12": ([(CAP_LINE, "        cap = 12\n")], []),
    "cap 20": ([(CAP_LINE, "        cap = 20\n")], []),
    "cap 100": ([(CAP_LINE, "        cap = 100\n")], []),
    "no cap": ([(LOGITS_LINE, "    return lm_head(x).float()\n")], [LOSS]),
    "a learned cap": ([(HEAD_LINE, HEAD_LINE + "        self.cap = nn.Parameter(torch.tensor(15.0))\n"),
                       (CAP_LINE, "        cap = self.cap\n"),
                       (FORGOTTEN, "        add([self.cap], lr=0.5, **adam)\n" + FORGOTTEN)], []),
    "a logit scale": ([(LOGITS_LINE, LOGITS_LINE.replace("lm_head(x).float()", "2 * lm_head(x).float()"))], [LOSS]),
    "label smoothing": ([(LOSS_LINE, LOSS_LINE.replace("reduction=", "label_smoothing=0.1, reduction="))], [LOSS]),
    "a little label smoothing": ([(LOSS_LINE, LOSS_LINE.replace("reduction=", "label_smoothing=0.01, reduction="))],
                                 [LOSS]),
    "z-loss": ([(LOSS_LINE, LOSS_LINE.replace("    return ", "    loss = ")
                 + "    return loss + 1e-3 * logits.logsumexp(-1).square().mean()\n")], [LOSS]),
    "a second head": ([(HEAD_LINE, HEAD_LINE + HEAD_LINE.replace("lm_head", "head2")),
                       (LOGITS_CALL, LOGITS_CALL.replace("self.lm_head", TWO_HEADS)),
                       (LOSS_CALL, LOSS_CALL.replace("self.lm_head", TWO_HEADS)),
                       (FORGOTTEN, "        add(self.head2.parameters(), lr=0.01, **adam)\n" + FORGOTTEN)], []),
    "learned rotary frequencies": ([(HEAD_LINE, HEAD_LINE + STRETCH),
                                    (COS_LINE, COS_LINE + "        cos = cos * self.stretch\n"),
                                    (FORGOTTEN, "        add([self.stretch], lr=0.1, **adam)\n" + FORGOTTEN)], []),
    "a learned scale of q": ([(Q_LINE, Q_LINE + SCALE),
                              ("rotary_norm(q, cos, sin)", "rotary_norm(q, cos, sin) * self.q_scale")], []),
    "attention of another temperature": ([("attn_mask=mask, enable_gqa", "attn_mask=mask, scale=0.1, enable_gqa")],
                                         [ATTENTION]),
    "a cap on the scores of attention": ([(ATTENTION_LINE, ATTENTION_CAPPED)], [ATTENTION]),
    "no loss on BOS": ([(LOSS_LINE, LOSS_LINE.replace("targets", "targets.where(targets != 1020, -1)", 1))], [LOSS]),
    "no loss on one more id": ([(LOSS_LINE, LOSS_LINE.replace("targets", "targets.where(targets != 101, -1)", 1))],
                               [LOSS]),
    "ReLU6": ([(MLP_LINE, MLP_LINE.replace("F.relu(", "F.relu6("))], [MLP]),
    "weights normed in place": ([(MLP_LINE, "    c_fc.weight.data = F.normalize(c_fc.weight)\n" + MLP_LINE)], [MLP]),
    "a narrower window": ([("& (distance <= window)", "& (distance <= window // 2)")], [ATTENTION]),
    "a window of at most 60": ([("& (distance <= window)", "& (distance <= min(window, 60))")], [ATTENTION]),
}


def test_unedited_all_fast_paths_run_and_the_score_is_certain(small, monkeypatch, capsys):
    score, log = run(SOURCE, monkeypatch, capsys)
    assert "\nattention: flash-attn3\nfast paths: rotary norm, MLP, loss\n" in log and "not using" not in log
    assert run(SOURCE, monkeypatch, capsys)[0] == score


@pytest.fixture(scope="module")
def plain_score(toy_home):
    """A one-element list, for the score without edits, which the first test that needs it computes."""
    return []


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_takes_effect_and_the_log_says_what_it_costs(small, plain_score, monkeypatch, capsys, name):
    if not plain_score:
        plain_score.append(run(SOURCE, monkeypatch, capsys)[0])
    changes, disagreeing = EDITS[name]
    score, log = run(replaced(*changes), monkeypatch, capsys)
    refused = re.findall(r"^not using (.*): it computes something else than its definition$", log, re.M)
    assert refused == disagreeing
    assert score != plain_score[0]
