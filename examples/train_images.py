"""Train a small convolutional network on images, on one process or many.

python examples/train_images.py                                        one process
torchrun --nproc-per-node=2 examples/train_images.py                   two
torchrun --nproc-per-node=2 examples/train_images.py --compare         native DistributedDataParallel trains beside it
python examples/train_images.py --evaluate digits.pt                   a checkpoint's accuracy, in plain PyTorch
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported later, as optimizers do, it would keep the process group for ever
from idx_images import IdxError, read_split
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import psengine

Batch = list[torch.Tensor]  # images, labels
T = TypeVar("T")

SMALLEST_IMAGE = 8  # rows and columns; the network halves them twice
EVALUATION_BATCH_SIZE = 256
LISTED_MISMATCHES = 3


def main() -> int:
    try:
        speaks = psengine.is_main_process()
        options = parse_options()
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        if options.evaluate is not None:
            evaluate(options, speaks)
            return 0
        train(options, psengine.init())
    except UserError as error:
        if speaks:
            print_error(error)
        wait_for_all_ranks()
        return 2
    except (psengine.ConfigurationError, psengine.EnvironmentVariableError) as error:
        print_error(error)
        return 2
    except TrainingError as error:
        print_error(error)
        wait_for_all_ranks()
        return 1
    return 0


def train(options: argparse.Namespace, context: psengine.Context) -> None:
    data = on_all_ranks(lambda: load_data(options.data))
    if context.world_size > len(data.train):
        raise UserError(
            f"every rank needs a training image (expected at most {len(data.train)} ranks, got {context.world_size})"
        )
    torch.manual_seed(options.seed)
    network = ImageClassifier(data.classes)
    if options.pretrained is not None:
        # Rank 0 alone reads the file: wrapping a network gives all ranks its parameters and buffers.
        on_all_ranks(lambda: load_pretrained(network, options.pretrained, context.device), only_rank=0)
    if options.checkpoint is not None:
        on_all_ranks(lambda: check_writable(options.checkpoint), only_rank=0)

    # The last samples of some ranks are repeated ones, so that all ranks have equally many.
    sampler = DistributedSampler(data.train, context.world_size, context.rank, seed=options.seed)
    batches = BatchSampler(sampler, options.batch_size, drop_last=False)
    loader = DataLoader(data.train, sampler=batches, batch_size=None)  # fetches a batch at once
    steps_per_epoch = math.ceil(len(loader) / options.accumulate)
    last_step = min(options.epochs * steps_per_epoch, options.max_steps or math.inf)

    replicas = [on_all_ranks(lambda: make_replica(copy.deepcopy(network), options, context, last_step))]
    if options.compare:
        replicas.append(make_native_replica(copy.deepcopy(network), options, context, last_step))
    if context.rank == 0:
        print(
            f"{len(data.train)} training and {len(data.test)} test images of {data.classes} classes;"
            f" world size {context.world_size}, on {context.device}",
            flush=True,
        )

    step = 0
    for epoch in range(1, options.epochs + 1):
        sampler.set_epoch(epoch)  # another order in each epoch
        losses = EpochLosses(context, epoch, min(steps_per_epoch, last_step - step), options.report_every)
        for micro_batches in in_groups(loader, options.accumulate):
            loss, *_ = [train_step(replica, micro_batches, context.device) for replica in replicas]
            losses.add(loss, sample_count(micro_batches))
            step += 1
            if step == last_step:
                break
        mean_loss = losses.finish()

        network.load_state_dict(replicas[0].model.module.state_dict())
        correct, count = evaluate_together(network.to(context.device), data.test, context)
        if options.checkpoint is not None:
            on_all_ranks(lambda: save(network, options.checkpoint), only_rank=0)
        differences = [largest_differences(replicas[0].model, native.model) for native in replicas[1:]]
        if context.rank == 0:
            results = [f"epoch {epoch}/{options.epochs}", f"step {step}", f"loss {mean_loss:.4f}"]
            results += [describe_accuracy(correct, count), *map(describe_differences, differences)]
            print(*results, sep="  ", flush=True)
        for difference in differences:
            if any(value != 0 for value in difference.values()):
                raise TrainingError(
                    f"psengine and native DistributedDataParallel differ after epoch {epoch}, step {step} (expected no"
                    f" difference, got {describe_differences(difference)})"
                )
        if step == last_step:
            break
    if options.compare and context.rank == 0:
        print(f"psengine and native DistributedDataParallel are equal to the last bit after {step} steps")


def train_step(replica: Replica, micro_batches: list[Batch], device: torch.device) -> torch.Tensor:
    """Make one optimizer step; return this rank's mean loss over the samples of all micro-batches."""
    replica.optimizer.zero_grad()
    step_loss = torch.zeros((), device=device)
    for position, (images, labels) in enumerate(micro_batches, start=1):
        # Only the last micro-batch exchanges gradients; the forward belongs inside no_sync() too.
        with nullcontext() if position == len(micro_batches) else replica.model.no_sync():
            outputs = replica.model(images.to(device))
            loss = F.cross_entropy(outputs, labels.to(device), reduction="sum") / sample_count(micro_batches)
            loss.backward()
        step_loss += loss.detach()
    replica.optimizer.step()
    if replica.scheduler is not None:
        replica.scheduler.step()
    return step_loss


