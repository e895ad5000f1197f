"""The tokenizer: golden values, byte counts that add up, rebuilding, and files that a stranger planted."""

import hashlib
import json
import os
import pickle
import random
import shutil
import socket
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken
import torch

import prepare

GOLDEN = json.loads((Path(__file__).parent / "golden" / "loader.json").read_text(encoding="utf-8"))
SPECIAL = [f"<|reserved_{i}|>" for i in range(4)]
VAL = "shard_06542.parquet"
TEXTS = [
    "Hello, world! It's 2026 and we'll see 12345 things.", "naïve café Straße œuvre",
    "你好,世界。日本語のテキスト 한국어",
    "Привет, мир! Ελληνικά", "مرحبا بالعالم שלום", "नमस्ते दुनिया ภาษาไทย",
    "🙂🙃👩‍👩‍👧‍👦🏳️‍🌈 e\u0301", "\U0001f600\U0010ffff\x00\x7f",
    "  two  spaces\n\n\ttab\r\n\r\n   ", "", " ", "\n", "a" * 3000, "?!" * 500, "\ufffd", "\u0130\u0131\u212a",
    *SPECIAL, "x<|reserved_0|><|reserved_3|>y <|endoftext|>",
]


def write_shard(name, texts):
    os.makedirs(prepare.DATA_DIR, exist_ok=True)
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), os.path.join(prepare.DATA_DIR, name))


def tokenizer_path(name="tokenizer.pkl"):
    return Path(prepare.TOKENIZER_DIR, name)


def random_text(rng, length):
    """Any code points but surrogates, the low ones more often."""
    codes = (rng.randrange(rng.choice([0x80, 0x800, 0x10000, 0x110000])) for _ in range(length))
    return "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)


def random_words(rng, count):
    return " ".join("".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(count))


@pytest.fixture
def copy(tiny_cache, tmp_path, tiny):
    """Like `tiny`, but the cache is this test's own and may be changed."""
    shutil.copytree(tiny_cache, tmp_path / "copy")
    prepare.DATA_DIR, prepare.TOKENIZER_DIR = str(tmp_path / "copy" / "data"), str(tmp_path / "copy" / "tokenizer")
    return tiny


@pytest.fixture
def small():
    """A cache with little text and a tokenizer of 300 ids, which trains in no time."""
    rng = random.Random(1)
    prepare.VOCAB_SIZE = 300
    write_shard("shard_00000.parquet", [random_words(rng, 50) for _ in range(20)])
    write_shard(VAL, ["validation"])
    prepare.train_tokenizer()
    return prepare.Tokenizer.from_directory()


# ----------------------------------------------------------------------------------------------------------------------
# What it computes
# ----------------------------------------------------------------------------------------------------------------------


def test_the_merges_are_the_golden_ones(tiny):
    tokens = [tiny.enc.decode_single_token_bytes(i) for i in range(8188)]
    assert hashlib.sha256(b"".join(token + b"\0" for token in tokens)).hexdigest() == GOLDEN["ranks_sha256"]
    assert [token.decode() for token in tokens[256:266]] == GOLDEN["first_merges"]
    assert sorted(token.hex() for token in tokens[-3:]) == sorted(GOLDEN["last_tokens"])


def test_encodings_and_sizes_are_the_golden_ones(tiny):
    assert tiny.get_vocab_size() == GOLDEN["n_vocab"] == 8192
    assert tiny.get_bos_token_id() == GOLDEN["bos"] == 8188
    for text, ids in GOLDEN["encode"].items():
        assert tiny.encode(text) == ids


def test_the_byte_table_is_the_golden_one_and_not_that_of_decoded_text(tiny):
    table = prepare.get_token_bytes()
    assert table.dtype == torch.int32 and table.shape == (8192,) and table.device.type == "cpu"
    assert table.sum() == GOLDEN["token_bytes_sum"]
    assert table[:8188].min() == 1 and table[8188:].tolist() == [0, 0, 0, 0]

    decoded = torch.tensor([len(tiny.decode([i]).encode()) for i in range(8188)])
    assert decoded.sum() == GOLDEN["token_bytes_old_sum"]
    assert (decoded != table[:8188]).sum() == GOLDEN["wrong_in_old"] == 133


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_add_up_and_text_comes_back(tiny, text):
    ids = tiny.encode(text)
    assert prepare.get_token_bytes()[ids].sum() == len(text.encode())
    assert tiny.decode(ids) == text
    assert max(ids, default=0) < 8188


