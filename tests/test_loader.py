"""The data loader: golden hashes, a naive scan written from the definition of the stream, errors, and its threads."""

import gc
import hashlib
import io
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fake_hub import wait_until

import prepare

GOLDEN = json.loads((Path(__file__).parent / "golden" / "loader.json").read_text(encoding="utf-8"))
TRAIN, VAL = ("shard_00000.parquet", "shard_00001.parquet"), "shard_06542.parquet"
WORDS = "the of and to in is that it was for on with as be at by this have from".split()


@pytest.fixture(autouse=True)
def deadline():
    """An endless loop, which several of these tests look for, fails the test instead of stopping the run."""
    def expire(*_):
        raise TimeoutError("the test did not end within 30 s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, 30, 5)  # again every 5 s, because closing a loader may hang as well
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def shards(tiny, tmp_path):
    """Writes shards into a folder of this test's own: lists of documents, one a row group; the tokenizer is `tiny`."""
    prepare.DATA_DIR = str(tmp_path / "shards")
    os.makedirs(prepare.DATA_DIR)

    def write(name, *row_groups, **options):
        schema = pa.schema([("text", pa.string())])
        with pq.ParquetWriter(os.path.join(prepare.DATA_DIR, name), schema, **options) as writer:
            for texts in row_groups:
                writer.write_table(pa.table({"text": pa.array(texts, pa.string())}), row_group_size=max(1, len(texts)))

    return write


def digest(tensor):
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def take(count, tokenizer, *args, **kwargs):
    loader = prepare.make_dataloader(tokenizer, *args, **kwargs)
    try:
        return list(itertools.islice(loader, count))
    finally:
        loader.close()


def naive_batches(tokenizer, shards, B, T, buffer_size, threads=1, across_row_groups=False):
    """The stream by its definition, slowly. `shards` are lists of row groups, which are lists of documents."""
    def chunks():
        for epoch in itertools.count(1):
            for row_groups in shards:
                for group in ([sum(row_groups, [])] if across_row_groups else row_groups):
                    for start in range(0, len(group), 128):
                        texts = [text or "" for text in group[start:start + 128]]
                        yield tokenizer.encode(texts, tokenizer.get_bos_token_id(), num_threads=threads), epoch

    source, buffer = chunks(), []
    while True:
        rows = []
        for _ in range(B):
            row = []
            while len(row) < T + 1:
                while len(buffer) < buffer_size:
                    documents, epoch = next(source)
                    buffer += documents
                best, longest, room = None, 0, T + 1 - len(row)
                for i, document in enumerate(buffer):
                    if longest < len(document) <= room:
                        best, longest = i, len(document)
                if best is None:
                    best = min(range(len(buffer)), key=lambda i: len(buffer[i]))  # the first of equals
                row += buffer.pop(best)[:room]
            rows.append(row)
        yield [row[:-1] for row in rows], [row[1:] for row in rows], epoch


def assert_same_stream(got, expected):
    for (inputs, targets, epoch), (naive_inputs, naive_targets, naive_epoch) in zip(got, expected, strict=False):
        assert inputs.tolist() == naive_inputs
        assert targets.tolist() == naive_targets
        assert epoch == naive_epoch


def random_documents(rng, count, longest):
    """Mostly short texts, some of equal length, some empty, some null, a few longer than any row."""
    kinds = [lambda: None, lambda: "", lambda: " ".join(rng.choices(WORDS, k=5))]
    kinds += [lambda: " ".join(rng.choices(WORDS, k=rng.randint(1, longest)))] * 7
    kinds += [lambda: " ".join(rng.choices(WORDS, k=4 * longest))]
    return [rng.choice(kinds)() for _ in range(count)]


# ----------------------------------------------------------------------------------------------------------------------
# The stream
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GOLDEN["batches"], ids=lambda c: "{split}-{B}-{T}-{buffer_size}".format(**c))
def test_the_batches_are_the_golden_ones(tiny, case):
    batches = take(len(case["batches"]), tiny, case["B"], case["T"], case["split"], buffer_size=case["buffer_size"])
    assert batches[-1][0][0, :12].tolist() == case["first_row_head"]  # of the last batch
    for (inputs, targets, epoch), golden in zip(batches, case["batches"], strict=True):
        assert digest(inputs) == golden["inputs"]
        assert digest(targets) == golden["targets"]
        assert epoch == golden["epoch"]


