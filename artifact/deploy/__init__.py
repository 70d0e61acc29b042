"""For deployments: the gate that chooses a mode per request, and what a request mix costs under it."""
