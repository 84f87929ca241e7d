#include "arena.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>

#include "stream.h"

namespace tensorrt_llm_ext {

namespace {

constexpr std::chrono::milliseconds kFencePoll{1};    // between two looks at a slot that a stream may still touch
constexpr std::chrono::seconds kLastChance{2};        // for such slots when the arena dies

}  // namespace

const char* name_of(Step step) {
    static constexpr const char* kNames[] = {"acquired", "packed", "copied in", "run", "copied out", "rung"};
    return kNames[static_cast<int>(step)];
}

const Layout& Slot::layout() const {
    if (!layout_) throw Error(Kind::plan, "nothing was packed into this slot", "a batch", "an empty slot", "call pack first");
    return *layout_;
}

void Slot::begin(std::shared_ptr<const Layout> layout, const Stamp& stamp, const Spans& spans) {
    if (user_) {
        throw Error(Kind::plan, "slot " + std::to_string(index_) + " was used by a stream since it was acquired", "a slot fresh from acquire",
                    std::string("a batch that was ") + name_of(step_), "acquire a slot for every batch");
    }
    if (spans.end > num_bytes_) {
        throw Error(Kind::plan, "the batch does not fit its slot", std::to_string(num_bytes_) + " bytes", std::to_string(spans.end) + " bytes",
                    "open the arena with layout.slot_bytes");
    }
    layout_ = std::move(layout);
    spans_ = spans;
    step_ = Step::packed;
    std::memset(data_ + spans.stamp, 0, 2 * kStampBytes);  // the returned stamp too: only a copy out can fill it
    std::memcpy(data_ + spans.stamp, &stamp, sizeof(stamp));
}

void Slot::advance(const char* verb, Step from, Step or_from, Step to) {
    if (step_ != from && step_ != or_from) {
        throw Error(Kind::plan, std::string(verb) + " is out of order", std::string("a batch that was ") + name_of(from),
                    std::string("one that was ") + name_of(step_), "pack, run (bind), copy_in, run (enqueue), copy_out, ring: in this order");
    }
    step_ = to;
}

void Slot::used_by(std::shared_ptr<Stream> user) {
    if (user_ && user_ != user) {
        throw Error(Kind::plan, "slot " + std::to_string(index_) + " is in use by another stream", "one stream a batch", "two",
                    "acquire a slot for every batch");
    }
    user_ = std::move(user);
}

bool Slot::may_be_touched() const { return user_ && !(value_ ? user_->has_rung(*value_) : false) && !user_->is_quiet(); }

void Slot::reset() {
    layout_.reset();
    user_.reset();
    value_.reset();
    step_ = Step::acquired;
}

SlotRef::~SlotRef() {
    if (!slot_ || slot_->references_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    const std::shared_ptr<PinnedArena> home = std::move(slot_->home_);  // may be the last owner of the arena
    home->come_home(slot_);
}

std::shared_ptr<PinnedArena> PinnedArena::open(size_t slot_bytes, size_t num_slots, std::shared_ptr<Driver> driver) {
    if (slot_bytes == 0 || num_slots == 0 || slot_bytes > SIZE_MAX / 2 / num_slots) {
        throw Error(Kind::memory, "an arena of this size cannot be", "at least 1 slot of at least 1 byte, within the address space",
                    std::to_string(num_slots) + " slots of " + std::to_string(slot_bytes) + " bytes", "take the size from layout.slot_bytes");
    }
    return std::shared_ptr<PinnedArena>(new PinnedArena(aligned(slot_bytes), num_slots, std::move(driver)));
}

PinnedArena::PinnedArena(size_t slot_bytes, size_t num_slots, std::shared_ptr<Driver> driver)
    : slot_bytes_(slot_bytes), memory_(slot_bytes * num_slots, std::move(driver)), slots_(num_slots) {
    free_.reserve(num_slots);
    for (size_t i = num_slots; i-- > 0;) {
        slots_[i].data_ = memory_.data() + i * slot_bytes;
        slots_[i].num_bytes_ = slot_bytes;
        slots_[i].index_ = i;
        free_.push_back(&slots_[i]);
    }
}

PinnedArena::~PinnedArena() {
    const auto deadline = Clock::now() + kLastChance;
    for (const Slot& slot : slots_) {
        while (slot.may_be_touched()) {
            if (Clock::now() >= deadline) {
                memory_.abandon();
                return;
            }
            std::this_thread::sleep_for(kFencePoll);
        }
    }
}

Slot* PinnedArena::take_free() {
    const auto found = std::find_if(free_.rbegin(), free_.rend(), [](const Slot* slot) { return !slot->may_be_touched(); });
    if (found == free_.rend()) return nullptr;
    Slot* slot = *found;
    free_.erase(std::next(found).base());
    return slot;
}

SlotRef PinnedArena::acquire(Clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    for (bool has_waited = false;; has_waited = true) {
        if (is_closed_) throw session_closed();
        if (Slot* slot = take_free()) {
            slot->reset();
            slot->home_ = shared_from_this();
            ++acquired_;
            waited_ += has_waited;
            ++counters.slots_out;
            return SlotRef(slot);
        }
        const auto now = Clock::now();
        if (now >= deadline) return {};
        // A slot at home that a stream may still touch comes free without a notification.
        changed_.wait_until(lock, free_.empty() ? deadline : std::min(deadline, now + kFencePoll));
    }
}

void PinnedArena::come_home(Slot* slot) noexcept {
    if (!slot->may_be_touched()) slot->reset();  // outside the lock: may be the last owner of a stream
    {
        std::lock_guard lock(mutex_);
        free_.push_back(slot);  // within its reserved capacity
        --counters.slots_out;
    }
    changed_.notify_one();
}

void PinnedArena::close() {
    {
        std::lock_guard lock(mutex_);
        is_closed_ = true;
    }
    changed_.notify_all();
}

PinnedArena::Stats PinnedArena::stats() const {
    std::lock_guard lock(mutex_);
    return {memory_.num_bytes(), slots_.size(), slots_.size() - free_.size(), acquired_, waited_, memory_.is_huge()};
}

Error PinnedArena::none_free(double waited_s) const {
    std::lock_guard lock(mutex_);
    std::string found = std::to_string(slots_.size() - free_.size()) + " slots out";
    if (!free_.empty()) found += ", " + std::to_string(free_.size()) + " at home that a stream may still write to";
    return Error(Kind::deadline, "no slot came free in " + seconds_text(waited_s), "one free slot of " + std::to_string(slots_.size()), found,
                 "wait for a ticket before submitting the next batch, let go of views, or open the session with more slots");
}

}  // namespace tensorrt_llm_ext
