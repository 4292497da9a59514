from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lab.spectral_penalty import SpectralPenalty, observe_reach
from oracles import first_order_drift
from t3c.certify.penalty import Penalty, first_order_penalty
from t3c.convert import elasticize_, state_of
from t3c.nn import elastic_layers, elastic_weights
from t3c.nn.inputs import Inputs, select
from t3c.spec import LayerPoint, Profile

Built = tuple[nn.Module, Inputs]
PENALTIES: dict[str, Callable[[int], Penalty]] = {
    "first_order": lambda _: first_order_penalty,
    "spectral": SpectralPenalty,
}


def convolutional() -> Built:
    """In-place activations, a grouped and a strided kernel, a norm."""
    model = nn.Sequential(
        nn.Conv2d(8, 32, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
        nn.Conv2d(64, 64, 3, stride=2, groups=4), nn.Flatten(), nn.Linear(256, 96), nn.Tanh(),
        nn.Linear(96, 6),
    )  # fmt: skip
    return model.eval(), torch.randn(4, 8, 6, 6)


def attentive() -> Built:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=32,
    )  # fmt: skip
    mask = torch.ones(4, 12, dtype=torch.long)
    mask[:, 9:] = 0
    ids = torch.randint(0, 100, (4, 12))
    model = transformers.BertForSequenceClassification(config)
    return model, {"input_ids": ids, "attention_mask": mask}


