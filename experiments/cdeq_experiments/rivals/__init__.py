"""Explicit models that equilibrium models are compared with."""
