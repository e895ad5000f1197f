"""Both scripts as processes: signals, several at once, outputs that are closed or full, disks, and homes."""

import os
import pwd
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import NARROW, point_prepare_at
from fake_hub import VAL, kernel_files, stall, status, tiny_corpus, wait_until
from test_run import SUMMARY

import prepare

ROOT = Path(__file__).resolve().parent.parent
SMALLER = NARROW | {"MAX_SEQ_LEN": 64, "TIME_BUDGET": 1e-6, "EVAL_TOKENS": 20 * 64, "UNTIMED_STEPS": 2}
CACHE_FILES = {"data/shard_00000.parquet", "data/shard_00001.parquet", f"data/{VAL}", "tokenizer/tokenizer.pkl",
               "tokenizer/token_bytes.pt", "kernels/flash-attn3.lock",
               *(f"kernels/flash-attn3/{name}" for name in kernel_files())}


def cache_of(home):
    return home / ".cache" / "autoresearch"


@pytest.fixture
def home(tmp_path):
    """The HOME of the scripts; in this process, prepare looks there too."""
    (tmp_path / "home").mkdir(exist_ok=True)
    point_prepare_at(cache_of(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def toy_copy(toy_home, home):
    """A home in which `prepare.py --toy` has run, of this test's own. Points prepare at it."""
    shutil.copytree(toy_home, home, dirs_exist_ok=True)
    prepare.use_toy_scale()
    return home


def written(folder):
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}


def assert_whole(home, hub):
    """Whatever has its final name is whole; besides there may be temporary files."""
    found = written(cache_of(home))
    assert all(name in CACHE_FILES or ".tmp" in name for name in found)
    for name in found & CACHE_FILES:
        if name.endswith(".parquet"):
            assert (cache_of(home) / name).read_bytes() == hub.bodies[os.path.basename(name)]
    if "tokenizer/tokenizer.pkl" in found:
        prepare.Tokenizer.from_directory()
    if "tokenizer/token_bytes.pt" in found:
        prepare.get_token_bytes()


def assert_ready(home, hub):
    """The cache holds what was asked for, in working order, and no litter."""
    assert_whole(home, hub)
    assert written(home) == {f".cache/autoresearch/{name}" for name in CACHE_FILES}
    prepare.check_data()


def slowly(handler, body):
    """The good body in pieces, over about a third of a second."""
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    for start in range(0, len(body), 50_000):
        handler.wfile.write(body[start:start + 50_000])
        time.sleep(0.04)


@pytest.fixture
def begin(start, home, hub):
    """A function that starts `prepare.py --num-shards 2` against a hub of which each download takes a while."""
    hub.bodies = tiny_corpus()
    hub.answers = {name: [slowly] for name in hub.bodies}
    hub.kernel = kernel_files()
    return lambda: start("prepare.py", "--num-shards", "2", env={"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"})


# ----------------------------------------------------------------------------------------------------------------------
# Signals, and several processes at once
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("latest", [0.3, 0.6, 1])
def test_after_signals_at_any_moment_the_next_run_completes_the_cache(begin, home, hub, latest):
    """Each run takes up what the one before left: three are ended within `latest` seconds, the fourth completes it."""
    rng = random.Random(latest)
    for number in (signal.SIGINT, signal.SIGKILL, signal.SIGTERM):
        script = begin()
        wait_until(lambda script=script: "shards are in" in script.output)
        time.sleep(rng.uniform(0, latest))
        script.send_signal(number)
        code = script.wait(20)
        done = "Done! Ready to train." in script.output  # then the signal may have met the interpreter at its own end
        assert code in (130 if number == signal.SIGINT else -number, *((0, -number) if done else ())), script.output
        assert "Traceback" not in script.output
        assert_whole(home, hub)
    script = begin()
    assert script.wait() == 0, script.output
    assert_ready(home, hub)


def test_ctrl_c_ends_preparing_at_once_whether_a_download_stalls_or_waits_for_another_attempt(begin, home, hub):
    hub.answers = {"shard_00000.parquet": [stall], VAL: [status(429, Retry_After="50")]}
    script = begin()
    assert hub.stalled.acquire(timeout=30)
    wait_until(lambda: hub.count(VAL) and (cache_of(home) / "data" / "shard_00001.parquet").exists())
    script.send_signal(signal.SIGINT)
    assert script.wait(20) == 130
    assert "Traceback" not in script.output and "Done!" not in script.output
    assert_whole(home, hub)


def test_the_temporary_file_of_a_killed_run_is_swept_but_not_that_of_a_living_one(begin, home, hub):
    hub.answers = {"shard_00000.parquet": [stall, slowly, slowly]}
    script, folder = begin(), cache_of(home) / "data"
    assert hub.stalled.acquire(timeout=30)
    wait_until(lambda: len(list(folder.glob("*.parquet"))) == 2)
    (temporary,) = folder.glob("*.tmp")
    assert begin().wait() == 0  # a second process prepares meanwhile
    assert written(folder) == {"shard_00000.parquet", "shard_00001.parquet", VAL, temporary.name}
    script.send_signal(signal.SIGKILL)
    script.wait()
    assert temporary.exists()
    assert begin().wait() == 0
    assert_ready(home, hub)


@pytest.mark.parametrize("count, killed", [(2, 0), (5, 2)])
def test_processes_preparing_at_once_get_ready_though_others_are_killed(begin, home, hub, count, killed):
    scripts = [begin() for _ in range(count)]
    wait_until(lambda: len(hub.requests) > 5)
    for script in scripts[:killed]:
        script.send_signal(signal.SIGKILL)
    for script in scripts[killed:]:
        assert script.wait() == 0, script.output
        assert script.output.splitlines()[-1] == "Done! Ready to train."
    assert all(path.startswith("/datasets/karpathy/climbmix-400b-shuffle/resolve/main/shard_")
               for name, path, _, _ in hub.requests if name.endswith(".parquet"))
    assert_whole(home, hub)
    assert begin().wait() == 0  # sweeps what is left of the killed ones
    assert_ready(home, hub)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGHUP, -1)])
