"""Server-side optimizers: a chunk steps like torch.optim steps the parameters it is made of, bit for bit."""

import copy
import inspect
import itertools
import json
import math
import mmap

import numpy as np
import pytest
import torch
from support.marks import slow

from psengine.errors import ProtocolError
from psengine.flat_optimizers.finite import is_finite
from psengine.flat_optimizers.optimizers import ChunkOptimizer, OptimizerSpec
from psengine.parameter_server.server.rules.delay_compensation import DelayCompensation
from psengine.protocol import hyperparameters
from psengine.protocol.hyperparameters import (
    OPTIMIZERS,
    SLOTS,
    check_groups,
    slot_names,
    wire_groups,
)
from psengine.protocol.messages import ErrorCode

IMPLEMENTATION_CHOICES = {"params", "foreach", "fused", "capturable", "differentiable"}

VARIANTS = {
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd-decay-maximize": ("SGD", {"lr": 0.1, "weight_decay": 0.01, "maximize": True}),
    "sgd-momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "sgd-dampening": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    "sgd-nesterov": ("SGD", {"lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01, "maximize": True}),
    "adam": ("Adam", {"lr": 0.01}),
    "adam-decay": ("Adam", {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "maximize": True}),
    "adam-amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True}),
    "adam-decoupled": ("Adam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adamw": ("AdamW", {"lr": 0.01}),
    "adamw-amsgrad": ("AdamW", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.2, "maximize": True}),
    "adagrad": ("Adagrad", {"lr": 0.05}),
    "adagrad-decay": (
        "Adagrad",
        {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.3, "maximize": True},
    ),
    "rmsprop": ("RMSprop", {"lr": 0.01}),
    "rmsprop-centered": ("RMSprop", {"lr": 0.01, "centered": True, "alpha": 0.9, "eps": 1e-6}),
    "rmsprop-momentum": (
        "RMSprop",
        {"lr": 0.01, "momentum": 0.9, "centered": True, "weight_decay": 0.1, "maximize": True},
    ),
}
FUSED = {
    f"{variant}-fused": (name, {**options, "fused": True})
    for variant, (name, options) in VARIANTS.items()
    if name != "RMSprop"
}
SHAPES = [(3, 5), (1,), (127,), (8, 9), (31,), (1001,), (2, 2, 2)]
NUMEL = sum(math.prod(shape) for shape in SHAPES)
# Of seven parameters two have a group of their own, and one (the shape (31,)) is not trained.
GROUPS = [0, 1, 1, 0, -1, 0, 0]
# In the middle of parameters, and of a chunk with one element.
CUTS = [0, 7, 100, 101, 800, NUMEL]
# In the middle of parameters, at whole cache lines from their beginning.
LINE_CUTS = [0, 80, 143, 207, 310, 1206, NUMEL]


def same(tensor, expected):
    # NaN too: centered RMSprop takes roots of numbers below 0 in float16.
    torch.testing.assert_close(tensor, expected, rtol=0, atol=0, equal_nan=True)


