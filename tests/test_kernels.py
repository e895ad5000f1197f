"""The attention kernel: fetched from a hub on loopback by prepare.py with the real libraries, loaded from the cache.

Kernels here are plain Python. Whatever goes wrong, prepare.py ends well, and says in one sentence what is not there.
"""

import contextlib
import errno
import os
import resource
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest
import torch
from fake_hub import (
    FITS,
    OTHERS,
    chunked,
    cut,
    instead,
    kernel_files,
    raw,
    redirect,
    reset,
    send,
    stall,
    status,
    write_kernel,
)

import prepare
import train

masked_attention = train.attention.__wrapped__

BUILD = f"build/{FITS}"
NOT_FETCHED = "the attention kernel could not be fetched ("
IMPATIENT = "import prepare; prepare.DOWNLOAD_TIMEOUTS = (0.8, 0.7); "


def kernel_dir():
    return Path(prepare.KERNEL_DIR)


def cached():
    """What lies in the folder of kernels, its lock aside: path, as in the repository, to bytes."""
    assert {path.name for path in kernel_dir().iterdir()} <= {"flash-attn3", "flash-attn3.lock"}
    assert not any(path.is_symlink() for path in kernel_dir().rglob("*"))
    folder = kernel_dir() / "flash-attn3"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def sentences(output):
    """The lines about the kernel, progress and repeated attempts aside."""
    lines = output.splitlines()
    return [line for line in lines if not line.startswith("[") and "; trying again in" not in line]


def assert_reason(sentence, reason):
    assert sentence.startswith(NOT_FETCHED) and sentence.endswith("): PyTorch's own are used"), sentence
    assert reason in sentence.removeprefix(NOT_FETCHED), sentence


# ----------------------------------------------------------------------------------------------------------------------
# prepare.py as a process, with the real libraries
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, hub):
    """The HOME of processes, with a cache in which only the kernel is missing; the hub has builds for many machines."""
    hub.kernel = kernel_files() | {"README.md": b"kernels"}
    for variant in OTHERS:
        hub.kernel |= kernel_files("raise ImportError", variant)
    prepare.KERNEL_DIR = str(tmp_path / "home" / ".cache" / "autoresearch" / "kernels")
    return tmp_path / "home"


@pytest.fixture
def begin(start, home, hub, tiny_cache):
    """A function that starts prepare.py, or with `code` only a part of it, where only the kernel is missing."""
    def begin(code=None, env=(), **options):
        if code is None and not (home / ".cache" / "autoresearch" / "data").exists():
            shutil.copytree(tiny_cache, home / ".cache" / "autoresearch", dirs_exist_ok=True)
        env = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"} | dict(env)
        return start("prepare.py", "--num-shards", "2", code=code, env=env, **options)
    return begin


