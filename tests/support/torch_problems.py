"""Small PyTorch modules with a loss and data, from everyday layers to Hugging Face's models."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import peft
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import mixfl
from mixfl import pytorch

TOKENS, LENGTH, CLASSES = 19, 6, 3
SMALL = dict(vocab_size=TOKENS, max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=0)
WIDTHS = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
)  # fmt: skip


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def cnn():
    """With norms in place of BatchNorm's, and a BatchNorm whose statistics are fixed."""
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4).eval(), nn.Flatten(), nn.Linear(16, CLASSES),
    )  # fmt: skip
    statistics = net[5]
    statistics.running_mean.fill_(0.1)
    statistics.running_var.fill_(2.0)
    net[1] = pytorch.with_group_norm(net[1])
    return net


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(TOKENS, 5, padding_idx=0)
        self.cell = nn.LSTM(5, 7, batch_first=True)
        self.out = nn.Linear(7, CLASSES)

    def forward(self, tokens):
        return self.out(self.cell(self.table(tokens))[0][:, -1])


class Attention(nn.Module):
    """PyTorch's own encoder; in eval mode it would take a fused operator."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(TOKENS, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, tokens):
        return self.out(self.encoder(self.table(tokens)).mean(1))


def gpt2(tied=True):
    config = GPT2Config(
        n_embd=16, n_layer=2, n_head=2, n_positions=LENGTH, vocab_size=TOKENS,
        tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def llama():
    return LlamaForCausalLM(LlamaConfig(**SMALL, **WIDTHS)).eval()


def bert():
    config = BertConfig(
        vocab_size=TOKENS, max_position_embeddings=LENGTH, num_labels=CLASSES, **WIDTHS
    )
    return BertForSequenceClassification(config).eval()


def lora():
    adapters = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    return peft.get_peft_model(gpt2(), adapters).eval()


def classify(net, batch):
    return F.cross_entropy(net(batch["x"]), batch["y"], reduction="none")


def classify_text(net, batch):
    scores = net(input_ids=batch["x"], attention_mask=batch["mask"]).logits
    return F.cross_entropy(scores, batch["y"], reduction="none")


def next_token(net, batch):
    scores = net(input_ids=batch["x"]).logits[:, :-1]
    return F.cross_entropy(scores.transpose(1, 2), batch["x"][:, 1:], reduction="none").mean(1)


def numbers(*shape):
    return lambda rng, n: rng.normal(size=(n, *shape)).astype(np.float32)


def tokens(rng, n):
    return rng.integers(0, TOKENS, (n, LENGTH))


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    loss: Callable
    inputs: Callable
    compiled: bool = True

    def data(self, seed: int, n: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        x, y = self.inputs(rng, n), rng.integers(0, CLASSES, n)
        mask = (np.arange(LENGTH) < rng.integers(2, LENGTH + 1, (n, 1))).astype(np.int64)
        columns = {"x": x, "y": y, "mask": mask}
        used = {next_token: ("x",), classify_text: ("x", "y", "mask")}.get(self.loss, ("x", "y"))
        return {name: columns[name] for name in used}


def by_data(net, batch):
    """Another loss for some data."""
    losses = classify(net, batch)
    return 2 * losses if losses.mean() > 0 else losses


def no_lowering(net, batch):
    """Has an operator that torchax does not know."""
    steps = net[0].weight[:, None].log_softmax(-1)
    lengths = torch.tensor([len(steps)]), torch.tensor([2])
    return classify(net, batch) + F.ctc_loss(steps, torch.tensor([[1, 2]]), *lengths)


def checked(net, batch):
    """torch.distributions checks its arguments by a branch on data."""
    return -torch.distributions.Categorical(logits=net(batch["x"])).log_prob(batch["y"].long())


CASES = {
    "mlp": Case(mlp, classify, numbers(8)),
    "cnn": Case(cnn, classify, numbers(1, 8, 8)),
    "lstm": Case(Recurrent, classify, tokens),
    "attention": Case(lambda: Attention().eval(), classify, tokens),
    "gpt2, tied": Case(gpt2, next_token, tokens),
    "gpt2, untied": Case(lambda: gpt2(tied=False), next_token, tokens),
    "llama": Case(llama, next_token, tokens),
    "bert": Case(bert, classify_text, tokens),
    "gpt2 with lora": Case(lora, next_token, tokens),
    "control flow": Case(mlp, by_data, numbers(8), compiled=False),
    "unknown operator": Case(mlp, no_lowering, numbers(8), compiled=False),
    "checks": Case(mlp, checked, numbers(8), compiled=False),
}


def problem(model: pytorch.Model, case: Case, **more) -> mixfl.Problem:
    """Three clients of different sizes, and a datacenter."""
    loss, sizes = model.loss(case.loss), (2, 7, 5)
    clients = mixfl.ClientData.from_arrays(case.data(1, sum(sizes)), np.repeat(range(3), sizes))
    terms = [mixfl.Federated(loss, clients, 0.6), mixfl.Central(loss, case.data(2, 9), 0.4)]
    return mixfl.Problem(model.init, terms, **more)