class Twin:
    """A torch optimizer over parameters, and chunks of the same values."""

    def __init__(self, name, options, *, dtype=torch.float32, cuts=CUTS, shapes=SHAPES, groups=GROUPS, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.groups, self.cuts = dtype, groups, cuts
        self.moves = False
        self.parameters = [torch.nn.Parameter(self.random(shape)) for shape in shapes]
        members = [[p for p, g in zip(self.parameters, groups, strict=True) if g == group] for group in (0, 1)]
        second = {"params": members[1], "lr": options["lr"] / 2, "weight_decay": 0.03}
        self.optimizer = OPTIMIZERS[name]([{"params": members[0]}, *([second] if members[1] else [])], **options)
        flat = self.flat(self.parameters)
        ends = np.cumsum([0] + [p.numel() for p in self.parameters]).tolist()
        self.spans = list(itertools.pairwise(ends))
        self.chunks = []
        for start, end in itertools.pairwise(cuts):
            runs = [
                [max(a, start) - start, min(b, end) - start, group]
                for (a, b), group in zip(self.spans, groups, strict=True)
                if max(a, start) < min(b, end)
            ]
            body = {"optimizer": name, "groups": wire_groups(self.optimizer), "runs": runs}
            spec = OptimizerSpec.from_body(json.loads(json.dumps(body)), end - start)
            self.chunks.append(ChunkOptimizer(flat[start:end].clone(), spec))

    def random(self, shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def flat(self, tensors):
        return torch.cat([t.detach().reshape(-1) for t in tensors])

    def step(self, without=(), *, send_groups=True, scale=1.0):
        gradients = [self.random(p.shape) for p in self.parameters]
        for index, (p, g) in enumerate(zip(self.parameters, gradients, strict=True)):
            p.grad = None if index in without else g
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] *= scale
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        flat = self.flat(gradients)
        sent = flat.clone()
        for chunk, start, end in zip(self.chunks, self.cuts, self.cuts[1:], strict=False):
            absent = [
                (max(self.spans[i][0], start) - start, min(self.spans[i][1], end) - start)
                for i in without
                if max(self.spans[i][0], start) < min(self.spans[i][1], end)
            ]
            groups = wire_groups(self.optimizer) if send_groups else None
            # Every other step leaves the old values as they are.
            self.moves = not self.moves
            old, before = chunk._values, chunk._values.clone()
            into = torch.full_like(old, 7.0) if self.moves else None
            chunk.apply(sent[start:end], groups=groups, learning_rate_scale=scale, absent=absent, into=into)
            assert chunk._values is (old if into is None else into)
            if into is not None:
                same(old, before)
        assert torch.equal(sent, flat), "a gradient was written to"

    def check(self):
        """Values, slots and steps are torch's."""
        same(torch.cat([c._values for c in self.chunks]), self.flat(self.parameters))
        for chunk, start in zip(self.chunks, self.cuts, strict=False):
            assert chunk.size_bytes == sum(slot.nbytes for slot in chunk.slots().values())
            steps = chunk.steps()
            for (run_start, run_end, group), count in zip(chunk.spec.runs, steps, strict=True):
                index = next(i for i, (a, b) in enumerate(self.spans) if a <= start + run_start < b)
                state = self.optimizer.state.get(self.parameters[index], {})
                if group < 0:
                    assert count == 0
                    continue
                offset = start + run_start - self.spans[index][0]
                for name, slot in chunk.slots().items():
                    expected = state.get(name)
                    if expected is None:
                        assert count == 0 or name not in slot_names(chunk.spec.name, [chunk.spec.groups[group]])
                        continue
                    expected = expected.reshape(-1)[offset : offset + run_end - run_start]
                    same(slot[run_start:run_end], expected)
                if "step" in state:
                    assert count == state["step"].item()
                else:
                    assert (count > 0) == (state.get("momentum_buffer") is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cut_model_steps_like_the_whole_one(variant, dtype):
    """Also where parameters have no gradient, and where rates and options change."""
    twin = Twin(*VARIANTS[variant], dtype=dtype)
    for step, without in enumerate(([0, 2], [], [0, 2], [1, 3, 4, 5], [], range(7), [6])):
        for group in twin.optimizer.param_groups:
            group["lr"] *= 0.9
        twin.step(without)
        twin.check()
        if step == 2:
            twin.optimizer.param_groups[1]["weight_decay"] = 0.0
    if not variant.startswith("sgd"):
        assert twin.chunks[1].steps() == [4.0, 5.0, 4.0]


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        (variant, dtype) if dtype in (torch.float32, torch.bfloat16) else slow(variant, dtype)
        for variant in FUSED
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        if dtype.itemsize > 2 or not variant.startswith("sgd")
    ],
)
def test_a_cut_model_steps_like_the_whole_one_by_fused_kernels(variant, dtype):
    small = {"shapes": [(4, 6), (6,), (3, 6), (3,), (2, 6), (2,), (37,)], "groups": [0] * 7, "cuts": [0, 102]}
    for model in ({"cuts": LINE_CUTS}, {"cuts": [0, NUMEL]}, *([small] if dtype.itemsize > 2 else [])):
        twin = Twin(*FUSED[variant], dtype=dtype, **model)
        for without in ([], [2], [0, 5], []):
            twin.step(without)
            twin.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", ["sgd", "sgd-momentum"])
