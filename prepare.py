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

if __name__ == "__main__":  # Ctrl-C ends the script at once, even in the imports; only whole files have final names
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
os.environ |= {"HF_HUB_DISABLE_IMPLICIT_TOKEN": "1", "HF_HUB_VERBOSITY": "error"}  # an expired login would be refused

import argparse
import contextlib
import copy
import fcntl
import hashlib
import itertools
import math
import pickle
import random
import re
import shutil
import struct
import time
from bisect import bisect_left, bisect_right, insort
from collections import deque
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.pool import ThreadPool
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
UNTIMED_STEPS = 11          # the first steps of a run also compile: they train, but are not charged to the budget
EVAL_TOKENS = 40 * 524288   # tokens that a score is taken over

CACHE_DIR = os.path.join(os.path.expanduser("~"), ".cache", "autoresearch")
DATA_DIR = os.path.join(CACHE_DIR, "data")
TOKENIZER_DIR = os.path.join(CACHE_DIR, "tokenizer")
PREPARE_COMMAND = "uv run prepare.py"  # what error messages tell the user to run

BASE_URL = "https://huggingface.co/datasets/karpathy/climbmix-400b-shuffle/resolve/main"
MAX_SHARD = VAL_SHARD = 6542      # the last shard; all before it are for training
VAL_FILENAME = f"shard_{VAL_SHARD:05d}.parquet"
DOWNLOAD_TIMEOUTS = (10, 30)      # seconds to connect, seconds between two pieces of the body
DOWNLOAD_WAITS = (2, 4, 8, 16)    # seconds between the attempts
MAX_RETRY_AFTER = 60              # seconds that a server may ask us to wait
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
ENCODE_THREADS = min(8, os.cpu_count() or 1)  # more threads than cores slow each other down
BATCHES_AHEAD = 4       # batches packed before the GPU asks for them
SCORE_CHUNK = 2**27     # logits scored at a time: bounds the memory of the metric
PEAK_FLOPS = {          # dense bf16 FLOPs per second, from data sheets; the first key in the device's name counts
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989.5e12, "H200 NVL": 835e12, "H200": 989.5e12, "GH200": 989.5e12,
    "H800": 989.5e12, "B200": 2250e12, "GB200": 2500e12, "A100": 312e12, "A800": 312e12, "A40": 149.7e12, "A10": 125e12,
    "L40S": 362e12, "L40": 181e12, "L4": 121e12, "RTX 3090": 71e12, "RTX 4090": 165.2e12, "RTX 5090": 209.5e12,
}


def use_toy_scale():
    """Set the constants to a size that two CPU cores train in about a minute. Scores at this scale mean nothing."""
    global MAX_SEQ_LEN, TIME_BUDGET, EVAL_TOKENS, VOCAB_SIZE, CACHE_DIR, DATA_DIR, TOKENIZER_DIR, PREPARE_COMMAND
    MAX_SEQ_LEN, TIME_BUDGET, EVAL_TOKENS, VOCAB_SIZE = 256, 20, 256 * 256, 1024
    CACHE_DIR = os.path.join(os.path.expanduser("~"), ".cache", "autoresearch", "toy")
    DATA_DIR, TOKENIZER_DIR = os.path.join(CACHE_DIR, "data"), os.path.join(CACHE_DIR, "tokenizer")
    PREPARE_COMMAND = "uv run prepare.py --toy"


class UserError(ValueError):
    """A mistake that one sentence explains. Scripts end with that sentence, and not with a traceback."""

    def __init__(self, sentence):
        super().__init__(" ".join(sentence.splitlines()))  # one line, even where it quotes an error of several


def first_line(error):
    """The first line of an error, for a log, with the error's type unless it is a UserError."""
    line = next(iter(str(error).strip().splitlines()), "")
    return line if isinstance(error, UserError) else f"{type(error).__name__}: {line[:200]}".removesuffix(": ")


