// Attention over KV of BATON_KV_FORMAT. Each format is compiled by itself.
#include "attention.h"

extern "C" void baton_attention(baton::Attention& attention, int index, const baton::Batch& batch,
                                int layer, const baton::Scoring& scoring, const float* query,
                                size_t query_stride, float* out, size_t out_stride,
                                float* scratch) {
  attention.run_as<BATON_KV_FORMAT>(index, batch, layer, scoring, query, query_stride, out,
                                    out_stride, scratch);
}