def test_the_build_that_fits_is_fetched_as_plain_files_and_only_that(begin, hub, home):
    (home / ".cache" / "huggingface").mkdir(parents=True)
    (home / ".cache" / "huggingface" / "token").write_text("hf_of_the_user")
    script = begin()
    assert script.wait() == 0, script.output
    assert sentences(script.output)[2:] == [f"the attention kernel is in {kernel_dir()}/flash-attn3",
                                            "Done! Ready to train."]
    assert cached() == kernel_files()
    assert all(script.output.count(f"/4] {name} 0.") == 1 for name in kernel_files())
    assert {path.name for path in (home / ".cache").iterdir()} == {"autoresearch", "huggingface"}
    assert [path.name for path in (home / ".cache" / "huggingface").iterdir()] == ["token"]
    assert not any("Authorization" in headers for _, _, headers, _ in hub.requests)
    mask = os.umask(0)
    os.umask(mask)
    assert all(path.stat().st_mode & 0o777 == 0o777 & ~mask for path in kernel_dir().rglob("*") if path.is_dir())
    assert prepare.load_kernel().__file__ == f"{kernel_dir()}/flash-attn3/{BUILD}/__init__.py"

    hub.requests.clear()
    folders = [kernel_dir(), *(path for path in kernel_dir().rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o500)  # a read-only cache
    script = begin(unprivileged=True)
    assert script.wait() == 0, script.output
    for folder in folders:
        folder.chmod(0o700)
    assert f"the attention kernel is in {kernel_dir()}/flash-attn3\n" in script.output and hub.requests == []


def test_the_toy_fetches_no_kernel(monkeypatch, capsys):
    for step in ("write_toy_shards", "train_tokenizer", "fetch_kernel"):
        monkeypatch.setattr(prepare, step, lambda step=step: print(step))
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--toy"])
    prepare.main()
    assert capsys.readouterr().out.splitlines() == ["write_toy_shards", "train_tokenizer", "Done! Ready to train."]


ON_THE_LIST = {  # answers to the question for the builds, each given once, and what the sentence says
    "gone": (status(404, X_Error_Code="RepoNotFound"), "404"), "unauthorized": (status(401), "401"),
    "forbidden": (status(403), "403"), "a log-in page": (instead(b"<html>Sign in</html>"), "Expecting value"),
    "other JSON": (instead(b'{"error": 1}'), ""), "null": (instead(b"null"), ""),
    "an empty list": (instead(b"[]"), "no build for PyTorch"),
    "no folders": (instead(b'[{"type": "file", "path": "build/a", "size": 1, "oid": "0"}]'), "no build for PyTorch"),
    "none that fits": (instead(b'[{"type": "directory", "path": "build/torch99-cxx11-cu99-x86_64-linux", "oid": "0"}]'),
                       f"no build for PyTorch {torch.__version__}"),
    "no answer": (stall, "TimeoutError"), "come back later": (status(429, Retry_After="300"), "TimeoutError"),
    "redirects": (redirect(f"/api/kernels/{prepare.KERNEL[0]}/tree/{prepare.KERNEL[1]}/build"), "redirects"),
}


def test_a_hub_that_does_not_list_its_builds_is_a_sentence_in_time(begin, hub):
    hub.answers["build"] = [answer for answer, _ in ON_THE_LIST.values()]
    script = begin(IMPATIENT + f"[prepare.fetch_kernel() for _ in range({len(ON_THE_LIST)})]")
    assert script.wait(20) == 0
    for sentence, (_, reason) in zip(sentences(script.output), ON_THE_LIST.values(), strict=True):
        assert_reason(sentence, reason)
    assert cached() == {}


def test_a_hub_that_lists_no_files_or_is_asked_again_and_again_is_a_sentence_in_time(begin, hub):
    hub.answers = {"build": [send, status(503)], FITS: [stall]}
    script = begin(IMPATIENT + "prepare.fetch_kernel(); prepare.fetch_kernel()")
    assert script.wait(20) == 0
    for sentence in sentences(script.output):
        assert_reason(sentence, "TimeoutError")
    assert hub.count("build") >= 2 and cached() == {}


def test_without_a_network_or_offline_it_is_a_sentence(begin, hub):
    scripts = [begin(IMPATIENT + "prepare.fetch_kernel()", env={"HF_ENDPOINT": "http://127.0.0.1:1"}),
               begin(IMPATIENT + "prepare.fetch_kernel()", env={"HF_HUB_OFFLINE": "1"})]
    for script in scripts:
        assert script.wait(20) == 0
        assert_reason(*sentences(script.output), "")
    assert hub.requests == [] and cached() == {}


@pytest.mark.parametrize("stalls", ["build", "__init__.py"])
def test_ctrl_c_ends_a_stalled_fetch_at_once_and_the_next_run_sweeps(begin, hub, stalls):
    hub.answers[stalls] = [stall, send]
    script = begin()
    assert hub.stalled.acquire(timeout=30)
    script.send_signal(signal.SIGINT)
    assert script.wait(5) == 130 and "Traceback" not in script.output
    assert not (kernel_dir() / "flash-attn3").exists()
    assert begin("import prepare; prepare.fetch_kernel()").wait() == 0
    assert cached() == kernel_files()


def test_of_two_processes_one_fetches_and_a_killed_one_is_no_hindrance(begin, hub):
    hub.answers["__init__.py"] = [stall, send]
    killed = begin("import prepare; prepare.fetch_kernel()")
    assert hub.stalled.acquire(timeout=30)
    others = [begin("import prepare; prepare.fetch_kernel()") for _ in range(2)]
    killed.send_signal(signal.SIGKILL)
    for script in others:
        assert script.wait() == 0
        assert sentences(script.output) == [f"the attention kernel is in {kernel_dir()}/flash-attn3"]
    assert cached() == kernel_files()
    assert hub.count("metadata.json") == 1  # the killed one had not come that far


# ----------------------------------------------------------------------------------------------------------------------
# What the hub sends, and what the disk takes: in this process, with a list of files that came already
# ----------------------------------------------------------------------------------------------------------------------


def addresses(hub, paths):
    return {path: f"{hub.url}/kernels/{prepare.KERNEL[0]}/resolve/{prepare.KERNEL[1]}/{path}" for path in paths}


@pytest.fixture
def fetch(home, hub, monkeypatch, capsys):
    """A function that runs fetch_kernel() and returns its sentence."""
    monkeypatch.setattr(prepare, "list_build", lambda: addresses(hub, kernel_files()))
    monkeypatch.setattr(prepare, "DOWNLOAD_WAITS", (0.01,))  # two attempts

    def fetch():
        prepare.fetch_kernel()
        (sentence,) = sentences(capsys.readouterr().out)
        return sentence
    return fetch


ON_A_FILE = {
    "404": status(404), "429": status(429), "500": status(500), "cut": cut, "reset": reset, "stall": stall,
    "a log-in page": instead(b"<html>Sign in</html>"), "empty": instead(b""), "no HTTP": raw(b"220 mail\r\n"),
    "another SHA-256": lambda handler, body: send(handler, body, X_Linked_ETag=f'"{"0" * 64}"'),
}


@pytest.mark.parametrize("name", ["_ops.abi3.so", "metadata.json"])
@pytest.mark.parametrize("fault", ON_A_FILE)
def test_a_file_that_does_not_come_whole_leaves_nothing_and_is_fetched_the_next_time(fetch, hub, fault, name):
    hub.answers[name] = [ON_A_FILE[fault]]
    assert_reason(fetch(), "")
    assert cached() == {}
    hub.answers[name] = [ON_A_FILE[fault], send] if fault not in ("404", "a log-in page", "empty") else [chunked]
    assert fetch() == f"the attention kernel is in {kernel_dir()}/flash-attn3"
    assert cached() == kernel_files()


def test_a_build_that_came_without_its_metadata_or_with_another_file_is_refused(fetch, hub, monkeypatch):
    for paths in ([], sorted(kernel_files())[:-1], [*kernel_files(), f"{BUILD}/more.py"]):
        hub.kernel[f"{BUILD}/more.py"] = b""
        monkeypatch.setattr(prepare, "list_build", lambda paths=paths: addresses(hub, paths))
        assert_reason(fetch(), "")
        assert cached() == {}


def test_a_full_disk_is_a_sentence_and_leaves_nothing(fetch):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))  # bytes a file, as if the disk held no more
    try:
        sentence = fetch()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_reason(sentence, f"[Errno {errno.EFBIG}] File too large: '{kernel_dir()}")
    assert cached() == {}