def test_a_fused_kernel_that_is_wrong_is_not_used(variant, dtype):
    """Of torch's before 2.14, and never used: when psengine needs 2.14, ``_WRONG_KERNELS`` may go."""
    name, options = VARIANTS[variant]
    start, gradient = torch.randn(256).to(dtype), torch.randn(256).to(dtype)

    def stepped(**kernel):
        parameter = torch.nn.Parameter(start.clone())
        parameter.grad = gradient.clone()
        optimizer = OPTIMIZERS[name]([parameter], **options, **kernel)
        optimizer.step()
        return parameter.detach(), wire_groups(optimizer)

    wrong, groups = stepped(fused=True)
    right, _ = stepped()
    assert ((wrong - right).abs().max() > 0.02) == (tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14))
    values = start.clone()
    ChunkOptimizer(values, OptimizerSpec(name, tuple(groups), ((0, 256, 0),))).apply(gradient)
    assert torch.equal(values, right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cut_model_of_sixteen_bits(variant, dtype):
    # torch's kernels round the end of a 16-bit tensor otherwise than the rest.
    twin = Twin(*VARIANTS[variant], dtype=dtype, cuts=LINE_CUTS)
    for _ in range(4):
        twin.step()
        twin.check()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_restored_chunk_goes_on_alike(variant):
    twin = Twin(*VARIANTS[variant])
    for without in ([0], [2, 3], []):
        twin.step(without)
    restored = []
    for chunk in twin.chunks:
        meta = json.loads(json.dumps({"optimizer": chunk.spec.to_body(), "steps": chunk.steps()}))
        spec = OptimizerSpec.from_body(meta["optimizer"], chunk._values.numel())
        assert spec == chunk.spec
        copy_of_chunk = ChunkOptimizer(chunk._values.clone(), spec)
        for name, slot in chunk.slots().items():
            copy_of_chunk.load_slot(name, slot, meta["steps"])
        assert copy_of_chunk.steps() == chunk.steps()
        assert copy_of_chunk.size_bytes == chunk.size_bytes
        restored.append(copy_of_chunk)
    twin.chunks = restored
    for without in ([], [5], []):
        twin.step(without, send_groups=False)
        twin.check()


def test_momentum_begins_with_the_gradient():
    """torch's buffer is None before the first step with momentum, and dampening does not apply to that step."""
    twin = Twin("SGD", {"lr": 0.1, "dampening": 0.5})
    twin.step()
    twin.check()
    assert [c.size_bytes for c in twin.chunks] == [0] * 5
    for momentum in (0.9, 0.9, 0.0, 0.5):
        for group in twin.optimizer.param_groups:
            group["momentum"] = momentum
        twin.step([0])
        twin.check()
    assert twin.chunks[0].steps() == [0.0]
    assert twin.chunks[1].steps() == [0.0, 1.0, 1.0]
    twin.step()
    twin.check()
    assert twin.chunks[0].steps() == [1.0]

    spec = OptimizerSpec("SGD", tuple(check_groups("SGD", wire_groups(twin.optimizer))), ((0, 2, 0), (2, 3, 0)))
    chunk = ChunkOptimizer(torch.zeros(3), spec)
    assert chunk.steps() == [0.0, 0.0]
    chunk.load_slot("momentum_buffer", torch.tensor([4.0, 4.0, 4.0]), [7.0, 0.0])
    chunk.apply(torch.ones(3))  # 4 * 0.5 + 1 * 0.5, and no buffer: the gradient
    assert chunk.slots()["momentum_buffer"].tolist() == [2.5, 2.5, 1.0]


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("variant", [*VARIANTS, *FUSED])
def test_gradients_may_lie_in_read_only_memory(variant):
    name, options = (VARIANTS | FUSED)[variant]
    parameter = torch.nn.Parameter(torch.randn(300))
    groups = check_groups(name, wire_groups(OPTIMIZERS[name]([parameter], **options)))
    chunk = ChunkOptimizer(parameter.detach(), OptimizerSpec(name, tuple(groups), ((0, 300, 0),)))
    memory = mmap.mmap(-1, 1200, prot=mmap.PROT_READ)  # a write ends the process
    gradient = torch.frombuffer(memory, dtype=torch.float32)
    for _ in range(2):
        chunk.apply(DelayCompensation(0.1, None).correct(gradient, gradient, gradient))
        chunk.apply(gradient)
        assert is_finite(gradient)


def spec(runs=((0, 4, 0),), name="SGD", **changes):
    group = wire_groups(OPTIMIZERS[name]([torch.nn.Parameter(torch.zeros(1))]))[0] | changes
    return {"optimizer": name, "groups": [group], "runs": [list(run) for run in runs]}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("SGD", {"lr": -0.5}, "SGD's group 0.lr: (expected float >= -1e-09, got -0.5"),
        ("SGD", {"lr": math.nan}, "got nan"),
        ("SGD", {"lr": "9" * 60000}, "got '999999"),
        ("SGD", {"nesterov": 1}, "SGD's group 0.nesterov: (expected bool, got 1"),
        ("SGD", {"nesterov": True}, "nesterov needs a momentum and no dampening"),
        ("Adam", {"betas": [0.9, 1.0]}, "Adam's group 0.betas[1]: (expected float < 1.0, got 1.0"),
        ("RMSprop", {"fused": True}, "RMSprop's group 0: Object contains unknown field `fused`"),
    ],
)
def test_bad_hyperparameters_are_refused(name, changes, words):
    with pytest.raises(ProtocolError) as refused:
        OptimizerSpec.from_body(spec(name=name, **changes), 4)
    assert words in str(refused.value)
    assert refused.value.code == ErrorCode.BAD_VALUE
    assert len(str(refused.value)) < 400

    chunk = ChunkOptimizer(torch.zeros(4), OptimizerSpec.from_body(spec(name=name), 4))
    before = copy.deepcopy((chunk._values, chunk.slots(), chunk.steps(), chunk.spec))
    with pytest.raises(ProtocolError):
        chunk.apply(torch.ones(4), groups=spec(name=name, **changes)["groups"])
    assert str((chunk._values, chunk.slots(), chunk.steps(), chunk.spec)) == str(before)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"groups": [{"lr": 0.1}]}, "SGD's group 0: Object missing required field"),
        ({"runs": [[1, 4, 0]]}, "expected run 0 to begin at 0 and end by 4, got [1, 4)"),
        ({"runs": [[0, 2, 0], [3, 4, 0]]}, "expected run 1 to begin at 2 and end by 4, got [3, 4)"),
        ({"runs": [[0, 3, 0]]}, "expected the last to end at 4, got 3"),
        ({"runs": [[0, 4, 1]]}, "expected -1 <= group < 1, got 1"),
    ],
)
def test_bad_bodies_are_refused(changes, words):
    with pytest.raises(ProtocolError) as refused:
        OptimizerSpec.from_body(spec() | changes, 4)
    assert words in str(refused.value)
    assert refused.value.code == ErrorCode.BAD_VALUE


