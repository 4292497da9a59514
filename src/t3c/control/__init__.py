"""Which point for which layer: menus as chains, allocation by knapsack."""
