"""
Tokens per second of the data loader and of a naive one, on real shards. Prints and asserts nothing about time.

    uv run python tests/bench_loader.py                                      the shards that prepare.py fetched
    uv run python tests/bench_loader.py --data DIR --buffer-size 200 --threads 2 4

The tokenizer is always the one that prepare.py trained. The naive loader is the definition that the tests compare with:
it scans lists, and packs only after it has tokenized. If the first batches are not the same, the exit code is 1.
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


COMPARED = 10  # batches at the start of the stream that must be the same


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


def measure(loader, batches):
    """Tokens per second of `batches` batches after the first one, and a hash of the first COMPARED."""
    first, digest = list(itertools.islice(loader, 1)), hashlib.sha256()
    start = time.perf_counter()
    first += itertools.islice(loader, COMPARED - 1)
    for _ in itertools.islice(loader, batches - len(first) + 1):
        pass
    seconds = time.perf_counter() - start
    loader.close()
    for inputs, targets, epoch in first:
        for tensor in (inputs, targets):
            digest.update(tensor.cpu().numpy().tobytes())
        digest.update(str(epoch).encode())
    return batches * first[0][0].numel() / seconds, digest.hexdigest()


@prepare.mistakes_as_sentences()
def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--data", default=prepare.DATA_DIR, help="folder of shards (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="rows, B (default %(default)s)")
    parser.add_argument("--seq-len", type=int, default=prepare.MAX_SEQ_LEN, help="tokens, T (default %(default)s)")
    parser.add_argument("--buffer-size", type=int, default=1000, help="documents (default %(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8, 16],
                        help="tokenizer threads to try (default %(default)s)")
    parser.add_argument("--batches", type=int, default=40, help="a measurement (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements: the median counts (default %(default)s)")
    args = parser.parse_args()
    if args.batches < COMPARED or min(args.batch_size, args.seq_len, args.buffer_size, args.rounds, *args.threads) < 1:
        parser.error(f"--batches must be at least {COMPARED}, and every other number at least 1")
    prepare.DATA_DIR = args.data
    tokenizer = prepare.Tokenizer.from_directory()

    cases = [("naive", naive_loader, prepare.ENCODE_THREADS)]
    cases += [("make_dataloader", fast_loader, threads) for threads in args.threads]
    speeds, hashes = {case: [] for case in cases}, {case: set() for case in cases}
    for _ in range(args.rounds):  # in turn, since a shared machine is not the same from minute to minute
        for case in cases:
            _, loader, threads = case
            speed, digest = measure(loader(tokenizer, args, threads), args.batches)
            speeds[case].append(speed)
            hashes[case].add(digest)
    print(f"{os.cpu_count()} cores, B = {args.batch_size}, T = {args.seq_len}, buffer of {args.buffer_size:,}"
          f" documents, median of {args.rounds} x {args.batches} batches")
    print(f"{'loader':16}{'threads':>8}{'tokens/s':>12}{'x naive':>9}  hash of {COMPARED} batches")
    naive_speed = statistics.median(speeds[cases[0]])
    for case in cases:
        name, _, threads = case
        speed = statistics.median(speeds[case])
        print(f"{name:16}{threads:8}{speed:12,.0f}{speed / naive_speed:9.2f}  "
              + " ".join(digest[:16] for digest in hashes[case]))
    if len(set.union(*hashes.values())) > 1:
        raise SystemExit("the loaders packed different batches")


if __name__ == "__main__":
    main()
