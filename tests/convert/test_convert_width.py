"""Units put in order on data, and layers narrowed by them instead of being factored."""

from __future__ import annotations

import copy
import json
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from t3c.certify.drift import relative_drift
from t3c.compression.widths import kept_units, known_units
from t3c.convert import ElasticConfig, elasticize_, order_units_, state_of, units
from t3c.convert.width import find_orders, narrowings, reorder_
from t3c.errors import ConvertError
from t3c.factor.compose import compose
from t3c.nn.inputs import call
from t3c.nn.layers import output_rows
from t3c.nn.units import Member, UnitGroup
from t3c.nn.view import at, elastic_weights
from t3c.spec import Factorization, LayerPoint, LayerSpec
from widths import BUILD, Narrow, data_of, example_of, narrow_model, narrow_of, plain

ROWS, COLUMNS, CORNER = Factorization.ROWS, Factorization.COLUMNS, Factorization.CORNER


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@torch.no_grad()
@pytest.mark.parametrize("name", BUILD)
def test_units_in_order_leave_the_function(name: str) -> None:
    model, inputs = plain(name)
    before, weights = call(model, inputs), copy.deepcopy(model.state_dict())
    found = order_units_(model, example_of(inputs), data_of(inputs))
    assert apart(call(model, inputs), before) < 1e-5
    assert len(found.groups) >= 3
    for group in found.groups:
        moved = model.state_dict()[f"{group.name}.weight"]
        assert not torch.equal(moved, weights[f"{group.name}.weight"])


@pytest.mark.parametrize("name", ["llama", "own"])
def test_an_order_is_found_again_and_can_be_kept(name: str) -> None:
    model, inputs = plain(name)
    other, third = copy.deepcopy(model), copy.deepcopy(model)
    example, data = example_of(inputs), data_of(inputs)
    found, again = order_units_(model, example, data), find_orders(other, example, data)
    assert all(torch.equal(v, third.state_dict()[n]) for n, v in other.state_dict().items())
    assert found.groups == again.groups
    known = known_units(json.loads(json.dumps(kept_units(again))))
    assert known.groups == found.groups
    for group, order in found.orders.items():
        assert torch.equal(order, known.orders[group])
    reorder_(third, known)
    assert all(torch.equal(v, third.state_dict()[n]) for n, v in model.state_dict().items())


@pytest.mark.parametrize("name", BUILD)
def test_layers_of_a_unit_have_one_ladder(name: str) -> None:
    narrow = narrow_of(name)
    plans = {plan.spec.name: plan for plan in narrow.plans}
    together = {frozenset(p.spec.name for p in unit.layers): unit for unit in units(narrow.plans)}
    for group in narrow.units.groups:
        if not plans[group.name].spec.cuts_inputs:
            continue  # it shares a layer with one that has another number of units
        mine = [plans[m.layer] for m in group.members]
        unit = next(unit for names, unit in together.items() if group.name in names)
        assert {plan.spec.name for plan in mine} <= {plan.spec.name for plan in unit.layers}
        assert len({plan.spec.unit for plan in unit.layers}) == 1
    for unit in together.values():
        if not unit.layers[0].spec.narrows:
            continue
        assert len({plan.shares for plan in unit.layers}) == 1
        assert unit.levels[-1] == 1.0
        assert len(unit.levels) >= 3
        for level in unit.points():
            for layer, point in unit.layer_points(level).items():
                assert point.rank == round(level.share * plans[layer].spec.full_rank)
    for plan in narrow.narrowed:
        assert list(plan.ranks) == sorted(set(plan.ranks))
        assert plan.ranks[-1] == plan.spec.full_rank
        whole = plan.spec.out_channels // 6 // 8 * 8
        assert plan.spec.correction == (whole if plan.spec.cuts_inputs else 0)
    assert any(plan.spec.correction for plan in narrow.narrowed)


def test_a_bottleneck_is_narrowed_as_one() -> None:
    """Its first layer's outputs are its second's inputs, whose outputs are its third's."""
    plans = {plan.spec.name: plan for plan in narrow_of("resnet").plans}
    for stage, block in ((0, 0), (1, 0), (1, 1)):
        name = f"resnet.encoder.stages.{stage}.layers.{block}.layer"
        three = [plans[f"{name}.{i}.convolution"] for i in range(3)]
        assert [plan.spec.factorization for plan in three] == [ROWS, CORNER, COLUMNS]
        assert len({plan.spec.unit for plan in three}) == 1
        assert [plan.spec.correction > 0 for plan in three] == [
            False, plans[f"{name}.1.convolution"].spec.out_channels >= 48, True
        ]  # fmt: skip
    assert len({plan.spec.unit for plan in plans.values() if plan.spec.narrows}) == 3