@dataclass
class Replica:
    """One copy of the network on this rank, and what trains it."""

    model: nn.parallel.DistributedDataParallel  # psengine's is one too
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None


def make_replica(network: nn.Module, options: argparse.Namespace, context: psengine.Context, last_step: int) -> Replica:
    network = network.to(context.device)
    if options.sync_batchnorm:
        network = psengine.convert_sync_batchnorm(network)
    model = psengine.DistributedDataParallel(network, strategy=options.strategy)
    optimizer = psengine.DistributedOptimizer(make_optimizer(model, options), model)
    return Replica(model, optimizer, make_scheduler(optimizer, options, last_step))


def make_native_replica(
    network: nn.Module, options: argparse.Namespace, context: psengine.Context, last_step: int
) -> Replica:
    """What ``make_replica`` does, in plain PyTorch."""
    network = network.to(context.device)
    if options.sync_batchnorm:
        if context.device.type == "cpu":
            raise UserError(
                "--compare --sync-batchnorm needs GPUs: PyTorch's own SyncBatchNorm does not run on the CPU"
            )
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    torch.backends.cudnn.deterministic = True  # else the same convolution may differ from itself
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = make_optimizer(model, options)
    return Replica(model, optimizer, make_scheduler(optimizer, options, last_step))


def make_optimizer(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    if options.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    return torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=options.momentum)


def make_scheduler(
    optimizer: torch.optim.Optimizer, options: argparse.Namespace, last_step: int
) -> torch.optim.lr_scheduler.LRScheduler | None:
    if options.scheduler == "cosine":
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=last_step)
    return None


class ImageClassifier(nn.Module):
    """Three convolutions with BatchNorm, the mean over all places, and a linear head.

    Takes uint8 images of any size from 8x8, shape (batch, 1, rows, columns); gives scores, shape (batch, classes).
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        )
        self.head = nn.Linear(64, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images / 255).mean(dim=(2, 3)))


@dataclass
class Data:
    """Images, uint8 of shape (count, 1, rows, columns), with labels, int64 of shape (count,)."""

    train: TensorDataset
    test: TensorDataset
    classes: int


def load_data(directory: Path | None) -> Data:
    """Return the MNIST-like images of ``directory``; without one, scikit-learn's digits, of which a fifth are tests."""
    if directory is not None:
        try:
            splits = [read_split(directory, "train"), read_split(directory, "test")]
        except IdxError as error:
            raise UserError(f"--data {error}") from error
    else:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise UserError("the digits need scikit-learn: pip install 'psengine[examples]', or give --data") from error
        digits = load_digits()
        images = (torch.from_numpy(digits.images) * (255 / 16)).to(torch.uint8)  # they count from 0 to 16
        labels = torch.from_numpy(digits.target)
        is_test = torch.arange(len(labels)) % 5 == 0
        splits = [(images[~is_test], labels[~is_test]), (images[is_test], labels[is_test])]

    for images, _ in splits:
        if min(images.shape[1:]) < SMALLEST_IMAGE:
            raise UserError(
                f"--data {directory}: the network needs images of at least {SMALLEST_IMAGE}x{SMALLEST_IMAGE}, got"
                f" {images.shape[1]}x{images.shape[2]}"
            )
    train, test = (TensorDataset(images.unsqueeze(1), labels.long()) for images, labels in splits)
    return Data(train, test, classes=1 + max(int(labels.max()) for _, labels in splits))


