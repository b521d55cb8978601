"""Equation 6: how much the loss, with its flatness penalty, changes when a neuron's output is attenuated.

With a gate γ_j on the output of neuron j (`neurons.gates`: after norm and activation, shared by channels that are removed
together) and L = C + μ·max(0, q − B) the mean over N samples,

    δ_i^j = N·∂L/∂γ_i^j at γ = 1,     score_j = mean_i |δ_i^j|,     then divided by the L2 norm over its layer.

One backward pass gives δ for all neurons and samples: the gates are (N, neurons) numbers, and autograd does the sums over
positions and over the primal and tangent activations. It is taken in evaluation mode, where samples do not mix.

Several batches count as one, with a penalty each: with W_b the normaliser of the mean loss of batch b (`curvature/losses.py`),
L = Σ_b W_b·L_b / Σ_b W_b, so that score_j = Σ_b W_b·Σ_i |∂L_b/∂γ_i^j| / Σ_b W_b.
"""

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hgnp.curvature.autodiff.forward import Output, derivatives_explained, run, sample_entries, samples_in
from hgnp.curvature.autodiff.operations import map_tensors, tensors_in
from hgnp.curvature.autodiff.rng import RandomState
from hgnp.curvature.batch_checks import failure_explained
from hgnp.curvature.device import capturing
from hgnp.curvature.factors import Block, WholeNetwork
from hgnp.curvature.losses import Loss, loss_curvature, weighted
from hgnp.curvature.network_direction import AnyDirection
from hgnp.curvature.step import State, Step, check_differentiable, make_step
from hgnp.curvature.validation import check_mu
from hgnp.errors import InputError, InputTypeError, refuse_renamed
from hgnp.execution.graphs import CaptureContext, GraphedFunction
from hgnp.execution.process_group import ranks_of
from hgnp.flatness import Flatness, step_and_state
from hgnp.pruning import Neurons, Scores
from hgnp.pruning.gated_forward import SampleDimensionError
from hgnp.pruning.gates import Gates, gated
from hgnp.pruning.importance import WEIGHT_SCORES
from hgnp.pruning.selection import CouplingMode, check_coupling
from hgnp.pruning.validation import as_inputs
from hgnp.reducer import Reducer, average_statistics
from hgnp.state_guards import evaluating

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Criterion = Literal["taylor", "taylor_sum", "l1", "l2", "bn_scale", "geometric_median", "random"]
CRITERIA: tuple[str, ...] = get_args(Criterion)


