"""What every test gets: a fixed seed, no GPU unless marked `gpu`, and nothing of the user's cache.

Constants that a test changes in prepare or train, by hand or through use_toy_scale(), are put back after it.
"""

import gc
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS.parent))

import prepare  # noqa: E402
import train  # noqa: E402

torch.compiler.set_stance("force_eager")
torch.set_num_threads(1)  # the tensors are small, and threads that wait for a busy core would spin


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU, and compiles for it")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def point_prepare_at(cache_dir):
    prepare.CACHE_DIR = str(cache_dir)
    prepare.DATA_DIR = os.path.join(cache_dir, "data")
    prepare.TOKENIZER_DIR = os.path.join(cache_dir, "tokenizer")


def save_state():
    """What a test may leave behind in this process; returns the function that puts it back."""
    chosen = ("attention", "fused_squared_relu")
    modules = {module: {name: value for name, value in vars(module).items() if name.isupper() or name in chosen}
               for module in (prepare, train)}
    precision, recompile_limit = torch.get_float32_matmul_precision(), torch._dynamo.config.recompile_limit
    cache_allows = torch._functorch.config.autograd_cache_allow_custom_autograd_functions

    def restore():
        for module, values in modules.items():
            vars(module).update(values)
        torch.set_float32_matmul_precision(precision)
        torch._dynamo.config.recompile_limit = recompile_limit
        torch._functorch.config.autograd_cache_allow_custom_autograd_functions = cache_allows
        train.sdpa_settings.close()
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
