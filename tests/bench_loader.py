"""
Tokens per second of the data loader and of a naive one, on real shards. Prints and asserts nothing about time.

    uv run python tests/bench_loader.py                                      the shards and tokenizer of prepare.py
    uv run python tests/bench_loader.py --data DIR --buffer-size 200 --threads 2 4

The naive loader is the definition that the tests compare with: it scans lists, and packs only after it has tokenized.
Both packed the same tokens, or the exit code is 1.
"""

import argparse
import hashlib
import itertools
import os
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import prepare  # noqa: E402
from test_loader import naive_batches  # noqa: E402


class ShardFile:
    """The row groups of a shard, read anew in each epoch."""

    def __init__(self, path):
        self.path = path

    def __iter__(self):
        return prepare.read_row_groups(self.path)


def naive_loader(tokenizer, args, threads):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shards = [ShardFile(path) for path in prepare.split_paths("train")]
    for inputs, targets, epoch in naive_batches(tokenizer, shards, args.batch_size, args.seq_len, args.buffer_size,
                                                threads):
        yield torch.tensor(inputs, device=device), torch.tensor(targets, device=device), epoch


def fast_loader(tokenizer, args, threads):
    prepare.ENCODE_THREADS = threads
    return prepare.make_dataloader(tokenizer, args.batch_size, args.seq_len, "train", args.buffer_size)


def resident_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(loader, batches):
    """Tokens per second of `batches` batches after the first one, a hash of the first ten, resident MB at the end."""
    digest = hashlib.sha256()
    first = list(itertools.islice(loader, 1))
    start = time.perf_counter()
    first += itertools.islice(loader, 9)
    for _ in itertools.islice(loader, batches - 9):
        pass
    seconds, memory = time.perf_counter() - start, resident_mb()
    loader.close()
    for inputs, targets, epoch in first:
        for tensor in (inputs, targets):
            digest.update(tensor.cpu().numpy().tobytes())
        digest.update(str(epoch).encode())
    return batches * first[0][0].numel() / seconds, digest.hexdigest(), memory


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--data", default=prepare.DATA_DIR, help="folder of shards (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="rows, B (default %(default)s)")
    parser.add_argument("--seq-len", type=int, default=prepare.MAX_SEQ_LEN, help="tokens, T (default %(default)s)")
    parser.add_argument("--buffer-size", type=int, default=1000, help="documents (default %(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="tokenizer threads to try")
    parser.add_argument("--batches", type=int, default=40, help="batches a measurement, at least 10")
    parser.add_argument("--rounds", type=int, default=3, help="measurements, of which the median counts")
    args = parser.parse_args()
    prepare.DATA_DIR = args.data
    tokenizer = prepare.Tokenizer.from_directory()

    cases = [("naive", naive_loader, prepare.ENCODE_THREADS)]
    cases += [("make_dataloader", fast_loader, threads) for threads in args.threads]
    results = {case: [] for case in cases}
    for _ in range(args.rounds):  # in turn, since a shared machine is not the same from minute to minute
        for case in cases:
            results[case].append(measure(case[1](tokenizer, args, case[2]), args.batches))
    print(f"{os.cpu_count()} cores, B = {args.batch_size}, T = {args.seq_len}, buffer of {args.buffer_size:,}"
          f" documents, median of {args.rounds} x {args.batches} batches")
    print(f"{'loader':16}{'threads':>8}{'tokens/s':>12}{'x naive':>9}{'resident MB':>13}  first ten batches")
    naive_speed = statistics.median(result[0] for result in results[cases[0]])
    for (name, _, threads), measured in results.items():
        speed = statistics.median(result[0] for result in measured)
        print(f"{name:16}{threads:8}{speed:12,.0f}{speed / naive_speed:9.2f}{measured[-1][2]:13,.0f}  "
              + " ".join(sorted({result[1][:16] for result in measured})))
    if len({result[1] for measured in results.values() for result in measured}) > 1:
        raise SystemExit("the loaders packed different batches")


if __name__ == "__main__":
    main()
