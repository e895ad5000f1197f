"""The run: schedules, what an import does, and main() at toy scale from the first line to the summary."""

import dataclasses
import itertools
import math
import os
import re
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from conftest import NARROW, point_prepare_at, save_state, set_constants

import prepare
import train

ROOT = Path(__file__).resolve().parent.parent
SUMMARY = re.compile(r"""---
val_bpb:          (?P<val_bpb>\d+\.\d{6})
training_seconds: (?P<training_seconds>\d+\.\d)
total_seconds:    (?P<total_seconds>\d+\.\d)
peak_vram_mb:     (?P<peak_vram_mb>\d+\.\d)
mfu_percent:      (?P<mfu_percent>nan|\d+\.\d\d)
total_tokens_M:   (?P<total_tokens_M>\d+\.\d)
num_steps:        (?P<num_steps>\d+)
num_params_M:     (?P<num_params_M>\d+\.\d)
depth:            (?P<depth>\d+)
\Z""", re.M)
PROGRESS = re.compile(r"step (?P<step>\d{5}) \((?P<percent>\d+\.\d)%\) \| loss: (?P<loss>\d+\.\d{6}) \| lrm: \d\.\d\d"
                      r" \| dt: (?P<dt>\d+)ms \| tok/sec: (?P<rate>[\d,]+) \| mfu: (?:nan|\d+\.\d)% \| epoch: \d+"
                      r" \| remaining: (?P<remaining>\d+)s")


def sentence(error):
    """The one line with which a run was refused; Python prints it and exits with 1."""
    assert isinstance(error.value.code, str) and "\n" not in error.value.code
    return error.value.code


class Stop(Exception):
    """Ends a run from inside once a test has seen enough."""


class StepClock:
    """Stands in for the module `time` in train.py: every optimizer step takes `dt` seconds, nothing else takes any.

    Records what the schedules set at each step: (smallest and largest lr / initial_lr, momentum, weight decay).
    """

    def __init__(self, monkeypatch, dt):
        clock, self.now, self.rates = self, 1000.0, []

        class Optimizer(train.MuonAdamW):
            def step(self):
                multipliers = [group["lr"] / group["initial_lr"] for group in self.param_groups]
                muon = next(group for group in self.param_groups if group["kind"] == "muon")
                clock.rates.append((min(multipliers), max(multipliers), muon["momentum"], muon["weight_decay"]))
                clock.now += dt
                super().step()

        monkeypatch.setattr(train, "MuonAdamW", Optimizer)
        monkeypatch.setattr(train, "time", self)

    def perf_counter(self):
        return self.now

    monotonic = perf_counter


# ----------------------------------------------------------------------------------------------------------------------
# Schedules
# ----------------------------------------------------------------------------------------------------------------------


def test_schedules_are_those_of_the_reference(facts):
    schedule = facts["schedule"]
    assert [train.get_lr_multiplier(p) for p in schedule["progress"]] == pytest.approx(schedule["lr"])
    assert [train.get_weight_decay(p) for p in schedule["progress"]] == pytest.approx(schedule["wd"])
    assert [train.get_muon_momentum(step) for step in schedule["steps"]] == pytest.approx(schedule["momentum"])


def test_warmup_rises_linearly_but_never_from_zero(monkeypatch):
    monkeypatch.setattr(train, "WARMUP_RATIO", 0.2)
    assert train.get_lr_multiplier(0.0) == train.get_lr_multiplier(1 / 300) == pytest.approx(1 / 60)
    assert train.get_lr_multiplier(0.05) == pytest.approx(0.25)
    assert train.get_lr_multiplier(0.15) == pytest.approx(0.75)
    assert train.get_lr_multiplier(0.2) == train.get_lr_multiplier(0.4) == 1
    monkeypatch.setattr(train, "WARMUP_RATIO", 0.001)
    assert train.get_lr_multiplier(0.0) == 1  # not 3.3: shorter than the first step


