"""Attention: the definition against loops, the fast implementations against the definition, and how one is chosen.

The kernel hub is played by fakes; nothing here uses a network.
"""

import math
import sys
import threading
import time
import types

import pytest
import requests
import torch
from torch.nn.attention import SDPBackend

import train
from train import check_attention, load_attention, masked_attention, torch_attention

CPU = torch.device("cpu")
VARUNNEAL, COMMUNITY = ("varunneal/flash-attention-3", "main"), ("kernels-community/flash-attn3", "v1")


def random_qkv(T, n_head, n_kv_head, D=16, B=2, **options):
    return [torch.randn(B, T, heads, D, **options) for heads in (n_head, n_kv_head, n_kv_head)]


def attention_by_query(q, k, v, window):
    """The specification in float64, one query at a time: it sees itself and `window` tokens before it."""
    q, k, v = q.double(), k.double(), v.double()
    y = torch.empty_like(q)
    B, T, H, D = q.shape
    for b in range(B):
        for t in range(T):
            for h in range(H):
                kv, first = h * k.size(2) // H, max(0, t - window)
                scores = k[b, first:t + 1, kv] @ q[b, t, h] / math.sqrt(D)  # (at most window + 1,)
                y[b, t, h] = torch.softmax(scores, dim=0) @ v[b, first:t + 1, kv]
    return y


# ----------------------------------------------------------------------------------------------------------------------
# The definition
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("window", [0, 1, 5, 12, 13, 100])
def test_a_query_sees_itself_and_the_window_before_it(window, heads):
    q, k, v = random_qkv(13, *heads)
    torch.testing.assert_close(masked_attention(q, k, v, window).double(), attention_by_query(q, k, v, window),
                               rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize("T, window", [(70, 0), (70, 5), (70, 68), (70, 69), (70, 200), (300, 128), (300, 298)])
def test_pytorchs_own_kernels_compute_the_definition(T, window, heads):
    inputs = random_qkv(T, *heads)  # without gradients: on the CPU of newer torch FlexAttention has none
    torch.testing.assert_close(torch_attention(*inputs, window), masked_attention(*inputs, window))


@pytest.mark.parametrize("T, window", [(640, w) for w in (0, 1, 100, 127, 128, 129, 255, 256, 320, 638)] + [(600, 300)])
def test_blocks_listed_for_flex_attention_are_the_ones_a_window_touches(T, window):
    mask, block = train.window_block_mask(window, T, CPU), 128
    size = math.ceil(T / block)

    def listed(counts, indices):
        counts, indices = counts[0, 0].tolist(), indices[0, 0].tolist()
        return {(i, j) for i in range(size) for j in indices[i][:counts[i]]}

    part, whole = listed(mask.kv_num_blocks, mask.kv_indices), listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    distance = torch.arange(size * block)[:, None] - torch.arange(size * block)
    tiles = ((distance >= 0) & (distance <= window)).double().view(size, block, size, block).mean(dim=(1, 3))
    assert whole == {(i, j) for i in range(size) for j in range(size) if tiles[i, j] == 1}
    assert part == {(i, j) for i in range(size) for j in range(size) if 0 < tiles[i, j] < 1}


# ----------------------------------------------------------------------------------------------------------------------
# The check of a candidate
# ----------------------------------------------------------------------------------------------------------------------


def no_window(q, k, v, window):
    return masked_attention(q, k, v, q.size(1))


def one_key_less(q, k, v, window):
    return masked_attention(q, k, v, window - 1)


def not_causal(q, k, v, window):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def other_scale(q, k, v, window):
    return masked_attention(1.2 * q, k, v, window)


def wrong_gradient(q, k, v, window):
    return masked_attention(q, k.detach() * 0.5 + k * 0.5, v, window)


def nan(q, k, v, window):
    return masked_attention(q, k, v, window) * math.nan


def test_a_right_candidate_passes_the_check():
    check_attention(masked_attention, CPU)


@pytest.mark.parametrize("candidate", [no_window, one_key_less, not_causal, other_scale, wrong_gradient, nan])
def test_a_wrong_candidate_fails_the_check(candidate):
    with pytest.raises(RuntimeError, match="window"):
        check_attention(candidate, CPU)


# ----------------------------------------------------------------------------------------------------------------------
# The choice
# ----------------------------------------------------------------------------------------------------------------------


class Hub:
    """Stands in for the kernel hub, huggingface_hub and the GPU; `calls` holds (repository, revision, offline)."""

    def __init__(self):
        self.calls, self.asked = [], 0
        self.capability, self.reachable, self.cached = (9, 0), True, set()
        self.kernels = {VARUNNEAL: masked_attention, COMMUNITY: masked_attention}
        self.constants = types.SimpleNamespace(HF_HUB_OFFLINE=False, ENDPOINT="https://hub.invalid")

    def head(self, url, timeout):
        assert url == self.constants.ENDPOINT and 0 < timeout <= 20
        self.asked += 1
        if not self.reachable:
            raise requests.ConnectionError("no route to host")
        return types.SimpleNamespace(status_code=200)

    def get_kernel(self, repo_id, revision, trust_remote_code):
        assert trust_remote_code == [repo_id]
        offline = self.constants.HF_HUB_OFFLINE
        self.calls.append((repo_id, revision, offline))
        if offline and (repo_id, revision) not in self.cached:
            raise FileNotFoundError("not in the cache")
        if not offline and not self.reachable:
            raise requests.ConnectionError("no route to host")
        function = self.kernels[repo_id, revision]
        if isinstance(function, Exception):
            raise function

        def flash_attn_func(q, k, v, causal, window_size):
            assert causal is True and window_size[1] == 0
            return function(q, k, v, window_size[0])

        return types.SimpleNamespace(flash_attn_interface=types.SimpleNamespace(flash_attn_func=flash_attn_func))


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setitem(sys.modules, "kernels", types.SimpleNamespace(get_kernel=hub.get_kernel))
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(constants=hub.constants))
    monkeypatch.setattr(requests, "head", hub.head)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: hub.capability)
    monkeypatch.setattr(train, "check_attention", lambda candidate, device: check_attention(candidate, CPU))
    train.hub_is_reachable.cache_clear()
    return hub


