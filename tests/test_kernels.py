"""load_attention with the real libraries: a hub on loopback, a cache of its own, kernels in plain Python, and faults.

Whatever goes wrong, some attention with the right windows is chosen soon, with a line for each that is not used.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import kernels
import pytest
import torch
from huggingface_hub import constants
from torch.nn.attention import SDPBackend

import train
from train import check_attention, load_attention, masked_attention

FIRST, SECOND, OWN = "varunneal/flash-attention-3", "kernels-community/flash-attn3", "FlexAttention and SDPA"
BRANCHES = {FIRST: "main", SECOND: "v1"}
BUILD, OTHER_BUILD = "build/torch-universal", "build/torch99-cu999-x86_64-linux"
KERNEL = """
import torch
import train

class flash_attn_interface:
    @staticmethod
    def flash_attn_func(q, k, v, causal, window_size):
        assert causal is True and window_size[1] == 0
        window, y = window_size[0], train.masked_attention(q, k, v, window_size[0])
        {}
"""
RIGHT = KERNEL.format("return y")
REAL_RUN = subprocess.run


def kernel_files(init=RIGHT, archs=("9.0a",), build=BUILD):
    """What a repository holds: path to bytes. The build of another machine and the README are never downloaded."""
    backend = {"type": "cuda", "archs": list(archs)}
    metadata = {"name": "attention", "id": f"_attention_{hashlib.sha1(init.encode()).hexdigest()}", "version": 1,
                "license": "MIT", "python-depends": [], "backend": backend}
    files = {f"{build}/__init__.py": init, f"{build}/metadata.json": json.dumps(metadata), "README.md": "kernels",
             f"{OTHER_BUILD}/metadata.json": json.dumps(metadata)}
    return {path: text.encode() for path, text in files.items()}


def hexdigest(data):
    return hashlib.sha1(data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """The part of the hub's interface that a download needs; `server.fault(handler)` may take a request over."""

    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

    def log_message(self, *args):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in ({"Content-Length": len(body)} | headers).items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        repo = next((repo for repo in BRANCHES if repo in self.path), None)
        if repo is None:  # not about kernels
            return self.answer(404)
        self.server.requests.append(self.path)
        if self.server.fault(self):
            return
        files, commit = self.server.repos.get(repo, {}), hexdigest(repo.encode())
        if not files:
            self.answer(404, X_Error_Code="RepoNotFound")
        elif "/revision/" in self.path:
            self.answer(200, json.dumps({"id": repo, "sha": commit}).encode())
        elif "/tree/" in self.path:
            folders = sorted({path.rsplit("/", 1)[0] for path in files if "/" in path})
            tree = [{"type": "directory", "path": path, "oid": commit} for path in folders]
            tree += [{"type": "file", "path": path, "size": len(data), "oid": hexdigest(data)}
                     for path, data in files.items() if "recursive=true" in self.path]
            self.answer(200, json.dumps(tree).encode())
        else:
            data = files[self.path.split("/resolve/")[1].split("/", 1)[1]]
            self.answer(200, data, ETag=f'"{hexdigest(data)}"', X_Repo_Commit=commit)

    do_HEAD = do_GET


