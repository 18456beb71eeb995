"""Lightning's Trainer and Fabric over psengine: two ranks of the real library, against the same over native DDP."""

import os
from pathlib import Path
from typing import Any

import torch
from integrations.training import (
    EVALUATED,
    STEPS,
    TRAINED,
    WORLD_SIZE,
    Values,
    assert_equal,
    evaluation_loader,
    job,
    loader,
    network,
    numbered,
    numbers_in,
    proportional_batches,
    run,
    training_loader,
    updates,
    values,
)
from support.expectations import raises
from support.processes import set_torchrun_variables
from support.server_process import running_server
from torch.utils.data import DataLoader

from psengine import ConfigurationError


def test_lightning_and_fabric_train_as_over_native_ddp(tmp_path: Path) -> None:
    with running_server(shards=2) as server:
        run("lightning", in_a_rank, tmp_path, server.addresses[0])


def in_a_rank(rank: int, world_size: int, port: int, directory: Path, server: str) -> None:
    set_torchrun_variables(rank, world_size, port)
    os.environ["PSENGINE_SERVERS"] = server
    from psengine.integrations import lightning

    lightning.register()
    over_servers(directory, server, native=under_collectives(directory))
    dealt_out(rank, directory)
    under_fabric(rank, server)


def tiny(*, manual: bool = False, optimizer: str = "SGD") -> Any:
    from lightning.pytorch import LightningModule

    class Tiny(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()
            self.automatic_optimization = not manual
            self.wrappers: list[torch.nn.Module] = []  # still there when the module is wrapped again

        def training_step(self, batch: Any, index: int) -> Any:
            self.wrappers.append(self.trainer.strategy.model)
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


def trainer_of(strategy: Any, directory: Path, **options: Any) -> Any:
    from lightning.pytorch import Trainer

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    given = {"max_epochs": 1, "accelerator": "cpu", "devices": WORLD_SIZE, "default_root_dir": directory}
    return Trainer(strategy=strategy, **{**quiet, **given, **options})


def fit(
    strategy: Any, directory: Path, *, manual: bool = False, optimizer: str = "SGD", checkpoint: Any = None, **more: Any
) -> tuple[Any, Any]:
    module, trainer = tiny(manual=manual, optimizer=optimizer), trainer_of(strategy, directory, **more)
    trainer.fit(module, loader(), ckpt_path=checkpoint)
    return trainer, module


def trained(strategy: Any, directory: Path, **options: Any) -> Values:
    return values(fit(strategy, directory, **options)[1].network)


def fit_twice(strategy: Any, directory: Path) -> Values:
    trainer, module = fit(strategy, directory)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader())
    return values(module.network)


def under_collectives(directory: Path) -> Values:
    """What native DDP learns."""
    from lightning.pytorch.strategies import DDPStrategy

    from psengine.integrations.lightning import PSEngineStrategy

    _, native = fit(DDPStrategy(), directory)
    _, ours = fit("psengine", directory)
    assert_equal(values(native.network), values(ours.network))
    wrappers = [{type(each).__module__ for each in module.wrappers} for module in (native, ours)]
    assert wrappers == [{"torch.nn.parallel.distributed"}, {"psengine.wrapper.ddp"}]
    assert_equal(trained(DDPStrategy(), directory, manual=True), trained("psengine", directory, manual=True))
    accumulating = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
    strategies = (strategy(find_unused_parameters=True) for strategy in (DDPStrategy, PSEngineStrategy))
    assert_equal(*(trained(strategy, directory, **accumulating) for strategy in strategies))
    assert_equal(fit_twice(DDPStrategy(), directory), fit_twice("psengine", directory))
    trainer, sharded = fit(PSEngineStrategy("sync:shard_optimizer=true"), directory)
    assert_equal(values(native.network), values(sharded.network))
    trainer.save_checkpoint(directory / "sharded.ckpt")
    (saved,) = torch.load(directory / "sharded.ckpt", weights_only=True)["optimizer_states"]
    assert len(saved["state"]) == len(list(sharded.network.parameters()))
    return values(native.network)