# ------------------------------------------------------------------------------------------------ losses and accuracy


class EpochLosses:
    """The losses of an epoch: checked on all ranks together every few steps, shown on rank 0, averaged at the end.

    One exchange in ``report_every`` steps, because an exchange in each would hold back an asynchronous strategy and
    wait for a GPU.
    """

    def __init__(self, context: psengine.Context, epoch: int, steps: int, report_every: int) -> None:
        self.epoch, self.steps, self.report_every, self.speaks = epoch, steps, report_every, context.rank == 0
        self.bar = progress_bar(f"epoch {epoch}", steps) if self.speaks else None
        self.step = self.samples = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=context.device)
        self.unchecked: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor, samples: int) -> None:
        self.step += 1
        self.samples += samples
        self.loss_sum += loss * samples
        self.unchecked.append(loss)
        if len(self.unchecked) == self.report_every:
            self.report()
        if self.bar is not None:
            self.bar.update()

    def report(self) -> None:
        """Stop all ranks if one had a loss that is not finite; show the mean loss of the latest step."""
        losses = torch.stack(self.unchecked).double().cpu()
        position = int((~losses.isfinite()).int().argmax())  # the first such loss, or the first loss
        everyones = psengine.gather(
            {"position": position, "loss": losses[position].item(), "latest": losses[-1].item()}
        )
        bad_ranks = [rank for rank, loss in enumerate(everyones["loss"]) if not math.isfinite(loss)]
        if bad_ranks:
            position, rank = min((everyones["position"][rank], rank) for rank in bad_ranks)
            loss = everyones["loss"][rank]
            step = self.step - len(losses) + position + 1
            raise TrainingError(
                f"the loss is not finite (expected a finite number on all ranks, got {loss} on rank {rank}, epoch"
                f" {self.epoch}, step {step}). Try a smaller --learning-rate"
            )
        self.unchecked = []
        mean_loss = sum(everyones["latest"]) / len(everyones["latest"])
        if self.bar is not None:
            self.bar.set_postfix(loss=f"{mean_loss:.4f}")
        elif self.speaks and self.step < self.steps:
            print(f"epoch {self.epoch}  step {self.step}/{self.steps}  loss {mean_loss:.4f}", flush=True)

    def finish(self) -> float:
        """Return the mean loss over the samples of all ranks."""
        if self.unchecked:
            self.report()
        if self.bar is not None:
            self.bar.close()
        return float(psengine.mean(self.loss_sum / self.samples, weight=self.samples))


def progress_bar(title: str, steps: int) -> Any:
    """Return a tqdm bar, or None where there is no terminal or no tqdm."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        print("no progress bar without tqdm: pip install 'psengine[examples]'", file=sys.stderr)
        return None
    return tqdm(desc=title, total=steps, unit="step", leave=False)


def evaluate_together(network: nn.Module, dataset: TensorDataset, context: psengine.Context) -> tuple[int, int]:
    """Give all ranks rank 0's ``network``; return how many images of ``dataset`` it labels correctly, and how many are.

    Ranks' running statistics differ (in asynchronous strategies, weights too) and rank 0's are what is saved. Each rank
    takes every world_size-th image: a DistributedSampler would count some twice.
    """
    for tensor in network.state_dict().values():
        dist.broadcast(tensor, src=0)
    images, labels = (tensor[context.rank :: context.world_size] for tensor in dataset.tensors)
    correct = count_correct(network, images, labels, context.device)
    totals = psengine.sum({"correct": correct, "count": len(labels)})
    return totals["correct"], totals["count"]


def evaluate(options: argparse.Namespace, speaks: bool) -> None:
    """Print the accuracy of a checkpoint, without psengine."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = load_data(options.data)
    network = ImageClassifier(data.classes)
    weights = load_weights(options.evaluate, device)
    check_fit(weights, network.state_dict(), options.evaluate)
    network.load_state_dict(weights)
    correct = count_correct(network.to(device), *data.test.tensors, device)
    if speaks:
        print(describe_accuracy(correct, len(data.test)))