@contextlib.contextmanager
def mistakes_as_sentences(mistake=UserError):
    """End the script with one sentence on a `mistake`, an OSError or full GPU memory; bugs keep their traceback."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise SystemExit(f"GPU memory ran out; lower DEVICE_BATCH_SIZE or undo what takes more ({error})") from None
    except (OSError, mistake) as error:
        raise SystemExit(str(error)) from None


@contextlib.contextmanager
def reading(what):
    """Turn any error in reading `what`, a part of the cache, into a FileNotFoundError or ValueError with a way out."""
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {what}; run `{PREPARE_COMMAND}`") from None
    except Exception as error:  # a damaged file can raise anything
        raise UserError(f"{what} cannot be used ({first_line(error)}); remove it and run `{PREPARE_COMMAND}`") from None


# ----------------------------------------------------------------------------------------------------------------------
# Shards, from the hub or at toy scale from Python's own sources: files in the cache that are whole, or not there
# ----------------------------------------------------------------------------------------------------------------------


def list_parquet_files():
    """Paths of all shards in DATA_DIR in name order; files with other names are not shards."""
    return [str(path) for path in sorted(Path(DATA_DIR).glob("shard_" + 5 * "[0-9]" + ".parquet"))]


def split_paths(split):
    """Paths of the shards of `split` ("train" or "val"). Raises ValueError, or FileNotFoundError if there are none."""
    if split not in ("train", "val"):
        raise UserError(f'split is {split!r}, but must be "train" or "val"')
    paths = [path for path in list_parquet_files() if path.endswith(VAL_FILENAME) == (split == "val")]
    if not paths:
        wanted = "training shard" if split == "train" else f"validation shard {VAL_FILENAME}"
        raise FileNotFoundError(f"there is no {wanted} in {DATA_DIR}; run `{PREPARE_COMMAND}`")
    return paths


@contextlib.contextmanager
def open_shard(path):
    """Open a ParquetFile that has rows and a column `text` of strings. Raises FileNotFoundError or ValueError."""
    with reading(path), pq.ParquetFile(path) as shard:
        kinds = [field.type for field in shard.schema_arrow if field.name == "text"]
        if len(kinds) != 1 or not (pa.types.is_string(kinds[0]) or pa.types.is_large_string(kinds[0])):
            raise UserError("it has no column `text` of strings")
        num_rows = sum(shard.metadata.row_group(i).num_rows for i in range(shard.num_row_groups))
        if num_rows == 0 or num_rows != shard.metadata.num_rows:
            raise UserError(f"its row groups hold {num_rows} of {shard.metadata.num_rows} rows")
        yield shard


def read_row_groups(path):
    """Yield the documents of a shard, one list of strings per row group; a null is an empty document."""
    with open_shard(path) as shard:
        for i in range(shard.num_row_groups):
            texts = shard.read_row_group(i, columns=["text"]).column("text").to_pylist()
            if len(texts) != shard.metadata.row_group(i).num_rows:  # a zeroed page can read as an empty one
                raise UserError(f"rows are missing in row group {i}")
            yield [text or "" for text in texts]


def sweep_temporaries(folder):
    """Create `folder` if need be, and remove the temporary files in it that nobody locks: their writers were killed."""
    os.makedirs(folder, exist_ok=True)
    for name in os.listdir(folder):
        if re.search(r"\.(parquet|pkl|pt)\.[0-9a-f]{8}\.tmp$", name):
            with contextlib.suppress(OSError), open(os.path.join(folder, name), "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.remove(file.name)


@contextlib.contextmanager
def atomic_write(path):
    """Open a binary file under a temporary name: it is renamed to `path` at the end, or removed on an error."""
    temporary = ""
    try:
        while not os.path.exists(temporary):  # another process may sweep the file before we lock it; then we try again
            temporary = f"{path}.{os.urandom(4).hex()}.tmp"
            file = open(temporary, "xb")
            with contextlib.suppress(OSError):  # on a file system without locks, nobody sweeps
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


def missing_shards(names):
    """Sweep DATA_DIR, and return those of `names` that are not good shards in it."""
    if not os.path.isabs(DATA_DIR):  # "~" stays as it is where there is no home
        raise UserError("there is no home directory to keep the cache in; set HOME to one")
    sweep_temporaries(DATA_DIR)
    missing = []
    for name in names:
        try:
            with open_shard(os.path.join(DATA_DIR, name)):
                pass
        except (FileNotFoundError, ValueError):
            missing.append(name)
    return missing


def fetch_once(url, path):
    """Fetch `url`, verify it and put it at `path`. Returns size and speed as text."""
    start = time.monotonic()
    with requests.get(url, stream=True, timeout=DOWNLOAD_TIMEOUTS, headers={"Accept-Encoding": "identity"}) as response:
        response.raise_for_status()
        if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
            raise UserError(f"the body has content encoding {encoding!r}, but identity was asked for")
        etags = [reply.headers.get("X-Linked-ETag", "") for reply in (*response.history, response)]
        etags = [etag.removeprefix("W/").strip('"').lower() for etag in etags]
        announced = [etag for etag in etags if re.fullmatch(r"[0-9a-f]{64}", etag)]
        with atomic_write(path) as file:
            digest = hashlib.sha256()
            for piece in response.iter_content(2**20):  # urllib3 raises if fewer bytes come than announced
                file.write(piece)
                digest.update(piece)
            file.flush()
            size = file.tell()
            if announced and digest.hexdigest() != announced[0]:
                raise UserError(f"the SHA-256 is {digest.hexdigest()}, but the server announced {announced[0]}")
            if path.endswith(".parquet"):
                with open_shard(file.name):
                    pass
    return f"{size / 1e6:.1f} MB, {size / 1e6 / (time.monotonic() - start):.1f} MB/s"


def download_file(url, path):
    """`fetch_once`, again after each of DOWNLOAD_WAITS while it fails. Raises what made the last attempt fail."""
    for wait in (*DOWNLOAD_WAITS, None):
        try:
            return fetch_once(url, path)
        except (requests.RequestException, ValueError) as error:  # any other OSError is the disk's
            response = getattr(error, "response", None)
            status = getattr(response, "status_code", 0)
            asked = getattr(response, "headers", {}).get("Retry-After", "")
            if wait is None or (400 <= status < 500 and status not in (408, 425, 429)):  # those are worth another try
                raise
            if asked.isdecimal():
                wait = max(wait, min(int(asked), MAX_RETRY_AFTER))
            reason = str(error).partition("; remove")[0]
            print(f"{os.path.basename(path)}: {reason}; trying again in {wait} s", flush=True)
            time.sleep(wait)


def download_data(num_shards, download_workers):
    """Bring the first `num_shards` training shards (-1: all) and the validation shard into DATA_DIR.

    Other shards there are checked as well, and fetched again if bad. Raises ValueError that names those that failed.
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
                result = future.result()
            except (OSError, ValueError) as error:  # the other shards are still fetched
                failed.append(futures[future])
                result = f"FAILED: {error}".partition("; remove")[0]
            print(f"[{count}/{len(missing)}] {futures[future]} {result}", flush=True)
    if failed:
        raise UserError(f"{len(failed)} of {len(names)} shards could not be fetched: {', '.join(sorted(failed))};"
                        f" run `{PREPARE_COMMAND}` again, it keeps what is there")


