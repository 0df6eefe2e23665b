// What torch's C++ side asks of CUDA where it was built without: which device is current, and how many there are.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceType;
using c10::Stream;

thread_local c10::DeviceIndex current = 0;
c10::DeviceIndex count = 1;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  void setDevice(Device device) const override {
    if (device.has_index()) current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  c10::DeviceIndex deviceCount() const noexcept override { return count; }
};

}  // namespace

extern "C" {

void guard_devices(int devices) {
  static const Guard* guard = nullptr;
  count = static_cast<c10::DeviceIndex>(devices);
  if (guard == nullptr) {
    guard = new Guard();
    c10::impl::registerDeviceGuard(DeviceType::CUDA, guard);
  }
}

void set_current_device(int device) { current = static_cast<c10::DeviceIndex>(device); }

int current_device() { return current; }

}
