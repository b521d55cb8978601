"""The direction v over all trained parameters: the top eigenvector of the Gauss–Newton matrix F, by power iteration.

    v ← Fv/‖Fv‖,   F = Jᵀ(∂²C/∂z²)J   of the mean loss C, in the network's current mode.

Fv comes from a pass along v, which q takes anyway, and one backward pass from the output: u = Jv, ½·∂q/∂u = (∂²C/∂z²)u, then Jᵀ
of that. Each refresh is one product, from where the last refresh left v. The vector is flat, the parameters one after the other
in the network's order.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hgnp.curvature.autodiff.forward import CHECKPOINTED_NETWORK, autocast_off, derivatives_explained
from hgnp.curvature.autodiff.passes import Pass
from hgnp.curvature.device import upcast
from hgnp.curvature.direction import BlockChoice, Direction
from hgnp.curvature.eigen import arbitrary
from hgnp.curvature.factors import Block, WholeNetwork
from hgnp.curvature.validation import without_tensor_hooks
from hgnp.errors import InputError
from hgnp.reducer import LOCAL, Reducer
from hgnp.removal import cut

COLD_PRODUCTS = 20
"""Products from an arbitrary start, and for the scores' own v."""


@dataclass(frozen=True)
class NetworkVector:
    """v of unit length, with ‖Fv‖ and the residual ‖Fv − qv‖/q of the last product."""

    vector: Tensor
    """(parameters,)"""
    value: Tensor
    residual: Tensor

    @property
    def residuals(self) -> Tensor:
        return torch.stack((self.residual, torch.zeros_like(self.residual)))

    def tangents(self, network: WholeNetwork, *, scale_invariant: bool) -> list[tuple[Tensor, Tensor]]:
        """The parameters with their parts of v."""
        parts = _parts(self.vector.clone(), network)  # autograd keeps them, and a graph writes its memory in place
        return [(p, part.to(p.dtype)) for p, part in zip(network.parameters.values(), parts, strict=True)]

    def state(self) -> dict[str, Tensor]:
        return dict(vars(self))

    @classmethod
    def of_state(cls, state: Mapping[str, Tensor]) -> "NetworkVector":
        return cls(**{key: state[key] for key in ("vector", "value", "residual")})


