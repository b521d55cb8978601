"""`export`: a network as one file that runs without its Python class, checked against the network before it is written.

The batch size is dynamic in both formats, unless the example's own is wanted. The batch is the first dimension of every input
tensor that has as many rows as the first one.
"""

import copy
import dataclasses
import functools
import importlib.util
import inspect
import io
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning
from torch.utils._pytree import tree_leaves, tree_leaves_with_path, tree_map

from hgnp.errors import InputError, MissingPackageError, brief
from hgnp.io.atomic import as_path, atomic_path, check_file_path
from hgnp.pruning.graph import Inputs
from hgnp.pruning.validation import as_inputs, check_prunable
from hgnp.validation import check_flags, check_values

OPSET = 18
FORMATS: dict[str, Literal["onnx", "torch.export"]] = {".onnx": "onnx", ".pt2": "torch.export"}
TRACED = 2  # batch size while tracing: torch.export specialises on 1
CHECKED = (1, 3, 5)  # batch sizes of the check: two of them differ from the example's
TOLERANCE = 1e-4
HALF_TOLERANCE = 1e-2
FIXED = (
    "net must accept any batch size, got a forward that fixes the number of rows; "
    "take sizes from the input (x.shape[0], x.flatten(1)), or set dynamic_batch=False"
)


@dataclass(frozen=True)
class Exported:
    """An exported file and its numerical error.

    >>> import torch, hgnp
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> exported = hgnp.export(net, "small.pt2", torch.zeros(1, 4))
    >>> exported.kind, exported.path.name, exported.error < 1e-4
    ('torch.export', 'small.pt2', True)

    Attributes:
        path: The file.
        kind: "onnx" or "torch.export".
        opset: The ONNX opset; None for torch.export.
        error: Largest difference from the network's outputs, relative to the largest entry of that output.
        difference: Largest absolute difference from the network's outputs.
        bytes: Size of the file.
    """

    path: Path
    kind: Literal["onnx", "torch.export"]
    opset: int | None
    error: float
    difference: float
    bytes: int