GPU = types.SimpleNamespace(type="cuda")


def assert_attention_has_windows():
    q, k, v = random_qkv(40, 2, 2)
    for window in (7, 40):
        torch.testing.assert_close(train.attention(q, k, v, window), masked_attention(q, k, v, window))


def test_a_cpu_gets_the_definition(hub):
    train.attention = no_window
    assert load_attention(CPU)
    assert train.attention is masked_attention and not hub.calls and not hub.asked


def test_hopper_takes_the_first_hub_kernel(hub):
    name = load_attention(GPU)
    assert VARUNNEAL[0] in name and hub.calls == [(*VARUNNEAL, True), (*VARUNNEAL, False)]
    assert train.attention is not masked_attention
    assert_attention_has_windows()


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_other_gpus_start_with_the_community_kernel(hub, capability):
    hub.capability = capability
    assert COMMUNITY[0] in load_attention(GPU)
    assert hub.calls == [(*COMMUNITY, True), (*COMMUNITY, False)]


@pytest.mark.parametrize("capability, first", [((8, 0), False), ((9, 0), True), ((10, 0), True)])
def test_from_hopper_on_sdpa_tries_cudnn_first(hub, capability, first):
    hub.capability = capability
    before = torch._C._get_sdp_priority_order()
    load_attention(GPU)
    after = torch._C._get_sdp_priority_order()
    assert after[0] == int(SDPBackend.CUDNN_ATTENTION) if first else after == before
    assert ("CUDNN" in torch.compiler.config.cache_key_tag) == first  # PyTorch's own key leaves the order out


@pytest.mark.parametrize("broken", [no_window, wrong_gradient, nan, ImportError("undefined symbol\nand more")])
def test_a_hub_kernel_that_fails_makes_way_for_the_next(hub, capsys, broken):
    hub.kernels[VARUNNEAL] = broken
    hub.cached = {VARUNNEAL, COMMUNITY}
    assert COMMUNITY[0] in load_attention(GPU)
    assert hub.calls[0] == (*VARUNNEAL, True) and hub.calls[-1] == (*COMMUNITY, True)
    assert_attention_has_windows()
    output = capsys.readouterr().out
    assert all(VARUNNEAL[0] in line for line in output.splitlines()) and output


