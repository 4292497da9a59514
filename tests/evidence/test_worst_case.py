from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import artifact_of, made_of, mlp, tensors_of
from onnx import helper
from torch import Tensor, nn

from lab.certified import Made
from t3c.engines.torch_operations import OPERATIONS
from t3c.evidence.certify import CertifyConfig, Slices, certify
from t3c.evidence.drifts import program_reference
from t3c.evidence.estimates import EstimateConfig, estimate, residuals_of
from t3c.evidence.operands import Operand, Step, StoppedError
from t3c.evidence.program import Executed, Layer, Program, executed
from t3c.evidence.rules import RULES
from t3c.evidence.served import answers, run_of
from t3c.evidence.worst_case import norms_of, worst_cases
from t3c.nn.inputs import Inputs


def between(made: Made, name: str, bits: int | None = None) -> Executed:
    runtime = made.runtime
    width = bits or runtime.device.weight_bits
    subject = runtime.executions[name]
    return executed(runtime.artifact, made.original, subject, width, torch.float64)


@pytest.mark.parametrize("network", ["mlp", "cnn", "bert", "llama"])
def test_no_sample_is_over_its_worst_case(network: str) -> None:
    made = made_of(network)
    x, program = tensors_of(made, 12), Program(made.runtime.artifact, torch.float64)
    truth = program_reference(made.runtime.artifact, made.original)([v.numpy() for v in x])
    for name in made.names:
        one = between(made, name)
        cases = worst_cases(program, one, norms_of(program, one), x)
        assert not any(case.stopped for case in cases)
        bounds = np.array([case.bound for case in cases])
        simulated = (program(one, x, 1.0) - program(one, x)).flatten(1).norm(dim=1).numpy()
        assert (simulated <= bounds).all()
        served = answers(run_of(made.runtime.session(name)), [value.numpy() for value in x])
        assert (np.linalg.norm((served - truth).reshape(12, -1), axis=1) <= bounds).all()
        assert all(np.isfinite(list(case.layers.values())).all() for case in cases)


def operand(value: Tensor, error: float, change: Tensor | None = None) -> Operand:
    return Operand(value, error, change)


Shapes = list[tuple[int, ...]]
CASES: dict[str, tuple[str, dict[str, Any], Shapes]] = {
    "softmax": ("Softmax", {"axis": -1}, [(1, 3, 7)]),
    "gelu": ("Gelu", {}, [(1, 20)]),
    "sigmoid": ("Sigmoid", {}, [(1, 20)]),
    "hard swish": ("HardSwish", {}, [(1, 20)]),
    "mish": ("Mish", {}, [(1, 20)]),
    "elu": ("Elu", {"alpha": 1.7}, [(1, 20)]),
    "leaky": ("LeakyRelu", {"alpha": 0.2}, [(1, 20)]),
    "erf": ("Erf", {}, [(1, 20)]),
    "max pool": ("MaxPool", {"kernel_shape": [3, 3], "strides": [1, 1], "pads": [1] * 4},
                 [(1, 2, 6, 6)]),
    "average pool": ("AveragePool", {"kernel_shape": [3, 3], "strides": [2, 2]}, [(1, 2, 7, 7)]),
    "padded average": ("AveragePool", {"kernel_shape": [3, 3], "strides": [1, 1], "pads": [1] * 4},
                       [(1, 2, 6, 6)]),
    "average with short edges": (
        "AveragePool", {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}, [(1, 1, 3, 3)]
    ),
    "softmax over rows": ("Softmax", {"axis": -2}, [(1, 3, 7)]),
    "global average": ("GlobalAveragePool", {}, [(1, 3, 5, 5)]),
    "sum": ("Add", {}, [(1, 4, 6), (1, 1, 6)]),
    "difference": ("Sub", {}, [(1, 4, 6), (1, 4, 1)]),
    "product": ("Mul", {}, [(1, 4, 6), (1, 4, 6)]),
    "spread product": ("Mul", {}, [(1, 4, 6), (1, 4, 1)]),
    "matrices": ("MatMul", {}, [(1, 2, 4, 5), (1, 2, 5, 3)]),
    "shared matrix": ("MatMul", {}, [(1, 2, 4, 5), (1, 1, 5, 3)]),
    "maximum": ("Max", {}, [(1, 8), (1, 8)]),
    "concat": ("Concat", {"axis": -1}, [(1, 4), (1, 3)]),
    "transpose": ("Transpose", {"perm": [0, 2, 1]}, [(1, 3, 4)]),
}  # fmt: skip