def test_warmdown_can_be_nothing_everything_or_stop_above_zero(monkeypatch):
    monkeypatch.setattr(train, "WARMDOWN_RATIO", 0.0)
    assert [train.get_lr_multiplier(p) for p in (0.0, 0.5, 1.0)] == [1, 1, 1]
    monkeypatch.setattr(train, "WARMDOWN_RATIO", 1.0)
    assert [train.get_lr_multiplier(p) for p in (0.0, 0.25, 1.0)] == pytest.approx([1, 0.75, 0])
    monkeypatch.setattr(train, "WARMDOWN_RATIO", 0.4)
    monkeypatch.setattr(train, "FINAL_LR_FRAC", 0.1)
    assert [train.get_lr_multiplier(p) for p in (0.5, 0.6, 0.8, 1.0)] == pytest.approx([1, 1, 0.55, 0.1])


def test_weight_decay_scales_with_its_constant(monkeypatch):
    monkeypatch.setattr(train, "WEIGHT_DECAY", 0.8)
    assert [train.get_weight_decay(p) for p in (0, 0.25, 1)] == pytest.approx([0.8, 0.6, 0])


@pytest.mark.parametrize("name, expected", [
    ("NVIDIA H200", 989.5e12), ("NVIDIA H200 NVL", 835e12), ("NVIDIA GeForce RTX 4090 D", math.nan),
    ("NVIDIA H100 80GB HBM3", 989.5e12), ("NVIDIA A100-SXM4-80GB", 312e12),
    ("NVIDIA GH200 480GB", 989.5e12), ("NVIDIA L4", 121e12), ("NVIDIA L40S", 362e12),
    ("NVIDIA GeForce RTX 4090", 165.2e12), ("NVIDIA GeForce RTX 4090 Laptop GPU", math.nan),
    ("NVIDIA A1000 Laptop", math.nan), ("Something New", math.nan),
])
def test_peak_flops_are_those_of_the_device_or_unknown(monkeypatch, name, expected):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    assert prepare.get_peak_flops(torch.device("cuda")) == pytest.approx(expected, nan_ok=True)
    assert math.isnan(prepare.get_peak_flops(torch.device("cpu")))


# ----------------------------------------------------------------------------------------------------------------------
# Import
# ----------------------------------------------------------------------------------------------------------------------


def test_importing_train_only_sets_environment_defaults(tmp_path):
    script = textwrap.dedent("""
        import importlib, os, signal, socket, sys
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "HF_HUB_OFFLINE")
        seen = []

        class Probe:  # what the environment holds when a library is looked for
            def find_spec(name, path=None, target=None):
                if name == "torch":
                    seen.append([os.environ.get(key) for key in names])

        def refuse(*args, **kwargs):
            raise AssertionError("not at import")

        sys.meta_path.insert(0, Probe)
        socket.socket.connect = socket.getaddrinfo = refuse
        handler = signal.getsignal(signal.SIGINT)
        import train
        assert seen[0] == ["expandable_segments:True", "expandable_segments:True", "1"], seen
        assert not {"kernels", "huggingface_hub", "rustbpe", "matplotlib"} & set(sys.modules)
        import torch
        assert not torch.cuda.is_initialized() and torch.get_float32_matmul_precision() == "highest"
        assert signal.getsignal(signal.SIGINT) is handler
        torch.cuda.init = torch.cuda.is_available = torch.cuda.device_count = torch.cuda.get_device_capability = refuse
        for name in names:
            del os.environ[name]
        os.environ["PYTORCH_ALLOC_CONF"], os.environ["HF_HUB_OFFLINE"] = "backend:native", "0"
        importlib.reload(train)
        assert not torch.cuda.is_initialized()
        assert [os.environ.get(key) for key in names] == ["backend:native", None, "1"]
    """)
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTORCH_", "HF_"))}
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env | {"PYTHONPATH": str(ROOT)},
                         capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------------------------------------------
