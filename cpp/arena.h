// PinnedArena: one pinned mapping divided into slots. A slot has one owner and comes home when its last reference dies.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "layout.h"
#include "pinned_memory.h"

namespace tensorrt_llm_ext {

using Clock = std::chrono::steady_clock;

class PinnedArena;
class Stream;

// How far a slot's batch has come. A stream takes the steps in this order and refuses any other.
enum class Step { acquired, packed, copied_in, ran, copied_out, rung };
const char* name_of(Step step);

class Slot {
public:
    std::byte* data() const { return data_; }
    size_t num_bytes() const { return num_bytes_; }
    size_t index() const { return index_; }

    const Layout& layout() const;  // throws Error (plan) when nothing was packed
    const Sizes& sizes() const { return stamp().sizes; }
    const Spans& spans() const { return spans_; }
    Step step() const { return step_; }
    uint64_t batch() const { return stamp().batch; }
    const Stamp& stamp() const { return *reinterpret_cast<const Stamp*>(data_ + spans_.stamp); }
    const Stamp& returned_stamp() const { return *reinterpret_cast<const Stamp*>(data_ + spans_.returned_stamp); }

    // pack: takes the slot for a batch. Throws Error (plan) when a stream has used it since it was acquired, or it is too small.
    void begin(std::shared_ptr<const Layout> layout, const Stamp& stamp, const Spans& spans);

    // Stream: the batch goes from one of two steps to another. Throws Error (plan) out of order.
    void advance(const char* verb, Step from, Step or_from, Step to);

    // Stream: `user` may touch this slot until it has rung `value`, or, when it never will, until it is idle.
    void used_by(std::shared_ptr<Stream> user);
    void rings(uint32_t value) { value_ = value; }

private:
    friend class PinnedArena;
    friend class SlotRef;

    bool may_be_touched() const;
    void reset();

    std::byte* data_ = nullptr;
    size_t num_bytes_ = 0;
    size_t index_ = 0;
    std::shared_ptr<const Layout> layout_;
    Spans spans_{};
    Step step_ = Step::acquired;
    std::shared_ptr<Stream> user_;
    std::optional<uint32_t> value_;
    std::atomic<int> references_{0};
    std::shared_ptr<PinnedArena> home_;  // while it is out: a view outlives the arena's owner
};

// Owns a reference to a slot.
class SlotRef {
public:
    SlotRef() = default;
    explicit SlotRef(Slot* slot) noexcept : slot_(slot) { slot_->references_.fetch_add(1, std::memory_order_relaxed); }
    SlotRef(const SlotRef& other) noexcept : slot_(other.slot_) {
        if (slot_) slot_->references_.fetch_add(1, std::memory_order_relaxed);
    }
    SlotRef(SlotRef&& other) noexcept : slot_(std::exchange(other.slot_, nullptr)) {}
    SlotRef& operator=(SlotRef other) noexcept {
        std::swap(slot_, other.slot_);
        return *this;
    }
    ~SlotRef();

    Slot* operator->() const { return slot_; }
    Slot& operator*() const { return *slot_; }
    explicit operator bool() const { return slot_ != nullptr; }

private:
    Slot* slot_ = nullptr;
};

class PinnedArena : public std::enable_shared_from_this<PinnedArena> {
public:
    struct Stats {
        size_t mapped_bytes, num_slots, slots_out;
        uint64_t acquired, waited;
        bool is_huge;
    };

    // Throws Error (memory) with the numbers when the machine has less.
    static std::shared_ptr<PinnedArena> open(size_t slot_bytes, size_t num_slots, std::shared_ptr<Driver> driver);
    ~PinnedArena();

    // A free slot, or an empty reference when none came home before `deadline`. Throws Error (closed).
    SlotRef acquire(Clock::time_point deadline);
    // Gives out no more slots and wakes who waits. The memory goes with the last slot.
    void close();

    size_t slot_bytes() const { return slot_bytes_; }
    size_t num_slots() const { return slots_.size(); }
    Stats stats() const;
    Error none_free(double waited_s) const;  // what a caller that gives up throws

private:
    friend class SlotRef;

    PinnedArena(size_t slot_bytes, size_t num_slots, std::shared_ptr<Driver> driver);
    void come_home(Slot* slot) noexcept;
    Slot* take_free();

    const size_t slot_bytes_;
    PinnedMemory memory_;
    std::vector<Slot> slots_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<Slot*> free_;
    bool is_closed_ = false;
    uint64_t acquired_ = 0;
    uint64_t waited_ = 0;
};

}  // namespace tensorrt_llm_ext
