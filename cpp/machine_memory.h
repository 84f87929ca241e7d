// How much memory this process may still take.
#pragma once

#include <cstddef>

namespace tensorrt_llm_ext {

// Bytes: what the machine has free, or what is left in this process's control groups, whichever is less. Page cache that
// can be dropped counts as free.
size_t free_memory();

}  // namespace tensorrt_llm_ext
