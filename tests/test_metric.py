"""evaluate_bpb against bits per byte counted by hand, and models that cheat or break."""

import contextlib
import itertools
import math
import os
import random
import threading
import weakref

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode

import prepare

VOCAB, T, ROWS = 300, 128, 10
TRAIN, VAL = "shard_00000.parquet", "shard_06542.parquet"


@pytest.fixture(scope="module")
def metric_cache(tmp_path_factory):
    """A cache with a tokenizer of 300 ids and 1,200 short validation documents, of one to four bytes a character."""
    directory = tmp_path_factory.mktemp("metric_cache")
    rng = random.Random(1)
    words = "the of and evening naïve Straße мир слово 你好 世界 🙂 42 ... e".split() + ["\n"]
    texts = [" ".join(rng.choices(words, k=rng.randint(1, 20))) for _ in range(1600)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "DATA_DIR", str(directory / "data"))
        patch.setattr(prepare, "TOKENIZER_DIR", str(directory / "tokenizer"))
        patch.setattr(prepare, "VOCAB_SIZE", VOCAB)
        os.makedirs(prepare.DATA_DIR)
        pq.write_table(pa.table({"text": texts[:400]}), os.path.join(prepare.DATA_DIR, TRAIN))
        pq.write_table(pa.table({"text": texts[400:]}), os.path.join(prepare.DATA_DIR, VAL), row_group_size=400)
        prepare.train_tokenizer()
    return directory


@pytest.fixture
def tokenizer(metric_cache):
    prepare.DATA_DIR, prepare.TOKENIZER_DIR = str(metric_cache / "data"), str(metric_cache / "tokenizer")
    prepare.VOCAB_SIZE, prepare.MAX_SEQ_LEN, prepare.EVAL_TOKENS = VOCAB, T, ROWS * T
    return prepare.Tokenizer.from_directory()


class Bigram(nn.Module):
    """Logits from a table; `change` may do something to them, given the ids. Keeps what it was called with."""

    def __init__(self, change=None):
        super().__init__()
        self.table = nn.Embedding(VOCAB, VOCAB)
        self.change, self.calls = change, []

    def forward(self, x):
        self.calls.append((tuple(x.shape), x.dtype, self.training, torch.is_grad_enabled()))
        logits = self.table(x)
        return logits if self.change is None else self.change(self, x, logits)


def validation_rows(tokenizer, count=ROWS):
    loader = prepare.make_dataloader(tokenizer, 1, prepare.MAX_SEQ_LEN, "val")
    rows = [(inputs[0].tolist(), targets[0].tolist()) for inputs, targets, _ in itertools.islice(loader, count)]
    loader.close()
    return rows


def bpb_by_hand(table, rows):
    """Bits per byte of a bigram table, in Python floats and loops."""
    num_bytes = prepare.get_token_bytes().tolist()
    nats, total, special = 0.0, 0, 0
    log_sums = [math.log(sum(math.exp(logit) for logit in logits)) for logits in table.tolist()]
    for inputs, targets in rows:
        for token, target in zip(inputs, targets, strict=True):
            if num_bytes[target]:
                nats += log_sums[token] - float(table[token, target])
                total += num_bytes[target]
            special += not num_bytes[target]
    assert special > 0 and total > 0
    return nats / math.log(2) / total


# ----------------------------------------------------------------------------------------------------------------------
# The number
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 3, 7, ROWS, ROWS + 1, 64])
def test_the_score_is_bits_per_byte_by_hand_whatever_the_batch_size(tokenizer, batch_size):
    model = Bigram()
    expected = bpb_by_hand(model.table.weight.detach().double(), validation_rows(tokenizer))
    assert prepare.evaluate_bpb(model, tokenizer, batch_size) == pytest.approx(expected, rel=1e-6)
    assert {call[0] for call in model.calls} == {(batch_size, T)}  # one shape: nothing to compile again


