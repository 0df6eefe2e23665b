"""Experts in this process are the reference of all others: here held to the model's own arithmetic."""

from typing import Any

import pytest
import torch

from moesaic.dispatch.local import LocalDispatcher
from moesaic.models.configuration.config import load_config
from moesaic.models.weights.checkpoint import Checkpoint
from tests.dispatch import dispatcher_contract as contract
from tests.dispatch.conftest import CPU, FP32


class TestLocal(
    contract.DispatcherContract, contract.OwnStepsContract, contract.BatchesAtOnceContract
):
    @pytest.fixture
    def opened(self, tiny_model: Any) -> contract.Opened:
        config, checkpoint = load_config(tiny_model.directory), Checkpoint(tiny_model.directory)
        one, other = (LocalDispatcher(checkpoint, config, FP32, CPU) for _ in range(2))
        return contract.Opened(one, other, config, has_bits=True)

    async def test_sums_are_those_of_the_network_that_was_exported(
        self, opened: contract.Opened, tiny_model: Any
    ) -> None:
        for layer in opened.config.moe_layers:
            rows = opened.rows(30, layer)
            with torch.no_grad():
                expected = tiny_model.network.layers[layer].mlp(rows)[0]

            got = await opened.dispatcher.dispatch(opened.dispatcher.begin_step(), layer, rows)

            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
