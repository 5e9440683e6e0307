"""What `train` and `inspect` share: from a config file and overrides to a config that is known to be good."""

from __future__ import annotations

from collections.abc import Sequence

from layerwise.config.load import Loaded, Override, load_what_fits
from layerwise.config.validate import validate
from layerwise.errors import ConfigError, Problem
from layerwise.routing.files import read_rules


def load_settings(path: str | None, overrides: Sequence[Override], more: Sequence[Problem] = ()) -> Loaded:
    """Load and validate; one `ConfigError` holds every problem, `more` (of the command's own flags) included."""
    loaded = load_what_fits(path, overrides)
    problems = [*loaded.problems, *validate(loaded.config, loaded.in_doubt), *more]
    problems = [*problems, *_rule_problems(loaded.config.routing.rules_file, problems)]
    if problems:
        raise ConfigError(problems)
    return loaded


def _rule_problems(path: str, known: Sequence[Problem]) -> Sequence[Problem]:
    """What is wrong inside the file of rules, unless it is already known that there is none to read."""
    if any(problem.where == "routing.rules_file" for problem in known):
        return ()
    try:
        read_rules(path)
    except ConfigError as error:
        return error.problems
    return ()