def group(name: str, count: int, *members: tuple[str, int, int]) -> UnitGroup:
    return UnitGroup(name, count, tuple(Member(*member) for member in members))


def test_groups_that_share_a_layer_have_to_agree() -> None:
    first = group("b", 64, ("a", 1, 0), ("b", 0, 1))
    same, more = (group("c", n, ("b", 1, 0), ("c", 0, 1)) for n in (64, 128))
    found = narrowings([first, same])[0]
    assert [found[n].factorization for n in "abc"] == [ROWS, CORNER, COLUMNS]
    assert {one.unit for one in found.values()} == {"b"}
    found = narrowings([first, more])[0]  # the one that comes later is left out
    assert [found[n].factorization for n in "ab"] == [ROWS, COLUMNS]
    assert "c" not in found
    assert "is narrowed with b, to other numbers" in narrowings([first, more])[1]["c"]
    # As many units of two channels each are not as many channels.
    pairs = group("c", 64, ("b", 2, 0), ("c", 0, 2))
    assert "c" not in narrowings([first, pairs])[0]
    assert [narrowings([pairs, first])[0][n].factorization for n in "bc"] == [ROWS, COLUMNS]


def test_a_chain_of_groups_becomes_one_unit_whatever_comes_first() -> None:
    names = "abcd"
    chained = [group(y, 64, (x, 1, 0), (y, 0, 1)) for x, y in pairwise(names)]
    for order in ([0, 1, 2], [2, 1, 0], [0, 2, 1]):
        found, left = narrowings([chained[i] for i in order])
        assert not left
        assert [found[n].factorization for n in names] == [ROWS, CORNER, CORNER, COLUMNS]
        assert len({one.unit for one in found.values()}) == 1


def test_units_of_another_model_are_refused() -> None:
    model, inputs = plain("own")
    config = ElasticConfig(widths=(group("other", 64, ("gate", 1, 0), ("other", 0, 1)),))
    with pytest.raises(ConvertError, match="does not have the 64 units of 'other'"):
        elasticize_(model, example_of(inputs), config)


@torch.no_grad()
@pytest.mark.parametrize("reader", ["down", "reduce"])
def test_what_is_read_by_a_layer_that_stays_is_not_left_out(reader: str) -> None:
    """An excluded reader multiplies all its inputs: no narrower maker would serve it."""
    narrow = narrow_model(*plain("own"), exclude=(reader,))
    members = next(g.members for g in narrow.units.groups if g.name == reader)
    for member in members:
        assert member.layer not in {plan.spec.name for plan in narrow.narrowed}
    assert narrow.narrowed
    assert any(p.rank_elastic and not p.spec.narrows for p in narrow.plans)  # by rank instead


@torch.no_grad()
@pytest.mark.parametrize("name", ["own", "resnet", "llama"])
def test_a_view_is_a_prefix_with_its_correction(name: str) -> None:
    narrow, corrected = narrow_of(name), 0
    weights = elastic_weights(narrow.model)
    for plan in narrow.narrowed:
        weight, spec = weights[plan.spec.name], plan.spec
        for bits in (4, 8):
            whole = weight.weight_at(LayerPoint(plan.ranks[-1], bits))
            step = weight.dense.flatten(1).abs().amax(1) / (2 ** (bits - 1) - 1)
            off = (whole - weight.dense).flatten(1).abs().amax(1)
            assert (off <= 1.01 * step).all()
            for width in plan.ranks[:-1]:
                found = weight.weight_at(LayerPoint(width, bits))
                assert found.shape == weight.dense.shape
                if not spec.cuts_inputs:
                    assert torch.equal(found[:width], whole[:width])
                    assert torch.equal(found[width:], weight.dense[width:])
                    continue
                rows = spec.corner(width)[0]
                assert not found[:rows, width:].any()
                assert torch.equal(found[rows:], weight.dense[rows:])  # nothing reads them
                stages = weight.corrections_at(width)
                assert bool(stages) == (spec.correction > 0)
                kept = whole[:rows, :width].clone()
                if stages:
                    corrected += 1
                    added = compose(stages)
                    assert added.shape == torch.Size(spec.corner(width))
                    kept += added
                limit = 0.1 * float((kept - whole[:rows, :width]).norm()) + 1e-6  # codes of 6 bits
                assert float((found[:rows, :width] - kept).norm()) <= limit
    assert corrected > 0


