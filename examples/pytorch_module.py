"""Trains a PyTorch module. The simulator compiles it; a deployed client trains it in PyTorch.

The problem and its data are those of plain.py.

    python examples/pytorch_module.py
    mixfl run examples/pytorch_module.py:problem --algorithm 2wgt
"""

import torch
import torch.nn.functional as F
from plain import clients, datacenter, test
from torch import nn

import mixfl
from mixfl import pytorch


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(8, 16)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        return self.out(F.relu(self.hidden(x)))


model = pytorch.Model(Classifier)  # a function that makes the module


@model.loss
def loss(net, batch):  # one number per example
    return F.cross_entropy(net(batch["x"]), batch["y"], reduction="none")


inputs, kinds = torch.tensor(test["x"], dtype=torch.float32), torch.tensor(test["y"])


@torch.no_grad()
def evaluate(params):
    scores = model.module(params)(inputs)
    right = (scores.argmax(1) == kinds).float().mean().item()
    return {"loss": F.cross_entropy(scores, kinds).item(), "accuracy": right}


terms = [mixfl.Federated(loss, clients, 2 / 3), mixfl.Central(loss, datacenter, 1 / 3)]
settings = {"rounds": 60, "local_steps": 3}
problem = mixfl.Problem(model.init, terms, evaluate, settings=settings)

if __name__ == "__main__":
    result = mixfl.train(problem, "2wgt")
    print(f"2wgt: accuracy {result.metrics[-1]['eval/accuracy']:.3f}")
    module = Classifier()
    module.load_state_dict(model.state_dict(result.params))
    found = module(inputs[:9]).argmax(1)
    print(f"points of kinds {kinds[:9].tolist()} are taken for {found.tolist()}")
