from __future__ import annotations

import pytest

from lab.allocation.greedy import greedy
from lab.paths import within
from t3c.control.knapsack import allocations
from t3c.control.menu import Option
from t3c.errors import BudgetError
from t3c.spec import LayerPoint


def options(*figures: tuple[float, float]) -> list[Option]:
    return [Option(LayerPoint(i + 1, 4), *figure) for i, figure in enumerate(figures)]


CHAINS = {"a": options((1, 10), (2, 9), (3, 0)), "b": options((1, 10), (2, 8))}


def test_greedy_does_not_see_behind_a_poor_step() -> None:
    assert within(greedy(CHAINS), 4).squared_drift == 17
    assert within(allocations(CHAINS), 4).squared_drift == 10


@pytest.mark.parametrize("budget", range(8))
def test_the_largest_that_fits_is_taken(budget: int) -> None:
    path = greedy(CHAINS)
    fitting = [a for a in path if a.cost <= budget]
    assert within(path, budget) is (fitting[-1] if fitting else path[0])


def test_a_budget_that_is_no_number_is_refused() -> None:
    with pytest.raises(BudgetError, match="nan"):
        within(greedy(CHAINS), float("nan"))
