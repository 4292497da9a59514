"""A controller that decides as the knapsack does, to start training from."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import torch

from t3c.control.knapsack import allocations
from t3c.control.token import RESOURCES, Array
from t3c.errors import SpecError
from t3c.train.policy_net import KNOTS, Controller
from t3c.train.terrain import Terrain

SLOPE = 200.0  # how sharply a step is taken at its place
MARGIN = 5e-6  # of reach: a limit that is just met is met after rounding to float32
_LITTLE, _LEAST = 1e-2, 1e-7


@torch.no_grad()
def warm_start_(controller: Controller, terrains: Mapping[str, Terrain]) -> None:
    """Set the parameters so that the largest allocation of the hulls within all limits is taken.

    The reach is the share of the first known resource along that path of allocations, and every
    step is placed where the path takes it. The other resources are translated to it at the knots,
    so that a step is taken at most a knot's width too early or too late.
    """
    about = controller.about
    if list(terrains) != list(about.devices):
        raise SpecError(f"terrains of {', '.join(about.devices)} are needed, got {list(terrains)}")
    for device, terrain in terrains.items():
        points = {u: tuple(o.point for o in options) for u, options in terrain.chains.items()}
        if list(points.items()) != list(about.units.items()):
            raise SpecError(f"the chains of {device!r} are not those of the controller")
    if 1 < len(terrains) > controller.config.hidden:
        raise SpecError(f"{len(terrains)} devices need as many hidden units")
    places, levels = zip(
        *(_path(terrain, controller) for terrain in terrains.values()), strict=True
    )
    # A resource that any device is short of is short for all, since devices share the levels.
    rises = np.diff(np.min(levels, axis=0), axis=1, prepend=0.0)
    controller.reach.copy_(_free(controller, rises))
    controller.slope.fill_(controller.free(SLOPE))
    _quiet_network_(controller)
    _place_(controller, np.stack(places) - MARGIN)
    _wish_(controller)


def _path(terrain: Terrain, controller: Controller) -> tuple[Array, Array]:
    """Where each step is taken (S,), and the reach each resource allows at its knots (R, knots)."""
    indices = {
        unit: {option.point: index for index, option in enumerate(options)}
        for unit, options in terrain.chains.items()
    }
    path = [
        {unit: indices[unit][point] for unit, point in allocation.points.items()}
        for allocation in allocations(terrain.chains)
    ]
    taken = np.array([sum(terrain.shares[u][:, i] for u, i in at.items()) for at in path]).T
    # What a later allocation takes less of, this one need not wait for.
    taken = np.minimum.accumulate(taken[:, ::-1], axis=1)[:, ::-1]
    reach = next(shares for shares in taken if not np.isnan(shares).any())
    if (np.diff(reach) <= 0).any():  # allocations that only other resources tell apart
        reach = 0.99 * reach + 0.01 * np.linspace(0, 1, len(path))
    places = np.zeros(controller.about.steps)
    for at, (below, above) in enumerate(itertools.pairwise(path), start=1):
        for unit, rows in controller.about.rows.items():
            places[rows.start + below[unit] : rows.start + above[unit]] = reach[at]
    knots = np.linspace(0, 1, KNOTS)
    levels = np.ones((len(RESOURCES), len(knots)))
    for level, shares in zip(levels, taken, strict=True):
        if not np.isnan(shares).any():
            last = np.append(np.diff(shares) > 0, True)  # of allocations that take the same
            at_zero = ([0.0], [0.0]) if shares[0] > 0 else ([], [])
            level[:] = np.interp(
                knots, np.append(at_zero[0], shares[last]), np.append(at_zero[1], reach[last])
            )
    return places, levels


def _quiet_network_(controller: Controller) -> None:
    """A network that says little, with one hidden unit for each of several devices."""
    for name, weight in (("inward", _LITTLE), ("onward", _LITTLE), ("lift", _LITTLE / 10)):
        controller.get_parameter(name).fill_(controller.free(weight))
    controller.device.zero_()
    count = len(controller.device)
    if count > 1:
        own = torch.arange(count)
        controller.inward[own] = controller.free(_LEAST)
        controller.onward[own] = controller.free(_LEAST)
        controller.onward[own, own] = controller.free(2.0)
        controller.inward_bias[own] = 0.0
        controller.onward_bias[own] = 0.0
        controller.device[own, own] = 2.0


def _place_(controller: Controller, places: Array) -> None:
    """Place every step as given for each device (devices, S).

    What the network adds counts against the place. A step that a device takes earlier than the
    last of them is lifted by that device's own hidden unit, since lifts cannot be negative.
    """
    ones = torch.ones(1, len(RESOURCES), dtype=torch.float64)
    count = len(places)
    hidden = torch.cat([controller.budget(ones, device)[1] for device in range(count)])
    if count > 1:
        controller.lift[:, :count] = controller.free(_LEAST)
    wanted = SLOPE * torch.from_numpy(places) + hidden @ controller.weight("lift").T
    last = wanted.amax(dim=0)
    if count > 1:
        lifts = ((last - wanted).T / hidden[:, :count].diagonal()).numpy()
        controller.lift[:, :count] = _free(controller, lifts)
    controller.place.copy_(last / SLOPE)


def _wish_(controller: Controller) -> None:
    """Proposals that go with the reach from the share of the bottom to that of the top."""
    bottoms = [
        [points[0].level / points[-1].level, points[0].bits / points[-1].bits]
        for points in controller.about.units.values()
    ]
    low = torch.tensor(bottoms, dtype=torch.float64).clamp(0.01, 0.99).logit()
    high = torch.full_like(low, 0.99).logit()
    controller.wish_bias.copy_(low)
    controller.wish_slope.copy_(_free(controller, (high - low).numpy()))
    controller.wish_lift.fill_(controller.free(_LITTLE / 10))


def _free(controller: Controller, weights: Array) -> torch.Tensor:
    """The parameters that stand for weights of the budget path, at least a little above 0."""
    free = np.vectorize(controller.free, otypes=[float])
    return torch.from_numpy(free(np.maximum(weights, _LEAST)))