def test_the_buffer_holds_a_thousand_documents_unless_told_otherwise(tiny):
    case = GOLDEN["batches"][0]
    assert case["buffer_size"] == 1000
    (inputs, _, _), = take(1, tiny, case["B"], case["T"], case["split"])
    assert digest(inputs) == case["batches"][0]["inputs"]


@pytest.mark.parametrize("seed,B,T,buffer_size,row_groups", [
    (1, 3, 40, 1, [(50, 20), (70,)]),            # one document at a time: nothing to choose from
    (2, 2, 64, 10, [(128, 128), (1, 200)]),
    (3, 1, 33, 100, [(200, 60), (300,)]),        # chunks of 128, 72, 60, ...
    (4, 4, 17, 128, [(129,), (127, 1, 1)]),
    (5, 2, 100, 1000, [(20,), (10,)]),           # fewer documents than the buffer: many epochs at once
    (6, 5, 7, 30, [(90, 0, 40), (100,)]),        # most documents are longer than a row; a row group without rows
    (7, 1, 1, 50, [(130,), (5,)]),
    (8, 2, 300, 200, [(400,), (256, 17)]),
])
def test_packing_is_that_of_a_naive_scan(tiny, shards, seed, B, T, buffer_size, row_groups):
    rng = random.Random(seed)
    content = [[random_documents(rng, count, max(2, T // 3)) for count in counts] for counts in row_groups]
    for name, groups in zip(TRAIN, content, strict=True):
        shards(name, *groups)
    tokens = 4 * sum(len(tiny.encode(text or "")) + 1 for groups in content for texts in groups for text in texts)
    count = min(300, 2 + tokens // (B * T))
    got = take(count, tiny, B, T, "train", buffer_size=buffer_size)
    assert len(got) == count
    assert got[-1][2] > 1  # the stream went round, in the middle of rows
    assert_same_stream(got, naive_batches(tiny, content, B, T, buffer_size))


def test_chunks_do_not_cross_row_groups(tiny, shards):
    rng = random.Random(9)
    content = [[random_documents(rng, count, 20) for count in (100, 90, 150)]]
    shards(TRAIN[0], *content[0])
    got = take(40, tiny, 2, 50, "train", buffer_size=110)
    assert_same_stream(got, naive_batches(tiny, content, 2, 50, 110))
    crossing = itertools.islice(naive_batches(tiny, content, 2, 50, 110, across_row_groups=True), 40)
    assert [batch[0].tolist() for batch in got] != [batch[0] for batch in crossing]  # these data can tell


def test_documents_that_are_empty_or_null_are_bos_alone(tiny, shards):
    shards(TRAIN[0], ["", None] * 10)
    (inputs, targets, _), = take(1, tiny, 2, 15, "train", buffer_size=5)
    assert inputs.eq(tiny.get_bos_token_id()).all() and targets.eq(tiny.get_bos_token_id()).all()


def test_a_document_that_spells_a_special_token_does_not_become_one(tiny, shards):
    shards(TRAIN[0], ["<|reserved_0|><|reserved_1|>"] * 10)
    (inputs, _, _), = take(1, tiny, 2, 60, "train", buffer_size=5)
    length = 1 + len(tiny.encode("<|reserved_0|><|reserved_1|>"))
    assert inputs[0].eq(tiny.get_bos_token_id()).nonzero().flatten().tolist() == list(range(0, 60, length))
    assert inputs.max() == tiny.get_bos_token_id()  # of the special tokens the lowest


def test_every_row_starts_with_bos_and_targets_are_inputs_shifted(tiny):
    for inputs, targets, epoch in take(8, tiny, 5, 129, "train"):
        for tensor in (inputs, targets):
            assert tensor.dtype == torch.int64 and tensor.shape == (5, 129)
            assert tensor.is_contiguous() and tensor.device.type == "cpu"
        assert inputs[:, 0].eq(tiny.get_bos_token_id()).all()
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert type(epoch) is int


def test_the_splits_share_no_document(tiny, shards):
    shards(TRAIN[0], ["training one"] * 30)
    shards(TRAIN[1], ["training two"] * 30)
    shards(VAL, ["validation"] * 30)
    Path(prepare.DATA_DIR, "shard_00002.parquet.tmp").write_bytes(b"not a shard")
    seen = {split: "".join(tiny.decode(row.tolist()) for inputs, _, _ in take(20, tiny, 2, 64, split, buffer_size=40)
                           for row in inputs) for split in ("train", "val")}
    assert "training one" in seen["train"] and "training two" in seen["train"] and "validation" not in seen["train"]
    assert "validation" in seen["val"] and "training" not in seen["val"]


def test_two_loaders_give_the_same_stream(tiny):
    first, second = take(5, tiny, 3, 80, "train"), take(5, tiny, 3, 80, "train")
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first, second, strict=True))


def test_a_batch_does_not_change_after_it_was_yielded(tiny):
    loader = prepare.make_dataloader(tiny, 2, 64, "train")
    kept = []
    for inputs, targets, _ in itertools.islice(loader, 40):
        kept.append((inputs, targets, inputs.clone(), targets.clone()))
    loader.close()
    for inputs, targets, inputs_then, targets_then in kept:
        assert torch.equal(inputs, inputs_then) and torch.equal(targets, targets_then)


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd", "lz4", "brotli"])
@pytest.mark.parametrize("options", [
    {"data_page_version": "2.0"}, {"use_dictionary": False, "write_page_checksum": True}, {"data_page_size": 64},
    {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}, {"store_schema": False}],
    ids=lambda options: " ".join(options))
def test_the_text_does_not_depend_on_how_parquet_stores_it(shards, compression, options):
    rng = random.Random(1)
    groups = [[None, "", "a\0b", "мир 🙂"] + [" ".join(rng.choices(WORDS, k=20)) for _ in range(50)], [], ["end"]]
    shards(TRAIN[0], *groups, compression=compression, **options)
    assert list(prepare.text_iterator()) == [text or "" for group in groups for text in group]


def test_large_strings_and_other_columns_give_the_same_text(shards):
    table = pa.table({"url": [1, 2], "text": pa.array(["a", None], pa.large_string()), "text.a": [3, 4]})
    pq.write_table(table, Path(prepare.DATA_DIR, TRAIN[0]))
    assert list(prepare.text_iterator()) == ["a", ""]


def test_a_document_of_a_million_tokens_fills_one_row_and_its_rest_is_dropped(tiny, shards):
    rng = random.Random(1)
    groups = [["a b"] * 20, [" ".join(rng.choices(WORDS, k=1_000_000)), "c"], ["d"] * 1000]
    shards(TRAIN[0], *groups)
    assert_same_stream(take(5, tiny, 2, 64, "train", buffer_size=3), naive_batches(tiny, [groups], 2, 64, 3))


def test_thousands_of_row_groups_are_chunks_of_their_own(tiny, shards):
    groups = [[f"document {i}"] * (i % 3) for i in range(3000)]
    shards(TRAIN[0], *groups)
    assert_same_stream(take(40, tiny, 4, 64, "train", buffer_size=5), naive_batches(tiny, [groups], 4, 64, 5))


# ----------------------------------------------------------------------------------------------------------------------
# Errors
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["test", "", "Train", None])
def test_another_split_is_a_value_error(tiny, split):
    with pytest.raises(ValueError, match="split"):
        take(1, tiny, 2, 64, split)


@pytest.mark.parametrize("split,present", [("train", VAL), ("val", TRAIN[0])])
def test_a_split_without_shards_is_a_file_not_found_error(tiny, shards, split, present):
    shards(present, ["text"])
    with pytest.raises(FileNotFoundError, match="run `uv run prepare.py`$"):
        take(1, tiny, 2, 64, split)


def exhaust(tokenizer, split="train"):
    """Draw batches until an error comes; 2,000 of them would be many epochs."""
    take(2000, tokenizer, 2, 64, split, buffer_size=50)


def test_a_shard_damaged_in_the_middle_surfaces_as_that_error(tiny, shards):
    rng = random.Random(10)
    texts = [" ".join(rng.choices(WORDS, k=30)) for _ in range(600)]
    shards(TRAIN[0], texts[:300], texts[300:], compression="zstd", use_dictionary=False)
    take(200, tiny, 2, 64, "train", buffer_size=50)  # it is good

    path = Path(prepare.DATA_DIR, TRAIN[0])
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    middle = column.data_page_offset + column.total_compressed_size // 2
    content[middle:middle + 512] = bytes(512)
    path.write_bytes(content)
    before = set(threading.enumerate())
    with pytest.raises((ValueError, OSError), match=TRAIN[0]):
        exhaust(tiny)
    assert_ended(set(threading.enumerate()) - before)


def test_a_shard_cut_while_the_loader_runs_surfaces_as_an_error(tiny, shards):
    shards(TRAIN[0], ["some text"] * 500)
    loader = prepare.make_dataloader(tiny, 2, 64, "train", buffer_size=50)
    next(loader)
    Path(prepare.DATA_DIR, TRAIN[0]).write_bytes(b"PAR1")
    with pytest.raises((ValueError, OSError), match=TRAIN[0]):
        for _ in itertools.islice(loader, 2000):
            pass


def test_an_error_of_the_tokenizer_surfaces(tiny, shards):
    shards(TRAIN[0], ["some text"] * 500)
    tiny.enc = None  # whatever goes wrong in the background
    with pytest.raises(AttributeError):
        exhaust(tiny)


@pytest.mark.parametrize("with_another", [False, True])
def test_a_shard_without_rows_is_an_error(tiny, shards, with_another):
    shards(TRAIN[1])
    if with_another:
        shards(TRAIN[0], ["some text"] * 10)
    with pytest.raises(ValueError, match=TRAIN[1]):
        exhaust(tiny)


def column(texts, name="text"):
    return pa.table({name: texts})


def not_utf8(content):
    """An array of strings whose second one holds these bytes, which Arrow does not look at."""
    offsets = np.array([0, 1, 1 + len(content), 2 + len(content)], dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), 3, [None, pa.py_buffer(offsets), pa.py_buffer(b"a" + content + b"b")])


NOT_TEXT = {
    "dictionary": column(pa.array(["a", "b"]).dictionary_encode()), "bytes": column(pa.array([b"a", b"b"])),
    "views": column(pa.array(["a", "b"], pa.string_view())), "lists": column([["a"], ["b"]]),
    "structure": column([{"text": "a"}, {"text": "b"}]), "inside": column([{"text": "a"}], name="body"),
    "nothing": column(pa.nulls(2)), "other case": column(["a", "b"], name="Text"),
    "twice": pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]),
    "no UTF-8": column(not_utf8(b"\xff")), "half a character": column(not_utf8(b"\xc3")),
    "surrogate": column(not_utf8(b"\xed\xa0\x80")), "CESU": column(not_utf8(b"\xed\xa0\xbd\xed\xb8\x80")),
    "overlong": column(not_utf8(b"\xc0\x80")),
}