@torch.no_grad()
def count_correct(network: nn.Module, images: torch.Tensor, labels: torch.Tensor, device: torch.device) -> int:
    network.eval()
    correct = 0
    for start in range(0, len(images), EVALUATION_BATCH_SIZE):
        batch = slice(start, start + EVALUATION_BATCH_SIZE)
        guesses = network(images[batch].to(device)).argmax(dim=1)
        correct += int((guesses == labels[batch].to(device)).sum())
    return correct


def describe_accuracy(correct: int, count: int) -> str:
    return f"accuracy {correct / count:.2%} ({correct}/{count})"


@torch.no_grad()
def largest_differences(model: nn.Module, other: nn.Module) -> dict[str, float]:
    """Return the largest absolute difference over all ranks, of parameters and of buffers."""
    ours = []
    for tensors, others in ((model.parameters(), other.parameters()), (model.buffers(), other.buffers())):
        pairs = zip(tensors, others, strict=True)
        ours.append(max((a.double() - b.double()).abs().max() for a, b in pairs))
    everyones = torch.stack(list(psengine.gather(torch.stack(ours))))
    parameters, buffers = everyones.amax(dim=0).tolist()
    return {"parameters": parameters, "buffers": buffers}


def describe_differences(differences: dict[str, float]) -> str:
    return "largest difference: " + ", ".join(f"{name} {value:g}" for name, value in differences.items())


# -------------------------------------------------------------------------------------------------------- checkpoints


def save(network: nn.Module, path: Path) -> None:
    """Write the weights to ``path``: all of them or, if anything goes wrong, none, and what was there stays."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            torch.save({name: tensor.cpu() for name, tensor in network.state_dict().items()}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        raise UserError(f"--checkpoint {path} could not be written: {first_line(error)}") from error
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"--checkpoint {path}: expected a file name in a writable directory")


def load_pretrained(network: nn.Module, path: Path, device: torch.device) -> None:
    """Load weights into ``network``, save for the head where theirs is for other classes."""
    weights, expected = load_weights(path, device), network.state_dict()
    is_head = {name for name in expected.keys() | weights.keys() if name.startswith("head.")}
    if any(name not in weights or weights[name].shape != expected[name].shape for name in is_head & expected.keys()):
        print(f"{path} has a head for other classes; this one begins anew")
        weights = {name: tensor for name, tensor in weights.items() if name not in is_head}
        weights |= {name: expected[name] for name in is_head & expected.keys()}
    check_fit(weights, expected, path)
    network.load_state_dict(weights)


def load_weights(path: Path, device: torch.device) -> dict[str, torch.Tensor]:
    try:
        weights = torch.load(path, map_location=device, weights_only=True)
    except OSError as error:
        raise UserError(f"{path}: expected a readable checkpoint, got {error.strerror}") from error
    except Exception as error:  # for a damaged file torch.load raises whatever its parts do
        raise UserError(f"{path}: expected a checkpoint of weights only, got: {first_line(error)}") from error
    if not isinstance(weights, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in weights.values()):
        raise UserError(f"{path}: expected a state_dict, names and their tensors, got something else")
    return weights


def check_fit(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], path: Path) -> None:
    def describe(tensors: dict[str, torch.Tensor], name: str) -> str:
        return f"shape {tuple(tensors[name].shape)}" if name in tensors else "none"

    mismatches = [
        f"{name} (expected {describe(expected, name)}, got {describe(weights, name)})"
        for name in {**expected, **weights}
        if describe(expected, name) != describe(weights, name)
    ]
    if mismatches:
        more = f" and {len(mismatches) - LISTED_MISMATCHES} more" if len(mismatches) > LISTED_MISMATCHES else ""
        raise UserError(f"{path} does not fit the network: {', '.join(mismatches[:LISTED_MISMATCHES])}{more}")


# --------------------------------------------------------------------------------------------------- ranks and errors


class UserError(Exception):
    """Something that the user can put right: one line on rank 0, exit code 2."""


class TrainingError(Exception):
    """Training went wrong; raised on all ranks alike: one line on each, exit code 1."""


def on_all_ranks(prepare: Callable[[], T], only_rank: int | None = None) -> T | None:
    """Return ``prepare()``, called on all ranks or one; what is wrong on any is raised on all, so that nobody waits."""
    result, problem = None, None
    try:
        if only_rank in (None, dist.get_rank()):
            result = prepare()
    except (UserError, psengine.ConfigurationError) as error:
        problem = str(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise UserError(problem if rank == 0 else f"rank {rank}: {problem}")
    return result


def print_error(error: Exception) -> None:
    # One write, so that ranks' lines stay whole; print() makes two where Python is unbuffered, as under torchrun.
    sys.stderr.write(f"{Path(__file__).name}: error: {error}\n")


def wait_for_all_ranks() -> None:
    """Wait until all ranks have spoken: torchrun ends the others as soon as one has left."""
    if dist.is_initialized():
        dist.barrier()


def first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]


def sample_count(micro_batches: Iterable[Batch]) -> int:
    return sum(len(labels) for _, labels in micro_batches)


def in_groups(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Yield lists of ``size`` batches; the last may be shorter."""
    group = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


