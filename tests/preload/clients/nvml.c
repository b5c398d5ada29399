/* A stand-in for libnvidia-ml.so.1 with devices of 1 GiB. A handle is the position on the simulator's bus, from 0. */
#include <stddef.h>
#include <string.h>

struct memory {
  unsigned long long total, free, used;
};
struct memory_v2 {
  unsigned int version;
  unsigned long long total, reserved, free, used;
};
struct pci {
  char legacy[16];
  unsigned int domain, bus, device, id, subsystem;
  char text[32];
};

int nvmlDeviceGetMemoryInfo(void* device, struct memory* memory);
int nvmlDeviceGetMemoryInfo_v2(void* device, struct memory_v2* memory);
int nvmlDeviceGetPciInfo_v3(void* device, struct pci* pci);

int nvmlDeviceGetMemoryInfo(void* device, struct memory* memory) {
  (void)device;
  const struct memory told = {1 << 30, 600 << 20, (1 << 30) - (600 << 20)};
  *memory = told;
  return 0;
}

int nvmlDeviceGetMemoryInfo_v2(void* device, struct memory_v2* memory) {
  (void)device;
  memory->total = 1 << 30;
  memory->reserved = 24 << 20;
  memory->free = 600 << 20;
  memory->used = (1 << 30) - (624 << 20);
  return 0;
}

int nvmlDeviceGetPciInfo_v3(void* device, struct pci* pci) {
  memset(pci, 0, sizeof *pci);
  pci->domain = 0xffff; /* as the simulated device reports */
  pci->bus = 1 + (unsigned int)(size_t)device;
  return 0;
}