@pytest.mark.parametrize("reachable", [True, False])
def test_what_is_in_the_cache_is_used_whether_or_not_the_hub_could_be_reached(hub, reachable):
    hub.reachable, hub.cached = reachable, {VARUNNEAL}
    assert VARUNNEAL[0] in load_attention(GPU)
    assert hub.calls == [(*VARUNNEAL, True)] and hub.asked == 0
    assert hub.constants.HF_HUB_OFFLINE is False
    assert_attention_has_windows()


def test_an_unreachable_hub_is_asked_once_and_leaves_the_next_cached_kernel(hub):
    hub.reachable, hub.cached = False, {COMMUNITY}
    assert COMMUNITY[0] in load_attention(GPU)
    assert hub.calls == [(*VARUNNEAL, True), (*COMMUNITY, True)] and hub.asked == 1
    assert hub.constants.HF_HUB_OFFLINE is False


def test_a_user_who_is_offline_stays_so_and_no_host_is_asked(hub):
    hub.constants.HF_HUB_OFFLINE, hub.cached = True, {COMMUNITY}
    assert COMMUNITY[0] in load_attention(GPU)
    assert hub.calls == [(*VARUNNEAL, True), (*COMMUNITY, True)]
    assert hub.constants.HF_HUB_OFFLINE is True and hub.asked == 0


@pytest.mark.parametrize("reachable", [True, False])
def test_without_any_kernel_pytorch_computes_the_same_windows(hub, capsys, monkeypatch, reachable):
    monkeypatch.setattr(train, "check_attention", lambda candidate, device: None)  # its backward needs a GPU
    hub.reachable = reachable
    hub.kernels = dict.fromkeys(hub.kernels, RuntimeError("no build for this machine"))
    assert "SDPA" in load_attention(GPU)
    assert train.attention is not masked_attention
    assert hub.constants.HF_HUB_OFFLINE is False
    assert_attention_has_windows()
    output = capsys.readouterr().out
    assert VARUNNEAL[0] in output and COMMUNITY[0] in output


def test_without_the_kernels_package_pytorch_computes_the_same_windows(hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)
    monkeypatch.setattr(train, "check_attention", lambda candidate, device: None)
    assert "SDPA" in load_attention(GPU)
    assert train.attention is not masked_attention
    assert_attention_has_windows()


def test_if_nothing_fast_works_the_definition_stays(hub, monkeypatch):
    hub.reachable = False
    monkeypatch.setattr(train, "torch_attention", no_window)
    name = load_attention(GPU)
    assert train.attention is masked_attention and "SDPA" in name and "Flex" not in name


def test_a_hub_that_does_not_answer_is_given_up_in_time(hub, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(requests, "head", lambda url, timeout: release.wait(30))  # as a stalled name lookup
    start = time.monotonic()
    assert train.hub_is_reachable(seconds=0.2) is False
    assert time.monotonic() - start < 5
    release.set()


@pytest.mark.parametrize("status, expected", [(200, True), (404, True), (503, False)])
def test_any_answer_but_a_server_error_means_reachable(hub, monkeypatch, status, expected):
    train.hub_is_reachable.cache_clear()
    monkeypatch.setattr(requests, "head", lambda url, timeout: types.SimpleNamespace(status_code=status))
    assert train.hub_is_reachable() is expected


# ----------------------------------------------------------------------------------------------------------------------
# On a GPU
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("T", [256, 640])
def test_fast_attention_agrees_with_the_definition_in_bf16(T, heads, loaded):
    if loaded:
        load_attention(torch.device("cuda"))
    candidate = train.attention if loaded else torch_attention
    for window in (T // 2, T, 100, 200):
        inputs = [x.requires_grad_() for x in random_qkv(T, *heads, D=128, device="cuda", dtype=torch.bfloat16)]
        exact = [x.detach().float().requires_grad_() for x in inputs]
        dy = torch.randn(2, T, heads[0], 128, device="cuda", dtype=torch.bfloat16)
        found, expected = candidate(*inputs, window), masked_attention(*exact, window)
        assert found.dtype == torch.bfloat16
        pairs = zip((found, *torch.autograd.grad(found, inputs, dy)),
                    (expected, *torch.autograd.grad(expected, exact, dy.float())), strict=True)
        for one, other in pairs:
            assert (one.float() - other).norm() < 0.02 * other.norm()