@torch.no_grad()
def inputs_of(narrow: Narrow) -> dict[str, Tensor]:
    """Return what narrowed layers read in the original, on all samples."""
    seen: dict[str, list[Tensor]] = {}
    original, hooks = state_of(narrow.model).original, []
    for plan in narrow.narrowed:
        layer = original.get_submodule(plan.spec.name)
        name = plan.spec.name
        hooks.append(
            layer.register_forward_hook(
                lambda _, args, out, name=name: seen.setdefault(name, []).append(args[0])
            )
        )
    call(original, narrow.inputs)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(rows) for name, rows in seen.items()}


def error(spec: LayerSpec, layer: nn.Module, weight: Tensor, x: Tensor, wanted: Tensor) -> float:
    """Return how far a layer's leading outputs are from those wanted with another weight."""
    layer.get_parameter("weight").data.copy_(weight)
    found = output_rows(spec, layer(x))[:, : wanted.shape[1]]
    return apart(found, wanted)


@torch.no_grad()
@pytest.mark.parametrize("name", ["own", "resnet", "bert"])
def test_a_correction_is_never_worse_than_none(name: str) -> None:
    """In what a layer puts out for the data it is fitted to, in float."""
    narrow = narrow_model(*plain(name), metric="inputs")
    weights, read, gained = elastic_weights(narrow.model), inputs_of(narrow), []
    for plan in narrow.narrowed:
        spec, weight = plan.spec, weights[plan.spec.name]
        layer = copy.deepcopy(state_of(narrow.model).original.get_submodule(spec.name))
        if not spec.correction:
            continue
        if layer.bias is not None:
            layer.bias.data.zero_()
        x = read[spec.name]
        wanted = output_rows(spec, layer(x))

        before = 1.0
        for width in plan.ranks[:-1]:
            cut, rows = weight.dense.clone(), spec.corner(width)[0]
            cut[:, width:] = 0
            none = error(spec, layer, cut, x, wanted[:, :rows])
            cut[:rows, :width] += compose(weight.corrections_at(width))
            some = error(spec, layer, cut, x, wanted[:, :rows])
            assert some <= none * (1 + 1e-3) + 1e-6
            if spec.factorization is COLUMNS:
                assert some <= before * 1.02 + 1e-6
            before = some
            gained.append(some / max(none, 1e-12))
    assert len(gained) > 10
    assert sum(gained) / len(gained) < 0.9


def test_nothing_is_made_up_for_without_data() -> None:
    narrow = narrow_model(*plain("own"), calibrated=False)
    weights, count = elastic_weights(narrow.model), 0
    for plan in narrow.narrowed:
        for width in plan.ranks[:-1]:
            for stage in weights[plan.spec.name].corrections_at(width):
                assert not stage.any()
                count += 1
    assert count > 0


@torch.no_grad()
@pytest.mark.parametrize("name", BUILD)
def test_drift_falls_as_width_grows(name: str) -> None:
    narrow = narrow_of(name)
    truth = call(state_of(narrow.model).original, narrow.inputs)
    drifts = []
    for share in (0.25, 0.5, 0.75, 1.0):
        with at(narrow.model, narrow.profile("p", share, 8)):
            drifts.append(float(relative_drift(call(narrow.model, narrow.inputs), truth).mean()))
    assert drifts[0] > drifts[1] > drifts[2] > drifts[3]
    assert drifts[2] < 0.7 * drifts[0]
    assert drifts[3] < 0.03


def drift_of(narrow: Narrow, share: float) -> float:
    truth = call(state_of(narrow.model).original, narrow.inputs)
    with torch.no_grad(), at(narrow.model, narrow.profile("p", share, 8)):
        return float(relative_drift(call(narrow.model, narrow.inputs), truth).mean())


@pytest.mark.parametrize("name", ["own", "llama", "vit"])
def test_corrections_lower_the_drift(name: str) -> None:
    without = narrow_model(*plain(name), calibrated=False)
    assert drift_of(narrow_of(name), 0.5) < drift_of(without, 0.5)