def perturbed(value: Tensor, size: float, random: torch.Generator) -> Tensor:
    change = torch.randn(value.shape, generator=random, dtype=torch.float64)
    return value + change * (size / float(change.norm()))


def worst_of(
    run: Callable[..., Any], values: list[Tensor], size: float, random: torch.Generator
) -> float:
    """How far an adversary who climbs the gradient moves the output, each input by `size`."""
    with torch.no_grad():
        before = run(*values)
    moved = [perturbed(value, size, random) for value in values]
    most = 0.0
    for _ in range(6):
        moved = [value.detach().requires_grad_() for value in moved]
        change = (run(*moved) - before).norm()
        most = max(most, float(change.detach()))
        slopes = torch.autograd.grad(change, moved, allow_unused=True)
        moved = [
            value + slope * (size / max(float(slope.norm()), 1e-30)) if slope is not None else old
            for value, slope, old in zip(values, slopes, moved, strict=True)
        ]
    return most


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), size=st.sampled_from([1e-3, 0.1, 1.0, 10.0]))
def test_a_rule_bounds_every_change_within_the_error(case: str, seed: int, size: float) -> None:
    kind, attributes, shapes = CASES[case]
    random = torch.Generator().manual_seed(seed)
    values = [2 * torch.randn(s, generator=random, dtype=torch.float64) for s in shapes]
    run: Callable[..., Any] = OPERATIONS[kind]
    made = run(attributes, *values)
    node = helper.make_node(kind, [f"x{i}" for i in range(len(values))], ["y"])
    step = Step(node, attributes, [operand(v, size) for v in values], [made], {})
    bound = RULES[kind](step)
    most = worst_of(lambda *given: run(attributes, *given), values, size, random)
    assert most <= bound * (1 + 1e-9)


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), size=st.sampled_from([1e-3, 0.1, 1.0, 10.0, 1e4]))
def test_norms_bound_any_change_and_never_run_away(seed: int, size: float) -> None:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 5, 8, generator=random, dtype=torch.float64)
    gain, bias = (torch.randn(8, generator=random, dtype=torch.float64) for _ in range(2))
    other = perturbed(gain, 0.1, random)
    node = helper.make_node("LayerNormalization", ["x", "g", "b"], ["y"])
    attributes = {"axis": -1, "epsilon": 1e-5}
    run: Callable[..., Any] = OPERATIONS["LayerNormalization"]
    made = run(attributes, x, gain, bias)
    operands = [operand(x, size), Operand(gain, 0.1, other - gain), Operand(bias, 0.0, bias * 0)]
    bound = RULES["LayerNormalization"](Step(node, attributes, operands, [made], {}))
    after = run(attributes, perturbed(x, size, random), other, bias)
    assert float((after - made).norm()) <= bound
    assert bound <= 2 * math.sqrt(40) * float(other.abs().max()) * 1.001 + 0.1 * math.sqrt(40) * 9


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), size=st.sampled_from([1e-3, 0.1, 1.0]))
def test_constants_that_were_trained_are_bounded_exactly(seed: int, size: float) -> None:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 3, 6, 6, generator=random, dtype=torch.float64)
    kernel = torch.randn(4, 3, 3, 3, generator=random, dtype=torch.float64)
    change = 0.1 * torch.randn(4, 3, 3, 3, generator=random, dtype=torch.float64)
    attributes = {"pads": [1] * 4, "strides": [2, 2], "dilations": [1, 1], "group": 1}
    run: Callable[..., Any] = OPERATIONS["Conv"]
    made = run(attributes, x, kernel)
    node = helper.make_node("Conv", ["x", "w"], ["y"])
    operands = [operand(x, size), Operand(kernel, float(change.norm()), change)]
    bound = RULES["Conv"](Step(node, attributes, operands, [made], {}))
    after = run(attributes, perturbed(x, size, random), kernel + change)
    assert float((after - made).norm()) <= bound * (1 + 1e-9)


