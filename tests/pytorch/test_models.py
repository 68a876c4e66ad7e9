"""What of a module is trained, what comes back, and which modules are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_problems as cases
from torch import nn
from torch_problems import CASES, Case, classify, numbers, problem

import mixfl
from mixfl import pytorch
from mixfl.engine.purity import ImpureLoss
from mixfl.errors import MixflError
from mixfl.measure.check import check_problem
from mixfl.settings import Settings

FEW = dict(rounds=2, cohort_size=3, client_batch=3, local_steps=2, client_lr=0.2)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)
        self.register_buffer("shift", torch.arange(3.0))
        self.register_buffer("hidden", torch.ones(3), persistent=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))) * self.scale + self.shift * self.hidden


def tied_loss(params, batch):
    """The same in JAX."""
    hidden = jnp.tanh(batch["x"] @ params["first.weight"].T + params["first.bias"])
    out = hidden @ params["first.weight"].T + params["second.bias"]
    scores = jax.nn.log_softmax(out * 2 + jnp.arange(3.0))
    return -jnp.take_along_axis(scores, batch["y"][:, None], 1)[:, 0]


def test_tied_and_frozen_parameters_in_training():
    """One parameter for both uses, its gradient their sum; the rest stays as it is."""
    model, case = pytorch.Model(Tied), Case(Tied, classify, numbers(3))
    assert model.names == {
        "first.weight": ["first.weight", "second.weight"],
        "first.bias": ["first.bias"], "second.bias": ["second.bias"],
    }  # fmt: skip
    own = problem(model, case)
    terms = [mixfl.Federated(tied_loss, own.terms[0].clients, 0.6),
             mixfl.Central(tied_loss, own.terms[1].data, 0.4)]  # fmt: skip
    found, expected = (
        mixfl.train(p, "2wgt", **FEW).params for p in (own, mixfl.Problem(model.init, terms))
    )
    assert found.keys() == expected.keys() == model.names.keys()
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5)
    start = model.init(jax.random.key(0))
    assert np.abs(found["first.weight"] - start["first.weight"]).max() > 1e-2


def test_a_trained_model_goes_back():
    model = pytorch.Model(Tied)
    params = jax.tree.map(lambda a: np.asarray(a) + 1, model.init(jax.random.key(3)))
    state = model.state_dict(params)
    assert state.keys() == Tied().state_dict().keys()
    module = Tied()
    module.load_state_dict(state)
    x = torch.randn(4, 3)
    torch.testing.assert_close(module(x), model.module(params)(x))
    np.testing.assert_array_equal(state["second.weight"], params["first.weight"])
    np.testing.assert_array_equal(state["shift"], np.arange(3.0))
    assert module.second.weight is module.first.weight
    one, other = model.module(params), model.module(model.init(jax.random.key(0)))
    assert one is not other
    np.testing.assert_array_equal(one.first.bias.detach(), params["first.bias"])
    with pytest.raises(MixflError, match=r"first\.bias is missing"):
        model.module({n: a for n, a in params.items() if n != "first.bias"})


def test_what_is_frozen_does_not_depend_on_the_seed():
    """Every node of a deployment makes the same."""

    def make():
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        net[0].requires_grad_(False)
        return net

    one, other = pytorch.Model(make), pytorch.Model(make)
    params = one.init(jax.random.key(5))
    assert params.keys() == {"1.weight", "1.bias"}
    assert np.abs(params["1.weight"] - one.init(jax.random.key(6))["1.weight"]).max() > 1e-2
    states = [m.state_dict(params) for m in (one, other)]
    for name in states[0]:
        torch.testing.assert_close(states[0][name], states[1][name], rtol=0, atol=0)


def with_layer(*layers):
    return lambda: nn.Sequential(nn.Linear(8, 16), *layers, nn.Linear(16, 3))


IMPURE = {
    "Dropout": (with_layer(nn.Dropout(0.1)), "draws random numbers"),
    "BatchNorm": (with_layer(nn.BatchNorm1d(16)), "mixfl.pytorch.with_group_norm(module)"),
}


@pytest.mark.parametrize("kind", IMPURE)
def test_an_impure_loss_is_refused(kind):
    """By training and by the check, with what to do; and what was advised is accepted."""
    make, said = IMPURE[kind]
    case = CASES["mlp"]._replace(make=make)
    broken = problem(pytorch.Model(make), case)
    with pytest.raises(ImpureLoss) as refused:
        mixfl.train(broken, "2wgt", **FEW)
    assert said in str(refused.value)
    assert "term 'federated'" in str(refused.value)
    (finding,) = (
        f for f in check_problem(broken, Settings(**FEW)) if not f.good and "fed" in f.what
    )
    assert finding.what == "'federated': the same inputs give the same loss"
    assert said in finding.detail
    for advised in (lambda: make().eval(), lambda: pytorch.with_group_norm(make()).eval()):
        mixfl.train(problem(pytorch.Model(advised), case), "fedavg", **(FEW | dict(rounds=1)))


def test_a_batchnorm_without_statistics_is_refused():
    make = with_layer(nn.BatchNorm1d(16, track_running_stats=False))
    broken = problem(pytorch.Model(make), CASES["mlp"]._replace(make=make))
    with pytest.raises(ImpureLoss, match=r"track_running_stats.*with_group_norm\(module\)"):
        mixfl.train(broken, "fedavg", **FEW)
    failed = [f for f in check_problem(broken, Settings(**FEW)) if not f.good]
    assert "with_group_norm" in failed[0].detail
    converted = pytorch.Model(lambda: pytorch.with_group_norm(make()))
    mixfl.train(problem(converted, CASES["mlp"]), "fedavg", **(FEW | dict(rounds=1)))


class Listed(nn.Module):
    """Its forward finds a parameter in a list of its own."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(8))
        self.scales = [self.scale]

    def forward(self, x):
        return self.out(x * self.scales[0])


