"""Pretrained weights when the hub cannot be reached."""

import socket
import time

import pytest
import timm
from huggingface_hub import constants

from bucketrank.detectors import backbone as swin
from bucketrank.detectors.backbone import build_backbone
from bucketrank.settings import BackboneSettings
from bucketrank.weights.sources import is_reachable

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def unreachable_hub(monkeypatch, tmp_path):
    """Make the hub unreachable and its cache empty."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with socket.socket() as bound:  # bound but not listening: connections are refused
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{bound.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setitem(swin.SWIN_HUB, "swin_tiny", "nobody/has-this")
        yield


@pytest.mark.parametrize("name", ["resnet18", "swin_tiny"])
def test_without_a_network_the_error_comes_at_once(name, unreachable_hub, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with pytest.raises(ConnectionError) as raised:
        build_backbone(BackboneSettings(name, weights="pretrained"))
    assert str(raised.value) == (
        f"backbone.weights: the pretrained weights of {name} cannot be downloaded (no connection to 127.0.0.1); pass a "
        "file with --backbone.weights FILE.safetensors, or start from random weights with --backbone.weights null"
    )
    assert waits == [], "the hub's library must not retry"
    assert not constants.HF_HUB_OFFLINE, "the setting must be restored"


def test_without_a_network_the_cache_is_read(unreachable_hub, monkeypatch):
    offline: list[bool] = []

    def create(name, **options):
        offline.append(constants.HF_HUB_OFFLINE)
        return usual(name, features_only=True)

    usual = timm.create_model
    monkeypatch.setattr(timm, "create_model", create)
    build_backbone(BackboneSettings("resnet18", weights="pretrained"))
    assert offline == [True]
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        build_backbone(BackboneSettings("resnet18", weights="pretrained"))
    assert offline == [True, False]


def test_behind_a_proxy_the_hub_counts_as_reachable(unreachable_hub, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    assert is_reachable(constants.ENDPOINT)


def test_a_mirror_without_tls_has_port_80(monkeypatch):
    asked = []

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        asked.append(address)
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr("bucketrank.weights.sources.getproxies", dict)
    for address in ("http://mirror", "https://mirror", "http://mirror:8080"):
        assert is_reachable(address)
    assert asked == [("mirror", 80), ("mirror", 443), ("mirror", 8080)]
