"""Hugging Face's `config`: kept in agreement with the widths of a pruned network where it can state them.

A config has one number for all layers. It can state the widths if every layer has lost as much as the others: then a network
that is built from the changed config has the shapes of the pruned one, and `save_pretrained` and `from_pretrained` restore it.
"""

import copy
import warnings
from typing import Any

import torch
from torch import nn

from hgnp.pruning.graph import tensors_of

WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "hidden_dim", "d_ff")
HEADS = ("num_attention_heads", "num_key_value_heads")


def update_config(net: nn.Module) -> bool:
    """Changes the config of a pruned network to its widths. False if it has one that cannot state them, which then stays."""
    config = getattr(net, "config", None)
    if not hasattr(config, "to_dict") or not hasattr(net, "save_pretrained"):
        return True
    try:
        changes = _changes(net, config)
        changed = copy.deepcopy(config)
        vars(changed).update(changes)
        agrees = _shapes(net, changed) == _shapes(net)
    except Exception:  # any code may run when a network is built: a config that it refuses states nothing
        return False
    if agrees:
        vars(config).update(changes)
    return agrees


def _shapes(net: nn.Module, config: Any = None) -> dict[str, torch.Size]:
    """The shapes of the network's tensors, or of those of one that is built from a config."""
    if config is not None:
        quiet = warnings.catch_warnings(action="ignore")
        with torch.device("meta"), torch.random.fork_rng(devices=[]), quiet:
            net = type(net)(config)
    return {name: tensor.shape for name, tensor in tensors_of(net).items()}


def _changes(net: nn.Module, config: Any) -> dict[str, int]:
    """Numbers of the config that differ from the network's shapes, with the value that explains one of these shapes."""
    stated, actual = _shapes(net, config), _shapes(net)
    pairs = {was: now for name in stated for was, now in zip(stated[name], actual[name], strict=True) if was != now}
    widths = {key: getattr(config, key) for key in WIDTHS if hasattr(config, key)}
    if None in widths.values():  # GPT-2 and similar models: four times the hidden size
        widths = {key: 4 * config.hidden_size if value is None else value for key, value in widths.items()}
    changes = {key: pairs[value] for key, value in widths.items() if value in pairs}
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for key in HEADS:
        count = getattr(config, key, None)
        if isinstance(count, int) and count * size in pairs:
            changes |= {key: pairs[count * size] // size, "head_dim": size}
    return changes