@refuse_renamed
def sensitivity(
    net: nn.Module,
    neurons: Neurons,
    batches: Iterable[tuple[Any, Any]],
    *,
    loss: Loss = F.cross_entropy,
    flatness: Flatness | None = None,
    criterion: Criterion = "taylor",
    output: Output | None = None,
    mu: float | None = None,
    coupling: CouplingMode = "coupled",
    group: "ProcessGroup | None" = None,
) -> Scores:
    """Importance scores: how much the loss changes when a neuron's output is attenuated (equation 6).

    A gate γ_j = 1 multiplies the output of neuron j wherever it is read. δ_i is the derivative of the loss of sample i with
    respect to it.

    >>> import torch, hgnp
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    >>> x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
    >>> neurons, flat = hgnp.Neurons(net, x[:2]), hgnp.Flatness(net, mu=1e-3, bound=0.5)
    >>> scores = hgnp.sensitivity(net, neurons, [(x, y)], flatness=flat)
    >>> {layer: tuple(values.shape) for layer, values in scores.items()}
    {'0': (3,)}
    >>> neurons.remove(neurons.least(scores, 1))
    Selection(1 neurons; 0: 1)

    Args:
        net: The network, on the device of the batches.
        neurons: `Neurons` of the same network.
        batches: (inputs, target) pairs. The scores are those of all their samples as one batch: batches are weighted by the
            normaliser of one of PyTorch's losses (the number of labels that are not ignored, or the sum of their class
            weights), or by their samples for any other loss. Each batch has its own penalty.
        loss: Any loss(output, target) that is a mean. With `flatness`, its loss is used instead.
        flatness: Scores L = C + μ·max(0, q − B), with its loss and output. None scores C alone.
        criterion: "taylor" is the mean of `|δ|` over samples, "taylor_sum" `|mean of δ|`; "l1", "l2", "bn_scale",
            "geometric_median" and "random" depend on weights alone.
        output: Picks the logits from what the network returns. With `flatness`, its output is used instead.
        mu: μ in the scores, with `flatness` only. None: that of `flatness`.
        coupling: "coupled", or "paper", which gives each of the layers that are added together separate gates.
        group: The process group of data-parallel training, whose ranks have different batches: the scores are means over the
            samples of all. With `flatness`, its group is used instead. Running statistics of norms are averaged over the ranks.

    Returns:
        Layer name → scores of its remaining neurons, shape (neurons,), divided by the layer's L2 norm; low for those that
        matter little. A layer is missing if it is read where no gate can be placed; `Neurons.least` then leaves it alone.

    The network's mode, buffers, gradients and random state are restored.
    """
    for name, value, kind in (("neurons", neurons, Neurons), ("flatness", flatness, Flatness)):
        if not isinstance(value, kind) and not (name == "flatness" and value is None):
            raise InputTypeError(f"{name} must be a hgnp.{kind.__name__} of net, got {type(value).__name__}")
        if value is not None and value.net is not net:
            raise InputError(f"{name} must be of the same network as net, got one of another")
    check_coupling(coupling)
    if mu is not None:
        check_mu(mu)
        if flatness is None:
            raise InputError("flatness must be given with mu, got None; use flatness=hgnp.Flatness(net, …), or omit mu")
        mu = float(mu)
    if criterion not in CRITERIA:
        raise InputError(f"criterion must be one of {', '.join(map(repr, CRITERIA))}, got {criterion!r}")
    if flatness is not None and group is not None:
        raise InputError("group must be None with flatness, whose own group is used, got both; omit group")
    if flatness is not None and loss not in (F.cross_entropy, step_and_state(flatness)[0].loss):
        raise InputError(f"loss must be that of flatness, which is used, got {loss!r}; omit loss")
    if flatness is None:
        step, state = make_step(net, loss=loss, mu=0.0, output=output, reducer=ranks_of(group, net))
    else:
        step, state = step_and_state(flatness)
    return compute_scores(neurons, batches, step, state, criterion=criterion, mu=mu, coupling=coupling)


def compute_scores(
    neurons: Neurons,
    batches: Iterable[tuple[Any, Any]],
    step: Step,
    state: State,
    *,
    criterion: Criterion,
    mu: float | None,
    coupling: CouplingMode,
    graphs: bool = True,
    loss_needs_training_mode: bool | None = None,
    check: "SampleCheck | None" = None,
) -> Scores:
    """`sensitivity` with validated arguments. With `graphs`, batches on a GPU come from CUDA graphs where they can.
    `loss_needs_training_mode`: whether the network returns what the loss takes in training mode only; None: find out.
    `check`: what earlier calls found out about the same network, perhaps with more neurons."""
    reducer, net = step.reducer, neurons.net
    average_statistics(reducer, net)
    if criterion in WEIGHT_SCORES:
        return _from_rank_zero(reducer, normalised(WEIGHT_SCORES[criterion](neurons)))
    with RandomState(*net.parameters()):  # before the first batch: a loader draws numbers too
        if loss_needs_training_mode is None:
            batches, loss_needs_training_mode = _detect_training_mode_loss(step, batches)
        gates = neurons.gates(coupling, loss_needs_training_mode=loss_needs_training_mode)
        # a graph holds no sums over ranks
        capture = make_capture(net) if graphs and not loss_needs_training_mode and reducer.ranks == 1 else None
        with evaluating(net, loss_needs_training_mode=loss_needs_training_mode), torch.enable_grad():
            raw = _means(
                step, state, gates, batches, mu, signed=criterion == "taylor_sum", capture=capture,
                check=check or SampleCheck(),
            )  # fmt: skip
    has_gate = {layer: (indices < gates.count) for layer, indices in gates.layer_units.items()}
    free = normalised(
        {layer: raw[indices[has_gate[layer]].to(raw.device)] for layer, indices in gates.layer_units.items()}
    )
    scores = {}
    for layer, values in free.items():  # those that stay have no gate: they are not counted, and are never chosen
        scores[layer] = values.max().repeat(len(has_gate[layer]))
        scores[layer][has_gate[layer].to(raw.device)] = values
    return _from_rank_zero(reducer, scores)


