"""An attention worker: builds the parts, serves, drains."""

from functools import partial

import structlog

from moesaic.cluster.background import background, tended
from moesaic.cluster.lifecycle import run_service, stop_event
from moesaic.cluster.load_view import report_load
from moesaic.cluster.service import Availability, introduce, service
from moesaic.models.weights.digest import digesting
from moesaic.models.weights.served import with_own_dtype
from moesaic.native.own_thread import on_own_thread
from moesaic.services.attention.admin import AttentionAdmin
from moesaic.services.attention.brownout import follow_policy, tell_decisions
from moesaic.services.attention.engine import (
    open_engine,
    profile_of,
    record_of,
    warm_up,
    warm_up_degraded,
)
from moesaic.services.attention.loading import find_model, load_worker
from moesaic.services.attention.modes.table import MODES
from moesaic.services.attention.observing import observe
from moesaic.services.attention.ranks import follow
from moesaic.services.attention.settings import AttentionSettings
from moesaic.services.attention.substitution import SubstitutionFollower
from moesaic.v1 import attention_pb2_grpc

log = structlog.get_logger()


async def serve(settings: AttentionSettings) -> None:
    """Serve until SIGTERM or SIGINT. The parts start top down and stop bottom up, errors or not."""
    identity = introduce(settings, "attention")
    config, checkpoint = find_model(settings)
    settings = with_own_dtype(settings, config)
    open_mode = await on_own_thread(MODES[settings.dispatch], settings, config)
    api = AttentionAdmin(config, checkpoint.directory)
    register = partial(attention_pb2_grpc.add_AttentionServiceServicer_to_server, api)
    async with (
        stop_event() as stop,
        digesting(checkpoint.files) as weights_digest,
        service(settings, identity, register, stop) as process,
    ):
        process.status.model = settings.name_of_model
        worker = await load_worker(process, config, checkpoint, weights_digest)
        mode = await open_mode(worker)
        engine = await open_engine(worker, mode, api.requests.deliver, api.streams.change_blocks)
        api.attach(worker.config, engine, profile_of(worker), worker.load_gates)
        process.parts.callback(api.detach)
        lease = await process.registered("starting", **record_of(worker, mode, engine))
        await process.agree_on_weights(worker.settings.weights_of(worker.config.digest))
        process.status.data_address = mode.data_address
        await warm_up(worker, mode)
        if slowdown := await mode.start():
            api.streams.describe(profile_of(worker, slowdown))
        await process.enter(background(engine.run(), "engine"))
        substitutions = SubstitutionFollower(
            mode.degrading, worker.thread, partial(warm_up_degraded, worker)
        )
        bus, generation = process.bus, process.generation
        following = partial(follow_policy, bus, engine, substitutions)
        await process.enter(tended(following, "brownout"))
        telling = partial(tell_decisions, bus, engine, identity.worker_id, generation)
        await process.enter(tended(telling, "brownout decisions"))
        reporting = partial(report_load, bus, identity, generation, engine.take_report)
        await process.enter(tended(reporting, "load"))
        await process.enter(background(observe(api, process.status, engine), "observe"))
        availability = Availability(process, lease, api.drain, api.is_idle)
        await availability.begin(standby=settings.standby)
        log.info("worker.ready", dispatch=settings.dispatch, generation=process.generation)
        await availability.ended()
        await api.finish(process.admin.grace_s)


def run(settings: AttentionSettings) -> None:
    """Serve in this process, to its end."""
    if settings.tensor_parallel_rank:
        follow(settings)
    run_service(serve(settings))