@dataclass
class NetworkDirection:
    """v of the batches so far, over all trained parameters. Its interface is `Direction`'s, except for the refresh."""

    net: nn.Module
    pairs: dict[str, NetworkVector] = field(default_factory=dict)
    """One vector, by the name of `WholeNetwork`."""
    choice: BlockChoice | None = None
    """The network, once there is a v."""

    @classmethod
    def arbitrary(cls, net: nn.Module) -> "NetworkDirection":
        """The same one for every run."""
        network = WholeNetwork(net)
        like = upcast(next(iter(network.parameters.values())).detach())
        start = arbitrary(_size(network), like.dtype, like.device)[0]
        return cls._of(network, NetworkVector(start, like.new_full((), torch.nan), like.new_full((), torch.inf)))

    @classmethod
    def _of(cls, network: WholeNetwork, vector: NetworkVector) -> "NetworkDirection":
        return cls(network.net, {network.name: vector}, BlockChoice.known(network))

    def copy(self) -> "NetworkDirection":
        """One to iterate from this v while this one stays as it is."""
        return NetworkDirection(self.net, dict(self.pairs), self.choice)

    def along(self, block: Block | WholeNetwork, pair: Mapping[str, Tensor]) -> "NetworkDirection":
        """One along this vector, given as its `state()`."""
        return self._of(WholeNetwork(self.net), NetworkVector.of_state(pair))

    def name(self) -> str | None:
        """Of what v lies in: the network."""
        return None if self.choice is None else WholeNetwork.name

    def block(self) -> WholeNetwork | None:
        """The network, unless v is not there yet or of another size: parameters may have been frozen since."""
        network, known = WholeNetwork(self.net), self.pairs.get(WholeNetwork.name)
        return network if known is not None and known.vector.numel() == _size(network) else None

    def iterate(self, current: Pass, reducer: Reducer, scale: float | Tensor = 1.0) -> None:
        """v ← Fv/‖Fv‖ by a pass along v, whose autograd graph is kept. `scale` keeps the product in the range of half
        precision, and is divided out; if it is not finite even so, or zero, v stays."""
        network, old = WholeNetwork(self.net), self.pairs[WholeNetwork.name]
        product = gauss_newton_product(current, network, reducer, scale).to(old.vector.dtype)
        with torch.no_grad():
            length, quotient = torch.linalg.vector_norm(product), old.vector @ product
            residual = torch.linalg.vector_norm(product - quotient * old.vector) / quotient
            fits = torch.isfinite(length) & (length > 0)
            new = NetworkVector(
                torch.where(fits, product / length, old.vector),
                torch.where(fits, length, old.value),
                torch.where(fits, residual, old.residual),
            )
        self.pairs = {network.name: new}
        self.choice = BlockChoice.known(network)

    def sliced(self, slices: Mapping[str, Mapping[int, Tensor]]) -> dict[str, NetworkVector]:
        """v once parameters keep these positions of their dimensions, to unit length again."""
        network = self.block()
        if network is None:
            return dict(self.pairs)
        old = self.pairs[network.name]
        parts = zip(network.parameters, _parts(old.vector, network), strict=True)
        vector = torch.cat([cut(part, slices.get(name, {})).flatten() for name, part in parts])
        if not bool(vector.any()):
            vector = arbitrary(len(vector), vector.dtype, vector.device)[0]
        return {network.name: NetworkVector(vector / torch.linalg.vector_norm(vector), old.value, old.residual)}

    def state_dict(self) -> dict[str, Any]:
        known = self.block() is not None
        return {
            "pairs": {name: pair.state() for name, pair in self.pairs.items()} if known else {},
            "block": WholeNetwork.name if known else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["block"] not in (None, WholeNetwork.name):
            raise InputError(
                f"state must be of direction_over='network', got one of direction_over='block', {state['block']!r}"
            )
        if state["block"] is None:
            self.pairs, self.choice = {}, None
            return
        network = WholeNetwork(self.net)
        device = next(iter(network.parameters.values())).device
        vector = NetworkVector.of_state({key: value.to(device) for key, value in state["pairs"][network.name].items()})
        if vector.vector.numel() != _size(network):
            raise InputError(
                f"state must have a v of {_size(network)} trained parameters, got one of {vector.vector.numel()}"
            )
        self.pairs, self.choice = {network.name: vector}, BlockChoice.known(network)


AnyDirection = Direction | NetworkDirection
"""v in one block, or over the network."""


def gauss_newton_product(
    current: Pass, network: WholeNetwork, reducer: Reducer = LOCAL, scale: float | Tensor = 1.0
) -> Tensor:
    """Fv, (parameters,), from a pass along v, whose autograd graph is kept."""
    parameters = list(network.parameters.values())
    assert current.q is not None
    if current.tangent is None:  # the output does not depend on any parameter
        parts: tuple[Tensor, ...] = tuple(torch.zeros_like(p) for p in parameters)
    else:
        with derivatives_explained(CHECKPOINTED_NETWORK), autocast_off(current.q), without_tensor_hooks(parameters):
            (curved,) = torch.autograd.grad(current.q * (scale / 2), current.tangent, retain_graph=True)
            parts = torch.autograd.grad(current.output, parameters, curved, retain_graph=True, materialize_grads=True)
    with torch.no_grad():
        (product,) = reducer.sum([torch.cat([upcast(part).flatten() for part in parts])])
        return product / scale


def _size(network: WholeNetwork) -> int:
    return sum(p.numel() for p in network.parameters.values())


def _parts(vector: Tensor, network: WholeNetwork) -> list[Tensor]:
    """A flat vector in the parameters' shapes."""
    parameters = list(network.parameters.values())
    return [
        part.view(p.shape) for part, p in zip(vector.split([p.numel() for p in parameters]), parameters, strict=True)
    ]