def test_a_document_that_the_tokenizer_gives_up_on_is_a_sentence(tiny, shards):
    shards(TRAIN[0], ["a", " " * 1_000_000, "b"])
    with pytest.raises(prepare.UserError, match="too much for the tokenizer"):
        exhaust(tiny)


@pytest.mark.parametrize("kind", NOT_TEXT)
def test_a_column_that_is_not_text_is_an_error_that_names_the_shard(tiny, shards, kind):
    pq.write_table(NOT_TEXT[kind], Path(prepare.DATA_DIR, TRAIN[0]))
    with pytest.raises(prepare.UserError, match=TRAIN[0]):
        exhaust(tiny)
    with pytest.raises(prepare.UserError, match=TRAIN[0]):
        list(prepare.text_iterator())


def damage(content, rng):
    """One of: a block of zeros or of noise, a flipped bit, a part missing at either end or in the middle."""
    content, start, size = bytearray(content), rng.randrange(len(content)), rng.choice([1, 4, 16, 256])
    kind = rng.randrange(6)
    if kind == 0:
        content[start:start + size] = bytes(len(content[start:start + size]))
    elif kind == 1:
        content[start:start + size] = rng.randbytes(len(content[start:start + size]))
    elif kind == 2:
        content[start] ^= 1 << rng.randrange(8)
    else:
        del content[[slice(start), slice(start, None), slice(start, start + size)][kind - 3]]
    return bytes(content)


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_a_damaged_shard_is_one_sentence_and_loses_no_row_in_silence(shards, compression):
    rng, path = random.Random(3), Path(prepare.DATA_DIR, TRAIN[0])
    texts = ["".join(rng.choices("abcdefgh ", k=rng.randrange(30))) for _ in range(30)]
    shards(TRAIN[0], texts[:10], texts[10:], compression=compression, use_dictionary=False, write_statistics=False)
    content, refused = path.read_bytes(), 0
    for _ in range(600):
        path.write_bytes(damage(content, rng))
        try:
            assert len(list(prepare.text_iterator())) == 30
        except prepare.UserError as error:
            refused += 1
            assert TRAIN[0] in str(error) and "\n" not in str(error)
    assert refused > 300


