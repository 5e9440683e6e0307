"""Module classes whose fused weights we know how to split, by class name, so that their library need not be imported."""