def test_a_signal_ends_training_at_once_without_a_score(start, toy_copy, number, code):
    before = written(toy_copy)
    script = start("train.py", smaller={**SMALLER, "TIME_BUDGET": 60})
    wait_until(lambda: "\nstep 00000" in script.output)  # training, with the loader's threads at work
    script.send_signal(number)
    assert script.wait(20) == code
    assert "Traceback" not in script.output and "val_bpb" not in script.output
    assert written(toy_copy) == before


def test_two_runs_at_once_on_one_cache_give_equal_scores(start, toy_copy):
    before = written(toy_copy)
    scripts = [start("train.py", smaller=SMALLER) for _ in range(2)]
    assert [script.wait() for script in scripts] == [0, 0]
    assert len({SUMMARY.search(script.output)["val_bpb"] for script in scripts}) == 1
    assert written(toy_copy) == before


# ----------------------------------------------------------------------------------------------------------------------
# Standard output
# ----------------------------------------------------------------------------------------------------------------------


def read_all(file):
    """What comes out of a pipe or a terminal until its other end is closed."""
    pieces = []
    while True:
        try:
            piece = os.read(file, 2**16)
        except OSError:  # how a terminal says it
            piece = b""
        if not piece:
            return b"".join(pieces).decode()
        pieces.append(piece)


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_the_summary_arrives_in_a_pipe_and_on_a_terminal(start, toy_copy, kind):
    reading, writing = os.pipe() if kind == "pipe" else os.openpty()
    script = start("train.py", smaller=SMALLER, stdout=writing)
    os.close(writing)
    output = read_all(reading).replace("\r\n", "\n")
    os.close(reading)
    assert script.wait() == 0 and script.output == ""
    assert SUMMARY.search(output), output
    assert ("\r" in output) == (kind == "terminal")


def error_sentence(script):
    """The one line on stderr with which a script failed."""
    assert script.wait() == 1
    assert script.output.count("\n") == 1 and script.output.endswith("\n"), script.output
    return script.output


@pytest.mark.parametrize("name, args", [("train.py", ()), ("prepare.py", ("--toy",))])
def test_a_reader_who_goes_away_ends_the_script_with_an_error(start, toy_copy, name, args):
    reading, writing = os.pipe()
    script = start(name, *args, smaller={**SMALLER, "TIME_BUDGET": 60}, stdout=writing)
    os.close(writing)
    if name == "train.py":
        assert os.read(reading, 1)
    os.close(reading)
    assert script.wait() > 0 and "Broken pipe" in script.output


@pytest.mark.parametrize("name, args", [("train.py", ()), ("prepare.py", ("--toy",))])
def test_a_log_on_a_full_disk_ends_the_script_with_an_error(start, toy_copy, name, args):
    with open("/dev/full", "wb") as full:
        script = start(name, *args, smaller=SMALLER, stdout=full.fileno())
    assert script.wait() > 0 and "No space left on device" in script.output


def test_closed_input_and_error_streams_disturb_nothing(start, toy_copy):
    script = start("train.py", smaller=SMALLER, stdin=None, stderr=None)
    assert script.wait() == 0 and SUMMARY.search(script.output), script.output
    script = start("prepare.py", "--toy", stdin=None, stdout=None, stderr=None)
    assert script.wait() == 0


# ----------------------------------------------------------------------------------------------------------------------
# Disks and homes
# ----------------------------------------------------------------------------------------------------------------------