def test_a_shard_whose_footer_counts_rows_that_no_row_group_has_is_not_an_endless_loop(tiny, shards):
    shards(TRAIN[0])
    path = Path(prepare.DATA_DIR, TRAIN[0])
    content = bytearray(path.read_bytes())
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    content[content.index(b"\x16\0", footer) + 1] = 10  # Thrift for: 64-bit number, 0; then 5
    assert pq.ParquetFile(io.BytesIO(content)).metadata.num_rows == 5
    path.write_bytes(content)
    with pytest.raises(ValueError, match=TRAIN[0]):
        with prepare.open_shard(path):  # a loader would look for the rows for ever
            pass
    with pytest.raises(ValueError, match=TRAIN[0]):
        exhaust(tiny)


@pytest.mark.parametrize("B", [0, -1, 2.0])
def test_a_batch_without_rows_ends_in_an_error_and_leaves_no_thread(tiny, B):
    before, start = set(threading.enumerate()), time.monotonic()
    with pytest.raises((ValueError, TypeError, IndexError, RuntimeError)):
        take(1, tiny, B, 64, "train")
    assert_ended(set(threading.enumerate()) - before)
    assert time.monotonic() - start < 10  # the deadline would end a wait for a thread that spins, and hide it


# ----------------------------------------------------------------------------------------------------------------------
# Threads
# ----------------------------------------------------------------------------------------------------------------------


