"""A detector with its description, saved to and loaded from folders and model repositories on the hub."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelHubMixin
from torch import Tensor

from bucketrank.deploy.model_card import model_card
from bucketrank.deploy.prediction import ImageInput, predict
from bucketrank.detectors import Detector
from bucketrank.detectors.hub_download import hub_access
from bucketrank.model_files.atomic import write_text
from bucketrank.model_files.loading import load_model
from bucketrank.model_files.weights import Meta, WeightsError, save_weights
from bucketrank.model_files.weights_source import CONFIG_FILE, HUB_FILE, RUN_FILE, find_weights
from bucketrank.recipes import from_dict

CARD_FILE = "README.md"


class TrainedDetector(ModelHubMixin):
    """A detector with its classes, threshold, calibration and recipe, which can be shared.

    ``model`` is the detector, in evaluation mode after loading, and ``meta`` the description that its weights file
    holds. Weights are written as safetensors. Pickles are neither written nor read.

    Args:
        model: a detector of this package, or one of torchvision or transformers behind its interface.
        meta: the description of the detector.
    """

    def __init__(self, model: Detector, meta: Meta) -> None:
        if model.num_classes != len(meta.classes):
            got = f"{model.num_classes} of the model and {len(meta.classes)} of the description"
            raise ValueError(f"TrainedDetector: expected as many classes in both, got {got}")
        from_dict(meta.recipe, source="TrainedDetector")  # RecipeError now rather than when the file is loaded
        self.model = model
        self.meta = meta
        model.stored_threshold = meta.threshold

    @property
    def classes(self) -> list[str]:
        """The names of label 1, 2, ..."""
        return self.meta.classes

    def __repr__(self) -> str:
        meta = self.meta
        detector, scores = meta.recipe["detector"]["name"], "calibrated" if meta.calibration else "not calibrated"
        return f"TrainedDetector({detector}, {len(meta.classes)} classes, threshold {meta.threshold:.4g}, {scores})"

    def predict(
        self,
        images: Iterable[ImageInput],
        *,
        threshold: float | None = None,
        batch_size: int = 1,
        device: str = "auto",
    ) -> list[dict[str, Tensor]]:
        """Return the detections in each image, best first, as tensors on the CPU.

        Args:
            images: file names, PIL images, arrays (H, W, 3) of uint8, or tensors (3, H, W) of uint8 or of floats from
                0 to 1.
            threshold: minimum score to report; the default is the threshold stored with the weights.
            batch_size: images per batch.
            device: a torch device; auto is cuda if available.
        """
        return predict(self.model, images, threshold=threshold, batch_size=batch_size, device=device)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        force_download: bool = False,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        revision: str | None = None,
    ) -> TrainedDetector:
        """Load a detector from a folder, a weights file or a model repository on the hub.

        WeightsError if the name leads to no weights of a bucketrank detector, ConnectionError if the hub cannot be
        reached and its cache does not hold the file.

        Args:
            pretrained_model_name_or_path: a folder of :meth:`save_pretrained`, the folder of a run, a weights file, or
                a repository like ``"owner/name"``. A file or folder of that name comes first.
            force_download: download again what the cache of the hub holds.
            token: the token for a private repository; the default is the one that ``hf auth login`` stored.
            cache_dir: folder of the cache; the default is the one of the hub's library.
            local_files_only: read the cache only.
            revision: branch, tag or commit of the repository; the default is its main branch.
        """
        path = find_weights(
            pretrained_model_name_or_path,
            force_download=force_download,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            revision=revision,
        )
        return cls(*load_model(path))

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        license: str | None = None,  # noqa: A002 (the hub's name for it)
        dataset: str | None = None,
        **options: Any,
    ) -> str | None:
        """Write the detector into a folder: ``model.safetensors``, ``config.json`` and the model card ``README.md``.

        The weights file holds everything that :meth:`from_pretrained` reads. ``config.json`` and the card repeat its
        description for readers. A card that differs from the new one is not replaced: WeightsError.

        Args:
            save_directory: the folder; it is created if it does not exist. The folder of a run is refused.
            license: the licence of the weights, by the hub's names, like ``"apache-2.0"``. Without it the card says
                that none is stated.
            dataset: the name of the data set, or its repository on the hub, for the card.
            options: further arguments of ``huggingface_hub.ModelHubMixin.save_pretrained``.
        """
        folder = Path(save_directory)
        if (folder / RUN_FILE).exists():
            raise WeightsError(f"{folder}: expected a folder for the detector, got the folder of a run; choose another")
        facts = {"license": license, "dataset": dataset, **(options.pop("model_card_kwargs", None) or {})}
        card = folder / CARD_FILE
        if card.exists() and card.read_text(encoding="utf-8") != str(self.generate_model_card(**facts)):
            raise WeightsError(
                f"{card}: expected no model card, or the one for this detector, got another; delete it to have a new "
                "one written, or choose another folder"
            )
        return super().save_pretrained(folder, model_card_kwargs=facts, **options)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        license: str | None = None,  # noqa: A002 (the hub's name for it)
        dataset: str | None = None,
        **options: Any,
    ) -> str:
        """Upload the files of :meth:`save_pretrained` to a model repository on the hub; return the commit's address.

        The repository is created if it does not exist. ConnectionError if the hub cannot be reached or refuses.

        Args:
            repo_id: the repository, like ``"owner/name"``.
            license: the licence of the weights, as in :meth:`save_pretrained`.
            dataset: the name of the data set, as in :meth:`save_pretrained`.
            options: further arguments of ``huggingface_hub.ModelHubMixin.push_to_hub``: ``private``, ``token``,
                ``branch``, ``create_pr``, ``commit_message``, ``ignore_patterns`` and others.
        """
        facts = {"license": license, "dataset": dataset, "repository": repo_id}
        remedy = "check the name and the connection, and log in with: hf auth login"
        with hub_access(f"{repo_id}: the detector", remedy, action="uploaded"):
            return str(super().push_to_hub(repo_id, model_card_kwargs=facts, **options))

    def generate_model_card(self, *_: Any, **facts: Any) -> ModelCard:
        """Return the model card; ``facts`` are ``license``, ``dataset`` and ``repository``."""
        return model_card(self.meta, **facts)

    def _save_pretrained(self, save_directory: Path) -> None:
        save_weights(save_directory / HUB_FILE, self.model, self.meta)
        write_text(save_directory / CONFIG_FILE, json.dumps(self._config(), indent=2) + "\n")

    def _config(self) -> dict[str, Any]:
        meta = self.meta
        return {
            "library_name": "bucketrank",
            "id2label": {str(label): name for label, name in enumerate(meta.classes, start=1)},
            "category_ids": meta.category_ids,
            "threshold": meta.threshold,
            "calibration": None if meta.calibration is None else meta.calibration.to_dict(),
            "metrics": {name: value for name, value in meta.metrics.items() if math.isfinite(value)},
            "images": meta.images,
            "versions": meta.versions,
            "recipe": meta.recipe,
        }


from_pretrained = TrainedDetector.from_pretrained
