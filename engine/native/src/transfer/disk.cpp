// The functions for blocks on disk that Python calls through ctypes: see library.py.
#include "disk.h"

using namespace baton;

extern "C" {

// Computes the checksum of each header.
void baton_disk_header_checksums(const Header* headers, int64_t count, uint64_t* checksums) {
  for (int64_t i = 0; i < count; ++i) checksums[i] = header_checksum(headers[i]);
}

// Starts an engine and the engine's thread. Returns 0 or an errno.
int32_t baton_disk_open(const DiskFiles* files, DiskEngine** opened) {
  auto* engine = new DiskEngine(*files);
  const int error = engine->open();
  if (error) {
    delete engine;
  } else {
    *opened = engine;
  }
  return error;
}

// Never blocks. Any thread may call this function and the next two functions.
void baton_disk_submit(DiskEngine* engine, const DiskOperation* operations, int64_t count) {
  engine->submit(operations, count);
}

// Writes up to `most` outcomes. Returns the number of written outcomes.
int64_t baton_disk_reap(DiskEngine* engine, DiskOutcome* outcomes, int64_t most) {
  return engine->reap(outcomes, most);
}

void baton_disk_cancel(DiskEngine* engine, uint64_t tag) { engine->cancel(tag); }

// Returns 0 if the engine has not stopped in time. The engine and its thread then stay.
int32_t baton_disk_close(DiskEngine* engine, double timeout_s) {
  if (!engine->close(timeout_s)) return false;
  delete engine;
  return true;
}

}  // extern "C"