def test_the_score_does_not_depend_on_the_batch_size(tokenizer):
    model = Bigram()
    scores = [prepare.evaluate_bpb(model, tokenizer, batch_size) for batch_size in (1, 3, 7, ROWS, 64)]
    assert scores == pytest.approx([scores[0]] * 5, rel=1e-12)


def test_only_the_rows_asked_for_are_scored(tokenizer):
    model = Bigram()
    for rows in (1, 4, 9):
        prepare.EVAL_TOKENS = rows * T
        expected = bpb_by_hand(model.table.weight.detach().double(), validation_rows(tokenizer, rows))
        assert prepare.evaluate_bpb(model, tokenizer, 4) == pytest.approx(expected, rel=1e-6)


def test_a_model_that_knows_nothing_pays_the_logarithm_of_the_vocabulary(tokenizer):
    num_bytes = prepare.get_token_bytes()
    counts = torch.cat([num_bytes[targets] for _, targets in validation_rows(tokenizer)])
    expected = float((counts > 0).sum() * math.log2(VOCAB) / counts.sum())
    uniform = Bigram(lambda model, x, logits: torch.zeros_like(logits))
    assert prepare.evaluate_bpb(uniform, tokenizer, 4) == pytest.approx(expected, rel=1e-6)


def test_scoring_in_chunks_gives_the_same_score(tokenizer, monkeypatch):
    prepare.EVAL_TOKENS, model = 3 * T, Bigram()
    whole = prepare.evaluate_bpb(model, tokenizer, 2)
    for size in (1, 7 * VOCAB + 5, 2 * T * VOCAB - 1):
        monkeypatch.setattr(prepare, "SCORE_CHUNK", size)
        assert prepare.evaluate_bpb(model, tokenizer, 2) == pytest.approx(whole, rel=1e-12)


def test_bf16_logits_are_accepted_and_scored_in_float32(tokenizer):
    model = Bigram(lambda model, x, logits: logits.bfloat16())
    expected = bpb_by_hand(model.table.weight.detach().bfloat16().double(), validation_rows(tokenizer))
    assert prepare.evaluate_bpb(model, tokenizer, 4) == pytest.approx(expected, rel=1e-6)


def test_a_loss_far_from_zero_keeps_its_digits(tokenizer):
    model = Bigram()
    with torch.no_grad():
        model.table.weight.mul_(1000).add_(5e4)
    weight = model.table.weight.detach().double()
    expected = bpb_by_hand(weight - weight.max(dim=1, keepdim=True).values, validation_rows(tokenizer))
    assert prepare.evaluate_bpb(model, tokenizer, 4) == pytest.approx(expected, rel=1e-5)


def specials_get(logit, others=0.0):
    """Give the special tokens this logit: what they are thought to be worth."""
    def change(model, x, logits):
        logits = logits + others
        logits[..., VOCAB - 4:] = logit
        return logits
    return change


def test_special_tokens_do_not_count_even_if_their_loss_is_infinite(tokenizer):
    model = Bigram(specials_get(-1e9))
    weight = model.table.weight.detach().double()
    weight[:, VOCAB - 4:] = -1e9
    expected = bpb_by_hand(weight, validation_rows(tokenizer))
    assert prepare.evaluate_bpb(model, tokenizer, 4) == pytest.approx(expected, rel=1e-6)

    model.change = specials_get(-3e38, others=3e38)  # 6e38 nats are infinite in float32
    uniform = prepare.evaluate_bpb(Bigram(lambda model, x, logits: logits * 0), tokenizer, 4)
    fewer = uniform * math.log(VOCAB - 4) / math.log(VOCAB)
    assert prepare.evaluate_bpb(model, tokenizer, 4) == pytest.approx(fewer, rel=1e-6)


def test_special_tokens_may_be_ruled_out_with_minus_infinity(tokenizer):
    model = Bigram(specials_get(-math.inf))
    weight = model.table.weight.detach().double()
    weight[:, VOCAB - 4:] = -math.inf
    expected = bpb_by_hand(weight, validation_rows(tokenizer))
    assert prepare.evaluate_bpb(model, tokenizer, 4) == pytest.approx(expected, rel=1e-6)


