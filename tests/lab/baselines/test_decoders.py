"""Baselines of models with states: they read and write as the original does, tied tables stay."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lab.baselines import BASELINES, Baseline, Task
from lab.baselines.finetune import Training, looked_up, to_openvino, weighted
from lab.baselines.layers import weight_layers
from t3c.compression.decoder import Decoder
from t3c.engines.openvino import OpenVINO

transformers = pytest.importorskip("transformers")
ENGINE = OpenVINO(1)
WORDS = 60


def decoder(*, tied: bool = True) -> Decoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=WORDS, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=96, max_position_embeddings=64,
            initializer_range=0.2, tie_word_embeddings=tied,
        )  # fmt: skip
        return Decoder(transformers.LlamaForCausalLM(config)).eval()


def texts(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, WORDS, (count, 12), generator=torch.Generator().manual_seed(seed))


def made(name: str, model: Decoder, activations: str = "float") -> Baseline:
    training = Training(model, texts(32), 1.0, batch=8, steps=3)
    task = Task(b"", texts(16), ENGINE, activations, True, training)  # type: ignore[arg-type]
    return BASELINES[name](task)


def read_in_two(baseline_or_graph: object, ids: np.ndarray) -> np.ndarray:
    """Logits of ids of which the first 7 are read before the others."""
    session = ENGINE.compile_read(baseline_or_graph)  # type: ignore[arg-type]
    first, *states = session.run([ids[:, :7]])
    kept = [state.copy() for state in states]
    second, *_ = session.run([ids[:, 7:8], *states])
    third, *_ = session.run([ids[:, 7:], *states])
    # What was handed over is the caller's: later runs leave it alone.
    assert all(np.array_equal(a, b) for a, b in zip(states, kept, strict=True))
    np.testing.assert_allclose(second, third[:, :1], atol=1e-4)
    return np.concatenate([first, third], axis=1)


def test_a_traced_decoder_remembers_what_it_read() -> None:
    model, ids = decoder(), texts(1, 5)
    graph = to_openvino(model, ids)
    names = [port.any_name for port in graph.inputs]
    assert names == ["input_ids", *model.states(1, 1)]
    with torch.no_grad():
        wanted = model(ids).numpy()
    np.testing.assert_allclose(read_in_two(graph, ids.numpy()), wanted, atol=1e-3)


@pytest.mark.parametrize("name", ["ptq8w", "ptq4", "sparsegpt", "lrft", "loracomp", "kdptq"])
def test_methods_leave_a_decoder_that_remembers(name: str) -> None:
    model, ids = decoder(), texts(1, 5)
    found = made(name, model)
    with torch.no_grad():
        wanted = model(ids).numpy()
    drift = np.linalg.norm(read_in_two(found.model, ids.numpy()) - wanted) / np.linalg.norm(wanted)
    assert 0 < drift < (0.05 if name == "ptq8w" else 1.5)  # of random weights little is left
    assert found.size_bytes > WORDS * 48  # the table at 8 bits at least


def test_activations_of_eight_bits_remember_too() -> None:
    model, ids = decoder(), texts(1, 5)
    found = made("ptq8", model, "int8")
    with torch.no_grad():
        wanted = model(ids).numpy()
    drift = np.linalg.norm(read_in_two(found.model, ids.numpy()) - wanted) / np.linalg.norm(wanted)
    assert drift < 0.2


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_left_alone_where_it_is_the_table(tied: bool) -> None:
    model = decoder(tied=tied)
    head = [name for name in weighted(model) if "lm_head" in name]
    assert head == ([] if tied else ["model.lm_head"])
    assert ("model.lm_head" in weight_layers(model)) is not tied
    assert len(looked_up(model)) == 1
    assert sum("layers." in name for name in weighted(model)) == 14
