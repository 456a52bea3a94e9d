// A CUDA driver library for tests: the environment variables FAKE_* set its results.
#include <cstddef>
#include <cstdio>
#include <cstdlib>

static int number(const char *name, int otherwise) {
  const char *text = std::getenv(name);
  return text ? std::atoi(text) : otherwise;
}

// FAKE_GPUS lists compute capabilities such as "9.0,7.5", one per device.
static int capability(int device, int which) {
  const char *text = std::getenv("FAKE_GPUS");
  int major = 0, minor = 0, length = 0, count = 0;
  for (; text && std::sscanf(text, "%d.%d%n", &major, &minor, &length) == 2; ++count) {
    if (count == device) return which == 75 ? major : minor;
    text += length;
    text += *text == ',';
  }
  return which ? -1 : count;
}

// Handles differ from indices, as the interface allows.
static const int first_handle = 40;

extern "C" {
int cuInit(unsigned) { return number("FAKE_INIT", 0); }
int cuDriverGetVersion(int *version) { return *version = number("FAKE_DRIVER", 12080), 0; }
int cuDeviceGetCount(int *count) { return *count = capability(-1, 0), 0; }
int cuDeviceGet(int *device, int index) { return *device = first_handle + index, number("FAKE_GET", 0); }
int cuDeviceGetName(char *name, int size, int device) {
  return std::snprintf(name, size, "Fake %d", device - first_handle), 0;
}
int cuDeviceGetAttribute(int *value, int which, int device) {
  return *value = capability(device - first_handle, which), 0;
}
#ifndef OLD
int cuDeviceTotalMem_v2(std::size_t *bytes, int device) {
  return *bytes = (std::size_t{80} << 30) + (device - first_handle), 0;
}
#endif
}