def test_a_file_in_the_place_of_the_folder_is_a_sentence(fetch):
    kernel_dir().parent.mkdir(parents=True)
    kernel_dir().write_text("not a folder")
    assert_reason(fetch(), str(kernel_dir()))


def test_without_the_kernels_package_it_is_a_sentence(fetch, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "kernels"] + ["kernels"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert_reason(fetch(), "kernels")


def test_a_build_for_another_pytorch_stays_beside_the_one_that_fits(fetch):
    write_kernel(kernel_dir(), kernel_files(variant=OTHERS[0]))
    with pytest.raises(FileNotFoundError):
        prepare.load_kernel()
    fetch()
    assert cached() == kernel_files() | kernel_files(variant=OTHERS[0])
    prepare.load_kernel()


# ----------------------------------------------------------------------------------------------------------------------
# What is in the cache already
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("digest", [True, False])
def test_a_build_put_there_by_hand_is_kept_and_not_asked_for(fetch, hub, digest):
    write_kernel(kernel_dir(), kernel_files("x = 1", digest=digest))
    before = cached()
    assert fetch() == f"the attention kernel is in {kernel_dir()}/flash-attn3"
    assert cached() == before and hub.requests == []
    assert prepare.load_kernel().x == 1


def damaged(name, size, digest):
    """A function that puts a build there of which a file is cut to `size` bytes, or missing."""
    def put():
        write_kernel(kernel_dir(), kernel_files(digest=digest))
        path = kernel_dir() / "flash-attn3" / BUILD / name
        if size is None:
            path.unlink()
        else:
            os.truncate(path, size)
    return put


DAMAGES = [("__init__.py", None, True), ("layers/__init__.py", 3, True), ("_ops.abi3.so", None, True),
           ("_ops.abi3.so", 100_000, False), ("_ops.abi3.so", 63, False), ("_ops.abi3.so", 0, False),
           ("metadata.json", None, False), ("metadata.json", 50, False), ("metadata.json", 0, True)]


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_a_damaged_build_is_not_loaded_and_is_fetched_again(fetch, damage):
    damaged(*damage)()
    with pytest.raises(Exception) as error:
        prepare.load_kernel()
    assert prepare.first_line(error.value)
    assert fetch() == f"the attention kernel is in {kernel_dir()}/flash-attn3"
    assert cached() == kernel_files()
    prepare.load_kernel()


def test_without_a_kernel_the_sentence_says_what_to_run():
    with pytest.raises(FileNotFoundError, match="run `uv run prepare.py`$"):
        prepare.load_kernel()
    kernel_dir().mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="run `uv run prepare.py`$"):
        prepare.load_kernel()