# main() at toy scale
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def toy(toy_home, monkeypatch, request):
    """Makes main() run on tiny batches for two steps and score few tokens, on the CPU with a narrow model.

    Returns a function that sets other constants of prepare and train.
    """
    monkeypatch.setenv("HOME", str(toy_home))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    constants = dict(TIME_BUDGET=1e-6, EVAL_TOKENS=20 * 64, MAX_SEQ_LEN=64, TOTAL_BATCH_SIZE=512, DEVICE_BATCH_SIZE=4,
                     UNTIMED_STEPS=1)
    if not request.node.get_closest_marker("gpu"):
        constants |= NARROW
    use_toy_scale = train.use_toy_scale

    def use_smaller_scale():
        use_toy_scale()
        set_constants(constants, prepare, train)

    monkeypatch.setattr(train, "use_toy_scale", use_smaller_scale)
    return lambda **values: constants.update(values)


def test_a_run_trains_evaluates_and_prints_the_summary(toy, capsys, monkeypatch):
    clock, losses, forward = StepClock(monkeypatch, dt=0.75), [], train.GPT.forward

    def recording_forward(model, idx, targets=None, **how):
        result = forward(model, idx, targets, **how)
        losses.extend([] if targets is None else [result.item()])
        return result

    monkeypatch.setattr(train.GPT, "forward", recording_forward)
    toy(TIME_BUDGET=7.5, UNTIMED_STEPS=11, TOTAL_BATCH_SIZE=2**11, DEVICE_BATCH_SIZE=16)
    train.main()
    output = capsys.readouterr().out
    summary = SUMMARY.search(output)
    assert summary, output
    found = {key: float(value) for key, value in summary.groupdict().items()}

    torch.manual_seed(0)
    model = train.GPT(train.build_model_config(train.DEPTH, prepare.VOCAB_SIZE))
    model.init_weights()
    untrained = prepare.evaluate_bpb(model, prepare.Tokenizer.from_directory(), 8)
    assert 0.5 < found["val_bpb"] < 0.85 * untrained
    assert found["num_steps"] == len(clock.rates) == 11 + 10
    assert found["training_seconds"] == 7.5 and found["total_seconds"] == pytest.approx(21 * 0.75, abs=0.051)
    assert found["total_tokens_M"] == round(21 * 2**11 / 1e6, 1)
    assert math.isnan(found["mfu_percent"]) and found["peak_vram_mb"] == 0
    assert found["num_params_M"] == round(sum(p.numel() for p in model.parameters()) / 1e6, 1)
    assert found["depth"] == train.DEPTH == 2

    before = output[:summary.start()]
    assert "WARNING" not in before and "not using" not in before
    assert re.search(r"^TOY SCALE.*compare with nothing", before, re.M)
    for line in (r"attention: \S.*", r"vocabulary: 1,024.*", r"model: .*'n_layer': 2.*", r"parameters: .*total [\d,]+",
                 r"FLOPs per token: [\d.e+]+", r"learning rate: 0\.04.*muon.*", r"time budget: 7.5 s, 2 micro.*"):
        assert re.search(f"^{line}$", before, re.M), line
    lines = [PROGRESS.fullmatch(line) for line in before.splitlines() if line.startswith("step ")]
    assert all(lines) and "\r" not in output
    assert [int(line["step"]) for line in lines] == [0, 14, 20]  # no terminal: every ten seconds, and the last one
    assert lines[1]["percent"] == "30.0" and lines[1]["remaining"] in "45" and lines[1]["dt"] == "750"
    assert lines[1]["rate"] == f"{2**11 / 0.75:,.0f}" and lines[-1]["remaining"] == "0"

    means = [sum(losses[i:i + 2]) / 2 for i in range(0, 42, 2)]  # over a step's micro-batches
    for line in lines:
        weights = [0.9 ** (int(line["step"]) - step) for step in range(int(line["step"]) + 1)]
        smooth = sum(weight * mean for weight, mean in zip(weights, means, strict=False)) / sum(weights)
        assert float(line["loss"]) == pytest.approx(smooth, abs=1e-5)

    low, high, momenta, decays = zip(*clock.rates, strict=True)
    progress = [max(0, step - 11) / 10 for step in range(21)]  # steps 0 to 10 are not charged
    assert low == pytest.approx(high)  # one multiplier for all groups
    assert low == pytest.approx([train.get_lr_multiplier(p) for p in progress])
    assert momenta == pytest.approx([train.get_muon_momentum(step) for step in range(21)])
    assert decays == pytest.approx([train.get_weight_decay(p) for p in progress])
    assert low[-1] == pytest.approx(0.2)


