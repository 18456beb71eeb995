"""The wrapper's own options, and torch.compile around and inside it."""

from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from ways_of_training.networks import Pieces, classify, mlp, train
from ways_of_training.run import WIDTH, Run
from ways_of_training.table import left_out, refused, row

NO_GROUP = left_out("a plain process has no group")


@row
def static_graph_accumulating(run: Run) -> None:
    """static_graph whose later steps accumulate inside no_sync."""
    model = run.wrap(mlp(), static_graph=True)
    for step, (x, y) in enumerate(run.training(run.sgd(model), 4)):
        if step > 0:
            with model.no_sync():
                classify(model, x[:2], y[:2]).backward()
        classify(model, x[2:], y[2:]).backward()


@row
def transformed(run: Run) -> None:
    """torch.func.grad by the input, twice after each step but the first."""
    model = run.wrap(mlp())
    for step, (x, y) in enumerate(run.training(run.sgd(model))):
        classify(model, x, y).backward()
        for _ in range(2 if step else 0):
            run.note(torch.func.grad(lambda x: model(x).sum())(x))


@row(sync_server=refused("a set has none"))
def registered_in_another_order(run: Run) -> None:
    """Two layers of equal shape, which rank 1 has in the other order (transformers #48162)."""
    names = ("first", "second") if run.rank == 0 else ("second", "first")
    train(run, run.wrap(nn.Sequential(OrderedDict((name, nn.Linear(WIDTH, WIDTH)) for name in names))))


@row(slow=True)
def without_initial_broadcast(run: Run) -> None:
    """init_sync=False with models that are built equal."""
    torch.manual_seed(1)
    train(run, run.wrap(mlp(), init_sync=False))


@row
def parameters_ignored(run: Run) -> None:
    """_set_params_and_buffers_to_ignore_for_model: the spare head is each rank's own."""
    module = Pieces()
    NativeDDP._set_params_and_buffers_to_ignore_for_model(module, ["spare.weight", "spare.bias"])
    model = run.wrap(module)
    optimizer = run.optimizer(torch.optim.SGD([*module.body.parameters(), *module.head.parameters()], lr=0.1), model)
    for x, y in run.batches():
        model.zero_grad()
        nn.functional.cross_entropy(model(x, with_spare=True), y).backward()
        optimizer.step()


@row(sync_server=refused("delay_all_reduce_named_params"), one_worker=NO_GROUP, since_torch=(2, 13))
def delayed_exchange(run: Run) -> None:
    """delay_all_reduce_named_params: the head's gradients are exchanged when the body's first is there."""
    module = Pieces()
    delayed = [(f"head.{name}", parameter) for name, parameter in module.head.named_parameters()]
    model = run.wrap(
        module,
        delay_all_reduce_named_params=delayed,
        param_to_hook_all_reduce=module.body.weight,
        find_unused_parameters=True,
    )
    for x, y in run.training(run.sgd(model)):
        classify(model, x, y).backward()
        # Native DDP never waits for this exchange; gloo's barrier waits for what was begun before.
        dist.barrier()


@row
def nested_in_a_module(run: Run) -> None:
    """The wrapped model is a part of a larger module, of which the rest is not wrapped."""
    inner = run.wrap(mlp())
    outer = nn.Sequential(inner, nn.Softmax(dim=1))
    optimizer = run.sgd(inner)
    for x, y in run.training(optimizer):
        nn.functional.nll_loss(outer(x).log(), y).backward()


NOTHING = "a module doesn't have any parameter that requires a gradient"


@row(native=refused(NOTHING), everywhere=refused(NOTHING))
def nothing_to_train(run: Run) -> None:
    """A module without parameters that need a gradient."""
    run.wrap(mlp().requires_grad_(False))


@row(slow=True, backend=left_out("dynamo knows the backend only where it compiled a group before"))
def compiled_around_with_autograd(run: Run) -> None:
    """The wrapped model compiled, backend aot_eager."""
    torch._dynamo.reset()
    model = run.wrap(mlp(), bucket_cap_mb=25)
    train(run, torch.compile(model, backend="aot_eager"), optimizer=run.sgd(model))
