"""Checkpoints: state_dicts of the plain network, written whole and checked when read."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from rank_errors import UserError
from torch import nn

LISTED_MISMATCHES = 3


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


def first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]