def test_equal_seeds_give_equal_scores_and_a_terminal_rewrites_its_line(toy, capsys, monkeypatch):
    toy(UNTIMED_STEPS=11)
    scores = []
    for terminal in (False, True):
        restore = save_state()
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setenv("COLUMNS", "200")
        train.main()
        restore()
        output = capsys.readouterr().out
        summary = SUMMARY.search(output)
        assert int(summary["num_steps"]) == 12  # the eleven free ones, and one that uses up the budget
        scores.append(summary["val_bpb"])
    assert scores[0] == scores[1]
    rewrites = [match for match in map(PROGRESS.search, re.split(r"[\r\n]", output)) if match]
    assert [int(match["step"]) for match in rewrites] == list(range(12)) and output.count("\r") == 12


def test_a_steps_gradient_is_that_of_the_mean_over_its_micro_batches(toy, monkeypatch):
    batches, forward = [], train.GPT.forward

    def recording_forward(model, idx, targets=None, **how):
        batches.append((model, idx, targets))
        return forward(model, idx, targets, **how)

    def step(optimizer):
        assert len(batches) == 2 and not torch.equal(batches[0][1], batches[1][1])
        model = batches[0][0]
        expected = torch.autograd.grad(forward(model, *(torch.cat([batch[i] for batch in batches]) for i in (1, 2))),
                                       list(model.parameters()))
        for p, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, grad, rtol=1e-3, atol=1e-8)
        assert model.lm_head.weight.grad.abs().max() > 1e-4
        raise Stop

    monkeypatch.setattr(train.GPT, "forward", recording_forward)
    monkeypatch.setattr(train.MuonAdamW, "step", step)
    with pytest.raises(Stop):
        train.main()


@pytest.mark.parametrize("step", [0, 1, 3])  # the last one is 3
@pytest.mark.parametrize("micro_batch, offset, shown, terminal", [
    (0, math.nan, "nan", True), (1, 200.0, "20", False), (1, math.inf, "inf", False), (2, math.nan, "nan", False),
    (2, -math.inf, "-inf", False)])
def test_a_bad_loss_in_any_micro_batch_stops_the_run(toy, capsys, monkeypatch, step, micro_batch, offset, shown,
                                                     terminal):
    toy(TOTAL_BATCH_SIZE=3 * 4 * 64, UNTIMED_STEPS=3)
    calls, forward = [], train.GPT.forward

    def failing_forward(model, idx, targets=None, **how):
        calls.append(targets)
        return forward(model, idx, targets, **how) + (offset if len(calls) == 3 * step + micro_batch + 1 else 0)

    monkeypatch.setattr(train.GPT, "forward", failing_forward)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    with pytest.raises(SystemExit) as error:
        train.main()
    assert error.value.code == 1
    last_line = capsys.readouterr().out.rstrip("\n").split("\n")[-1]
    assert last_line.startswith("FAIL") and re.search(rf"\b{step}\b.*{shown}", last_line)
    assert len(calls) == 3 * (step + 1)  # after that step, not later


def test_weights_that_the_last_step_spoils_give_no_score(toy, capsys, monkeypatch):
    steps, step = [], train.MuonAdamW.step

    def spoiling_step(optimizer):
        step(optimizer)
        steps.append(step)
        if len(steps) == 2:
            optimizer.param_groups[0]["params"][0].data.fill_(math.nan)

    monkeypatch.setattr(train.MuonAdamW, "step", spoiling_step)
    with pytest.raises(SystemExit) as error:
        train.main()
    assert "finite" in sentence(error) and "val_bpb:" not in capsys.readouterr().out and len(steps) == 2