def test_what_no_rule_covers_is_named() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(24, 48), nn.Linear(48, 24)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = torch.exp(self.last(torch.exp(self.first(x))))
            return out

    made = artifact_of(Odd(), mlp()[1])
    program = Program(made.runtime.artifact, torch.float64)
    one = between(made, made.names[0])
    (case,) = worst_cases(program, one, norms_of(program, one), tensors_of(made, 1))
    assert case.bound is None
    assert case.stopped == "Exp"
    assert np.isfinite(case.layers["last"])  # what it reads is rounded, and codes are finite
    scaling, scores = ([v[a:b] for v in made.pool] for a, b in ((0, 12), (12, 48)))
    found = certify(
        made.runtime, program_reference(made.runtime.artifact, made.original), made.original,
        Slices(scaling, scores), CertifyConfig(worst_case=True),
    )  # fmt: skip
    assert {entry.unavailable for entry in found.entries} == {"worst_case: Exp"}
    assert all(entry.worst_case is None and entry.first_order for entry in found.entries)


def test_indices_and_conditions_must_be_certain() -> None:
    value = torch.randn(1, 4, dtype=torch.float64)
    index = torch.tensor([0, 0, 2])
    node = helper.make_node("Gather", ["x", "i"], ["y"])
    made = value.index_select(1, index)
    sure = Step(node, {"axis": 1}, [operand(value, 1.0), operand(index, 0.0)], [made], {})
    assert RULES["Gather"](sure) == pytest.approx(math.sqrt(2))  # one element stands there twice
    unsure = replace(sure, operands=[operand(value, 1.0), operand(index, 0.5)])
    with pytest.raises(StoppedError, match="not certain"):
        RULES["Gather"](unsure)
    for kind in ("Div", "Cast", "Where"):
        zero = operand(torch.zeros(1, 4, dtype=torch.float64), 0.5)
        parts = (
            [zero, operand(value, 1.0), zero] if kind == "Where" else [operand(value, 1.0), zero]
        )
        step = Step(helper.make_node(kind, ["a", "b"], ["y"]), {}, parts, [index[:1]], {})
        with pytest.raises(StoppedError):
            RULES[kind](step)


def bounded(model: nn.Module, inputs: Inputs, samples: int = 8) -> list[tuple[float, float]]:
    """(drift, bound) of each sample at every profile of a network."""
    made = artifact_of(model, inputs)
    x, program = tensors_of(made, samples), Program(made.runtime.artifact, torch.float64)
    found = []
    for name in made.names:
        one = between(made, name)
        cases = worst_cases(program, one, norms_of(program, one), x)
        assert not any(case.stopped for case in cases)
        moved = (program(one, x, 1.0) - program(one, x)).flatten(1).norm(dim=1)
        found += [(float(d), case.bound or 0.0) for d, case in zip(moved, cases, strict=True)]
    return found


def test_rms_norms_and_silu_are_known_by_their_parts() -> None:
    made = made_of("llama")
    kinds = [node.op_type for node in made.runtime.artifact.graph().graph.node]
    assert {"Reciprocal", "Sigmoid"} <= set(kinds)  # neither is one node, and neither has a rule
    assert "Reciprocal" not in RULES
    # With caps by the norms the bound of a language model stays near the size of its output.
    program = Program(made.runtime.artifact, torch.float64)
    one = between(made, made.names[-1])
    (case,) = worst_cases(program, one, norms_of(program, one), tensors_of(made, 1))
    assert case.bound is not None
    assert case.bound < 20 * case.size


