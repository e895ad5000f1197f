"""
Tokens per second of the training step on one constant batch, of several versions of train.py in turn. Needs a CUDA GPU.

    uv run python tests/bench_step.py                              this version
    git show main:train.py > before.py
    uv run python tests/bench_step.py before.py train.py           two versions: how much faster is the second?

Each is built at its own constants, and takes its own attention and MLP kernel. Prints and asserts nothing about time.
"""

import argparse
import contextlib
import statistics
import sys
import time
import types
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import prepare  # noqa: E402


def load_module(path, name):
    """The file at `path` as module `name`, with operators under that name: two versions would share one definition."""
    sys.modules[name] = module = types.ModuleType(name)
    source = Path(path).read_text().replace("autoresearch::", f"{name}::")
    exec(compile(source, path, "exec"), vars(module))
    return module


def build_step(train, device):
    """A function that makes one optimizer step as `train.main()` does, and the tokens of a step."""
    torch.set_float32_matmul_precision("highest")
    if hasattr(train, "load_kernels"):
        train.load_kernels(device)
    else:  # a version from before that function
        print(f"attention: {train.load_attention(device)}")
        if torch.cuda.get_device_capability(device) == (9, 0):
            train.load_fused_squared_relu(device)
    torch.set_float32_matmul_precision("high")  # not before: fast paths are compared in full precision
    with torch.device(device):
        model = train.GPT(train.build_model_config(train.DEPTH, prepare.VOCAB_SIZE))
    torch.manual_seed(train.SEED)
    model.init_weights()
    optimizer = model.setup_optimizer(train.UNEMBEDDING_LR, train.EMBEDDING_LR, train.MATRIX_LR, train.WEIGHT_DECAY,
                                      train.ADAM_BETAS, train.SCALAR_LR)
    model = torch.compile(model, dynamic=False)
    idx = torch.randint(prepare.VOCAB_SIZE, (train.DEVICE_BATCH_SIZE, prepare.MAX_SEQ_LEN), device=device)
    targets = idx.roll(-1, dims=1)
    grad_accum_steps = train.TOTAL_BATCH_SIZE // idx.numel()

    def step():
        losses = []
        for _ in range(grad_accum_steps):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(idx, targets)
            losses.append(loss.detach())
            (loss / grad_accum_steps).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        return torch.stack(losses).tolist()

    return step, train.TOTAL_BATCH_SIZE


def seconds(step):
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


@prepare.mistakes_as_sentences()
def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("versions", nargs="*", default=[str(ROOT / "train.py")], help="files (default %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="a measurement (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="measurements: the median step counts (%(default)s)")
    args = parser.parse_args()
    if min(args.steps, args.rounds) < 1:
        parser.error("--steps and --rounds must be at least 1")
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU was found, and the step on a CPU is not what this measures")
    device = torch.device("cuda")
    torch._dynamo.config.recompile_limit = 64
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    versions = []
    for i, path in enumerate(args.versions):
        before = torch.cuda.memory_allocated()
        with contextlib.redirect_stdout(sys.stderr):
            step, tokens = build_step(load_module(path, f"version{i}"), device)
        torch.cuda.reset_peak_memory_stats()
        first = seconds(step)
        peak = torch.cuda.max_memory_allocated() - before
        for _ in range(3):
            step()
        versions.append((path, step, tokens, first, peak, []))
    for _ in range(args.rounds):  # in turn, since a GPU is not the same from minute to minute
        for _, step, _, _, _, times in versions:
            step()
            times += [seconds(step) for _ in range(args.steps)]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, median of {args.rounds} x {args.steps} steps")
    print(f"{'version':30}{'ms/step':>9}{'tokens/s':>12}{'x first':>9}{'first step s':>14}{'peak MB':>9}")
    baseline = versions[0][2] / statistics.median(versions[0][5])
    for path, _, tokens, first, peak, times in versions:
        speed = tokens / statistics.median(times)
        print(f"{path[-30:]:30}{1000 * statistics.median(times):9.1f}{speed:12,.0f}{speed / baseline:9.3f}{first:14.1f}"
              f"{peak / 2**20:9,.0f}")


if __name__ == "__main__":
    main()