def assert_ended(threads):
    for thread in threads:
        thread.join(5)  # in case one is just ending
        assert not thread.is_alive()


@pytest.mark.parametrize("batches", [1, 20])
def test_closing_the_generator_ends_its_threads(tiny, batches):
    before = set(threading.enumerate())
    loader = prepare.make_dataloader(tiny, 2, 64, "train")
    for _ in range(batches):
        next(loader)
    started = set(threading.enumerate()) - before
    assert started  # it runs ahead in the background
    loader.close()
    assert_ended(started)
    assert set(threading.enumerate()) == before
    with pytest.raises(StopIteration):
        next(loader)


def test_a_generator_that_was_never_used_or_is_forgotten_leaves_no_threads(tiny):
    before = set(threading.enumerate())
    prepare.make_dataloader(tiny, 2, 64, "train").close()
    loader = prepare.make_dataloader(tiny, 2, 64, "train")
    next(loader)
    started = set(threading.enumerate()) - before
    del loader
    assert_ended(started)
    assert set(threading.enumerate()) == before


def test_two_loaders_run_side_by_side_and_end_alone(tiny):
    train, val = (prepare.make_dataloader(tiny, 2, 64, split) for split in ("train", "val"))
    expected = [batch[0] for batch in take(10, tiny, 2, 64, "val")]
    next(train)
    next(val)
    train.close()
    assert all(torch.equal(batch[0], other) for batch, other in zip(val, expected[1:], strict=False))
    val.close()


def test_batches_are_made_ahead_of_the_consumer(tiny, monkeypatch):
    drawn = threading.Semaphore(0)
    empty = torch.empty

    def count(*args, **kwargs):  # every batch has memory of its own
        drawn.release()
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", count)
    loader = prepare.make_dataloader(tiny, 2, 64, "train")
    next(loader)
    assert drawn.acquire(timeout=10) and drawn.acquire(timeout=10)  # the second without being asked for
    loader.close()