class Gated(nn.Module):
    """Halves of one tensor: the gate is not the sigmoid of what it opens."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.last = nn.Linear(24, 48), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.both(x).chunk(2, dim=-1)
        out: Tensor = self.last(value * torch.sigmoid(gate))
        return out


class Twice(nn.Module):
    """One layer on tensors of very different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.last = nn.Linear(32, 32), nn.Linear(32, 24)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.shared(30 * torch.relu(self.shared(x))))
        return out


class Tied(nn.Module):
    """A table that is also multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(40, 32), nn.Linear(32, 32)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.relu(self.mix(self.table(ids))) @ self.table.weight.T


class Latent(nn.Module):
    """A layer that reads a constant, and attention over it."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 4, 24))
        self.query, self.value = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(self.latents) @ x.transpose(1, 2)
        out: Tensor = scores.softmax(dim=-2) @ self.value(x)
        return out


@pytest.mark.parametrize("network", [Gated, Twice, Tied, Latent])
def test_networks_that_look_like_others_are_bounded_too(network: type[nn.Module]) -> None:
    torch.manual_seed(1)
    inputs = torch.randn(80, 6, 24) if network is Latent else torch.randn(80, 24)
    if network is Twice:
        inputs = torch.randn(80, 32)
    if network is Tied:
        inputs = torch.randint(0, 40, (80, 5))
    assert all(drift <= bound for drift, bound in bounded(network(), inputs))


@cache
def two_layers() -> Made:
    torch.manual_seed(0)
    layers = (nn.Linear(32, 32, bias=False) for _ in range(2))
    return artifact_of(nn.Sequential(*layers), torch.randn(80, 32))


def linear_pair(first: float, second: float, change: float) -> tuple[Made, Executed]:
    """z = W2 W1 x with multiples of the identity, each changed by another; weights made up."""
    made = two_layers()
    found = between(made, made.names[-1])
    eye = torch.eye(32, dtype=torch.float64)
    layers = {
        name: Layer(found.layers[name].spec, size * eye, ((size + change) * eye,), {})
        for name, size in zip(found.layers, (first, second), strict=True)
    }
    fine = {
        name: replace(grid, scale=1e-9, low=-1e3, high=1e3) for name, grid in found.grids.items()
    }
    return made, Executed(layers, {}, {}, fine)


def test_the_papers_bound_is_violated_where_ours_holds() -> None:
    """Eq. (main bound) keeps the original's activations and the original's gains: what two changed
    layers do together is in neither."""
    made, one = linear_pair(0.1, 0.1, 1.0)
    program = Program(made.runtime.artifact, torch.float64)
    x = tensors_of(made, 5)
    drift = (program(one, x, 1.0) - program(one, x)).norm(dim=1)
    start = EstimateConfig(samples=5, path_samples=0)
    papers = estimate(program, {"": one}, x, start)[""]
    sizes = program(one, x).norm(dim=1)
    assert (torch.from_numpy(papers.spectral_of) * sizes < 0.5 * drift).all()
    cases = worst_cases(program, one, norms_of(program, one), x)
    assert all(case.bound is not None and case.bound >= float(d)
               for case, d in zip(cases, drift, strict=True))  # fmt: skip
    assert float(cases[0].bound or 0) < 1.01 * float(drift[0])  # and is tight here
    # Taken along the way, gains and activations make the estimate hold too.
    along = estimate(program, {"": one}, x, EstimateConfig(samples=5, path_samples=5))[""]
    assert along.spectral * float(sizes.square().mean().sqrt()) > float(drift.max()) / 1.2


