#include "cuda_stream.h"

#include <algorithm>
#include <string>
#include <thread>

namespace tensorrt_llm_ext {

namespace {

using std::chrono::microseconds;

constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING: no order with the legacy default stream
constexpr unsigned kDefaultWrite = 0;  // CU_STREAM_WRITE_VALUE_DEFAULT: a system-wide fence before the write
constexpr unsigned kWaitGeq = 0;       // CU_STREAM_WAIT_VALUE_GEQ, cyclic

constexpr microseconds kSpin{20};
constexpr microseconds kFirstSleep{5}, kLongestSleep{200};
constexpr microseconds kPoll{1000};  // between two looks for a sticky error
constexpr std::chrono::seconds kLastChance{5};

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
}

// Runs on a thread of the driver. Host functions of one stream run in its order, so counting up is enough.
void ring_from_host(void* doorbell) { static_cast<Doorbell*>(doorbell)->from_stream().value.fetch_add(1, std::memory_order_acq_rel); }

}  // namespace

OwnedStream::OwnedStream(std::shared_ptr<Driver> driver) : driver_(std::move(driver)) {
    CurrentContext current(*driver_);
    DRIVER_TRY(*driver_, cuStreamCreate, &handle_, kNonBlocking);
}

OwnedStream::~OwnedStream() {
    if (handle_) CurrentContext::within(*driver_, [&] { DRIVER_TRY_NOEXCEPT(*driver_, cuStreamDestroy, handle_); });
}

DeviceMemory::DeviceMemory(std::shared_ptr<Driver> driver, size_t num_bytes) : driver_(std::move(driver)), num_bytes_(num_bytes) {
    CurrentContext current(*driver_);
    size_t free = 0, total = 0;
    DRIVER_TRY(*driver_, cuMemGetInfo, &free, &total);
    try {
        DRIVER_TRY(*driver_, cuMemAlloc, &address_, num_bytes);
    } catch (Error& error) {
        error.expected = std::to_string(num_bytes) + " bytes of device memory";
        error.found += "; " + std::to_string(free) + " of " + std::to_string(total) + " bytes are free";
        throw;
    }
    counters.device_bytes += static_cast<int64_t>(num_bytes);
    ++counters.allocations;
}

DeviceMemory::~DeviceMemory() {
    if (!address_) return;
    CurrentContext::within(*driver_, [&] { DRIVER_TRY_NOEXCEPT(*driver_, cuMemFree, address_); });
    counters.device_bytes -= static_cast<int64_t>(num_bytes_);
}

void DeviceMemory::abandon() noexcept {
    address_ = 0;
    counters.device_bytes -= static_cast<int64_t>(num_bytes_);
    counters.abandoned_bytes += static_cast<int64_t>(num_bytes_);
}

CudaStream::CudaStream(std::shared_ptr<Driver> driver, size_t slot_bytes, uint32_t first_value)
    : Stream(driver, first_value), driver_(std::move(driver)), last_woken_(first_value) {
    stream_.emplace(driver_);
    memory_.emplace(driver_, aligned(slot_bytes));
    handle_ = reinterpret_cast<uintptr_t>(stream_->handle());
    image_ = memory_->address();
    has_memory_operations_ = try_memory_operations(first_value);
    ++counters.streams_open;
}

// Whether stream memory operations work here is tried, not asked: a driver that has the symbol may refuse the call.
bool CudaStream::try_memory_operations(uint32_t first_value) {
    if (!driver_->has_stream_memory_operations()) return false;
    CurrentContext current(*driver_);
    const Result result = driver_->cuStreamWriteValue32(stream_->handle(), doorbell_->from_stream_address(), first_value, kDefaultWrite);
    if (result == kNotSupported) return false;
    if (result != kSuccess) fail(std::nullopt, "cuStreamWriteValue32: " + driver_->describe(result));
    return true;
}

CudaStream::~CudaStream() {
    try {
        close(Clock::now() + kLastChance);
    } catch (const Error&) {
        ++counters.destructor_errors;
    }
}

template <class Enqueue>
void CudaStream::with_stream(Enqueue enqueue) {
    std::lock_guard lock(mutex_);
    raise_if_ended();
    CurrentContext current(*driver_);
    enqueue(stream_->handle());
}

void CudaStream::enqueue_copy_in(const SlotRef& slot) {
    if (slot->spans().device_bytes() > memory_->num_bytes()) {
        throw Error(Kind::plan, "the batch does not fit the stream's device memory", std::to_string(memory_->num_bytes()) + " bytes",
                    std::to_string(slot->spans().device_bytes()) + " bytes", "open the stream with layout.slot_bytes");
    }
    with_stream([&](StreamHandle stream) {
        DRIVER_TRY(*driver_, cuMemcpyHtoDAsync, memory_->address(), static_cast<const void*>(slot->data()), slot->spans().copy_in_bytes(), stream);
    });
}

void CudaStream::enqueue_copy_out(const SlotRef& slot) {
    with_stream([&](StreamHandle stream) {
        DRIVER_TRY(*driver_, cuMemcpyDtoHAsync, static_cast<void*>(slot->data() + slot->spans().returned_stamp),
                   memory_->address() + slot->spans().stamp, slot->spans().copy_out_bytes(), stream);
    });
}

