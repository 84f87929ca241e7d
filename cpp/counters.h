// Counters: what the module holds and did, over all its objects. The tests want what is held at zero after each test.
#pragma once

#include <atomic>
#include <cstdint>

namespace tensorrt_llm_ext {

struct Counters {
    // held now
    std::atomic<int64_t> slots_out{0};
    std::atomic<int64_t> tickets_open{0};
    std::atomic<int64_t> streams_open{0};
    std::atomic<int64_t> mapped_bytes{0};
    std::atomic<int64_t> device_bytes{0};
    // happened so far
    std::atomic<int64_t> allocations{0};         // mappings, device memory, growth of a queue
    std::atomic<int64_t> synchronisations{0};    // driver calls that may wait for the device, made while a ticket was open
    std::atomic<int64_t> destructor_errors{0};   // driver calls that failed where nothing can be raised
    std::atomic<int64_t> abandoned_bytes{0};     // memory never freed, because a device that hangs may still write to it
};

inline Counters counters;

}  // namespace tensorrt_llm_ext
