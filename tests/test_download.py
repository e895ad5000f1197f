"""prepare.py against a hub on loopback that shows the faults real ones do."""

import errno
import fcntl
import hashlib
import io
import os
import resource
import socket
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_hub import FAULTS, VAL, chunked, cut, instead, parquet, redirect, send, shard_bytes, status

import prepare

# ----------------------------------------------------------------------------------------------------------------------
# Running prepare.py
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs main() with these arguments but no BPE and no kernel; returns exit code, output with the message, and the
    number of BPE trainings begun."""
    def run(*args):
        trainings = []
        monkeypatch.setattr(prepare, "train_tokenizer", lambda: trainings.append(1))
        monkeypatch.setattr(prepare, "fetch_kernel", lambda: None)
        monkeypatch.setattr(sys, "argv", ["prepare.py", *args])
        code, message = 0, ""
        try:
            prepare.main()
        except SystemExit as error:  # Python prints a text and exits with 1
            code, message = (1, error.code) if isinstance(error.code, str) else (error.code or 0, "")
        out, err = capsys.readouterr()
        return code, out + err + message, len(trainings)
    return run


def files():
    """Name to content of all files in the folder of shards, hidden ones included."""
    return {path.name: path.read_bytes() for path in Path(prepare.DATA_DIR).iterdir()}


def good(*names):
    return {name: shard_bytes(name) for name in names}


def put(name, content):
    path = Path(prepare.DATA_DIR, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


# ----------------------------------------------------------------------------------------------------------------------
# All goes well
# ----------------------------------------------------------------------------------------------------------------------


def test_the_shards_asked_for_and_the_validation_shard_arrive(hub, run):
    code, output, trainings = run("--num-shards", "2")
    assert (code, trainings) == (0, 1)
    assert output.splitlines()[-1] == "Done! Ready to train."
    assert files() == good("shard_00000.parquet", "shard_00001.parquet", VAL)
    for name in files():
        assert hub.count(name) == 1
        assert any(name in line and "/3" in line for line in output.splitlines())
    for _, path, headers, _ in hub.requests:
        assert path.startswith("/resolve/main/shard_")
        assert headers["Accept-Encoding"] == "identity"


@pytest.mark.parametrize("asked", ["-1", "3", "99"])
def test_minus_one_and_too_many_mean_all_shards(hub, run, monkeypatch, asked):
    monkeypatch.setattr(prepare, "MAX_SHARD", 3)
    assert run("--num-shards", asked)[0] == 0
    assert files() == good("shard_00000.parquet", "shard_00001.parquet", "shard_00002.parquet", VAL)


def test_one_worker_fetches_everything_one_by_one(hub, run):
    assert run("--num-shards", "3", "--download-workers", "1")[0] == 0
    assert len(files()) == len(hub.requests) == 4


def test_a_body_in_chunks_without_a_length_is_fine(hub, run):
    hub.answers = {VAL: [chunked], "shard_00000.parquet": [lambda handler, body: send(handler, body, length=False)]}
    assert run("--num-shards", "1")[0] == 0
    assert files() == good("shard_00000.parquet", VAL)


def test_large_strings_are_strings_too(hub, run):
    hub.bodies[VAL] = parquet({"text": pa.array(["a", None], pa.large_string()), "source": [1, 2]})
    assert run("--num-shards", "1")[0] == 0
    assert files()[VAL] == hub.bodies[VAL]


def test_hf_endpoint_replaces_the_host_and_keeps_the_path(hub, run, monkeypatch):
    monkeypatch.setattr(prepare, "BASE_URL", "https://hub.invalid/datasets/a/b/resolve/main")
    monkeypatch.setenv("HF_ENDPOINT", f" {hub.url}/\r")
    assert run("--num-shards", "1")[0] == 0
    assert sorted(path for _, path, _, _ in hub.requests) == [
        "/datasets/a/b/resolve/main/shard_00000.parquet", f"/datasets/a/b/resolve/main/{VAL}"]


def test_the_address_of_the_dataset_is_the_pinned_one():
    assert prepare.BASE_URL == "https://huggingface.co/datasets/karpathy/climbmix-400b-shuffle/resolve/main"
    assert prepare.VAL_FILENAME == VAL and prepare.MAX_SHARD == prepare.VAL_SHARD == 6542
    assert prepare.DOWNLOAD_WAITS == (2, 4, 8, 16) and prepare.DOWNLOAD_TIMEOUTS == (10, 30)


# ----------------------------------------------------------------------------------------------------------------------
# Redirects and the hash that they carry
# ----------------------------------------------------------------------------------------------------------------------


def redirected(hub, etags):
    """Make the hub serve the validation shard over two redirects, with these X-Linked-ETag headers on the way."""
    first, second, last = ({} if etag is None else {"X_Linked_ETag": etag} for etag in etags)
    first["X_Linked_Size"] = len(shard_bytes(VAL))
    hub.answers[VAL] = [lambda handler, body: send(handler, b"Found", 302, Location="/somewhere/hop", **first)]
    hub.answers["hop"] = [lambda handler, body: send(handler, b"moved", 307, Location="/elsewhere/blob", **second)]
    hub.answers["blob"] = [lambda handler, body: send(handler, body, **last)]
    hub.bodies["blob"] = shard_bytes(VAL)


RIGHT = hashlib.sha256(shard_bytes(VAL)).hexdigest()
WRONG = hashlib.sha256(b"another file").hexdigest()


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("form", ['"{}"', 'W/"{}"', "{}"])
def test_the_hash_is_found_anywhere_in_the_redirects_and_must_be_the_body_s(hub, run, place, form):
    redirected(hub, [form.format(RIGHT) if i == place else None for i in range(3)])
    assert run("--num-shards", "1")[0] == 0
    assert files()[VAL] == shard_bytes(VAL)

    os.remove(os.path.join(prepare.DATA_DIR, VAL))
    redirected(hub, [form.format(WRONG) if i == place else None for i in range(3)])
    code, output, trainings = run("--num-shards", "1")
    assert (code, trainings) == (1, 0) and VAL in output
    assert hub.count("blob") == 1 + 5
    assert files() == good("shard_00000.parquet")


@pytest.mark.parametrize("etag", ['"1234567890abcdef1234567890abcdef12345678"', f'"{RIGHT[:-1]}"', f'"{WRONG}-2"',
                                  '"' + "g" * 64 + '"', ""])
def test_an_etag_that_is_not_a_sha256_is_ignored(hub, run, etag):
    redirected(hub, [etag, None, None])
    assert run("--num-shards", "1")[0] == 0
    assert files()[VAL] == shard_bytes(VAL)


def test_an_etag_that_is_not_a_sha256_does_not_hide_one_that_is(hub, run):
    redirected(hub, ['"1234567890abcdef1234567890abcdef12345678"', None, f'"{WRONG}"'])
    assert run("--num-shards", "1")[0] == 1
    assert files() == good("shard_00000.parquet")


# ----------------------------------------------------------------------------------------------------------------------
# Faults
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_healed_by_another_attempt(hub, run, fault):
    hub.answers[VAL] = [FAULTS[fault], send]
    assert run("--num-shards", "1")[0] == 0
    assert hub.count(VAL) == 2
    assert files() == good("shard_00000.parquet", VAL)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_stays_fails_the_shard_after_five_attempts_and_leaves_nothing(hub, run, fault):
    hub.answers["shard_00001.parquet"] = [FAULTS[fault]]
    code, output, trainings = run("--num-shards", "3")
    assert (code, trainings) == (1, 0)
    assert "shard_00001.parquet" in output.splitlines()[-1] and "shard_00000" not in output.splitlines()[-1]
    assert "Done!" not in output
    assert hub.count("shard_00001.parquet") == 5
    assert files() == good("shard_00000.parquet", "shard_00002.parquet", VAL)


def test_what_failed_is_said_in_one_line(hub, run):
    hub.answers[VAL] = [FAULTS["damaged footer"]]
    code, output, _ = run("--num-shards", "1")
    assert code == 1
    assert all(line.startswith(("[", VAL, "0 of 2", "1 of 2")) for line in output.splitlines()), output


@pytest.mark.parametrize("length", ["many", "-5", "{0}, {0}"])
def test_a_length_that_is_no_number_does_no_harm(hub, run, length):
    hub.answers[VAL] = [lambda handler, body: send(handler, body, length=length.format(len(body)))]
    assert run("--num-shards", "1")[0] == 0
    assert files() == good("shard_00000.parquet", VAL)


@pytest.mark.parametrize("endpoint", ["nonsense", "://", "http://", "http://a..b", "http://[::1", "http://127.0.0.1:x",
                                      "ftp://127.0.0.1"])
def test_an_endpoint_that_is_no_address_is_a_sentence(hub, run, monkeypatch, endpoint):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    code, output, trainings = run("--num-shards", "1")
    assert (code, trainings) == (1, 0) and endpoint.partition("//")[2] in output
    assert files() == {}


def test_redirects_in_a_circle_fail_the_shard(hub, run):
    hub.answers[VAL] = [redirect(f"/resolve/main/{VAL}")]
    assert run("--num-shards", "1")[0] == 1
    assert files() == good("shard_00000.parquet")


def test_four_failures_then_a_good_answer_are_five_attempts(hub, run):
    hub.answers[VAL] = [status(500), cut, instead(b""), status(502), send]
    assert run("--num-shards", "1")[0] == 0
    assert hub.count(VAL) == 5
    assert files() == good("shard_00000.parquet", VAL)


def test_the_waits_are_the_constant(hub, run, monkeypatch):
    monkeypatch.setattr(prepare, "DOWNLOAD_WAITS", (0.05, 0.3))
    hub.answers[VAL] = [status(500)]
    assert run("--num-shards", "1")[0] == 1
    first, second = hub.gaps(VAL)
    assert 0.05 <= first < 5 and 0.3 <= second < 5


@pytest.mark.parametrize("code", [400, 401, 403, 404, 410, 416])
def test_a_4xx_that_cannot_heal_is_not_retried(hub, run, code):
    hub.answers["shard_00000.parquet"] = [status(code)]
    exit_code, output, trainings = run("--num-shards", "2")
    assert (exit_code, trainings) == (1, 0) and str(code) in output
    assert hub.count("shard_00000.parquet") == 1
    assert files() == good("shard_00001.parquet", VAL)


@pytest.mark.parametrize("code", [429, 503])
def test_retry_after_is_honoured(hub, run, code):
    hub.answers[VAL] = [status(code, Retry_After="1"), send]
    assert run("--num-shards", "1")[0] == 0
    assert 1 <= hub.gaps(VAL)[0] < 10


def test_retry_after_is_honoured_only_up_to_a_limit(hub, run, monkeypatch):
    assert prepare.MAX_RETRY_AFTER == 60
    monkeypatch.setattr(prepare, "MAX_RETRY_AFTER", 1)
    hub.answers[VAL] = [status(429, Retry_After="3600"), send]
    assert run("--num-shards", "1")[0] == 0
    assert 1 <= hub.gaps(VAL)[0] < 10


@pytest.mark.parametrize("value", ["Wed, 21 Oct 2015 07:28:00 GMT", "soon", "-5", "1.5", "²", ""])
def test_a_retry_after_that_is_no_number_of_seconds_does_no_harm(hub, run, value):
    hub.answers[VAL] = [status(429, Retry_After=value), send]
    assert run("--num-shards", "1")[0] == 0
    assert hub.count(VAL) == 2


def test_a_server_that_is_not_there_is_a_sentence(run, hub, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        monkeypatch.setattr(prepare, "BASE_URL", f"http://127.0.0.1:{unused.getsockname()[1]}/main")
        code, output, trainings = run("--num-shards", "1")
    assert (code, trainings) == (1, 0)
    assert "shard_00000.parquet" in output.splitlines()[-1] and VAL in output.splitlines()[-1]
    assert files() == {}


# ----------------------------------------------------------------------------------------------------------------------
# What is in the cache already
# ----------------------------------------------------------------------------------------------------------------------


def test_good_shards_in_the_cache_are_kept_and_not_asked_for(hub, run):
    mine = parquet({"text": ["put here by hand"]})
    put("shard_00000.parquet", mine)
    assert run("--num-shards", "2")[0] == 0
    assert hub.count("shard_00000.parquet") == 0
    assert files() == {**good("shard_00001.parquet", VAL), "shard_00000.parquet": mine}

    hub.requests.clear()
    code, output, trainings = run("--num-shards", "2")
    assert (code, trainings) == (0, 1) and output.splitlines()[-1] == "Done! Ready to train."
    assert hub.requests == []


@pytest.mark.parametrize("content", [
    shard_bytes("shard_00000.parquet")[:50_000], b"", b"<html>", parquet({"body": ["a"]}), parquet({"text": [1]}),
    parquet({"text": pa.array([], pa.string())})], ids=["half", "empty", "HTML", "column", "type", "rows"])
def test_a_bad_shard_in_the_cache_is_fetched_again(hub, run, content):
    put("shard_00000.parquet", content)
    assert run("--num-shards", "1")[0] == 0
    assert hub.count("shard_00000.parquet") == 1
    assert files() == good("shard_00000.parquet", VAL)


def test_a_bad_shard_that_was_not_asked_for_is_fetched_again_since_training_would_read_it(hub, run):
    put("shard_00002.parquet", shard_bytes("shard_00002.parquet")[:1000])
    assert run("--num-shards", "1")[0] == 0
    assert files() == good("shard_00000.parquet", "shard_00002.parquet", VAL)


def test_other_files_in_the_folder_are_ignored_and_left_alone(hub, run):
    foreign = ["notes.txt", "shard_0.parquet", "shard_000000.parquet", "shard_00000.parquet.bak", "other.parquet",
               "my_shard_00000.parquet", "shard_abcde.parquet", "work.tmp"]
    for name in foreign:
        put(name, b"not a shard")
    assert run("--num-shards", "1")[0] == 0
    assert files() == {**good("shard_00000.parquet", VAL), **dict.fromkeys(foreign, b"not a shard")}
    assert [os.path.basename(path) for path in prepare.list_parquet_files()] == ["shard_00000.parquet", VAL]
    assert set(prepare.text_iterator()) == set(pq.read_table(
        io.BytesIO(shard_bytes("shard_00000.parquet"))).column("text").to_pylist())


# ----------------------------------------------------------------------------------------------------------------------
# The disk
# ----------------------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_a_sentence_and_leaves_nothing(hub, run):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    hub.bodies[VAL] = parquet({"text": ["small enough"]})
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))  # bytes a file, as if the disk held no more
    try:
        code, output, trainings = run("--num-shards", "1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (code, trainings) == (1, 0)
    assert "shard_00000.parquet" in output.splitlines()[-1] and "File too large" in output
    assert files() == {VAL: hub.bodies[VAL]}


def test_a_write_that_fails_only_when_it_is_synced_leaves_nothing(hub, run, monkeypatch):
    def fsync(file):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", fsync)
    code, output, trainings = run("--num-shards", "1")
    assert (code, trainings) == (1, 0) and f"Disk quota exceeded: '{prepare.DATA_DIR}/{VAL}'" in output
    assert files() == {}


def test_a_sweep_before_a_new_temporary_file_has_its_lock_does_not_take_it(tmp_path, monkeypatch):
    flock, calls = fcntl.flock, []

    def late_flock(file, operation):
        calls.append(operation)
        if len(calls) == 1:
            prepare.sweep_temporaries(tmp_path)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late_flock)
    with prepare.atomic_write(tmp_path / VAL) as file:
        file.write(b"content")
        prepare.sweep_temporaries(tmp_path)
    assert (tmp_path / VAL).read_bytes() == b"content" and os.listdir(tmp_path) == [VAL]
    assert len(calls) == 4  # of the writer, of the first sweep, of the writer again, of the second sweep


def test_a_directory_in_the_place_of_a_shard_is_a_sentence_and_stays(hub, run):
    put("shard_00001.parquet/mine", b"")
    code, output, trainings = run("--num-shards", "2")
    assert (code, trainings) == (1, 0) and "Is a directory" in output
    assert "shard_00001.parquet" in output.splitlines()[-1]
    assert sorted(os.listdir(prepare.DATA_DIR)) == ["shard_00000.parquet", "shard_00001.parquet", VAL]
    assert os.listdir(os.path.join(prepare.DATA_DIR, "shard_00001.parquet")) == ["mine"]


def test_a_link_that_leads_nowhere_gives_way_to_the_shard(hub, run, tmp_path):
    os.makedirs(prepare.DATA_DIR)
    os.symlink(tmp_path / "gone", os.path.join(prepare.DATA_DIR, VAL))
    assert run("--num-shards", "1")[0] == 0
    assert files() == good("shard_00000.parquet", VAL)


@pytest.mark.parametrize("place", ["CACHE_DIR", "DATA_DIR"])
def test_a_file_in_the_place_of_a_folder_is_a_sentence(hub, run, place):
    folder = Path(getattr(prepare, place))
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("not a folder")
    code, output, trainings = run("--num-shards", "1")
    assert (code, trainings) == (1, 0) and str(folder) in output and output.count("\n") == 0
    assert hub.requests == [] and folder.read_text() == "not a folder"


# ----------------------------------------------------------------------------------------------------------------------
# The command line
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [("--num-shards", "0"), ("--num-shards", "-2"), ("--download-workers", "0"),
                                  ("--download-workers", "-1"), ("--num-shards", "many")])
def test_numbers_that_make_no_sense_are_refused_with_a_sentence(hub, run, args):
    code, output, trainings = run(*args)
    assert code not in (0, None) and trainings == 0
    assert args[0] in output.splitlines()[-1] and args[1] in output.splitlines()[-1]
    assert hub.requests == [] and not os.path.exists(prepare.DATA_DIR)


def test_the_defaults_are_ten_shards(hub, run):
    assert run()[0] == 0
    assert files() == good(*[f"shard_{i:05d}.parquet" for i in range(10)], VAL)
