"""Parameters that are frozen, and thawed."""

from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from ways_of_training.networks import Pieces, classify, mlp, train
from ways_of_training.run import Run
from ways_of_training.table import left_out, refused, row


@row
def frozen_before_wrapping(run: Run) -> None:
    """The first layer is frozen before the model is wrapped."""
    module = mlp()
    module[0].requires_grad_(False)
    train(run, run.wrap(module))


@row
def frozen_for_two_steps_searched(run: Run) -> None:
    """A layer is frozen for two steps in mid-run, with find_unused_parameters."""
    model = run.wrap(mlp(8, 8), find_unused_parameters=True)
    for step, (x, y) in enumerate(run.training(run.sgd(model), 6)):
        model.module[0].requires_grad_(step not in (2, 3))
        classify(model, x, y).backward()


UNFINISHED = "Expected to have finished reduction in the prior iteration"


@row(native=refused(UNFINISHED), everywhere=refused(UNFINISHED))
def unused_head(run: Run) -> None:
    """A head that is never used, without find_unused_parameters."""
    train(run, run.wrap(Pieces()))


@row
def heads_by_turns(run: Run) -> None:
    """A head that is used in every second step, by rank 0 in others than by rank 1, with find_unused_parameters."""
    model = run.wrap(Pieces(), find_unused_parameters=True)
    for step, (x, y) in enumerate(run.training(run.sgd(model), 5)):
        F.cross_entropy(model(x, with_spare=step % 3 == run.rank), y).backward()


FROZEN = refused("one that was frozen then")


@row(sync_server=FROZEN, one_worker=FROZEN, three_workers=left_out("sums of three depend on the place in a bucket"))
def thawed_after_wrapping(run: Run) -> None:
    """A layer that was frozen at wrapping is trained from the third step on, where native DDP is wrapped anew."""
    module = mlp()
    module[0].requires_grad_(False)
    model = run.wrap(module)
    for step, (x, y) in enumerate(run.training(run.sgd(model), 4)):
        module[0].requires_grad_(step >= 2)
        if step == 2 and run.column in (
            "native",
            "backend",
        ):  # it would exchange nothing of that layer (Lightning #20340)
            model = NativeDDP(module, process_group=model.process_group)
        classify(model, x, y).backward()