def test_the_model_is_called_with_ids_only_in_eval_mode_without_gradients(tokenizer):
    model = Bigram()
    score = prepare.evaluate_bpb(model, tokenizer, 4)
    assert type(score) is float
    assert set(model.calls) == {((4, T), torch.int64, False, False)}
    assert model.table.weight.grad is None and torch.is_grad_enabled()


class NoWaiting(TorchFunctionMode):
    """Within it, what makes the host wait for a GPU is an error, as far as it shows without one: numbers and masks."""

    WAITING = {"item", "tolist", "numpy", "cpu", "nonzero", "masked_select", "__bool__", "__int__", "__float__"}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func.__name__ not in self.WAITING
        if func.__name__ == "__getitem__":
            indices = args[1] if isinstance(args[1], tuple) else args[1:]
            assert not any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in indices)
        return func(*args, **(kwargs or {}))


def test_scoring_reads_no_number_before_the_last_batch(tokenizer):
    model = Bigram()
    prepare.evaluate_bpb(model, tokenizer, 1)
    checks = len(model.calls) - ROWS  # calls of the causality check, which may wait

    def change(model, x, logits):
        if len(model.calls) == checks + 1:
            no_waiting.enter_context(NoWaiting())
        if len(model.calls) == checks + ROWS:
            no_waiting.close()
        return logits

    model.change, model.calls = change, []
    with contextlib.ExitStack() as no_waiting:
        prepare.evaluate_bpb(model, tokenizer, 1)
    assert len(model.calls) == checks + ROWS


def test_the_logits_of_one_batch_are_freed_before_the_next_forward(tokenizer):
    alive = []  # at full scale two batches of logits would be 17 GB

    def watch(model, x, logits):
        alive.append(sum(reference() is not None for reference in answers))
        logits = logits.clone()
        answers.append(weakref.ref(logits))
        return logits

    answers = []
    prepare.evaluate_bpb(Bigram(watch), tokenizer, 2)
    assert len(answers) >= 5 + 3 and alive == [0] * len(alive)


@pytest.mark.parametrize("length", [51, 100, 255])
def test_the_score_is_right_at_other_lengths_too(tokenizer, length):
    prepare.MAX_SEQ_LEN, prepare.EVAL_TOKENS, model = length, ROWS * length + length - 1, Bigram()  # whole rows only
    expected = bpb_by_hand(model.table.weight.detach().double(), validation_rows(tokenizer))
    assert prepare.evaluate_bpb(model, tokenizer, 3) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_logits_of_any_floating_type_are_scored(tokenizer, dtype):
    model = Bigram(lambda model, x, logits: logits.to(dtype))
    expected = bpb_by_hand(model.table.weight.detach().to(dtype).double(), validation_rows(tokenizer))
    assert prepare.evaluate_bpb(model, tokenizer, 4) == pytest.approx(expected, rel=1e-6)


def same_buffer(model, x, logits):
    model.buffer = vars(model).get("buffer", torch.empty(logits.shape[0], T + 3, VOCAB + 5))
    model.buffer[:, 1:-2, 2:-3] = logits
    return model.buffer[:, 1:-2, 2:-3]


def other_memory_order(model, x, logits):
    return logits.permute(2, 0, 1).contiguous().permute(1, 2, 0)


@pytest.mark.parametrize("change", [same_buffer, other_memory_order])
def test_the_score_does_not_depend_on_where_the_logits_lie(tokenizer, change):
    model = Bigram()
    expected = prepare.evaluate_bpb(model, tokenizer, 4)
    model.change = change
    assert prepare.evaluate_bpb(model, tokenizer, 4) == expected


def test_a_model_that_overwrites_its_input_is_scored_against_the_true_targets(tokenizer):
    def blind(model, x, logits):
        return model.table(x.zero_())

    model = Bigram(blind)
    rows = [([0] * T, targets) for _, targets in validation_rows(tokenizer)]
    expected = bpb_by_hand(model.table.weight.detach().double(), rows)
    assert prepare.evaluate_bpb(model, tokenizer, 4) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("change", [lambda model, x, logits: (logits, x.zero_())[0],
                                    lambda model, x, logits: model.table(x.copy_(x.roll(-1, dims=1)))])
