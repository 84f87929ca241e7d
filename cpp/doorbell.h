// Doorbell: the numbers in pinned memory by which a stream and the host wait for each other, one 128-byte line each way, and
// one that nobody reads, for a write that only wakes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <new>

#include "pinned_memory.h"

namespace tensorrt_llm_ext {

class Doorbell {
public:
    struct alignas(128) Line {
        std::atomic<uint32_t> value;
    };
    static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

    // The lines begin at `first_value`. `driver` may be null.
    Doorbell(std::shared_ptr<Driver> driver, uint32_t first_value)
        : last_ring(first_value), last_arm(first_value), memory_(3 * sizeof(Line), std::move(driver)) {
        for (size_t line = 0; line < 3; ++line) new (memory_.data() + line * sizeof(Line)) Line{{first_value}};
    }

    // Has a line that holds `written` reached `value`? Cyclic, as CU_STREAM_WAIT_VALUE_GEQ compares.
    static bool reached(uint32_t written, uint32_t value) { return static_cast<int32_t>(written - value) >= 0; }

    Line& from_stream() { return reinterpret_cast<Line*>(memory_.data())[0]; }  // the stream writes, the host waits
    Line& from_host() { return reinterpret_cast<Line*>(memory_.data())[1]; }    // the host writes, the stream waits
    DeviceAddress from_stream_address() const { return memory_.device_address(); }
    DeviceAddress from_host_address() const { return memory_.device_address() + sizeof(Line); }
    DeviceAddress waking_address() const { return memory_.device_address() + 2 * sizeof(Line); }

    // The acquire load pairs with the stream's write: what the stream copied out before it is visible after this.
    bool has_rung(uint32_t value) { return reached(from_stream().value.load(std::memory_order_acquire), value); }
    void abandon() noexcept { memory_.abandon(); }
    void release() { from_host().value.store(last_arm, std::memory_order_release); }

    // What was asked of the stream last; only the thread that enqueues touches these.
    std::atomic<uint32_t> last_ring;
    std::atomic<uint32_t> last_arm;

private:
    PinnedMemory memory_;
};

}  // namespace tensorrt_llm_ext
