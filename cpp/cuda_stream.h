// CudaStream: a stream of the CUDA driver, and the device memory that mirrors one slot. One is enough for any number of
// batches in flight: the stream's order keeps them apart.
#pragma once

#include "stream.h"

namespace tensorrt_llm_ext {

// Owns a CUstream.
class OwnedStream {
public:
    explicit OwnedStream(std::shared_ptr<Driver> driver);
    ~OwnedStream();
    OwnedStream(const OwnedStream&) = delete;
    OwnedStream& operator=(const OwnedStream&) = delete;

    StreamHandle handle() const { return handle_; }
    void abandon() noexcept { handle_ = nullptr; }

private:
    std::shared_ptr<Driver> driver_;
    StreamHandle handle_ = nullptr;
};

// Owns device memory.
class DeviceMemory {
public:
    DeviceMemory(std::shared_ptr<Driver> driver, size_t num_bytes);
    ~DeviceMemory();
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;

    DeviceAddress address() const { return address_; }
    size_t num_bytes() const { return num_bytes_; }
    void abandon() noexcept;

private:
    std::shared_ptr<Driver> driver_;
    DeviceAddress address_ = 0;
    size_t num_bytes_;
};

class CudaStream : public Stream {
public:
    // `slot_bytes`: the largest batch that will pass, as layout.slot_bytes() says.
    CudaStream(std::shared_ptr<Driver> driver, size_t slot_bytes, uint32_t first_value = 0);
    ~CudaStream() override;

    bool is_idle() override;
    bool is_quiet() noexcept override;
    uintptr_t handle() const override { return handle_; }
    uintptr_t image(const Slot&) const override { return image_; }
    size_t output_shift() const override { return kStampBytes; }
    void close(Clock::time_point deadline) override;
    std::string state() override;
    bool has_memory_operations() const { return has_memory_operations_; }

protected:
    void enqueue_run(const SlotRef& slot, Call call) override { call(slot); }
    void enqueue_copy_in(const SlotRef& slot) override;
    void enqueue_copy_out(const SlotRef& slot) override;
    void enqueue_write(uint32_t value) override;
    void enqueue_wait(uint32_t value) override;
    void notify() override;
    bool await(uint32_t value, std::optional<uint64_t> batch, Clock::time_point deadline) override;

private:
    template <class Enqueue>
    void with_stream(Enqueue enqueue);
    bool try_memory_operations(uint32_t first_value);
    Result query() noexcept;
    bool finish(Clock::time_point deadline);
    [[noreturn]] void fail(std::optional<uint64_t> batch, const std::string& found);
    void check(uint32_t value, std::optional<uint64_t> batch);
    void abandon();

    const std::shared_ptr<Driver> driver_;
    std::mutex mutex_;  // the stream is there while it is held
    std::optional<OwnedStream> stream_;
    std::optional<OwnedStream> waker_;  // there once the stream has been armed
    uint32_t last_woken_;
    std::optional<DeviceMemory> memory_;
    uintptr_t handle_;
    uintptr_t image_;
    bool has_memory_operations_;
    std::atomic<bool> is_abandoned_{false};
};

}  // namespace tensorrt_llm_ext
