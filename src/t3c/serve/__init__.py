"""HTTP over the runtime: budgets by request, load-driven switching, a dashboard, many machines."""