def export(net: nn.Module, path: str | os.PathLike[str], example_input: Any, *, dynamic_batch: bool = True) -> Exported:
    """Write `net`, in eval mode, to `path`: ONNX if it ends in .onnx, torch.export if in .pt2.

    The file accepts any batch size, or with ``dynamic_batch=False`` that of the example alone. It is run on random inputs, at
    two other batch sizes if it accepts any (by ONNX Runtime, or loaded back), and compared with `net`.

    A network may return several tensors: tuples, lists, dicts and dataclasses of them, such as the outputs of Transformers.
    In ONNX an output is named by its keys and positions (`logits`, `hidden_states_0`; `output` for a single tensor). What is
    not in such a structure, such as a key/value cache, is left out.

    >>> import torch, hgnp
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> hgnp.export(net, "small.pt2", torch.zeros(1, 4)).error < 1e-4
    True

    Args:
        net: The network; unchanged.
        path: The file. Parent folders are created.
        example_input: A tensor, a tuple of positional arguments or a dict of keyword arguments.
        dynamic_batch: Whether the file accepts any batch size. False fixes that of the example, for networks and runtimes that
            need it.

    Raises:
        InputError: If `net` cannot be exported, or if the relative difference is above 1e-4 (1e-2 in half precision). `path`
            is then unchanged.
        MissingPackageError: If ONNX is not installed.
    """
    check_flags(dynamic_batch=dynamic_batch)
    path = as_path(path)
    if path.name in FORMATS:
        raise InputError(f"path must have a name before {path.name}, got {str(path)!r}; for example net{path.name}")
    if path.suffix not in FORMATS:
        raise InputError(f"path must end in {' or '.join(FORMATS)}, got {str(path)!r}")
    check_file_path(path)
    check_prunable(net)
    check_values(net)
    inputs, arguments = _bind_inputs(net, as_inputs(example_input), dynamic_batch)
    rows = _rows(inputs)
    to_onnx = path.suffix == ".onnx"
    if to_onnx:
        _check_onnx_installed()
    subject = _eval_copy(net, to_onnx)
    device = next((tensor.device for tensor in [*subject.parameters(), *subject.buffers()]), torch.device("cpu"))
    example = _random_inputs(inputs, rows, None, device)
    # on a copy: some networks write into their input
    output = _call(subject, example, "net must run on example_input, but failed")
    if not _is_plain(output):
        subject.forward = _with_plain_output(subject.forward)
        output = _plain(output)
    if not _tensors(output):
        raise InputError("net must return at least one tensor, got none")
    traced, shapes = _random_inputs(inputs, rows, None, device), None
    if dynamic_batch:
        traced = _random_inputs(inputs, rows, TRACED, device)
        # last at 1: a network that compares shapes with its last ones must not meet those of the trace
        for n in (TRACED, 1):
            _run(subject, _random_inputs(inputs, rows, n, device), FIXED)
        batch = torch.export.Dim("batch")
        shapes = tree_map(lambda leaf: {0: batch} if _batched(leaf, rows) else None, arguments)
    with atomic_path(path) as draft, _expected_warnings_ignored():
        program = _program(subject, traced, shapes)
        if to_onnx:
            draft.write_bytes(_as_onnx(subject, program, traced, shapes, _output_names(output)))
            session = onnx_session(draft)
            call: Callable[..., Any] = lambda *a, **k: run_onnx(session, _tensors((a, k)))  # noqa: E731
        else:
            torch.export.save(program, content := io.BytesIO())  # to a file, it ends the process when the disk is full
            draft.write_bytes(content.getvalue())
            call = torch.export.load(draft).module()
        sizes = [n for n in CHECKED if n != rows][:2] if dynamic_batch else [rows, rows]
        error, difference = _checked(subject, call, inputs, rows, device, sizes)
    return Exported(path, FORMATS[path.suffix], OPSET if to_onnx else None, error, difference, path.stat().st_size)


def onnx_session(path: Path, *, threads: int = 0) -> Any:
    """An ONNX Runtime session on the CPU. Its threads sleep between runs, so that other networks can be timed beside it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors have no public base class
        raise InputError(f"net must run in ONNX Runtime, but failed: {brief(error)}") from error


def run_onnx(session: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    """All outputs, for the tensors among the network's arguments, in order."""
    names = [entry.name for entry in session.get_inputs()]
    feed = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
    return [torch.from_numpy(output) for output in session.run(None, feed)]