def test_a_rate_that_blows_up_ends_in_fail(toy, capsys, monkeypatch):
    monkeypatch.setattr(train, "EMBEDDING_LR", math.nan)
    with pytest.raises(SystemExit) as error:
        train.main()
    output = capsys.readouterr().out
    assert error.value.code == 1 and re.search("^FAIL.* 1.*nan", output, re.M) and "val_bpb" not in output


@pytest.mark.parametrize("total, rows", [(5000, 8), (1000, 8), (2**12, 3), (2**12, 0), (0, 8), (-4096, -8)])
def test_batch_sizes_that_do_not_divide_are_refused_with_a_valid_choice(toy, total, rows):
    toy(MAX_SEQ_LEN=256, TOTAL_BATCH_SIZE=total, DEVICE_BATCH_SIZE=rows)
    with pytest.raises(SystemExit) as error:
        train.main()
    message = sentence(error).replace(",", "")
    assert f" {total} " in message and f" {rows * 256};" in message
    device, suggestion = map(int, re.search(r"DEVICE_BATCH_SIZE = (\d+) TOTAL_BATCH_SIZE = (\d+)$", message).groups())
    assert device > 0 and suggestion > 0 and suggestion % (device * 256) == 0


def test_a_wrong_window_letter_is_refused_in_a_sentence(toy, monkeypatch):
    monkeypatch.setattr(train, "WINDOW_PATTERN", "SXL")
    with pytest.raises(SystemExit) as error:
        train.main()
    assert "SXL" in sentence(error) and "WINDOW_PATTERN" in sentence(error)


def test_a_model_without_layers_is_refused_in_a_sentence(toy):
    toy(DEPTH=0)
    with pytest.raises(SystemExit) as error:
        train.main()
    assert "DEPTH" in sentence(error)


def test_a_shard_damaged_inside_ends_the_run_in_a_sentence(toy, monkeypatch):
    def read(path):
        yield ["a document"] * 2000
        raise prepare.UserError(f"{path} is damaged")

    monkeypatch.setattr(prepare, "read_row_groups", read)
    with pytest.raises(SystemExit) as error:
        train.main()
    assert "is damaged" in sentence(error)


def test_a_forgotten_parameter_is_refused_in_a_sentence(toy, monkeypatch):
    init = train.GPT.__init__

    def init_with_extra(model, config):
        init(model, config)
        model.extra_scale = torch.nn.Parameter(torch.zeros(1))

    monkeypatch.setattr(train.GPT, "__init__", init_with_extra)
    with pytest.raises(SystemExit) as error:
        train.main()
    assert "extra_scale" in sentence(error)


def test_tied_weights_stay_tied_and_new_modules_keep_their_own_initialization(toy, monkeypatch):
    init, seen = train.GPT.__init__, {}

    def init_with_edits(model, config):
        init(model, config)
        model.lm_head.weight = model.transformer.wte.weight
        model.transformer.h[0].scale = torch.nn.RMSNorm(config.n_embd)

    def look(model, *args):
        seen["tied"] = model.lm_head.weight is model.transformer.wte.weight
        seen["scale"] = model.transformer.h[0].scale.weight
        raise Stop

    monkeypatch.setattr(train.GPT, "__init__", init_with_edits)
    monkeypatch.setattr(train.GPT, "setup_optimizer", look)
    with pytest.raises(Stop):
        train.main()
    assert seen["tied"] and seen["scale"].eq(1).all()


def edit_model(change):
    """An edit of GPT.__init__: what `change` does to the model at its end."""
    def edit(monkeypatch):
        init = train.GPT.__init__
        monkeypatch.setattr(train.GPT, "__init__", lambda model, config: (init(model, config), change(model))[0])
    return edit


