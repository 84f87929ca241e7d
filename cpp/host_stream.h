// HostStream: one worker thread that does its work in order. The slot itself is the device's memory, so nothing is copied.
#pragma once

#include <thread>

#include "stream.h"

namespace tensorrt_llm_ext {

class HostStream : public Stream {
public:
    explicit HostStream(uint32_t first_value = 0);
    ~HostStream() override;

    bool is_idle() override;
    bool is_quiet() noexcept override;
    uintptr_t handle() const override { return 0; }
    uintptr_t image(const Slot& slot) const override { return reinterpret_cast<uintptr_t>(slot.data()); }
    size_t output_shift() const override { return 0; }
    void close(Clock::time_point deadline) override;
    std::string state() override;

protected:
    void enqueue_run(const SlotRef& slot, Call call) override;
    void enqueue_copy_in(const SlotRef& slot) override;
    void enqueue_copy_out(const SlotRef& slot) override;
    void enqueue_write(uint32_t value) override;
    void enqueue_wait(uint32_t value) override;
    void notify() override;
    bool await(uint32_t value, std::optional<uint64_t> batch, Clock::time_point deadline) override;

private:
    class Worker;  // what the thread needs; it outlives the stream when a call never returns

    std::shared_ptr<Worker> worker_;
    std::thread thread_;
};

}  // namespace tensorrt_llm_ext
