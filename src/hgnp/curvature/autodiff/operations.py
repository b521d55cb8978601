"""Which operations of a network are linear, bilinear or nonlinear, by the name PyTorch gives them.

A tensor is *linear along v* when its second derivative along v vanishes. A `LINEAR` operation (piecewise linear and affine
ones among them) keeps such tensors linear. A `BILINEAR` one does so while at most one of its factors depends on v. Everything
else is taken to be nonlinear, and is named as the reason.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Func = Callable[..., Any]

# The tangent of the result is the same operation on the tangent of the first argument.
SAME = frozenset(
    """view reshape flatten unflatten permute transpose movedim swapaxes t squeeze unsqueeze expand expand_as repeat
    repeat_interleave contiguous clone mean sum neg roll flip __getitem__ chunk split unbind select narrow index_select
    view_as reshape_as avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    upsample interpolate pixel_shuffle pixel_unshuffle channel_shuffle unfold fold cumsum tril triu diagonal float
    double half bfloat16 to type type_as gather conj resolve_conj view_as_real view_as_complex
    fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn
    fft_hfft fft_ihfft fft_fftshift fft_ifftshift""".split()  # noqa: SIM905
)
# Linear in all their arguments together.
SUMS_AND_JOINS = frozenset("add sub __rsub__ subtract cat concat concatenate stack hstack vstack diff".split())  # noqa: SIM905
# Linear between the points where they select other entries or another branch.
PIECEWISE_LINEAR = frozenset(
    """relu relu6 leaky_relu prelu hardtanh clamp clamp_min clamp_max clip threshold abs rrelu max_pool1d max_pool2d
    max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d amax amin max min maximum minimum topk sort
    masked_fill where pad dropout dropout1d dropout2d dropout3d feature_dropout alpha_dropout feature_alpha_dropout
    index_copy index_add scatter scatter_add masked_select""".split()  # noqa: SIM905
)
LINEAR = SAME | SUMS_AND_JOINS | PIECEWISE_LINEAR
BILINEAR = frozenset(
    """mul multiply matmul __rmatmul__ mm bmm mv dot outer linear bilinear conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d einsum addmm baddbmm addmv addbmm embedding tensordot""".split()  # noqa: SIM905
)
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")

# Their results do not depend on their argument's value, or not differentiably.
PASSIVE = frozenset(
    """dim size numel nelement stride is_contiguous is_floating_point is_complex get_device element_size data_ptr
    __len__ __bool__ __repr__ __format__ __hash__ item tolist detach argmax argmin argsort eq ne lt gt le ge isnan isinf
    isfinite bool long int short logical_not logical_and logical_or sign zeros_like ones_like empty_like full_like
    rand_like randn_like new_zeros new_ones new_empty new_full new_tensor register_hook retain_grad
    is_same_size is_set_to __contains__ nonzero count_nonzero bernoulli multinomial _set_grad_enabled requires_grad_
    record_stream is_pinned is_shared is_nonzero is_inference is_conj is_neg ndimension numpy has_names""".split()  # noqa: SIM905
)


VIEW_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Linear. Others hold no derivative (`data`), or a tensor that is known already (`_base`)."""


def attribute_of(func: Callable[..., Any]) -> str:
    """The attribute that a `__get__` or `__set__` is of."""
    return getattr(getattr(func, "__self__", None), "__name__", "")


def name_of(func: Callable[..., Any]) -> str:
    """The operation's name without the marks of an in-place or a reflected spelling: add_, __iadd__, __radd__ → add."""
    name: str = getattr(func, "__name__", "?")
    if name in ("__get__", "__getitem__", "__setitem__", "__rsub__", "__rmatmul__"):
        return name
    if name.startswith("__") and name.endswith("__"):
        bare = name[2:-2]
        return bare[1:] if bare in ("iadd", "isub", "imul", "radd", "rmul", "itruediv") else name
    return name[:-1] if name.endswith("_") else name


@functools.cache
def _inplace_position(func: Func) -> int | None:
    try:
        names = list(inspect.signature(func).parameters)
    except (ValueError, TypeError):
        return None
    return names.index("inplace") if "inplace" in names else None


def in_place(func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call writes into its first argument."""
    name: str = getattr(func, "__name__", "")
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        return True
    if name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__"):
        return True
    if "inplace" in kwargs:
        return bool(kwargs["inplace"])
    position = _inplace_position(func)
    return position is not None and len(args) > position and bool(args[position])


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def map_tensors(value: Any, fn: Callable[[Tensor], Any]) -> Any:
    """The same nesting with fn applied to every tensor."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, fn) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: map_tensors(item, fn) for key, item in value.items()}
    return value


def differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or torch.is_complex(value))


_BATCH = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_INSTANCE = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")


def batch_norm_options(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    defaults = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
    return defaults | dict(zip(_BATCH, args, strict=False)) | kwargs


def uses_batch_statistics(options: dict[str, Any]) -> bool:
    """Whether a batch norm takes mean and variance from its batch: not in evaluation mode."""
    return options["training"] or options["running_mean"] is None


_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_TORCH_EMBEDDING = ("weight", "input", "padding_idx", "scale_grad_by_freq", "sparse")


def embedding_options(func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of F.embedding or torch.embedding by the names of the former. `padding_idx` is the row of the
    weight that gets no gradient, or None."""
    names = _EMBEDDING if func is F.embedding else _TORCH_EMBEDDING
    options: dict[str, Any] = {"padding_idx": None, "max_norm": None, "scale_grad_by_freq": False}
    options |= dict(zip(names, args, strict=False)) | {{"indices": "input"}.get(k, k): v for k, v in kwargs.items()}
    padding = options["padding_idx"]
    if padding is not None and padding < 0:  # to torch.embedding a negative one is none
        options["padding_idx"] = padding + options["weight"].shape[0] if func is F.embedding else None
    return options


def untracked(func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call; for a norm that uses batch statistics, without the running statistics that it would update."""
    names, switch = (_BATCH, "training") if func is F.batch_norm else (_INSTANCE, "use_input_stats")
    options = dict(zip(names, args, strict=False)) | kwargs
    if func not in (F.batch_norm, F.instance_norm) or not options.get(switch, func is F.instance_norm):
        return args, kwargs
    return (), options | {"running_mean": None, "running_var": None}
