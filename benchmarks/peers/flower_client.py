"""What a Flower client does. It is a separate module so that Ray's actors import it once and keep
the memory-mapped workload between messages."""

import functools
import os

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from benchmarks.peers import protocol, torch_models

FOLDER = "MIXFL_BENCH_FOLDER"
app = ClientApp()


@functools.cache
def kept():
    torch.set_num_threads(1)  # as many actors as cores
    work = protocol.Workload(os.environ[FOLDER])
    return work, torch_models.build(work)


@app.train()
def train(message, context):
    work, module = kept()
    config = message.content["config"]
    t = config["first-round"] + config["server-round"] - 1
    data = torch_models.tensors(work.client(t, context.node_config["partition-id"]))
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=work.size["lr"])
    for k in range(work.K):
        optimizer.zero_grad()
        part = slice(k * work.B, (k + 1) * work.B)
        module.loss(**{name: column[part] for name, column in data.items()}).backward()
        optimizer.step()
    records = {
        "arrays": ArrayRecord(module.state_dict()),
        "metrics": MetricRecord({"num-examples": work.K * work.B}),
    }
    return Message(content=RecordDict(records), reply_to=message)