# ------------------------------------------------------------------------------------------------------------ options


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, printed by one rank."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parse_options() -> argparse.Namespace:
    parser = OptionParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--data", type=Path, metavar="DIR", help="MNIST or Fashion-MNIST, as IDX files (default: scikit-learn's digits)"
    )
    add("--pretrained", type=Path, metavar="PATH", help="start from these weights; the head may be for other classes")
    add("--checkpoint", type=Path, metavar="PATH", help="save the weights there after each epoch")
    add("--evaluate", type=Path, metavar="PATH", help="print a checkpoint's accuracy, train nothing")
    add("--compare", action="store_true", help="train native DDP beside it; fail if the models are not exactly equal")
    add(
        "--strategy",
        metavar="NAME",
        help="how ranks agree: sync, sync-server, async (default: PSENGINE_STRATEGY, sync)",
    )
    add("--sync-batchnorm", action="store_true", help="normalise over the batches of all ranks")
    add("--epochs", type=positive_int, default=5, metavar="N")
    add("--max-steps", type=positive_int, metavar="N", help="end after so many optimizer steps")
    add(
        "--batch-size", type=positive_int, default=32, metavar="N", help="images per rank and micro-batch (default: 32)"
    )
    add("--accumulate", type=positive_int, default=1, metavar="N", help="micro-batches per step (default: 1)")
    add("--optimizer", choices=("sgd", "adamw"), default="sgd")
    add("--learning-rate", type=positive_float, metavar="X", help="default: 0.05 for sgd, 0.002 for adamw")
    add("--momentum", type=fraction, metavar="X", help="of sgd (default: 0.9)")
    add("--scheduler", choices=("none", "cosine"), default="none")
    add("--seed", type=seed, default=0, metavar="N", help="of the first weights and the order of images (default: 0)")
    add("--threads", type=positive_int, metavar="N", help="threads per rank (default: torch's)")
    add("--report-every", type=positive_int, default=20, metavar="N", help="steps between checks (default: 20)")
    options = parser.parse_args()

    for name in ("pretrained", "checkpoint", "compare"):
        if options.evaluate is not None and getattr(options, name):
            parser.error(f"--evaluate trains nothing: leave out --{name}")
    if options.momentum is not None and options.optimizer != "sgd":
        parser.error(f"--momentum is sgd's: leave it out with --optimizer {options.optimizer}")
    if options.momentum is None:
        options.momentum = 0.9
    if options.learning_rate is None:
        options.learning_rate = {"sgd": 0.05, "adamw": 0.002}[options.optimizer]
    return options


def positive_int(text: str) -> int:
    return checked(text, int, lambda value: value > 0, "a whole number above 0")


def positive_float(text: str) -> float:
    return checked(text, float, lambda value: 0 < value < math.inf, "a finite number above 0")


def fraction(text: str) -> float:
    return checked(text, float, lambda value: 0 <= value < 1, "a number from 0 to below 1")


def seed(text: str) -> int:
    return checked(text, int, lambda value: 0 <= value < 2**32, "a whole number from 0 to below 2**32")


def checked(text: str, kind: type[T], is_allowed: Callable[[T], bool], expected: str) -> T:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not is_allowed(value):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value


if __name__ == "__main__":
    exit_code = main()
    gc.collect()  # a model is a cycle of references and would keep gloo's threads beyond the interpreter's end
    psengine.shutdown()
    sys.exit(exit_code)