def edit_mlp(forward):
    return lambda monkeypatch: monkeypatch.setattr(train.MLP, "forward", forward)


def edit_block(module, forward):
    """A module in every block, made for its width, through which the residual stream goes at the block's end."""
    def edit(monkeypatch):
        init, block = train.Block.__init__, train.Block.forward

        def init_with_module(self, config, layer_idx):
            init(self, config, layer_idx)
            self.extra = module(config.n_embd)

        monkeypatch.setattr(train.Block, "__init__", init_with_module)
        monkeypatch.setattr(train.Block, "forward", lambda self, *args: forward(self.extra, block(self, *args)))
    return edit


def grouped_queries(monkeypatch):
    build = train.build_model_config
    monkeypatch.setattr(train, "build_model_config", lambda *args: dataclasses.replace(build(*args), n_kv_head=1))


def frozen_embedding(model):
    model.transformer.wte.weight.requires_grad = False


def tied_weights(model):
    model.lm_head.weight = model.transformer.wte.weight


def unused_parameter(model):
    model.transformer.h[0].spare = torch.nn.Linear(8, 8)


def wider_mlp(model):
    for block in model.transformer.h:
        C = model.config.n_embd
        block.mlp.c_fc, block.mlp.c_proj = (torch.nn.Linear(*sizes, bias=False) for sizes in ((C, 5 * C), (5 * C, C)))


ORDINARY_EDITS = {
    "depth 1": dict(DEPTH=1), "depth 3": dict(DEPTH=3), "head dim 64": dict(HEAD_DIM=64),
    "head dim 256": dict(HEAD_DIM=256), "narrow": dict(ASPECT_RATIO=8, HEAD_DIM=8), "warmup": dict(WARMUP_RATIO=0.3),
    "one window": dict(WINDOW_PATTERN="L"), "other windows": dict(WINDOW_PATTERN="ssL", DEPTH=4),
    "no warmdown": dict(WARMDOWN_RATIO=0.0), "warmdown all the way": dict(WARMDOWN_RATIO=1.0, FINAL_LR_FRAC=0.1),
    "no weight decay": dict(WEIGHT_DECAY=0.0), "one row": dict(DEVICE_BATCH_SIZE=1, TOTAL_BATCH_SIZE=256),
    "one micro-batch": dict(DEVICE_BATCH_SIZE=8), "odd rows": dict(DEVICE_BATCH_SIZE=5, TOTAL_BATCH_SIZE=3 * 5 * 64),
    "more rows than are scored": dict(DEVICE_BATCH_SIZE=32, TOTAL_BATCH_SIZE=2048),
    "every step charged": dict(UNTIMED_STEPS=0),
    "grouped queries": grouped_queries, "tied weights": edit_model(tied_weights),
    "frozen embedding": edit_model(frozen_embedding), "unused parameter": edit_model(unused_parameter),
    "wider MLP": edit_model(wider_mlp), "no value embeddings": lambda monkeypatch: monkeypatch.setattr(
        train, "has_ve", lambda layer_idx, n_layer: False),
    "GELU": edit_mlp(lambda mlp, x: mlp.c_proj(torch.nn.functional.gelu(mlp.c_fc(x)))),
    "learned norm": edit_block(torch.nn.RMSNorm, lambda extra, x: extra(x)),
    "dropout": edit_block(lambda C: torch.nn.Dropout(0.1), lambda extra, x: extra(x)),
    "a linear layer with bias": edit_block(lambda C: torch.nn.Linear(C, C), lambda extra, x: x + extra(x)),
    "a convolution": edit_block(lambda C: torch.nn.Conv1d(C, C, 3, groups=C),
                                lambda extra, x: x + extra(torch.nn.functional.pad(x.mT, (2, 0))).mT),
    "positions": edit_block(lambda C: torch.nn.Embedding(64, C), lambda extra, x: x + extra.weight[:x.size(1)]),
}