def write_toy_shards():
    """Pack standard library sources into two training shards and a validation shard, which gets every third file."""
    names = ["shard_00000.parquet", "shard_00001.parquet", VAL_FILENAME]
    if not missing_shards(names):
        return
    root = Path(os.__file__).parent
    skipped = {"site-packages", "dist-packages", "test", "tests"}
    train, val = [], []
    for i, path in enumerate(sorted(root.rglob("*.py"))):
        if not skipped & set(path.relative_to(root).parts):
            text = path.read_text(encoding="utf-8", errors="replace")
            (train if i % 3 else val).extend(re.findall(r"(?s).{1500}[^\n]*\n?|.+", text))  # cut at ends of lines
    for documents in (train, val):
        random.Random(0).shuffle(documents)  # in file order a short run would see only the start of the alphabet
    for name, documents in zip(names, (train[::2], train[1::2], val), strict=True):
        with atomic_write(os.path.join(DATA_DIR, name)) as file:
            pq.write_table(pa.table({"text": documents}), file, compression="zstd", row_group_size=1024)
        print(f"{name}: {len(documents):,} documents", flush=True)


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizer
# ----------------------------------------------------------------------------------------------------------------------


def encoding_state(mergeable_ranks):
    """What a tiktoken Encoding with these merges (bytes to rank) is made from, and pickled as."""
    special_tokens = {token: len(mergeable_ranks) + i for i, token in enumerate(SPECIAL_TOKENS)}
    return dict(name="rustbpe", pat_str=SPLIT_PATTERN, mergeable_ranks=mergeable_ranks, special_tokens=special_tokens)


