"""
Data, tokenizer and metric of the sandbox: everything that must stay the same from one experiment to the next.

    uv run prepare.py                    text, tokenizer and an attention kernel (once, some minutes)
    uv run prepare.py --num-shards 100   more text
    uv run prepare.py --toy              a tiny corpus from Python's own sources: no GPU, no network

Everything is written to ~/.cache/autoresearch and only there. train.py imports the tokenizer, the data loader and
`evaluate_bpb` from this file. Agents do not edit it: a score counts only while all scores are measured alike.
"""

import os
import signal

if __name__ == "__main__":  # Ctrl-C ends at once, in the slow imports as well: only whole files have their final names
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
os.environ |= {"HF_HUB_DISABLE_IMPLICIT_TOKEN": "1", "HF_HUB_VERBOSITY": "error"}  # a stale token would be refused

import argparse
import contextlib
import fcntl
import hashlib
import itertools
import math
import pickle
import queue
import random
import re
import shutil
import struct
import sysconfig
import threading
import time
import uuid
from bisect import bisect_left, bisect_right, insort
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import requests
import tiktoken
import torch
import torch.nn.functional as F

# ----------------------------------------------------------------------------------------------------------------------
# Constants. Functions read them when they are called, so that the toy scale and the tests can set them.
# ----------------------------------------------------------------------------------------------------------------------

MAX_SEQ_LEN = 2048          # tokens of context
TIME_BUDGET = 300           # seconds of training
EVAL_TOKENS = 40 * 524288   # tokens that a score is taken over

CACHE_DIR = os.path.join(os.path.expanduser("~"), ".cache", "autoresearch")
DATA_DIR = os.path.join(CACHE_DIR, "data")
TOKENIZER_DIR = os.path.join(CACHE_DIR, "tokenizer")
PREPARE_COMMAND = "uv run prepare.py"  # what error messages tell the user to run

BASE_URL = "https://huggingface.co/datasets/karpathy/climbmix-400b-shuffle/resolve/main"
MAX_SHARD = 6542  # the last shard of the dataset
VAL_SHARD = MAX_SHARD
VAL_FILENAME = f"shard_{VAL_SHARD:05d}.parquet"
DOWNLOAD_TIMEOUTS = (10, 30)      # seconds to connect, seconds between two pieces of the body
DOWNLOAD_WAITS = (2, 4, 8, 16)    # seconds between the attempts
MAX_RETRY_AFTER = 60              # seconds that a server may ask us to wait
HEALING_STATUS = {408, 425, 429}  # the 4xx that another attempt can heal
KERNEL = ("kernels-community/flash-attn3", "v1")  # repository and branch on the kernel hub
KERNEL_DIR = os.path.join(CACHE_DIR, "kernels")

VOCAB_SIZE = 8192  # special tokens included
SPECIAL_TOKENS = [f"<|reserved_{i}|>" for i in range(4)]
BOS_TOKEN = SPECIAL_TOKENS[0]
# GPT-4's pattern, but digits in runs of at most two: a vocabulary this small cannot spare a thousand ids for numbers
SPLIT_PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
)

CHUNK_DOCS = 128        # documents that enter the loader's buffer together: part of the definition of the stream
ENCODE_THREADS = min(8, os.cpu_count() or 1)  # more than there are cores slow each other down
BATCHES_AHEAD = 4       # batches packed before the GPU asks for them
SCORE_CHUNK = 2**27     # logits scored at a time: bounds the memory of the metric


def use_toy_scale():
    """Set the constants to a size that two CPU cores train in about a minute. Scores at this scale mean nothing."""
    global MAX_SEQ_LEN, TIME_BUDGET, EVAL_TOKENS, VOCAB_SIZE, CACHE_DIR, DATA_DIR, TOKENIZER_DIR, KERNEL_DIR
    global PREPARE_COMMAND
    MAX_SEQ_LEN, TIME_BUDGET, EVAL_TOKENS, VOCAB_SIZE = 256, 20, 256 * 256, 1024
    CACHE_DIR = os.path.join(os.path.expanduser("~"), ".cache", "autoresearch", "toy")
    DATA_DIR, TOKENIZER_DIR, KERNEL_DIR = (os.path.join(CACHE_DIR, name) for name in ("data", "tokenizer", "kernels"))
    PREPARE_COMMAND = "uv run prepare.py --toy"


class UserError(ValueError):
    """A mistake that one sentence explains. Scripts end with that sentence, and not with a traceback."""

    def __init__(self, sentence):
        super().__init__(" ".join(sentence.splitlines()))  # one line, even where it quotes an error of several


# ----------------------------------------------------------------------------------------------------------------------
# Shards: files in the cache that are whole, or not there
# ----------------------------------------------------------------------------------------------------------------------