def test_loading_opens_no_connection_though_a_kernel_asks_for_another(monkeypatch):
    def refuse(*args):
        raise AssertionError("a connection")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    write_kernel(kernel_dir(), kernel_files(kernel_depends=[{"repo-id": "kernels-community/other", "version": 1}]))
    with pytest.raises((OSError, ValueError), match="kernels-community/other"):
        prepare.load_kernel()


# ----------------------------------------------------------------------------------------------------------------------
# The kernel in train.py
# ----------------------------------------------------------------------------------------------------------------------


MODULES = {
    "ImportError": "raise ImportError('undefined symbol\\nand more')", "SyntaxError": "def (",
    "SystemExit": "raise SystemExit(0)", "a panic": "class Panic(BaseException): pass\nraise Panic('index')",
    "no interface": "", "no function": "class flash_attn_interface: pass",
    "another signature": "class flash_attn_interface:\n    flash_attn_func = staticmethod(lambda q, k, v: q)",
}
BODIES = {
    "no launch": "raise RuntimeError('CUDA error: no kernel image is available')", "exit": "raise SystemExit(0)",
    "nan": "return y * torch.nan", "a pair": "return y, y.sum(-1)", "None": "return None",
    "heads first": "return y.transpose(1, 2)", "integers": "return y.int()",
    "no window": "return train.attention.__wrapped__(q, k, v, q.size(1))",
    "no gradient": "return y.detach()",
    "no gradient of v": "return train.attention.__wrapped__(q, k, v.detach(), window)",
    "half a gradient": "return train.attention.__wrapped__(q, k / 2 + k.detach() / 2, v, window)",
    "changes q": "q.data.mul_(2); return train.attention.__wrapped__(q, k, v, window)",
    "changes v at last": "y = train.attention.__wrapped__(q, k, v.clone(), window); v.data.zero_(); return y",
}
KERNEL = """
import torch
import train

class flash_attn_interface:
    @staticmethod
    def flash_attn_func(q, k, v, causal, window_size):
        assert causal is True and window_size[1] == 0
        window, y = window_size[0], train.attention.__wrapped__(q, k, v, window_size[0])
        {}
"""
RIGHT = KERNEL.format("return y")
BAD = MODULES | {name: KERNEL.format(body) for name, body in BODIES.items()}
NAME = "flash-attn3"