def test_bytes_add_up_for_random_unicode(tiny):
    rng, table = random.Random(2), prepare.get_token_bytes()
    texts = [random_text(rng, rng.randrange(200)) for _ in range(300)]
    for text, ids in zip(texts, tiny.encode(texts), strict=True):
        assert table[ids].sum() == len(text.encode())
        assert tiny.decode(ids) == text


def test_digits_are_split_into_runs_of_at_most_two(tiny):
    assert max(len(tiny.decode([i])) for i in tiny.encode("1234567 000000 2026")) == 2


def test_a_list_is_encoded_like_each_of_its_texts(tiny):
    assert tiny.encode(TEXTS) == [tiny.encode(text) for text in TEXTS]
    assert tiny.encode(TEXTS, prepend=5, num_threads=1) == [[5] + tiny.encode(text) for text in TEXTS]
    assert tiny.encode([]) == []


def test_prepend_takes_an_id_or_the_name_of_a_special_token(tiny):
    ids = tiny.encode("some text")
    assert tiny.encode("some text", prepend=0) == [0] + ids
    assert tiny.encode("some text", prepend=tiny.get_bos_token_id()) == [8188] + ids
    for i, name in enumerate(SPECIAL):
        assert tiny.encode("some text", prepend=name) == [8188 + i] + ids
    assert tiny.encode("", prepend=SPECIAL[0]) == [8188]


@pytest.mark.parametrize("prepend", ["the", "<|endoftext|>", "", 1.0, [8188], b"a", -1, 8192, True])
def test_another_prepend_is_a_value_error(tiny, prepend):
    with pytest.raises(ValueError, match="prepend"):
        tiny.encode("some text", prepend=prepend)
    with pytest.raises(ValueError, match="prepend"):
        tiny.encode(["some text"], prepend=prepend)


@pytest.mark.parametrize("text", [None, 5, b"bytes", ["a", None], [b"a"], [["a"]]])
def test_what_is_not_text_is_a_value_error(tiny, text):
    with pytest.raises(ValueError):
        tiny.encode(text)


def test_lone_surrogates_do_not_crash(tiny):
    assert tiny.decode(tiny.encode("a\ud800b")) == "a\ufffdb"
    assert tiny.encode(["a\ud800b", "c"]) == [tiny.encode("a\ufffdb"), tiny.encode("c")]


@pytest.mark.parametrize("run", [" ", "\n", "\t", "\r\n", "\0", "a", "^", "7", "好", "\u0301",
                                 "👩‍👩‍👧‍👦", "\ufffd", " ^", "'s"])