def _check_onnx_installed() -> None:
    missing = [name for name in ("onnx", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(f"ONNX export needs {', '.join(missing)}; pip install 'hgnp[onnx]'")


def _eval_copy(net: nn.Module, to_onnx: bool) -> nn.Module:
    """A copy in eval mode to trace. For ONNX on the CPU, where it runs."""
    for name, tensor in net.named_parameters():
        if to_onnx and tensor.dtype == torch.bfloat16:
            raise InputError(f"net must not be bfloat16 for ONNX Runtime on a CPU, got {name}; call net.float() first")
    try:
        subject = copy.deepcopy(net).eval()
    except Exception as error:
        raise InputError(f"net must work with copy.deepcopy, but failed: {brief(error)}") from error
    return subject.cpu() if to_onnx else subject


def _rows(inputs: Inputs) -> int:
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.numel() > 0:
            return leaf.shape[0]
    raise InputError("example_input must have a tensor with a batch dimension of at least 1, got none")


def _batched(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows


def _bind_inputs(net: nn.Module, inputs: Inputs, dynamic_batch: bool) -> tuple[Inputs, dict[str, Any]]:
    """The inputs with keywords in the order of forward's signature, and the arguments by parameter of forward."""
    args, kwargs = inputs
    forward = f"{type(net).__name__}.forward"
    signature = inspect.signature(net.forward)
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise InputError(f"example_input must match the signature of {forward}, got another: {error}") from None
    for name in bound:
        if dynamic_batch and signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            raise InputError(
                f"{forward} must name its inputs, got {', '.join(bound[name])} through **{name}, for which torch.export has no "
                "dynamic batch size; declare them as parameters, or set dynamic_batch=False"
            )
    return (args, {name: kwargs[name] for name in [*bound, *kwargs] if name in kwargs}), dict(bound)


def _random_inputs(inputs: Inputs, rows: int, n: int | None, device: torch.device, *, seed: int = 0) -> Inputs:
    """`inputs` at batch size n, each tensor's entries drawn from its own (normal ones where it is constant). None: a copy."""
    random = torch.Generator().manual_seed(seed)

    def draw(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if n is None or not _batched(leaf, rows):
            return leaf.detach().to(device, copy=True)
        shape, own = (n, *leaf.shape[1:]), leaf.detach().cpu().flatten()
        if leaf.is_floating_point() and bool((own == own[0]).all()):
            return torch.randn(shape, generator=random).to(device, leaf.dtype)
        return own[torch.randint(len(own), shape, generator=random)].to(device)

    return tree_map(draw, inputs)


def _call(call: Callable[..., Any], inputs: Inputs, failure: str) -> Any:
    try:
        with torch.no_grad():
            return call(*inputs[0], **inputs[1])
    except Exception as error:
        raise InputError(f"{failure}: {brief(error)}") from error


def _run(call: Callable[..., Any], inputs: Inputs, failure: str) -> list[Tensor]:
    return _tensors(_call(call, inputs, failure))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


# Outputs


def _is_plain(output: Any) -> bool:
    """Whether torch.export knows the structure: other classes than tuples, lists and dicts may be registered with it."""
    return all(leaf is None or isinstance(leaf, Tensor | bool | int | float | str) for leaf in tree_leaves(output))


def _plain(output: Any) -> Any:
    """The output as tuples, lists and dicts of tensors, without what is none of these."""
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        output = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    if isinstance(output, Mapping):
        parts = {key: _plain(value) for key, value in output.items()}
        return {key: part for key, part in parts.items() if part is not None}
    if isinstance(output, tuple | list):
        plain = [part for part in map(_plain, output) if part is not None]
        return plain if isinstance(output, list) else tuple(plain)
    return output if isinstance(output, Tensor) else None


def _with_plain_output(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)  # with its signature, by which inputs are named
    def plain(*args: Any, **kwargs: Any) -> Any:
        return _plain(forward(*args, **kwargs))

    return plain


def _output_names(output: Any) -> list[str]:
    """A name for each tensor, in order: its keys and positions, such as "hidden_states_0"."""
    names = []
    for keys, leaf in tree_leaves_with_path(output):
        parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in keys]
        if isinstance(leaf, Tensor):
            names.append("_".join(parts if parts and not parts[0].isdigit() else ["output", *parts]))
    return names


@contextmanager
def _expected_warnings_ignored() -> Iterator[None]:
    """Ignores the warnings and log lines of torch's own exporters."""
    # operators of a torchvision that is not installed
    skipped = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = skipped.level
    skipped.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # torch 2.13's ONNX exporter copies what torch itself deprecates …
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
            # … and does not name the free axis where an argument is not a tensor
            warnings.filterwarnings("ignore", "# ONNX model has different number of inputs", UserWarning)
            # … or where several inputs share it
            warnings.filterwarnings("ignore", "# The axis name: batch will not be used", UserWarning)
            # torch 2.11 reads what it saved without a copy
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            # recurrent layers keep a list of their own weights, detectors their anchors; the check sees if they matter
            warnings.filterwarnings("ignore", r"The tensor attributes? self\.", UserWarning)
            warnings.filterwarnings("ignore", "No complete tensor found in the group", UserWarning)
            # the older ONNX exporter; the check sees what its tracing got wrong
            warnings.filterwarnings("ignore", "You are using the legacy TorchScript-based ONNX", DeprecationWarning)
            warnings.filterwarnings("ignore", "The feature will be removed", DeprecationWarning, r"torch\.onnx\.")
            warnings.filterwarnings("ignore", "Exporting a model to ONNX with a batch_size other than 1", UserWarning)
            warnings.filterwarnings("ignore", category=TracerWarning)
            yield
    finally:
        skipped.setLevel(level)


def _program(net: nn.Module, traced: Inputs, shapes: dict[str, Any] | None) -> torch.export.ExportedProgram:
    try:
        return torch.export.export(net, *traced, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        if shapes is None:
            raise InputError(f"net must be exportable by torch.export, but failed: {brief(error)}") from error
        try:
            torch.export.export(net, *traced, strict=False)
        except Exception as again:
            raise InputError(f"net must be exportable by torch.export, but failed: {brief(again)}") from again
        raise InputError(f"{FIXED}: {brief(error)}") from error


def _as_onnx(
    net: nn.Module,
    program: torch.export.ExportedProgram,
    traced: Inputs,
    shapes: dict[str, Any] | None,
    output_names: Sequence[str],
) -> bytes:
    """The content of an ONNX file."""
    options: dict[str, Any] = {"opset_version": OPSET, "external_data": False, "verbose": False}
    options["output_names"] = list(output_names)
    try:
        made = torch.onnx.export(program, (), dynamo=True, dynamic_shapes=shapes, **options)  # names the free axis
        assert made is not None
        return made.model_proto.SerializeToString()
    except Exception as error:
        # Some torch and onnxscript do not go together, and some operators only the older exporter knows. What it writes
        # may hold for the traced batch alone; the check tells.
        names = [name for name in program.graph_signature.user_inputs if isinstance(name, str)]
        free = {
            name: {0: "batch"}
            for name, leaf in zip(names, _tensors(traced), strict=True)
            if shapes is not None and _batched(leaf, TRACED)
        }
        content: Any = io.BytesIO()
        try:
            torch.onnx.export(
                net, traced[0], content, kwargs=traced[1], dynamo=False, input_names=names, dynamic_axes=free, **options
            )
        except Exception:
            raise InputError(
                f"net must consist of operators that ONNX has, but failed: {brief(error.__cause__ or error)}"
            ) from error
        return content.getvalue()


def _checked(
    net: nn.Module,
    call: Callable[..., Any],
    inputs: Inputs,
    rows: int,
    device: torch.device,
    sizes: Sequence[int],
) -> tuple[float, float]:
    """The largest relative and absolute difference between `call` and `net` at these batch sizes; ValueError if there is too
    much."""
    error = difference = 0.0
    for seed, n in enumerate(sizes, 1):
        drawn = _random_inputs(inputs, rows, n, device, seed=seed)
        expected = _run(net, _random_inputs(drawn, n, None, device), f"net cannot run at batch size {n}")
        got = _run(call, drawn, f"the exported network cannot run at batch size {n}")
        if [tuple(tensor.shape) for tensor in got] != [tuple(tensor.shape) for tensor in expected]:
            raise InputError(
                f"the exported network must return the outputs of net, got others at batch size {n}; not written"
            )
        half = any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in expected)
        for there, here in zip(got, expected, strict=True):
            away = float((there.double() - here.double()).abs().max()) if here.numel() else 0.0
            size = float(here.double().abs().max()) if here.numel() else 0.0
            share = away / size if size else math.inf if away else 0.0
            if not share <= (HALF_TOLERANCE if half else TOLERANCE):
                raise InputError(
                    f"the exported network must equal net to {HALF_TOLERANCE if half else TOLERANCE:.0e}, got a relative "
                    f"difference of {share:.1e} ({away:.1e} absolute) at batch size {n}; not written"
                )
            error, difference = max(error, share), max(difference, away)
    return error, difference
