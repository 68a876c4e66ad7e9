"""Trains LoRA adapters of a GPT-2: clients get and send only the adapters.

The GPT-2 is small and made from a configuration, so nothing is downloaded. Sequences count in
steps: those of the clients by 1 or 2, those of the datacenter by 3.

    pip install 'mixfl[huggingface]'
    python examples/huggingface_lora.py
    mixfl run examples/huggingface_lora.py:problem --algorithm 2wgt
"""

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import mixfl
from mixfl import pytorch

TOKENS, LENGTH = 12, 8
rng = np.random.default_rng(0)


def sequences(steps):
    starts = rng.integers(TOKENS, size=(len(steps), 1))
    return {"tokens": (starts + np.outer(steps, np.arange(LENGTH))) % TOKENS}


owner = rng.integers(30, size=600)
clients = mixfl.ClientData.from_arrays(sequences(1 + owner % 2), owner)
datacenter = sequences(np.full(200, 3))
test = torch.tensor(sequences(rng.integers(1, 4, size=300))["tokens"])


def make():
    """With pretrained weights: GPT2LMHeadModel.from_pretrained(...) in place of the first lines."""
    config = GPT2Config(
        n_embd=32, n_layer=2, n_head=2, n_positions=LENGTH, vocab_size=TOKENS,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    net = GPT2LMHeadModel(config)
    adapters = LoraConfig(r=8, lora_alpha=32, target_modules=["c_attn", "c_fc", "c_proj"],
                          fan_in_fan_out=True)  # fmt: skip
    return get_peft_model(net, adapters).eval()  # eval: without dropout


model = pytorch.Model(make)


@model.loss
def loss(net, batch):  # one number per sequence
    tokens = batch["tokens"]
    scores = net(input_ids=tokens).logits[:, :-1]
    return F.cross_entropy(scores.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)


@torch.no_grad()
def evaluate(params):
    net = model.module(params)
    scores = net(input_ids=test).logits[:, 1:-1]
    right = (scores.argmax(-1) == test[:, 2:]).float().mean().item()
    return {"loss": loss.function(net, {"tokens": test}).mean().item(), "accuracy": right}


terms = [mixfl.Federated(loss, clients, 2 / 3), mixfl.Central(loss, datacenter, 1 / 3)]
settings = {"rounds": 40, "local_steps": 2, "client_lr": 2.0, "eval_every": 10}
problem = mixfl.Problem(model.init, terms, evaluate, settings=settings)

if __name__ == "__main__":
    result = mixfl.train(problem, "2wgt")
    numbers = sum(a.size for a in result.params.values())
    everything = sum(p.numel() for p in make().parameters())
    print(f"accuracy {result.metrics[-1]['eval/accuracy']:.3f}, trained {numbers} of {everything}")
    make().load_state_dict(model.state_dict(result.params))  # with the adapters that were trained
