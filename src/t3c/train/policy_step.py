"""The controller beside the network: it draws profiles for budgets and learns how they did."""

from __future__ import annotations

from torch import Tensor, nn

from t3c.control.options import layer_profile
from t3c.spec import Profile
from t3c.train import policy_gradient as gradient
from t3c.train.config import TrainConfig
from t3c.train.controller import LOOSE, random_tokens
from t3c.train.policy_net import Controller, ControllerConfig
from t3c.train.schedules import noise, temperature
from t3c.train.targets import Targets
from t3c.train.terrain import Ground, Terrain
from t3c.train.warm_start import warm_start_

DEVICE = "counted"  # costs are counted work until a device is measured
CONTROLLED = "controlled"  # the name of profiles that the controller drew


class PolicyStep:
    """A controller that starts from the knapsack over counted work and trains a step at a time.

    By `gumbel` it descends the certificate's first-order drift of what it chooses; by `reinforce`
    the network's own distance from the original at the profile it drew, over a learned baseline.
    """

    def __init__(self, targets: Targets, config: TrainConfig) -> None:
        assert config.controller != "off"
        self.targets, self.config = targets, config
        terrain = Terrain(targets.chains, targets.shares)
        settings = ControllerConfig(method=config.controller, seed=config.seed)
        points = {u: tuple(o.point for o in options) for u, options in targets.chains.items()}
        self.controller = Controller(points, (DEVICE,), settings)
        warm_start_(self.controller, {DEVICE: terrain})
        self.value = gradient.Value(1, noise(config.seed, 0, "value"))
        self.module = nn.ModuleDict({"policy": self.controller, "value": self.value})
        self.ground = Ground.of(terrain)
        self.rate, self.batch = settings.learning_rate, settings.batch

    def profile(self, step: int) -> Profile:
        """What the controller draws for a random budget."""
        choice, _ = self._drawn(step)
        units = self.controller.about.units.items()
        indices = choice[0].argmax(dim=1).tolist()
        points = {name: chain[i] for (name, chain), i in zip(units, indices, strict=True)}
        return layer_profile(self.targets.units, points, CONTROLLED)

    def terms(self, step: int, profile: Profile, distance: float) -> dict[str, Tensor]:
        """The controller's terms; `distance` is the network's at the profile of the step.

        A profile that the controller did not draw says nothing of its choices: by `reinforce` there
        is no drift then.
        """
        limits = self._limits(step, self.batch)
        logits = self.controller(limits, 0)
        random = noise(self.config.seed, step, "choice")
        choice = gradient.straight_through(logits, temperature(step, self.config), random)
        terms = {
            "budget": self.ground.overrun(choice, limits).mean(),
            "entropy": -gradient.entropy(logits),
        }
        if self.config.controller == "gumbel":
            terms["drift"] = self.ground.log_drift(choice).mean()
        elif profile.name == CONTROLLED:
            terms["drift"] = self._reinforced(step, distance)
        return {name: term.float() for name, term in terms.items()}

    def _reinforced(self, step: int, distance: float) -> Tensor:
        """What to minimise for the profile of the step to be drawn as often as it did well."""
        _, log_prob = self._drawn(step)
        returns = log_prob.new_full((1,), -distance)
        return gradient.surrogate(log_prob, returns, self.value(self._limits(step, 1), 0))

    def _drawn(self, step: int) -> tuple[Tensor, Tensor]:
        """The choice of the step for its own budget, and its log probability."""
        logits = self.controller(self._limits(step, 1), 0)
        return gradient.draw(logits, noise(self.config.seed, step, "draw"))

    def _limits(self, step: int, count: int) -> Tensor:
        """Random budgets: loose in the first third of the run, then down to the least there is."""
        least = LOOSE if step < self.config.steps / 3 else 0.0
        random = noise(self.config.seed, step, f"limits {count}")
        return random_tokens(self.ground, least, count, random)