def test_a_model_that_answers_otherwise_for_what_it_overwrote_is_refused(tokenizer, change):
    with pytest.raises(ValueError, match="differ"):
        prepare.evaluate_bpb(Bigram(change), tokenizer, 4)


def test_bytes_are_counted_by_the_tokenizer_and_not_by_a_table_that_lies_in_the_cache(tokenizer, tmp_path):
    model = Bigram()
    expected = prepare.evaluate_bpb(model, tokenizer, 4)
    prepare.TOKENIZER_DIR = str(tmp_path)
    torch.save(torch.full((VOCAB,), 10**6, dtype=torch.int32), tmp_path / "token_bytes.pt")
    assert prepare.evaluate_bpb(model, tokenizer, 4) == expected


# ----------------------------------------------------------------------------------------------------------------------
# Models that look ahead
# ----------------------------------------------------------------------------------------------------------------------


def sees_ahead(distance, share=1.0):
    """Logits at t know a share of the token at t + distance."""
    def change(model, x, logits):
        logits = logits.clone()
        logits[:, :-distance] += share * model.table(x[:, distance:])
        return logits
    return change


def mixes_blocks(size):
    def change(model, x, logits):
        pieces = [piece + piece.mean(dim=1, keepdim=True) for piece in logits.split(size, dim=1)]
        return torch.cat(pieces, dim=1)
    return change


def last_but_one_sees_the_last(model, x, logits):
    logits = logits.clone()
    logits[:, -2] += model.table(x[:, -1])
    return logits


def from_odd_places_only(model, x, logits):
    odd = torch.arange(x.size(1)) % 2 == 1
    return torch.where(odd[:, None], sees_ahead(1)(model, x, logits), logits)


def behind_a_large_offset(model, x, logits):
    return sees_ahead(1)(model, x, logits) + 1e4 * (x % 97)[..., None]  # softmax ignores the offset


def behind_a_large_special_logit(model, x, logits):
    logits = sees_ahead(1)(model, x, logits)
    logits[..., -1] = -1e8 * (1 + x % 97)
    return logits


def knows_the_next_token(model, x, logits):
    return 50.0 * torch.nn.functional.one_hot(x.roll(-1, dims=1), VOCAB).float()


CHEATS = {
    "next": sees_ahead(1), "two": sees_ahead(2), "far": sees_ahead(50), "farther": sees_ahead(100),
    "faintly": sees_ahead(1, share=0.05), "whole row": lambda model, x, logits: logits + logits.mean(1, keepdim=True),
    **{f"blocks of {size}": mixes_blocks(size) for size in (2, 3, 5, 32, 64)},
    "end": last_but_one_sees_the_last, "perfectly": knows_the_next_token, "odd": from_odd_places_only,
    "offset": behind_a_large_offset, "special": behind_a_large_special_logit,
}


@pytest.mark.parametrize("kind", CHEATS)
def test_a_model_that_looks_ahead_is_refused(tokenizer, kind):
    with pytest.raises(ValueError, match="not causal"):
        prepare.evaluate_bpb(Bigram(CHEATS[kind]), tokenizer, 4)


def test_a_model_that_looks_ahead_is_refused_with_one_row_a_batch(tokenizer):
    with pytest.raises(ValueError, match="not causal"):
        prepare.evaluate_bpb(Bigram(sees_ahead(1)), tokenizer, 1)


@pytest.mark.parametrize("length", [16, 96])
def test_a_model_that_looks_ahead_is_refused_at_other_lengths(tokenizer, length):
    prepare.MAX_SEQ_LEN, prepare.EVAL_TOKENS = length, 4 * length
    for change in (sees_ahead(1), mixes_blocks(2), mixes_blocks(3), mixes_blocks(8), last_but_one_sees_the_last):
        with pytest.raises(ValueError, match="not causal"):
            prepare.evaluate_bpb(Bigram(change), tokenizer, 4)
    assert prepare.evaluate_bpb(Bigram(), tokenizer, 4) > 0


