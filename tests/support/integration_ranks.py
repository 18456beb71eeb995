"""What the ranks of tests/integrations/test_integrations.py do: the real libraries, each beside its own native DDP."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import psengine

STEPS, BATCH = 6, 4


def launch(rank: int, world_size: int, port: int) -> None:
    """torchrun's variables; the agent's store is the test's."""
    for name in ("SLURM_JOB_ID", "SLURM_NTASKS"):
        os.environ.pop(name, None)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="none",
        TORCHELASTIC_USE_AGENT_STORE="True",
        ACCELERATE_USE_CPU="true",
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
    )


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(2 * STEPS * BATCH, 6, generator=generator)
    return TensorDataset(inputs, inputs.abs().sum(1).long() % 3)


def network() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 3)
    )


def values(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


SHARES, GLOBAL_BATCH = [1, 3], 4


def numbered() -> TensorDataset:
    """Samples that say which they are; too few for whole batches."""
    return TensorDataset(torch.arange(11.0).view(-1, 1))


def numbers_in(loader: Any) -> list[list[int]]:
    return [batch[0].flatten().int().tolist() for batch in loader]


def proportional_batches() -> Any:
    return psengine.ProportionalSampler(numbered(), SHARES, shuffle=False).batches(GLOBAL_BATCH)


def refusal(call: Callable[[], Any], error: type[Exception] = psengine.ConfigurationError) -> str:
    """What ``call`` is refused with."""
    try:
        call()
    except error as refused:
        return str(refused)
    return "not refused"


# ---- Lightning -----------------------------------------------------------------------------------------------------


def _lightning_module(*, manual: bool = False, optimizer: str = "SGD") -> Any:
    from lightning.pytorch import LightningModule

    class Tiny(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()
            self.automatic_optimization = not manual
            self.wrappers: list[str] = []
            self.kept: list[torch.nn.Module] = []

        def training_step(self, batch: Any, index: int) -> Any:
            self.wrappers.append(type(self.trainer.strategy.model).__module__)
            if self.wrappers[-1] == "psengine.wrapper.ddp":
                self.kept.append(self.trainer.strategy.model)  # still there when the module is wrapped again
            self.rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            loss = torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])
            if manual:
                (stepper := self.optimizers()).zero_grad()
                self.manual_backward(loss)
                stepper.step()
            return loss

        def configure_optimizers(self) -> Any:
            if optimizer == "LBFGS":
                return torch.optim.LBFGS(self.parameters())
            stepper = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            if manual:
                return stepper
            scheduler = torch.optim.lr_scheduler.StepLR(stepper, 2, gamma=0.5)
            return {"optimizer": stepper, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Tiny()


def _lightning_gan(strategy: Any, directory: Path) -> dict[str, torch.Tensor]:
    """Two networks and two optimizers in one module, by manual optimization, as Lightning's own example does."""
    from lightning.pytorch import LightningModule

    class Gan(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.automatic_optimization = False
            self.generator = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 6))
            self.critic = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

        def training_step(self, batch: Any, index: int) -> None:
            of_generator, of_critic = self.optimizers()
            for optimizer in (of_generator, of_critic):
                self.toggle_optimizer(optimizer)
                fake = self.generator(batch[0].flip(0))
                if optimizer is of_generator:
                    loss = -self.critic(fake).mean()
                else:
                    loss = self.critic(fake.detach()).mean() - self.critic(batch[0]).mean()
                self.manual_backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            return (
                torch.optim.Adam(self.generator.parameters(), lr=0.01),
                torch.optim.RMSprop(self.critic.parameters(), lr=0.01),
            )

    module = Gan()
    trainer = _trainer(strategy, directory)
    trainer.fit(module, DataLoader(samples(), batch_size=BATCH, shuffle=False))
    assert all(optimizer.state_dict()["state"] for optimizer in trainer.optimizers)
    return values(module)