@pytest.mark.parametrize("kind, device", [
    *((kind, "cpu") for kind in ORDINARY_EDITS if kind != "head dim 256"),  # a CPU without bf16 takes 17 s for it
    *(pytest.param(kind, "cuda", marks=pytest.mark.gpu) for kind in ORDINARY_EDITS)])
def test_an_ordinary_edit_runs_to_its_score(toy, capsys, monkeypatch, kind, device):
    edit = ORDINARY_EDITS[kind]
    toy(UNTIMED_STEPS=2)
    if callable(edit):
        edit(monkeypatch)
    else:
        toy(**edit)
    if device == "cuda":  # where main() would keep the full scale
        train.use_toy_scale()
        torch.compiler.reset()
    train.main()
    summary, steps = SUMMARY.search(capsys.readouterr().out), 1 if kind == "every step charged" else 3
    assert 0 < float(summary["val_bpb"]) < 20 and int(summary["num_steps"]) == steps


@pytest.mark.parametrize("place", ["forward", "backward", "step", "evaluation"])
def test_memory_that_runs_out_is_a_sentence_that_names_the_constant(toy, capsys, monkeypatch, place):
    def run_out(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    target = {"forward": (train.GPT, "forward"), "backward": (torch.Tensor, "backward"),
              "step": (train.MuonAdamW, "step"), "evaluation": (prepare, "score")}[place]
    monkeypatch.setattr(*target, run_out)
    with pytest.raises(SystemExit) as error:
        train.main()
    assert "DEVICE_BATCH_SIZE" in sentence(error) and "2.00 GiB" in sentence(error)
    assert "val_bpb:" not in capsys.readouterr().out


def test_parameters_that_no_gradient_reaches_are_named_once(toy, capsys, monkeypatch):
    def idle(model):
        model.transformer.h[0].spare = torch.nn.Linear(8, 8, bias=False)
        model.transformer.h[1].attn.scale = torch.nn.Parameter(torch.ones(model.config.n_embd))  # not read

    edit_model(idle)(monkeypatch)
    train.main()
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 1 and "transformer.h.0.spare.weight, transformer.h.1.attn.scale:" in warnings[0]


def test_a_clock_that_is_set_back_changes_nothing(toy, capsys, monkeypatch):
    now = itertools.count(2e9, -3600)
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    train.main()
    summary = SUMMARY.search(capsys.readouterr().out)
    assert int(summary["num_steps"]) == 2 and 0 <= float(summary["training_seconds"]) <= float(summary["total_seconds"])


def test_an_error_in_the_model_is_no_users_mistake_and_keeps_its_traceback(toy, monkeypatch):
    def init_with_bug(model, config):
        first, second = config.n_head, config.n_embd, config.n_layer  # noqa: F841

    monkeypatch.setattr(train.GPT, "__init__", init_with_bug)
    with pytest.raises(ValueError, match="unpack"):
        train.main()


def test_a_model_that_looks_ahead_is_refused_in_a_sentence(toy, capsys, monkeypatch):
    monkeypatch.setattr(train, "attention", lambda q, k, v, window: v.mean(1, keepdim=True).expand_as(q))
    with pytest.raises(SystemExit) as error:
        train.main()
    assert "causal" in sentence(error) and "val_bpb:" not in capsys.readouterr().out


def test_a_run_needs_no_network(toy, capsys, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a run opens no connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    train.main()
    assert SUMMARY.search(capsys.readouterr().out)


def test_without_a_c_compiler_a_gpu_run_ends_in_a_sentence(tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="C compiler.*gcc.*CC"):
        prepare.check_data()
    monkeypatch.setenv("CC", "my-compiler")
    assert prepare.check_data().get_vocab_size() == 8192


def test_without_data_the_sentence_ends_in_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SystemExit) as error:
        train.main()
    assert sentence(error).endswith("run `uv run prepare.py --toy`")


@pytest.mark.parametrize("visible, runs", [(None, False), ("0", False), ("", True)])
def test_a_gpu_machine_that_lost_its_gpu_does_not_slide_into_the_toy(monkeypatch, tiny, visible, runs):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(SystemExit) as error:
        train.main()
    # the home directory of this test has no toy data, so main() ends either way, but not for the same reason
    assert ("--toy" in sentence(error)) == runs
    assert ("CUDA_VISIBLE_DEVICES" in sentence(error)) == (not runs)
    assert (train.DEPTH == 2) == runs


def refuse(message):
    def init():
        raise RuntimeError(message)
    return init


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("cuda, init, reason", [
    (None, refuse("Torch not compiled with CUDA enabled"), "built without CUDA"),
    ("13.0", refuse("The NVIDIA driver on your system is too old (found version 12080).\nPlease update"),
     r"driver.* too old.*580.*torch==2\.9\.1"),
    ("13.0", refuse("Found no NVIDIA driver on your system. Please check"), "CUDA GPU.*Found no NVIDIA driver"),
    ("13.0", refuse("No CUDA GPUs are available"), "CUDA GPU.*No CUDA GPUs are available"),
])
def test_where_cuda_is_missing_the_reason_is_told(monkeypatch, capsys, tiny_cache, prepared, cuda, init, reason):
    if prepared:
        point_prepare_at(tiny_cache)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(SystemExit) as error:
        train.main()  # there is no toy data either
    told = sentence(error) if prepared else capsys.readouterr().out
    assert re.search(reason, told) and ("TOY SCALE" in told) != prepared


# ----------------------------------------------------------------------------------------------------------------------
# On a GPU
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_run_on_cuda_prints_the_summary_and_leaves_the_model_to_the_compile_cache(toy_home, capsys, monkeypatch):
    graphs = {}  # how many the compile cache holds, at these moments

    def count(moment):
        if moment not in graphs:
            saved = torch.compiler.save_cache_artifacts()
            graphs[moment] = len(saved[1].aot_autograd_artifacts) if saved else 0

    class Optimizer(train.MuonAdamW):
        def __init__(self, *args):
            count("before training")
            super().__init__(*args)

        def step(self):
            count("before the first step")
            super().step()

    def evaluate(*args, evaluate_bpb=prepare.evaluate_bpb):
        count("before evaluation")
        val_bpb = evaluate_bpb(*args)
        count("after evaluation")
        return val_bpb

    monkeypatch.setattr(train, "MuonAdamW", Optimizer)
    monkeypatch.setattr(prepare, "evaluate_bpb", evaluate)
    monkeypatch.setenv("HOME", str(toy_home))
    prepare.use_toy_scale()
    prepare.TIME_BUDGET, prepare.EVAL_TOKENS = 3, 50 * 256
    train.DEPTH, train.TOTAL_BATCH_SIZE, train.DEVICE_BATCH_SIZE = 4, 2**13, 16
    torch.compiler.reset()
    train.main()
    assert graphs["before the first step"] - graphs["before training"] == 1
    assert graphs["after evaluation"] - graphs["before evaluation"] == 1  # always the same: another without gradients
    output = capsys.readouterr().out
    summary = SUMMARY.search(output)
    assert summary and "TOY" not in output, output
    assert 0.5 < float(summary["val_bpb"]) < 3.0
    assert float(summary["peak_vram_mb"]) > 10 and int(summary["num_steps"]) > 50 and summary["depth"] == "4"


@pytest.mark.gpu
def test_a_gpu_whose_memory_runs_out_is_a_sentence(toy_home, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(toy_home))
    prepare.use_toy_scale()
    train.DEPTH, train.TOTAL_BATCH_SIZE, train.DEVICE_BATCH_SIZE = 2, 2**17, 512
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(2**28 / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.raises(SystemExit) as error:
            train.main()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "DEVICE_BATCH_SIZE" in sentence(error) and "out of memory" in sentence(error)
    assert "val_bpb:" not in capsys.readouterr().out
