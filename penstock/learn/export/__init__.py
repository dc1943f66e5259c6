"""Policies as files that act without penstock: the traced graph, its check against `predict`, and its contract."""
