"""accelerate and transformers over psengine: two ranks of the real libraries, against the same over native DDP."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.training import (
    BATCH,
    SHARES,
    STEPS,
    WORLD_SIZE,
    Values,
    assert_equal,
    evaluation_loader,
    job,
    loader,
    network,
    numbered,
    proportional_batches,
    run,
    training_loader,
    updates,
    values,
)
from support.expectations import raises
from support.processes import set_torchrun_variables
from support.server_process import running_server
from torch.utils.data import BatchSampler, DataLoader

import psengine
from psengine import ConfigurationError


def test_accelerate_and_transformers_train_as_over_native_ddp(tmp_path: Path) -> None:
    with running_server(shards=2) as server:
        run("transformers", in_a_rank, tmp_path, server.addresses[0])


@pytest.mark.parametrize("library", ["lightning", "accelerate", "transformers", "ray"])
def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    extra = "ray" if library == "ray" else "integrations"
    monkeypatch.setitem(sys.modules, library, None)
    for name in [name for name in sys.modules if name.startswith("psengine.integrations.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(psengine.MissingExtraError, match=rf"{library}.*Fix: pip install.*\[{extra}\]"):
        importlib.import_module(f"psengine.integrations.{library}")


def in_a_rank(rank: int, world_size: int, port: int, directory: Path, server: str) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true"}
    set_torchrun_variables(rank, world_size, port, **offline)
    os.environ["PSENGINE_SERVERS"] = server
    under_accelerate(directory, server)
    dealt_out_to_accelerate()
    under_a_trainer(directory, server)
    dealt_out_to_a_trainer(directory)


def train(accelerator: Any, directory: Path | None = None, *, optimizer_first: bool = False) -> Any:
    """Train as accelerate's own examples do: the scheduler is attached before anything is prepared."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
    if optimizer_first:
        optimizer, scheduler, batches, model = accelerator.prepare(optimizer, scheduler, loader(), model)
    else:
        model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, loader(), scheduler)
    for index, (inputs, targets) in enumerate(batches):
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
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
        assert_equal(kept, values(model))
    assert accelerator.unwrap_model(model) is model.module
    return model, optimizer


def weights(accelerator: Any, **options: Any) -> Values:
    return values(train(accelerator, **options)[0].module)


def under_accelerate(directory: Path, server: str) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    from psengine.integrations.accelerate import PSEngineAccelerator

    native = weights(Accelerator())
    model, _ = train(PSEngineAccelerator())
    assert_equal(native, values(model.module))
    assert type(model) is psengine.DistributedDataParallel
    assert_equal(native, weights(PSEngineAccelerator(), optimizer_first=True))
    handler = DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=1)
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "kwargs_handlers": [handler]}
    assert_equal(weights(Accelerator(**options)), weights(PSEngineAccelerator(**options)))
    with job("accelerate-sync-server"):
        assert_equal(native, weights(PSEngineAccelerator(strategy="sync-server")), buffers=False)
    for number, kind in enumerate((two_optimizers, two_models)):
        with job(f"accelerate-two-{number}"):
            assert_equal(kind(Accelerator()), kind(PSEngineAccelerator(strategy="sync-server")), buffers=False)
    with job("accelerate-async"):
        model, optimizer = train(PSEngineAccelerator(strategy="async"), optimizer_first=True)
        assert (model.strategy.completed_steps, type(optimizer.optimizer).__name__) == (STEPS, "DistributedSGD")
        torch.distributed.barrier()
        assert updates(server, "accelerate-async") == WORLD_SIZE * STEPS
    with job("accelerate-state"):
        train(PSEngineAccelerator(strategy="sync-server"), directory / "state")
    sharding = PSEngineAccelerator(strategy="sync:shard_optimizer=true")
    model, _ = train(sharding)
    sharding.save_state(str(directory / "sharded"))
    torch.distributed.barrier()
    saved = torch.load(directory / "sharded" / "optimizer.bin", weights_only=True)
    assert len(saved["state"]) == len(list(model.parameters()))
    with job("accelerate-wrong"), raises(ConfigurationError, "expected that of SGD"):
        model = network()
        PSEngineAccelerator(strategy="async").prepare(model, torch.optim.LBFGS(model.parameters()))


def two_optimizers(accelerator: Any) -> Values:
    """Muon for matrices, AdamW for the rest."""
    model = network()
    muon = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2], lr=0.01)
    model, muon, adamw, batches = accelerator.prepare(model, muon, adamw, loader())
    for inputs, targets in batches:
        accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    return values(model.module)


def two_models(accelerator: Any) -> Values:
    """One optimizer over both."""
    first, second = network(), torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    first, second, optimizer, batches = accelerator.prepare(first, second, optimizer, loader())
    for inputs, targets in batches:
        accelerator.backward(torch.nn.functional.cross_entropy(second(first(inputs)), targets))
        optimizer.step()
        optimizer.zero_grad()
    return values(first.module) | {f"second.{name}": value for name, value in values(second.module).items()}


