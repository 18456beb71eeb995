"""Compares replicas that must be equal, while they train, and names where, who, since when and why they are not.

The first forward after an exchange compares digests of all parameters' bits, at steps 1, 2, 4, ..., 512 and then at
every multiple of 1,000::

    step 4      digests equal                                  the last step known to be equal: 4
    step 8      digests differ ── suspicion
    step 9      digests differ again ── accounts of all replicas ── verdict

An account has a digest, the norm and a random projection of each parameter, but no values; and what its rank knows of
its machine and its optimizers. Megatron-LM compares hashes where it is asked to (--check-weight-hash-across-dp-replicas
-interval); as there, a digest is not part of the gradients' exchange, whose bits stay native DDP's.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from psengine.errors import ReplicasDivergedError

logger = logging.getLogger(__name__)

CHOICES = ("warn", "error", "off")
LAST_DENSE_STEP = 512
EVERY = 1000
# Unlike processors may round each step of each parameter by a few units in the last place, never by so much of a norm.
ROUNDINGS_PER_STEP = 4
MOST_ROUNDED = 0.01

_ROW_WORDS = 1024
_SMALL_NUMEL = 64 * 1024
_ODD = 0x9E3779B97F4A7C15 - 2**64
_TEXT_BYTES = 4096
_ACCOUNT_COLUMNS = 4

# Gives every replica's tensor, of this one's, by replica.
Share = Callable[[torch.Tensor], Mapping[int, torch.Tensor]]


def is_due(step: int, period: int = 1) -> bool:
    """Whether replicas are compared after ``step``, where they are equal after each ``period``-th step only.

    It depends on nothing else, so a worker that joins late knows as well.
    """
    if step < 1:
        return False
    dense = min(LAST_DENSE_STEP, 1 << (step.bit_length() - 1))
    return max(dense, step // EVERY * EVERY) > step - period


# ---- digests ---------------------------------------------------------------------------------------------------------


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """128 bits of ``tensor``'s bits: int64, of shape (2,), on its device.

    Its memory is seen as rows of 1,024 words; one half is of the rows' sums, the other of the columns'. Sums are mixed,
    so that flips of signs do not cancel each other.
    """
    flat = tensor.detach().contiguous().view(-1)
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    whole = flat.nbytes // (8 * _ROW_WORDS) * (8 * _ROW_WORDS) // flat.itemsize
    rest = flat.new_zeros(8 * _ROW_WORDS // flat.itemsize)
    rest[: flat.numel() - whole] = flat[whole:]
    last = rest.view(torch.int64).view(1, -1)
    if whole == 0:
        return torch.stack([_mixed(last.sum(1)), _mixed(last[0])])
    rows = flat[:whole]
    if rows.storage_offset() * rows.itemsize % 8:
        rows = rows.clone()
    rows = rows.view(torch.int64).view(-1, _ROW_WORDS)
    return torch.stack([_mixed(torch.cat([rows.sum(1), last.sum(1)])), _mixed(rows.sum(0).add_(last[0]))])


def _mixed(sums: torch.Tensor) -> torch.Tensor:
    """One word of these, which depends on their order."""
    places = torch.arange(1, sums.numel() + 1, device=sums.device)
    mixed = (sums ^ (places * _ODD)) * _ODD
    return ((mixed ^ (mixed >> 29)) * (2 * places + _ODD)).sum()


def total_digest(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """``digest`` of all of ``tensors``; small ones of one kind are put together, because each costs some operations."""
    large, small = [], dict[tuple[torch.dtype, torch.device], list[torch.Tensor]]()
    for tensor in tensors:
        if tensor.numel() > _SMALL_NUMEL:
            large.append(tensor)
        else:
            small.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach().reshape(-1))
    parts = [digest(tensor) for tensor in [*large, *map(torch.cat, small.values())]]
    device = parts[0].device
    table = torch.stack([part.to(device) for part in parts])
    return torch.stack([_mixed(table[:, 0].contiguous()), _mixed(table[:, 1].contiguous())])


# ---- accounts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Account:
    """What one replica says of itself.

    Attributes:
        digests: by parameter.
        norms: by parameter.
        projections: by parameter, the sum of its values with random signs; between two replicas they differ by about
            the distance of their values.
        facts: of the machine, the optimizers and what was done to the model, by name.
    """

    digests: list[tuple[int, int]]
    norms: list[float]
    projections: list[float]
    facts: dict[str, str]

    @classmethod
    def read(cls, table: torch.Tensor, parameter_count: int) -> Account:
        """Read what ``write_account`` wrote."""
        rows = table.cpu()
        numbers = rows[:parameter_count, 2:].contiguous().view(torch.float64).tolist()
        text = rows[parameter_count:].contiguous().view(torch.uint8).numpy().tobytes().rstrip(b"\0")
        lines = text.decode(errors="replace").splitlines()
        return cls(
            digests=[(first, second) for first, second, *_ in rows[:parameter_count].tolist()],
            norms=[norm for norm, _ in numbers],
            projections=[projection for _, projection in numbers],
            facts=dict(line.partition("=")[::2] for line in lines),
        )


def write_account(tensors: Sequence[torch.Tensor], facts: Mapping[str, str], *, measures: bool = True) -> torch.Tensor:
    """An account as a tensor of int64, whose shape depends on the number of parameters alone; on the CPU.

    Args:
        tensors: the parameters.
        facts: see ``Account``; cut to what 4 KiB hold.
        measures: whether to have norms and projections, which take ten times as long; else NaN.
    """
    rows = []
    unknown = torch.full((2,), math.nan, dtype=torch.float64).view(torch.int64)
    for index, tensor in enumerate(tensors):
        if not measures:
            rows.append(torch.cat([digest(tensor).cpu(), unknown]))
            continue
        values = tensor.detach().reshape(-1)
        values = torch.view_as_real(values).reshape(-1) if values.is_complex() else values
        generator = torch.Generator().manual_seed(index)
        signs = torch.randint(0, 2, (values.numel(),), generator=generator, dtype=torch.int8).mul_(2).sub_(1)
        doubles = values.to("cpu", torch.float64)
        numbers = torch.stack([doubles.norm(), (doubles * signs).sum()])
        rows.append(torch.cat([digest(tensor).cpu(), numbers.view(torch.int64)]))
    text = "\n".join(f"{name}={value}" for name, value in facts.items()).encode()[:_TEXT_BYTES]
    words = struct.unpack(f"<{_TEXT_BYTES // 8}q", text.ljust(_TEXT_BYTES, b"\0"))
    return torch.cat([*rows, torch.tensor(words)]).view(-1, _ACCOUNT_COLUMNS)


def account_rows(parameter_count: int) -> int:
    """How many rows, of four words, an account has."""
    return parameter_count + _TEXT_BYTES // (8 * _ACCOUNT_COLUMNS)


# ---- the watch -------------------------------------------------------------------------------------------------------


@dataclass
class ReplicaWatch:
    """Compares one replica with the others; every replica asks at the same steps.

    Args:
        parameters: of this replica, by name; empty: nothing is compared.
        choice: one of ``CHOICES``: what a verdict does.
        facts: returns what this replica knows of itself, by name; "machine" among it.

    Attributes:
        equal_step: the last step after which all replicas were equal, as far as it is known; None: none yet.
        verdict: what was found, in words; None: nothing.
        first_step: the steps before those that ``asks`` is told of, under another strategy or in another group.
    """

    parameters: Mapping[str, torch.Tensor]
    choice: str
    facts: Callable[[], Mapping[str, str]]
    equal_step: int | None = None
    verdict: str | None = None
    first_step: int = 0
    _begun: int = 0
    _seen: int = 0
    _is_suspicious: bool = False

    def begin(self, step: int) -> None:
        """The others are others from ``step`` on: the schedule begins again."""
        self._begun = self._seen = step
        self._is_suspicious = False

    def asks(self, step: int, period: int = 1, *, in_pairs: bool = False) -> bool:
        """Whether replicas are to be compared after ``step``; asked once for each step, or again for the last one.

        Args:
            step: as all replicas count.
            period: see ``is_due``.
            in_pairs: also after the step that follows, because replicas do not know of each other's suspicions.
        """
        is_settled = self.verdict is not None and not in_pairs  # all know of a verdict where all compare
        if step == self._seen or self.choice == "off" or is_settled or not self.parameters:
            return False
        self._seen = step
        steps = step - self._begun
        return is_due(steps, period) or (is_due(steps - 1) if in_pairs else self._is_suspicious)

    @torch.no_grad()
    def compare(self, step: int, own: int, share: Share, *, is_urgent: bool = False) -> None:
        """Compare replicas after ``step``; every replica does.

        Args:
            step: as all replicas count.
            own: this replica's number.
            share: exchanges tensors.
            is_urgent: the first difference is enough for a verdict.

        Raises:
            ReplicasDivergedError: they differ, for the second time, and ``choice`` is "error".
        """
        tensors = list(self.parameters.values())
        digests = {tuple(found.tolist()) for found in share(total_digest(tensors)).values()}
        was_suspicious, self._is_suspicious = self._is_suspicious or is_urgent, len(digests) > 1
        if len(digests) == 1:
            self.equal_step = self.first_step + step
        elif was_suspicious:
            self._is_suspicious = False
            self.judge(step, own, share(write_account(tensors, self.facts()).to(tensors[0].device)))

    def weigh(self, step: int, own: int, accounts: Mapping[int, torch.Tensor]) -> None:
        """Judge by accounts that were exchanged after ``step``, once they differ for the second time.

        Raises:
            ReplicasDivergedError: see ``compare``.
        """
        tables = [account[: len(self.parameters), :2] for account in accounts.values()]
        differs = any(not torch.equal(table, tables[0]) for table in tables)
        if self.verdict is None and (self._is_suspicious or not differs):
            self.judge(step, own, accounts)
        self._is_suspicious = differs

    def judge(self, step: int, own: int, accounts: Mapping[int, torch.Tensor]) -> None:
        """Say what differs between replicas, by their accounts.

        Raises:
            ReplicasDivergedError: see ``compare``.
        """
        step, names = self.first_step + step, list(self.parameters)
        found = {number: Account.read(table, len(names)) for number, table in accounts.items()}
        reference, *_ = found
        expected = found[reference]
        differing = {
            number: [i for i, one in enumerate(account.digests) if one != expected.digests[i]]
            for number, account in found.items()
        }
        others = {number: indices for number, indices in differing.items() if indices}
        if not others:
            self.equal_step = step
            return
        first = min(indices[0] for indices in others.values())
        there = [number for number, indices in others.items() if first in indices]
        distance = max(abs(found[n].projections[first] - expected.projections[first]) for n in there)
        machines = {found[number].facts.get("machine", "") for number in (reference, *others)}
        parameter = self.parameters[names[first]]
        relative = distance / max(expected.norms[first], math.ulp(0.0))
        distance_text = "" if math.isnan(distance) else f" by about {distance:.2g}, {relative:.2g} of its norm"
        since = "never" if self.equal_step is None else f"after step {self.equal_step}"
        who, parameters = ", ".join(map(str, there)), max(map(len, others.values()))
        self.verdict = (
            f"replicas must be equal after step {step}, and differ: parameter {names[first]!r} (shape"
            f" {tuple(parameter.shape)}) of worker {who} is not worker {reference}'s{distance_text}; {parameters} of"
            f" {len(names)} parameters differ. Known to be equal: {since}. Cause:"
            f" {_cause(found, reference, list(others))}."
        )
        if len(machines) > 1 and self._is_rounding(step, expected, {n: found[n] for n in others}):
            logger.warning(
                "worker %d: %s They are within what unlike machines may round (%s)",
                *(own, self.verdict, "; ".join(sorted(machines))),
            )
            return
        if self.choice == "error":
            raise ReplicasDivergedError(self.verdict, workers=tuple(there), parameter=names[first])
        logger.warning("worker %d: %s check_replicas='error' raises this instead.", own, self.verdict)

    def _is_rounding(self, step: int, expected: Account, others: Mapping[int, Account]) -> bool:
        """Whether all parameters are as near to each other as other roundings leave them."""
        for account in others.values():
            for index, parameter in enumerate(self.parameters.values()):
                distance = abs(account.projections[index] - expected.projections[index])
                share = ROUNDINGS_PER_STEP * torch.finfo(parameter.dtype).eps * step
                if not distance <= min(share, MOST_ROUNDED) * expected.norms[index]:
                    return False
        return True


def _cause(accounts: Mapping[int, Account], reference: int, others: Sequence[int]) -> str:
    """What the replicas' facts differ in, in words."""
    expected = accounts[reference].facts
    for number in others:
        facts = accounts[number].facts
        names = dict.fromkeys([*expected, *facts])
        names.pop("worker", None)
        for name in sorted(names, key="machine".__eq__):  # it comes last
            mine, theirs = expected.get(name, "none"), facts.get(name, "none")
            if mine != theirs:
                return f"{name} is {theirs} on worker {number}, and {mine} on worker {reference}"
    return (
        "not found; optimizers and machines are alike, so parameters were probably changed outside of optimizer.step()"
        f" on worker {', '.join(map(str, others))}, or gradients between the exchange and the step"
    )
