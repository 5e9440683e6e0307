"""From a model's params to routes: which rule updates each, why, and which logical matrices it holds. Pure."""
