"""What every test gets: a fixed seed, no GPU unless marked `gpu`, and nothing of the user's cache.

Constants that a test changes in prepare or train, by hand or through use_toy_scale(), are put back after it.
"""

import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS.parent))
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the real hub for a kernel
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it, each of many processes would compile PyTorch's modules

from fake_hub import hub  # noqa: E402, F401

import launcher as launching  # noqa: E402
import prepare  # noqa: E402
import train  # noqa: E402

torch.compiler.set_stance("force_eager")
torch.set_num_threads(1)  # the tensors are small, and threads that wait for a busy core would spin


# `pytest` without arguments runs these, about half of the time, in a second process and shows their results as its own
BESIDE = ["test_analysis.py", "test_kernels.py", "test_night.py", "test_process.py"]


def in_one_process(config):
    return bool(config.invocation_params.args or os.environ.get("PYTEST_ADDOPTS"))


class ReportWriter:
    """In the second process: writes the result of each phase of each test as a line of JSON, and last how many ran."""

    def __init__(self, config):
        self.config, self.file = config, open(config.option.results, "w", buffering=1)

    def pytest_runtest_logreport(self, report):
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.file.write(json.dumps(data) + "\n")

    def pytest_sessionfinish(self, session):
        self.file.write(json.dumps([session.testscollected, session.testsfailed]) + "\n")


def pytest_addoption(parser):
    parser.addoption("--results", type=Path, help="where the second process writes its results")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU, and compiles for it")
    if config.option.results:
        config.pluginmanager.register(ReportWriter(config))


def pytest_ignore_collect(collection_path, config):
    return True if collection_path.name in BESIDE and not in_one_process(config) else None


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session):
    if in_one_process(session.config) or session.testsfailed:  # there are errors in the files themselves
        return (yield)
    hook = session.config.hook
    with tempfile.TemporaryDirectory() as folder, open(os.path.join(folder, "log"), "w+b") as log:
        results = Path(folder, "results")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--results", results,
                   *(TESTS / name for name in BESIDE)]
        with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as second:
            result = yield
        lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
        reports = [hook.pytest_report_from_serializable(config=session.config, data=line)
                   for line in lines if isinstance(line, dict)]
        counts = [sum(report.when == "teardown" for report in reports), sum(report.failed for report in reports)]
        session.testscollected += counts[0]
        for report in reports:
            hook.pytest_runtest_logreport(report=report)
        if second.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or lines[-1:] != [counts]:
            log.seek(0)
            pytest.exit(f"the second process ended early ({second.returncode}):\n{log.read().decode()}", returncode=1)
    return result


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def point_prepare_at(cache_dir):
    prepare.CACHE_DIR = str(cache_dir)
    prepare.DATA_DIR = os.path.join(cache_dir, "data")
    prepare.TOKENIZER_DIR = os.path.join(cache_dir, "tokenizer")
    prepare.KERNEL_DIR = os.path.join(cache_dir, "kernels")


def set_constants(values, *modules):
    """Set each constant in those of the modules that have it."""
    for module in modules:
        vars(module).update({name: value for name, value in values.items() if name in vars(module)})


def save_state():
    """What a test may leave behind in this process; returns the function that puts it back."""
    modules = {module: dict(vars(module)) for module in (prepare, train)}
    precision = torch.get_float32_matmul_precision()

    def restore():
        for module, values in modules.items():
            vars(module).update(values)
        torch.set_float32_matmul_precision(precision)
        train.sdpa_settings.close()
        train.fast_paths.clear()
        gc.unfreeze()
        gc.enable()

    return restore


@pytest.fixture(autouse=True)
def isolation(request, tmp_path, monkeypatch):
    """Each test starts from the constants in the files, with an empty cache of its own and the same seed."""
    restore = save_state()
    point_prepare_at(tmp_path / "cache")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # the toy scale has its cache below it
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    torch.manual_seed(1)
    gc.freeze()  # restore() undoes it: a run collects garbage, which is to search what this test made and no more
    if request.node.get_closest_marker("gpu"):
        with torch.compiler.set_stance("default"):
            yield
    else:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        yield
    restore()


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory):
    """Directory with data/ (the shards of tests/corpus) and tokenizer/ trained on them. Only to be read."""
    directory = tmp_path_factory.mktemp("tiny_cache")
    shutil.copytree(TESTS / "corpus", directory / "data")
    restore = save_state()
    point_prepare_at(directory)
    try:
        prepare.train_tokenizer()
    finally:
        restore()
    return directory


@pytest.fixture
def tiny(tiny_cache):
    """Points prepare at `tiny_cache` for this test and returns its Tokenizer."""
    point_prepare_at(tiny_cache)
    return prepare.Tokenizer.from_directory()


# Of the model in runs at toy scale: on a CPU without bf16 a step of Muon costs 0.4 s at the toy's own width of 128
NARROW = {"ASPECT_RATIO": 16, "HEAD_DIM": 32}