class EncodingUnpickler(pickle.Unpickler):
    """Unpickles the state of an Encoding and nothing else, so that a planted file cannot run code."""

    def find_class(self, module, name):
        if (module, name) != ("tiktoken.core", "Encoding"):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return SimpleNamespace  # a real Encoding, restored from a bare name, could download


def count_token_bytes(enc):
    """The number of UTF-8 bytes that each token stands for, int32 (vocab,), 0 for special tokens."""
    # raw bytes of the token: half a character would decode to U+FFFD, a character of three bytes
    counts = [len(enc.decode_single_token_bytes(i)) for i in range(enc.n_vocab - len(SPECIAL_TOKENS))]
    return torch.tensor(counts + [0] * len(SPECIAL_TOKENS), dtype=torch.int32)


class Tokenizer:
    """Text to token ids and back, with the tokenizer that `train_tokenizer` made."""

    def __init__(self, enc):
        self.enc = enc
        self.special_ids = {token: enc.encode_single_token(token) for token in SPECIAL_TOKENS}

    @classmethod
    def from_directory(cls, tokenizer_dir=None):
        """Load from `tokenizer_dir`, by default TOKENIZER_DIR. Raises FileNotFoundError or ValueError."""
        path = os.path.join(tokenizer_dir or TOKENIZER_DIR, "tokenizer.pkl")
        with reading(path), open(path, "rb") as file:
            state = vars(EncodingUnpickler(file).load())
            ranks = state["mergeable_ranks"]
            if (state != encoding_state(ranks) or not all(bytes([byte]) in ranks for byte in range(256))
                    or sorted(ranks.values()) != list(range(VOCAB_SIZE - len(SPECIAL_TOKENS)))):
                raise UserError("it has another vocabulary or pattern than prepare.py asks for")
            return cls(tiktoken.Encoding(**state))

    def get_vocab_size(self):
        return self.enc.n_vocab

    def get_bos_token_id(self):
        return self.special_ids[BOS_TOKEN]

    def encode(self, text, prepend=None, num_threads=8):
        """Ids of a string, or of each string of a list; before them `prepend`, a token id or a special token's name."""
        first = self.special_ids.get(prepend) if isinstance(prepend, str) else prepend
        if prepend is not None and not (type(first) is int and 0 <= first < self.enc.n_vocab):
            raise UserError(f"prepend is {prepend!r}, but must be a token id or one of {SPECIAL_TOKENS}")
        prefix = [] if prepend is None else [first]
        if isinstance(text, str):
            return prefix + self.enc.encode_ordinary(text)  # text that spells a special token never becomes one
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


