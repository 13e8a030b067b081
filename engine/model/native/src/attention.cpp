// Attention in each format: compiled beside baton.cpp.
#include "attention.h"

namespace baton {

BATON_RUN_AS(kKvFp32);
BATON_RUN_AS(kKvBf16);
BATON_RUN_AS(kKvFp8);
BATON_RUN_AS(kKvInt8);
BATON_RUN_AS(kKvInt4);

}  // namespace baton
