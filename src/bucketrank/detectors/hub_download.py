"""Access to the Hugging Face hub, or to its cache."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants

CONNECT_SECONDS = 5


@contextmanager
def downloading(name: str) -> Iterator[None]:
    """Run a download of the weights of ``name``; a failure becomes a ConnectionError that says what to do."""
    remedy = "pass a file with --backbone.weights FILE.safetensors, or start from random weights with "
    with hub_access(f"backbone.weights: the pretrained weights of {name}", remedy + "--backbone.weights null"):
        yield


@contextmanager
def hub_access(content: str, remedy: str, *, action: str = "downloaded") -> Iterator[None]:
    """Let ``content`` be downloaded (or ``action``); a failure becomes a ConnectionError with reason and ``remedy``.

    If the hub is unreachable only the cache is read, because the hub's library would retry for a minute.
    """
    with hub_offline(offline=not is_reachable(constants.ENDPOINT)):
        try:
            yield
        except OSError as error:
            host = urlsplit(constants.ENDPOINT).hostname
            reason = f"no connection to {host}" if constants.HF_HUB_OFFLINE else f"{error}".partition("\n")[0]
            raise ConnectionError(f"{content} cannot be {action} ({reason:.200}); {remedy}") from error


@contextmanager
def hub_offline(*, offline: bool = True) -> Iterator[None]:
    """Let the hub's library read only its cache; with ``offline`` False, leave its setting as it is."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or offline
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def is_reachable(address: str) -> bool:
    """Return whether the host accepts a connection within CONNECT_SECONDS; assumed true behind a proxy."""
    if {"all", "https"} & set(getproxies()):
        return True
    parts = urlsplit(address)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
