"""The optimizer: param groups and rules on top of the engine's phases."""
