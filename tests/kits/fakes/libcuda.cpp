// The part of CUDA's driver library that Baton calls, over host memory. An event is done when it is
// asked for the second time. A handle holds an address, so it can be opened in the same process.
#include <cstdint>
#include <cstdlib>
#include <cstring>

extern "C" {
struct Handle {
  unsigned char reserved[64];
};
static int context, questions;
static uint64_t allocation, allocation_bytes;  // the one block of "device" memory
static int num_open, num_pinned;

int cuInit(unsigned flags) { return flags == 0 ? 0 : 1; }
int cuDeviceGet(int* device, int ordinal) {
  *device = 40 + ordinal;
  return ordinal < 2 ? 0 : 101;
}
int cuDevicePrimaryCtxRetain(void** out, int device) {
  *out = &context;
  return device >= 40 ? 0 : 1;
}
int cuDevicePrimaryCtxRelease_v2(int device) { return device >= 40 ? 0 : 1; }
int cuCtxSetCurrent(void* given) { return given == &context ? 0 : 201; }
int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return 0;
}
int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  *stream = malloc(1);
  return flags == 1 && priority == -5 ? 0 : 1;
}
int cuStreamSynchronize(void* stream) { return stream ? 0 : 400; }
int cuStreamDestroy_v2(void* stream) {
  free(stream);
  return 0;
}
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t num_bytes, void* stream) {
  memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), num_bytes);
  return stream ? 0 : 400;
}
int cuEventCreate(void** event, unsigned flags) {
  *event = malloc(1);
  return flags == 2 ? 0 : 1;
}
int cuEventRecord(void* event, void* stream) {
  questions = 0;
  return event && stream ? 0 : 400;
}
int cuEventQuery(void* event) { return !event ? 400 : questions++ ? 0 : 600; }
int cuEventSynchronize(void* event) { return event ? 0 : 400; }
int cuEventDestroy_v2(void* event) {
  free(event);
  return 0;
}
int cuMemHostAlloc(void** memory, size_t num_bytes, unsigned flags) {
  *memory = malloc(num_bytes);
  num_pinned++;
  return flags == 1 ? 0 : 1;
}
int cuMemFreeHost(void* memory) {
  free(memory);
  num_pinned--;
  return 0;
}
int cuMemGetAddressRange_v2(uint64_t* base, size_t* size, uint64_t address) {
  if (address < allocation || address >= allocation + allocation_bytes) return 1;
  if (base) *base = allocation;
  if (size) *size = allocation_bytes;
  return 0;
}
int cuIpcGetMemHandle(Handle* handle, uint64_t address) {
  memset(handle, 7, sizeof *handle);
  memcpy(handle, &allocation, sizeof allocation);
  return address >= allocation ? 0 : 1;
}
int cuIpcOpenMemHandle_v2(uint64_t* base, Handle handle, unsigned flags) {
  memcpy(base, &handle, sizeof *base);
  if (flags != 1 || handle.reserved[63] != 7) return 400;
  num_open++;
  return 0;
}
int cuIpcCloseMemHandle(uint64_t base) {
  num_open--;
  return base == allocation ? 0 : 400;
}
int cuGetErrorString(int status, const char** text) {
  *text = status == 400 ? "invalid resource handle" : "some error";
  return 0;
}

// ------------------------------------------------------------ for tests
void fake_allocation(uint64_t address, uint64_t num_bytes) {
  allocation = address;
  allocation_bytes = num_bytes;
}
int fake_num_open() { return num_open; }
int fake_num_pinned() { return num_pinned; }
}