@pytest.fixture
def choose(monkeypatch, capsys):
    """A function that lets train.py choose for a GPU, which is this CPU, and returns what it printed about attention.

    PyTorch's own kernels are replaced by the definition, since FlexAttention has no gradients on a CPU.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(train, "torch_attention", masked_attention)
    monkeypatch.setattr(train, "HEAD_DIM", 16)
    monkeypatch.setattr(prepare, "VOCAB_SIZE", 64)
    monkeypatch.setattr(prepare, "MAX_SEQ_LEN", 400)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)

    def choose():
        train.load_kernels(torch.device("cpu"))
        return [line for line in capsys.readouterr().out.splitlines()
                if line.startswith(("attention:", "not using")) and "the fused" not in line]
    return choose


def assert_right():
    q, k, v = torch.randn(3, 2, 40, 2, 16).unbind()
    for window in (7, 40):
        torch.testing.assert_close(train.attention(q, k, v, window), masked_attention(q, k, v, window))


def test_a_kernel_that_is_right_is_used_whatever_it_prints(choose):
    write_kernel(kernel_dir(), kernel_files(KERNEL.format("print('x' * 1_000_000); return y")))
    assert choose() == [f"attention: {NAME}"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_right()


@pytest.mark.parametrize("init", BAD.values(), ids=BAD)
def test_a_kernel_that_fails_makes_way_for_pytorchs_own(choose, init):
    write_kernel(kernel_dir(), kernel_files(init))
    refused, chosen = choose()
    assert refused.startswith(f"not using {NAME}: ") and chosen == "attention: FlexAttention and SDPA"
    assert_right()


@pytest.mark.parametrize("damage", [None, *DAMAGES], ids=str)
def test_without_a_whole_kernel_pytorchs_own_are_used(choose, damage):
    if damage:
        damaged(*damage)()
    refused, chosen = choose()
    assert refused.startswith(f"not using {NAME}: ") and chosen == "attention: FlexAttention and SDPA"
    assert damage or refused.endswith("run `uv run prepare.py`")
    assert_right()


def test_without_the_kernels_package_pytorchs_own_are_used(choose, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "kernels"] + ["kernels"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert choose()[0].startswith(f"not using {NAME}: ")
    assert_right()


def test_if_nothing_fast_is_right_the_definition_stays(choose, monkeypatch):
    monkeypatch.setattr(train, "torch_attention", lambda q, k, v, window: masked_attention(q, k, v, q.size(1)))
    assert len(choose()) == 3 and (train.attention.__wrapped__, 4) not in train.fast_paths


def test_a_cpu_gets_the_definitions_and_loads_nothing(capsys, monkeypatch):
    monkeypatch.setattr(prepare, "load_kernel", lambda: pytest.fail("not on a CPU"))
    train.fast_paths[train.attention.__wrapped__, 4] = lambda *args: None
    train.load_kernels(torch.device("cpu"))
    assert capsys.readouterr().out == "attention: masked SDPA\nfast paths: none\n" and not train.fast_paths


@pytest.mark.parametrize("capability, first", [((8, 0), False), ((9, 0), True), ((10, 0), True)])
def test_from_hopper_on_sdpa_tries_cudnn_first(monkeypatch, capability, first):
    chosen = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(train, "sdpa_kernel", lambda order, set_priority: (chosen.append((order, set_priority)),
                                                                           contextlib.nullcontext())[1])
    train.load_torch_attention(torch.device("cpu"))
    assert [(str(order[0]), set_priority) for order, set_priority in chosen] == (
        [("SDPBackend.CUDNN_ATTENTION", True)] if first else [])
    assert ("CUDNN" in torch.compiler.config.cache_key_tag) == first  # PyTorch's own key leaves the order out
