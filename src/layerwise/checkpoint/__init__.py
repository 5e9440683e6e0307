"""Checkpoints: a model's weights and optimizer state in files that belong to the model, not to the ranks that wrote them."""