def refuses(words):
    return pytest.raises(ProtocolError, match=words)


def test_what_a_chunk_refuses():
    body = spec(((0, 2, 0), (2, 3, -1), (3, 4, 0)), momentum=0.9)
    chunk = ChunkOptimizer(torch.zeros(4), OptimizerSpec.from_body(body, 4))
    with refuses(r"expected 1, got 2\)"):
        chunk.apply(torch.ones(4), groups=body["groups"] * 2)
    for cut in ((0, 1), (1, 2), (1, 4)):
        with refuses(r"absent ranges of whole runs, got one that cuts \[0, 2\)"):
            chunk.apply(torch.ones(4), absent=[cut])
    with refuses(r"expected one of momentum_buffer, got 'exp_avg'"):
        chunk.load_slot("exp_avg", torch.zeros(4), [1.0, 0.0, 1.0])
    with refuses(r"expected 3 numbers, got 2"):
        chunk.load_slot("momentum_buffer", torch.zeros(4), [1.0, 0.0])
    for bad in (-1.0, math.nan):
        with refuses(r"expected 0 <= steps < 2\*\*53, got"):
            chunk.load_slot("momentum_buffer", torch.zeros(4), [1.0, 0.0, bad])
    assert chunk._values.tolist() == [0.0] * 4
    assert chunk.steps() == [0.0] * 3
    chunk.apply(torch.ones(4), absent=[(2, 4), (2, 3), (1, 1)])
    assert chunk.steps() == [1.0, 0.0, 0.0]
    rate = chunk.spec.groups[0]["lr"]
    assert torch.equal(chunk._values, torch.tensor([-rate, -rate, 0.0, 0.0]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_tables_are_torchs(name):
    """A torch with another hyperparameter, or other state, shows here."""
    parameters = inspect.signature(OPTIMIZERS[name]).parameters
    expected = set(parameters) - IMPLEMENTATION_CHOICES
    if name == "AdamW":
        expected.add("decoupled_weight_decay")  # in its groups
    assert {*hyperparameters.GROUPS[name].__struct_fields__} - {"fused"} == expected
    parameter = torch.nn.Parameter(torch.zeros(3))
    switches = {switch: 0.5 if switch == "momentum" else True for switch in SLOTS[name].values() if switch}
    optimizer = OPTIMIZERS[name]([parameter], **switches)
    assert set(optimizer.param_groups[0]) - IMPLEMENTATION_CHOICES == expected
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert set(optimizer.state[parameter]) - {"step"} == set(SLOTS[name])
    assert slot_names(name, wire_groups(optimizer)) == tuple(SLOTS[name])
    plain = wire_groups(OPTIMIZERS[name]([parameter]))
    assert slot_names(name, plain) == tuple(slot for slot, switch in SLOTS[name].items() if not switch)


def test_wire_groups_reads_what_torch_accepts():
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizer = torch.optim.Adam(
        [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 1, "note": object()}],
        lr=torch.tensor(0.5, requires_grad=True),
        betas=(torch.tensor(0.5), torch.tensor(0.25)),
        eps=np.float32(0.5),
        fused=True,
    )
    optimizer.param_groups[0]["initial_lr"] = 0.5  # as schedulers do
    groups = wire_groups(optimizer)
    assert [group["lr"] for group in groups] == [0.5, 1.0]
    assert set(groups[0]) == {*hyperparameters.GROUPS["Adam"].__struct_fields__}
    assert (groups[0]["betas"], groups[0]["eps"]) == ([0.5, 0.25], 0.5)
    assert json.loads(json.dumps(groups)) == groups == check_groups("Adam", groups)

    adagrad = torch.optim.Adagrad(
        [{"params": parameters, "initial_accumulator_value": 9.0}], initial_accumulator_value=0.25
    )
    assert adagrad.state[parameters[0]]["sum"].tolist() == [0.25] * 3
    assert wire_groups(adagrad)[0]["initial_accumulator_value"] == 0.25