def get_token_bytes(device="cpu", tokenizer=None):
    """The byte table of the cached tokenizer on `device`, int32 (vocab,). Raises FileNotFoundError or ValueError."""
    tokenizer = tokenizer or Tokenizer.from_directory()
    path = os.path.join(TOKENIZER_DIR, "token_bytes.pt")
    with reading(path):
        table = torch.load(path, map_location="cpu", weights_only=True)
        if table.dtype != torch.int32 or not torch.equal(table, count_token_bytes(tokenizer.enc)):
            raise UserError("it is not the byte table of this tokenizer")
    return table.to(device)


def train_tokenizer():
    """Train BPE on the training shards and save it with its byte table, unless TOKENIZER_DIR holds both already."""
    import rustbpe  # here, since training a model does not need it
    sweep_temporaries(TOKENIZER_DIR)
    try:
        get_token_bytes()
        print(f"the tokenizer is in {TOKENIZER_DIR}", flush=True)
        return
    except FileNotFoundError:
        pass
    except ValueError as error:
        print(f"{str(error).partition('; remove')[0]}: training it again", flush=True)

    start = time.monotonic()
    num_ids = VOCAB_SIZE - len(SPECIAL_TOKENS)
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
    ratio = len(text.encode()) / len(enc.encode_ordinary(text))
    print(f"tokenizer: {enc.n_vocab:,} ids in {time.monotonic() - start:.1f} s, {ratio:.2f} bytes a token", flush=True)


def check_data():
    """The cached Tokenizer. Raises FileNotFoundError or ValueError unless all is there that a run needs."""
    if torch.cuda.is_available() and not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise UserError("there is no C compiler, which torch.compile needs for Triton; install gcc, or name one in CC")
    tokenizer = Tokenizer.from_directory()
    get_token_bytes(tokenizer=tokenizer)  # compares the byte table with the tokenizer
    for path in split_paths("train"):
        with open_shard(path):
            pass
    for path in split_paths("val"):  # all of it: damage inside would show only after the training
        for _ in read_row_groups(path):
            pass
    return tokenizer


# ----------------------------------------------------------------------------------------------------------------------
# Data loader
# ----------------------------------------------------------------------------------------------------------------------


def run_ahead(function, arguments, num_threads, count):
    """Yield function(*args) for endless `arguments` in order. Until it is closed, threads compute `count` ahead."""
    pool, pending = ThreadPoolExecutor(num_threads), deque()
    try:
        for args in arguments:
            pending.append(pool.submit(function, *args))
            if len(pending) > count:
                yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def read_chunks(paths):
    """Endless (documents, epoch): the row groups of all `paths` in turn, for ever, in chunks of CHUNK_DOCS strings."""
    for epoch in itertools.count(1):
        for path in paths:
            for texts in read_row_groups(path):
                for start in range(0, len(texts), CHUNK_DOCS):
                    yield texts[start:start + CHUNK_DOCS], epoch


def encode_chunks(tokenizer, paths):
    """Endless (documents as arrays of ids, epoch) in the order of `read_chunks`."""
    bos = np.array([tokenizer.get_bos_token_id()], dtype=np.uint32)

    def encode(texts, epoch):  # encode_to_numpy frees the GIL; it fails on lone surrogates, which Parquet cannot hold
        try:
            docs = [tokenizer.enc.encode_to_numpy(text, disallowed_special=()) for text in texts]
        except ValueError as error:  # a million blanks in a row, for instance
            raise UserError(f"one of the documents is too much for the tokenizer ({error})") from None
        return [np.concatenate([bos, doc]) for doc in docs], epoch

    return run_ahead(encode, read_chunks(paths), ENCODE_THREADS, 2 * ENCODE_THREADS)


def take_best_fit(docs, room):
    """Remove and return the longest document of at most `room` tokens, else the shortest one; of equals the first.

    `docs` is sorted by length, equal lengths in order of arrival.
    """
    end = bisect_right(docs, room, key=len)
    return docs.pop(bisect_left(docs, len(docs[end - 1]), key=len) if end else 0)