def on_mount(mount, home, command, endpoint=""):
    """Run `command` where `mount` has been mounted, in a namespace of its own; returns its exit code and output."""
    script = f"mount {mount} && {command}"
    env = {**os.environ, "HOME": str(home), "PYTHON": sys.executable, "ROOT": str(ROOT), "HF_ENDPOINT": endpoint}
    try_it = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(home)]
    if not shutil.which("unshare") or subprocess.run(try_it, capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount")
    run = subprocess.run(["unshare", "-rm", "bash", "-c", script], env=env, capture_output=True, text=True, timeout=120)
    return run.returncode, run.stdout + run.stderr


def test_a_disk_that_runs_full_is_a_sentence_and_loses_nothing(home):
    code, output = on_mount('-t tmpfs -o size=3m none "$HOME"', home,
                            '"$PYTHON" "$ROOT/prepare.py" --toy; code=$?; find "$HOME" -type f; exit $code')
    assert code == 1
    assert "\n[Errno 28] No space left on device: '" in output and "Traceback" not in output
    found = [line for line in output.splitlines() if line.startswith("/")]
    assert len(found) == 2 and all(line.endswith(".parquet") for line in found)


def test_a_disk_that_runs_full_in_a_download_keeps_the_shards_that_are_whole(home, hub):
    hub.bodies = tiny_corpus()  # 0.4 MB each
    code, output = on_mount('-t tmpfs -o size=1m none "$HOME"', home,
                            '"$PYTHON" "$ROOT/prepare.py" --num-shards 2 --download-workers 1; code=$?; '
                            'find "$HOME" -type f; exit $code', hub.url)
    assert code == 1 and "FAILED: [Errno 28] No space left on device: '" in output and "Traceback" not in output
    found = [line for line in output.splitlines() if line.startswith("/")]
    assert len(found) == 2 and all(line.endswith(".parquet") for line in found)


def test_a_prepared_cache_may_lie_on_a_read_only_disk(toy_copy):
    code, output = on_mount('--bind "$HOME" "$HOME" && mount -o remount,bind,ro "$HOME"', toy_copy,
                            '"$PYTHON" "$ROOT/prepare.py" --toy && touch "$HOME/x"')
    assert code == 1 and "Done! Ready to train." in output and output.endswith(": Read-only file system\n"), output


def test_training_writes_nothing_beside_compile_caches_and_needs_no_permission_to(start, toy_copy):
    folders = [toy_copy, *(path for path in toy_copy.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o500)
    try:
        script = start("train.py", smaller=SMALLER, unprivileged=True)
        assert script.wait() == 0 and SUMMARY.search(script.output), script.output
    finally:
        for folder in folders:
            folder.chmod(0o700)


def test_an_unprepared_read_only_home_is_a_sentence(start, home):
    home.chmod(0o500)
    try:
        assert error_sentence(start("prepare.py", "--toy", unprivileged=True)) == (
            f"[Errno 13] Permission denied: '{home}/.cache'\n")
    finally:
        home.chmod(0o700)


@pytest.mark.parametrize("args", [("--toy",), ("--num-shards", "1")])
def test_a_read_only_folder_of_shards_is_a_sentence_and_loses_nothing(start, toy_copy, hub, args):
    if args != ("--toy",):
        hub.bodies = tiny_corpus()
    folder = Path(prepare.DATA_DIR) if args == ("--toy",) else cache_of(toy_copy) / "data"
    folder.mkdir(exist_ok=True)
    for path in folder.glob("shard_00001*"):
        path.unlink()
    before = written(toy_copy)
    folder.chmod(0o500)
    try:
        script = start("prepare.py", *args, env={"HF_ENDPOINT": hub.url}, unprivileged=True)
        assert script.wait() == 1
        assert "Permission denied" in script.output and "Traceback" not in script.output
        assert "run `" in script.output or args == ("--toy",)
    finally:
        folder.chmod(0o700)
    assert written(toy_copy) == before


NO_HOME = """
import pwd, runpy, sys
import prepare
print(prepare.CACHE_DIR, flush=True)
def getpwuid(uid): raise KeyError(uid)
pwd.getpwuid = getpwuid
sys.argv = [prepare.__file__, "--toy"]
runpy.run_path(prepare.__file__, run_name="__main__")
"""


def test_without_home_the_password_entry_says_where_and_without_that_it_is_a_sentence(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "HOME"} | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", NO_HOME], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert run.stdout == os.path.join(pwd.getpwuid(os.getuid()).pw_dir, ".cache", "autoresearch") + "\n"
    assert run.returncode == 1 and run.stderr.endswith("set HOME to one\n"), run.stderr
    assert list(tmp_path.iterdir()) == []
