"""Properties that hold for whatever hypothesis comes up with: the packer, the tokenizer and its bytes, the ledger."""

import itertools
from types import SimpleNamespace

import nbformat
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_analysis import HEADER, NOTEBOOK, STRANGE
from test_loader import assert_same_stream, naive_batches
from test_tokenizer import SPECIAL, TEXTS

import prepare

SAME_EVERY_TIME = settings(deadline=None, derandomize=True, database=None)

# ----------------------------------------------------------------------------------------------------------------------
# The packer
# ----------------------------------------------------------------------------------------------------------------------


@st.composite
def row_groups(draw):
    """Shards as lists of row groups of documents: a document is a tuple of its number, as often as it is long."""
    counts = draw(st.lists(st.lists(st.integers(0, 150), max_size=3), min_size=1, max_size=3).filter(
        lambda shards: all(map(sum, shards))))
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=20))  # repeated: many are equal
    numbers = itertools.count(1)
    return [[[(number := next(numbers),) * lengths[number * number % len(lengths)] for _ in range(count)]
             for count in counts_of_shard] for counts_of_shard in counts]


@SAME_EVERY_TIME
@given(content=row_groups(), T=st.integers(1, 30), buffer_size=st.integers(1, 200))
def test_packing_whatever_documents_is_that_of_a_naive_scan(content, T, buffer_size):
    def encode(documents, bos, num_threads):
        return [[bos, *document] for document in documents]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "read_row_groups", lambda shard: ([doc or "" for doc in group] for group in shard))
        chunks = ((encode(documents, 0, 1), epoch) for documents, epoch in prepare.read_chunks(content))
        got = list(itertools.islice(prepare.pack_rows(chunks, T, buffer_size), 60))
    naive = naive_batches(SimpleNamespace(encode=encode, get_bos_token_id=lambda: 0), content, 1, T, buffer_size)
    assert_same_stream([(row[None, :-1], row[None, 1:], epoch) for row, epoch in got], naive)


@SAME_EVERY_TIME
@given(lengths=st.lists(st.integers(1, 15), min_size=1, max_size=40), room=st.integers(1, 20))
def test_the_best_fit_is_the_first_of_the_longest_that_fit_or_else_of_the_shortest(lengths, room):
    docs = sorted(([number] * length for number, length in enumerate(lengths)), key=len)
    fitting = [length for length in lengths if length <= room]
    best = lengths.index(max(fitting) if fitting else min(lengths))
    before = list(docs)
    assert prepare.take_best_fit(docs, room) == [best] * lengths[best]
    before.remove([best] * lengths[best])
    assert docs == before


# ----------------------------------------------------------------------------------------------------------------------
# The tokenizer
# ----------------------------------------------------------------------------------------------------------------------

# Any characters but lone surrogates, the pieces of special tokens, and long runs of one character
PIECES = st.one_of(st.text(), st.sampled_from([*SPECIAL, "<|", "|>", "<|endoftext|>", "'ll", *TEXTS[:8]]),
                   st.builds(str.__mul__, st.characters(codec="utf-8"), st.integers(1, 300)))


@pytest.fixture(scope="module")
def loaded(tiny_cache):
    """The tokenizer of `tiny_cache` and its byte table, loaded once for all examples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "TOKENIZER_DIR", str(tiny_cache / "tokenizer"))
        return prepare.Tokenizer.from_directory(), prepare.get_token_bytes()


@SAME_EVERY_TIME
@example("".join(SPECIAL))
@given(st.lists(PIECES, max_size=8).map("".join))
def test_whatever_the_text_it_comes_back_its_bytes_add_up_and_no_special_token_is_in_it(loaded, text):
    tokenizer, table = loaded
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert table[ids].sum() == len(text.encode())
    assert all(table[ids] > 0)
    assert tokenizer.enc.encode_to_numpy(text, disallowed_special=()).tolist() == ids  # the loader's way


@SAME_EVERY_TIME
@given(st.lists(st.integers(0, 8187)))
def test_whatever_the_ids_their_bytes_add_up(loaded, ids):
    tokenizer, table = loaded
    assert table[ids].sum() == len(b"".join(tokenizer.enc.decode_tokens_bytes(ids)))


# ----------------------------------------------------------------------------------------------------------------------
# The ledger
# ----------------------------------------------------------------------------------------------------------------------

# What a row may say: any text without tab, newline or NUL, which no shell can pass on; the odd characters more often
DESCRIPTIONS = st.text(st.one_of(st.characters(codec="utf-8", exclude_characters="\t\n\0"),
                                 st.sampled_from("\r\v\f\x1c\x85\u2028\ufeff\"'\\$%#, ")))
LINES = st.binary().map(lambda line: line.replace(b"\n", b""))


@pytest.fixture(scope="module")
def read_ledger(tmp_path_factory):
    """The notebook's function, given the bytes of a results.tsv; the rows as lists."""
    path, variables = tmp_path_factory.mktemp("ledger") / "results.tsv", {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)
        for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
            if cell.id in ("setup", "read"):
                exec(compile(cell.source, f"analysis.ipynb:{cell.id}", "exec"), variables)

    def read(content):
        path.write_bytes(content)
        ledger = variables["read_ledger"](path)
        return ledger[["commit", "score", "status", "description"]].to_numpy().tolist()

    return read


@SAME_EVERY_TIME
@example(STRANGE)
@given(st.lists(DESCRIPTIONS))
def test_whatever_a_description_says_it_is_read_as_it_was_written(read_ledger, descriptions):
    rows = [("abcdef0", 1 + i / 8, "keep", description) for i, description in enumerate(descriptions)]
    lines = [HEADER, *(f"{commit}\t{score:.6f}\t44.0\t{status}\t{text}" for commit, score, status, text in rows)]
    for newline in ("\n", "\r\n"):
        got = read_ledger((newline.join(lines) + newline).encode())
        assert got == [[*row[:3], row[3].strip()] for row in rows]


@SAME_EVERY_TIME
@example([b"\xff\xfe", b"\0\0", b"a\rb", b"x" * 200_000, b"\xe4", b'"'])
@given(st.lists(LINES))
def test_whatever_stands_between_them_no_row_is_lost(read_ledger, garbage):
    content, expected = HEADER.encode(), []
    for i, line in enumerate(garbage):
        row = [f"{i:07x}", 1 + i / 8, "discard", f"idea {i}"]
        content += b"\n" + line + b"\n" + "{}\t{:.6f}\t44.0\t{}\t{}".format(*row).encode()
        expected.append(row)
    got = read_ledger(content)
    assert [row for row in got if row in expected] == expected and len(got) <= 2 * len(garbage)
