"""Everything about a suite that is checked before it makes anything."""

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from moesaic.cli.checks.model_names import found_model
from moesaic.cli.checks.preflight import check_config, check_model
from moesaic.cli.machine.cores import usable_cores
from moesaic.cli.suite.processes import SuiteOptions, services_of
from moesaic.cli.suite.service_settings import check_settings

if TYPE_CHECKING:
    from moesaic.models.configuration.config import ModelConfig
    from moesaic.settings import ServiceSettings


class Prepared(NamedTuple):
    """A suite that can start as far as its model and its settings go."""

    options: SuiteOptions  # with the model's directory, so that no process asks the hub
    config: "ModelConfig"
    settings: dict[str, "ServiceSettings"]  # of each service, by its name


def prepared(options: SuiteOptions) -> Prepared:
    """Check a suite's model and settings, and download the model's weights once nothing is wrong.

    Raises:
        CommandError: something is wrong with them, or the model cannot be had.
    """
    name = options.model
    options = replace(options, model=found_model(name, weights=False))
    config = check_config(options.model)
    settings = check_settings(services_of(options, config.moe.num_experts, usable_cores()))
    found_model(name)
    return Prepared(options, check_model(options.model), settings)
