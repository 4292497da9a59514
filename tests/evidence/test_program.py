from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from networks import artifact_of, made_of, mlp, tensors_of
from torch import nn

from lab.certified import Made
from t3c.artifact.graph import to_onnx
from t3c.certify.gains import GainConfig
from t3c.convert import elasticize_, state_of
from t3c.engines.torch import TorchSession
from t3c.errors import ConvertError, DataError
from t3c.evidence.along import batched, first_order, linearize
from t3c.evidence.estimates import EstimateConfig, estimate
from t3c.evidence.original import beside, read_onnx, to_original, write_original
from t3c.evidence.program import Executed, Program, executed
from t3c.nn.inputs import call, select, tensors


def between(made: Made, name: str, dtype: torch.dtype = torch.float64) -> Executed:
    runtime = made.runtime
    bits = runtime.device.weight_bits
    return executed(runtime.artifact, made.original, runtime.executions[name], bits, dtype)


@pytest.mark.parametrize("network", ["mlp", "cnn", "bert", "llama"])
def test_a_program_goes_from_the_original_to_what_is_deployed(network: str) -> None:
    made = made_of(network)
    x, program = tensors_of(made, 8), Program(made.runtime.artifact, torch.float64)
    with torch.no_grad():
        wanted = call(state_of(made.subject.model).original, select(made.subject.pool, slice(0, 8)))
    for name in made.names:
        one = between(made, name)
        assert torch.allclose(program(one, x).float(), wanted, atol=1e-4)
        deployed = TorchSession(made.runtime.graph(made.runtime.chain[name]))
        reference = deployed.run([value.numpy() for value in x])[0]
        # A value at the border of two codes may fall to either side in float32.
        gap = np.linalg.norm(program(one, x, 1.0).numpy() - reference) / np.linalg.norm(reference)
        assert gap < 5e-3


@pytest.mark.parametrize("network", ["cnn", "bert"])
def test_some_profiles_have_norms_of_their_own(network: str) -> None:
    """So what holds of these artifacts holds with norms that differ from the original's."""
    made = made_of(network)
    assert any(made.runtime.artifact.norms(name).gains for name in made.names)


@pytest.mark.parametrize("network", ["mlp", "cnn", "bert", "llama"])
def test_first_order_is_the_derivative_along_the_way(network: str) -> None:
    made = made_of(network)
    x, program = tensors_of(made, 4), Program(made.runtime.artifact, torch.float64)
    one, step = between(made, made.names[0]), 1e-6
    moved = (program(one, x, step) - program(one, x)).flatten(1) / step
    found = first_order(program, one, x)
    assert float((found - moved).norm()) <= 1e-3 * float(moved.norm())


def test_gains_are_those_of_the_jacobian() -> None:
    made = made_of("cnn")
    x, program = tensors_of(made, 3), Program(made.runtime.artifact, torch.float64)
    one = between(made, made.names[0])
    at = linearize(program, one, x, 0.0, GainConfig())
    names = [use.name for use in at.uses]
    assert names.index("head") == len(names) - 1
    assert torch.allclose(at.gains[-1], torch.ones(3, dtype=torch.float64))  # nothing is behind it
    below = linearize(program, one, x, 0.0, GainConfig(exact=0, probes=6, steps=3))
    assert float((below.gains / at.gains).max()) <= 1 + 1e-9
    assert float((below.gains / at.gains).min()) > 0.95


def test_estimates_of_layers_add_up_and_grow_as_ranks_fall() -> None:
    made = made_of("cnn")
    program = Program(made.runtime.artifact)
    profiles = {name: between(made, name, torch.float32) for name in made.names}
    config = EstimateConfig(samples=8, path_samples=2)
    found = estimate(program, profiles, tensors_of(made, 8), config)
    low, high = found[made.names[0]], found[made.names[-1]]
    assert low.first_order.mean() > high.first_order.mean() > 0
    assert low.spectral > high.spectral > high.first_order.mean()
    terms = low.layers.values()
    assert sum(term.spectral for term in terms) == pytest.approx(low.spectral)
    # One layer alone moves the output by no more than gain times residual times input.
    assert all(term.first_order <= 1.5 * term.spectral + 0.02 for term in terms)


def test_layers_without_a_batch_are_taken_one_sample_at_a_time() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places, self.mix = nn.Embedding(32, 24), nn.Linear(24, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.mix(x + self.places(torch.arange(4)))
            return out

    torch.manual_seed(0)
    made = artifact_of(Positions(), torch.randn(80, 4, 24))
    program, one = Program(made.runtime.artifact), between(made, made.names[0], torch.float32)
    assert not batched(program, one, tensors_of(made, 4))
    assert batched(
        Program(made_of("bert").runtime.artifact),
        between(made_of("bert"), "tiny", torch.float32),
        tensors_of(made_of("bert"), 2),
    )
    config = EstimateConfig(samples=4, path_samples=1)
    four = estimate(program, {"": one}, tensors_of(made, 4), config)[""]
    alone = estimate(program, {"": one}, tensors_of(made, 1), config)[""]
    assert four.first_order[0] == pytest.approx(alone.first_order[0], rel=1e-4)


def test_a_table_of_positions_counts_for_every_sample() -> None:
    made = made_of("bert")
    program = Program(made.runtime.artifact)
    one = between(made, made.names[0], torch.float32)
    several = linearize(program, one, tensors_of(made, 4), 0.0, GainConfig())
    single = linearize(program, one, tensors_of(made, 1), 0.0, GainConfig())
    assert torch.allclose(several.gains[:, :1], single.gains, rtol=1e-3)


def test_the_original_is_found_in_its_file(tmp_path: object) -> None:
    from pathlib import Path

    made, path = made_of("mlp"), Path(str(tmp_path)) / "original.onnx"
    write_original(made.subject.model, path)
    found = beside(made.runtime.artifact, read_onnx(path))
    for name, weight in made.original.weights.items():
        assert np.array_equal(found.weights[name], weight)
    onnx.checker.check_model(str(path))
    with pytest.raises(DataError, match="no such file"):
        read_onnx(path.with_name("none.onnx"))
    path.write_bytes(b"no model" * 40)
    with pytest.raises(DataError, match="not a model in ONNX"):
        read_onnx(path)


def test_an_original_that_is_another_network_is_refused() -> None:
    made = made_of("mlp")
    plain = to_onnx(state_of(made.subject.model).original, tensors(made.subject.pool)[0][:2])
    with pytest.raises(DataError, match=r"does not hold the weight of layer '0'"):
        beside(made.runtime.artifact, plain)
    for between in (nn.Tanh(), nn.LeakyReLU(0.3)):
        torch.manual_seed(0)
        layers = [nn.Linear(24, 48), between, nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 6)]
        other = nn.Sequential(*layers)
        elasticize_(other, torch.randn(2, 24))
        with pytest.raises(DataError, match="another network"):
            beside(made.runtime.artifact, to_original(other))


def test_norms_over_the_batch_are_refused() -> None:
    """Paper C.4 (2): what such a norm makes of a sample depends on the others of its batch."""
    layers = [nn.Linear(24, 48), nn.BatchNorm1d(48, track_running_stats=False), nn.Linear(48, 48)]
    model = nn.Sequential(*layers)
    with pytest.raises(ConvertError, match=r"layer '1' normalises by the statistics of its batch"):
        artifact_of(model, mlp()[1])
