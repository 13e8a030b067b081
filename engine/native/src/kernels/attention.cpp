// Attention over KV of the format BATON_KV_FORMAT. This file is compiled once for each format.
#include "attention.h"

extern "C" void baton_attention(baton::Attention& attention, int index, const baton::Batch& batch,
                                int layer, const baton::Scoring& scoring, const float* query,
                                size_t query_stride, float* out, size_t out_stride,
                                float* scratch) {
  attention.run_as<BATON_KV_FORMAT>(index, batch, layer, scoring, query, query_stride, out,
                                    out_stride, scratch);
}