def test_a_long_run_of_one_character_comes_back_and_its_bytes_add_up(tiny, run):
    text = run * (300_000 // len(run))  # tiktoken gives up on blanks alone from a million on
    ids = tiny.encode(text)
    assert prepare.get_token_bytes()[ids].sum() == len(text.encode()) and tiny.decode(ids) == text


def test_from_directory_takes_another_directory(tiny, tiny_cache):
    prepare.TOKENIZER_DIR = "/nowhere"
    assert prepare.Tokenizer.from_directory(str(tiny_cache / "tokenizer")).encode("a text") == tiny.encode("a text")
    with pytest.raises(FileNotFoundError, match="/nowhere"):
        prepare.Tokenizer.from_directory()


# ----------------------------------------------------------------------------------------------------------------------
# The text it is trained on
# ----------------------------------------------------------------------------------------------------------------------


def test_text_iterator_yields_the_training_documents_in_order_and_cut(tmp_path):
    write_shard("shard_00010.parquet", ["third"])
    write_shard("shard_00002.parquet", ["é" * 12_000, "", "second"])
    write_shard(VAL, ["validation"])
    assert list(prepare.text_iterator()) == ["é" * 10_000, "", "second", "third"]
    assert list(prepare.text_iterator(max_chars=10**9, doc_cap=4)) == ["éééé", "", "seco", "thir"]


def test_text_iterator_stops_once_max_chars_have_been_read():
    write_shard("shard_00000.parquet", ["aaaa", "bbbb"])
    write_shard("shard_00001.parquet", ["cccc", "dddd"])
    for max_chars, texts in [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (16, 4), (17, 4)]:
        assert len(list(prepare.text_iterator(max_chars=max_chars, doc_cap=4))) == texts
    assert list(prepare.text_iterator(max_chars=4, doc_cap=2)) == ["aa", "bb"]


def test_the_end_of_a_long_document_does_not_reach_the_tokenizer(small):
    def train(texts):
        tokenizer_path().unlink()
        write_shard("shard_00000.parquet", texts)
        prepare.train_tokenizer()
        return tokenizer_path().read_bytes()

    rng = random.Random(3)
    texts = [random_words(rng, 5000) for _ in range(2)]
    assert min(map(len, texts)) > 15_000
    whole = train(texts)
    assert train([text[:10_000] + "zzqq" * 500 for text in texts]) == whole
    assert train([text[:9_000] + "zzqq" * 500 for text in texts]) != whole


def test_the_validation_shard_is_never_read_for_the_tokenizer(small):
    expected = tokenizer_path().read_bytes()
    tokenizer_path().unlink()
    Path(prepare.DATA_DIR, VAL).write_bytes(b"not even Parquet")
    prepare.train_tokenizer()
    assert tokenizer_path().read_bytes() == expected


def test_without_training_shards_there_is_no_tokenizer():
    write_shard(VAL, ["validation"] * 100)
    with pytest.raises(FileNotFoundError, match="training shard"):
        prepare.train_tokenizer()
    assert not tokenizer_path().exists()


def test_too_little_text_is_an_error_that_says_so():
    write_shard("shard_00000.parquet", ["just a few words"])
    with pytest.raises(ValueError, match="too little text") as error:
        prepare.train_tokenizer()
    assert "8,188" in str(error.value)
    assert os.listdir(prepare.TOKENIZER_DIR) == []


@pytest.mark.parametrize("text", [None, "", "\n"])
def test_shards_of_documents_without_text_are_too_little_text(text):
    write_shard("shard_00000.parquet", [text] * 1000)
    with pytest.raises(ValueError, match="too little text"):
        prepare.train_tokenizer()
    assert not tokenizer_path().exists()


def test_documents_of_one_endless_run_do_not_stop_the_training():
    prepare.VOCAB_SIZE = 265
    write_shard("shard_00000.parquet", [character * 1_000_000 for character in " \n\0a^7好\u0301"])
    prepare.train_tokenizer()
    assert prepare.Tokenizer.from_directory().get_vocab_size() == 265


def test_a_vocabulary_that_cannot_hold_every_byte_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(prepare, "VOCAB_SIZE", 256)
    with pytest.raises(ValueError, match="VOCAB_SIZE = 256"):
        prepare.train_tokenizer()


def test_a_tokenizer_that_loses_text_is_not_saved(small):
    before = {path.name: path.read_bytes() for path in Path(prepare.TOKENIZER_DIR).iterdir()}
    prepare.SPLIT_PATTERN = r"\p{L}+"  # what it does not match is lost
    with pytest.raises((AssertionError, ValueError)):
        prepare.train_tokenizer()
    assert {path.name: path.read_bytes() for path in Path(prepare.TOKENIZER_DIR).iterdir()} == before


# ----------------------------------------------------------------------------------------------------------------------
# Rebuilding
# ----------------------------------------------------------------------------------------------------------------------


def stamps():
    return {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in Path(prepare.TOKENIZER_DIR).iterdir()}


def test_files_that_fit_are_left_alone(small, monkeypatch):
    before = stamps()
    assert set(before) == {"tokenizer.pkl", "token_bytes.pt"}
    monkeypatch.setattr(prepare, "text_iterator", None)  # reading text would crash
    prepare.train_tokenizer()
    assert stamps() == before


def smaller_vocabulary():
    prepare.VOCAB_SIZE = 290


def other_pattern():
    prepare.SPLIT_PATTERN = prepare.SPLIT_PATTERN.replace("{1,2}", "{1,3}")


def other_special_tokens():
    prepare.SPECIAL_TOKENS = ["<|bos|>", "<|a|>", "<|b|>", "<|c|>"]
    prepare.BOS_TOKEN = "<|bos|>"


def one_wrong_count():
    table = torch.load(tokenizer_path("token_bytes.pt"))
    table[100] += 1
    torch.save(table, tokenizer_path("token_bytes.pt"))


def short_table():
    torch.save(torch.load(tokenizer_path("token_bytes.pt"))[:-1].clone(), tokenizer_path("token_bytes.pt"))


def no_table():
    tokenizer_path("token_bytes.pt").unlink()


def no_tokenizer():
    tokenizer_path().unlink()


def half_a_tokenizer():
    tokenizer_path().write_bytes(tokenizer_path().read_bytes()[:1000])


@pytest.mark.parametrize("change", [smaller_vocabulary, other_pattern, other_special_tokens, one_wrong_count,
                                    short_table, no_table, no_tokenizer, half_a_tokenizer])
def test_files_that_do_not_fit_are_rebuilt(small, change, capsys):
    change()
    capsys.readouterr()
    prepare.train_tokenizer()
    if "no_" not in change.__name__:
        sentence = capsys.readouterr().out.splitlines()[0]
        assert "tokenizer" in sentence or "byte table" in sentence
        assert "again" in sentence
    tokenizer = prepare.Tokenizer.from_directory()
    assert tokenizer.get_vocab_size() == prepare.VOCAB_SIZE
    assert tokenizer.get_bos_token_id() == prepare.VOCAB_SIZE - 4
    assert tokenizer.encode("", prepend=prepare.SPECIAL_TOKENS[3]) == [prepare.VOCAB_SIZE - 1]
    assert prepare.get_token_bytes()[tokenizer.encode("früh am 12345")].sum() == len("früh am 12345".encode())
    prepare.check_data()
    assert set(os.listdir(prepare.TOKENIZER_DIR)) == {"tokenizer.pkl", "token_bytes.pt"}

    before = stamps()
    prepare.train_tokenizer()
    assert stamps() == before


def test_training_prints_size_time_and_bytes_per_token(small, capsys):
    tokenizer_path().unlink()
    capsys.readouterr()
    prepare.train_tokenizer()
    output = capsys.readouterr().out
    text = "".join(prepare.text_iterator())
    assert "300" in output
    assert f"{len(text) / len(small.encode(text)):.2f}" in output  # ASCII: a byte a character


def test_training_twice_gives_the_same_files(small):
    before = tokenizer_path().read_bytes(), prepare.get_token_bytes()
    tokenizer_path().unlink()
    prepare.train_tokenizer()
    assert tokenizer_path().read_bytes() == before[0]
    assert torch.equal(prepare.get_token_bytes(), before[1])


# ----------------------------------------------------------------------------------------------------------------------
# Files that are missing, damaged or planted
# ----------------------------------------------------------------------------------------------------------------------


class Call:
    """Unpickling it calls `function(*args)`."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def encoding(ranks, pattern=None, special=None):
    special = {token: len(ranks) + i for i, token in enumerate(SPECIAL)} if special is None else special
    return pickle.dumps(tiktoken.Encoding("rustbpe", pat_str=pattern or prepare.SPLIT_PATTERN,
                                          mergeable_ranks=ranks, special_tokens=special))


def encoding_with_state(state):
    """The pickle of an Encoding object with a state of our choice, which tiktoken would restore."""
    return b"\x80\x02ctiktoken.core\nEncoding\n)\x81" + pickle.dumps(state, protocol=2)[2:-1] + b"b."


def planted_tokenizers():
    ranks = {bytes([i]): i for i in range(256)} | {b"a" * (i - 254): i for i in range(256, 296)}
    gap = {token: rank + (rank > 280) for token, rank in ranks.items()}
    no_byte = {(b"bb" if token == b"\xff" else token): rank for token, rank in ranks.items()}
    few = dict(list(ranks.items())[:-1])
    many = {**ranks, b"bbb": 296}
    good = encoding(ranks)
    state = dict(name="rustbpe", pat_str=prepare.SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={})
    marker = "touch planted"
    return {
        "os.system": pickle.dumps(Call(os.system, marker)),
        "os.system, protocol 0": pickle.dumps(Call(os.system, marker), protocol=0),
        "eval": pickle.dumps(Call(eval, "open('planted', 'w')")),
        "exec in a list": pickle.dumps([Call(exec, "open('planted', 'w')")]),
        "os.system in the state": encoding_with_state({"name": "rustbpe", "mergeable_ranks": Call(os.system, marker)}),
        "a method of Encoding": b"\x80\x04\x8c\x0dtiktoken.core\x8c\x0fEncoding.decode\x93)R.",
        "a call of Encoding": b"ctiktoken.core\nEncoding\n(Vgpt2\ntR.",
        "tiktoken.get_encoding": pickle.dumps(Call(tiktoken.get_encoding, "gpt2")),
        "a bare name": encoding_with_state("gpt2"),
        "another state": encoding_with_state(["gpt2"]),
        "no state": b"\x80\x02ctiktoken.core\nEncoding\n)\x81.",
        "state without ranks": encoding_with_state({"name": "rustbpe"}),
        "state without specials": encoding_with_state(state),
        "ranks that are no numbers": encoding_with_state({**state, "mergeable_ranks": dict.fromkeys(ranks, "0")}),
        "a dictionary": pickle.dumps(state), "a number": pickle.dumps(5), "None": pickle.dumps(None),
        "a class": pickle.dumps(np.float64(1)), "Encoding itself": pickle.dumps(tiktoken.Encoding),
        "empty": b"", "text": b"not a pickle\n", "half": good[:len(good) // 2], "all but one byte": good[:-1],
        "other bytes inside": good[:500] + bytes(200) + good[700:],
        "gap": encoding(gap), "too few": encoding(few), "too many": encoding(many), "a byte missing": encoding(no_byte),
        "other pattern": encoding(ranks, pattern=r"\p{L}+|\P{L}+"),
        "no specials": encoding(ranks, special={}), "specials elsewhere": encoding(
            ranks, special=dict(zip(SPECIAL[::-1], range(296, 300), strict=True))),
    }


PLANTED = planted_tokenizers()


@pytest.fixture
def nothing_happens(tmp_path, monkeypatch):
    """Fails the test if something was executed (it would create ./planted) or an address was asked for."""
    asked = []

    def refuse(*args, **kwargs):
        asked.append(args)
        raise OSError("no network in this test")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("tiktoken.registry.get_encoding", refuse)
    yield
    assert asked == [] and not Path("planted").exists()


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_or_damaged_tokenizer_is_refused_and_runs_nothing(small, nothing_happens, kind):
    tokenizer_path().write_bytes(PLANTED[kind])
    for load in (prepare.Tokenizer.from_directory, prepare.check_data):
        with pytest.raises(ValueError, match="run `uv run prepare.py`$"):
            load()


def test_a_good_tokenizer_of_the_same_making_is_accepted(small, nothing_happens):
    ranks = {bytes([i]): i for i in range(256)} | {b"a" * (i - 254): i for i in range(256, 296)}
    tokenizer_path().write_bytes(encoding(ranks))
    assert prepare.Tokenizer.from_directory().encode("aaa") == [257]


def test_planted_files_do_what_they_say_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # else the tests above would prove nothing
    for kind in ("os.system", "os.system, protocol 0", "eval", "exec in a list"):
        pickle.loads(PLANTED[kind])
        Path("planted").unlink()


def planted_tables():
    good = torch.ones(300, dtype=torch.int32)
    return {
        "os.system": lambda path: path.write_bytes(pickle.dumps(Call(os.system, "touch planted"), 2)),
        "os.system saved by torch": lambda path: torch.save(Call(os.system, "touch planted"), path),
        "empty": lambda path: path.write_bytes(b""), "text": lambda path: path.write_bytes(b"not a table"),
        "half": lambda path: path.write_bytes(path.read_bytes()[:len(path.read_bytes()) // 2]),
        "too short": lambda path: torch.save(good[:299].clone(), path),
        "too long": lambda path: torch.save(torch.ones(301, dtype=torch.int32), path),
        "two dimensions": lambda path: torch.save(good[:, None], path),
        "another type": lambda path: torch.save(good.long(), path),
        "a list": lambda path: torch.save([1] * 300, path), "a dictionary": lambda path: torch.save({"a": good}, path),
        "a folder": lambda path: (path.unlink(), path.mkdir()),
    }


@pytest.mark.parametrize("kind", planted_tables())
def test_a_planted_or_damaged_byte_table_is_refused_and_runs_nothing(small, nothing_happens, kind):
    planted_tables()[kind](tokenizer_path("token_bytes.pt"))
    for load in (prepare.get_token_bytes, prepare.check_data):
        with pytest.raises(ValueError, match="run `uv run prepare.py`$") as error:
            load()
        assert "\n" not in str(error.value)


def test_a_missing_file_is_a_sentence_that_says_what_to_run():
    for load in (prepare.Tokenizer.from_directory, prepare.get_token_bytes, prepare.check_data):
        with pytest.raises(FileNotFoundError, match="run `uv run prepare.py`$"):
            load()


def test_at_toy_scale_the_sentence_names_the_toy():
    prepare.use_toy_scale()
    for load in (prepare.Tokenizer.from_directory, prepare.get_token_bytes, prepare.check_data):
        with pytest.raises(FileNotFoundError, match="run `uv run prepare.py --toy`$"):
            load()
    os.makedirs(prepare.TOKENIZER_DIR)
    for name, load in {"tokenizer.pkl": prepare.Tokenizer.from_directory,
                       "token_bytes.pt": prepare.get_token_bytes}.items():
        tokenizer_path(name).write_bytes(b"damaged")
        with pytest.raises(ValueError, match="run `uv run prepare.py --toy`$"):
            load()


def test_main_turns_these_errors_into_an_exit(monkeypatch):
    def fail():
        raise error

    monkeypatch.setattr(sys, "argv", ["prepare.py", "--toy"])
    monkeypatch.setattr(prepare, "train_tokenizer", fail)
    for error in (FileNotFoundError("this file is missing"), ValueError("that file is damaged")):
        with pytest.raises(SystemExit, match=str(error)):
            prepare.main()


# ----------------------------------------------------------------------------------------------------------------------
# check_data
# ----------------------------------------------------------------------------------------------------------------------


def cut_file(path):
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])


def data(name):
    return Path(prepare.DATA_DIR, name)


def remove_training_shards():
    data("shard_00000.parquet").unlink()
    data("shard_00001.parquet").unlink()


def empty_table(name):
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), data(name))


def zero_the_middle(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2:len(content) // 2 + 512] = bytes(512)
    path.write_bytes(content)


BROKEN_CACHES = {
    "no tokenizer": (FileNotFoundError, lambda: tokenizer_path().unlink()),
    "no byte table": (FileNotFoundError, lambda: tokenizer_path("token_bytes.pt").unlink()),
    "no validation shard": (FileNotFoundError, lambda: data(VAL).unlink()),
    "no training shard": (FileNotFoundError, remove_training_shards),
    "no data": (FileNotFoundError, lambda: shutil.rmtree(prepare.DATA_DIR)),
    "half a tokenizer": (ValueError, lambda: cut_file(tokenizer_path())),
    "half a byte table": (ValueError, lambda: cut_file(tokenizer_path("token_bytes.pt"))),
    "one wrong count": (ValueError, one_wrong_count),
    "another vocabulary": (ValueError, smaller_vocabulary),
    "another pattern": (ValueError, other_pattern),
    "half a validation shard": (ValueError, lambda: cut_file(data(VAL))),
    "half a training shard": (ValueError, lambda: cut_file(data("shard_00001.parquet"))),
    "a validation shard damaged inside": (ValueError, lambda: zero_the_middle(data(VAL))),
    "an empty training shard": (ValueError, lambda: data("shard_00000.parquet").write_bytes(b"")),
    "validation shard without rows": (ValueError, lambda: empty_table(VAL)),
    "validation shard without text": (ValueError, lambda: pq.write_table(pa.table({"body": ["a"]}), data(VAL))),
    "validation shard of numbers": (ValueError, lambda: pq.write_table(pa.table({"text": [1]}), data(VAL))),
}


def test_check_data_accepts_a_good_cache_with_one_training_shard(copy):
    prepare.check_data()
    data("shard_00001.parquet").unlink()
    data("notes.parquet").write_bytes(b"not a shard")
    prepare.check_data()


@pytest.mark.parametrize("kind", BROKEN_CACHES)
def test_check_data_finds_whatever_is_missing_or_damaged(copy, kind):
    error_type, damage = BROKEN_CACHES[kind]
    damage()
    with pytest.raises(error_type, match="run `uv run prepare.py`$") as error:
        prepare.check_data()
    assert "\n" not in str(error.value)