def pack_rows(chunks, T, buffer_size):
    """Endless (row, epoch): T + 1 ids as int64 without padding, and the epoch of the last chunk in the buffer by then.

    Where no document fits whole, the shortest is cut and its rest dropped; that loses about a third of ordinary text.
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
    """What `make_dataloader` yields from the shards `paths`, but with a list of the epochs of all B rows."""
    use_cuda = torch.cuda.is_available()
    rows = pack_rows(encode_chunks(tokenizer, paths), T, buffer_size)

    def pack():
        # PyTorch reuses pinned memory only after the copies that read it: no batch changes under a copy in flight
        staging, epochs = torch.empty((2, B, T), dtype=torch.int64, pin_memory=use_cuda), []
        inputs, targets = staging.numpy()
        for i in range(B):
            row, epoch = next(rows)
            inputs[i], targets[i] = row[:-1], row[1:]
            epochs.append(epoch)
        return staging, epochs

    for staging, epochs in run_ahead(pack, itertools.repeat(()), 1, BATCHES_AHEAD):
        inputs, targets = staging.to("cuda", non_blocking=True) if use_cuda else staging  # (B, T) each
        yield inputs, targets, epochs


def make_dataloader(tokenizer, B, T, split, buffer_size=1000):
    """Endless generator of (inputs, targets, epoch), int64 (B, T) each, on the GPU if there is one.

    `read_chunks` and `pack_rows` define the order. Closing the generator ends its threads.
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

    From a cut on, tokens are replaced. What stands before the cut may move by 1 % of the mean move after it. A look one
    token ahead shows only right before a cut: so cuts are odd and even, and B rows are cut at B places in succession.
    """
    def outputs(x, places):  # (2, ..., vocab): logits and log-probabilities; a leak may show in one of them only
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
        if not (drift <= allowed).all():  # nan fails this, too
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
        nats += torch.where(token_bytes[goal] > 0, loss, 0.0).sum(dtype=torch.float64)  # inf * 0 would be nan
    return nats, token_bytes[targets].sum()


@torch.no_grad()
def evaluate_bpb(model, tokenizer, batch_size):
    """Bits per byte of `model` on the validation stream: the number that experiments are compared by, lower is better.

    `model(x)` maps ids (B, T) to logits (B, T, vocab). The first EVAL_TOKENS tokens are scored whatever the batch size,
    special ones aside. Raises ValueError if the model is not causal, or the validation shard is too short.
    """
    rows_left, vocab_size = EVAL_TOKENS // MAX_SEQ_LEN, tokenizer.get_vocab_size()
    nats, num_bytes, token_bytes = 0.0, 0, None
    stream = stream_batches(tokenizer, batch_size, MAX_SEQ_LEN, split_paths("val"), buffer_size=1000)
    was_training = model.training
    model.eval()
    try:
        with contextlib.closing(stream):
            while rows_left > 0:
                inputs, targets, epochs = next(stream)
                if token_bytes is None:
                    token_bytes = count_token_bytes(tokenizer.enc).to(inputs.device)
                    check_causal(model, inputs, vocab_size)
                rows = min(batch_size, rows_left)
                if epochs[rows - 1] > 1:
                    raise UserError(f"{VAL_FILENAME} is too short for EVAL_TOKENS = {EVAL_TOKENS:,}: it ran out")
                # the logits get no name, which would keep them in memory through the next forward
                sums = score(call_model(model, inputs, vocab_size)[:rows], targets[:rows], token_bytes)
                nats, num_bytes = nats + sums[0], num_bytes + sums[1]
                rows_left -= rows
    finally:
        model.train(was_training)
    bpb = float(nats / num_bytes) / math.log(2)
    if not math.isfinite(bpb):
        raise UserError(f"val_bpb is {bpb}: the model's logits are not finite everywhere, or the rows hold no text")
    return bpb


# ----------------------------------------------------------------------------------------------------------------------
# The machine: its GPU, the attention kernel that fits it, the check of fast paths, and the command line
# ----------------------------------------------------------------------------------------------------------------------


def get_peak_flops(device):
    """Peak bf16 FLOPs per second of `device`, or nan if they are not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for key, flops in PEAK_FLOPS.items() if re.search(rf"\b{key}\b(?! Laptop| D)", name)), math.nan)