def list_parquet_files():
    """Paths of all shards in DATA_DIR in name order; files with other names are not shards."""
    names = os.listdir(DATA_DIR) if os.path.isdir(DATA_DIR) else []
    return [os.path.join(DATA_DIR, name) for name in sorted(names) if re.fullmatch(r"shard_\d{5}\.parquet", name)]


def split_paths(split):
    """Paths of the shards of `split` ("train" or "val"). Raises ValueError, or FileNotFoundError if there are none."""
    if split not in ("train", "val"):
        raise UserError(f'split is {split!r}, but must be "train" or "val"')
    paths = [path for path in list_parquet_files() if path.endswith(VAL_FILENAME) == (split == "val")]
    if not paths:
        wanted = "training shard" if split == "train" else f"validation shard {VAL_FILENAME}"
        raise FileNotFoundError(f"there is no {wanted} in {DATA_DIR}; run `{PREPARE_COMMAND}`")
    return paths


def check_shard(path):
    """Raise ValueError unless `path` is a Parquet file with a whole footer, a column `text` of strings, and rows."""
    try:
        with pq.ParquetFile(path) as shard:
            schema, num_rows = shard.schema_arrow, shard.metadata.num_rows
            if num_rows != sum(shard.metadata.row_group(i).num_rows for i in range(shard.num_row_groups)):
                raise pa.ArrowInvalid(f"its row groups do not hold {num_rows} rows")
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a whole Parquet file ({error}); run `{PREPARE_COMMAND}`") from None
    index = schema.get_field_index("text")  # -1 for none, and for several
    kind = schema.field(index).type if index >= 0 else pa.null()
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise UserError(f"{path} has no column `text` of strings; run `{PREPARE_COMMAND}`")
    if num_rows == 0:
        raise UserError(f"{path} has no rows; run `{PREPARE_COMMAND}`")


def sweep_temporaries(folder):
    """Remove the temporary files in `folder` whose writers were killed: nobody holds their lock."""
    for name in os.listdir(folder):
        if re.search(r"\.(parquet|pkl|pt)\.[0-9a-f]{8}\.tmp$", name):
            with contextlib.suppress(OSError), open(os.path.join(folder, name), "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.remove(file.name)


def missing_shards(names):
    """Those of `names` that are not good shards in DATA_DIR. Creates the folder, and sweeps it."""
    if not os.path.isabs(DATA_DIR):  # without a home, "~" would be a folder here
        raise UserError("there is no home directory to keep the cache in; set HOME to one")
    os.makedirs(DATA_DIR, exist_ok=True)
    sweep_temporaries(DATA_DIR)
    missing = []
    for name in names:
        try:
            check_shard(os.path.join(DATA_DIR, name))
        except ValueError:
            missing.append(name)
    return missing


def read_row_groups(path):
    """Yield the documents of a shard, a list of strings a row group; a null is an empty document."""
    check_shard(path)
    try:
        with pq.ParquetFile(path) as shard:
            for group in range(shard.num_row_groups):
                texts = shard.read_row_group(group, columns=["text"]).column("text").to_pylist()
                if len(texts) != shard.metadata.row_group(group).num_rows:  # a zeroed page can read as an empty one
                    raise pa.ArrowInvalid(f"rows are missing in row group {group}")
                yield [text or "" for text in texts]
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged, or cannot be read now ({error}); if that stays so, remove it and run"
                        f" `{PREPARE_COMMAND}`") from None


@contextlib.contextmanager
def atomic_write(path):
    """Open a binary file under a temporary name beside `path`: it becomes `path` at the end, or vanishes on an error.

    The lock on it tells `sweep_temporaries` of other processes that its writer lives.
    """
    temporary = ""
    try:
        while not os.path.exists(temporary):  # again, under another name, if a sweep was faster than the lock
            temporary = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
            file = open(temporary, "xb")
            with contextlib.suppress(OSError):  # a file system without locks: nobody sweeps there either
                fcntl.flock(file, fcntl.LOCK_EX)
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # some file systems report a full disk or quota only here
            os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        if isinstance(error, OSError) and error.errno and not error.filename:
            error.filename = path  # the system names no file when a disk is full
        raise


# ----------------------------------------------------------------------------------------------------------------------
# Where shards come from: the hub, or at toy scale the sources of Python's standard library
# ----------------------------------------------------------------------------------------------------------------------