@dataclasses.dataclass
class SampleCheck:
    """What one batch of at least two samples tells of a network's forward pass. It takes longer than the scores themselves. No
    removal makes samples mix, but training or a callback may, so that later rounds confirm it by two samples."""

    independent: bool | None = None
    """Whether closing a sample's gates changes that sample alone; None: not known yet."""
    draws: bool = False
    """Whether it draws random numbers in evaluation mode."""


class NotFiniteError(InputError):
    """Scores that are not finite."""


def _from_rank_zero(reducer: Reducer, scores: Scores) -> Scores:
    """Rank 0's scores, so that every rank selects the same neurons: random ones too, and to the last digit."""
    if reducer.ranks == 1:
        return scores
    return dict(zip(scores, reducer.from_rank_zero(list(scores.values())), strict=True))


def loss_in_training_only(net: nn.Module, loss: Loss, output: Output | None, inputs: Any, target: Any) -> bool:
    """Whether the network returns what the loss takes in training mode only, as torchvision's detectors do."""
    if loss_curvature(loss) is not None:
        return False
    for loss_needs_training_mode in (False, True):
        buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
        with (
            evaluating(net, loss_needs_training_mode=loss_needs_training_mode),
            torch.no_grad(),
            RandomState(*net.parameters()),
        ):
            try:
                value = loss(run(net, inputs, output=output, buffers=buffers), target)
            except Exception:  # whatever the network's code or the loss raises
                continue
        if isinstance(value, Tensor) and value.numel() == 1:
            return loss_needs_training_mode
    return False


def _detect_training_mode_loss(step: Step, batches: Iterable[Any]) -> tuple[Iterable[Any], bool]:
    """The batches, and whether the loss exists in training mode only, which the first of them tells."""
    pairs = _pairs(batches)
    first = next(pairs, None)
    if first is None:
        return (), False
    loss_needs_training_mode = loss_in_training_only(step.net, step.loss, step.output, *first[:2])
    return itertools.chain([first[:2]], (pair[:2] for pair in pairs)), loss_needs_training_mode


def normalised(scores: Scores) -> Scores:
    """Each layer's scores divided by their L2 norm."""
    return {layer: values / values.norm().clamp_min(torch.finfo(values.dtype).tiny) for layer, values in scores.items()}


def _means(
    step: Step,
    state: State,
    gates: Gates,
    batches: Iterable[tuple[Any, Any]],
    mu: float | None,
    *,
    signed: bool,
    capture: CaptureContext | None,
    check: SampleCheck,
) -> Tensor:
    """mean_i |δ_i|, or |mean_i δ_i|, of every unit."""
    pairs = _pairs(batches)
    inputs, target, x = next(pairs, (None, None, None))
    if x is None:
        raise InputError("batches must have at least one (inputs, target) pair, got none")
    state = dataclasses.replace(state)  # n and w of the batches that are scored
    step.share(state, inputs, target)
    gates = gates.to(x.device)
    settled = check.independent is False  # the score of a batch is right where they do not mix, too

    def samples_come_first(inputs: Any, x: Tensor) -> bool:
        """As `check` knows and two samples confirm, or by a batch of several samples: a single one shows nothing."""
        nonlocal settled
        several = state.most_samples > 1
        if check.independent is not None and (settled or not several):
            return check.independent
        settled, random = several, RandomState(*step.net.parameters())
        found = bool(check.independent) and _samples_come_first(step, gates, inputs, x, few=True)
        found = found or _samples_come_first(step, gates, inputs, x)
        check.draws = not random.unchanged()
        random.restore()  # a resumed run finds out again, and draws the same afterwards
        check.independent = found if several else None
        return found

    with _explained(step, inputs, target):
        per_sample = samples_come_first(inputs, x)
    mu = state.mu if mu is None else mu
    if check.draws or (mu and step.choices.fisher_type == "mc"):
        capture = None  # a graph would draw the same at every replay

    def work(block: Block | WholeNetwork | None, batch: Any) -> Tensor:
        return _sum(step, state, gates, mu, signed, per_sample, block, batch)

    sums = _Sums(work, partial(step.direction_of, state) if mu else None, step.net, capture)
    normalisers: list[Tensor] = []

    def summed(inputs: Any, target: Any, x: Tensor) -> Tensor:
        nonlocal per_sample
        with _explained(step, inputs, target):
            step.share(state, inputs, target)
            if state.most_samples > 1:  # the batches before may have had a single sample
                per_sample = samples_come_first(inputs, x)
            (normaliser,) = step.reducer.sum([step.own_normaliser(inputs, target)])
            normalisers.append(normaliser)
            return weighted(sums(inputs, target), normaliser)

    total = summed(inputs, target, x)
    with contextlib.nullcontext() if capture is None else capture.running():
        for inputs, target, x in pairs:
            total = total + summed(inputs, target, x)
    (total,) = step.reducer.sum([total])
    scores = (total / torch.stack(normalisers).sum()).abs()
    if not bool(torch.isfinite(scores).all()):
        raise NotFiniteError("the loss and its derivative must be finite on batches, got some that are not")
    return scores


