// Stream: an order of work. The one protocol that HostStream and CudaStream follow: bind, copy in, run, copy out, ring.
// No verb waits for the work before it; nothing here synchronises.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "arena.h"
#include "doorbell.h"

namespace tensorrt_llm_ext {

// Owns a call into another language. `invoke` may throw Error; `drop` frees `object`.
class Call {
public:
    using Invoke = void (*)(void* object, const SlotRef& slot);
    using Drop = void (*)(void* object);

    Call() = default;
    Call(void* object, Invoke invoke, Drop drop) : object_(object), invoke_(invoke), drop_(drop) {}
    Call(Call&& other) noexcept : object_(std::exchange(other.object_, nullptr)), invoke_(other.invoke_), drop_(other.drop_) {}
    Call& operator=(Call&& other) noexcept {
        std::swap(object_, other.object_);
        std::swap(invoke_, other.invoke_);
        std::swap(drop_, other.drop_);
        return *this;
    }
    ~Call() {
        if (object_) drop_(object_);
    }

    void operator()(const SlotRef& slot) const { invoke_(object_, slot); }

private:
    void* object_ = nullptr;
    Invoke invoke_ = nullptr;
    Drop drop_ = nullptr;
};

// The first failure of a stream: it stays. Thread-safe.
class Failure {
public:
    void set(std::optional<uint64_t> batch, const Error& error);
    bool is_set() const { return is_set_.load(std::memory_order_acquire); }
    // Throws the error that `batch` ended with: the failure itself for the batch that failed, Error (closed) for any other.
    // What a call raised goes out once and is not kept: it refers to whoever waited, who refers to the stream.
    void raise_if_set(std::optional<uint64_t> batch);

private:
    std::mutex mutex_;
    std::atomic<bool> is_set_{false};
    std::optional<Error> error_;
    std::optional<uint64_t> batch_;
};

class Ticket;

class Stream : public std::enable_shared_from_this<Stream> {
public:
    virtual ~Stream() = default;
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    // The verbs, for one batch in this order: run (bind), copy_in, run (enqueue), copy_out, ring. They throw Error: plan out
    // of order, closed after close() or a failure, and what the library beneath said, which is this stream's end.
    void run(const SlotRef& slot, Call call);
    void copy_in(const SlotRef& slot);
    void copy_out(const SlotRef& slot);
    Ticket ring(const SlotRef& slot);  // without a slot: for whatever was enqueued so far

    // The stream waits here for release(). `shape_has_run` must hold: kernels load lazily, and the first launch of one
    // behind a wait that the host has not released deadlocks. Never for a slot with host inputs, read at enqueue.
    void arm(const SlotRef& slot, bool shape_has_run);
    void release();

    // Waits for the doorbell: true when it has reached `value`, false at `deadline`. Throws the error `batch` ended with.
    bool wait(uint32_t value, std::optional<uint64_t> batch, Clock::time_point deadline);
    bool has_rung(uint32_t value) const { return doorbell_->has_rung(value); }
    uint32_t last_written() const { return doorbell_->from_stream().value.load(std::memory_order_acquire); }

    void raise_if_ended() const;              // what it failed with, or that it was closed
    virtual bool is_idle() = 0;               // has all that was enqueued finished? Throws the sticky failure
    virtual bool is_quiet() noexcept = 0;     // can nothing that was enqueued touch memory any more?
    virtual uintptr_t handle() const = 0;     // what an engine's enqueue takes
    virtual uintptr_t image(const Slot& slot) const = 0;  // where the engine finds the slot's device part
    virtual size_t output_shift() const = 0;  // how much earlier outputs lie there than in the slot
    virtual void close(Clock::time_point deadline) = 0;   // throws Error (deadline) when work is left; idempotent
    virtual std::string state() = 0;          // for messages: what the stream is doing

protected:
    Stream(std::shared_ptr<Driver> driver, uint32_t first_value)
        : doorbell_(std::make_shared<Doorbell>(std::move(driver), first_value)), failure_(std::make_shared<Failure>()) {}

    virtual void enqueue_run(const SlotRef& slot, Call call) = 0;
    virtual void enqueue_copy_in(const SlotRef& slot) = 0;
    virtual void enqueue_copy_out(const SlotRef& slot) = 0;
    virtual void enqueue_write(uint32_t value) = 0;
    virtual void enqueue_wait(uint32_t value) = 0;
    virtual void notify() = 0;  // the host's line or the failure changed
    virtual bool await(uint32_t value, std::optional<uint64_t> batch, Clock::time_point deadline) = 0;

    const std::shared_ptr<Doorbell> doorbell_;
    const std::shared_ptr<Failure> failure_;
    std::atomic<bool> is_closed_{false};

private:
    template <class Enqueue>
    void attempt(std::optional<uint64_t> batch, Enqueue enqueue);

    std::mutex ringing_;  // doorbell values leave in order
};

// A batch in flight: slot, doorbell value, shapes. The only way to the outputs is wait().
class Ticket {
public:
    Ticket(SlotRef slot, std::shared_ptr<Stream> stream, uint32_t value);
    Ticket(Ticket&& other) noexcept;
    Ticket(const Ticket&) = delete;
    Ticket& operator=(const Ticket&) = delete;
    ~Ticket();

    // True when the batch has come back; false at `deadline`. Throws the error the batch ended with.
    bool wait(Clock::time_point deadline) { return stream_->wait(value_, batch_, deadline); }
    bool is_done() const { return stream_->has_rung(value_); }
    Error late(double waited_s) const;  // what a caller that gives up throws

    const SlotRef& slot() const { return slot_; }  // empty for a ring without one
    uint32_t value() const { return value_; }
    std::optional<uint64_t> batch() const { return batch_; }

private:
    SlotRef slot_;
    std::shared_ptr<Stream> stream_;
    uint32_t value_;
    std::optional<uint64_t> batch_;
    Clock::time_point rung_at_;
};

}  // namespace tensorrt_llm_ext
