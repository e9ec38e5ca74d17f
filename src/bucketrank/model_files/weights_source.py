"""The weights file behind a name: a file, the file in a folder, or the file of a model repository on the hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bucketrank.model_files.weights import WeightsError

RUN_FILE = "weights.safetensors"  # in the folder of a run
HUB_FILE = "model.safetensors"  # in a folder of save_pretrained and in a repository; the hub's name for it
CONFIG_FILE = "config.json"  # a copy of the description for readers
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)


def find_weights(source: Path | str, **download: Any) -> Path:
    """Return the weights file that ``source`` names, downloaded if it is on the hub.

    ``source`` is a weights file, the folder of a run, a folder of ``save_pretrained``, or a model repository on the
    hub, like ``"owner/name"``. A file or folder of that name comes first. ``download`` are further arguments of
    ``huggingface_hub.hf_hub_download``, like ``revision``.
    """
    path = Path(source)
    if path.is_dir():
        for name in (HUB_FILE, RUN_FILE):
            if (path / name).is_file():
                return path / name
        raise WeightsError(
            f"{path}: expected {RUN_FILE} of a run or {HUB_FILE} of save_pretrained in the folder, got neither; "
            "choose the folder of a finished run, or a weights file"
        )
    if not path.is_file() and is_repository(source):
        return _download(path.as_posix(), **download)
    return path


def is_repository(source: Path | str) -> bool:
    """Return whether ``source`` has the form of a model repository on the hub, like ``"owner/name"``.

    >>> is_repository("owner/name"), is_repository("runs/first/best.safetensors"), is_repository("a/b.safetensors")
    (True, False, False)
    """
    name = Path(source).as_posix()
    return REPOSITORY.fullmatch(name) is not None and not name.endswith(".safetensors")


def _download(repository: str, **download: Any) -> Path:
    """Return the weights file of a repository from the hub or from its cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    with _repository_errors(repository):
        with suppress(EntryNotFoundError):
            hf_hub_download(repository, CONFIG_FILE, **download)
        return Path(hf_hub_download(repository, HUB_FILE, **download))


@contextmanager
def _repository_errors(repository: str) -> Iterator[None]:
    """Turn the errors of the hub's library into messages with what was expected and what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    from bucketrank.detectors.hub_download import hub_access

    host = urlsplit(constants.ENDPOINT).hostname
    expected = f"{repository}: expected a file, a folder or a repository on {host}"
    with hub_access(f"{expected}; no such file exists, and a repository", "check the name and the connection"):
        try:
            yield
        except RemoteEntryNotFoundError as error:
            raise WeightsError(
                f"{repository}: expected {HUB_FILE} in the repository on {host}, got none; choose a repository that "
                "push_to_hub of a bucketrank detector wrote (pickles are not read)"
            ) from error
        except RevisionNotFoundError as error:
            text = f"{repository}: expected a branch, tag or commit of the repository on {host}, got none of that name"
            raise WeightsError(f"{text}; choose another revision") from error
        except GatedRepoError as error:
            raise WeightsError(
                f"{repository}: expected access to the repository on {host}, got none; ask for access on its page, "
                "then log in with: hf auth login"
            ) from error
        except (RepositoryNotFoundError, HFValidationError) as error:
            raise WeightsError(
                f"{expected}, got none of that name; check the name, and log in with hf auth login if the repository "
                "is private"
            ) from error