def test_a_block_that_amplifies_shows_in_the_gain() -> None:
    """Paper C.4 (4): h -> gamma h behind a layer; a tiny residual drifts by gamma times as much."""
    gains = {}
    for gamma in (1.0, 50.0):
        made, one = linear_pair(1.0, gamma, 1e-3)
        program = Program(made.runtime.artifact, torch.float64)
        found = estimate(program, {"": one}, tensors_of(made, 4), EstimateConfig(samples=4))[""]
        gains[gamma] = found.layers["0"].gain
        cases = worst_cases(program, one, norms_of(program, one), tensors_of(made, 4))
        drift = program(one, tensors_of(made, 4), 1.0) - program(one, tensors_of(made, 4))
        assert all((case.bound or 0) >= float(d) for case, d in
                   zip(cases, drift.norm(dim=1), strict=True))  # fmt: skip
    assert gains[50.0] == pytest.approx(50 * gains[1.0], rel=0.02)


def test_heavy_tails_loosen_the_pointwise_figure_not_the_guarantee() -> None:
    """Paper C.4 (1)."""
    torch.manual_seed(0)
    sizes = torch.distributions.StudentT(1.5).sample((400, 1)).abs() + 0.1
    inputs = torch.randn(400, 24) * sizes
    made = artifact_of(nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 24)), inputs)
    parts = [[v[a:b] for v in made.pool] for a, b in ((0, 60), (60, 220), (220, 368))]
    config = CertifyConfig(measures=("absolute",), worst_case=True)
    found = certify(
        made.runtime, program_reference(made.runtime.artifact, made.original), made.original,
        Slices(*parts), config,
    )  # fmt: skip
    tiny = found.entries[0]
    assert tiny.spectral is not None
    assert tiny.spectral_pointwise is not None
    assert tiny.spectral_pointwise > 5 * tiny.epsilon
    assert tiny.measures["absolute"].epsilon > 2 * tiny.measures["absolute"].mean
    assert found.held_out is not None
    low, _ = found.held_out.expected
    assert found.held_out.coverage >= low


def test_sharp_attention_raises_gains_and_stays_bounded() -> None:
    """Paper C.4 (3): large queries and keys make the softmax steep."""

    class Attention(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.query, self.key, self.value, self.out = (nn.Linear(24, 24) for _ in range(4))
            self.scale = scale

        def forward(self, x: Tensor) -> Tensor:
            scores = self.scale * self.query(x) @ self.key(x).transpose(1, 2)
            out: Tensor = self.out(scores.softmax(dim=-1) @ self.value(x))
            return out

    gains = {}
    for scale in (0.05, 1.0):
        torch.manual_seed(0)
        made = artifact_of(Attention(scale), torch.randn(80, 6, 24))
        program = Program(made.runtime.artifact, torch.float64)
        one = between(made, made.names[0])
        x = tensors_of(made, 6)
        found = estimate(program, {"": one}, x, EstimateConfig(samples=6))[""]
        gains[scale] = found.layers["query"].gain
        cases = worst_cases(program, one, norms_of(program, one), x)
        drift = (program(one, x, 1.0) - program(one, x)).flatten(1).norm(dim=1)
        assert all(case.bound is not None and case.bound >= float(d)
                   for case, d in zip(cases, drift, strict=True))  # fmt: skip
    assert gains[1.0] > 5 * gains[0.05]


def test_residuals_are_of_the_weights_the_kernels_multiply_by() -> None:
    """Paper C.4 (5): on kernels that need 7 bits the executed weight is another one."""
    made = made_of("mlp")
    name, program = made.names[-1], Program(made.runtime.artifact, torch.float64)
    wide, narrow = (residuals_of(program, between(made, name, bits)) for bits in (8, 7))
    assert all(narrow[layer] > 1.2 * wide[layer] for layer in wide)
    entries = made.runtime.artifact.entries
    forms = made.runtime.forms[name]
    assert set(entries) == set(forms)
