"""Modules on many ranks: hooks that feed the engine."""
