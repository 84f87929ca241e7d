#include "pinned_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "machine_memory.h"

namespace tensorrt_llm_ext {

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = 2 << 20;
constexpr size_t kSmall = 64 << 20;  // asked for without a look: a machine whose memory grows on demand may say that none is free
constexpr unsigned kDeviceMap = 2;  // CU_MEMHOSTREGISTER_DEVICEMAP

Error too_much(size_t needed, const std::string& found) {
    return Error(Kind::memory, "the pinned memory for this engine's batches cannot be had", std::to_string(needed) + " bytes",
                 found, "build the engine with smaller limits (max_num_tokens, max_padded_tokens), or free memory");
}

}  // namespace

Mapping::Mapping(size_t wanted) {
    if (const size_t free = free_memory(); wanted > std::max(free, kSmall)) {  // or the kernel kills us while we touch it
        throw too_much(wanted, std::to_string(free) + " bytes free");
    }
    const size_t unit = wanted >= kHugePage ? kHugePage : kPage;
    num_bytes = (std::max<size_t>(wanted, 1) + unit - 1) / unit * unit;
    const int protection = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
    void* mapped = unit == kHugePage ? mmap(nullptr, num_bytes, protection, flags | MAP_HUGETLB, -1, 0) : MAP_FAILED;
    is_huge = mapped != MAP_FAILED;
    if (!is_huge) mapped = mmap(nullptr, num_bytes, protection, flags, -1, 0);
    if (mapped == MAP_FAILED) throw too_much(wanted, std::string("mmap: ") + std::strerror(errno));
    data = static_cast<std::byte*>(mapped);
    if (!is_huge && unit == kHugePage) madvise(data, num_bytes, MADV_HUGEPAGE);  // a wish: ordinary pages do as well
    for (size_t at = 0; at < num_bytes; at += kPage) static_cast<volatile std::byte*>(data)[at] = std::byte{0};
    counters.mapped_bytes += static_cast<int64_t>(num_bytes);
    ++counters.allocations;
}

Mapping::~Mapping() {
    munmap(data, num_bytes);
    counters.mapped_bytes -= static_cast<int64_t>(num_bytes);
}

Registration::Registration(std::shared_ptr<Driver> driver, const Mapping& mapping) : driver_(std::move(driver)), data_(mapping.data) {
    CurrentContext current(*driver_);
    DRIVER_TRY(*driver_, cuMemHostRegister, static_cast<void*>(data_), mapping.num_bytes, kDeviceMap);
}

Registration::~Registration() {
    CurrentContext::within(*driver_, [&] { DRIVER_TRY_NOEXCEPT(*driver_, cuMemHostUnregister, static_cast<void*>(data_)); });
}

DeviceAddress Registration::device_address() const {
    CurrentContext current(*driver_);
    DeviceAddress address;
    DRIVER_TRY(*driver_, cuMemHostGetDevicePointer, &address, static_cast<void*>(data_), 0u);
    return address;
}

PinnedMemory::PinnedMemory(size_t num_bytes, std::shared_ptr<Driver> driver) : parts_(std::make_unique<Parts>(num_bytes)) {
    if (driver) parts_->registration.emplace(driver, parts_->mapping);
    device_address_ = driver ? parts_->registration->device_address() : reinterpret_cast<uintptr_t>(data());
}

PinnedMemory::~PinnedMemory() {
    if (is_abandoned_) parts_.release();  // never freed
}

void PinnedMemory::abandon() noexcept {
    if (std::exchange(is_abandoned_, true)) return;
    counters.mapped_bytes -= static_cast<int64_t>(num_bytes());
    counters.abandoned_bytes += static_cast<int64_t>(num_bytes());
}

}  // namespace tensorrt_llm_ext