def last_of_a_block_sees_the_next(size):
    def change(model, x, logits):
        last = torch.arange(x.size(1)) % size == size - 1
        return torch.where(last[:, None], sees_ahead(1)(model, x, logits), logits)
    return change


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64])
def test_a_model_that_leaks_only_from_one_block_into_the_one_before_is_refused(tokenizer, size):
    with pytest.raises(ValueError, match="not causal"):
        prepare.evaluate_bpb(Bigram(last_of_a_block_sees_the_next(size)), tokenizer, 4)


@pytest.mark.parametrize("size,offset", [(4, 1), (5, 3), (32, 16), (64, 63), (100, 50)])
def test_a_model_that_mixes_blocks_which_do_not_start_with_the_row_is_refused(tokenizer, size, offset):
    def change(model, x, logits):
        pieces = [logits[:, :offset], *logits[:, offset:].split(size, dim=1)]
        return torch.cat([piece + piece.mean(dim=1, keepdim=True) for piece in pieces], dim=1)

    with pytest.raises(ValueError, match="not causal"):
        prepare.evaluate_bpb(Bigram(change), tokenizer, 4)


def from_some_places(places):
    def change(model, x, logits):
        chosen = torch.zeros(x.size(1), dtype=torch.bool)
        chosen[places] = True
        return torch.where(chosen[:, None], sees_ahead(1)(model, x, logits), logits)
    return change


@pytest.mark.parametrize("places", [slice(0, None, 3), slice(2, None, 4), slice(3, None, 8), slice(5, None, 8),
                                    slice(1, None, 16), slice(9, None, 33), slice(40, None, 63), [70], [126]], ids=str)
def test_a_model_that_looks_ahead_from_some_places_only_is_refused(tokenizer, places):
    with pytest.raises(ValueError, match="not causal"):
        prepare.evaluate_bpb(Bigram(from_some_places(places)), tokenizer, 64)


def rounding_noise(model, x, logits):
    return sees_ahead(1, share=1e-5)(model, x, logits)


def remembers_everything(model, x, logits):
    return logits.cumsum(dim=1) / torch.arange(1, x.size(1) + 1)[:, None]


@pytest.mark.parametrize("change", [rounding_noise, remembers_everything,
                                    lambda model, x, logits: remembers_everything(model, x, logits).bfloat16()])
def test_a_causal_model_is_not_refused_for_rounding_or_a_long_memory(tokenizer, change):
    assert 0 < prepare.evaluate_bpb(Bigram(change), tokenizer, 4) < 20


# ----------------------------------------------------------------------------------------------------------------------
# Models that break
# ----------------------------------------------------------------------------------------------------------------------


def put_at(row, ids, value, place=5):
    """Set the logits of these ids at one position of this row of each batch."""
    def change(model, x, logits):
        logits = logits.clone()
        logits[row, place, ids] = value
        return logits
    return change


@pytest.mark.parametrize("ids,value", [(slice(None), math.nan), (slice(None), math.inf), (slice(None), -math.inf),
                                       (7, math.nan), (7, math.inf)])
