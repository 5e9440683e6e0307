"""What a plan will cost, before any of it runs. Pure."""
