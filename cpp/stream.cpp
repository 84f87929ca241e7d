#include "stream.h"

#include <string>

namespace tensorrt_llm_ext {

namespace {

// What a call raised, in words alone.
Error without_cause(Error error) {
    if (error.kind == Kind::call) error.kind = Kind::backend;
    error.cause.reset();
    return error;
}

}  // namespace

void Failure::set(std::optional<uint64_t> batch, const Error& error) {
    std::lock_guard lock(mutex_);
    if (error_) return;
    error_ = error;
    batch_ = batch;
    is_set_.store(true, std::memory_order_release);
}

void Failure::raise_if_set(std::optional<uint64_t> batch) {
    if (!is_set()) return;
    std::lock_guard lock(mutex_);
    if (batch && batch == batch_) {
        Error error = *error_;
        if (error_->kind == Kind::call) *error_ = without_cause(*error_);
        throw error;
    }
    if (error_->kind == Kind::closed) throw *error_;
    throw Error(Kind::closed,
                batch ? "batch " + std::to_string(*batch) + " did not come back: the session failed before it" : "the session failed earlier",
                "an open session", error_->sentence + ": " + error_->found, "open a new session, and submit again what did not come back");
}

void Stream::raise_if_ended() const {
    failure_->raise_if_set(std::nullopt);
    if (is_closed_) throw session_closed();
}

// Enqueues, or ends the stream with what went wrong. A plan that is refused was refused before anything was enqueued.
template <class Enqueue>
void Stream::attempt(std::optional<uint64_t> batch, Enqueue enqueue) {
    try {
        enqueue();
    } catch (Error& error) {
        if (error.kind == Kind::plan) throw;
        if (batch) error.sentence += " (batch " + std::to_string(*batch) + ")";
        failure_->set(batch, without_cause(error));
        notify();
        throw;
    }
}

void Stream::run(const SlotRef& slot, Call call) {
    raise_if_ended();
    const bool is_bind = slot->step() == Step::packed;  // leaves the batch where it is
    if (!is_bind) slot->advance("run", Step::copied_in, Step::ran, Step::ran);
    slot->used_by(shared_from_this());
    attempt(slot->batch(), [&] { enqueue_run(slot, std::move(call)); });
}

void Stream::copy_in(const SlotRef& slot) {
    raise_if_ended();
    slot->advance("copy_in", Step::packed, Step::packed, Step::copied_in);
    slot->used_by(shared_from_this());
    attempt(slot->batch(), [&] { enqueue_copy_in(slot); });
}

void Stream::copy_out(const SlotRef& slot) {
    raise_if_ended();
    slot->advance("copy_out", Step::ran, Step::ran, Step::copied_out);
    attempt(slot->batch(), [&] { enqueue_copy_out(slot); });
}

Ticket Stream::ring(const SlotRef& slot) {
    raise_if_ended();
    if (slot) slot->advance("ring", Step::copied_out, Step::copied_out, Step::rung);
    std::lock_guard lock(ringing_);
    const uint32_t value = doorbell_->last_ring + 1;
    attempt(slot ? std::optional(slot->batch()) : std::nullopt, [&] { enqueue_write(value); });
    doorbell_->last_ring = value;
    if (slot) slot->rings(value);
    return Ticket(slot, shared_from_this(), value);
}

void Stream::arm(const SlotRef& slot, bool shape_has_run) {
    raise_if_ended();
    if (slot && slot->layout().has_host_inputs()) {
        throw Error(Kind::plan, "a stream may not wait for the host before an engine that reads host_* inputs", "an engine without host inputs",
                    "one that reads them at enqueue, before the host has released the stream", "enqueue such an engine without arming");
    }
    if (!shape_has_run) {
        throw Error(Kind::plan, "a stream may not wait for the host before a shape that has never run",
                    "a captured graph, or a shape that has run before", "a shape that has not run",
                    "run the shape once without arming: its kernels load lazily, and loading behind an armed wait deadlocks");
    }
    std::lock_guard lock(ringing_);
    const uint32_t value = doorbell_->last_arm + 1;
    doorbell_->last_arm = value;  // before the stream waits for it, so that release() always covers it
    attempt(std::nullopt, [&] { enqueue_wait(value); });
}

void Stream::release() {
    doorbell_->release();
    notify();
}

bool Stream::wait(uint32_t value, std::optional<uint64_t> batch, Clock::time_point deadline) {
    if (has_rung(value)) return true;
    failure_->raise_if_set(batch);
    return await(value, batch, deadline);
}

Ticket::Ticket(SlotRef slot, std::shared_ptr<Stream> stream, uint32_t value)
    : slot_(std::move(slot)), stream_(std::move(stream)), value_(value), rung_at_(Clock::now()) {
    if (slot_) batch_ = slot_->batch();
    ++counters.tickets_open;
}

Ticket::Ticket(Ticket&& other) noexcept
    : slot_(std::move(other.slot_)), stream_(std::move(other.stream_)), value_(other.value_), batch_(other.batch_), rung_at_(other.rung_at_) {}

Ticket::~Ticket() {
    if (stream_) --counters.tickets_open;
}

Error Ticket::late(double waited_s) const {
    const std::chrono::duration<double> age = Clock::now() - rung_at_;
    const std::string who = batch_ ? "batch " + std::to_string(*batch_) : "what was enqueued";
    return Error(Kind::deadline, who + " did not come back in " + seconds_text(waited_s),
                 "doorbell value " + std::to_string(value_),
                 "the stream last wrote " + std::to_string(stream_->last_written()) + "; it " + stream_->state() + ", " +
                     seconds_text(age.count()) + " after the batch was enqueued",
                 "wait again, give a longer deadline, or build the engine with fewer tokens a batch");
}

}  // namespace tensorrt_llm_ext