def _trainer(strategy: Any, directory: Path, **options: Any) -> Any:
    from lightning.pytorch import Trainer

    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        **{"max_epochs": 1, **options},
    )


def _fit(
    strategy: Any,
    directory: Path,
    *,
    manual: bool = False,
    optimizer: str = "SGD",
    checkpoint: Path | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    module = _lightning_module(manual=manual, optimizer=optimizer)
    trainer = _trainer(strategy, directory, **options)
    trainer.fit(module, DataLoader(samples(), batch_size=BATCH, shuffle=False), ckpt_path=checkpoint)
    return trainer, module


def _fit_twice(strategy: Any, directory: Path) -> dict[str, torch.Tensor]:
    trainer, module = _fit(strategy, directory)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, DataLoader(samples(), batch_size=BATCH, shuffle=False))
    return values(module.network)


@contextmanager
def job(name: str) -> Iterator[None]:
    """Meet the servers under a name of the case's own."""
    os.environ["PSENGINE_JOB"] = name
    try:
        yield
    finally:
        del os.environ["PSENGINE_JOB"]


def lightning_rank(rank: int, world_size: int, port: int, directory: Path, server: str) -> dict[str, Any]:
    launch(rank, world_size, port)
    from lightning.pytorch.strategies import DDPStrategy

    from psengine.integrations import lightning as ours

    ours.register()
    found: dict[str, Any] = {}
    _, native = _fit(DDPStrategy(), directory)
    _, module = _fit("psengine", directory)
    found["sync"] = values(native.network), values(module.network)
    found["wrappers"] = set(native.wrappers), set(module.wrappers)

    def trained(**options: Any) -> tuple[Any, Any]:
        """The weights under native DDP and under ours."""
        own = {name: options.pop(name) for name in ("find_unused_parameters",) if name in options}
        strategies = DDPStrategy(**own), ours.PSEngineStrategy(**own)
        return tuple(values(_fit(strategy, directory, **options)[1].network) for strategy in strategies)

    found["accumulate"] = trained(find_unused_parameters=True, accumulate_grad_batches=2, gradient_clip_val=0.3)
    found["manual"] = trained(manual=True)
    os.environ["PSENGINE_SERVERS"] = server
    with job("lightning-sync-server"):
        _, module = _fit("psengine-sync-server", directory)
        found["sync-server"] = values(native.network), values(module.network)
    with job("lightning-async"):
        trainer, module = _fit(ours.PSEngineStrategy("async:max_staleness=0"), directory, max_epochs=2)
        # After fit, when this worker has left the servers.
        path = directory / "after.ckpt"
        trainer.save_checkpoint(path)
        state = torch.load(path, weights_only=True)["optimizer_states"][0]["state"]
        found["momentum"] = [entry["momentum_buffer"].abs().sum().item() for entry in state.values()]
        found["learning_rate"] = trainer.lr_scheduler_configs[0].scheduler.get_last_lr(), module.rate
    found["again"] = _fit_twice(DDPStrategy(), directory), _fit_twice("psengine", directory)
    with job("lightning-saved"):
        trainer, _ = _fit("psengine-sync-server", directory)
        trainer.save_checkpoint(directory / "half.ckpt")
    with job("lightning-resumed"):
        _, module = _fit("psengine-sync-server", directory, max_epochs=2, checkpoint=directory / "half.ckpt")
        found["resumed"] = values(_fit(DDPStrategy(), directory, max_epochs=2)[1].network), values(module.network)
    with job("lightning-gan"):
        strategy = ours.PSEngineStrategy("sync-server", find_unused_parameters=True)
        found["gan"] = (
            _lightning_gan(DDPStrategy(find_unused_parameters=True), directory),
            _lightning_gan(strategy, directory),
        )
    with job("lightning-gan-async"):
        asynchronous = ours.PSEngineStrategy("async", find_unused_parameters=True)
        found["gan refused"] = refusal(lambda: _lightning_gan(asynchronous, directory))
    found["dealt out"] = _lightning_samples(ours.PSEngineStrategy, directory)
    with job("lightning-wrong"):
        found["unknown optimizer"] = refusal(lambda: _fit("psengine-async", directory, optimizer="LBFGS"))
    return {"trainer": found, "fabric": fabric_cases(world_size)}


