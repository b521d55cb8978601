"""`recalibrate`: batch-norm statistics re-estimated, for a network whose neurons were removed without training it again."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hgnp.curvature.autodiff.forward import run
from hgnp.curvature.autodiff.operations import tensors_in
from hgnp.errors import InputError, InputTypeError, brief, is_too_few_values
from hgnp.state_guards import module_that_raised, preserve_generators, preserve_modes
from hgnp.validation import check_module, check_values


def recalibrate(net: nn.Module, batches: Iterable[Any]) -> None:
    """Re-estimate the running mean and variance of every batch norm on `batches`, e.g. after a one-shot removal.

    Removed neurons change what the layers after them see, so the statistics from training no longer fit. They become the mean
    and the (unbiased) variance of all values that a batch norm sees over `batches`, so a small last batch counts by its
    samples. In the pass each batch is normalised by its own statistics, as in training.

    >>> import torch, hgnp
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> hgnp.recalibrate(net, [(torch.randn(16, 4), torch.arange(16) % 2)])
    >>> net[1].num_batches_tracked
    tensor(1)

    Args:
        net: The network, on the device of the batches. A network without batch norms is left as it is.
        batches: Inputs without a target, or (inputs, target) pairs, where inputs are a tensor, a tuple (positional) or a dict
            (keywords); or dicts with `labels`. A target is not used. 10 to 100 batches of the training size are enough.

    The batch norms run in training mode, everything else in evaluation mode, so dropout is off. Modes, momenta, gradients and
    random state are restored. A batch norm without running statistics, or that no batch reaches, is left as it is; if anything
    fails, all of them are.
    """
    check_module(net)
    check_values(net)
    if not isinstance(batches, Iterable) or isinstance(batches, Tensor | Mapping):
        raise InputTypeError(f"batches must be a list of batches or a loader, got {type(batches).__name__}; use [x]")
    norms = {
        name: norm
        for name, norm in net.named_modules()
        if isinstance(norm, _BatchNorm) and norm.running_mean is not None and norm.running_var is not None
    }
    if not norms:
        return
    settings = {name: (norm.momentum, norm.track_running_stats) for name, norm in norms.items()}
    before = {name: {key: value.clone() for key, value in _statistics(norm).items()} for name, norm in norms.items()}
    pooled = {name: _Pooled() for name in norms}
    hooks = [norm.register_forward_hook(pooled[name].add) for name, norm in norms.items()]
    try:
        with preserve_modes(net), preserve_generators(net), torch.no_grad():
            net.eval()
            # evaluation reads the statistics also where track_running_stats was set to False
            for norm in norms.values():
                norm.training = True  # not norm.train(): some have a dropout inside
                norm.momentum, norm.track_running_stats = 1.0, True  # the statistics are those of the last batch alone
                for key, value in _statistics(norm).items():  # not reset_running_stats(): a statistic may be None
                    value.fill_(key == "running_var")
            _run_all(net, batches)
            for name, norm in norms.items():
                if not pooled[name].count:
                    if norm.num_batches_tracked:
                        raise InputError(
                            f"net must call {name} as a module, got a call of its forward; call the module"
                        )
                    _restore(norm, before[name])
                    continue
                pooled[name].write(norm)
                if not all(bool(value.isfinite().all()) for value in _statistics(norm).values()):
                    raise InputError(f"batches must give {name or 'net'} finite statistics, got some that are not")
    except BaseException:
        for name, norm in norms.items():
            _restore(norm, before[name])
        raise
    finally:
        for name, norm in norms.items():
            norm.momentum, norm.track_running_stats = settings[name]
        for hook in hooks:
            hook.remove()


class _Pooled:
    """Mean and variance of all values of a batch norm's inputs, from the statistics that it has after each batch."""

    def __init__(self) -> None:
        self.count = 0
        """Values per channel so far."""
        self._mean: Tensor | float = 0.0
        self._squares: Tensor | float = 0.0
        """Sum of the squared deviations from the mean."""

    def add(self, norm: _BatchNorm, _: Any, output: Tensor) -> None:
        """A forward hook: adds the batch."""
        assert norm.running_mean is not None
        assert norm.running_var is not None
        n = output.numel() // norm.num_features
        difference, total = norm.running_mean.double() - self._mean, self.count + n  # half precision overflows
        self._mean = self._mean + difference * (n / total)
        self._squares = self._squares + norm.running_var.double() * (n - 1) + difference**2 * (self.count * n / total)
        self.count = total

    def write(self, norm: _BatchNorm) -> None:
        norm.running_mean.copy_(self._mean)  # type: ignore[union-attr, arg-type]
        norm.running_var.copy_(self._squares / (self.count - 1))  # type: ignore[union-attr, arg-type]


def _statistics(norm: _BatchNorm) -> dict[str, Tensor]:
    found = {key: getattr(norm, key) for key in ("running_mean", "running_var", "num_batches_tracked")}
    return {key: value for key, value in found.items() if value is not None}


def _restore(norm: _BatchNorm, before: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for key, value in _statistics(norm).items():
            value.copy_(before[key])


def _run_all(net: nn.Module, batches: Iterable[Any]) -> None:
    count = 0
    for count, inputs in enumerate(_inputs(batches), 1):
        try:
            run(net, inputs)
        except Exception as error:
            if is_too_few_values(error):
                raise InputError(
                    f"batches must have at least two samples for a batch norm, got a single one in batch {count - 1}"
                ) from error
            layer = module_that_raised(net, error)
            raise InputError(
                f"net must take batch {count - 1} of batches, but its forward failed{f' in {layer}' if layer else ''}: "
                f"{brief(error)}"
            ) from error
    if not count:
        raise InputError("batches must have at least one batch, got none")


def _inputs(batches: Iterable[Any]) -> Iterator[Any]:
    for batch in batches:
        inputs = batch
        if isinstance(batch, Mapping):
            inputs = {key: value for key, value in batch.items() if key != "labels"}
        elif isinstance(batch, tuple | list) and len(batch) == 2:
            inputs = batch[0]
        elif not isinstance(batch, Tensor):
            raise InputError(
                f"batches must be inputs, (inputs, target) pairs or dicts, got a {type(batch).__name__}; use [(x, y)]"
            )
        if next(tensors_in(inputs), None) is None:
            raise InputError("batches must hold tensors, got a batch without any")
        yield inputs
