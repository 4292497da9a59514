"""What a model shows when it runs: layers' sizes, attention blocks, moments of inputs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from t3c.errors import ConvertError
from t3c.nn.hooks import hooked, read_by, taking
from t3c.nn.inputs import Inputs, batches_of, call, check_finite, evaluating, tensors
from t3c.nn.layers import channels_last, elastic_type, output_rows, patches
from t3c.spec import Factorization, Kind, LayerSpec

Size = tuple[int, ...]
# What a model raises on inputs it was not made for, or on layers it did not expect.
TRIPS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip
MOMENT_BYTES = 2 << 30  # of second moments held at once; more take another pass over the data
WIDEST = 2048  # outputs of a layer whose use is learned: a larger moment takes long to decompose
WIDTHS = 4  # outputs for each sample, at the most: a moment of fewer is mostly chance
ADJOINT_BATCH = 16  # samples that are differentiated at once
ATTENTION = (F.scaled_dot_product_attention, F.softmax, torch.softmax, Tensor.softmax)


@dataclass(frozen=True)
class Run:
    """One run of a layer: sizes of a sample, and which input tensor it read."""

    layer: str
    in_size: Size
    out_size: Size
    read: int
    channels: tuple[int, int]  # in, out
    linear: bool


@dataclass
class Observed:
    """The runs of layers in order; `None` stands for an attention's product or softmax."""

    events: list[Run | None] = field(default_factory=list)

    def runs(self, layer: str) -> list[Run]:
        return [e for e in self.events if e is not None and e.layer == layer]

    def attention_blocks(self) -> list[tuple[str, ...]]:
        """Layers of each attention block: its projections, then the one behind it.

        A block is three linear layers ahead of an attention, of which keys and values read the same
        tensor and are of one width that divides the queries', or a single one three times as wide
        as what follows; behind it stands a linear layer as wide as the queries.
        """
        blocks: list[tuple[str, ...]] = []
        for index, event in enumerate(self.events):
            if event is not None:
                continue
            before = self._back_to_attention(index)
            after = next((e for e in self.events[index:] if e is not None and e.linear), None)
            block = _block(before, after)
            if block and not any(name in other for other in blocks for name in block):
                blocks.append(block)
        return blocks

    def _back_to_attention(self, index: int) -> list[Run]:
        runs: list[Run] = []
        for event in reversed(self.events[:index]):
            if event is None and runs:
                break
            if event is not None and event.linear:
                runs.insert(0, event)
        return runs


def _block(before: list[Run], after: Run | None) -> tuple[str, ...]:
    """The names of a block around an attention; none if the layers there are no block."""
    if after is None:
        return ()
    into = after.channels[0]
    if before and before[-1].channels[1] == 3 * into:
        return before[-1].layer, after.layer
    if len(before) < 3:
        return ()
    query, key, value = before[-3:]
    widths = [run.channels[1] for run in (query, key, value)]
    shared = key.read == value.read and widths[1] == widths[2] and widths[0] % widths[1] == 0
    names = (query.layer, key.layer, value.layer, after.layer)
    return names if shared and widths[0] == into and len(set(names)) == 4 else ()


