"""What trainers of others need beside `layerwise.Optimizer`: as little as there is. `docs/integrations.md` has all of it."""