def test_a_slow_consumer_lets_batches_wait_but_not_pile_up(tiny, monkeypatch):
    made, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: made.append(1) or empty(*args, **kwargs))
    expected = take(12, tiny, 2, 64, "train")
    made.clear()
    loader = prepare.make_dataloader(tiny, 2, 64, "train")
    for (inputs, targets, _), drawn in zip(loader, range(1, 13), strict=False):
        assert torch.equal(inputs, expected[drawn - 1][0]) and torch.equal(targets, expected[drawn - 1][1])
        time.sleep(0.05)
        assert len(made) <= drawn + prepare.BATCHES_AHEAD + 1  # one more is being packed, or waits for its place
    wait_until(lambda: len(made) >= 12 + prepare.BATCHES_AHEAD)
    loader.close()


def test_a_slow_source_makes_the_consumer_wait_and_changes_nothing(tiny, monkeypatch):
    expected = take(12, tiny, 4, 512, "train", buffer_size=50)
    read_chunks, read = prepare.read_chunks, []

    def slowly(paths):
        for chunk in read_chunks(paths):
            time.sleep(0.03)
            read.append(len(got))
            yield chunk

    monkeypatch.setattr(prepare, "read_chunks", slowly)
    loader, got = prepare.make_dataloader(tiny, 4, 512, "train", buffer_size=50), []
    for batch in itertools.islice(loader, 12):
        got.append(batch)
    loader.close()
    assert max(read) > 0  # it was still reading when the first batch had been used
    for batch, other in zip(got, expected, strict=True):
        assert torch.equal(batch[0], other[0]) and torch.equal(batch[1], other[1]) and batch[2] == other[2]


def test_memory_stays_flat_without_the_garbage_collector(tiny):
    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if not os.path.exists("/proc/self/statm"):
        pytest.skip("needs /proc")
    gc.collect()
    gc.disable()  # as train.py does
    loader = prepare.make_dataloader(tiny, 8, 256, "train", buffer_size=100)
    for _ in itertools.islice(loader, 500):
        pass
    before = resident_bytes()
    for _ in itertools.islice(loader, 1000):  # 32 kB each, 32 MB in all
        pass
    grown = resident_bytes() - before
    loader.close()
    assert grown < 2**23


# ----------------------------------------------------------------------------------------------------------------------
# The benchmark
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bench(tiny, monkeypatch):
    """Runs the benchmark on the tiny corpus; returns its function main."""
    import bench_loader

    options = "--batch-size 2 --seq-len 64 --buffer-size 50 --threads 1 2 --batches 12 --rounds 1".split()
    monkeypatch.setattr(sys, "argv", ["bench_loader.py", "--data", prepare.DATA_DIR, *options])
    return bench_loader.main


def test_the_benchmark_prints_a_line_for_the_naive_loader_and_each_number_of_threads(bench, capsys):
    bench()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [line[0] for line in lines] == ["naive", "make_dataloader", "make_dataloader"]
    assert [int(line[1]) for line in lines[1:]] == [1, 2]
    assert all(float(line[2].replace(",", "")) > 0 for line in lines)
    assert len({line[-1] for line in lines}) == 1


def test_the_benchmark_refuses_to_compare_different_streams(bench, monkeypatch):
    monkeypatch.setattr(prepare, "take_best_fit", lambda docs, room: docs.pop())  # not the first of equals
    with pytest.raises(SystemExit, match="different"):
        bench()


# ----------------------------------------------------------------------------------------------------------------------
# On a GPU
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_gpu_that_is_far_behind_sees_every_batch_of_a_synchronous_loader(tiny):
    content = [list(prepare.read_row_groups(path)) for path in prepare.split_paths("train")]
    seen, matrix = [], torch.randn(8192, 8192, device="cuda")
    loader = prepare.make_dataloader(tiny, 8, 2048, "train")
    for inputs, targets, epoch in itertools.islice(loader, 100):
        for _ in range(2):  # some 30 ms of work: what follows waits, and so do the copies of later batches
            matrix @ matrix
        seen.append((inputs.clone(), targets.clone(), epoch))
    assert not torch.cuda.current_stream().query()  # it is behind indeed
    loader.close()
    assert_same_stream(seen, naive_batches(tiny, content, 8, 2048, buffer_size=1000))