def _sum(
    step: Step,
    state: State,
    gates: Gates,
    mu: float,
    signed: bool,
    per_sample: bool,
    block: Block | WholeNetwork | None,
    batch: tuple[Any, Any, dict[str, Tensor]],
) -> Tensor:
    """Σ_i |∂L/∂γ_i|, or Σ_i ∂L/∂γ_i, of every unit over the samples of a batch, along the pair of a block that comes with
    it."""
    inputs, target, pair = batch
    v = None if block is None else state.direction.along(block, pair)
    x = next(tensors_in(inputs))
    gate_values = _open_gates(x, samples_in(inputs) if per_sample else 1, gates)
    objective = gates.run(
        as_inputs(inputs),
        lambda: step.objective(state, inputs, target, mu=mu, direction=v, within=gated(gates, gate_values)),
    )
    if objective.penalty is None or not capturing():
        gradient = _gradient(objective.value(), gate_values)
    else:  # a graph cannot ask the host; masked after the derivative, which may be infinite: 0·∞ is NaN
        gradient = _gradient(objective.loss, gate_values, retain_graph=True)
        penalty = _gradient(objective.penalty, gate_values)
        assert objective.active is not None
        gradient = gradient + torch.where(objective.active, penalty, 0.0)
    if not per_sample:  # of the batch as a whole, whose absolute value is each rank's equal part of the sum over ranks
        gradient = step.reducer.sum([gradient])[0] / step.reducer.ranks
    return (gradient if signed else gradient.abs()).sum(0)