def tied() -> Built:
    """A table that is the head's weight too."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=100, n_positions=16, n_embd=64, n_layer=1, n_head=4, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config), {"input_ids": torch.randint(0, 100, (4, 12))}


def rectified(outputs: int = 1) -> Built:
    model = nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs)
    )
    return model, torch.randn(4, 32)


BUILDERS: list[Callable[[], Built]] = [convolutional, attentive, tied, rectified]


def elastic(build: Callable[[], Built]) -> tuple[nn.Module, Profile, Inputs]:
    """An elastic model and the profile of its lowest ranks."""
    torch.manual_seed(1)
    model, inputs = build()
    elasticize_(model, inputs)
    plans = state_of(model).plan.layers
    return model, Profile("low", {p.spec.name: LayerPoint(p.ranks[0], 6) for p in plans}), inputs


@pytest.mark.parametrize("build", BUILDERS)
def test_the_first_order_penalty_is_the_mean_first_order_drift(
    build: Callable[[], Built],
) -> None:
    model, profile, inputs = elastic(build)
    with torch.no_grad():  # trained parameters that are not elastic count too
        for name, value in model.named_parameters():
            if name.endswith("bias"):
                value.add_(0.01 * torch.randn_like(value))
    original = state_of(model).original
    penalty = first_order_penalty(model, original, profile, inputs)
    wanted = first_order_drift(model, original, profile, inputs).mean()
    assert float(penalty.detach()) == pytest.approx(wanted, rel=1e-4)
    assert wanted > 0.01


@pytest.mark.parametrize("kind", PENALTIES)
@pytest.mark.parametrize("build", [convolutional, attentive])
def test_gradients_reach_what_the_profile_uses_and_nothing_else(
    build: Callable[[], Built], kind: str
) -> None:
    model, profile, inputs = elastic(build)
    original = state_of(model).original.requires_grad_(True)
    PENALTIES[kind](0)(model, original, profile, inputs).backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None for p in original.parameters())
    factored = 0
    for name, weight in elastic_weights(model).items():
        point = profile.points[name]
        if weight.spec.stored_dense(point):
            assert weight.dense.grad is not None
            assert weight.dense.grad.any()
            continue
        assert weight.dense.grad is None
        assert weight.factors is not None
        shapes = weight.spec.stage_shapes(point.rank)
        for stage, (out, into, *_) in zip(weight.factors.parameters(), shapes, strict=True):
            assert stage.grad is not None
            assert stage.grad[:out, :into].any()
            assert not stage.grad[out:].any()
            assert not stage.grad[:, into:].any()
            factored += stage.grad.shape[0] > out or stage.grad.shape[1] > into
    assert factored > 0


@pytest.mark.parametrize("build", [convolutional, attentive])
def test_the_gradient_is_the_slope_of_the_drift(build: Callable[[], Built]) -> None:
    """Along a change of a bias, which no rounding hides."""
    model, profile, inputs = elastic(build)
    original = state_of(model).original
    bias = [p for n, p in model.named_parameters() if n.endswith("bias")][-2]
    direction = torch.randn_like(bias)

    def drift(at: float) -> float:
        with torch.no_grad():
            bias.add_(at * direction)
            value = float(first_order_penalty(model, original, profile, inputs))
            bias.sub_(at * direction)
        return value

    penalty = first_order_penalty(model, original, profile, inputs)
    (gradient,) = torch.autograd.grad(penalty, [bias])
    slope = (drift(1e-3) - drift(-1e-3)) / 2e-3
    assert float((gradient * direction).sum()) == pytest.approx(slope, rel=2e-2)


@pytest.mark.parametrize("kind", PENALTIES)
@pytest.mark.parametrize("build", [convolutional, attentive])
def test_descent_lowers_the_penalty(build: Callable[[], Built], kind: str) -> None:
    """From factors beside the best: those of an SVD have the least spectral norm there is."""
    model, profile, inputs = elastic(build)
    original = state_of(model).original
    with torch.no_grad():
        for weight in elastic_weights(model).values():
            first = weight.dense if weight.factors is None else weight.stored_stages()[0][:1]
            first.mul_(1.8)

    def measure() -> float:
        with torch.no_grad():
            return float(PENALTIES[kind](0)(model, original, profile, inputs))

    before, penalty = measure(), PENALTIES[kind](0)
    optimizer = torch.optim.Adam(model.parameters(), 3e-4)
    for _ in range(15):
        optimizer.zero_grad()
        penalty(model, original, profile, inputs).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert measure() < {"first_order": 0.6, "spectral": 0.97}[kind] * before


def spectral_by_hand(model: nn.Module, profile: Profile, x: Tensor) -> float:
    """sum_l ||J_l||_F ||dW_l||_2 ||a_{l-1}|| / ||z|| of one sample of a plain chain of layers."""
    state = state_of(model)
    weights, a, total = elastic_weights(model), x, 0.0
    layers = list(state.original)  # type: ignore[call-overload]
    for index, layer in enumerate(layers):
        h = layer(a)
        if str(index) in weights:
            rest = nn.Sequential(*layers[index + 1 :])
            jacobian = torch.func.jacrev(rest)(h).flatten(0, 1).flatten(1)
            change = weights[str(index)].weight_at(profile.points[str(index)]) - layer.weight
            norm = torch.linalg.matrix_norm(change.detach(), 2)
            total += float(jacobian.norm() * norm * a.norm())
        a = h
    return total / float(a.norm())


def test_the_spectral_penalty_is_the_bound_and_over_the_first_order() -> None:
    """With one output a sign tells the whole Jacobian; of one sample all means are its own."""
    model, profile, inputs = elastic(rectified)
    original = state_of(model).original
    for sample in range(2):
        x = select(inputs, slice(sample, sample + 1))
        assert isinstance(x, Tensor)
        penalty = SpectralPenalty()
        with torch.no_grad():
            values = [float(penalty(model, original, profile, x)) for _ in range(30)]
            first_order = float(first_order_penalty(model, original, profile, x))
        assert values[-1] == pytest.approx(spectral_by_hand(model, profile, x), rel=1e-2)
        assert values == pytest.approx(sorted(values), rel=1e-5)  # power iteration rises
        assert values[0] > 0.7 * values[-1]
        assert values[-1] >= first_order


def test_reach_is_the_jacobian_and_the_input_in_the_mean() -> None:
    model, _, inputs = elastic(lambda: rectified(20))
    original, random = state_of(model).original, torch.Generator().manual_seed(0)
    seen = [observe_reach(model, original, inputs, random) for _ in range(150)]
    for index, name in enumerate(elastic_weights(model)):
        cut = int(name)
        into = original[:cut](inputs)  # type: ignore[index]
        rest = original[cut + 1 :]  # type: ignore[index]
        jacobians = [
            torch.func.jacrev(rest)(h) if len(rest) else torch.eye(20)
            for h in original[cut](into)  # type: ignore[index]
        ]
        wanted = torch.stack([j.square().sum() for j in jacobians]).mean()
        got = torch.stack([s.gains[index] for s in seen]).mean()
        assert float(got) == pytest.approx(float(wanted), rel=0.1)
        size = into.square().sum(1).mean()
        torch.testing.assert_close(seen[0].sizes[index], size)
    torch.testing.assert_close(seen[0].output, original(inputs).norm(dim=1).mean())


def test_a_layer_changes_its_output_by_no_more_than_norm_times_size() -> None:
    model, profile, inputs = elastic(convolutional)
    original = state_of(model).original
    reach = observe_reach(model, original, inputs, torch.Generator())
    taken: dict[str, Tensor] = {}
    for name in elastic_weights(model):
        layer = original.get_submodule(name)
        layer.register_forward_hook(lambda _, args, __, n=name: taken.update({n: args[0]}))
    original(inputs)
    for size, (name, weight) in zip(reach.sizes, elastic_weights(model).items(), strict=True):
        before = original.get_submodule(name).get_parameter("weight")
        change = (weight.weight_at(profile.points[name]) - before).detach()
        elastic_layer = elastic_layers(model)[name]
        moved = elastic_layer.apply_weight(taken[name], change)
        norm = torch.linalg.matrix_norm(change.flatten(1), 2)
        assert (moved.square().sum() / 4).sqrt() <= 1.001 * norm * size.sqrt()


def test_shared_rows_and_ids_count_as_what_they_are() -> None:
    """The tied weight is run on ids and on hidden states; positions have no batch of their own."""
    model, _, inputs = elastic(tied)
    hidden: list[Tensor] = []
    original = state_of(model).original
    head = original.get_submodule("lm_head")
    handle = head.register_forward_hook(lambda _, args, __: hidden.append(args[0].detach()))
    reach = observe_reach(model, original, inputs, torch.Generator())
    handle.remove()
    names = list(elastic_weights(model))
    mean = float(torch.stack([h.square().sum() for h in hidden]).mean())
    assert float(reach.sizes[names.index("lm_head")]) == pytest.approx(12 + mean, rel=1e-4)
    assert float(reach.sizes[names.index("transformer.wpe")]) == 12


def test_nothing_changed_is_no_drift_and_a_finite_gradient() -> None:
    model, profile, inputs = elastic(rectified)
    original = state_of(model).original
    with torch.no_grad():  # rounded already: the view is the weight
        for plan in state_of(model).plan.layers:
            weight = elastic_weights(model)[plan.spec.name]
            there = weight.weight_at(profile.points[plan.spec.name])
            original.get_submodule(plan.spec.name).get_parameter("weight").copy_(there)
    for kind in PENALTIES:
        model.zero_grad(set_to_none=True)
        value = PENALTIES[kind](0)(model, original, profile, inputs)
        value.backward()  # type: ignore[no-untyped-call]
        assert float(value.detach()) == 0
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", PENALTIES)
def test_inputs_that_are_no_numbers_show(kind: str) -> None:
    model, profile, inputs = elastic(rectified)
    assert isinstance(inputs, Tensor)
    inputs[0] = float("nan")
    value = PENALTIES[kind](0)(model, state_of(model).original, profile, inputs)
    assert value.isnan()


@pytest.mark.parametrize("kind", PENALTIES)
def test_no_random_draw_is_taken_from_others(kind: str) -> None:
    model, profile, inputs = elastic(convolutional)
    before = torch.get_rng_state()
    one, two = (
        PENALTIES[kind](7)(model, state_of(model).original, profile, inputs) for _ in range(2)
    )
    assert torch.equal(one, two)
    assert torch.equal(torch.get_rng_state(), before)