void CudaStream::enqueue_write(uint32_t value) {
    with_stream([&](StreamHandle stream) {
        if (has_memory_operations_) DRIVER_TRY(*driver_, cuStreamWriteValue32, stream, doorbell_->from_stream_address(), value, kDefaultWrite);
        else DRIVER_TRY(*driver_, cuLaunchHostFunc, stream, &ring_from_host, static_cast<void*>(doorbell_.get()));
    });
}

void CudaStream::enqueue_wait(uint32_t value) {
    if (!has_memory_operations_) {
        throw Error(Kind::plan, "this driver has no stream memory operations, so a stream cannot wait for the host", "cuStreamWaitValue32",
                    "not supported", "do not arm the doorbell on this machine");
    }
    with_stream([&](StreamHandle stream) {
        if (!waker_) waker_.emplace(driver_);
        DRIVER_TRY(*driver_, cuStreamWaitValue32, stream, doorbell_->from_host_address(), value, kWaitGeq);
    });
}

// A card that found the host's number too small looks again by itself every 10 us or so, and at once when another stream has
// written a number. So this write only saves time: what it may return, the armed stream will report.
void CudaStream::notify() {
    std::lock_guard lock(mutex_);
    const uint32_t value = doorbell_->last_arm;
    if (!waker_ || value == last_woken_) return;
    last_woken_ = value;
    CurrentContext::answer(*driver_, [&] { return driver_->cuStreamWriteValue32(waker_->handle(), doorbell_->waking_address(), value, kDefaultWrite); });
}

Result CudaStream::query() noexcept {
    std::lock_guard lock(mutex_);
    if (is_abandoned_) return kNotReady;
    if (!stream_) return kSuccess;
    return CurrentContext::answer(*driver_, [&] {
        const Result result = driver_->cuStreamQuery(stream_->handle());
        return result == kSuccess && waker_ ? driver_->cuStreamQuery(waker_->handle()) : result;
    });
}

bool CudaStream::is_quiet() noexcept {
    const Result result = query();
    return result == kSuccess || is_fatal(result);
}

void CudaStream::fail(std::optional<uint64_t> batch, const std::string& found) {
    Error error(Kind::backend, "the device failed", "doorbell value " + std::to_string(doorbell_->last_ring),
                found + "; it last wrote " + std::to_string(last_written()),
                "see dmesg and nvidia-smi; start a new process, open a new session and resume the run");
    if (batch) error.sentence += " while batch " + std::to_string(*batch) + " was in flight";
    failure_->set(batch, error);
    throw error;
}

bool CudaStream::is_idle() {
    failure_->raise_if_set(std::nullopt);
    const Result result = query();
    if (result != kSuccess && result != kNotReady) fail(std::nullopt, "cuStreamQuery: " + driver_->describe(result));
    return result == kSuccess;
}

// Ends the stream when the device has failed, or has finished without ringing.
void CudaStream::check(uint32_t value, std::optional<uint64_t> batch) {
    const Result result = query();
    if (result == kNotReady || (result == kSuccess && has_rung(value))) return;
    fail(batch, result == kSuccess ? "an idle stream that did not ring" : "cuStreamQuery: " + driver_->describe(result));
}

bool CudaStream::await(uint32_t value, std::optional<uint64_t> batch, Clock::time_point deadline) {
    auto now = Clock::now();
    for (const auto spin_end = std::min(deadline, now + kSpin); now < spin_end; now = Clock::now()) {
        if (has_rung(value)) return true;
        pause();
    }
    auto next_poll = now + kPoll;
    for (microseconds nap = kFirstSleep;; nap = std::min(nap * 2, kLongestSleep)) {
        if (has_rung(value)) return true;
        failure_->raise_if_set(batch);
        now = Clock::now();
        if (now >= deadline) return false;
        if (now >= next_poll) {
            check(value, batch);
            next_poll = now + kPoll;
        }
        std::this_thread::sleep_for(std::min<Clock::duration>(nap, deadline - now));
    }
}

bool CudaStream::finish(Clock::time_point deadline) {
    for (microseconds nap = kFirstSleep; !is_quiet(); nap = std::min(nap * 2, kLongestSleep)) {
        if (Clock::now() >= deadline) return false;
        std::this_thread::sleep_for(nap);
    }
    return true;
}

void CudaStream::close(Clock::time_point deadline) {
    if (is_closed_.exchange(true)) return;
    --counters.streams_open;
    release();
    const bool is_finished = finish(deadline);
    std::lock_guard lock(mutex_);
    if (!is_finished) abandon();
    waker_.reset();
    stream_.reset();
    memory_.reset();
    if (is_finished) return;
    Error error(Kind::deadline, "the stream was closed with work unfinished", "an idle stream before the deadline",
                "a stream that is still running; it last wrote " + std::to_string(last_written()),
                "give close() more time; if the device hangs, start a new process");
    failure_->set(std::nullopt, error);
    throw error;
}

// Destroying a stream or freeing memory would wait for the device, for ever when it hangs; and it may still write.
void CudaStream::abandon() {
    is_abandoned_ = true;
    stream_->abandon();
    if (waker_) waker_->abandon();
    memory_->abandon();
    doorbell_->abandon();
    new std::shared_ptr<Doorbell>(doorbell_);  // never freed: a host function may still ring it
}

std::string CudaStream::state() { return is_quiet() ? "is idle" : "is still running"; }

}  // namespace tensorrt_llm_ext