def over_servers(directory: Path, server: str, native: Values) -> None:
    from lightning.pytorch.strategies import DDPStrategy

    from psengine.integrations.lightning import PSEngineStrategy

    with job("lightning-sync-server"):
        trainer, module = fit("psengine-sync-server", directory)
        assert_equal(native, values(module.network), buffers=False)
        trainer.save_checkpoint(directory / "half.ckpt")
    with job("lightning-resumed"):
        resumed = trained("psengine-sync-server", directory, max_epochs=2, checkpoint=directory / "half.ckpt")
        assert_equal(trained(DDPStrategy(), directory, max_epochs=2), resumed, buffers=False)
    with job("lightning-async"):
        trainer, module = fit(PSEngineStrategy("async:max_staleness=0"), directory, max_epochs=2)
        # After fit, when this worker has left the servers: the momentum is theirs.
        path = directory / "after.ckpt"
        trainer.save_checkpoint(path)
        state = torch.load(path, weights_only=True)["optimizer_states"][0]["state"]
        assert all(entry["momentum_buffer"].abs().sum() > 0 for entry in state.values())
        assert trainer.lr_scheduler_configs[0].scheduler.get_last_lr() == [0.1 * 0.5**STEPS]
        assert module.rate == 0.1 * 0.5 ** (STEPS - 1)
        torch.distributed.barrier()
        assert updates(server, "lightning-async") == WORLD_SIZE * 2 * STEPS
    with job("lightning-gan"):
        ours = train_gan(PSEngineStrategy("sync-server", find_unused_parameters=True), directory)
        assert_equal(train_gan(DDPStrategy(find_unused_parameters=True), directory), ours)
    with job("lightning-gan-async"), raises(ConfigurationError, "'async' steps one optimizer", "'sync-server'"):
        train_gan(PSEngineStrategy("async", find_unused_parameters=True), directory)
    with job("lightning-wrong"), raises(ConfigurationError, "expected that of SGD"):
        fit("psengine-async", directory, optimizer="LBFGS")


def train_gan(strategy: Any, directory: Path) -> Values:
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

    module, trainer = Gan(), trainer_of(strategy, directory)
    trainer.fit(module, loader())
    assert all(optimizer.state_dict()["state"] for optimizer in trainer.optimizers)
    return values(module)


def dealt_out(rank: int, directory: Path) -> None:
    """What psengine's samplers give to a rank, Lightning does not deal out again."""
    from lightning.pytorch import LightningModule

    from psengine.integrations.lightning import PSEngineStrategy

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

        predict_step = validation_step

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def seen(task: str, loader: Any) -> list[list[int]]:
        module = Seeing()
        getattr(trainer_of(PSEngineStrategy(), directory), task)(module, loader)
        return numbers_in(module.seen)

    assert seen("fit", training_loader()) == TRAINED[rank]
    assert seen("validate", evaluation_loader()) == seen("predict", evaluation_loader()) == EVALUATED[rank]
    with raises(TypeError, "use_distributed_sampler=False"):
        seen("fit", DataLoader(numbered(), batch_sampler=proportional_batches()))


def under_fabric(rank: int, server: str) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    from psengine.integrations.lightning import PSEngineFabricStrategy

    def launched(strategy: Any) -> Any:
        fabric = Fabric(strategy=strategy, accelerator="cpu", devices=WORLD_SIZE)
        fabric.launch()
        return fabric

    def train(strategy: Any) -> Values:
        fabric = launched(strategy)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        wrapped = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(optimizer)
        for index, (inputs, targets) in enumerate(fabric.setup_dataloaders(loader())):
            with fabric.no_backward_sync(wrapped, enabled=index % 2 == 0):
                fabric.backward(torch.nn.functional.cross_entropy(wrapped(inputs), targets))
            if index % 2:
                fabric.clip_gradients(wrapped, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
        return values(model)

    native = train(DDPStrategy())
    assert_equal(native, train(PSEngineFabricStrategy("sync")))
    with job("fabric-sync-server"):
        assert_equal(native, train(PSEngineFabricStrategy("sync-server")), buffers=False)
    with job("fabric-async"):
        train(PSEngineFabricStrategy("async"))
        torch.distributed.barrier()
        assert updates(server, "fabric-async") == WORLD_SIZE * STEPS // 2
    fabric = launched(PSEngineFabricStrategy("sync"))
    assert numbers_in(fabric.setup_dataloaders(training_loader())) == TRAINED[rank]
    assert numbers_in(fabric.setup_dataloaders(evaluation_loader())) == EVALUATED[rank]