def _lightning_samples(strategy_class: Any, directory: Path) -> dict[str, Any]:
    from lightning.pytorch import LightningModule

    class Seeing(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: list[Any] = []

        def training_step(self, batch: Any, index: int) -> Any:
            self.seen.append(batch)
            return self.layer(batch[0]).mean()

        def validation_step(self, batch: Any, index: int) -> None:
            self.seen.append(batch)

        def predict_step(self, batch: Any, index: int) -> None:
            self.seen.append(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def seen(task: str, loader: Any) -> list[list[int]]:
        module = Seeing()
        getattr(_trainer(strategy_class(), directory), task)(module, loader)
        return numbers_in(module.seen)

    found = {
        "training": seen("fit", DataLoader(numbered(), sampler=proportional_batches(), batch_size=None)),
        "evaluation": seen("validate", DataLoader(numbered(), 2, sampler=psengine.EvaluationSampler(numbered()))),
        "prediction": seen("predict", DataLoader(numbered(), 2, sampler=psengine.EvaluationSampler(numbered()))),
    }
    as_batch_sampler = DataLoader(numbered(), batch_sampler=proportional_batches())
    return {**found, "as batch_sampler": refusal(lambda: seen("fit", as_batch_sampler), TypeError)}


def fabric_cases(world_size: int) -> dict[str, Any]:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    from psengine.integrations.lightning import PSEngineFabricStrategy

    def train(strategy: Any) -> dict[str, torch.Tensor]:
        fabric = Fabric(strategy=strategy, accelerator="cpu", devices=world_size)
        fabric.launch()
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        wrapped = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(optimizer)
        loader = fabric.setup_dataloaders(DataLoader(samples(), batch_size=BATCH, shuffle=False))
        for index, (inputs, targets) in enumerate(loader):
            with fabric.no_backward_sync(wrapped, enabled=index % 2 == 0):
                fabric.backward(torch.nn.functional.cross_entropy(wrapped(inputs), targets))
            if index % 2:
                fabric.clip_gradients(wrapped, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
        return values(model)

    native = train(DDPStrategy())
    found: dict[str, Any] = {"sync": (native, train(PSEngineFabricStrategy("sync")))}
    for strategy in ("sync-server", "async"):
        with job(f"fabric-{strategy}"):
            found[strategy] = native, train(PSEngineFabricStrategy(strategy))
    fabric = Fabric(strategy=PSEngineFabricStrategy("sync"), accelerator="cpu", devices=world_size)
    fabric.launch()
    found["dealt out"] = {
        "training": numbers_in(
            fabric.setup_dataloaders(DataLoader(numbered(), sampler=proportional_batches(), batch_size=None))
        ),
        "evaluation": numbers_in(
            fabric.setup_dataloaders(DataLoader(numbered(), 2, sampler=psengine.EvaluationSampler(numbered())))
        ),
    }
    return found


# ---- accelerate ----------------------------------------------------------------------------------------------------


def _accelerate(accelerator: Any, directory: Path | None = None, *, optimizer_first: bool = False) -> Any:
    """Train as accelerate's own examples do: the scheduler is attached before anything is prepared."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
    loader = DataLoader(samples(), batch_size=BATCH, shuffle=False)
    if optimizer_first:
        optimizer, scheduler, loader, model = accelerator.prepare(optimizer, scheduler, loader, model)
    else:
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for index, (inputs, targets) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if index == 3 and directory is not None:
            accelerator.save_state(str(directory))
            kept = values(model)
    if directory is not None:
        accelerator.load_state(str(directory))
        assert all(torch.equal(kept[name], tensor) for name, tensor in values(model).items())
    assert type(accelerator.unwrap_model(model)) is torch.nn.Sequential
    assert accelerator.unwrap_model(model) is model.module
    return model, optimizer


def accelerate_cases(directory: Path) -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    from psengine.integrations.accelerate import PSEngineAccelerator

    def weights(accelerator: Any, **options: Any) -> dict[str, torch.Tensor]:
        return values(_accelerate(accelerator, **options)[0].module)

    native = weights(Accelerator())
    accelerator = PSEngineAccelerator()
    model, _ = _accelerate(accelerator)
    found: dict[str, Any] = {"sync": (native, values(model.module)), "wrapper": type(model).__module__}
    found["optimizer first"] = native, weights(PSEngineAccelerator(), optimizer_first=True)
    handler = DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=1)
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "kwargs_handlers": [handler]}
    found["accumulate"] = weights(Accelerator(**options)), weights(PSEngineAccelerator(**options))
    with job("accelerate-sync-server"):
        found["sync-server"] = native, weights(PSEngineAccelerator(strategy="sync-server"))
    with job("accelerate-two-optimizers"):
        found["two optimizers"] = (
            _two_optimizers(Accelerator()),
            _two_optimizers(PSEngineAccelerator(strategy="sync-server")),
        )
    with job("accelerate-two-models"):
        found["two models"] = _two_models(Accelerator()), _two_models(PSEngineAccelerator(strategy="sync-server"))
    with job("accelerate-async"):
        model, optimizer = _accelerate(PSEngineAccelerator(strategy="async"), optimizer_first=True)
        found["steps"] = model.strategy.completed_steps, type(optimizer.optimizer).__name__
    with job("accelerate-state"):
        _accelerate(PSEngineAccelerator(strategy="sync-server"), directory / "state")
    with job("accelerate-wrong"):
        model = network()
        accelerator, lbfgs = PSEngineAccelerator(strategy="async"), torch.optim.LBFGS(model.parameters())
        found["unknown optimizer"] = refusal(lambda: accelerator.prepare(model, lbfgs))
    sampler = psengine.ProportionalSampler(numbered(), SHARES)
    loaders = [
        DataLoader(numbered(), 2, sampler=psengine.EvaluationSampler(numbered())),
        DataLoader(numbered(), 2, sampler=sampler),
        DataLoader(numbered(), batch_sampler=torch.utils.data.BatchSampler(sampler, 2, drop_last=False)),
        DataLoader(numbered(), batch_sampler=proportional_batches()),
        DataLoader(numbered(), sampler=proportional_batches(), batch_size=None),
    ]
    found["dealt out"] = [refusal(functools.partial(PSEngineAccelerator().prepare, loader)) for loader in loaders]
    return found


def _two_optimizers(accelerator: Any) -> dict[str, torch.Tensor]:
    """Muon for matrices, AdamW for the rest."""
    model = network()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    muon, adamw = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=0.01)
    loader = DataLoader(samples(), batch_size=BATCH, shuffle=False)
    model, muon, adamw, loader = accelerator.prepare(model, muon, adamw, loader)
    for inputs, targets in loader:
        accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    return values(model.module)


def _two_models(accelerator: Any) -> dict[str, torch.Tensor]:
    """One optimizer over both."""
    first, second = network(), torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    loader = DataLoader(samples(), batch_size=BATCH, shuffle=False)
    first, second, optimizer, loader = accelerator.prepare(first, second, optimizer, loader)
    for inputs, targets in loader:
        accelerator.backward(torch.nn.functional.cross_entropy(second(first(inputs)), targets))
        optimizer.step()
        optimizer.zero_grad()
    return values(first.module) | {f"second.{name}": value for name, value in values(second.module).items()}


# ---- transformers --------------------------------------------------------------------------------------------------


class Sentences(torch.utils.data.Dataset[Any]):
    """Token sequences whose label can be read off them."""

    def __len__(self) -> int:
        return 2 * STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = torch.randint(0, 30, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "attention_mask": torch.ones(8, dtype=torch.long), "labels": int(tokens[0]) % 2}


def _trainer_of(trainer_class: Any, directory: Path, **options: Any) -> Any:
    from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    own = {name: options.pop(name) for name in ("strategy",) if name in options}
    settings = {
        "output_dir": str(directory),
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 11,
        "logging_steps": 3,
        **options,
    }
    return trainer_class(
        model=BertForSequenceClassification(config),
        args=TrainingArguments(**settings),
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        **own,
    )


def transformers_rank(rank: int, world_size: int, port: int, directory: Path, server: str) -> dict[str, Any]:
    launch(rank, world_size, port)
    os.environ["PSENGINE_SERVERS"] = server
    return {"accelerate": accelerate_cases(directory), "trainer": transformers_cases(directory)}


def transformers_cases(directory: Path) -> dict[str, Any]:
    from transformers import Trainer

    from psengine.integrations.transformers import PSEngineTrainer

    def train(trainer_class: Any, name: str = "run", **options: Any) -> Any:
        trainer = _trainer_of(trainer_class, directory / name, **options)
        trainer.train()
        return trainer

    native = train(Trainer)
    trainer = train(PSEngineTrainer)
    found: dict[str, Any] = {"sync": (values(native.model), values(trainer.model))}
    found["evaluation"] = native.evaluate()["eval_loss"], trainer.evaluate()["eval_loss"]
    for again in (native, trainer):
        torch.manual_seed(13)  # dropout
        again.train()
    found["again"] = values(native.model), values(trainer.model)
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "optim": "sgd", "lr_scheduler_type": "cosine"}
    found["accumulate"] = values(train(Trainer, **options).model), values(train(PSEngineTrainer, **options).model)
    found["dealt out"] = _trainer_samples(PSEngineTrainer, directory)
    with job("transformers-sync-server"):
        train(PSEngineTrainer, "saved", strategy="sync-server", save_strategy="steps", save_steps=3)
    with job("transformers-resumed"):
        resumed = _trainer_of(PSEngineTrainer, directory / "resumed", strategy="sync-server")
        resumed.train(resume_from_checkpoint=str(directory / "saved" / "checkpoint-3"))
        found["resumed"] = found["sync"][0], values(resumed.model)
    with job("transformers-async"):
        asynchronous = train(PSEngineTrainer, "async", strategy="async", average_tokens_across_devices=False)
        found["state"] = sorted(next(iter(asynchronous.optimizer.state_dict()["state"].values())))
        found["loss"] = asynchronous.evaluate()["eval_loss"]
    return found


def _trainer_samples(trainer_class: Any, directory: Path) -> tuple[list[int], list[int], str]:
    """The samples that a Trainer took from a loader of its own, those it should have, and what it says otherwise."""
    sampler = psengine.ProportionalSampler(Sentences(), SHARES, shuffle=False).batches(2 * BATCH)
    taken: list[int] = []

    class Counting(Sentences):
        def __getitem__(self, index: int) -> dict[str, Any]:
            taken.append(index)
            return super().__getitem__(index)

    class OwnLoader(trainer_class):
        def get_train_dataloader(self) -> Any:
            return DataLoader(Counting(), batch_sampler=sampler, collate_fn=self.data_collator)

    class OwnSampler(trainer_class):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return psengine.ProportionalSampler(Sentences(), SHARES)

    _trainer_of(OwnLoader, directory / "dealt", max_steps=3).train()
    refused = refusal(_trainer_of(OwnSampler, directory / "dealt", max_steps=3).train)
    return taken, [index for batch in list(sampler)[:3] for index in batch], refused