@torch.no_grad()
def observe(model: nn.Module, example: Inputs) -> Observed:
    """Run the example and say what ran."""
    seen = Observed()
    batch = tensors(example)[0].shape[0]
    token = _Tokens()

    def watch(name: str, kind: Kind) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], out: Tensor) -> None:
            into = read_by(args, kwargs)
            token.outputs.add(token.of(out))
            if kind in (Kind.CONV1D, Kind.CONV2D):
                axes = 1 if kind is Kind.CONV1D else 2
                sizes = tuple(tuple(x.shape[-axes:]) for x in (into, out))
            else:
                tokens = into.numel() if kind is Kind.EMBEDDING else into.numel() // into.shape[-1]
                sizes = ((max(1, tokens // batch), 1),) * 2
            assert isinstance(module.weight, Tensor)
            channels = (module.weight.shape[1], module.weight.shape[0])
            read, linear = token.of(into), kind is Kind.LINEAR
            seen.events.append(Run(name, sizes[0], sizes[1], read, channels, linear))

        return hook

    kinds = {name: elastic_type(module) for name, module in model.named_modules()}
    hooks = [(model.get_submodule(n), watch(n, of.kind)) for n, of in kinds.items() if of]
    with hooked(hooks), evaluating(model), _AttentionEvents(seen, token):
        run_example(model, example)
    return seen


def run_example(model: nn.Module, example: Inputs) -> Tensor:
    """The output for a copy of the example: a model may work on its input in place."""
    copied = tuple(value.clone() for value in tensors(example))
    inputs: Inputs = copied[0] if isinstance(example, Tensor) else copied
    if isinstance(example, Mapping):
        inputs = dict(zip(example, copied, strict=True))
    try:
        return call(model, inputs)
    except TRIPS as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
        raise ConvertError(
            f"the model does not take the example: {type(error).__name__}: {line}"
        ) from error


def observe_moments(
    model: nn.Module, layers: Mapping[str, LayerSpec], batches: Iterable[Inputs]
) -> dict[str, Tensor]:
    """E[a a^T] of what each weight is multiplied by, by the weight's name; `layers` by module name.

    Of an SVD these are the patches a row of the weight meets, of Tucker-2 and CP its channels.
    """
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def watch(spec: LayerSpec) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            x = read_by(args, kwargs)
            rows_of = patches if spec.factorization is Factorization.SVD else channels_last
            wide = spec.factorization is Factorization.SVD and prod(spec.kernel) > 1
            parts = torch.split(x, 1) if wide else (x,)  # patches are large
            for part in parts:
                rows = rows_of(spec, part)
                before = sums.get(spec.name)
                moment = (rows.T @ rows).double()
                sums[spec.name] = moment if before is None else before.add_(moment)
                counts[spec.name] = counts.get(spec.name, 0) + len(rows)

        return hook

    seen = False
    hooks = [(model.get_submodule(name), watch(spec)) for name, spec in layers.items()]
    with torch.no_grad(), hooked(hooks, before=True):
        for inputs in batches:
            check_finite(inputs, "the calibration data")
            call(model, inputs)
            seen = True
    if not seen:
        raise ConvertError("the calibration data is empty")
    return {name: total / counts[name] for name, total in sums.items()}


def observe_adjoints(
    model: nn.Module, layers: Mapping[str, LayerSpec], batches: Iterable[Inputs], seed: int = 0
) -> dict[str, Tensor]:
    """The second moments (out, out) of what the model's output does with each layer's output.

    Adjoints are of random signs on the output, divided by its norm: their moment is that of the
    Jacobian of the relative output, here made 1 in the mean over channels. None are found of a
    model that gives no gradient.
    """
    sums: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(seed)
    modules = {name: model.get_submodule(name) for name in layers}
    nothing = torch.empty(0)  # inputs would take memory
    with evaluating(model), torch.enable_grad(), taking(modules, lambda *_: nothing) as runs:
        for inputs in batches:
            for few in batches_of(inputs, ADJOINT_BATCH):
                runs.clear()
                output = call(model, few)
                if not output.requires_grad:
                    return {}
                flat = output.flatten(1)
                signs = torch.randint(0, 2, flat.shape, generator=generator) * 2.0 - 1.0
                probe = signs.to(flat) / flat.detach().norm(dim=1, keepdim=True).clamp_min(1e-12)
                found = torch.autograd.grad(
                    flat, [run.offset for run in runs], probe, materialize_grads=True
                )
                for run, adjoint in zip(runs, found, strict=True):
                    spec = layers[run.name]
                    rows = output_rows(spec, adjoint)
                    moment, before = (rows.T @ rows).double(), sums.get(spec.name)
                    sums[spec.name] = moment if before is None else before.add_(moment)
    return {n: m / m.diagonal().mean().clamp_min(1e-300) for n, m in sums.items()}


def use_matters(spec: LayerSpec, samples: int) -> bool:
    """Return whether factors can suit the use of outputs: not in groups, which share them."""
    if spec.factorization is Factorization.CP or spec.groups > 1:
        return False
    return spec.out_channels <= min(WIDEST, WIDTHS * samples)


class _Tokens:
    """A number for each tensor that is alive."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self.count = 0
        self.outputs: set[int] = set()  # of layers

    def of(self, value: Tensor) -> int:
        known = self.known.get(id(value))
        if known is None or known[0]() is not value:
            self.count += 1
            self.known[id(value)] = known = (weakref.ref(value), self.count)
        return known[1]


class _AttentionEvents(TorchFunctionMode):
    """Writes an event for every attention product, and softmax of more than a layer's output."""

    def __init__(self, seen: Observed, token: _Tokens) -> None:
        super().__init__()
        self.seen, self.token = seen, token

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in ATTENTION and (not self.seen.events or self.seen.events[-1] is not None):
            scored = args[0] if args else None
            if not isinstance(scored, Tensor) or self.token.of(scored) not in self.token.outputs:
                self.seen.events.append(None)
        return func(*args, **(kwargs or {}))
