"""What a model's layers are called and shaped, told from its config alone: no weights are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from polylens.models.components import model_layers
from polylens.models.loading import _check_config, _check_local, _loading_errors

if TYPE_CHECKING:
    from pathlib import Path

    from polylens.core import ModelLayers


def outline_model(source: str | Path, *, trust_remote_code: bool = False) -> ModelLayers:
    """The layers of `source` (a local folder or a hub id), built without memory for weights.

    Raises ModelLoadError where the config cannot be read or is of no vision-language model.
    """
    source = str(source)
    _check_local(source)
    with _loading_errors(source):
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    _check_config(config, source)
    with _loading_errors(source), torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, trust_remote_code=trust_remote_code)
    return model_layers(model)
