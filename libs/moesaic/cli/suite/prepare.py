"""Everything about a suite that is checked before it makes anything."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from moesaic.cli.checks.model_names import found_model
from moesaic.cli.checks.preflight import check_config, check_model
from moesaic.cli.machine.cores import usable_cores
from moesaic.cli.suite.devices import (
    MACHINE,
    devices_named,
    memory_there_is,
    places_of,
    shared_out,
)
from moesaic.cli.suite.fitting import check_fits
from moesaic.cli.suite.memory_plan import Settings, SuiteMemory, plan_suite
from moesaic.cli.suite.options import SuiteOptions
from moesaic.cli.suite.processes import services_of
from moesaic.cli.suite.service_settings import check_settings
from moesaic.cli.terminal.outcome import CommandError, Exit

if TYPE_CHECKING:
    from moesaic.models.configuration.config import ModelConfig

FOR_CPUS = ("all-to-all", "edge")  # topologies


class Prepared(NamedTuple):
    """A suite that can start as far as its model, its settings and memory go."""

    options: SuiteOptions  # with the model's directory, so that no process asks the hub, and with devices
    config: "ModelConfig"
    settings: Settings  # of each service, by its name
    memory: SuiteMemory


def prepared(options: SuiteOptions) -> Prepared:
    """Check a suite's model, settings and memory, and download the model's weights once nothing is wrong.

    Raises:
        CommandError: something is wrong with them, or the model cannot be had.
    """
    found = planned(options)
    check_fits(found.options, found.config, found.settings, found.memory)
    found_model(options.model)
    check_model(found.options.model)
    return found


def planned(options: SuiteOptions, given: Sequence[int] = ()) -> Prepared:
    """Check a suite's settings, and plan its memory, by the model's configuration.

    Args:
        options: of the suite.
        given: memory of the machine, and of devices; empty: what is free.

    Raises:
        CommandError: something is wrong with them, or the model cannot be had.
    """
    options = replace(options, model=found_model(options.model, weights=False))
    config = check_config(options.model)
    num_experts, cores = config.moe.num_experts, usable_cores()
    settings = check_settings(services_of(options, num_experts, cores))
    config = _cut(config, settings)
    if devices := _devices_of(options, settings):
        available = memory_there_is(devices, given)
        options = replace(options, places=_places(options, config, settings, available))
        settings = check_settings(services_of(options, num_experts, cores))
    available = memory_there_is(chain.from_iterable(map(places_of, settings.values())), given)
    return Prepared(options, config, settings, plan_suite(options, config, settings, available))


def _cut(config: "ModelConfig", settings: Settings) -> "ModelConfig":
    from moesaic.errors import UnusableSettings
    from moesaic.models.configuration.context import with_context

    try:
        return with_context(config, getattr(settings["gateway"], "max_model_len", 0))
    except UnusableSettings as error:
        raise CommandError(str(error), Exit.USAGE) from error


def _devices_of(options: SuiteOptions, settings: Settings) -> tuple[str, ...]:
    """List the CUDA devices to share out; none if the suite is for CPUs, or names its device itself."""
    computing = [of for of in settings.values() if hasattr(of, "device")]
    if any("device" in of.model_fields_set for of in computing):
        return ()
    for_cpus = options.topology in FOR_CPUS
    for_cpus |= any(
        getattr(of, "quantization", "none") != "none" or getattr(of, "deterministic", False)
        for of in computing
    )
    return () if options.devices == "auto" and for_cpus else devices_named(options.devices)


def _places(
    options: SuiteOptions, config: "ModelConfig", settings: Settings, available: Mapping[str, int]
) -> dict[str, str]:
    devices = [place for place in available if place != MACHINE]
    anywhere = {
        name: of.model_copy(update={"device": devices[0]}) if hasattr(of, "device") else of
        for name, of in settings.items()
    }
    # Ranks may need more devices than there are; ``shared_out`` says so.
    places = {place for of in anywhere.values() for place in places_of(of)}
    least = min(available[device] for device in devices)
    plan = plan_suite(options, config, anywhere, dict.fromkeys(places, least) | dict(available))
    sizes: dict[str, list[int]] = {}
    for process in plan.processes:
        if process.place != MACHINE:
            # Ranks behind the first have its name and a number.
            sizes.setdefault(process.name.partition(".")[0], []).append(process.total)
    return shared_out(sizes, {device: available[device] for device in devices})