class Hub(ThreadingHTTPServer):
    """Holds `repos`; `requests` are the paths asked for, and stalled answers go on when `released` is set."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos, self.requests, self.released = dict.fromkeys(BRANCHES, kernel_files()), [], threading.Event()
        self.fault, self.capability = lambda handler: False, (9, 0)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def fill_cache(self, *repos):
        for repo in repos:
            kernels.install_kernel(repo, revision=BRANCHES[repo], trust_remote_code=[repo])
        self.requests.clear()

    def go_down(self):
        """Refuse connections from now on."""
        constants.ENDPOINT = "http://127.0.0.1:1"
        constants.HUGGINGFACE_CO_URL_TEMPLATE = constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"


def run_in_a_fork(command, timeout, **options):
    """In place of subprocess.run: with the libraries loaded, and with the constants that a test has set."""
    assert command[:2] == [sys.executable, "-c"]
    child = multiprocessing.get_context("fork").Process(target=exec, args=(command[2],))
    child.start()
    child.join(1)
    if child.is_alive():
        child.kill()
        child.join()
        raise subprocess.TimeoutExpired(command, timeout)
    return subprocess.CompletedProcess(command, child.exitcode, "", "Traceback\n  and so on\nOSError: it failed\n")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    for name, value in list(vars(constants).items()):  # the user's token and cache are neither read nor written
        if isinstance(value, str) and value.startswith(constants.HF_HOME):
            monkeypatch.setattr(constants, name, str(tmp_path / "hf") + value.removeprefix(constants.HF_HOME))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "LOCAL_KERNELS", "KERNELS_CACHE", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    hub, before = Hub(), set(threading.enumerate())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)  # else the library sends a header it then rejects
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE",
                        hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: hub.capability)
    monkeypatch.setattr(train, "torch_attention", masked_attention)  # FlexAttention has no gradients on a CPU
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(train, "check_attention", lambda candidate, device: check_attention(candidate, CPU))
    for module in (huggingface_hub.utils._http, huggingface_hub.file_download):  # retries end with the test
        monkeypatch.setattr(module, "time", types.SimpleNamespace(sleep=hub.released.wait, time=time.time))
    monkeypatch.setattr(train.subprocess, "run", run_in_a_fork)
    threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True).start()
    yield hub
    hub.fault = gone
    hub.released.set()
    for thread in set(threading.enumerate()) - before:
        if thread.name.endswith("(ask)"):
            thread.join(20)
            assert not thread.is_alive()
    hub.shutdown()
    hub.server_close()


CPU, GPU = torch.device("cpu"), types.SimpleNamespace(type="cuda")


def assert_chosen(expected, capsys):
    """The attention is the expected one and right, those before it got a line each, and no setting is left changed."""
    offline, start = constants.HF_HUB_OFFLINE, time.monotonic()
    assert load_attention(GPU) == expected
    assert time.monotonic() - start < 20
    assert constants.HF_HUB_OFFLINE is offline and "LOCAL_KERNELS" not in os.environ
    refused = [FIRST, SECOND, OWN][:[FIRST, SECOND, OWN].index(expected)]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not using")]
    assert [line.split(":")[0] for line in lines] == [f"not using {name}" for name in refused]
    q, k, v = torch.randn(3, 2, 40, 2, 16).unbind()
    for window in (7, 40):
        torch.testing.assert_close(train.attention(q, k, v, window), masked_attention(q, k, v, window))


# ----------------------------------------------------------------------------------------------------------------------
# The GPU
# ----------------------------------------------------------------------------------------------------------------------


def test_a_cpu_gets_the_definition_and_asks_nobody(hub):
    train.attention = None
    assert load_attention(CPU) == "masked SDPA"
    assert train.attention is masked_attention and not hub.requests


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_other_gpus_than_hopper_start_with_the_community_kernel(hub, capability):
    hub.capability, hub.repos[SECOND] = capability, kernel_files(archs=["8.0", "10.0"])
    assert load_attention(GPU) == SECOND
    assert not any(FIRST in path for path in hub.requests)


@pytest.mark.parametrize("capability, first", [((8, 0), False), ((9, 0), True), ((10, 0), True)])
def test_from_hopper_on_sdpa_tries_cudnn_first(hub, capability, first):
    hub.go_down()
    hub.capability, before = capability, torch._C._get_sdp_priority_order()
    load_attention(GPU)
    after = torch._C._get_sdp_priority_order()
    assert after[0] == int(SDPBackend.CUDNN_ATTENTION) if first else after == before
    assert ("CUDNN" in torch.compiler.config.cache_key_tag) == first  # PyTorch's own key leaves the order out


def test_without_the_kernels_package_pytorchs_own_kernels_are_used(hub, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)
    assert_chosen(OWN, capsys)


def test_if_nothing_fast_is_right_the_definition_stays(hub, monkeypatch):
    hub.go_down()
    monkeypatch.setattr(train, "torch_attention", lambda q, k, v, window: masked_attention(q, k, v, q.size(1)))
    assert load_attention(GPU) == "masked SDPA"
    assert train.attention is masked_attention


# ----------------------------------------------------------------------------------------------------------------------
# The cache
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offline", [False, True])
def test_what_a_first_run_downloaded_is_found_without_a_question_to_the_hub(hub, capsys, monkeypatch, offline):
    assert_chosen(FIRST, capsys)
    assert any("/resolve/" in path for path in hub.requests) and not any(OTHER_BUILD in path for path in hub.requests)
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    assert_chosen(FIRST, capsys)
    assert not hub.requests


def test_a_kernel_that_changes_on_the_hub_stays_as_it_is_in_the_cache(hub, capsys):
    hub.fill_cache(FIRST)
    hub.repos[FIRST] = kernel_files("raise ImportError")
    assert_chosen(FIRST, capsys)


@pytest.mark.parametrize("cached, expected", [([], OWN), ([SECOND], SECOND), ([FIRST, SECOND], FIRST)])
@pytest.mark.parametrize("offline", [False, True])
def test_without_the_hub_the_cache_decides(hub, capsys, monkeypatch, cached, expected, offline):
    hub.fill_cache(*cached)
    hub.go_down()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    assert_chosen(expected, capsys)
    assert not hub.requests


def test_what_the_library_finds_by_name_without_the_hub_is_used(hub, capsys, monkeypatch):
    def get_kernel(repo_id, revision, trust_remote_code):
        assert constants.HF_HUB_OFFLINE and (BRANCHES[repo_id], [repo_id]) == (revision, trust_remote_code)
        exec(RIGHT, variables := {})
        return types.SimpleNamespace(**variables)

    hub.go_down()
    monkeypatch.setattr(kernels, "get_kernel", get_kernel)
    assert_chosen(FIRST, capsys)


def lose(name):
    def damage(folder):
        (folder / BUILD / name).unlink()
    return damage


def cut(name, size):
    def damage(folder):
        path = folder / BUILD / name
        path.write_bytes(path.read_bytes()[:size])
    return damage


def lose_blobs(folder):
    shutil.rmtree(folder.parent.parent / "blobs")


def lose_snapshot(folder):
    shutil.rmtree(folder)


def lose_branch(folder):
    shutil.rmtree(folder.parent.parent / "refs")


def empty_branch(folder):
    (folder.parent.parent / "refs" / "main").write_text("")


LOST = [lose("__init__.py"), lose("metadata.json"), lose_blobs, lose_snapshot, lose_branch]
CUT = [cut("__init__.py", 0), cut("__init__.py", len(RIGHT) - 10), cut("metadata.json", 20), empty_branch]


@pytest.mark.parametrize("up", [False, True])
@pytest.mark.parametrize("damage", LOST + CUT)
def test_a_damaged_cache_is_mended_by_the_hub_or_makes_way_for_the_next_kernel(hub, capsys, damage, up):
    hub.fill_cache(FIRST, SECOND)
    damage(Path(constants.HF_HUB_CACHE, f"kernels--{FIRST.replace('/', '--')}", "snapshots", hexdigest(FIRST.encode())))
    if not up:
        hub.go_down()
    mended = up and damage in [*LOST, empty_branch]  # the library does not look at the size of what it has
    assert_chosen(FIRST if mended else SECOND, capsys)


def test_a_cache_that_cannot_be_written_leaves_pytorchs_own_kernels(hub, capsys):
    Path(constants.HF_HUB_CACHE).parent.write_text("a file where the folder should be")
    assert_chosen(OWN, capsys)


# ----------------------------------------------------------------------------------------------------------------------
# The hub
# ----------------------------------------------------------------------------------------------------------------------


def answers(status, body=b"{}", **headers):
    return lambda handler: handler.answer(status, body, **headers) is None


def redirects_for_ever(handler):
    return handler.answer(302, Location=handler.path) is None


def stalls(handler):
    return not handler.server.released.wait(30)


def on(part, fault, method="GET"):
    return lambda handler: part in handler.path and handler.command == method and fault(handler)


def sends_half(then):
    def fault(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(bytes(500))
        then(handler)
        handler.close_connection = True
        handler.connection.shutdown(socket.SHUT_RDWR)
        return True
    return fault


gone = answers(404, X_Error_Code="RepoNotFound")
HUB_FAULTS = {
    "gone": gone, "unauthorized": answers(401), "forbidden": answers(403), "broken": answers(500),
    "overloaded": answers(503), "too many requests": answers(429), "come back later": answers(429, Retry_After=300),
    "a log-in page": answers(200, b"<html>", Content_Type="text/html"), "other JSON": answers(200, b"null"),
    "redirects": redirects_for_ever, "no answer": stalls,
}
DOWNLOAD_FAULTS = {
    "no list": on("/tree/", stalls), "no list, come back later": on("/tree/", answers(429, Retry_After=300)),
    "no files": on("/resolve/", gone, "HEAD"), "no download": on("/resolve/", stalls),
    "a download cut": on("__init__", sends_half(lambda handler: None)),
    "a download that stalls": on("__init__", sends_half(stalls)),
}
FAULTS = HUB_FAULTS | DOWNLOAD_FAULTS


@pytest.mark.parametrize("fault", FAULTS)
def test_a_hub_that_fails_leaves_the_next_cached_kernel(hub, capsys, monkeypatch, fault):
    hub.fill_cache(SECOND)
    hub.fault, probe_hub, downloads = FAULTS[fault], train.probe_hub, []
    monkeypatch.setattr(train, "probe_hub", lambda repo, revision: probe_hub(repo, revision, seconds=0.4))
    monkeypatch.setattr(train.subprocess, "run", lambda command, **options: (
        downloads.append(options["timeout"]), run_in_a_fork(command, **options))[1])
    assert_chosen(SECOND, capsys)
    assert hub.requests and not any(SECOND in path for path in hub.requests)
    assert downloads == ([90] if fault in DOWNLOAD_FAULTS else [])  # where the hub itself fails, none is begun


@pytest.mark.parametrize("stalls_on, expected", [(None, FIRST), ("__init__", SECOND)])
def test_a_download_is_a_process_that_is_stopped_when_it_stalls(hub, capsys, monkeypatch, stalls_on, expected):
    hub.fill_cache(SECOND)
    hub.fault = on(stalls_on, sends_half(stalls)) if stalls_on else hub.fault
    for name, value in {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": constants.HF_HUB_CACHE}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(train.subprocess, "run", lambda command, timeout, **options: REAL_RUN(
        command, timeout=6 if stalls_on else timeout, **options))
    assert_chosen(expected, capsys)
    assert any("__init__" in path for path in hub.requests)
    assert all(thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())


def test_a_repository_that_is_gone_makes_way_for_the_next_on_the_hub(hub, capsys):
    hub.repos[FIRST] = {}
    assert_chosen(SECOND, capsys)


# ----------------------------------------------------------------------------------------------------------------------
# The kernel
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
    "no window": "return train.masked_attention(q, k, v, q.size(1))",
    "no gradient": "return y.detach()", "no gradient of v": "return train.masked_attention(q, k, v.detach(), window)",
    "half a gradient": "return train.masked_attention(q, k / 2 + k.detach() / 2, v, window)",
    "changes q": "q.data.mul_(2); return train.masked_attention(q, k, v, window)",
    "changes v at last": "y = train.masked_attention(q, k, v.clone(), window); v.data.zero_(); return y",
}
BAD = MODULES | {name: KERNEL.format(body) for name, body in BODIES.items()}


@pytest.mark.parametrize("init", BAD.values(), ids=BAD)
def test_a_kernel_that_fails_makes_way_for_the_next(hub, capsys, init):
    hub.repos[FIRST] = kernel_files(init)
    hub.fill_cache(FIRST, SECOND)
    assert_chosen(SECOND, capsys)


@pytest.mark.parametrize("options", [{"archs": ["8.0"]}, {"build": "build/torch21-cxx11-cu118-x86_64-linux"}])
def test_a_kernel_without_a_build_for_this_gpu_or_torch_makes_way_for_the_next(hub, capsys, options):
    hub.repos[FIRST] = kernel_files(**options)
    assert_chosen(SECOND, capsys)
    hub.repos[FIRST] = kernel_files()
    hub.repos[SECOND] = kernel_files(**options)
    shutil.rmtree(constants.HF_HUB_CACHE)
    hub.fault = on(FIRST, gone, "GET")
    assert_chosen(OWN, capsys)


def test_a_cached_build_for_other_gpus_is_not_even_imported(hub, capsys):
    hub.repos[FIRST] = kernel_files("import os; os._exit(1)", archs=["8.0"])
    hub.fill_cache(FIRST, SECOND)
    assert_chosen(SECOND, capsys)


def test_what_a_kernel_prints_does_no_harm(hub, capsys):
    hub.repos[FIRST] = kernel_files(KERNEL.format("print('x' * 1_000_000); return y"))
    assert_chosen(FIRST, capsys)