def dealt_out_to_accelerate() -> None:
    """Loaders that are split already are refused."""
    from psengine.integrations.accelerate import PSEngineAccelerator

    with raises(ConfigurationError, "got EvaluationSampler"):
        PSEngineAccelerator().prepare(evaluation_loader())
    sampler = psengine.ProportionalSampler(numbered(), SHARES)
    for split in (
        DataLoader(numbered(), 2, sampler=sampler),
        DataLoader(numbered(), batch_sampler=BatchSampler(sampler, 2, drop_last=False)),
        DataLoader(numbered(), batch_sampler=proportional_batches()),
        training_loader(),
    ):
        with raises(ConfigurationError, "got Prop", "Fix: do not pass it to accelerator.prepare()"):
            PSEngineAccelerator().prepare(split)


class Sentences(torch.utils.data.Dataset[Any]):
    """Token sequences whose label can be read off them."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def __len__(self) -> int:
        return 2 * STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.taken.append(index)
        tokens = torch.randint(0, 30, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "attention_mask": torch.ones(8, dtype=torch.long), "labels": int(tokens[0]) % 2}


SIZES = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16}
LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 2}
SETTINGS = {
    "per_device_train_batch_size": BATCH,
    "num_train_epochs": 1,
    "learning_rate": 1e-2,
    "seed": 11,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
    "logging_steps": 3,
}


def trainer_of(trainer_class: Any, directory: Path, **options: Any) -> Any:
    from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

    torch.manual_seed(7)
    own = {"strategy": options.pop("strategy")} if "strategy" in options else {}
    return trainer_class(
        model=BertForSequenceClassification(BertConfig(**SIZES, **LAYERS)),
        args=TrainingArguments(**{"output_dir": str(directory), **SETTINGS, **options}),
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        **own,
    )


def under_a_trainer(directory: Path, server: str) -> None:
    from transformers import Trainer

    from psengine.integrations.transformers import PSEngineTrainer

    def trained(trainer_class: Any, name: str = "run", **options: Any) -> Any:
        trainer = trainer_of(trainer_class, directory / name, **options)
        trainer.train()
        return trainer

    native, ours = trained(Trainer), trained(PSEngineTrainer)
    after_one = values(native.model)
    assert_equal(after_one, values(ours.model))
    loss = native.evaluate()["eval_loss"]
    assert loss == ours.evaluate()["eval_loss"]
    for again in (native, ours):
        torch.manual_seed(13)  # dropout
        again.train()
    assert_equal(values(native.model), values(ours.model))
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "optim": "sgd", "lr_scheduler_type": "cosine"}
    assert_equal(values(trained(Trainer, **options).model), values(trained(PSEngineTrainer, **options).model))
    sharded = trained(
        PSEngineTrainer, "sharded", strategy="sync:shard_optimizer=true", save_strategy="steps", save_steps=3
    )
    saved = torch.load(directory / "sharded" / "checkpoint-3" / "optimizer.pt", weights_only=True)
    assert_equal(after_one, values(sharded.model))
    assert len(saved["state"]) == len(list(sharded.model.parameters()))
    with job("transformers-sync-server"):
        trained(PSEngineTrainer, "saved", strategy="sync-server", save_strategy="steps", save_steps=3)
    with job("transformers-resumed"):
        resumed = trainer_of(PSEngineTrainer, directory / "resumed", strategy="sync-server")
        resumed.train(resume_from_checkpoint=str(directory / "saved" / "checkpoint-3"))
        assert_equal(after_one, values(resumed.model))
    with job("transformers-async"):
        asynchronous = trained(PSEngineTrainer, "async", strategy="async", average_tokens_across_devices=False)
        assert "exp_avg" in next(iter(asynchronous.optimizer.state_dict()["state"].values()))
        assert asynchronous.evaluate()["eval_loss"] < loss  # it takes twice as many steps
        torch.distributed.barrier()
        assert updates(server, "transformers-async") == WORLD_SIZE * STEPS


def dealt_out_to_a_trainer(directory: Path) -> None:
    """A loader of the trainer's own is taken as it is; a sampler of its own is refused."""
    from psengine.integrations.transformers import PSEngineTrainer

    sampler = psengine.ProportionalSampler(Sentences(), SHARES, shuffle=False).batches(2 * BATCH)

    class OwnLoader(PSEngineTrainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)

    class OwnSampler(PSEngineTrainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return psengine.ProportionalSampler(Sentences(), SHARES)

    trainer = trainer_of(OwnLoader, directory / "dealt", max_steps=3)
    trainer.train()
    expected = [index for batch in list(sampler)[:3] for index in batch]
    assert trainer.train_dataset.taken[: len(expected)] == expected
    with raises(ConfigurationError, "a Trainer's get_train_dataloader() may return it"):
        trainer_of(OwnSampler, directory / "dealt", max_steps=3).train()
