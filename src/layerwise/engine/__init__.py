"""The engine: the phases of a step, in order, on memory and communication that others provide."""