def fetch_file(url, path):
    """One attempt: stream `url` to a temporary file, verify it, move it to `path`. Returns its size in bytes.

    Raises requests.RequestException or ValueError for what the server sent, OSError for what the disk refused.
    """
    with requests.get(url, stream=True, timeout=DOWNLOAD_TIMEOUTS, headers={"Accept-Encoding": "identity"}) as response:
        response.raise_for_status()
        if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
            raise UserError(f"the body has content encoding {encoding!r}, but identity was asked for")
        length = response.headers.get("Content-Length", "")
        etags = [reply.headers.get("X-Linked-ETag", "") for reply in (*response.history, response)]
        etags = [etag.removeprefix("W/").strip('"').lower() for etag in etags]
        sha256 = next((etag for etag in etags if re.fullmatch(r"[0-9a-f]{64}", etag)), None)
        with atomic_write(path) as file:
            size, digest = 0, hashlib.sha256()
            for piece in response.iter_content(2**20):
                size += file.write(piece)
                digest.update(piece)
            file.flush()
            if length.isdecimal() and size != int(length):
                raise UserError(f"{size:,} bytes came, but the server announced {int(length):,}")
            if sha256 not in (None, digest.hexdigest()):
                raise UserError(f"the SHA-256 is {digest.hexdigest()}, but the server announced {sha256}")
            if path.endswith(".parquet"):
                check_shard(file.name)
    return size


def download_file(url, path):
    """Fetch one file in up to five attempts. Returns, for the progress line, its size and the speed of the last one.

    Raises what made the last attempt fail.
    """
    for wait in (*DOWNLOAD_WAITS, None):
        start = time.monotonic()
        try:
            size = fetch_file(url, path)
            return f"{size / 1e6:.1f} MB, {size / 1e6 / (time.monotonic() - start):.1f} MB/s"
        except (requests.RequestException, ValueError) as error:
            response = getattr(error, "response", None)
            status = response.status_code if response is not None else None
            if wait is None or (status in range(400, 500) and status not in HEALING_STATUS):
                raise
            asked = response.headers.get("Retry-After", "") if response is not None else ""
            wait = max(wait, min(int(asked), MAX_RETRY_AFTER)) if asked.isdecimal() else wait
            reason = str(error).partition("; run ")[0]
            print(f"{os.path.basename(path)}: {reason}; trying again in {wait} s", flush=True)
            time.sleep(wait)


def download_data(num_shards, download_workers):
    """Bring the first `num_shards` training shards (-1: all) and the validation shard into DATA_DIR.

    What is there already, asked for or not, is checked, and fetched again if bad. Raises ValueError that names the
    shards that failed.
    """
    num_train = MAX_SHARD if num_shards == -1 else min(num_shards, MAX_SHARD)
    names = {*(f"shard_{i:05d}.parquet" for i in range(num_train)), VAL_FILENAME}
    names = sorted(names | {os.path.basename(path) for path in list_parquet_files()})
    missing, failed = missing_shards(names), []
    endpoint = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/")  # replaces the host, as for all tools of that hub
    base_url = endpoint + urlsplit(BASE_URL).path if endpoint else BASE_URL
    print(f"{len(names) - len(missing)} of {len(names)} shards are in {DATA_DIR}", flush=True)
    with ThreadPoolExecutor(download_workers) as pool:
        futures = {pool.submit(download_file, f"{base_url}/{name}", os.path.join(DATA_DIR, name)): name
                   for name in missing}
        for count, future in enumerate(as_completed(futures), 1):
            try:
                outcome = future.result()
            except (OSError, ValueError) as error:  # the others are still fetched
                failed.append(futures[future])
                outcome = f"FAILED: {error}"
            print(f"[{count}/{len(missing)}] {futures[future]} {outcome}", flush=True)
    if failed:
        raise UserError(f"{len(failed)} of {len(names)} shards could not be fetched: {', '.join(sorted(failed))};"
                        f" run `{PREPARE_COMMAND}` again, it keeps what is there")


