"""Predictions of a PyTorch module, for Problem(predict=...)."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from mixfl.pytorch.tensors import tensor, to_numpy


class Predict:
    """`function(module, batch)` returns a tensor or a dict of tensors, with a row per example. The
    module is in evaluation mode."""

    def __init__(self, model: Any, function: Callable):
        self.torch_model, self.function = model, function

    def __call__(self, params: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
        module = self.torch_model.module({k: np.asarray(v) for k, v in params.items()}).eval()
        with torch.no_grad():
            tensors = _Tensors({k: tensor(np.asarray(v)) for k, v in batch.items()}, batch)
            outputs = self.function(module, tensors)
        if isinstance(outputs, Mapping):
            return {k: to_numpy(v) for k, v in outputs.items()}
        return to_numpy(outputs)


class _Tensors(dict):
    """Columns as tensors. What is read is read of the batch too, which may take note of it."""

    def __init__(self, tensors: dict, batch: Mapping[str, Any]):
        super().__init__(tensors)
        self.batch = batch

    def __getitem__(self, key):
        self.batch[key]
        return super().__getitem__(key)