@pytest.mark.parametrize("row", [0, 3])
@pytest.mark.parametrize("place", [5, T // 2 + 2])  # the second one is compared in row 3 by the check of causality
def test_logits_that_are_not_finite_at_one_position_are_an_error(tokenizer, row, place, ids, value):
    bytes_there = prepare.get_token_bytes()[[targets[place] for _, targets in validation_rows(tokenizer)[row::5]]]
    assert bytes_there.max() > 0  # a special token there would excuse it
    with pytest.raises(ValueError, match="finite"):
        prepare.evaluate_bpb(Bigram(put_at(row, ids, value, place)), tokenizer, 5)


def test_a_token_that_was_thought_impossible_and_came_is_an_error(tokenizer):
    rows, num_bytes = validation_rows(tokenizer), prepare.get_token_bytes()
    came = next(target for target in rows[4][1] if num_bytes[target])
    impossible = Bigram(lambda model, x, logits: (logits + 3e38).index_fill(2, torch.tensor([came]), -3e38))
    with pytest.raises(ValueError, match="finite"):  # 6e38 nats are infinite in float32
        prepare.evaluate_bpb(impossible, tokenizer, 5)


SHAPES = {
    "fewer ids": lambda model, x, logits: logits[..., :-1], "more ids": lambda model, x, logits: logits.repeat(1, 1, 2),
    "flat": lambda model, x, logits: logits.flatten(0, 1), "no ids": lambda model, x, logits: logits[..., 0],
    "transposed": lambda model, x, logits: logits.transpose(1, 2), "one row": lambda model, x, logits: logits[:1],
    "last position": lambda model, x, logits: logits[:, -1:], "integers": lambda model, x, logits: logits.long(),
    "tuple": lambda model, x, logits: (logits, None), "loss": lambda model, x, logits: logits.mean(),
    "array": lambda model, x, logits: logits.numpy(), "nothing": lambda model, x, logits: None,
}


@pytest.mark.parametrize("kind", SHAPES)
def test_an_answer_that_is_not_logits_is_refused_with_what_was_expected(tokenizer, kind):
    with pytest.raises(ValueError, match=rf"\(4, {T}, {VOCAB}\)"):
        prepare.evaluate_bpb(Bigram(SHAPES[kind]), tokenizer, 4)


def test_an_answer_of_another_shape_later_on_is_refused_too(tokenizer):
    model = Bigram(lambda model, x, logits: logits if len(model.calls) < 9 else logits[..., :-1])
    with pytest.raises(ValueError, match=rf"\(2, {T}, {VOCAB}\)"):
        prepare.evaluate_bpb(model, tokenizer, 2)
    assert len(model.calls) == 9


@pytest.mark.parametrize("change", [lambda model, x, logits: logits + torch.rand_like(logits),
                                    lambda model, x, logits: nn.functional.dropout(logits, 0.5, training=True)])
def test_a_model_that_answers_twice_differently_is_refused(tokenizer, change):
    with pytest.raises(ValueError, match="differ"):
        prepare.evaluate_bpb(Bigram(change), tokenizer, 4)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_during_evaluation_and_the_mode_comes_back(tokenizer, training):
    model = Bigram()
    plain = prepare.evaluate_bpb(model, tokenizer, 4)
    model.dropout = nn.Dropout(0.5)
    model.change = lambda model, x, logits: model.dropout(logits)
    model.train(training)
    assert prepare.evaluate_bpb(model, tokenizer, 4) == plain
    assert model.training is training and model.dropout.training is training


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("change", [sees_ahead(1), put_at(3, 7, math.nan), SHAPES["tuple"], lambda *_: 1 / 0])
def test_the_mode_comes_back_and_no_thread_stays_after_an_error(tokenizer, training, change):
    before = set(threading.enumerate())
    model = Bigram(change).train(training)
    with pytest.raises((ValueError, ZeroDivisionError)):
        prepare.evaluate_bpb(model, tokenizer, 4)
    assert model.training is training and model.calls[0][2] is False
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()


def spoilt_in_call(number, row, position):
    """NaN in one call only, counted from 0."""
    def change(model, x, logits):
        if len(model.calls) - 1 == number:
            logits = logits.clone()
            logits[row, position] = math.nan
        return logits
    return change


@pytest.fixture
def checks(tokenizer):
    """The number of calls before the first batch is scored."""
    model = Bigram()
    prepare.evaluate_bpb(model, tokenizer, ROWS)
    return len(model.calls) - 1


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("position", [0, T // 2, T - 1])
def test_one_spoilt_position_in_one_batch_spoils_the_score(tokenizer, checks, number, position):
    num_bytes, rows = prepare.get_token_bytes(), validation_rows(tokenizer)
    row = next(row for row in range(2) if num_bytes[rows[4 * number + row][1][position]])  # no special token
    with pytest.raises(ValueError, match="finite"):
        prepare.evaluate_bpb(Bigram(spoilt_in_call(checks + number, row, position)), tokenizer, 4)


def test_rows_of_the_last_batch_that_are_not_scored_cannot_spoil_it(tokenizer, checks):
    model = Bigram()
    expected = prepare.evaluate_bpb(model, tokenizer, 4)
    model.change, model.calls = spoilt_in_call(checks + 2, slice(2, 4), slice(None)), []
    assert prepare.evaluate_bpb(model, tokenizer, 4) == expected


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.int8])
def test_logits_of_another_type_are_refused(tokenizer, dtype):
    with pytest.raises(ValueError, match=str(dtype)):
        prepare.evaluate_bpb(Bigram(lambda model, x, logits: logits.to(dtype)), tokenizer, 4)


# ----------------------------------------------------------------------------------------------------------------------
# A validation shard that is too short
# ----------------------------------------------------------------------------------------------------------------------


def test_the_shard_may_be_used_up_to_the_last_row_before_its_second_pass(tokenizer):
    loader = prepare.make_dataloader(tokenizer, 1, T, "val")
    first_pass = list(itertools.takewhile(lambda batch: batch[2] == 1, loader))
    loader.close()
    rows, model = len(first_pass), Bigram()
    assert rows > 20

    prepare.EVAL_TOKENS = rows * T
    whole = [(inputs[0].tolist(), targets[0].tolist()) for inputs, targets, _ in first_pass]
    expected = bpb_by_hand(model.table.weight.detach().double(), whole)
    for batch_size in (1, 7, rows, rows + 9):
        assert prepare.evaluate_bpb(model, tokenizer, batch_size) == pytest.approx(expected, rel=1e-6)

    prepare.EVAL_TOKENS = (rows + 1) * T
    for batch_size in (1, 7, rows, rows + 9):
        with pytest.raises(ValueError, match=f"{VAL}.*too short"):
            prepare.evaluate_bpb(model, tokenizer, batch_size)


def test_a_shard_of_fewer_documents_than_the_buffer_is_too_short_at_once(tokenizer, tmp_path):
    prepare.DATA_DIR = str(tmp_path)
    pq.write_table(pa.table({"text": ["a few words"] * 999}), tmp_path / VAL)
    for batch_size in (1, 4):
        with pytest.raises(ValueError, match="too short"):
            prepare.evaluate_bpb(Bigram(), tokenizer, batch_size)


def test_a_missing_or_damaged_validation_shard_is_that_error(tokenizer, tmp_path):
    prepare.DATA_DIR = str(tmp_path)
    with pytest.raises(FileNotFoundError, match=VAL):
        prepare.evaluate_bpb(Bigram(), tokenizer, 4)
    (tmp_path / VAL).write_bytes(b"not a shard")
    with pytest.raises(ValueError, match=VAL):
        prepare.evaluate_bpb(Bigram(), tokenizer, 4)


@pytest.mark.parametrize("text", [None, ""])
def test_a_validation_shard_without_any_text_is_an_error_that_says_so(tokenizer, tmp_path, text):
    prepare.DATA_DIR = str(tmp_path)
    pq.write_table(pa.table({"text": pa.array([text] * 5000, pa.string())}), tmp_path / VAL)
    with pytest.raises(ValueError, match="no text"):
        prepare.evaluate_bpb(Bigram(), tokenizer, 4)


def test_a_validation_shard_with_little_text_is_scored_on_it(tokenizer, tmp_path):
    prepare.DATA_DIR, rng, model = str(tmp_path), random.Random(1), Bigram()
    texts = [rng.choice([None, "", "", "", "a мир"]) for _ in range(3000)]
    pq.write_table(pa.table({"text": texts}), tmp_path / VAL)
    expected = bpb_by_hand(model.table.weight.detach().double(), validation_rows(tokenizer))
    assert prepare.evaluate_bpb(model, tokenizer, 4) == pytest.approx(expected, rel=1e-6)