def explain_missing_gpu():
    """Why PyTorch finds no CUDA GPU, in a clause. Raises ValueError if this machine seems to have lost its GPU."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "CUDA_VISIBLE_DEVICES is set to nothing"
    reason = "no CUDA GPU was found"
    try:
        torch.cuda.init()
    except Exception as error:
        reason += f" ({first_line(error)})"
    if torch.version.cuda is None:
        reason = "this PyTorch is built without CUDA; `uv sync` installs the one that is locked"
    elif "too old" in reason:
        reason = (f"the NVIDIA driver is too old for CUDA {torch.version.cuda}; CUDA 13 needs 580 or newer, and"
                  " `uv lock --upgrade-package torch==2.9.1` brings CUDA 12.8")
    if os.path.exists(os.path.join(TOKENIZER_DIR, "tokenizer.pkl")):
        raise UserError(f"{reason}. The full-scale data is prepared here: see nvidia-smi, or set CUDA_VISIBLE_DEVICES"
                        " to nothing to run the toy scale on the CPU")
    return reason


def find_kernel(folder):
    """The path of the build in `folder` for this PyTorch. Raises FileNotFoundError, or ValueError if it is damaged."""
    from kernels.resolver import resolve_local_kernel  # here, since loading this library takes half a second
    with reading(f"kernel for this PyTorch in {folder}"):
        build = resolve_local_kernel(folder, backend=None)
        if digest := build.metadata.digest:  # official builds have one, over all files
            digest.validate(digest.hash_variant(digest.algorithm, build.variant_path))
        for path in build.variant_path.rglob("*.so"):  # loading a library that is cut would kill the process
            with open(path, "rb") as file:  # its ELF header tells where the table of sections is, which ends the file
                start, entry_size, entries = struct.unpack("<40xQ10xHH2x", file.read(64))
            if path.stat().st_size < start + entry_size * entries:
                raise UserError(f"{path} is cut")
        return build.variant_path


def load_kernel():
    """Import the kernel in the cache. Raises FileNotFoundError if there is none; a bad one can raise anything."""
    from kernels import get_local_kernel  # asks the network for nothing where HF_HUB_OFFLINE is set
    return get_local_kernel(find_kernel(Path(KERNEL_DIR, "flash-attn3")))


def list_build():
    """The files of the hub's best build for this PyTorch, CUDA and platform, as {path in the repository: URL}."""
    from huggingface_hub import HfApi, hf_hub_url
    from kernels import VariantAccepted, get_kernel_variants
    repo, branch = KERNEL
    choices = get_kernel_variants(repo, revision=branch)  # the best one first
    if not choices or not isinstance(choices[0], VariantAccepted):
        raise UserError(f"the hub has no build for PyTorch {torch.__version__} on this machine")
    where = {"revision": branch, "repo_type": "kernel"}
    tree = HfApi().list_repo_tree(repo, f"build/{choices[0].variant.variant_str}", recursive=True, **where)
    return {item.path: hf_hub_url(repo, item.path, **where) for item in tree if hasattr(item, "size")}