class _Sums:
    """Calls `work` (`_sum` above) for each batch. With `capture`, batches of a known shape are replayed from CUDA graphs: with
    the flatness penalty one graph finds v, and one per block that v was in does the rest."""

    def __init__(
        self,
        work: Callable[[Block | WholeNetwork | None, Any], Tensor],
        direction_of: Callable[[Any, Any], AnyDirection] | None,
        net: nn.Module,
        capture: CaptureContext | None,
    ) -> None:
        self._work, self._net, self._capture = work, net, capture
        self._direction_of = None if direction_of is None else self._replayed(lambda batch: direction_of(*batch))
        self._by_block: dict[str | None, Callable[[Any], Any]] = {}

    def __call__(self, inputs: Any, target: Any) -> Tensor:
        v = None if self._direction_of is None else self._direction_of((inputs, target))
        block = None if v is None else v.block()
        name = None if block is None else block.name
        if name not in self._by_block:
            self._by_block[name] = self._replayed(partial(self._work, block))
        part: Tensor = self._by_block[name]((inputs, target, {} if v is None else v.pairs[name].state()))
        return part

    def _replayed(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return function if self._capture is None else GraphedFunction(function, self._net, self._capture)


def make_capture(net: nn.Module) -> CaptureContext | None:
    """For a network on a GPU."""
    device = next(net.parameters()).device
    return CaptureContext(device) if device.type == "cuda" else None


def _pairs(batches: Iterable[Any]) -> Iterator[tuple[Any, Any, Tensor]]:
    """Inputs, target, and a tensor of the inputs."""
    if not isinstance(batches, Iterable):
        raise InputTypeError(f"batches must be a list of (inputs, target) pairs, got {type(batches).__name__}")
    for batch in batches:
        x = next(tensors_in(batch[0]), None) if isinstance(batch, tuple | list) and len(batch) == 2 else None
        if x is None or x.dim() == 0 or len(x) == 0:
            raise InputError("batches must be (inputs, target) pairs with samples, got one that is not; use [(x, y)]")
        yield batch[0], batch[1], x


def _explained(step: Step, inputs: Any, target: Any) -> contextlib.AbstractContextManager[None]:
    where = "every batch of batches"
    return failure_explained(step.net, step.loss, step.output, (inputs, target), "batches", where=where)


def _open_gates(x: Tensor, samples: int, gates: Gates) -> Tensor:
    exact = torch.float64 in (x.dtype, *(parameter.dtype for parameter in gates.structure.net.parameters()))
    dtype = torch.float64 if exact else torch.float32  # x may be token numbers
    return torch.ones(samples, gates.count, dtype=dtype, device=x.device, requires_grad=True)


def _gradient(value: Tensor, gate_values: Tensor, *, retain_graph: bool = False) -> Tensor:
    checkpointed = (
        "net must run without activation checkpointing in evaluation mode, got a checkpointed part, which would run again "
        "without gates; turn it off while scoring"
    )
    check_differentiable(value)
    with derivatives_explained(checkpointed):
        (gradient,) = torch.autograd.grad(value, gate_values, retain_graph=retain_graph, materialize_grads=True)
    return gradient


def _slopes(outputs: list[Tensor], gate_values: Tensor, gates: Gates, of: slice, by: slice) -> Tensor:
    """Derivatives of the summed outputs of some samples by the gates of others, without those that all samples share."""
    total = torch.stack([each[of].sum() for each in outputs]).sum()
    return _gradient(total, gate_values, retain_graph=True)[by].index_fill(1, gates.shared_units(), 0)


def _first_two(inputs: Any) -> Any:
    """The first two samples of a batch if all its tensors have an entry for each, else all of them."""
    n = samples_in(inputs)
    if sample_entries(inputs) is not None or any(each.shape[:1] != (n,) for each in tensors_in(inputs)):
        return inputs
    return map_tensors(inputs, lambda each: each[:2])


def _samples_come_first(step: Step, gates: Gates, inputs: Any, x: Tensor, *, few: bool = False) -> bool:
    """Whether closing a sample's gates changes that sample alone: samples come first in every tensor that they do not share,
    and do not mix. Of `few` samples, without a warning: the network may not run on them."""
    inputs = _first_two(inputs) if few else inputs
    n = samples_in(inputs)
    gate_values = _open_gates(x, n, gates)
    come_first = 0.0

    def forward() -> Any:
        with gated(gates, gate_values):
            return run(step.net, inputs, output=step.output)

    try:
        z = [each for each in tensors_in(gates.run(as_inputs(inputs), forward)) if each.requires_grad]
        if z and all(each.shape[:1] == (n,) for each in z):
            first, second = slice(n // 2), slice(n // 2, None)
            mixed = [_slopes(z, gate_values, gates, *halves) for halves in ((first, second), (second, first))]
            come_first = float(not any(bool(slopes.any()) for slopes in mixed))
    except Exception as error:  # of few samples, whatever the network's code raises
        if not (few or isinstance(error, SampleDimensionError)):
            raise
    (agreed,) = step.reducer.sum([torch.full((), come_first, device=x.device)])
    if agreed == step.reducer.ranks:
        return True
    if few:
        return False
    warnings.warn("the first dimension of some tensor is not the sample, or samples mix; scores are |mean of the derivative| "
                  "over a batch instead of the mean of |derivative| over its samples", stacklevel=6)  # fmt: skip
    return False
