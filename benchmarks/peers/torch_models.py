"""The three models in PyTorch, for pfl-research and Flower.

`loss(**columns)` is the weighted mean over the batch. `load` and `named` convert from and to
mixfl's names and layouts. PyTorch's GRU has the gates of Keras' GRU in another order.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class Smile(nn.Module):
    def __init__(self, model, weight):
        super().__init__()
        self.weight = weight
        self.hidden = nn.Linear(model["side"] ** 2 * 3, model["hidden"])
        self.logit = nn.Linear(model["hidden"], 1)

    def loss(self, image, smiling):
        z = self.logit(F.relu(self.hidden(image.flatten(1).float() * (1 / 255))))[:, 0]
        return self.weight * F.binary_cross_entropy_with_logits(z, smiling.float())

    def translation(self):
        return {
            "hidden/w": (self.hidden.weight, _transposed), "hidden/b": (self.hidden.bias, _same),
            "logit/w": (self.logit.weight, _transposed), "logit/b": (self.logit.bias, _same),
        }  # fmt: skip


class Movie(nn.Module):
    def __init__(self, model, weight):
        super().__init__()
        self.weight, self.margin = weight, model["margin"]
        self.movies = nn.Embedding(model["movies"] + 2, model["embedding"])
        self.context = nn.Linear(model["embedding"], model["embedding"])

    def loss(self, context, movie, length):
        length = length.long()
        counts = torch.arange(context.shape[1]) < length[:, None]
        total = (self.movies(context) * counts[..., None]).sum(1)
        left = _unit(F.relu(self.context(total / length.clamp(min=1)[:, None])))
        cosine = (left * _unit(self.movies(movie))).sum(-1)
        return self.weight * (F.relu(self.margin - cosine) ** 2).mean()

    def translation(self):
        return {
            "movies": (self.movies.weight, _same), "context/b": (self.context.bias, _same),
            "context/w": (self.context.weight, _transposed),
        }  # fmt: skip


class Text(nn.Module):
    def __init__(self, model, weight):
        super().__init__()
        self.weight = weight
        self.embedding = nn.Embedding(model["vocabulary"], model["embedding"])
        self.gru = nn.GRU(model["embedding"], model["hidden"])
        self.dense = nn.Linear(model["hidden"], model["vocabulary"])

    def loss(self, text):
        ids = text.T.long()
        h, _ = self.gru(self.embedding(ids[:-1]))
        z = self.dense(h)
        return self.weight * F.cross_entropy(z.flatten(0, 1), ids[1:].flatten())

    def translation(self):
        gru = self.gru
        return {
            "embedding": (self.embedding.weight, _same),
            "gru/w": (gru.weight_ih_l0, _gates_transposed), "gru/b": (gru.bias_ih_l0, _gates),
            "gru/u": (gru.weight_hh_l0, _gates_transposed), "gru/b_u": (gru.bias_hh_l0, _gates),
            "dense/w": (self.dense.weight, _transposed), "dense/b": (self.dense.bias, _same),
        }  # fmt: skip


def _unit(vectors):
    return vectors * torch.rsqrt((vectors**2).sum(-1, keepdim=True) + 1e-12)


# Each of these is its own inverse.


def _same(a):
    return a


def _transposed(a):
    return a.T


def _gates(a):
    """Update, reset, candidate (Keras) <-> reset, update, candidate (PyTorch)."""
    first, second, candidate = np.split(a, 3, axis=-1)
    return np.concatenate([second, first, candidate], axis=-1)


def _gates_transposed(a):
    """[inputs, 3 hidden] <-> [3 hidden, inputs]; Keras' layout is the wide one."""
    if a.shape[0] < a.shape[1]:
        return _gates(a).T
    return _gates(a.T)


def build(work):
    module = {"smile": Smile, "movie": Movie, "text": Text}[work.task](
        work.model, work.size["weight"]
    )
    with torch.no_grad():
        for name, (parameter, turn) in module.translation().items():
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(turn(work.params[name]))))
    return module


def named(module):
    return {
        name: np.array(turn(parameter.detach().numpy()))
        for name, (parameter, turn) in module.translation().items()
    }


def tensors(columns):
    return {name: torch.from_numpy(column) for name, column in columns.items()}
