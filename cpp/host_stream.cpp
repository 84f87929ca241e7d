#include "host_stream.h"

#include <condition_variable>
#include <cstring>
#include <string>
#include <vector>

namespace tensorrt_llm_ext {

namespace {

constexpr size_t kFirstCapacity = 256;  // jobs: six a batch, two or three batches in flight
constexpr std::chrono::seconds kLastChance{5};

enum class Verb { run, copy_out, write, wait };

struct Job {
    Verb verb = Verb::run;
    SlotRef slot;
    Call call;
    uint32_t value = 0;
};

}  // namespace

class HostStream::Worker {
public:
    Worker(std::shared_ptr<Doorbell> doorbell, std::shared_ptr<Failure> failure)
        : doorbell_(std::move(doorbell)), failure_(std::move(failure)), jobs_(kFirstCapacity) {}

    void push(Job job) {
        {
            std::lock_guard lock(mutex_);
            if (num_jobs_ == jobs_.size()) grow();
            num_touching_ += bool(job.slot);
            jobs_[(first_ + num_jobs_++) % jobs_.size()] = std::move(job);
        }
        work_.notify_one();
    }

    void serve() {
        pthread_setname_np(pthread_self(), "host-stream");
        std::unique_lock lock(mutex_);
        while (true) {
            work_.wait(lock, [&] { return num_jobs_ > 0 || is_stopping_; });
            if (num_jobs_ == 0) return;
            Job job = std::move(jobs_[first_]);
            first_ = (first_ + 1) % jobs_.size();
            --num_jobs_;
            is_busy_ = true;
            lock.unlock();
            if (!failure_->is_set()) execute(job);  // after a failure what is left is dropped, not run
            lock.lock();
            is_busy_ = false;
            num_touching_ -= bool(job.slot);
            lock.unlock();
            progress_.notify_all();
            job = Job{};  // outside the lock: dropping a call or a slot may take other locks
            lock.lock();
        }
    }

    bool is_quiet() {
        std::lock_guard lock(mutex_);
        return num_touching_ == 0;
    }

    bool is_idle() {
        std::lock_guard lock(mutex_);
        return is_idle_locked();
    }

    // True when `is_met` became true by `deadline`. The worker wakes it after every job.
    template <class Condition>
    bool wait_until(Clock::time_point deadline, Condition is_met) {
        std::unique_lock lock(mutex_);
        return progress_.wait_until(lock, deadline, [&] { return is_met(); });
    }

    bool drain(Clock::time_point deadline) {
        return wait_until(deadline, [&] { return is_idle_locked(); });
    }

    void stop() {
        {
            std::lock_guard lock(mutex_);
            is_stopping_ = true;
        }
        work_.notify_all();
    }

    void notify() {
        { std::lock_guard lock(mutex_); }  // whoever checks a condition has either seen the change or is waiting by now
        work_.notify_all();
        progress_.notify_all();
    }

private:
    bool is_idle_locked() const { return num_jobs_ == 0 && !is_busy_; }

    void grow() {
        std::vector<Job> larger(2 * jobs_.size());
        for (size_t i = 0; i < num_jobs_; ++i) larger[i] = std::move(jobs_[(first_ + i) % jobs_.size()]);
        jobs_.swap(larger);
        first_ = 0;
        ++counters.allocations;
    }

    void execute(Job& job) noexcept {
        switch (job.verb) {
            case Verb::run:
                try {
                    job.call(job.slot);
                } catch (const Error& error) {
                    failure_->set(job.slot->batch(), error);
                }
                break;
            case Verb::copy_out:  // the outputs lie in the slot already; the stamp makes its way
                std::memcpy(job.slot->data() + job.slot->spans().returned_stamp, job.slot->data() + job.slot->spans().stamp, kStampBytes);
                break;
            case Verb::write: doorbell_->from_stream().value.store(job.value, std::memory_order_release); break;
            case Verb::wait: {
                std::unique_lock lock(mutex_);
                work_.wait(lock, [&] {
                    return Doorbell::reached(doorbell_->from_host().value.load(std::memory_order_acquire), job.value) || failure_->is_set();
                });
                break;
            }
        }
    }

    const std::shared_ptr<Doorbell> doorbell_;
    const std::shared_ptr<Failure> failure_;
    std::mutex mutex_;
    std::condition_variable work_;      // the worker waits
    std::condition_variable progress_;  // others wait for the worker
    std::vector<Job> jobs_;             // a ring: nothing is allocated while it is large enough
    size_t first_ = 0;
    size_t num_jobs_ = 0;
    size_t num_touching_ = 0;  // jobs that may touch a slot: those that hold one
    bool is_busy_ = false;
    bool is_stopping_ = false;
};

HostStream::HostStream(uint32_t first_value)
    : Stream(nullptr, first_value),
      worker_(std::make_shared<Worker>(doorbell_, failure_)),
      thread_([worker = worker_] { worker->serve(); }) {
    ++counters.streams_open;
}

HostStream::~HostStream() {
    const bool is_own_thread = std::this_thread::get_id() == thread_.get_id();  // a slot that the worker let go of was the last owner
    try {
        close(Clock::now() + kLastChance);
    } catch (const Error&) {
        if (!is_own_thread) ++counters.destructor_errors;
    }
}

void HostStream::close(Clock::time_point deadline) {
    if (is_closed_.exchange(true)) return;
    --counters.streams_open;
    // What has not begun is dropped: whoever waits for it learns so.
    failure_->set(std::nullopt, session_closed());
    release();
    const bool is_own_thread = std::this_thread::get_id() == thread_.get_id();  // a finalizer may run anywhere
    const bool is_drained = !is_own_thread && worker_->drain(deadline);
    worker_->stop();
    if (is_drained) return thread_.join();
    thread_.detach();  // it owns what it needs, and ends when its call returns
    throw Error(Kind::deadline, "the stream was closed with work unfinished", "every call returned before the deadline", "it " + state(),
                "give close() more time, or find out why the engine does not return");
}

bool HostStream::is_idle() {
    failure_->raise_if_set(std::nullopt);
    return worker_->is_idle();
}

bool HostStream::is_quiet() noexcept { return worker_->is_quiet(); }

std::string HostStream::state() { return worker_->is_idle() ? "is idle" : "is still running"; }

void HostStream::enqueue_run(const SlotRef& slot, Call call) { worker_->push({Verb::run, slot, std::move(call), 0}); }

void HostStream::enqueue_copy_in(const SlotRef&) {}  // the engine reads the slot

void HostStream::enqueue_copy_out(const SlotRef& slot) { worker_->push({Verb::copy_out, slot, {}, 0}); }

void HostStream::enqueue_write(uint32_t value) { worker_->push({Verb::write, {}, {}, value}); }

void HostStream::enqueue_wait(uint32_t value) { worker_->push({Verb::wait, {}, {}, value}); }

void HostStream::notify() { worker_->notify(); }

bool HostStream::await(uint32_t value, std::optional<uint64_t> batch, Clock::time_point deadline) {
    worker_->wait_until(deadline, [&] { return has_rung(value) || failure_->is_set(); });
    if (has_rung(value)) return true;
    failure_->raise_if_set(batch);
    return false;
}

}  // namespace tensorrt_llm_ext
