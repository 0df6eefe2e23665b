"""The fake device refuses and allows what CUDA does."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from moesaic.kernels.rms_norm import add_rms_norm
from moesaic.kernels.triton.add_rms_norm import add_rms_norm as add_rms_norm_on_gpu
from tests.fake_device.clocks import Clocks, DeviceFault
from tests.fake_device.cuda import fake_device


@pytest.fixture(autouse=True)
def clocks() -> Iterator[Clocks]:
    with fake_device(devices=2, memory_bytes=1 << 20) as clocks:
        yield clocks


def test_a_tensor_says_that_it_is_on_the_device() -> None:
    made = torch.zeros(2, 3, device="cuda")

    assert made.is_cuda
    assert made.device == torch.device("cuda", 0)
    assert (made[:, 1:] + 1).device.type == "cuda"


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([0, 1, 2], device="cuda"),
        lambda: torch.arange(3, device="cuda"),
        lambda: torch.arange(3).to("cuda"),
        lambda: torch.arange(3).cuda(),
        lambda: torch.from_numpy(np.arange(3)).to(torch.device("cuda", 0), non_blocking=True),
        lambda: torch.empty(3, dtype=torch.int64, device="cuda").copy_(torch.arange(3)),
        lambda: torch.full((3,), 1, device="cuda").cumsum(0) - 1,
        lambda: torch.arange(6, device="cuda").view(3, 2)[:, 0] // 2,
        lambda: torch.zeros(3, dtype=torch.int64, device="cuda").index_put_(
            (torch.arange(3),), torch.arange(3, device="cuda")
        ),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_numbers_come_back_by_a_copy(make: object, inference: bool) -> None:
    with torch.inference_mode(inference):
        made = make()  # type: ignore[operator]

        assert made.is_cuda
        assert made.tolist() == [0, 1, 2]
        assert made.cpu().numpy().tolist() == [0, 1, 2]
        assert made.cpu().device.type == "cpu"


@pytest.mark.parametrize(
    "mix",
    [
        lambda host, device: host + device,
        lambda host, device: device.add_(host),
        lambda host, device: host.add_(device),
        lambda host, device: torch.cat([host, device]),
        lambda host, device: device @ host,
        lambda host, device: torch.where(host > 0, device, device),
        lambda host, device: device.index_select(0, host.long()),
        lambda host, device: device.index_add_(0, host.long(), device),
        lambda host, device: host[device.long()],
        lambda host, device: device.index_put_((host.long(),), host),
        lambda host, device: torch.zeros(()).add_(device[0]),
        lambda host, device: device + device.to("cuda:1"),
        lambda host, device: torch.nn.functional.linear(host[None], device[None]),
    ],
)
def test_tensors_of_two_devices_are_refused(mix: object) -> None:
    with pytest.raises(RuntimeError, match="device"):
        mix(torch.ones(3), torch.ones(3, device="cuda"))  # type: ignore[operator]


@pytest.mark.parametrize(
    "mix",
    [
        lambda device: device * torch.tensor(2.0),
        lambda device: torch.where(device > 0, device + 1, torch.tensor(0.0)),
        lambda device: device[torch.tensor([0, 1, 2])] + 1,
        lambda device: device[torch.tensor([True, True, True])] + 1,
        lambda device: device.masked_fill(device > 0, torch.tensor(2.0)),
    ],
)
def test_numbers_and_indices_may_be_on_the_host(mix: object) -> None:
    mixed = mix(torch.ones(3, device="cuda"))  # type: ignore[operator]

    assert mixed.is_cuda
    assert mixed.tolist() == [2.0, 2.0, 2.0]


def test_the_memory_of_the_device_is_not_the_hosts() -> None:
    made = torch.ones(3, device="cuda")

    with pytest.raises(TypeError, match=r"Tensor\.cpu"):
        made.numpy()
    with pytest.raises(TypeError, match=r"Tensor\.cpu"):
        np.asarray(made)
    with pytest.raises(RuntimeError, match="pin"):
        made.pin_memory()


def test_memory_ends(clocks: Clocks) -> None:
    held = torch.empty(1 << 19, dtype=torch.uint8, device="cuda")
    view = held[1:]

    with pytest.raises(torch.OutOfMemoryError):
        torch.empty((1 << 19) + 1, dtype=torch.uint8, device="cuda")
    del held
    assert torch.cuda.mem_get_info()[0] == 1 << 19
    del view
    assert torch.cuda.mem_get_info() == (1 << 20, 1 << 20)


def test_a_copy_to_the_host_is_there_when_it_was_waited_for() -> None:
    host = torch.zeros(2, pin_memory=True)
    host.copy_(torch.ones(2, device="cuda"), non_blocking=True)
    done = torch.cuda.current_stream().record_event()
    assert host.isnan().all()

    done.synchronize()

    assert host.tolist() == [1.0, 1.0]


def test_an_event_of_before_the_copy_does_not_bring_it() -> None:
    host = torch.zeros(2, pin_memory=True)
    early = torch.cuda.current_stream().record_event()
    host.copy_(torch.ones(2, device="cuda"), non_blocking=True)

    early.synchronize()

    assert host.isnan().all()


def test_pinned_memory_must_not_change_before_its_copy_was_waited_for() -> None:
    host = torch.zeros(2).pin_memory()
    host.to("cuda", non_blocking=True)
    host += 1

    with pytest.raises(DeviceFault, match="pinned"):
        torch.cuda.synchronize()


def test_a_stream_must_wait_for_what_another_one_writes() -> None:
    side = torch.cuda.Stream()
    made = torch.ones(2, device="cuda")

    with torch.cuda.stream(side), pytest.raises(DeviceFault, match="let it wait"):
        made + 1
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made += 1
    with pytest.raises(DeviceFault, match="let it wait"):
        made + 1
    torch.cuda.current_stream().wait_event(side.record_event())

    assert made.tolist() == [2.0, 2.0]


def test_memory_must_not_be_given_back_while_another_stream_uses_it() -> None:
    def use(*, recorded: bool) -> None:
        side, made = torch.cuda.Stream(), torch.ones(2, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            made.sum()
        if recorded:
            made.record_stream(side)

    with fake_device() as clocks:
        use(recorded=True)
        assert not clocks.faults
    with pytest.raises(DeviceFault, match="given back"), fake_device():
        use(recorded=False)


def test_an_address_of_the_device_is_none_of_the_hosts() -> None:
    device = torch.ones(2, 8, device="cuda")

    with pytest.raises(RuntimeError, match="address of the device"):
        eval("device.data_ptr()", {"device": device, "__name__": "moesaic.kernels.rms_norm"})


def test_kernels_take_memory_of_the_device_only() -> None:
    rows, weight = torch.ones(2, 8, device="cuda"), torch.ones(8, device="cuda")

    summed, _ = add_rms_norm(rows, rows, weight, 1e-6)

    assert summed.is_cuda
    assert summed.tolist() == [[2.0] * 8] * 2
    with pytest.raises(ValueError, match="Triton"):
        add_rms_norm_on_gpu(rows, rows, weight.cpu(), 1e-6)