def fetch_kernel():
    """Bring the build that fits into KERNEL_DIR unless it is there, or say in a sentence why not."""
    folder, temporary = Path(KERNEL_DIR, "flash-attn3"), Path(KERNEL_DIR, f"flash-attn3.{os.urandom(4).hex()}.tmp")
    try:
        os.makedirs(KERNEL_DIR, exist_ok=True)
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # one process fetches, others wait, unless nothing can be locked here
                fcntl.flock(stack.enter_context(open(f"{folder}.lock", "ab")), fcntl.LOCK_EX)
                for left in Path(KERNEL_DIR).glob("flash-attn3.*.tmp"):  # by a killed process
                    shutil.rmtree(left, ignore_errors=True)
            stack.callback(shutil.rmtree, temporary, ignore_errors=True)
            try:
                find_kernel(folder)
            except Exception:  # there is no build, or a damaged one
                with ThreadPool(1) as pool:  # the hub's library may wait for ever
                    urls = pool.apply_async(list_build).get(sum(DOWNLOAD_TIMEOUTS))
                for count, (path, url) in enumerate(urls.items(), 1):  # the library's own download checks no SHA-256
                    os.makedirs((temporary / path).parent, exist_ok=True)
                    print(f"[{count}/{len(urls)}] {path} {download_file(url, str(temporary / path))}", flush=True)
                build = find_kernel(temporary)
                shutil.rmtree(folder / "build" / build.name, ignore_errors=True)
                os.renames(build, folder / "build" / build.name)
        print(f"the attention kernel is in {folder}", flush=True)
    except Exception as error:
        print(f"the attention kernel could not be fetched ({first_line(error)}): PyTorch's own are used")


def check_equal(fast_path, definition, args):
    """Raise ValueError unless fast_path(*args) gives the result and gradients of `definition` and alters no tensor.

    In float32 it may decline with None. A wrong scale, which rounding cannot make, has a tenth of the tolerance.
    """
    def run(function, dtype):  # the result, the gradients, and the arguments as they are afterwards
        copies = [arg.detach().to(dtype if arg.is_floating_point() else arg.dtype, copy=True)
                  .requires_grad_(arg.requires_grad) if torch.is_tensor(arg) else copy.deepcopy(arg) for arg in args]
        tensors = [arg for arg in copies if torch.is_tensor(arg)]
        tensors += [p for arg in copies if isinstance(arg, torch.nn.Module) for p in arg.parameters()]
        leaves = [x for x in tensors if x.requires_grad]
        with torch.autocast(leaves[0].device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            y = function(*copies)
        if y is None:
            return None
        dy = torch.arange(1.0, y.numel() + 1, device=y.device).sin().view_as(y)
        return y, *torch.autograd.grad(y, leaves, dy.to(y.dtype)), *tensors

    expected = [x.double() for x in run(definition, torch.float32)]
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):  # rounding to bf16 takes up to 0.9 %
        found = run(fast_path, dtype)
        if found is None and dtype == torch.bfloat16:
            raise UserError("it gives no result in bf16")
        for x, y in zip(expected, found, strict=True) if found else ():
            if not (x.shape == y.shape and (y - x).norm() <= tolerance * x.norm()
                    and ((y - x) * x).sum().abs() <= tolerance / 10 * (x * x).sum()):
                raise UserError("it computes something else than its definition")


@mistakes_as_sentences(ValueError)
def main():
    parser = argparse.ArgumentParser(description="Fetch the text and train the tokenizer, once for all experiments.")
    parser.add_argument("--num-shards", type=int, default=10, help="training shards, -1 for all (default %(default)s)")
    parser.add_argument("--download-workers", type=int, default=8, help="downloads at a time (default %(default)s)")
    parser.add_argument("--toy", action="store_true", help="a tiny corpus without network, for machines without a GPU")
    args = parser.parse_args()
    if args.num_shards == 0 or args.num_shards < -1:
        parser.error(f"--num-shards is {args.num_shards}, but must be 1 or more, or -1 for all {MAX_SHARD}")
    if args.download_workers < 1:
        parser.error(f"--download-workers is {args.download_workers}, but must be 1 or more")
    if args.toy:
        use_toy_scale()
        write_toy_shards()
    else:
        download_data(args.num_shards, args.download_workers)
    train_tokenizer()
    if not args.toy:
        fetch_kernel()
    print("Done! Ready to train.")


if __name__ == "__main__":
    main()
