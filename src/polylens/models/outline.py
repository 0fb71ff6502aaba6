"""What a model's layers are called and shaped, told from its config alone: no weights are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from polylens.models.checkpoint_checks import check_local
from polylens.models.components import model_layers
from polylens.models.loading import auto_class, loading_errors, read_config

if TYPE_CHECKING:
    from pathlib import Path

    from polylens.core import ModelLayers


def outline_model(source: str | Path, *, trust_remote_code: bool = False) -> ModelLayers:
    """The layers of `source` (a local folder or a hub id), built without memory for weights.

    Raises ModelLoadError where the config cannot be read or is of no model that polylens serves.
    """
    source = str(source)
    check_local(source)
    config = read_config(source, trust_remote_code=trust_remote_code)
    with loading_errors(source), torch.device("meta"):
        model = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    return model_layers(model)
