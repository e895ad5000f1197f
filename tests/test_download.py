"""prepare.py against a hub on loopback that shows the faults real ones do."""

import gzip
import hashlib
import io
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import prepare

TESTS = Path(__file__).resolve().parent
PREPARE = TESTS.parent / "prepare.py"
VAL = "shard_06542.parquet"


def parquet(columns):
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def shard_bytes(name):
    """A shard of its own for each name, some 100 kB that no compression makes small."""
    rng = random.Random(name)
    return parquet({"text": [f"{name} {rng.randbytes(500).hex()}" for _ in range(150)]})


# ----------------------------------------------------------------------------------------------------------------------
# The hub. An answer is a function of (handler, body) that sends a response; body is the good shard of that name.
# ----------------------------------------------------------------------------------------------------------------------


def send(handler, body, status=200, length=None, **headers):
    """A response with `body`, announced as `length` bytes: None is the truth, False is nothing."""
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    if length is not False:
        handler.send_header("Content-Length", str(len(body) if length is None else length))
    handler.end_headers()
    handler.wfile.write(body)
    handler.wfile.flush()


def status(code, **headers):
    return lambda handler, body: send(handler, b"no", status=code, **headers)


def instead(other):
    return lambda handler, body: send(handler, other)


def cut(handler, body):
    send(handler, body[:len(body) // 2], length=len(body))


def cut_without_length(handler, body):
    send(handler, body[:len(body) // 2], length=False)


def chunked(handler, body, end=True):
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    for piece in (body[:1000], body[1000:]):
        handler.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
    if end:
        handler.wfile.write(b"0\r\n\r\n")


def cut_chunked(handler, body):
    chunked(handler, body[:len(body) // 2], end=False)


def reset(handler, body):
    cut(handler, body)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()  # at once and for good: the client sees a reset, not an end


def stall(handler, body):
    cut(handler, body)
    handler.server.hub.stalled.release()
    handler.server.hub.closing.wait(60)


def too_long(handler, body):
    send(handler, body + b"more", length=False)


def gzipped(handler, body):
    send(handler, gzip.compress(body), Content_Encoding="gzip")


FAULTS = {
    "cut": cut, "cut, no length": cut_without_length, "cut in chunks": cut_chunked, "reset": reset, "stall": stall,
    "bytes after the end": too_long, "HTML": instead(b"<!doctype html><title>Sign in</title>"), "empty": instead(b""),
    "gzip": gzipped, "no column text": instead(parquet({"body": ["a"]})), "numbers": instead(parquet({"text": [1, 2]})),
    "bytes": instead(parquet({"text": [b"a"]})), "lists": instead(parquet({"text": [["a"]]})),
    "no rows": instead(parquet({"text": pa.array([], pa.string())})), "500": status(500), "503": status(503),
    "408": status(408), "425": status(425), "429": status(429),
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        hub, name = self.server.hub, self.path.rpartition("/")[2]
        with hub.lock:
            hub.requests.append((name, self.path, dict(self.headers), time.monotonic()))
            answers = hub.answers.get(name, [send])
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
        try:
            answer(self, hub.bodies.get(name) or shard_bytes(name))
        except OSError:
            pass  # the client has gone
        self.close_connection = True

    def log_message(self, *_):
        pass


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        pass  # a connection that an answer has closed


class FakeHub:
    """`answers[name]` is what a shard gets, request by request, the last one for ever; without it all goes well."""

    def __init__(self):
        self.answers, self.bodies, self.requests = {}, {}, []
        self.lock, self.closing, self.stalled = threading.Lock(), threading.Event(), threading.Semaphore(0)
        self.server = Hub(("127.0.0.1", 0), Handler)
        self.server.hub = self
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def count(self, name):
        return sum(request[0] == name for request in self.requests)

    def gaps(self, name):
        times = [request[3] for request in self.requests if request[0] == name]
        return [after - before for before, after in zip(times, times[1:], strict=False)]

    def close(self):
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def hub(monkeypatch):
    hub = FakeHub()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(prepare, "BASE_URL", f"{hub.url}/resolve/main")
    monkeypatch.setattr(prepare, "DOWNLOAD_WAITS", (0.01, 0.01, 0.01, 0.01))
    monkeypatch.setattr(prepare, "DOWNLOAD_TIMEOUTS", (5, 0.3))
    yield hub
    hub.close()


# ----------------------------------------------------------------------------------------------------------------------
# Running prepare.py, in this process or in a child
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs main() with these arguments but no BPE; returns exit code, output with the message, BPE trainings begun."""
    def run(*args):
        trainings = []
        monkeypatch.setattr(prepare, "train_tokenizer", lambda: trainings.append(1))
        monkeypatch.setattr(sys, "argv", ["prepare.py", *args])
        code, message = 0, ""
        try:
            prepare.main()
        except SystemExit as error:  # Python prints a text and exits with 1
            code, message = (1, error.code) if isinstance(error.code, str) else (error.code or 0, "")
        out, err = capsys.readouterr()
        return code, out + err + message, len(trainings)
    return run


def start_child(home, hub, *args):
    env = {**os.environ, "HOME": str(home), "HF_ENDPOINT": hub.url}
    return subprocess.Popen([sys.executable, str(PREPARE), *args], env=env, cwd=home, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def cache_of(home):
    return Path(home) / ".cache" / "autoresearch"


def files(folder=None):
    """Name to content of all files in a folder, hidden ones included."""
    return {path.name: path.read_bytes() for path in Path(folder or prepare.DATA_DIR).iterdir()}


def good(*names):
    return {name: shard_bytes(name) for name in names}


def put(name, content):
    os.makedirs(prepare.DATA_DIR, exist_ok=True)
    Path(prepare.DATA_DIR, name).write_bytes(content)


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
    monkeypatch.setenv("HF_ENDPOINT", hub.url + "/")
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
    hub.answers[VAL] = [lambda handler, body: send(handler, b"", 302, Location="/somewhere/hop", **first)]
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


def test_a_file_in_the_place_of_the_folder_is_a_sentence(hub, run, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setattr(prepare, "DATA_DIR", str(tmp_path / "file" / "data"))
    code, output, trainings = run("--num-shards", "1")
    assert (code, trainings) == (1, 0) and str(tmp_path / "file") in output
    assert hub.requests == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_a_read_only_folder_is_a_sentence(hub, run):
    os.makedirs(prepare.DATA_DIR)
    os.chmod(prepare.DATA_DIR, 0o500)
    try:
        code, output, trainings = run("--num-shards", "1")
    finally:
        os.chmod(prepare.DATA_DIR, 0o700)
    assert (code, trainings) == (1, 0) and "shard_00000.parquet" in output.splitlines()[-1]
    assert files() == {}


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


def tiny_corpus():
    return {path.name: path.read_bytes() for path in (TESTS / "corpus").glob("*.parquet")}


def test_two_processes_preparing_at_once_in_an_empty_home_both_get_ready(hub, tmp_path):
    hub.bodies = tiny_corpus()
    children = [start_child(tmp_path, hub, "--num-shards", "2") for _ in range(2)]
    for child in children:
        output, _ = child.communicate(timeout=60)
        assert child.returncode == 0, output
        assert output.splitlines()[-1] == "Done! Ready to train."
    assert all(path.startswith("/datasets/karpathy/climbmix-400b-shuffle/resolve/main/shard_")
               for _, path, _, _ in hub.requests)
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {f".cache/autoresearch/{name}" for name in (
        "data/shard_00000.parquet", "data/shard_00001.parquet", f"data/{VAL}",
        "tokenizer/tokenizer.pkl", "tokenizer/token_bytes.pt")}
    assert files(cache_of(tmp_path) / "data") == hub.bodies

    prepare.DATA_DIR, prepare.TOKENIZER_DIR = (str(cache_of(tmp_path) / name) for name in ("data", "tokenizer"))
    prepare.check_data()


# ----------------------------------------------------------------------------------------------------------------------
# Runs that are killed or interrupted
# ----------------------------------------------------------------------------------------------------------------------


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited for 30 s in vain"
        time.sleep(0.02)


def test_the_temporary_file_of_a_killed_run_is_swept_but_not_that_of_a_living_one(hub, run, tmp_path):
    hub.answers["shard_00000.parquet"] = [stall, send]
    child = start_child(tmp_path, hub, "--num-shards", "1")
    try:
        folder = prepare.DATA_DIR = str(cache_of(tmp_path) / "data")
        wait_until(lambda: os.path.exists(os.path.join(folder, VAL)) and len(os.listdir(folder)) == 2)
        (temporary,) = set(os.listdir(folder)) - {VAL}
        assert not temporary.endswith(".parquet")

        assert run("--num-shards", "1")[0] == 0  # a second process prepares meanwhile
        assert set(files()) == {"shard_00000.parquet", VAL, temporary}
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate(timeout=30)
    os.utime(os.path.join(folder, temporary), (0, 0))  # a new one might not have its lock yet, and is left alone
    assert run("--num-shards", "1")[0] == 0
    assert files() == good("shard_00000.parquet", VAL)


def test_ctrl_c_exits_with_130_at_once_whether_a_download_stalls_or_waits_for_another_attempt(hub, tmp_path):
    hub.answers = {"shard_00000.parquet": [stall], VAL: [status(429, Retry_After="50")]}
    child = start_child(tmp_path, hub, "--num-shards", "2")
    try:
        assert hub.stalled.acquire(timeout=30)
        wait_until(lambda: hub.count(VAL) and (cache_of(tmp_path) / "data" / "shard_00001.parquet").exists())
        child.send_signal(signal.SIGINT)
        start = time.monotonic()
        output, _ = child.communicate(timeout=30)
    finally:
        child.kill()
    assert child.returncode == 130
    assert time.monotonic() - start < 8
    assert "Traceback" not in output and "Done!" not in output
    assert [path.name for path in (cache_of(tmp_path) / "data").glob("*.parquet")] == ["shard_00001.parquet"]