def write_toy_shards():
    """Pack standard library sources into two training shards and a validation shard, which gets every third file."""
    names = ["shard_00000.parquet", "shard_00001.parquet", VAL_FILENAME]
    if not missing_shards(names):
        return
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests"}
    train, val = [], []
    for i, path in enumerate(sorted(root.rglob("*.py"))):
        if not skipped & set(path.relative_to(root).parts):
            text = path.read_text(encoding="utf-8", errors="replace")
            (train if i % 3 else val).extend(re.findall(r"(?s).{1500}[^\n]*\n?|.+", text))  # cut at ends of lines
    if min(len(train) // 2, len(val)) < 1500:  # the validation shard must outlast the loader's buffer
        raise UserError(f"{root} holds too little source for a toy corpus; install Python with its standard library")
    for documents in (train, val):
        random.Random(0).shuffle(documents)  # in file order a short run would see only the start of the alphabet
    for name, documents in zip(names, (train[::2], train[1::2], val), strict=True):
        with atomic_write(os.path.join(DATA_DIR, name)) as file:
            pq.write_table(pa.table({"text": documents}), file, compression="zstd", row_group_size=1024)
        print(f"{name}: {len(documents):,} documents", flush=True)


# ----------------------------------------------------------------------------------------------------------------------
# The attention kernel: builds of the official repository, below KERNEL_DIR in the hub's own layout
# ----------------------------------------------------------------------------------------------------------------------


def first_line(error):
    """What an error says, without the paragraphs that libraries add; its type if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def find_kernel(folder):
    """Path of the build in `folder` that fits this PyTorch and CUDA: FileNotFoundError if none does.

    Raises another error if it is not whole, as far as digests or the ends of libraries show it.
    """
    from kernels.resolver import resolve_local_kernel  # here, since loading this library takes half a second

    build = resolve_local_kernel(Path(folder), backend=None)
    if digest := build.metadata.digest:  # of every file; official builds have it
        digest.validate(digest.hash_variant(digest.algorithm, build.variant_path))
    for path in build.variant_path.rglob("*.so"):  # loading one that is cut would kill the process
        with open(path, "rb") as file:
            start, entry_size, entries = struct.unpack("<40xQ10xHH2x", file.read(64))  # of the table that ends the file
        if path.stat().st_size < start + entry_size * entries:
            raise UserError(f"{path} is cut")
    return build.variant_path


def load_kernel():
    """Import the kernel in the cache. Raises FileNotFoundError if no build fits; a bad one can raise anything."""
    from kernels import get_local_kernel  # asks the network for nothing where HF_HUB_OFFLINE is set

    folder = Path(KERNEL_DIR, "flash-attn3")
    try:
        find_kernel(folder)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no kernel for this PyTorch in {folder}; run `{PREPARE_COMMAND}`") from None
    return get_local_kernel(folder)


def list_build():
    """The files of the hub's best build for this PyTorch, CUDA and platform: path in the repository to address."""
    from huggingface_hub import HfApi, hf_hub_url
    from kernels import VariantAccepted, get_kernel_variants

    repo, branch = KERNEL
    choices = get_kernel_variants(repo, revision=branch)  # the best one first
    if not choices or not isinstance(choices[0], VariantAccepted):
        raise UserError(f"the hub has no build for PyTorch {torch.__version__} on this machine")
    where = {"revision": branch, "repo_type": "kernel"}
    tree = HfApi().list_repo_tree(repo, f"build/{choices[0].variant.variant_str}", recursive=True, **where)
    return {item.path: hf_hub_url(repo, item.path, **where) for item in tree if hasattr(item, "size")}


def fetch_build(folder, temporary):
    """Bring the build that suits best into `folder`, in place of a damaged one. Raises whatever goes wrong."""
    answer = Future()

    def ask():
        try:
            answer.set_result(list_build())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()  # the library itself may wait for ever
    urls = answer.result(sum(DOWNLOAD_TIMEOUTS))
    for count, (path, url) in enumerate(urls.items(), 1):
        os.makedirs(os.path.dirname(os.path.join(temporary, path)), exist_ok=True)
        print(f"[{count}/{len(urls)}] {path} {download_file(url, os.path.join(temporary, path))}", flush=True)
    build = find_kernel(temporary)
    shutil.rmtree(Path(folder, "build", build.name), ignore_errors=True)
    os.renames(build, Path(folder, "build", build.name))


def fetch_kernel():
    """Bring the build that fits into KERNEL_DIR unless it is there, or say in a sentence why not.

    Fetched like shards: `install_kernel` and `snapshot_download` check no signature either, nor a SHA-256, and write
    to other folders. Of several processes one fetches, the others wait for it.
    """
    folder, temporary = os.path.join(KERNEL_DIR, "flash-attn3"), os.path.join(KERNEL_DIR, "flash-attn3.tmp")
    try:
        os.makedirs(KERNEL_DIR, exist_ok=True)
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # a read-only disk, or one without locks
                fcntl.flock(stack.enter_context(open(f"{folder}.lock", "ab")), fcntl.LOCK_EX)
                shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
            stack.callback(shutil.rmtree, temporary, ignore_errors=True)
            try:
                find_kernel(folder)
            except Exception:  # there is none, or not a whole one
                fetch_build(folder, temporary)
        print(f"the attention kernel is in {folder}", flush=True)
    except Exception as error:
        print(f"the attention kernel could not be fetched ({first_line(error)}): PyTorch's own kernels serve")


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizer
# ----------------------------------------------------------------------------------------------------------------------


def encoding_state(mergeable_ranks):
    """What a tiktoken Encoding with these merges (bytes to rank) is made from, and pickled as."""
    special_tokens = {token: len(mergeable_ranks) + i for i, token in enumerate(SPECIAL_TOKENS)}
    return dict(name="rustbpe", pat_str=SPLIT_PATTERN, mergeable_ranks=mergeable_ranks, special_tokens=special_tokens)


class EncodingUnpickler(pickle.Unpickler):
    """Unpickles the state of an Encoding and nothing else, so that a planted file cannot run code.

    A bare name in place of the state, which tiktoken would look up and perhaps download, is refused with it.
    """

    def find_class(self, module, name):
        if (module, name) != ("tiktoken.core", "Encoding"):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return SimpleNamespace  # takes a dict as its state, and runs none of tiktoken's code


def load_encoding(path):
    """Read tokenizer.pkl. Raises FileNotFoundError or ValueError if it is missing, damaged, or does not fit."""
    try:
        with open(path, "rb") as file:
            state = vars(EncodingUnpickler(file).load())
        ranks = state["mergeable_ranks"]
        if (state == encoding_state(ranks) and sorted(ranks.values()) == list(range(VOCAB_SIZE - len(SPECIAL_TOKENS)))
                and all(bytes([byte]) in ranks for byte in range(256))):
            return tiktoken.Encoding(**state)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no tokenizer at {path}; run `{PREPARE_COMMAND}`") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(f"the tokenizer at {path} cannot be read ({error}); run `{PREPARE_COMMAND}`") from None
    raise UserError(f"the tokenizer at {path} has another vocabulary or pattern than prepare.py asks for;"
                    f" run `{PREPARE_COMMAND}`")


def count_token_bytes(enc):
    """The number of UTF-8 bytes that each token stands for, int32 (vocab,), 0 for special tokens.

    From the raw bytes: half a character would decode to U+FFFD and count as three.
    """
    counts = [len(enc.decode_single_token_bytes(i)) for i in range(enc.n_vocab - len(SPECIAL_TOKENS))]
    return torch.tensor(counts + [0] * len(SPECIAL_TOKENS), dtype=torch.int32)


def get_token_bytes(device="cpu"):
    """The byte table of the cached tokenizer on `device`, int32 (vocab,). Raises FileNotFoundError or ValueError."""
    path = os.path.join(TOKENIZER_DIR, "token_bytes.pt")
    try:
        table = torch.load(path, map_location="cpu", weights_only=True)
        fits = table.dtype == torch.int32 and table.shape == (VOCAB_SIZE,)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no byte table at {path}; run `{PREPARE_COMMAND}`") from None
    except Exception:  # a damaged file can raise anything, in paragraphs
        fits = False
    if not fits:
        raise UserError(f"the byte table at {path} is damaged or not for {VOCAB_SIZE} ids; run `{PREPARE_COMMAND}`")
    return table.to(device)


class Tokenizer:
    """Text to token ids and back, with the tokenizer that `train_tokenizer` made."""

    def __init__(self, enc):
        self.enc = enc
        self.special_ids = {token: enc.encode_single_token(token) for token in SPECIAL_TOKENS}

    @classmethod
    def from_directory(cls, tokenizer_dir=None):
        """Load from `tokenizer_dir`, by default TOKENIZER_DIR. Raises FileNotFoundError or ValueError."""
        return cls(load_encoding(os.path.join(tokenizer_dir or TOKENIZER_DIR, "tokenizer.pkl")))

    def get_vocab_size(self):
        return self.enc.n_vocab

    def get_bos_token_id(self):
        return self.special_ids[BOS_TOKEN]

    def encode(self, text, prepend=None, num_threads=8):
        """Ids of a string, or a list of ids for each string of a list; text that spells a special token stays text.

        `prepend` is a token id or the name of a special token to start with. Other types raise ValueError.
        """
        first = self.special_ids.get(prepend, prepend) if isinstance(prepend, str) else prepend
        if prepend is not None and not (type(first) is int and 0 <= first < self.enc.n_vocab):
            raise UserError(f"prepend is {prepend!r}, but must be a token id or one of {SPECIAL_TOKENS}")
        prefix = [] if prepend is None else [first]
        if isinstance(text, str):
            return prefix + self.enc.encode_ordinary(text)
        if isinstance(text, list) and all(isinstance(item, str) for item in text):
            return [prefix + ids for ids in self.enc.encode_ordinary_batch(text, num_threads=num_threads)]
        raise UserError(f"encode takes a string or a list of strings, not {text!r:.50}")

    def decode(self, ids):
        return self.enc.decode(ids)


def text_iterator(max_chars=1_000_000_000, doc_cap=10_000):
    """Documents of the training shards in name order, cut at `doc_cap` characters, until `max_chars` have been read."""
    num_chars = 0
    for path in split_paths("train"):
        for texts in read_row_groups(path):
            for text in texts:
                yield text[:doc_cap]
                num_chars += len(text[:doc_cap])
                if num_chars >= max_chars:
                    return


def load_tokenizer():
    """The cached Tokenizer, compared with its byte table. Raises FileNotFoundError or ValueError."""
    tokenizer = Tokenizer.from_directory()
    if not torch.equal(get_token_bytes(), count_token_bytes(tokenizer.enc)):
        raise UserError(f"the byte table in {TOKENIZER_DIR} is not this tokenizer's; run `{PREPARE_COMMAND}`")
    return tokenizer


def train_tokenizer():
    """Train BPE on the training shards and save it with its byte table, unless TOKENIZER_DIR holds both already."""
    import rustbpe  # only here: training a model does not need it

    os.makedirs(TOKENIZER_DIR, exist_ok=True)
    sweep_temporaries(TOKENIZER_DIR)
    try:
        load_tokenizer()
        return print(f"the tokenizer is in {TOKENIZER_DIR}", flush=True)
    except FileNotFoundError:
        pass
    except ValueError as error:
        print(f"{str(error).partition(';')[0]}: training it again", flush=True)

    start, num_ids = time.monotonic(), VOCAB_SIZE - len(SPECIAL_TOKENS)
    if num_ids < 256:
        raise UserError(f"VOCAB_SIZE = {VOCAB_SIZE} cannot hold 256 bytes and {len(SPECIAL_TOKENS)} special tokens")
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(text_iterator(), num_ids, pattern=SPLIT_PATTERN)
    mergeable_ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    if len(mergeable_ranks) < num_ids:
        raise UserError(f"the training shards hold too little text: BPE found {len(mergeable_ranks):,} ids, but"
                        f" VOCAB_SIZE asks for {num_ids:,}; use more text or a smaller vocabulary")
    enc = tiktoken.Encoding(**encoding_state(mergeable_ranks))
    sample = "Hello, world! It's 2026: naïve café, 你好, Привет, مرحبا, 🙂 <|reserved_0|>\n\n\tend"
    if enc.decode(enc.encode_ordinary(sample)) != sample:
        raise UserError("the tokenizer does not give back the text that it encoded; SPLIT_PATTERN must match any text")
    with atomic_write(os.path.join(TOKENIZER_DIR, "tokenizer.pkl")) as file:
        pickle.dump(enc, file)
    with atomic_write(os.path.join(TOKENIZER_DIR, "token_bytes.pt")) as file:
        torch.save(count_token_bytes(enc), file)
    text = "".join(text_iterator(max_chars=1_000_000))
    bytes_per_token = len(text.encode()) / len(enc.encode_ordinary(text))
    print(f"tokenizer: {enc.n_vocab:,} ids in {time.monotonic() - start:.1f} s, {bytes_per_token:.2f} bytes per token",
          flush=True)


def check_data():
    """Raise FileNotFoundError or ValueError unless tokenizer, byte table and shards of both splits can be read.

    train.py calls it before anything expensive.
    """
    load_tokenizer()
    for path in split_paths("train"):
        check_shard(path)
    for path in split_paths("val"):  # all of it: damage inside would show only after the training
        deque(read_row_groups(path), maxlen=0)


# ----------------------------------------------------------------------------------------------------------------------
# Data loader
# ----------------------------------------------------------------------------------------------------------------------


def read_chunks(paths):
    """Endless (documents, epoch): the row groups of all `paths` in turn, for ever, in chunks of CHUNK_DOCS strings."""
    for epoch in itertools.count(1):
        for path in paths:
            for texts in read_row_groups(path):
                for start in range(0, len(texts), CHUNK_DOCS):
                    yield texts[start:start + CHUNK_DOCS], epoch


def encode_chunks(tokenizer, paths):
    """Endless (documents as arrays of ids, epoch) in the order of `read_chunks`; threads encode some chunks ahead."""
    bos = np.array([tokenizer.get_bos_token_id()], dtype=np.uint32)

    def encode(texts):  # without the interpreter's lock; Parquet holds no lone surrogates, which this could not take
        try:
            return [np.concatenate([bos, tokenizer.enc.encode_to_numpy(text, disallowed_special=())]) for text in texts]
        except ValueError as error:  # a million blanks in a row, for instance
            raise UserError(f"one of the documents is too much for the tokenizer ({error})") from None

    pool, pending = ThreadPoolExecutor(ENCODE_THREADS), deque()
    try:
        for texts, epoch in read_chunks(paths):
            pending.append((pool.submit(encode, texts), epoch))
            if len(pending) > 2 * ENCODE_THREADS:
                future, epoch = pending.popleft()
                yield future.result(), epoch
    finally:
        pool.shutdown(cancel_futures=True)


def take_best_fit(docs, room):
    """Remove and return the longest document of at most `room` tokens, else the shortest one.

    `docs` is sorted by length, equal lengths in order of arrival; of equals the first goes.
    """
    end = bisect_right(docs, room, key=len)
    return docs.pop(bisect_left(docs, len(docs[end - 1]), key=len) if end else 0)


def pack_rows(chunks, T, buffer_size):
    """Endless (row, epoch): T + 1 ids as int64 without padding, and the epoch of the last chunk in the buffer by then.

    A document that fits whole is never cut. Where none fits, the shortest one is, and its rest is dropped: with
    ordinary web text that costs about a third of the tokens.
    """
    docs = []
    while True:
        row, filled = np.empty(T + 1, dtype=np.int64), 0
        while filled <= T:
            while len(docs) < buffer_size:
                chunk, epoch = next(chunks)
                for doc in chunk:
                    insort(docs, doc, key=len)
            doc = take_best_fit(docs, T + 1 - filled)[:T + 1 - filled]
            row[filled:filled + len(doc)] = doc
            filled += len(doc)
        yield row, epoch


def stream_batches(tokenizer, B, T, paths, buffer_size):
    """What `make_dataloader` yields from the shards `paths`, but with a list of the epochs of all B rows.

    A background thread packs BATCHES_AHEAD batches. Each has staging memory of its own: PyTorch's allocator for pinned
    memory reuses it only after the copies that read it, so no batch changes under a copy that is still in flight.
    """
    use_cuda = torch.cuda.is_available()
    ready, stop = queue.Queue(BATCHES_AHEAD), threading.Event()

    def put(item):
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                return ready.put(item, timeout=0.1)

    def produce():
        try:
            rows = pack_rows(encode_chunks(tokenizer, paths), T, buffer_size)
            while not stop.is_set():
                staging, epochs = torch.empty((2, B, T), dtype=torch.int64, pin_memory=use_cuda), []
                inputs, targets = staging.numpy()
                for i in range(B):
                    if stop.is_set():
                        return
                    row, epoch = next(rows)
                    inputs[i], targets[i] = row[:-1], row[1:]
                    epochs.append(epoch)
                put((staging, epochs))
        except BaseException as error:  # it must reach the training process, whatever it is
            put(error)

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    try:
        while True:
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            staging, epochs = item
            inputs, targets = staging.to("cuda", non_blocking=True) if use_cuda else staging  # (B, T) each
            yield inputs, targets, epochs
    finally:
        stop.set()
        thread.join()


def make_dataloader(tokenizer, B, T, split, buffer_size=1000):
    """Endless generator of (inputs, targets, epoch), int64 (B, T) each, on the GPU if there is one.

    The stream is defined exactly (see `read_chunks` and `pack_rows`). Every row starts with BOS, and about a third of
    ordinary text is dropped. Closing the generator ends its threads; an error in them is raised here.
    """
    stream = stream_batches(tokenizer, B, T, split_paths(split), buffer_size)
    return ((inputs, targets, epochs[-1]) for inputs, targets, epochs in stream)


# ----------------------------------------------------------------------------------------------------------------------
# The metric
# ----------------------------------------------------------------------------------------------------------------------


def call_model(model, inputs, vocab_size):
    """Logits (B, T, vocab) of `model(inputs)`. Raises ValueError if they are not what the metric needs."""
    logits = model(inputs)
    expected = (*inputs.shape, vocab_size)
    if not isinstance(logits, torch.Tensor) or logits.shape != expected or not logits.is_floating_point():
        found = (tuple(logits.shape), logits.dtype) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise UserError(f"model(x) returned {found}, but must return floating-point logits of shape {expected}")
    return logits


def check_causal(model, inputs, vocab_size):
    """Raise ValueError if logits depend on later tokens, or differ between two identical calls.

    Every token from a cut on is replaced. Nothing before it may move by more than 1 % of the mean move after it,
    neither logits nor log-probabilities, for in what softmax ignores a leak could hide. Three cuts are odd and so fall
    inside any block of even size; one is even. Last, the rows get cuts of their own, T // 2, T // 2 + 1 and so on, and
    only the places before these are compared: that finds models that look ahead from every n-th place, n up to B.
    """
    def outputs(x, places):  # (2, ..., vocab): logits and log-probabilities
        logits = call_model(model, x, vocab_size)[places].float()
        return torch.stack([logits, logits.log_softmax(-1).clamp_min(-30)])

    def moves(x, places, old):  # equal infinities have not moved
        new = outputs(x, places)
        return torch.where(new == old, 0.0, new - old).abs()

    def check(moved, allowed):
        if moved.isnan().any():
            raise UserError("the model's logits are not finite everywhere")
        if not (moved <= allowed).all():
            raise UserError(f"the model is not causal: when only later tokens change, logits move by {moved[0]:.3g}"
                            f" ({allowed[0]:.3g} is allowed), log-probabilities by {moved[1]:.3g} ({allowed[1]:.3g} is"
                            " allowed); a model that sees its targets scores itself")

    B, T = inputs.shape
    first_rows, others = slice(2), (inputs + 1) % vocab_size
    old = outputs(inputs, first_rows)
    drift = moves(inputs, first_rows, old).amax((1, 2, 3))
    for cut in (T // 2 + 1 | 1, T // 4 | 1, T - 2 | 1, T // 3 & ~1):
        moved = moves(torch.cat([inputs[:, :cut], others[:, cut:]], dim=1), first_rows, old)
        after = moved[:, :, cut:]
        allowed = 0.01 * torch.where(after.isfinite(), after, 0.0).mean((1, 2, 3))
        if not (drift <= allowed).all():  # nor is nan
            raise UserError(f"the model's logits differ by {drift[0]:.3g} between two identical calls, or are not"
                            " finite; it must be deterministic in evaluation")
        check(moved[:, :, :cut].amax((1, 2, 3)), allowed)

    rows = torch.arange(B, device=inputs.device)
    cuts = T // 2 + rows % (T // 2)
    changed = torch.where(torch.arange(T, device=inputs.device) < cuts[:, None], inputs, others)
    before = (rows, cuts - 1)
    check(moves(changed, before, outputs(inputs, before)).amax((1, 2)), allowed)


def score(logits, targets, token_bytes):
    """Summed cross-entropy in nats (float64) and summed bytes of the targets that stand for bytes, both 0-D."""
    nats = torch.zeros((), dtype=torch.float64, device=logits.device)
    rows = max(1, SCORE_CHUNK // logits[0].numel())
    for piece, goal in zip(logits.split(rows), targets.split(rows), strict=True):
        loss = F.cross_entropy(piece.flatten(0, 1).float(), goal.flatten(), reduction="none").view_as(goal)
        nats += torch.where(token_bytes[goal] > 0, loss, 0.0).sum(dtype=torch.float64)  # drops an infinite loss as well
    return nats, token_bytes[targets].sum()


@torch.no_grad()
def evaluate_bpb(model, tokenizer, batch_size):
    """Bits per byte of `model` on the validation stream: the number that experiments are compared by, lower is better.

    `model(x)` maps ids (B, T) to logits (B, T, vocab) and never sees the targets. The first EVAL_TOKENS tokens are
    scored whatever the batch size; special tokens count neither as loss nor as bytes. Raises ValueError if the model is
    not causal, the score is not finite, or the validation shard is too short.
    """
    rows_left, vocab_size = EVAL_TOKENS // MAX_SEQ_LEN, tokenizer.get_vocab_size()
    nats, num_bytes, token_bytes = 0.0, 0, None
    was_training = model.training
    model.eval()
    try:
        stream = stream_batches(tokenizer, batch_size, MAX_SEQ_LEN, split_paths("val"), buffer_size=1000)
        with contextlib.closing(stream):
            for inputs, targets, epochs in stream:
                if token_bytes is None:
                    token_bytes = count_token_bytes(tokenizer.enc).to(inputs.device)
                    check_causal(model, inputs, vocab_size)
                rows = min(batch_size, rows_left)
                if epochs[rows - 1] > 1:
                    raise UserError(f"{VAL_FILENAME} is too short for EVAL_TOKENS = {EVAL_TOKENS:,}: it ran out")
                # no name for the logits: it would keep them alive through the next forward
                sums = score(call_model(model, inputs, vocab_size)[:rows], targets[:rows], token_bytes)
                nats, num_bytes = nats + sums[0], num_bytes + sums[1]
                rows_left -= rows
                if rows_left == 0:
                    break
    finally:
        model.train(was_training)
    bpb = float(nats / num_bytes) / math.log(2)
    if not math.isfinite(bpb):
        raise UserError(f"val_bpb is {bpb}: the model's logits are not finite everywhere, or the rows hold no text")
    return bpb


# ----------------------------------------------------------------------------------------------------------------------
# Command line
# ----------------------------------------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description="Fetch the text and train the tokenizer, once for all experiments.")
    parser.add_argument("--num-shards", type=int, default=10,
                        help="training shards to fetch, -1 for all (default %(default)s)")
    parser.add_argument("--download-workers", type=int, default=8, help="downloads at a time (default %(default)s)")
    parser.add_argument("--toy", action="store_true", help="a tiny corpus without network, for machines without a GPU")
    args = parser.parse_args()
    if args.num_shards == 0 or args.num_shards < -1:
        parser.error(f"--num-shards is {args.num_shards}, but must be 1 or more, or -1 for all {MAX_SHARD}")
    if args.download_workers < 1:
        parser.error(f"--download-workers is {args.download_workers}, but must be 1 or more")
    try:
        if args.toy:
            use_toy_scale()
            write_toy_shards()
        else:
            download_data(args.num_shards, args.download_workers)
        train_tokenizer()
        if not args.toy:
            fetch_kernel()
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
    print("Done! Ready to train.")


if __name__ == "__main__":
    main()