@pytest.fixture(scope="session")
def toy_home(tmp_path_factory):
    """A home directory in which `prepare.py --toy` has run; then its documents were cut, to fill buffers sooner."""
    home, restore = tmp_path_factory.mktemp("toy_home"), save_state()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setattr(sys, "argv", ["prepare.py", "--toy"])
        try:
            prepare.main()
            for path in prepare.list_parquet_files():
                texts = [text[:200] for texts in prepare.read_row_groups(path) for text in texts]
                pq.write_table(pa.table({"text": texts}), path)
        finally:
            restore()
    return home


@pytest.fixture(scope="session")
def golden():
    """tests/golden/model.npz as a dict, its JSON strings parsed: the reference model and optimizer as numbers."""
    with np.load(TESTS / "golden" / "model.npz") as file:
        arrays = dict(file)
    return arrays | {name: json.loads(str(arrays[name])) for name in ("config", "groups", "counts")}


@pytest.fixture(scope="session")
def facts():
    return json.loads((TESTS / "golden" / "facts.json").read_text())


@pytest.fixture
def golden_model(golden):
    """GPT on the CPU with the golden weights, none of which are zero."""
    model = train.GPT(train.GPTConfig(**golden["config"]))
    model.load_state_dict({name: torch.from_numpy(golden[f"init/{name}"]) for name, _ in model.named_parameters()})
    return model


@pytest.fixture
def run_notebook():
    """A function that executes the cells of analysis.ipynb in this process, and returns their variables."""

    def run():
        variables = {}
        for cell in json.loads((TESTS.parent / "analysis.ipynb").read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"analysis.ipynb:{cell['id']}", "exec"), variables)
        return variables

    return run


# ----------------------------------------------------------------------------------------------------------------------
# The scripts as processes
# ----------------------------------------------------------------------------------------------------------------------


class Script:
    """A script that runs in a process of its own; `output` is what it has written to stdout and stderr so far."""

    def __init__(self, address, pid, log):
        self.address, self.pid, self.log, self.code = address, pid, log, None

    @property
    def output(self):
        return self.log.read_text(errors="replace")

    def send_signal(self, number):
        os.kill(self.pid, number)

    def wait(self, timeout=60):
        """The exit code; negative after a signal that ended it. A script that hangs is killed, and fails the test."""
        if self.code is None:
            ended = launching.has_ended(self.pid, timeout)
            if not ended:
                self.send_signal(signal.SIGKILL)
            self.code = launching.ask(self.address, {"wait": self.pid})
            assert ended, f"still running after {timeout} s:\n{self.output}"
        return self.code


@pytest.fixture(scope="session")
def launcher(tmp_path_factory):
    """The address of tests/launcher.py at work."""
    home = tmp_path_factory.mktemp("launcher_home")
    env = {**os.environ, "HOME": str(home), "PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1",
           "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        address = os.path.join(folder, "launcher")
        server.bind(address)
        server.listen(64)
        command = [sys.executable, str(TESTS / "launcher.py"), "serve", str(server.fileno())]
        process = subprocess.Popen(command, cwd=home, env=env, pass_fds=[server.fileno()],
                                   start_new_session=True)  # Ctrl-C is for the tests, which then end what it started
        yield address
        process.kill()
        process.wait()


@pytest.fixture
def start(launcher, tmp_path):
    """A function that starts "prepare.py" or "train.py" with arguments in an empty folder, and returns the Script.

    Its HOME is tmp_path / "home". `smaller` sets constants of both files at toy scale, `code` is run in place of the
    script; `stdin`, `stdout` and `stderr` are file numbers, None for a closed one, and by default nothing and a log.
    """
    scripts, home, cwd = [], tmp_path / "home", tmp_path / "cwd"
    home.mkdir(exist_ok=True)
    cwd.mkdir()

    def start(name, *args, env=(), smaller=None, code=None, unprivileged=False, **streams):
        env = os.environ | {"HOME": str(home), "CUDA_VISIBLE_DEVICES": ""} | dict(env)
        log = tmp_path / f"{len(scripts)}.log"
        with open(log, "wb") as default, open(os.devnull, "rb") as nothing:
            files = [streams.get(stream, file.fileno())
                     for stream, file in (("stdin", nothing), ("stdout", default), ("stderr", default))]
            job = dict(argv=[str(TESTS.parent / name), *args], open=[file is not None for file in files], cwd=str(cwd),
                       env=env, smaller=smaller, code=code, unprivileged=unprivileged)
            pid = launching.ask(launcher, job, [file for file in files if file is not None])
        scripts.append(Script(launcher, pid, log))
        return scripts[-1]

    yield start
    for script in scripts:
        if script.code is None:
            script.send_signal(signal.SIGKILL)
            script.wait()
    assert os.listdir(cwd) == []  # a script writes nothing into the folder in which it was started