@pytest.mark.parametrize("loops", ["compiled", "pytorch"])
def test_a_parameter_that_a_module_also_holds_in_a_list_is_trained(loops):
    case, model = CASES["mlp"]._replace(make=Listed), pytorch.Model(Listed)
    start = model.init(jax.random.key(0))
    batch = case.data(0, 5)
    expected = Listed()
    expected.load_state_dict({name: torch.from_numpy(np.array(a)) for name, a in start.items()})
    tensors = {name: torch.from_numpy(a) for name, a in batch.items()}
    classify(expected, tensors).mean().backward()
    clients = mixfl.ClientData.from_arrays(batch, np.zeros(5, int))
    one = mixfl.Problem(model.init, [mixfl.Federated(model.loss(classify), clients)])
    keys = dict(rounds=1, cohort_size=1, client_batch=5, local_steps=1, client_lr=1.0, clip="off")
    found = mixfl.train(one, "fedavg", loops=loops, **keys).params
    for name, p in expected.named_parameters():
        np.testing.assert_allclose(start[name] - found[name], p.grad, rtol=1e-4, atol=1e-6)


def with_others(net, batch):
    scores = net(batch["x"])
    return F.cross_entropy(scores @ scores.T, torch.arange(len(scores)), reduction="none")


def test_a_loss_that_compares_the_examples_of_a_batch_is_refused():
    with pytest.raises(ImpureLoss, match="depends on the other examples of its batch"):
        loss_of(with_others)()


def test_a_table_that_shortens_its_own_rows_is_refused():
    case = CASES["lstm"]

    def make():
        net = case.make()
        net.table.max_norm = 0.1
        return net

    with pytest.raises(ImpureLoss, match=r"changes table.weight itself.*max_norm"):
        loss_of(classify, case._replace(make=make))()


def test_batch_norms_become_group_norms():
    norm = nn.BatchNorm2d(48)
    norm.weight.data.uniform_()
    net = nn.Sequential(nn.Conv2d(1, 48, 3), norm, nn.Sequential(nn.BatchNorm3d(6)), norm)
    made = pytorch.with_group_norm(net)
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in made.modules())
    assert isinstance(made[1], nn.GroupNorm)
    assert made[1] is made[3]
    assert (made[1].num_groups, made[2][0].num_groups) == (6, 1)
    assert made[1].weight is norm.weight
    x = torch.randn(2, 48, 4, 4)
    torch.testing.assert_close(
        made[1](x)[1:], made[1](x[1:])
    )  # no matter what else is in the batch
    with pytest.raises(MixflError, match="leaves nothing"):
        pytorch.with_group_norm(nn.BatchNorm1d(1))


def loss_of(function, case=CASES["mlp"]):
    return lambda: mixfl.train(
        problem(pytorch.Model(case.make), case._replace(loss=function)), "fedavg", **FEW
    )


ANOTHER = cases.mlp()


def half():
    return pytorch.Model(lambda: cases.mlp().double())


def frozen():
    return pytorch.Model(lambda: cases.mlp().requires_grad_(False))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (half, "what is trained must be float32"),
        (frozen, "no parameter to train"),
        (lambda: pytorch.Model(lambda: 3), "returned a int"),
        (loss_of(lambda net, b: classify(net, b).mean()), r"shape \(\) for a batch of 3 examples"),
        (loss_of(lambda net, b: classify(net, b).detach()), "does not depend on any parameter"),
        (loss_of(lambda net, b: classify(ANOTHER, b)), "parameters of another module only"),
        (loss_of(lambda net, b: classify(net, b).sum().item()), "returned a float"),
        (
            loss_of(lambda net, b: classify(net, b["z"])),
            r"the loss of term 'federated' failed: Key",
        ),
    ],
)
def test_mistakes_are_named(wrong, said):
    with pytest.raises(MixflError, match=said):
        wrong()


def test_a_padding_row_and_a_table_of_own_rows():
    """A client numbers its own rows anew: row 0 would not be the padding any more."""
    case = CASES["lstm"]
    term = problem(pytorch.Model(case.make), case).terms[0]
    marked = mixfl.Federated(term.loss, term.clients, rows={"table.weight": "x"})
    with pytest.raises(MixflError, match="padding_idx = 0"):
        mixfl.train(mixfl.Problem(term.loss.model.init, [marked]), "fedavg", **FEW)
